"""Requests for device memory, repeated while there is none: what a process had comes back late."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from accel.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OomRetry"]

T = TypeVar("T")

_PAUSE = 0.02
"""Seconds between two requests."""


class OomRetry:
    """Repeats requests that ran out of device memory, until a deadline.

    A driver releases the memory of a process only a while after its end, and does not tell when. So
    a generation that follows a child that died has some patience.

    Attributes
    ----------
    deadline : float
        ``time.monotonic()`` after which a request is not repeated. It is set in children only, when
        a generation begins; 0, as it is elsewhere: no request is repeated.
    """

    def __init__(self) -> None:
        self.deadline = 0.0

    def retry_on_oom(self, make: Callable[..., T], *arguments: object) -> T:
        """Return what ``make`` returns; until the deadline, repeat it while memory runs out.

        Blocks meanwhile, and is called on worker threads.

        Raises
        ------
        OutOfMemoryError
            If ``make`` still raises that after the deadline.
        """
        while True:
            try:
                return make(*arguments)
            except OutOfMemoryError:
                if time.monotonic() >= self.deadline:
                    raise
            time.sleep(_PAUSE)
