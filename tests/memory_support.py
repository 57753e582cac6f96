"""What the tests of the allocator share."""

from __future__ import annotations

import os

from accel.errors import OutOfMemoryError
from accel.memory import Allocator, Block, Dependency, MemfdSlab, Usage

KIB = 1 << 10
MIB = 1 << 20


class Source:
    """A device's memory: creates slabs, up to a capacity, and knows which are open."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.capacity = capacity
        self.asked: list[int] = []
        self.open: list[MemfdSlab] = []

    def __call__(self, nbytes: int) -> MemfdSlab:
        self.asked.append(nbytes)
        self.open = [slab for slab in self.open if slab.fd >= 0]
        if sum(slab.nbytes for slab in self.open) + nbytes > self.capacity:
            raise OutOfMemoryError("the device is full", requested=nbytes)
        slab = MemfdSlab(nbytes)
        self.open.append(slab)
        return slab


def make(source: Source, *, limit: int | None = None, slab_bytes: int = MIB) -> Allocator:
    return Allocator(source, device="cpu:0", limit=limit, slab_bytes=slab_bytes, granularity=64 * KIB)


def pending(allocator: Allocator) -> list[Dependency]:
    """Return what freed memory waits for."""
    uses = Usage()
    for chunks in allocator._memory.resting.values():
        for chunk in chunks:
            uses.merge(chunk.usage)
    return uses.pending()


class Registration:
    def __init__(self, registrar: Registrar, address: int) -> None:
        self._registrar, self._address = registrar, address

    def close(self) -> None:
        self._registrar.known.pop(self._address, None)


class Registrar:
    """A context that knows what it was told of."""

    def __init__(self, error: Exception | None = None) -> None:
        self.known: dict[int, int] = {}
        self.error = error

    def register_host(self, address: int, nbytes: int) -> Registration:
        if self.error is not None:
            raise self.error
        assert address % os.sysconf("SC_PAGE_SIZE") == 0
        assert nbytes % os.sysconf("SC_PAGE_SIZE") == 0
        assert address not in self.known, "registered twice"
        self.known[address] = nbytes
        return Registration(self, address)

    def covers(self, piece: Block) -> bool:
        return any(start <= piece.address and piece.address + piece.nbytes <= start + nbytes for start, nbytes in self.known.items())
