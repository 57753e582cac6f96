"""From text to numbers, in numpy alone and the same for training and serving: words, hashed. There is no vocabulary to keep."""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from examples.semantic_search.corpus import Document

Array = np.ndarray[Any, Any]

VOCABULARY = 1 << 15
"""Different token ids. 0 pads."""

QUERY_LENGTH = 48
DOCUMENT_LENGTH = 192
"""Tokens of a query and of a document at most; the rest is cut off."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_APPENDIX = re.compile(r"\n(?:Examples|References)\n-+\n")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case. Names are split: ``get_feature_names``, ``LabelEncoder`` and ``numpy.linalg`` are several words."""
    return [word.lower() for word in _WORD.findall(text)]


def prose(document: Document) -> str:
    """Return what follows a document's summary, up to its examples and references."""
    return _APPENDIX.split(document.body, maxsplit=1)[0]


@lru_cache(maxsize=1 << 16)
def token_id(word: str) -> int:
    """Return the id of a word, from 1 to ``VOCABULARY - 1``."""
    return 1 + zlib.crc32(word.encode()) % (VOCABULARY - 1)


def tokens(text: str, length: int = QUERY_LENGTH) -> list[int]:
    """Return the ids of the first ``length`` words of a text."""
    return [token_id(word) for word in words(text)[:length]]


def document_tokens(document: Document, *, summary: bool = True) -> list[int]:
    """Return the ids of a document: its name, which has ids of its own beside those of its words, then the rest, without the ``summary`` on request."""
    name = words(document.name)
    text = f"{document.summary if summary else ''} {document.signature} {prose(document)}"
    return [*map(token_id, name), *(token_id(f"name:{word}") for word in name), *tokens(text, DOCUMENT_LENGTH)][:DOCUMENT_LENGTH]


def padded(rows: Sequence[Iterable[int]]) -> Array:
    """Return rows of ids as one array, int64 (rows, longest row), padded with 0."""
    listed = [list(row) for row in rows]
    array = np.zeros((len(listed), max((len(row) for row in listed), default=1) or 1), np.int64)
    for line, row in zip(array, listed, strict=True):
        line[: len(row)] = row
    return array
