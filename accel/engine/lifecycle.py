"""The state of a device over all its generations."""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING

from accel.errors import AccelError, ClosedError, DeviceLostError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from accel.telemetry.probe import Probes

__all__ = ["DeviceState", "Lifecycle"]


class DeviceState(enum.Enum):
    """Where a device is in its life."""

    STARTING = "starting"
    """The first context is being made."""
    READY = "ready"
    """Ops run."""
    REBUILDING = "rebuilding"
    """The context faulted; ordinary refs are stale, new ops wait for the next generation."""
    LOST = "lost"
    """No context follows: the hardware is lost, or the restart budget is spent.

    Every call raises :class:`~accel.DeviceLostError`, until ``Device.reopen()``.
    """
    CLOSED = "closed"
    """Closed by its user."""


class Lifecycle:
    """The state machine of a device, or of a world, whose generations are its epochs.

    Only the loop's thread changes it.

    Attributes
    ----------
    state : DeviceState
    generation : int
        Number of the newest context that became ready; 0 before the first.
    cause : AccelError or None
        The fault that made the device REBUILDING or LOST.
    losses : int
        How often the device was lost.
    listeners : list of callable
        Called after each change of state.
    """

    __slots__ = ("_called", "_changed", "_loop", "_probes", "cause", "generation", "listeners", "losses", "name", "state")

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, probes: Probes, *, kind: str = "device") -> None:
        self.name = name if kind == "device" else f"{kind}:{name}"
        self._called = f"{kind} {name}"
        self._probes = probes
        self.state = DeviceState.STARTING
        self.generation = 0
        self.cause: AccelError | None = None
        self.losses = 0
        self.listeners: list[Callable[[], object]] = []
        self._loop = loop
        self._changed: asyncio.Future[None] | None = None

    @property
    def is_final(self) -> bool:
        """Whether no more ops run: the state is CLOSED, or LOST until ``Device.reopen()``."""
        return self.state in (DeviceState.LOST, DeviceState.CLOSED)

    def enter_ready(self) -> None:
        """Enter READY with the next generation."""
        self.generation += 1
        self.cause = None
        self._enter(DeviceState.READY)

    def enter_rebuilding(self, cause: AccelError | None) -> None:
        """Enter REBUILDING because of ``cause``; also from LOST, when it is reopened."""
        self.cause = cause
        self._enter(DeviceState.REBUILDING)

    def enter_lost(self, cause: AccelError | None) -> None:
        """Enter LOST; does nothing in a final state."""
        if not self.is_final:
            self.cause = cause or self.cause
            self.losses += 1
            self._enter(DeviceState.LOST)

    def enter_closed(self) -> None:
        """Enter CLOSED, from any state."""
        if self.state is not DeviceState.CLOSED:
            self._enter(DeviceState.CLOSED)

    def _enter(self, state: DeviceState) -> None:
        """Change the state, and tell the waiters, the listeners and the probes."""
        self.state = state
        self.wake()
        for listener in tuple(self.listeners):
            listener()
        if self._probes.state_changed:
            self._probes.tell(self._probes.state_changed, self.name, state.value, self.generation)

    def final_error(self) -> AccelError:
        """Return a new error that says why no more work is taken."""
        if self.state is DeviceState.CLOSED:
            return ClosedError(f"{self._called} is closed", device=self.name, generation=self.generation)
        return self._lost_error()

    def _lost_error(self) -> DeviceLostError:
        """Return a new error that says that the device is lost, with the fault as its cause.

        New each time: callers raise it, and its traceback is theirs.
        """
        error = DeviceLostError(f"{self._called} is lost", device=self.name, generation=self.generation)
        if self.cause is not None:
            error.code = self.cause.code
            error.__cause__ = self.cause.clone()
        return error

    def wake(self) -> None:
        """Wake the waiters of :meth:`wait_changed`, also where the state itself stays.

        Each change of a spare's state calls it, and the end of its place, for
        :meth:`Host.wait_spare_ready`.
        """
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def wait_changed(self) -> None:
        """Wait for the next change of state, or :meth:`wake`.

        Any number of tasks may wait; cancelling one does not disturb the others.
        """
        if self._changed is None:
            self._changed = self._loop.create_future()
        await asyncio.shield(self._changed)

    async def wait_ready(self) -> None:
        """Wait until the state is READY.

        Raises
        ------
        DeviceLostError, ClosedError
            If that will not happen any more.
        """
        while self.state is not DeviceState.READY:
            if self.is_final:
                raise self.final_error()
            await self.wait_changed()

    def generations(self) -> AsyncIterator[int]:
        """Iterate over the present generation once it is ready, then the newest after each rebuild.

        Ends when the device is closed.

        Raises
        ------
        DeviceLostError
            When the device is lost, also if it was reopened before the iterator had its turn.
        """
        return self._generations(self.losses)

    async def _generations(self, losses: int) -> AsyncIterator[int]:
        """Iterate as :meth:`generations`; ``losses`` is the count when that was called.

        Its body begins at the first step. A loss in between must end the iteration too.
        """
        seen = 0
        while self.state is not DeviceState.CLOSED:
            if self.state is DeviceState.LOST or self.losses != losses:
                raise self._lost_error()
            if self.state is DeviceState.READY and self.generation != seen:
                seen = self.generation
                yield seen
            else:
                await self.wait_changed()
