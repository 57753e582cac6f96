"""Items that were found to be poison: recognized by their content, and refused when they come again."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from accel._log import get_logger
from accel.models.tensor_spec import Item
from accel.patterns.requests import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from accel.errors import PoisonedInputError

__all__ = ["Line", "PoisonMemory", "content_fingerprint"]

logger = get_logger()

_LARGEST = 1 << 20
"""Bytes of content that are hashed, in a millisecond or some; larger items have no fingerprint, because hashing runs on the event loop."""

_PER_PART = 128
"""Bytes for which each part of an item counts, so that many small ones are bounded in time too."""


@dataclass(slots=True)
class Line:
    """Requests of equal items: one is tried, and the others wait for what is found.

    Attributes
    ----------
    isolation : Isolation
        What tries it; see there.
    """

    leader: Request
    isolation: Any
    followers: list[Request] = field(default_factory=list)


class PoisonMemory:
    """The fingerprints of items that were found to be poison, and of those that are tried; of the former the one that was seen longest ago is dropped first.

    While both are empty no item has to be looked up. The items themselves are not kept.

    Parameters
    ----------
    limit
        Items that are remembered; 0: none.
    fingerprint
        ``fingerprint(item)`` returns what identifies an item, or ``None`` for one that is not to be remembered.

    Attributes
    ----------
    errors : OrderedDict
        Fingerprint -> the error of an item that is remembered.
    lines : dict
        Fingerprint -> the requests whose item has it, of which one is tried in quarantine.
    """

    __slots__ = ("_fingerprint", "errors", "limit", "lines")

    def __init__(self, limit: int, fingerprint: Callable[[Any], Hashable]) -> None:
        self.limit = limit
        self._fingerprint = fingerprint
        self.errors: OrderedDict[Hashable, PoisonedInputError] = OrderedDict()
        self.lines: dict[Hashable, Line] = {}

    def key(self, item: Any) -> Hashable:
        """Return the fingerprint of an item, or ``None``."""
        try:
            key = self._fingerprint(item)
            hash(key)
        except Exception as error:  # of a function of the user's: an item without a fingerprint is served
            logger.exception("fingerprint_failed", item=type(item).__name__, error=error)
            return None
        return key

    def remember(self, error: PoisonedInputError) -> None:
        """Remember the item of ``error``."""
        key = self.key(error.item) if self.limit else None
        if key is None:
            return
        kept = error.clone(item=None, remembered=True)
        kept.__cause__ = None  # its frames would keep the batch
        self.errors[key] = kept
        if len(self.errors) > self.limit:
            self.errors.popitem(last=False)

    def recall_by(self, key: Hashable, item: Any) -> PoisonedInputError | None:
        """Return an error for the caller of an item with this fingerprint, if it is remembered, or ``None``."""
        found = None if key is None else self.errors.get(key)
        if found is None:
            return None
        self.errors.move_to_end(key)
        return found.clone(item=item)

    def clear(self) -> None:
        """Forget all items."""
        self.errors.clear()


def content_fingerprint(item: object) -> bytes | None:
    """Return a hash of an item's type and content: equal for equal items, in every process.

    Parameters
    ----------
    item
        A numpy array or scalar, bytes, a text, a number, a bool, ``None``, or a tuple, list, or dict by text, of these; up to 1 MiB.

    Returns
    -------
    bytes or None
        16 bytes; ``None`` for an item that is larger, or has anything else in it.
    """
    content = _Content()
    try:
        content.add(item)
    except (_NoFingerprintError, RecursionError):
        return None
    return content.digest()


class _NoFingerprintError(Exception):
    """It is too large, or of an unknown type."""


class _Content:
    """Hashes content as a sequence of parts, each with its kind and length before it, so that no two items write the same bytes."""

    __slots__ = ("_hash", "_left")

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._left = _LARGEST

    def digest(self) -> bytes:
        return self._hash.digest()

    def add(self, item: Any) -> None:
        kind = type(item)
        if kind is np.ndarray or isinstance(item, np.generic):
            self._add_array(kind.__name__, np.asarray(item))
        elif kind is bytes:
            self._write("bytes", item)
        elif kind is str:
            self._write("str", item.encode("utf-8", "surrogatepass"))
        elif kind is int:
            self._write("int", b"%x" % item)
        elif kind in (float, complex, bool, type(None)):
            self._write(kind.__name__, repr(item).encode())
        elif kind in (tuple, list):
            self._write(kind.__name__, b"%d" % len(item))
            for each in item:
                self.add(each)
        elif kind in (dict, Item) and all(type(key) is str for key in item):
            self._write("dict", b"%d" % len(item))
            for key in sorted(item):
                self.add(key)
                self.add(item[key])
        else:
            raise _NoFingerprintError

    def _add_array(self, kind: str, array: np.ndarray[Any, Any]) -> None:
        if array.dtype.hasobject or not array.dtype.itemsize or array.nbytes > self._left:
            raise _NoFingerprintError
        self._write(kind, repr((array.dtype, array.shape)).encode())
        # Bytes, because not every dtype has a buffer: bfloat16 has none.
        self._write("data", np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _write(self, kind: str, data: bytes | memoryview) -> None:
        self._left -= len(data) + _PER_PART
        if self._left < 0:
            raise _NoFingerprintError
        self._hash.update(b"%s %d:" % (kind.encode(), len(data)))
        self._hash.update(data)
