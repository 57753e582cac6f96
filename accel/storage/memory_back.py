"""Repeated requests for device memory: a driver releases it only a while after a process ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from accel.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MemoryBack"]

T = TypeVar("T")

_PAUSE = 0.02
"""Seconds between two requests."""


class MemoryBack:
    """Repeats requests for device memory until a deadline.

    The driver does not tell when it has released the memory of a process that ended.

    Attributes
    ----------
    until : float
        ``time.monotonic()`` after which a request is not repeated.
    """

    def __init__(self) -> None:
        self.until = 0.0

    def retry_on_oom(self, make: Callable[..., T], *arguments: object) -> T:
        """Return what ``make`` returns.

        Repeat the call while it runs out of memory before the deadline. May block.

        Raises
        ------
        OutOfMemoryError
            If it does so after the deadline.
        """
        while True:
            try:
                return make(*arguments)
            except OutOfMemoryError:
                if time.monotonic() >= self.until:
                    raise
            time.sleep(_PAUSE)
