"""Long work on the event loop's thread, in turns with everything else that runs there."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any, Final

__all__ = ["EVERY", "Turn", "release"]

EVERY: Final = 64
"""After how many steps of some ten microseconds work looks at the clock."""

_SECONDS: Final = 0.003
"""How long a turn takes, and a little more."""


class Turn:
    """The turn of a coroutine that computes.

    Work that is short ends in the first one, without a step of the loop.

    ::

        for number, each in enumerate(work, 1):
            if not number % EVERY and turn.is_over:
                await turn.next()
    """

    __slots__ = ("_end",)

    def __init__(self) -> None:
        self._end = perf_counter() + _SECONDS

    @property
    def is_over(self) -> bool:
        """Whether others are to run now."""
        return perf_counter() >= self._end

    async def next(self) -> None:
        """Let others run."""
        await asyncio.sleep(0)
        self._end = perf_counter() + _SECONDS


async def release(*collections: list[Any] | dict[Any, Any]) -> None:
    """Empty lists and dicts, from their ends, in turns: the end of many objects takes long too."""
    turn = Turn()
    for collection in collections:
        take = collection.popitem if isinstance(collection, dict) else collection.pop
        while collection:
            for _ in range(min(EVERY, len(collection))):
                take()
            if turn.is_over:
                await turn.next()
