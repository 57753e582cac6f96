"""What a batcher needs of a device: when its next context is ready, and to what the death of one is charged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Attribution", "Recovering", "until_ready"]


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
