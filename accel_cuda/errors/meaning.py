"""What a status means: one row of a library's table."""

from __future__ import annotations

from dataclasses import dataclass

from accel import AccelError, FaultScope

__all__ = ["Meaning", "rows"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one status means.

    Parameters
    ----------
    name
        The library's name for it, without the common prefix.
    kind
        Class of the error.
    scope
        How much it takes with it.
    retryable
        Whether the same call, sent again, can succeed.
    remedy
        What to do; empty for the class's own.
    """

    name: str
    kind: type[AccelError]
    scope: FaultScope
    retryable: bool
    remedy: str


def rows(
    kind: type[AccelError], entries: str, remedy: str = "", *, scope: FaultScope = FaultScope.OP, retryable: bool = False
) -> dict[int, Meaning]:
    """Return the rows for ``entries``, which are "code NAME" pairs with one meaning."""
    words = entries.split()
    return {int(code): Meaning(name, kind, scope, retryable, remedy) for code, name in zip(words[::2], words[1::2], strict=True)}
