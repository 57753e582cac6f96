"""Scratch memory of kernels, and memory for their statuses: allocated for the time of one op."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from accel.backend import TakesScratch
from accel.dtype import DType
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
"""Alignment in bytes of the scratch memory behind a status."""


class Scratch:
    """The memory that ops of one context use besides operands: a status, then scratch memory.

    Parameters
    ----------
    device
        The backend's context.
    allocator
        Allocates the memory.
    system
        Runs what blocks.

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
        self.sizes[op.library, op.kind] = partial(_checked, size)

    def reserve(self, op: KernelOp, plan: Plan, lane: StreamClock) -> bool:
        """Reserve memory for an op.

        Returns ``False`` if there is no room, or if the size has to be measured first.
        """
        size = self.sizes.get((op.library, op.kind))
        nbytes = 0 if size is None else size(op)
        if nbytes is None:
            return False
        if plan.status is not None:
            nbytes += _room(plan)
        if nbytes:
            self._reserved = self._allocator.allocate(nbytes, lane)
        return not nbytes or self._reserved is not None

    def give_up(self) -> None:
        """Free the reserved memory, if there is any: the op is not sent now."""
        block, self._reserved = self._reserved, None
        if block is not None:
            self._allocator.free(block)

    def lend(self, op: KernelOp, plan: Plan, lane: StreamClock, seq: int, dependencies: list[Dependency]) -> list[int]:
        """Give the reserved memory to an op that has its number; its next user waits for the op.

        Returns the addresses of its status and of its scratch memory, as far as it has them. An
        address of no bytes means nothing.
        """
        block, self._reserved = self._reserved, None
        if block is None:
            return [0]
        addresses = [] if plan.status is None else [block.address]
        if (op.library, op.kind) in self.sizes:
            addresses.append(block.address + _room(plan))
        block.usage.write(lane, seq, dependencies)
        self._allocator.free(block)
        return addresses

    async def specs(self, ops: Iterable[KernelOp], plan: Plan | None = None) -> tuple[Spec, ...]:
        """Return the spec of one buffer that is large enough for each op; none if none is needed.

        Sizes that the backend has to measure are measured.

        With ``plan``, which is that of the only op, it has room for the op's status too.
        """
        most: list[int] = [] if plan is None or plan.status is None else [0]
        for op in ops:
            size = self.sizes.get((op.library, op.kind))
            if size is not None:
                while (nbytes := size(op)) is None:
                    await self._system.run_blocking(self._device.measure_scratch, op)
                most.append(nbytes)
        return (Spec((max(most) + (0 if plan is None else _room(plan)),), DType.UINT8),) if most else ()


def _checked(size: Callable[[Any], int], op: KernelOp) -> int:
    """Return the bytes of scratch memory that a library outside the backend asks for."""
    nbytes = size(op)
    if type(nbytes) is not int or nbytes < 0:
        raise InvalidArgumentError(
            f"the scratch memory of {op.kind} is said to be {nbytes!r:.200} bytes",
            op=op.kind,
            library=op.library,
            remedy="Return an int.",
        )
    return nbytes


def _room(plan: Plan) -> int:
    """Return the bytes that the status of an op takes."""
    return 0 if plan.status is None else -(-max(plan.status.spec.nbytes, 1) // _ALIGNED) * _ALIGNED
