"""A device as a rank of a world, as its controller sees it; and its part of a batch or a graph."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from accel.device.batch import Batch
from accel.device.graph import Graph
from accel.device.recording import Recorder
from accel.engine.program import CollectiveReplay
from accel.errors import ContextPoisonedError, FaultScope, HostDiedError, InvalidArgumentError
from accel.ops import collective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel.device.epochs import Membership
    from accel.engine.core import DeviceCore
    from accel.engine.host import Host
    from accel.engine.lifecycle import DeviceState
    from accel.engine.sender import Sender
    from accel.errors import AccelError
    from accel.ops.collective import Collective
    from accel.ref import AccelRef

__all__ = ["DeviceRank", "RankBatch", "RankGraph"]


_COLLECTIVES: tuple[Any, ...] = tuple(found for name in collective.__all__ if isinstance(found := getattr(collective, name), type))
"""All ops of the library, of which a barrier, for example, makes no buffer."""


class _RankRecorder(Recorder):
    """Records the ops of one rank of a world; :meth:`run` refuses collectives."""

    to_host = _COLLECTIVES

    def collective(self, op: Collective) -> Any:
        """Record this rank's part of a collective, and return its result."""
        return self._record(op)


class RankBatch(_RankRecorder, Batch):
    """The part of one rank in a batch of a world: collectives, and copies of their strided operands."""

    writes: tuple[AccelRef, ...] = ()
    """The durable buffers that it writes; known once :meth:`set_numbers` was called."""

    def set_numbers(self, first: int) -> None:
        """Give the recorded collectives numbers from ``first`` on, instead of from 0, before they are sent."""
        ops: Any = self._ops.ops
        self._ops.ops = [dataclasses.replace(op, number=first + op.number) if op.library == "collective" else op for op in ops]
        # Kept for the epoch's end, which tears them: the plans are released with the block's end.
        self.writes = tuple(ref for plan in self._ops.plans for ref in plan.writes if ref.durable)


class RankGraph(_RankRecorder, Graph):
    """The part of one rank in a graph of a world, which alone replays it."""

    replay_op = CollectiveReplay

    def check(self) -> None:
        """Raise if it cannot be replayed now; see :meth:`replay`."""
        self.replay_op(self._live_program()).plan()


class DeviceRank:
    """A device as the rank of a world; see :class:`accel.device.epochs.Rank`.

    Parameters
    ----------
    core, sender, host
        Of the device.

    Raises
    ------
    InvalidArgumentError
        If the device may refuse its part of what the other ranks have begun.
    """

    def __init__(self, core: DeviceCore, sender: Sender, host: Host) -> None:
        if core.options.overload == "reject":
            raise InvalidArgumentError(
                f"{core.name} refuses what it has no room for, so its part of a collective too",
                device=core.name,
                remedy="Open it with overload='wait'; a world has an overload= of its own.",
            )
        self.core = core
        self.sender = sender
        self._host = host

    @property
    def name(self) -> str:
        """The name of the device."""
        return self.core.name

    @property
    def state(self) -> DeviceState:
        """The state of the device."""
        return self.core.lifecycle.state

    @property
    def fault(self) -> AccelError | None:
        """The fault that has ended the last context; ``None`` while the device is READY."""
        return self.core.lifecycle.cause

    @property
    def listeners(self) -> list[Callable[[], object]]:
        """Functions that are called after each change of the state."""
        return self.core.lifecycle.listeners

    @property
    def members(self) -> Membership:
        """See :attr:`accel.device.epochs.Rank.members`."""
        if self._host.context is None:
            raise ContextPoisonedError(f"{self.name} has no context now", executed="no", device=self.name)
        members: Membership = self._host.context.members
        return members

    async def wait_ready(self) -> None:
        """Wait until the device is READY; raises if that will not happen."""
        await self.core.lifecycle.wait_ready()

    def kill(self, why: str) -> None:
        """See :meth:`accel.device.epochs.Rank.kill`."""
        if self._host.context is not None:
            error = HostDiedError(f"the context of {self.name} {why}", hung=True, device=self.name, scope=FaultScope.CONTEXT)
            self._host.context.report_fault(error)

    def check(self, op: Collective, recording: RankBatch | RankGraph | None = None) -> tuple[AccelRef, ...]:
        """Return the refs that an op writes; raise if the device, or a recorder of it, refuses the op."""
        self.sender.guard()
        return self.sender.check(op, recording).writes

    def tear(self, refs: Iterable[AccelRef]) -> None:
        """Mark the durable ones of these buffers as torn: their collective has not run on all ranks."""
        self.core.durable.tear((ref.buffer for ref in refs if ref.durable), "its world has lost a rank while a collective wrote it")

    def batch(self) -> RankBatch:
        """Return a batch of this device."""
        return RankBatch(self.core, self.sender, None, {}, "batch")

    def graph(self) -> RankGraph:
        """Return a graph of this device."""
        return RankGraph(self.core, self.sender, None, {})
