"""The index: vectors and TF-IDF rows of all documents in durable memory of a device, and the ranking of queries there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from examples.semantic_search.encoder import DIMENSIONS
from examples.semantic_search.rank import LEXICAL_WEIGHT, ROW, TERMS

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Query:
    """A query as numbers.

    Attributes
    ----------
    vector
        Of the encoder, float32 (dimensions,).
    lexical
        Of :meth:`Lexicon.query`, float32 (TERMS,).
    """

    vector: Array
    lexical: Array


class Index:
    """Documents as rows of three durable buffers; made by :meth:`create`. Rows are only added.

    A durable buffer stays valid through faults of the device. One that was being written at a fault is torn, and is then written again from the copy that
    the host keeps.

    Parameters
    ----------
    device
        Where the index is.
    rows
        On the host: vectors, float32 (capacity, dimensions); terms, int32 (capacity, ROW); weights, float32 (capacity, ROW).
    refs
        The same on the device.
    """

    def __init__(self, device: accel.Device, rows: tuple[Array, ...], refs: tuple[accel.AccelRef, ...]) -> None:
        self.device = device
        self.count = 0
        self._rows = rows
        self._refs = refs
        self._writing = asyncio.Lock()

    @classmethod
    async def create(cls, device: accel.Device, capacity: int, dimensions: int = DIMENSIONS) -> Index:
        """Make an empty index with room for ``capacity`` documents, whose vectors have ``dimensions`` elements."""
        rows = (np.zeros((capacity, dimensions), np.float32), np.zeros((capacity, ROW), np.int32), np.zeros((capacity, ROW), np.float32))
        return cls(device, rows, tuple([await device.put(array, durable=True) for array in rows]))

    async def warm_up(self, k: int) -> None:
        """Search all rows once, before there are documents: a GPU's kernels are compiled at their first use, which may take longer than a request waits."""
        vectors = self._rows[0]
        await self._rank([Query(np.zeros(vectors.shape[1], np.float32), np.zeros(TERMS, np.float32))], k, len(vectors))

    async def add(self, vectors: Array, terms: Array, weights: Array) -> int:
        """Add documents, and return the row of the first one. They are found from the next search on.

        Raises
        ------
        InvalidArgumentError
            There is no room for them.
        """
        async with self._writing:
            start, stop = self.count, self.count + len(vectors)
            if stop > len(self._rows[0]):
                raise accel.InvalidArgumentError(
                    f"{stop} documents do not fit into an index of {len(self._rows[0])}", remedy="Create it with more capacity."
                )
            for row, new in zip(self._rows, (vectors, terms, weights), strict=True):
                row[start:stop] = new
            try:
                for ref, row in zip(self._refs, self._rows, strict=True):
                    await self.device.put(row[start:stop], out=ref[start:stop])
            except (accel.ContextPoisonedError, accel.HostDiedError, accel.StaleRefError):
                await self._write_all()
            self.count = stop
            return start

    async def search(self, queries: Sequence[Query], k: int) -> list[tuple[Array, Array]]:
        """Return the scores, float32, and the rows, int64, of the ``k`` best documents of each query, the best first; fewer where there are fewer."""
        try:
            return await self._search(queries, k)
        except accel.StaleRefError as error:
            if error.reason != "torn":
                raise
        async with self._writing:
            await self._write_all()
        return await self._search(queries, k)

    async def _search(self, queries: Sequence[Query], k: int) -> list[tuple[Array, Array]]:
        if not self.count:
            return [(np.zeros(0, np.float32), np.zeros(0, np.int64)) for _ in queries]
        return await self._rank(queries, k, self.count)

    async def _rank(self, queries: Sequence[Query], k: int, count: int) -> list[tuple[Array, Array]]:
        vectors, terms, weights = (ref[:count] for ref in self._refs)
        asked = await self.device.put(np.stack([query.vector for query in queries]))
        lexical = await self.device.put(np.stack([query.lexical for query in queries]))
        found = []
        async with self.device.batch() as batch:
            dense = batch.linalg.matmul(asked, vectors, transpose_b=True)
            for place in range(len(queries)):
                # The product of a sparse matrix and a vector: each row's terms are looked up in the query.
                products = batch.elementwise.binary("mul", batch.arrays.take(lexical[place], terms, mode="clip"), weights)
                cosines = batch.elementwise.binary("mul", batch.reduce("sum", products, axis=1), LEXICAL_WEIGHT)
                scores = batch.elementwise.binary("add", dense[place], cosines)
                found.append(batch.sort.topk(scores, min(k, count)))
            best, rows = (batch.arrays.stack(each) for each in zip(*found, strict=True))
        return list(zip(await self.device.get(best), await self.device.get(rows), strict=True))

    async def _write_all(self) -> None:
        """Write all rows again, once the device is ready; a write of the whole makes a torn buffer sound."""
        for ref, row in zip(self._refs, self._rows, strict=True):
            await self.device.put(row, out=ref)
