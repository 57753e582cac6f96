"""Cooperative yielding: long work on the event loop's thread lets the loop run now and then."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any, Final

__all__ = ["CHECK_EVERY", "Turn", "release"]

CHECK_EVERY: Final = 64
"""Steps of some ten microseconds after which long work checks whether its turn is over."""

_SECONDS: Final = 0.003
"""Seconds of work after which the loop runs."""


class Turn:
    """A turn of a coroutine that computes for long on the loop's thread.

    Short work ends within the first turn, and never yields.

    ::

        for number, item in enumerate(work, 1):
            if not number % CHECK_EVERY and turn.is_over:
                await turn.next()
    """

    __slots__ = ("_end",)

    def __init__(self) -> None:
        self._end = perf_counter() + _SECONDS

    @property
    def is_over(self) -> bool:
        """Whether the turn has lasted long enough, and the loop is to run."""
        return perf_counter() >= self._end

    async def next(self) -> None:
        """Let the loop run once, and begin the next turn."""
        await asyncio.sleep(0)
        self._end = perf_counter() + _SECONDS


async def release(*collections: list[Any] | dict[Any, Any]) -> None:
    """Empty lists and dicts, from their ends, in turns: dropping many objects takes long too."""
    turn = Turn()
    for collection in collections:
        take = collection.popitem if isinstance(collection, dict) else collection.pop
        while collection:
            for _ in range(min(CHECK_EVERY, len(collection))):
                take()
            if turn.is_over:
                await turn.next()
