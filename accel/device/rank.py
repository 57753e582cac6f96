"""A device as a rank of a world: what the controller asks of it, and its part of a batch."""

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

    from accel.actors import ActorSystem
    from accel.device.epochs import Membership
    from accel.engine.attribution import Attribution
    from accel.engine.core import DeviceCore
    from accel.engine.host import Host
    from accel.engine.lifecycle import DeviceState
    from accel.engine.sender import Sender
    from accel.errors import AccelError
    from accel.ops.collective import Collective
    from accel.ref import AccelRef

__all__ = ["DeviceRank", "RankBatch", "RankGraph"]


_KINDS: tuple[Any, ...] = tuple(found for name in collective.__all__ if isinstance(found := getattr(collective, name), type))


class _RankRecorder(Recorder):
    """Records the ops of one rank of a world; :meth:`run` refuses collectives."""

    to_host = _KINDS

    def collective(self, op: Collective) -> Any:
        """Record this rank's part of a collective, and return its result."""
        return self._record(op)


class RankBatch(_RankRecorder, Batch):
    """A batch of one rank: it has collectives only."""

    writes: tuple[AccelRef, ...] = ()
    """The buffers that it was sent to write."""

    def number(self, first: int) -> None:
        """Count the collectives that were recorded from ``first`` on: until now it was from 0. Called before it is sent."""
        ops: Any = self._ops.ops
        self._ops.ops = [dataclasses.replace(op, number=first + op.number) if op.library == "collective" else op for op in ops]
        self.writes = tuple(ref for plan in self._ops.plans for ref in plan.writes if ref.durable)


class RankGraph(_RankRecorder, Graph):
    """The part of one rank in a graph of a world, which alone replays it."""

    replay_op = CollectiveReplay

    def check(self) -> None:
        """Raise if it cannot be replayed."""
        CollectiveReplay(self._live_program()).plan()


class DeviceRank:
    """A device as the rank of a world; see :class:`accel.device.epochs.Rank`.

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
        self._core = core
        self._host = host
        self.sender = sender

    @property
    def name(self) -> str:
        """The name of the device."""
        return self._core.name

    @property
    def system(self) -> ActorSystem:
        """The device's."""
        return self._core.system

    @property
    def state(self) -> DeviceState:
        """The state of the device."""
        return self._core.lifecycle.state

    @property
    def fault(self) -> AccelError | None:
        """What has ended the last context of the device."""
        return self._core.lifecycle.cause

    @property
    def worlds(self) -> set[int]:
        """Numbers of the open worlds of the device."""
        return self._core.worlds

    @property
    def attributions(self) -> set[Attribution]:
        """The work on the device that is examined if its context dies."""
        return self._core.attributions

    @property
    def listeners(self) -> list[Callable[[], object]]:
        """Called after each change of the state."""
        return self._core.lifecycle.listeners

    @property
    def members(self) -> Membership:
        """See :attr:`accel.device.epochs.Rank.members`."""
        if self._host.context is None:
            raise ContextPoisonedError(f"{self.name} has no context now", executed="no", device=self.name)
        members: Membership = self._host.context.members
        return members

    async def wait_ready(self) -> None:
        """Wait until the device is READY; raises if that will not happen."""
        await self._core.lifecycle.wait_ready()

    def kill(self, why: str) -> None:
        """End the present context; another one follows."""
        if self._host.context is not None:
            error = HostDiedError(f"the context of {self.name} {why}", hung=True, device=self.name, scope=FaultScope.CONTEXT)
            self._host.context.report_fault(error)

    def check(self, op: Collective, recording: RankBatch | RankGraph | None = None) -> tuple[AccelRef, ...]:
        """Return what an op writes in place; raise if the device does not take it now, or a batch of it does not."""
        self.sender.guard()
        return self.sender.check(op, recording).writes

    def tear(self, refs: Iterable[AccelRef]) -> None:
        """Mark durable buffers as torn: what was to write them has not run on all ranks."""
        self._core.durable.tear((ref.buffer for ref in refs if ref.durable), "its world has lost a rank while a collective wrote it")

    def batch(self) -> RankBatch:
        """Return a batch of this device."""
        return RankBatch(self._core, self.sender, None, {}, "batch")

    def graph(self) -> RankGraph:
        """Return a graph of this device."""
        return RankGraph(self._core, self.sender, None, {})
