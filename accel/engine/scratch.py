"""Memory that kernels work in besides operands and results: the allocator's, for the time of one op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.backend import TakesScratch
from accel.dtype import DType
from accel.ops import Spec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accel.actors import ActorSystem
    from accel.backend import AccelDevice
    from accel.engine.lane import Lane
    from accel.memory import Allocator, Block, Dependency
    from accel.ops import KernelOp

__all__ = ["Scratch"]


class Scratch:
    """What one context's ops work in.

    Parameters
    ----------
    device
        The backend's context.
    allocator
        Has the memory.
    system
        Runs what blocks.

    Attributes
    ----------
    libraries : frozenset of str
        Whose ops need any.
    reserved : Block or None
        For the op that is about to be sent.
    """

    __slots__ = ("_allocator", "_device", "_system", "libraries", "reserved")

    def __init__(self, device: AccelDevice, allocator: Allocator, system: ActorSystem) -> None:
        self._device: Any = device
        self._allocator = allocator
        self._system = system
        self.libraries = device.scratch_libraries if isinstance(device, TakesScratch) else frozenset()
        self.reserved: Block | None = None

    def reserve(self, op: KernelOp, lane: Lane) -> bool:
        """Find memory for an op of the libraries; ``False`` if there is no room, or it has to be measured how much it takes."""
        self.give_up()  # of an op that could not even be sent
        nbytes = self._nbytes(op)
        self.reserved = None if nbytes is None else self._allocator.allocate(nbytes, lane)
        return self.reserved is not None

    def give_up(self) -> None:
        """Give back what was reserved, if anything was: the op is not sent now."""
        block, self.reserved = self.reserved, None
        if block is not None:
            self._allocator.free(block)

    def lend(self, lane: Lane, seq: int, dependencies: list[Dependency]) -> int:
        """Give an op that has its sequence number the reserved memory, and return the address. The next user of the memory waits for the op."""
        block = self.reserved
        assert block is not None, "something was reserved"
        address = block.address
        block.usage.write(lane, seq, dependencies)
        self.give_up()
        return address

    async def specs(self, ops: Iterable[KernelOp]) -> tuple[Spec, ...]:
        """Return what is enough for each of several ops, measured where that must be: nothing, where none works in any, or one buffer."""
        most: list[int] = []
        for op in ops:
            if op.library in self.libraries:
                while (nbytes := self._nbytes(op)) is None:
                    await self._system.run_blocking(self._device.measure_scratch, op)
                most.append(nbytes)
        return (Spec((max(most),), DType.UINT8),) if most else ()

    def _nbytes(self, op: KernelOp) -> int | None:
        found: int | None = self._device.scratch_nbytes(op)
        return found
