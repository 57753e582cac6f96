"""Random programs on a device give what numpy gives in the same order; random cancels, deadlines and faults lose no waiter and no memory."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import accel
from accel.testing import FaultPlan
from tests.device_support import Array, bounded, in_flight, opened, task, turns, until, used

COUNT = 4
SETTINGS = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])

buffers = st.integers(0, COUNT - 1)
steps = st.one_of(
    st.tuples(st.just("gemm"), buffers, buffers, buffers),
    st.tuples(st.just("binary"), buffers, buffers, buffers),
    st.tuples(st.just("unary"), buffers, buffers, st.just(0)),
    st.tuples(st.just("scal"), buffers, st.just(0), st.just(0)),
    st.tuples(st.just("axpy"), buffers, buffers, st.just(0)),
    st.tuples(st.just("copy"), buffers, buffers, st.just(0)),
    st.tuples(st.just("put"), buffers, st.just(0), st.just(0)),
    st.tuples(st.just("get"), buffers, st.just(0), st.just(0)),
    st.tuples(st.just("replace"), buffers, buffers, st.just(0)),
)
Step = tuple[str, int, int, int]
options = st.fixed_dictionaries(
    {
        "streams": st.sampled_from([8, 2, 1]),
        "max_in_flight": st.sampled_from([1, 3, 512]),
        "pending_limit": st.sampled_from([10, 1024]),
        "completion": st.sampled_from(["adaptive", "polled"]),
    }
)


class Model:
    """The same program in numpy, one step after the other."""

    def __init__(self, values: list[Array]) -> None:
        self.values = values
        self.read: list[Array] = []

    def apply(self, step: Step, number: int) -> None:
        kind, i, j, k = step
        v = self.values
        if kind == "gemm":
            v[k] = v[i] @ v[j] if k not in (i, j) else v[k]
        elif kind == "binary":
            v[k] = np.maximum(v[i], v[j])
        elif kind == "unary":
            v[j] = np.tanh(v[i])
        elif kind == "scal":
            v[i] = v[i] * -0.5
        elif kind == "axpy":
            v[j] = v[j] + 0.25 * v[i] if i != j else v[j]
        elif kind == "copy":
            v[j] = v[i].copy()
        elif kind == "put":
            v[i] = np.full_like(v[i], number / 64)
        elif kind == "get":
            self.read.append(v[i].copy())
        else:
            v[j] = -v[i]


def send(target: accel.Device | accel.Batch, refs: list[accel.AccelRef], step: Step, number: int) -> Any:
    """Return what does a step on the device: an awaitable, or a batch's ref; ``None`` where there is nothing to do."""
    kind, i, j, k = step
    if kind == "gemm":
        return target.blas.gemm(refs[i], refs[j], out=refs[k]) if k not in (i, j) else None
    if kind == "binary":
        return target.elementwise.binary("max", refs[i], refs[j], out=refs[k])
    if kind == "unary":
        return target.elementwise.unary("tanh", refs[i], out=refs[j])
    if kind == "scal":
        return target.blas.scal(refs[i], -0.5)
    if kind == "axpy":
        return target.blas.axpy(refs[i], refs[j], alpha=0.25) if i != j else None
    if kind == "copy":
        return target.copy(refs[i], refs[j]) if i != j else None
    if kind == "put":
        return target.put(np.full(refs[i].shape, number / 64), out=refs[i])
    return None


async def run_program(device: accel.Device, refs: list[accel.AccelRef], program: list[Step], cuts: set[int]) -> list[Array]:
    """Send every step from a task of its own; steps between two cuts go as one batch every other time."""
    calls: list[asyncio.Future[Any]] = []
    reads: list[asyncio.Future[Array]] = []
    number = 0
    while number < len(program):
        end = next((cut for cut in sorted(cuts) if cut > number), len(program))
        if number in cuts:
            async with device.batch() as batch:
                for index in range(number, end):
                    kind, i, j, _ = program[index]
                    if kind == "replace":
                        refs[j] = batch.elementwise.unary("neg", refs[i])
                    elif kind != "get":
                        send(batch, refs, program[index], index)
            for index in range(number, end):
                assert program[index][0] != "get"
        else:
            for index in range(number, end):
                kind, i, j, _ = program[index]
                if kind == "get":
                    reads.append(task(device.get(refs[i])))
                elif kind == "replace":
                    refs[j] = await device.elementwise.unary("neg", refs[i])
                elif (awaitable := send(device, refs, program[index], index)) is not None:
                    calls.append(task(awaitable))
                await asyncio.sleep(0)
        number = end
    await asyncio.gather(*calls)
    return [await each for each in reads]


@SETTINGS
@given(st.lists(steps, max_size=40), options, st.integers(0, 2**32 - 1), st.sets(st.integers(0, 40), max_size=4), st.booleans())
def test_random_programs_agree_with_numpy(
    program: list[Step], given_options: dict[str, Any], seed: int, cuts: set[int], hangs: bool
) -> None:
    values = list(np.random.default_rng(seed).uniform(-1, 1, (COUNT, 4, 4)))
    cuts = {cut for cut in cuts if cut < len(program)}
    # A batch cannot read back, so where one is to be there are no gets.
    batched = {index for cut in cuts for index in range(cut, next((other for other in sorted(cuts) if other > cut), len(program)))}
    program = [step if index not in batched or step[0] != "get" else ("scal", step[1], 0, 0) for index, step in enumerate(program)]
    model = Model([value.copy() for value in values])
    for number, step in enumerate(program):
        model.apply(step, number)

    async def main() -> None:
        plan = FaultPlan()
        if hangs:
            plan.hang_at(COUNT + 1)
        async with opened(plan, **given_options) as device:
            refs = [await device.put(value) for value in values]
            running = task(run_program(device, refs, program, cuts))
            await turns(20)
            plan.release()
            read = await bounded(running)
            for ref, expected in zip(refs, model.values, strict=True):
                np.testing.assert_allclose(await device.get(ref), expected, rtol=1e-10, atol=1e-12)
            assert len(read) == len(model.read)
            for got, expected in zip(read, model.read, strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)
            refs.clear()
            del ref, running
            await in_flight(device, 0)
            await until(lambda: used(device) == 0, "no memory in use")

    asyncio.run(main())


events = st.lists(
    st.tuples(st.sampled_from(["op", "batch", "late", "cancel", "free", "turns"]), st.integers(0, 30)), min_size=1, max_size=40
)
faults = st.lists(st.tuples(st.sampled_from(["poison", "fail", "memory", "hang"]), st.integers(1, 40)), max_size=4)


def planned(entries: list[tuple[str, int]]) -> FaultPlan:
    plan = FaultPlan()
    for kind, n in entries:
        if kind == "poison":
            plan.poison_at(n)
        elif kind == "fail":
            plan.fail_at(n, accel.LibraryError("planned"))
        elif kind == "memory":
            plan.out_of_memory_at(n)
        else:
            plan.hang_at(n)
    return plan


async def one_batch(device: accel.Device, ref: accel.AccelRef) -> None:
    async with device.batch() as batch:
        h = batch.elementwise.unary("neg", ref)
        h = batch.blas.gemm(h, h)
        batch.reduce("sum", h)


async def one_op(device: accel.Device, number: int, timeout: float | None = None) -> None:
    ref = await device.full((3, 3), float(number), timeout=timeout)
    for _ in range(number % 3):
        ref = await device.blas.gemm(ref, ref, timeout=timeout)
    got = await device.get(ref, timeout=timeout)
    if number % 3 == 0:
        np.testing.assert_array_equal(got, np.full((3, 3), number, np.float32))


async def play(device: accel.Device, script: list[tuple[str, int]]) -> list[asyncio.Future[None]]:
    calls: list[asyncio.Future[None]] = []
    shared = [await device.zeros((3, 3))]
    for kind, number in script:
        if kind == "op":
            calls.append(task(one_op(device, number)))
        elif kind == "late":
            calls.append(task(one_op(device, number, timeout=1e-4 * (number + 1))))
        elif kind == "batch":
            calls.append(task(one_batch(device, shared[-1])))
        elif kind == "free" and number % 4 == 0:
            calls.append(task(device.free(shared[-1])))
            shared.append(shared[-1])
        elif kind == "cancel" and calls:
            calls[number % len(calls)].cancel()
        else:
            await turns(number)
    return calls


ALLOWED = (asyncio.CancelledError, accel.AccelError)


@SETTINGS
@given(events, faults, options)
@example([("batch", 0), ("free", 0), ("free", 0), ("free", 1), ("cancel", 1)], [], {"max_in_flight": 1, "pending_limit": 10})
def test_every_await_ends_and_nothing_leaks(
    script: list[tuple[str, int]], entries: list[tuple[str, int]], given_options: dict[str, Any]
) -> None:
    async def main() -> None:
        plan = planned(entries)
        restart = accel.RestartStrategy(max_restarts=10, backoff=(0.0, 0.0))
        async with opened(plan, restart=restart, **given_options) as device:
            playing = task(play(device, script))
            await turns(60)
            plan.release()
            try:
                calls = await bounded(playing)
            except accel.AccelError:
                calls = []
            del playing
            results = await bounded(asyncio.gather(*calls, return_exceptions=True))
            wrong = [result for result in results if result is not None and not isinstance(result, ALLOWED)]
            assert not wrong, wrong
            errors = [result for result in results if isinstance(result, accel.AccelError)]
            assert len({id(error) for error in errors}) == len(errors), "each waiter has an error of its own"
            del results, errors, calls, wrong
            await until(lambda: device.state is accel.DeviceState.READY)
            await in_flight(device, 0)
            assert device.info().queued == 0
            await until(lambda: used(device) == 0, "no memory in use")
            # Faults that are left may still strike; after them the device serves.
            for _ in range(8):
                try:
                    await bounded(one_op(device, 3))
                    break
                except accel.AccelError:
                    continue

    asyncio.run(main())
