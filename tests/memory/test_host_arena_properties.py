"""Whatever is taken, freed, attached and detached in whatever order: pieces do not overlap, the limit holds, and all memory comes back."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import accel
from accel.memory import Block, HostArena
from tests.memory_support import KIB, Registrar

if TYPE_CHECKING:
    import numpy as np

LIMIT = 1 << 20


class ArenaMachine(RuleBasedStateMachine):
    """An arena beside a list of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.registrar: Registrar | None = None
        self.arena = HostArena(LIMIT, block_bytes=256 * KIB)
        self.held: list[Block] = []

    @rule(nbytes=st.one_of(st.integers(0, 4 * KIB), st.integers(0, LIMIT)))
    def take(self, nbytes: int) -> None:
        piece = self.arena.grow(nbytes) if nbytes <= LIMIT * 7 // 8 else None
        if piece is not None:
            assert piece.nbytes == nbytes
            self.held.append(piece)
        elif nbytes <= LIMIT * 7 // 8:
            assert self.held, "an arena that nobody holds anything of has room"

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.arena.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.registrar is None)
    @rule()
    def attach(self) -> None:
        self.registrar = Registrar()
        self.arena.attach(self.registrar)

    @precondition(lambda self: self.registrar is not None)
    @rule()
    def detach(self) -> None:
        assert self.registrar is not None
        self.arena.detach(self.registrar)
        assert self.registrar.known == {}
        self.registrar = None

    @invariant()
    def pieces_lie_apart(self) -> None:
        places = sorted((piece.address, piece.address + piece.nbytes) for piece in self.held)
        for (_, end), (start, _) in itertools.pairwise(places):
            assert end <= start

    @invariant()
    def the_limit_holds(self) -> None:
        statistics = self.arena.statistics()
        assert sum(piece.nbytes for piece in self.held) <= statistics.used <= statistics.reserved <= LIMIT

    @invariant()
    def the_device_knows_every_piece(self) -> None:
        if self.registrar is not None:
            assert sum(self.registrar.known.values()) == self.arena.statistics().reserved
            for piece in self.held:
                assert piece.slab.address in self.registrar.known

    def teardown(self) -> None:
        while self.held:
            self.arena.free(self.held.pop())
        assert self.arena.statistics().used == 0
        self.arena.close()
        assert self.arena.statistics().reserved == 0
        assert self.registrar is None or self.registrar.known == {}


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=12),
    cancels=st.sets(st.integers(0, 11), max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_calls_that_wait_are_served_in_order_and_all_memory_comes_back(sizes: list[int], cancels: set[int], order: Any) -> None:
    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cpu", pinned_limit=LIMIT)
            held: list[np.ndarray[Any, Any]] = [await device.pinned(64 * KIB, "uint8") for _ in range(16)]
            served: list[int] = []

            async def one(number: int, size: int) -> None:
                array = await device.pinned(size * 64 * KIB, "uint8")
                array[:] = number
                served.append(number)
                held.append(array)

            tasks = [asyncio.ensure_future(one(*each)) for each in enumerate(sizes)]
            await asyncio.sleep(0)
            assert device.info().pinned.waiting == len(sizes)
            for number in cancels & set(range(len(sizes))):
                tasks[number].cancel()
            async with asyncio.timeout(20):
                while not all(task.done() for task in tasks):
                    if held:
                        del held[order.randrange(len(held))]
                    await asyncio.sleep(0)
            assert served == sorted(served)
            assert served == [number for number in range(len(sizes)) if number not in cancels]
            held.clear()
            info = device.info().pinned
            assert (info.used, info.waiting) == (0, 0)

    asyncio.run(main())
