"""What was worked out, as far as it is remembered."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

__all__ = ["Memo"]

K = TypeVar("K")
V = TypeVar("V")

_MOST = 1 << 14


class Memo(OrderedDict[K, V]):
    """A dict of a bounded number of entries: the oldest makes room for the newest, and is worked out again when it is needed again.

    Any thread may read and write it.
    """

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > _MOST:
            self.popitem(last=False)
