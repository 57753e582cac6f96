"""Large requests cost time in proportion to their ops, fail as small ones do, and give the event loop its turns."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import accel
from accel.ops import Plan, Spec
from accel.testing import FaultPlan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from accel import AccelRef, Device


pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """A pass of the garbage collector belongs to no turn of accel's."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@contextlib.asynccontextmanager
async def cut_in_turns(share: float) -> AsyncIterator[None]:
    """See that no turn of the loop takes more than a share of the block's time. Times are of this thread's processor: others may use the machine."""
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)

    beating = asyncio.ensure_future(beat())
    await asyncio.sleep(0)
    longest, began = 0.0, time.thread_time()
    try:
        yield
        total = time.thread_time() - began
        await asyncio.sleep(0)
    finally:
        beating.cancel()
    assert longest < share * total, f"a turn took {longest * 1e3:.1f} of {total * 1e3:.1f} ms"


def chain(recorder: Any, ref: accel.AccelRef, count: int) -> accel.AccelRef:
    for _ in range(count):
        ref = recorder.elementwise.unary("neg", ref)
    return ref


async def test_expression_is_planned_and_sent_in_turns(rng: np.random.Generator) -> None:
    values = rng.standard_normal(4)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        x = device.xp.asarray(values)
        parts = [x * (number + 1) for number in range(3000)]
        total = parts[0]
        for each in parts[1:]:
            total = total + each
        async with cut_in_turns(0.2):
            await total
        np.testing.assert_allclose(await total.numpy(), values * (3000 * 3001 / 2))


async def test_parts_of_an_expression_may_be_computed_while_it_is_planned(rng: np.random.Generator) -> None:
    values = rng.standard_normal(4)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        x = device.xp.asarray(values)
        parts = [x * (number + 1) for number in range(1500)]
        sums = [parts[0]]
        for each in parts[1:]:
            sums.append(sums[-1] + each)
        running = asyncio.ensure_future(accel.evaluate(sums[-1]))
        for number in rng.permutation(len(sums))[:40]:
            np.testing.assert_allclose(await sums[number].numpy(), values * ((number + 1) * (number + 2) / 2))
        await running
        np.testing.assert_allclose(await sums[-1].numpy(), values * (1500 * 1501 / 2))


async def test_graph_is_recorded_and_replayed_in_turns(rng: np.random.Generator) -> None:
    values = rng.standard_normal(4)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        x = await device.put(values)
        async with device.graph() as graph:
            y = chain(graph, x, 10001)
            watched = cut_in_turns(0.3)
            await watched.__aenter__()
        await watched.__aexit__(None, None, None)
        async with cut_in_turns(0.5):
            await graph.replay()
        np.testing.assert_array_equal(await device.get(y), -values)


async def test_many_dropped_refs_are_freed_in_turns(device: accel.Device) -> None:
    x = await device.zeros(4)
    used = device.info().memory.used
    async with device.batch() as batch:
        refs: list[accel.AccelRef] = [batch.elementwise.unary("neg", x) for _ in range(24000)]
    async with cut_in_turns(0.5):
        while refs:  # that they end is no work of the device's
            del refs[-1500:]
            await asyncio.sleep(0)
        await device.get(x)
    assert device.info().memory.used == used


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_batch_leaves_in_turns_and_in_the_order_of_the_ends_of_blocks(host: Any, rng: np.random.Generator) -> None:
    values = rng.standard_normal(4)
    recorded = asyncio.Event()
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host)
        y = await device.put(values)

        async def large() -> None:
            async with device.batch() as batch:
                for _ in range(4000):
                    batch.elementwise.unary("neg", y, out=y)
                await watched.__aenter__()
                recorded.set()
            await watched.__aexit__(None, None, None)

        async def small() -> None:
            await recorded.wait()
            await device.elementwise.binary("add", y, 1.0, out=y)
            await device.elementwise.binary("mul", y, 2.0, out=y)

        watched = cut_in_turns(0.3)  # what records it is one turn
        await asyncio.gather(large(), small())
        np.testing.assert_allclose(await device.get(y), (values + 1) * 2)


async def test_cancelled_end_of_a_large_batch_forgets_its_refs(rng: np.random.Generator, device: accel.Device) -> None:
    x = await device.zeros(4)
    used = device.info().memory.used
    seen = set()
    for _ in range(5):
        made: list[accel.AccelRef] = []
        recorded = asyncio.Event()

        async def large(made: list[accel.AccelRef], recorded: asyncio.Event) -> None:
            async with device.batch() as batch:
                made.append(chain(batch, x, 3000))
                recorded.set()

        task = asyncio.ensure_future(large(made, recorded))
        await recorded.wait()
        for _ in range(int(rng.integers(60))):
            await asyncio.sleep(0)
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        seen.add(type(outcome))
        if outcome is None:
            np.testing.assert_array_equal(await device.get(made[0]), np.zeros(4))
        else:
            # It is of no block any more: it is there, or it is gone.
            with contextlib.suppress(accel.StaleRefError):
                await device.copy(made[0], await device.zeros(4))
        del made, task, outcome
    assert seen <= {type(None), asyncio.CancelledError}
    gc.collect()  # what a cancelled task had in hand
    await device.get(x)
    assert device.info().memory.used == used


_BOUND = 40.0
"""Seconds after which a test has failed; each takes about two."""


async def _chain(device: Device, start: AccelRef, length: int) -> tuple[AccelRef, float]:
    """Negate ``length`` times in one batch; return the last result, and the CPU seconds that this process took for the end of the block."""
    batch = device.batch()
    await batch.__aenter__()
    last = start
    for _ in range(length):
        last = batch.elementwise.unary("neg", last)
    began = time.process_time()
    await batch.__aexit__(None, None, None)
    return last, time.process_time() - began


async def test_the_time_of_an_op_does_not_grow_with_the_batch() -> None:
    short, long = 2_000, 60_000
    async with asyncio.timeout(_BOUND), accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        start = await device.put(np.ones(4))
        await _chain(device, start, short)  # what the first ops set up is not measured
        usual = min([(await _chain(device, start, short))[1] / short for _ in range(5)])
        last, seconds = await _chain(device, start, long)
        np.testing.assert_array_equal(await device.get(last), np.ones(4))
    assert seconds / long < 2 * usual, f"{usual * 1e6:.1f} us an op of {short}, {seconds / long * 1e6:.1f} us an op of {long}"


@dataclass(frozen=True, eq=False, slots=True)
class Carry(accel.KernelOp[accel.AccelRef]):
    """A copy of ``x``, with something on the way that is not needed."""

    library: ClassVar[str] = "carrying"
    kind: ClassVar[str] = "carry"

    x: accel.AccelRef
    load: bytes

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Carrying(accel.KernelLibrary):
    name = "carrying"

    @accel.kernel(Carry)
    def carry(self, op: Carry, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        source, target = np.asarray(inputs[0]), np.asarray(outputs[0])
        stream.submit(lambda: np.copyto(target, source))


async def test_a_batch_of_more_bytes_than_a_message_holds_runs_and_fails_as_any() -> None:
    failing = 275
    plan = FaultPlan().fail_at(failing + 3, accel.LibraryError("not this one"))
    async with asyncio.timeout(_BOUND), accel.System() as system:
        device = await system.open_device("cpu", host="process", faults=plan)
        await device.register(Carrying)
        counter, one = await device.put(np.zeros(1)), await device.full(1, 1.0, "float64")
        with pytest.raises(accel.LibraryError, match="not this one") as caught:
            async with device.batch() as batch:
                for _ in range(180):
                    last = batch.run(Carry(one, bytes(100 << 10)))
                    batch.elementwise.binary("add", counter, one, out=counter)
        assert (caught.value.op_index, last.is_stale) == (failing, True)
        assert (await device.get(counter)).tolist() == [failing // 2]
        assert (device.generation, device.info().in_flight) == (1, 0)
