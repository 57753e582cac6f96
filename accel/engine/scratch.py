"""Scratch memory of kernels, and memory for their statuses: allocated for one op at a time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from accel.backend import TakesScratch
from accel.dtype import DType
from accel.engine.op_error import raise_op_error
from accel.errors import InvalidArgumentError
from accel.ops import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel.actors import ActorSystem
    from accel.backend import AccelDevice
    from accel.engine.stream_clock import StreamClock
    from accel.memory import Allocator, Block, Dependency
    from accel.ops import KernelOp, Plan

__all__ = ["Scratch"]


_ALIGNED = 256
"""Alignment in bytes of the scratch memory that follows a status."""


class Scratch:
    """Allocates what ops of one context need besides operands: a status, then scratch memory.

    Parameters
    ----------
    device
        The backend's context.
    allocator
        Allocates the memory.
    system
        Runs what blocks; its loop is the device's.

    Attributes
    ----------
    sizes : dict
        Library and kind of each op with scratch memory -> function that returns the bytes.
    """

    __slots__ = ("_allocator", "_device", "_reserved", "_system", "sizes")

    def __init__(self, device: AccelDevice, allocator: Allocator, system: ActorSystem) -> None:
        self._device: Any = device
        self._allocator = allocator
        self._system = system
        self.sizes: dict[tuple[str, str], Callable[[Any], int | None]] = dict(device.scratch) if isinstance(device, TakesScratch) else {}
        self._reserved: Block | None = None  # for the op that is about to be sent

    def add(self, op: KernelOp, size: Callable[[Any], int]) -> None:
        """Use ``size`` for the scratch bytes of an op whose library is not the backend's."""
        self.sizes[op.library, op.kind] = partial(self._checked_size, size)

    def _checked_size(self, size: Callable[[Any], int], op: KernelOp) -> int:
        """Return the bytes of scratch memory that a user's library or family asks for, checked.

        An exception of ``size`` becomes the op's error: a ``CancelledError`` too, which would look
        like one of the device's actor.
        """
        try:
            nbytes = size(op)
        except BaseException as raised:
            raise_op_error(raised, f"the scratch memory of {op.kind}", self._system.loop, library=op.library)
        if type(nbytes) is not int or nbytes < 0:
            raise InvalidArgumentError(
                f"the scratch memory of {op.kind} is said to be {nbytes!r:.200} bytes",
                op=op.kind,
                library=op.library,
                remedy="Return an int.",
            )
        return nbytes

    def reserve(self, op: KernelOp, plan: Plan, lane: StreamClock) -> bool:
        """Reserve memory for an op, until :meth:`assign` or :meth:`cancel`; for one op at a time.

        Returns ``False``, with nothing reserved, if there is no room or the size has to be measured
        first: :meth:`specs` does that. ``True`` also for an op that needs no bytes.
        """
        size = self.sizes.get((op.library, op.kind))
        nbytes = 0 if size is None else size(op)
        if nbytes is None:
            return False
        if plan.status is not None:
            nbytes += _status_nbytes(plan)
        if nbytes:
            self._reserved = self._allocator.allocate(nbytes, lane)
        return not nbytes or self._reserved is not None

    def cancel(self) -> None:
        """Free the reserved memory, if there is any: the op is not dispatched now."""
        block, self._reserved = self._reserved, None
        if block is not None:
            self._allocator.free(block)

    def assign(self, op: KernelOp, plan: Plan, lane: StreamClock, seq: int, dependencies: list[Dependency]) -> list[int]:
        """Give the reserved memory to an op that was scheduled; the next user waits for the op.

        The memory is freed here already, in stream order. Returns the addresses of the op's status
        and of its scratch memory, as far as it has them; that of no bytes means nothing.
        """
        block, self._reserved = self._reserved, None
        if block is None:  # the op has scratch memory of no bytes, and no status
            return [0]
        addresses = [] if plan.status is None else [block.address]
        if (op.library, op.kind) in self.sizes:
            addresses.append(block.address + _status_nbytes(plan))
        block.usage.write(lane, seq, dependencies)
        self._allocator.free(block)
        return addresses

    async def specs(self, ops: Iterable[KernelOp], plan: Plan | None = None) -> tuple[Spec, ...]:
        """Return the spec of one scratch buffer that all ops use in turn; empty if none needs it.

        Sizes that the backend has to measure are measured, on a worker thread. With ``plan``, which
        is that of the only op, there is room for the op's status too.
        """
        sizes: list[int] = [] if plan is None or plan.status is None else [0]
        for op in ops:
            size = self.sizes.get((op.library, op.kind))
            if size is not None:
                while (nbytes := size(op)) is None:  # until the backend has measured it
                    await self._system.run_blocking(self._device.measure_scratch, op)
                sizes.append(nbytes)
        return (Spec((max(sizes) + (0 if plan is None else _status_nbytes(plan)),), DType.UINT8),) if sizes else ()


def _status_nbytes(plan: Plan) -> int:
    """Return the bytes that the status of an op takes, aligned; 0 without a status."""
    return 0 if plan.status is None else -(-max(plan.status.spec.nbytes, 1) // _ALIGNED) * _ALIGNED
