"""Ranking: a lexical score by TF-IDF, which is added to the dense one, and the measure of a ranking."""

from __future__ import annotations

import zlib
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from examples.semantic_search.tokens import prose, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from examples.semantic_search.corpus import Document

Array = np.ndarray[Any, Any]

LEXICAL_WEIGHT = 0.5
"""Score of a document: dense + ``LEXICAL_WEIGHT`` * lexical. Both are cosines."""

TERMS = 1 << 16
"""Different terms: words, hashed, so that an inserted document may use new ones."""

ROW = 256
"""Terms that a document keeps: those with the largest weights. A row has a fixed length, so that the index is two arrays on a device."""


class Lexicon:
    """TF-IDF with sublinear counts and rows of length 1, as sparse rows of a fixed length (ELL format).

    Parameters
    ----------
    documents
        What the inverse document frequencies are counted on, as lists of words.
    """

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        frequency = np.zeros(TERMS)
        for document in documents:
            frequency[list({_term(word) for word in document})] += 1
        self.idf: Array = (np.log((1 + len(documents)) / (1 + frequency)) + 1).astype(np.float32)

    def row(self, document: Sequence[str]) -> tuple[Array, Array]:
        """Return the terms, int32 (ROW,), and the weights, float32 (ROW,), of a document; a short one is filled up with weights of 0."""
        terms, weights = self._weigh(document)
        heaviest = np.argsort(-weights, kind="stable")[:ROW]
        room = (0, ROW - len(heaviest))
        return np.pad(terms[heaviest], room), np.pad(weights[heaviest], room)

    def query(self, text: str) -> Array:
        """Return the weights of a query, float32 (TERMS,)."""
        vector = np.zeros(TERMS, np.float32)
        terms, weights = self._weigh(words(text))
        vector[terms] = weights
        return vector

    def _weigh(self, document: Sequence[str]) -> tuple[Array, Array]:
        counts = Counter(map(_term, document))
        terms = np.fromiter(counts, np.int32, len(counts))
        weights = (1 + np.log(np.fromiter(counts.values(), np.float32, len(counts)))) * self.idf[terms]
        return terms, (weights / max(float(np.linalg.norm(weights)), 1e-12)).astype(np.float32)


def lexical_words(document: Document, *, summary: bool = True) -> list[str]:
    """Return the words that the lexical score sees; its name counts three times. Without the ``summary`` on request."""
    return [*3 * words(document.name), *words(document.summary if summary else ""), *words(prose(document))]


def mean_reciprocal_rank(scores: Array, targets: Sequence[int]) -> float:
    """Return the mean of 1 / rank of each query's target; equal scores share their mean rank.

    Parameters
    ----------
    scores
        (queries, documents).
    targets
        For each query, the index of the document that it asks for.
    """
    own = scores[np.arange(len(targets)), list(targets)][:, None]
    ranks = (scores > own).sum(axis=1) + ((scores == own).sum(axis=1) + 1) / 2
    return float((1 / ranks).mean())


@lru_cache(maxsize=1 << 16)
def _term(word: str) -> int:
    return zlib.crc32(word.encode()) % TERMS
