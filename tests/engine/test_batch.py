"""Batches: recorded without awaiting, sent as one message, launched in order, answered once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel import ops
from accel.remote.arrays import MAX_INLINE_COPY
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, generation, in_flight, opened, task, turns, until, used
from tests.op_bugs_support import Bug, Bugs, BugsOnTheLoop

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.usefixtures("nothing_left")


ALL = ("blas", "elementwise", "reduce", "dnn")


@pytest.mark.parametrize("streams", [8, 1, 2])
async def test_batch_over_several_libraries(rng: np.random.Generator, streams: int) -> None:
    x = rng.standard_normal((6, 6))
    async with opened(streams=streams) as device:
        a = await device.put(x)
        async with device.batch() as batch:
            b = batch.put(2 * x)
            h = batch.blas.gemm(a, b)
            h = batch.elementwise.unary("relu", h)
            t = batch.reduce("sum", h, axis=0)
            c = batch.copy(h, batch.empty((6, 6), "float64"))
            batch.blas.scal(c, -1.0)
            z = batch.run(ops.Gemm(c, batch.zeros((6, 1), "float64")))
            f = batch.full(2, 5, "int8")
            assert len(batch) == 10
            assert (t.shape, t.dtype, t.device) == ((6,), accel.DType.FLOAT64, device)
        expected = np.maximum(x @ (2 * x), 0)
        np.testing.assert_allclose(await device.get(t), expected.sum(axis=0))
        np.testing.assert_allclose(await device.get(c), -expected)
        np.testing.assert_array_equal(await device.get(z), np.zeros((6, 1)))
        np.testing.assert_array_equal(await device.get(f), np.full(2, 5, np.int8))


async def test_batch_waits_for_all_of_its_streams() -> None:
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan, libraries=ALL) as device:
        a, b = await device.zeros((3, 3)), await device.zeros((3, 3))
        ended = False

        async def both() -> None:
            nonlocal ended
            async with device.batch() as batch:
                batch.blas.gemm(a, a)
                batch.elementwise.unary("neg", b)
            ended = True

        running = task(both())
        await in_flight(device, 2)
        assert not ended
        plan.release()
        await running


async def test_empty_batch_sends_nothing() -> None:
    plan = FaultPlan()
    async with opened(plan) as device:
        async with device.batch() as batch:
            pass
        assert len(batch) == 0
        assert plan.count == 0


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError, KeyboardInterrupt])
async def test_body_that_raises_sends_nothing(error: type[BaseException]) -> None:
    plan = FaultPlan()
    async with opened(plan) as device:
        a = await device.zeros((2, 2))
        with pytest.raises(error):
            async with device.batch() as batch:
                ref = batch.elementwise.unary("neg", a)
                batch.blas.scal(a, 3.0)
                raise error
        assert plan.count == 1
        assert ref.is_stale
        assert (await failure(device.get(ref), accel.StaleRefError)).reason == "freed"


async def test_failed_op_stops_later_ones_and_keeps_earlier_results(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 4))
    for streams in (8, 1):
        plan = FaultPlan().fail_at(3, accel.LibraryError("refused", code=13), op="unary")
        async with opened(plan, streams=streams) as device:
            a, marker = await device.put(x), await device.zeros((4, 4), "float64")
            with pytest.raises(accel.LibraryError) as caught:
                async with device.batch() as batch:
                    refs = [batch.elementwise.unary("neg", a)]
                    refs.append(batch.blas.gemm(a, a))
                    refs.append(batch.elementwise.unary("abs", refs[1]))
                    refs.append(batch.reduce("sum", a))
                    refs.append(batch.elementwise.unary("exp", a))
                    refs.append(batch.blas.gemm(a, a))
                    batch.blas.axpy(a, marker)
            assert (caught.value.op_index, caught.value.op, caught.value.code) == (4, "unary", 13)
            assert caught.value.device == "cpu:0"
            for ref, expected in zip(refs[:4], (-x, x @ x, abs(x @ x), x.sum()), strict=True):
                np.testing.assert_allclose(await device.get(ref), expected)
            for ref in refs[4:]:
                assert ref.is_stale
                assert (await failure(device.get(ref), accel.StaleRefError)).reason == "freed"
            np.testing.assert_array_equal(await device.get(marker), np.zeros((4, 4)))


@pytest.mark.parametrize("kind", ["kernel", "library"])
async def test_op_that_cannot_be_bound_keeps_earlier_results(rng: np.random.Generator, kind: str) -> None:
    class Odd(ops.Empty):
        kind = "odd"

    class Strange(ops.Empty):
        library = "astrology"

    odd = (Odd if kind == "kernel" else Strange)((2,), accel.DType.FLOAT32)
    x = rng.standard_normal((4, 4))
    async with opened() as device:
        a = await device.put(x)
        with pytest.raises(accel.UnsupportedError) as caught:
            async with device.batch() as batch:
                first = batch.blas.gemm(a, a)
                second = batch.elementwise.unary("neg", first)
                never = batch.run(odd)
                later = batch.elementwise.unary("neg", second)
        assert caught.value.op_index == 2
        np.testing.assert_allclose(await device.get(second), -(x @ x))
        np.testing.assert_allclose(await device.get(first), x @ x)
        assert never.is_stale
        assert later.is_stale


async def test_invalid_op_is_refused_while_recording() -> None:
    plan = FaultPlan()
    async with opened(plan) as device:
        a = await device.zeros((2, 3))
        with pytest.raises(accel.InvalidArgumentError):
            async with device.batch() as batch:
                batch.elementwise.unary("neg", a)
                batch.blas.gemm(a, a)
        assert plan.count == 1
        async with device.batch() as batch:
            refused: tuple[Callable[[], object], ...] = (
                lambda: batch.blas.gemm(a, a),
                lambda: batch.run(ops.Get(a, np.zeros((3, 2), np.float32))),
                lambda: batch.get(np.zeros(3)),  # type: ignore[arg-type]
                lambda: batch.get(a, out=[1.0]),  # type: ignore[arg-type]
                lambda: batch.run(ops.Free(a)),
                lambda: batch.elementwise.unary("neg", a, timeout=1.0),
            )
            for wrong in refused:
                with pytest.raises(accel.InvalidArgumentError):
                    wrong()
            kept = batch.elementwise.unary("neg", a)
        assert (await device.get(kept)).shape == (2, 3)


async def test_refs_of_a_batch_are_its_own_until_it_ends(device: accel.Device) -> None:
    a = await device.zeros((2, 2))
    async with device.batch() as batch:
        ref = batch.elementwise.unary("neg", a)
        for call in (device.get(ref), device.elementwise.unary("neg", ref), device.free(ref), device.copy(a, ref)):
            await failure(call, accel.InvalidArgumentError)
        async with device.batch() as other:
            with pytest.raises(accel.InvalidArgumentError):
                other.elementwise.unary("neg", ref)
            inner = other.elementwise.unary("exp", a)
        both = batch.elementwise.binary("add", ref, inner)
    np.testing.assert_array_equal(await device.get(both), np.ones((2, 2)))


async def test_batch_records_inside_its_block_only_and_once(device: accel.Device) -> None:
    batch = device.batch()
    with pytest.raises(accel.NotInitializedError):
        batch.zeros(1)
    async with batch:
        batch.zeros(1)
    with pytest.raises(accel.ClosedError):
        batch.zeros(1)
    with pytest.raises(accel.ClosedError):
        await batch.__aenter__()


async def test_batch_cancelled_at_its_end_is_dropped_if_it_was_not_launched() -> None:
    plan = FaultPlan().hang_at(2)
    async with opened(plan, max_in_flight=1) as device:
        x = await device.full((), 1.0)
        hanging = task(device.zeros(1))
        await in_flight(device, 1)
        refs: list[accel.AccelRef] = []

        async def change() -> None:
            async with device.batch() as batch:
                refs.append(batch.full(8, 2.0))
                batch.blas.scal(x, 7.0)

        changing = task(change())
        await turns()
        changing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await changing
        assert refs[0].is_stale
        plan.release()
        await hanging
        assert float(await device.get(x)) == 1.0
        assert plan.count == 3


async def test_large_batch_that_is_cancelled_midway_leaves_no_memory() -> None:
    plan = FaultPlan().hang_at(30)
    async with opened(plan, max_in_flight=8) as device:

        async def many() -> None:
            async with device.batch() as batch:
                refs = [batch.full(64, float(number)) for number in range(60)]
            assert refs

        running = task(many())
        await until(lambda: plan.fired)
        await turns()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        del running
        plan.release()
        await in_flight(device, 0)
        await until(lambda: used(device) == 0)
        assert plan.count < 60


@pytest.mark.parametrize("turn", range(0, 10, 2))
async def test_batch_that_is_cancelled_while_a_library_is_opened_leaves_no_memory(turn: int, device: accel.Device) -> None:

    async def change() -> None:
        async with device.batch() as batch:
            h = batch.full((4, 4), 2.0)
            h = batch.blas.gemm(h, h)
            batch.reduce("sum", h)

    changing = task(change())
    await turns(turn)
    changing.cancel()
    await asyncio.gather(changing, return_exceptions=True)
    assert used(device) >= 0
    del changing
    await bounded(device.zeros(1))
    await in_flight(device, 0)
    await until(lambda: used(device) == 0)


async def test_rebuild_while_recording_is_told_at_the_end() -> None:
    plan = FaultPlan().poison_at(2)
    async with opened(plan) as device:
        a = await device.zeros((2, 2))
        with pytest.raises(accel.StaleRefError) as caught:
            async with device.batch() as batch:
                made = batch.full((2, 2), 1.0)
                await failure(device.elementwise.unary("neg", a), accel.ContextPoisonedError)
                await generation(device, 2)
                batch.full(3, 1.0)
        assert caught.value.reason == "generation"
        assert made.is_stale
        assert plan.count == 2
        async with device.batch() as batch:
            made = batch.full((2, 2), 1.0)
        np.testing.assert_array_equal(await device.get(made), np.ones((2, 2)))


async def test_batch_opened_while_rebuilding_waits_for_the_next_generation() -> None:
    async with opened(FaultPlan().poison_at(1)) as device:
        await failure(device.zeros(1), accel.ContextPoisonedError)
        assert device.state is accel.DeviceState.REBUILDING
        async with device.batch() as batch:
            made = batch.full(2, 6.0)
        assert made.generation == 2
        np.testing.assert_array_equal(await device.get(made), np.full(2, 6, np.float32))


@pytest.mark.parametrize("when", [1, 5, 30])
async def test_fault_in_a_batch_is_answered_once(when: int) -> None:
    plan = FaultPlan().poison_at(when, op="unary")
    async with opened(plan, max_in_flight=8) as device:
        a = await device.zeros(4)
        with pytest.raises(accel.ContextPoisonedError) as caught:
            async with device.batch() as batch:
                for _ in range(40):
                    h = batch.elementwise.unary("exp", a)
                    batch.reduce("sum", h)
        assert caught.value.executed == "unknown"
        assert h.is_stale
        await generation(device, 2)
        assert device.info().in_flight == 0
        assert used(device) == 0


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_batch_copies_to_the_host(rng: np.random.Generator, host: str) -> None:
    x = rng.standard_normal((6, 5))
    out = np.full((6, 6), -1.0)
    async with opened(host=host) as device:
        a = await device.put(2 * x)
        async with device.batch() as batch:
            b = batch.put(x)
            found = batch.get(batch.blas.gemm(a, b, transpose_b=True), out=out)
            assert found is out
            assert (out == -1).all(), "nothing runs before the block ends"
            rows, columns, same = batch.get(b[2:4]), batch.get(b[:, ::2]), batch.get(a)
            c = batch.elementwise.unary("neg", b)
            batch.elementwise.unary("neg", b, out=b)
            later = batch.get(b)
        np.testing.assert_allclose(out, 2 * x @ x.T, rtol=1e-12)
        for got, expected in ((rows, x[2:4]), (columns, x[:, ::2]), (same, 2 * x), (later, -x)):
            np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(await device.get(c), -x)
        async with device.batch() as batch:
            alone = batch.get(a)
        np.testing.assert_array_equal(alone, 2 * x)


@pytest.mark.parametrize("nbytes", [MAX_INLINE_COPY // 2, MAX_INLINE_COPY + 8, 5 << 20])
async def test_arrays_of_a_batch_may_be_large(rng: np.random.Generator, nbytes: int) -> None:
    x = rng.standard_normal(nbytes // 8)
    async with opened(host="process", pinned_limit=1 << 20) as device:
        for _ in range(2):
            async with device.batch() as batch:
                batch.put(x[:3])
                a = batch.put(x)
                first, second = batch.get(batch.elementwise.unary("neg", a)), batch.get(a)
                last = batch.get(batch.put(x[:10]))
            np.testing.assert_array_equal(first, -x)
            np.testing.assert_array_equal(second, x)
            np.testing.assert_array_equal(last, x[:10])
            assert device.info().pinned.used == 0, "what the copies went through is given back"


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_what_a_batch_copies_to_the_host_behind_a_failure_is_not_written(host: str) -> None:
    plan = FaultPlan().fail_at(1, op="reduce", error=accel.LibraryError("no"))
    async with opened(plan, host=host) as device:
        a, out = await device.put(np.ones(4)), np.full(4, -1.0)
        with pytest.raises(accel.LibraryError) as raised:
            async with device.batch() as batch:
                before = batch.get(a)
                batch.reduce("sum", a)
                batch.get(a, out=out)
        assert raised.value.op_index == 1
        assert before.shape == (4,)
        np.testing.assert_array_equal(out, np.full(4, -1.0))
        np.testing.assert_array_equal(await device.get(a), np.ones(4))
        assert device.info().pinned.used == 0


async def test_errors_name_a_batch_as_it_was_named() -> None:
    plan = FaultPlan().hang_at(1, op="reduce")
    async with opened(plan) as device:
        a = await device.zeros(3)
        with pytest.raises(accel.DeadlineExceededError, match="step did not end") as raised:
            async with device.batch(timeout=0.05, name="step") as batch:
                batch.reduce("sum", a)
        assert raised.value.op == "step"


OLD, NEW = np.full(4, 7.0), np.arange(4.0)


async def fail(device: accel.Device, x: accel.AccelRef, first: Bug, *outs: accel.AccelRef) -> None:
    with pytest.raises(accel.LibraryError) as caught:
        async with device.batch(timeout=20) as batch:
            batch.run(first)
            for out in outs:
                batch.copy(x, out)
    assert (caught.value.op, caught.value.op_index, caught.value.scope) == ("bug", 0, accel.FaultScope.OP)


@pytest.mark.parametrize(("host", "library"), [("inline", Bugs), ("inline", BugsOnTheLoop), ("process", Bugs)])
async def test_what_was_to_be_written_behind_a_kernel_that_raises_is_as_it_was_and_what_the_kernel_was_to_write_is_not(
    library: type[Bugs], host: str
) -> None:
    async with opened(host=host) as device:
        await device.register(library)
        x = await device.put(NEW)
        async with device.batch() as batch:  # from here on batches of these libraries go into the lane as a whole
            batch.copy(batch.run(Bug(x)), batch.copy(x, batch.zeros(4, "float64")))
        for durable, wanted in ((True, accel.StaleRefError), (False, accel.LibraryError)):
            behind, out = await device.put(OLD, durable=durable), await device.put(OLD, durable=durable)
            await fail(device, x, Bug(x, "kernel:value"), behind)
            np.testing.assert_array_equal(await device.get(behind), OLD)
            await fail(device, x, Bug(x, "kernel:value", out), out, out)
            assert (await failure(device.get(out), wanted)).scope is accel.FaultScope.OP
            await device.put(OLD, out=out)
            np.testing.assert_array_equal(await device.get(out), OLD)


async def test_a_batch_goes_on_where_it_had_no_memory_when_some_is_freed_before_its_turn() -> None:
    mib = 1 << 20
    async with opened(memory_limit=8 * mib, host="inline") as device:
        await device.free(await device.zeros((8 * mib,), "uint8"))  # one slab, of the limit
        held = [await device.zeros((6 * mib,), "uint8")]
        results: list[accel.AccelRef] = []

        async def send() -> None:
            async with device.batch() as batch:
                results.extend([batch.full((size * mib,), 7, "uint8") for size in (1, 4, 1)])

        async def free() -> None:
            held.clear()

        # The first op is dispatched at once. The second one lacks memory until free() has run.
        await bounded(asyncio.gather(task(send()), task(free())))
        for ref in results:
            assert set(await device.get(ref)) == {7}
