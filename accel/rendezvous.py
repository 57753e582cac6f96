"""Rendezvous hashing: which of several names gets what belongs to a key, the same in every process."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias

from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Key", "rendezvous"]

Key: TypeAlias = str | bytes | int
"""What work is for, such as a user or a session."""


def rendezvous(key: Key, names: Iterable[str]) -> str | None:
    """Return the name that gets what belongs to a key; ``None`` if there are no names.

    When one of n names goes, one of n keys gets another one, and the others keep theirs.

    Raises
    ------
    InvalidArgumentError
        The key is no text, bytes or int.
    """
    if isinstance(key, bool) or not isinstance(key, (str, bytes, int)):
        raise InvalidArgumentError(f"key is {key!r:.80}", remedy="Give text, bytes or an int.")
    data = key if isinstance(key, bytes) else str(key).encode("utf-8", "surrogatepass")
    return max(names, key=lambda name: blake2b(name.encode() + b"\0" + data, digest_size=8).digest(), default=None)
