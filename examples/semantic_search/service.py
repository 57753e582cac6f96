"""The search behind the page: it reads and encodes the corpus in the background, answers queries meanwhile, and takes new documents."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from accel.patterns import DynamicBatcher
from examples.semantic_search.corpus import Document, read_documents
from examples.semantic_search.encoding import TextEncoder, load_encoder
from examples.semantic_search.index import Index, Query
from examples.semantic_search.rank import Lexicon, lexical_words

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

Array = np.ndarray[Any, Any]

CAPACITY = 8192
"""Documents that fit into the index: the corpus, and some 3,000 more."""

CHUNK = 256
"""Documents that are encoded, and become searchable, at a time."""

FOLDER = "SEARCH_MODEL"
"""Environment variable with the folder of a ``transformers`` model."""

_MOST = 50
"""Results of a ranking; a request gets the first of them."""

_log = logging.getLogger(__name__)


class Search:
    """What requests work with; made by :func:`open_search`.

    Attributes
    ----------
    index
        Where the documents are on the device.
    encoder
        Gives an item of a text its vector.
    phase
        ``"reading"`` the docstrings, ``"encoding"`` them, ``"ready"`` or ``"failed"``.
    total
        Documents of the corpus; 0 while they are read.
    """

    def __init__(
        self, index: Index, texts: TextEncoder, encoder: accel.ModelService, ranker: DynamicBatcher[Query, tuple[Array, Array]]
    ) -> None:
        self.index = index
        self.encoder = encoder
        self.phase = "reading"
        self.total = 0
        self._texts = texts
        self._ranker = ranker
        self._documents: list[Document] = []
        self._lexicon = Lexicon([])

    async def find(self, text: str, k: int) -> list[tuple[Document, float]]:
        """Return the ``k`` best documents for a text, and their scores, the best first."""
        lexicon = self._lexicon
        vector = await self.encoder.submit(self._texts.query(text), timeout=10.0)
        scores, rows = await self._ranker.submit(Query(vector, lexicon.query(text)), timeout=10.0)
        return [(self._documents[row], float(score)) for score, row in zip(scores[:k], rows[:k], strict=True)]

    async def insert(self, document: Document) -> int:
        """Add a document, and return its row."""
        return await self._add([document])

    async def send_poison(self) -> None:
        """Send a request that kills the process of the device's context, a new one each time.

        Raises
        ------
        PoisonedInputError
            It was found.
        LibraryError
            The model checks its lookups: it has only refused this one.
        """
        await self.encoder.submit(self._texts.poison())

    async def load(self) -> None:
        """Read and encode the corpus."""
        try:
            documents = await _read_corpus()
            self._lexicon = await asyncio.to_thread(lambda: Lexicon([lexical_words(document) for document in documents]))
            self.total, self.phase = len(documents), "encoding"
            for start in range(0, len(documents), CHUNK):
                await self._add(documents[start : start + CHUNK])
            self.phase = "ready"
        except Exception:
            self.phase = "failed"
            _log.exception("the corpus could not be loaded")

    async def _add(self, documents: Sequence[Document]) -> int:
        def prepare() -> tuple[list[Any], Array, Array]:
            rows = [self._lexicon.row(lexical_words(document)) for document in documents]
            return (
                [self._texts.document(document) for document in documents],
                np.stack([row[0] for row in rows]),
                np.stack([row[1] for row in rows]),
            )

        items, terms, weights = await asyncio.to_thread(prepare)
        vectors = await asyncio.gather(*map(self.encoder.submit, items))
        row = await self.index.add(np.stack(vectors), terms, weights)
        self._documents += documents  # no other task runs between the two lines, so rows and documents agree
        return row


@contextlib.asynccontextmanager
async def open_search(device: accel.Device) -> AsyncIterator[Search]:
    """Serve from the start; documents arrive in the background. The environment variable ``SEARCH_MODEL`` names the folder of another encoder."""
    folder = os.environ.get(FOLDER)
    texts = await load_encoder(device, Path(folder) if folder else None)
    index = await Index.create(device, CAPACITY, texts.dimensions)
    await index.warm_up(_MOST)

    async def rank(queries: list[Query]) -> list[tuple[Array, Array]]:
        return await index.search(queries, _MOST)

    # With spares the quarantine is open from the start too, and costs as much: queries that wait there for their trial do not wait for its imports.
    idle = math.inf if device.info().standby != "none" else 10.0
    # Ranking twice does no harm, so a batch that a fault cuts short is tried again: idempotent.
    async with (
        accel.serve(texts.model, quarantine_idle=idle) as encoder,
        DynamicBatcher(rank, max_items=16, device=device, idempotent=True) as ranker,
    ):
        search = Search(index, texts, encoder, ranker)
        loading = asyncio.create_task(search.load(), name="load-corpus")
        try:
            yield search
        finally:
            loading.cancel()
            await asyncio.wait([loading])


async def _read_corpus() -> list[Document]:
    """Read the docstrings in a process of their own: importing three packages would hold the GIL for seconds."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.semantic_search.corpus", "--json"), stdout=asyncio.subprocess.PIPE, limit=1 << 24
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"reading the corpus ended with status {process.returncode}")
    return await asyncio.to_thread(lambda: read_documents(output.decode().splitlines()))
