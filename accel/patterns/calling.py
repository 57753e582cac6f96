"""Calls of a handler, and the check of what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ["Attribution", "Recovering", "call", "until_ready"]


class Recovering(Protocol):
    """What a batcher needs of a device: when its next context is ready. :class:`accel.Device` is one."""

    def generations(self) -> AsyncIterator[int]:
        """Yield the generation as soon as the device is ready, then every new one."""


class Attribution(Protocol):
    """What the death of a context is charged to, made by :meth:`accel.Device.attribution`.

    Attributes
    ----------
    deaths : int
        How many contexts have died under the work so far.
    """

    deaths: int

    def hold(self) -> None:
        """Have the charge wait for one more :meth:`release`."""

    def release(self, *, found: bool = False) -> None:
        """Say that a part of the work was examined, and whether it was found to be the cause."""


async def call(handler: Callable[[list[Any]], Awaitable[Sequence[Any]]], items: list[Any]) -> Any:
    """Call ``handler`` with ``items``; return one result for each, or one exception for all of them."""
    try:
        answer: Any = handler(items)
        results: Any = await answer if isawaitable(answer) else _not_awaitable(answer)
        # A sequence of the user's own class may raise in any method.
        return results if isinstance(results, InvalidArgumentError) else _mismatch(results, len(items)) or list(results)
    except Exception as error:
        return error


async def until_ready(device: Recovering) -> int:
    """Wait until the device is ready, and return its generation.

    Raises
    ------
    StopAsyncIteration
        It was closed.
    Exception
        What keeps it from becoming ready, such as :class:`~accel.DeviceLostError`.
    """
    generations = device.generations()
    try:
        return await anext(generations)
    finally:
        # A suspended iterator that is dropped would be closed by a task of the loop that nothing awaits.
        close = getattr(generations, "aclose", None)
        if close is not None:
            await close()


def _mismatch(results: object, wanted: int) -> InvalidArgumentError | None:
    """Return the error for a handler that did not give one result per item."""
    # Mappings and texts have lengths too, but their keys and letters are no results.
    if isinstance(results, np.ndarray):
        given = len(results) if results.ndim else None
    else:
        given = len(results) if isinstance(results, Sequence) and not isinstance(results, (str, bytes, bytearray, memoryview)) else None
    if given == wanted:
        return None
    what = f"a {type(results).__name__}" if given is None else f"{given} results"
    return InvalidArgumentError(
        f"the handler returned {what} for {wanted} items", remedy="Return a list with one result, or exception, per item, in order."
    )


def _not_awaitable(answer: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the handler returned a {type(answer).__name__} that cannot be awaited", remedy="Define the handler with 'async def'."
    )
