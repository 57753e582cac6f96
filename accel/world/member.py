"""The ranks that one context is: it joins groups, launches into them, and leaves them when told to.

This is in the process of the context. The controller, which tells it to, is in the service's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from accel.errors import FaultScope, UnsupportedError, WorldChangedError
from accel.family import BackendPart
from accel.ops import collective
from accel.world.group import FormsGroups

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from accel.backend import AccelDevice, Kernel
    from accel.ops import KernelOp, Plan
    from accel.ops.family import KernelLane
    from accel.world.group import Group

__all__ = ["Member", "Members"]

T = TypeVar("T")

_KINDS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "gather",
    "broadcast",
    "scatter",
    "send",
    "receive",
    "barrier",
)


class RunBlocking(Protocol):
    """Runs a function on a worker thread: :meth:`accel.System.run_blocking`."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> Awaitable[T]: ...


class Member:
    """This rank's place in one epoch of a world. Every method may be called on any thread.

    Attributes
    ----------
    rank, size : int
        The number of this rank, and how many there are.
    revoked : threading.Event
        Set once the epoch is over.
    """

    def __init__(self, world: int, epoch: int, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.revoked = threading.Event()
        self._where = f"epoch {epoch} of world {world}"
        self._epoch = epoch
        self._group: Group | None = None
        self._lock = threading.Lock()  # held during a launch: a group is aborted after it

    def join(self, device: FormsGroups, unique_id: bytes, deadline: float) -> None:
        """Join the communicator; raises as :meth:`FormsGroups.join`."""
        group = device.join(unique_id, self.rank, self.size, deadline, self.revoked)
        with self._lock:
            self._group = group
        if self.revoked.is_set():
            self.revoke()
            raise self._over()

    def launch(self, stream: Any, call: collective.Call, source: int, target: int) -> None:
        """Enqueue a collective; see :meth:`Group.launch`.

        Raises
        ------
        WorldChangedError
            The epoch is over. Its scope is the op.
        """
        with self._lock:
            if self._group is None or self.revoked.is_set():
                raise self._over()
            self._group.launch(stream, call, source, target)

    def revoke(self) -> int:
        """End the epoch here, and return how far this rank has come: :attr:`Group.reached`. Blocks."""
        self.revoked.set()
        running = self._group
        if running is not None:  # before the lock, which a launch that hangs has
            running.revoke()
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return 0 if running is None else running.reached
        if group is not running:  # it has joined meanwhile
            group.revoke()
        group.abort()
        return group.reached

    def _over(self) -> WorldChangedError:
        return WorldChangedError(f"{self._where} is over", epoch=self._epoch, scope=FaultScope.OP)


class Members:
    """The groups that one context is in.

    Parameters
    ----------
    device
        The backend's context.
    run_blocking
        Runs what may block.
    add_kernels
        Takes the name of the library, and the kernels of collectives; called at the first join.
    """

    def __init__(self, device: object, run_blocking: RunBlocking, add_kernels: Callable[[str, BackendPart], None]) -> None:
        self._device = device
        self._run_blocking = run_blocking
        self._add_kernels: Callable[[str, BackendPart], None] | None = add_kernels
        self._members: dict[tuple[int, int], Member] = {}

    def get(self, world: int, epoch: int) -> Member:
        """Return this context's place in an epoch; raises :class:`WorldChangedError` if it has none."""
        member = self._members.get((world, epoch))
        if member is None:
            raise WorldChangedError(f"this is no rank of epoch {epoch} of world {world}", epoch=epoch, scope=FaultScope.OP)
        return member

    def _launch(self, lane: KernelLane, op: KernelOp, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Enqueue a collective; see :data:`accel.backend.Kernel`."""
        assert isinstance(op, collective.Collective), "the library has no others"
        source, target = (addresses[0] if addresses else 0 for addresses in (inputs, outputs))
        self.get(op.world, op.epoch).launch(lane.stream, op.call(), source, target)

    async def unique_id(self) -> str:
        """Return an id for one communicator, in hexadecimal digits; see :class:`FormsGroups`."""
        return (await self._run_blocking(self._forms_groups().unique_id)).hex()

    async def join(self, world: int, epoch: int, unique_id: str, rank: int, size: int, seconds: float) -> None:
        """Join an epoch within some seconds; raises as :meth:`FormsGroups.join`."""
        device, member = self._forms_groups(), Member(world, epoch, rank, size)
        if self._add_kernels is not None:
            kernels: dict[str, Kernel] = dict.fromkeys(_KINDS, self._launch)
            graphs = cast("AccelDevice", self._device).kernels("graph")
            kernels |= {kind: graphs[kind] for kind in ("replay",) if kind in graphs}  # as the backend replays all graphs
            self._add_kernels("collective", BackendPart(kernels, may_block=device.launch_blocks, launches=_COMMANDS))
            self._add_kernels = None
        self._members[world, epoch] = member
        try:
            await self._run_blocking(partial(member.join, device, bytes.fromhex(unique_id), time.monotonic() + seconds))
        except BaseException:
            member.revoked.set()
            self._members.pop((world, epoch), None)
            raise

    async def revoke(self, world: int, epoch: int) -> int:
        """End an epoch here, also while it is being joined; see :meth:`Member.revoke`."""
        member = self._members.get((world, epoch))
        if member is None:
            return 0
        reached = await self._run_blocking(member.revoke)
        self._members.pop((world, epoch), None)
        return reached

    def close(self, release_all: Callable[[], None], *, wait: bool) -> None:
        """End all epochs, which blocks, and then call ``release_all``: the context is being closed.

        Without ``wait`` a thread does it, if there is an epoch to end.
        """
        if self._members and not wait:
            thread = threading.Thread(target=self.close, args=(release_all,), kwargs={"wait": True}, name="accel-abandoned", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be had
                thread.start()
                return
        while self._members:
            self._members.popitem()[1].revoke()
        release_all()

    def _forms_groups(self) -> FormsGroups:
        if not isinstance(self._device, FormsGroups):
            raise UnsupportedError("this backend has no collectives", remedy="Use devices of the backend 'cpu' or 'cuda'.")
        return self._device


_COMMANDS = 4
"""Commands of one collective in the device's queue, at most."""
