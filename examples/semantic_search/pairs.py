"""What the encoder is trained on: pairs of a query and the document that it asks for, out of the documents themselves.

A pair is a summary and the rest of its document; what another document's "See Also" says of a document; or a paragraph, such as the description of a
parameter, and the rest.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from examples.semantic_search.corpus import Document
from examples.semantic_search.tokens import DOCUMENT_LENGTH, document_tokens, prose, tokens, words

if TYPE_CHECKING:
    from collections.abc import Sequence

Ids = list[int]

_SEE_ALSO = re.compile(r"See Also\n-+\n(.*?)(?:\n\n\S[^\n]*\n-+\n|\Z)", re.DOTALL)
_ENTRY = re.compile(r"^([\w.]+) ?: ?(.+(?:\n +.+)*)", re.MULTILINE)
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\S)")


class Pairs:
    """The pairs to train on, without the summaries of the documents in ``without``."""

    def __init__(self, documents: Sequence[Document], without: set[int], seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.whole = [document_tokens(document, summary=index not in without) for index, document in enumerate(documents)]
        self._rest = [document_tokens(document, summary=False) for document in documents]
        self._summaries = [[] if index in without else tokens(document.summary) for index, document in enumerate(documents)]
        self._head = [
            document_tokens(Document(document.name, document.signature, "" if index in without else document.summary, ""))
            for index, document in enumerate(documents)
        ]
        secrets = [_plain(documents[index].summary) for index in without]
        self._described = _see_also(documents, without, secrets)
        self._paragraphs = [_paragraphs(document, secrets) for document in documents]

    def batch(self, indices: Sequence[int]) -> tuple[list[int], list[Ids], list[Ids]]:
        """Return the indices for which there is a pair, the queries, and the documents without them."""
        pairs = [(index, *self._pair(index)) for index in indices]
        kept = [pair for pair in pairs if pair[1] and pair[2]]
        return [pair[0] for pair in kept], [pair[1] for pair in kept], [pair[2] for pair in kept]

    def shuffled(self, count: int) -> list[int]:
        """Return the numbers below ``count`` in a random order."""
        return [int(index) for index in self._rng.permutation(count)]

    def _pair(self, index: int) -> tuple[Ids, Ids]:
        drawn = self._rng.random()
        if self._summaries[index] and drawn < 0.7:
            return self._summaries[index], self._rest[index]
        if self._described[index] and drawn < 0.85:
            return self._described[index][self._rng.integers(len(self._described[index]))], self.whole[index]
        paragraphs = self._paragraphs[index]
        if not paragraphs:
            return [], []
        taken = self._rng.integers(len(paragraphs))
        others = [token for place, paragraph in enumerate(paragraphs) if place != taken for token in paragraph]
        return paragraphs[taken], [*self._head[index], *others][:DOCUMENT_LENGTH]


def _see_also(documents: Sequence[Document], without: set[int], secrets: Sequence[str]) -> list[list[Ids]]:
    """Return, for each document, what others say of it. Of a document in ``without`` they may say its summary in other words, so nothing is taken."""
    by_name = {document.name: index for index, document in enumerate(documents)}
    by_last: dict[tuple[str, str], list[int]] = {}
    for index, document in enumerate(documents):
        parts = document.name.split(".")
        by_last.setdefault((parts[0], parts[-1]), []).append(index)
    described: list[list[Ids]] = [[] for _ in documents]
    for document in documents:
        section = _SEE_ALSO.search(document.body)
        for name, text in _ENTRY.findall(section[1]) if section else ():
            namesakes = by_last.get((document.name.split(".")[0], name.split(".")[-1]), [])
            target = by_name.get(name, namesakes[0] if len(namesakes) == 1 else None)
            if target is not None and target not in without and len(words(text)) >= 3 and not _says(text, secrets):
                described[target].append(tokens(text))
    return described


def _paragraphs(document: Document, secrets: Sequence[str]) -> list[Ids]:
    """Return up to 24 paragraphs of a document, except those that say a held-out summary."""
    text = _SEE_ALSO.sub("", prose(document))
    plain = _plain(text)
    said = [secret for secret in secrets if secret in plain]
    parts = [part for part in _PARAGRAPH.split(text) if len(words(part)) >= 5 and not _says(part, said)]
    return [tokens(part) for part in parts[:24]]


def _says(text: str, secrets: Sequence[str]) -> bool:
    plain = _plain(text)
    return any(secret in plain for secret in secrets)


def _plain(text: str) -> str:
    """Return the words of a text, each between spaces."""
    return f" {' '.join(words(text))} "
