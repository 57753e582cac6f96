"""Memory that comes back a little later than who held it has ended: asked for again, for a while."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from accel.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MemoryBack"]

T = TypeVar("T")

_PAUSE = 0.02


class MemoryBack:
    """Asks for device memory; until a moment that is set, again and again. The driver tells nobody when it has cleared up behind a process.

    Attributes
    ----------
    until : float
        ``time.monotonic()`` after which out of memory is out of memory.
    """

    def __init__(self) -> None:
        self.until = 0.0

    def ask(self, make: Callable[..., T], *arguments: object) -> T:
        """Return what ``make`` does. May block.

        Raises
        ------
        OutOfMemoryError
            If it does so, and the time is up.
        """
        while True:
            try:
                return make(*arguments)
            except OutOfMemoryError:
                if time.monotonic() >= self.until:
                    raise
            time.sleep(_PAUSE)
