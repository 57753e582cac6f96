"""A Python exception in a user's op on the CPU is the error of that op and of those that read its output; the device goes on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from tests.cpu_ops_support import PATIENCE, Ways, Work

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTS = pytest.mark.parametrize("host", ["inline", "process"])


@pytest.fixture(autouse=True)
def gate() -> Iterator[None]:
    Ways.gate.clear()
    yield
    Ways.gate.set()


async def opened(system: accel.System, host: Any = "inline") -> accel.Device:
    device = await system.open_device("cpu", host=host)
    await device.register(Ways)
    return device


def is_of_the_op(error: object, index: int | None = None) -> bool:
    return (
        isinstance(error, accel.LibraryError)
        and (error.scope, error.op, error.library, error.op_index) == (accel.FaultScope.OP, "work", "ways", index)
        and "ValueError: a bad request" in error.message
    )


async def ended(*sent: asyncio.Task[Any]) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*sent, return_exceptions=True), PATIENCE)


@HOSTS
async def test_an_exception_in_submitted_work_is_an_error_of_that_op(host: str) -> None:
    async with accel.System() as system:
        device = await opened(system, host)
        x = await device.put(np.arange(4.0))
        kept = await device.put(np.ones(3), durable=True)
        for gated in (False, True, False, True, False):
            Ways.gate.set()
            with pytest.raises(accel.LibraryError) as caught:
                await device.run(Work(x, "raise", gated=gated and host == "inline"), timeout=PATIENCE)
            assert is_of_the_op(caught.value)
            assert caught.value.__cause__ is not None
        np.testing.assert_array_equal(await device.get(await device.run(Work(x), timeout=PATIENCE)), -np.arange(4.0))
        np.testing.assert_array_equal(await device.get(kept), np.ones(3))
        assert (device.state, device.generation, device.info().restarts) == (accel.DeviceState.READY, 1, 0)


@HOSTS
async def test_every_kind_of_exception_is_answered_and_only_a_fault_is_a_fault(host: str) -> None:
    async with accel.System() as system:
        device = await opened(system, host)
        x = await device.put(np.arange(4.0))
        for way, kind in (
            ("memory", accel.OutOfMemoryError),
            ("cancel", accel.LibraryError),
            ("exit", accel.LibraryError),
            ("unprintable", accel.LibraryError),
        ):
            with pytest.raises(kind) as caught:
                await device.run(Work(x, way), timeout=PATIENCE)
            error = caught.value
            assert (error.scope, error.op, error.retryable) == (accel.FaultScope.OP, "work", way == "memory")
        assert (device.state, device.generation) == (accel.DeviceState.READY, 1)
        with pytest.raises(accel.ContextPoisonedError):
            await device.run(Work(x, "fault"), timeout=PATIENCE)
        x = await device.put(np.arange(4.0), timeout=PATIENCE)
        assert device.generation == 2


async def test_what_was_enqueued_later_and_reads_the_output_fails_with_the_same_error() -> None:
    async with accel.System() as system:
        device = await opened(system)
        x, y = await device.put(np.arange(4.0)), await device.put(np.ones(4))
        z = await device.put(np.ones(4))
        await device.elementwise.unary("neg", await device.elementwise.unary("neg", x))  # its library is there

        async def batch() -> None:
            async with device.batch() as batch:
                batch.elementwise.unary("relu", x)
                batch.elementwise.unary("neg", y, out=z)

        failing = [
            device.run(Work(x, "raise", y, gated=True)),
            device.elementwise.unary("neg", y),
            device.get(y),
            device.get(y[1:3]),
            device.run(Work(y)),
            batch(),
            device.get(z),
        ]
        sent = [asyncio.create_task(each) for each in (*failing, device.run(Work(x)), device.get(x))]
        while device.info().in_flight < len(sent):
            await asyncio.sleep(0)
        Ways.gate.set()
        *errors, good, _ = await ended(*sent)
        assert [is_of_the_op(error, 1 if at == 5 else None) for at, error in enumerate(errors)] == [True] * len(failing)
        assert len({id(error) for error in errors}) == len(failing)
        np.testing.assert_array_equal(await device.get(good), -np.arange(4.0))
        assert (device.state, device.generation) == (accel.DeviceState.READY, 1)


async def test_a_failed_output_stays_failed_until_it_is_wholly_rewritten() -> None:
    async with accel.System() as system:
        device = await opened(system)
        x, y = await device.put(np.arange(4.0)), await device.put(np.ones(4))
        with pytest.raises(accel.LibraryError):
            await device.run(Work(x, "raise", y))
        part = device.put(np.zeros(2), out=y[:2])
        for use in (part, device.get(y), device.get(y[2:]), device.blas.axpy(x, y), device.copy(y, x)):
            with pytest.raises(accel.LibraryError) as caught:
                await use
            assert is_of_the_op(caught.value)
        np.testing.assert_array_equal(await device.get(x), np.arange(4.0))
        await device.run(Work(x, out=y))
        np.testing.assert_array_equal(await device.get(y), -np.arange(4.0))


async def test_a_rewrite_that_was_cancelled_leaves_the_output_failed() -> None:
    async with accel.System() as system:
        device = await opened(system)
        x, y = await device.put(np.arange(4.0)), await device.put(np.ones(4))
        failing = asyncio.create_task(device.run(Work(x, "raise", y, gated=True)))
        rewriting = asyncio.create_task(device.run(Work(x, out=y)))
        while device.info().in_flight < 1:
            await asyncio.sleep(0)
        rewriting.cancel()
        reading = asyncio.create_task(device.get(y))
        await asyncio.sleep(0)
        Ways.gate.set()
        first, second, third = await ended(failing, rewriting, reading)
        assert is_of_the_op(first)
        assert isinstance(second, asyncio.CancelledError)
        assert is_of_the_op(third) or np.array_equal(third, -np.arange(4.0))  # the rewrite may have been enqueued: then it ran


@HOSTS
async def test_a_batch_says_which_op_failed_and_keeps_what_came_before(host: str) -> None:
    async with accel.System() as system:
        device = await opened(system, host)
        x, y = await device.put(np.arange(4.0)), await device.put(np.ones(4))
        with pytest.raises(accel.LibraryError) as caught:
            async with device.batch(timeout=PATIENCE) as batch:
                good = batch.run(Work(x))
                bad = batch.run(Work(x, "raise"))
                after = batch.elementwise.unary("neg", bad)
                batch.run(Work(bad, out=y))
        assert is_of_the_op(caught.value, 1)
        np.testing.assert_array_equal(await device.get(good), -np.arange(4.0))
        for void in (bad, after):
            with pytest.raises(accel.StaleRefError):
                await device.get(void)
        with pytest.raises(accel.LibraryError) as caught:
            await device.get(y)
        assert is_of_the_op(caught.value)
        assert (device.state, device.generation) == (accel.DeviceState.READY, 1)


@HOSTS
async def test_a_replay_fails_and_the_next_one_works(host: str) -> None:
    async with accel.System() as system:
        device = await opened(system, host)
        x, y = await device.put(np.arange(4.0)), await device.put(np.ones(4))
        async with device.graph() as graph:
            made = graph.run(Work(x, "checked"))
            graph.elementwise.unary("neg", made, out=y)
        await graph.replay(timeout=PATIENCE)
        np.testing.assert_array_equal(await device.get(y), np.arange(4.0))
        await device.put(-np.ones(4), out=x)
        for failing in (graph.replay(timeout=PATIENCE), device.get(made), device.get(y)):
            with pytest.raises(accel.LibraryError, match="ValueError: a bad request") as caught:
                await failing
            assert (caught.value.scope, caught.value.op) == (accel.FaultScope.OP, "replay")
        await device.put(np.ones(4), out=x)
        await graph.replay(timeout=PATIENCE)
        np.testing.assert_array_equal(await device.get(y), np.ones(4))
        np.testing.assert_array_equal(await device.get(made), -np.ones(4))
        assert device.generation == 1


@HOSTS
async def test_results_of_a_graph_that_writes_a_part_of_a_buffer_are_sound_after_a_replay_that_works(host: str) -> None:
    async with accel.System() as system:
        device = await opened(system, host)
        x, y = await device.put(-np.ones(4)), await device.put(np.zeros((2, 4)))
        async with device.graph() as graph:
            made = graph.run(Work(x, "checked"))
            graph.copy(made, y[0])
        with pytest.raises(accel.LibraryError, match="ValueError: a bad request"):
            await graph.replay(timeout=PATIENCE)
        await device.put(np.ones(4), out=x)
        await device.put(np.zeros((2, 4)), out=y)
        await graph.replay(timeout=PATIENCE)
        np.testing.assert_array_equal(await device.get(made), -np.ones(4))
        np.testing.assert_array_equal(await device.get(y), [-np.ones(4), np.zeros(4)])


@HOSTS
async def test_a_durable_output_is_torn_until_it_is_written_anew(host: str) -> None:
    async with accel.System() as system:
        device = await opened(system, host)
        x, kept = await device.put(np.arange(4.0)), await device.put(np.ones(4), durable=True)
        with pytest.raises(accel.LibraryError) as caught:
            await device.run(Work(x, "raise", kept), timeout=PATIENCE)
        assert is_of_the_op(caught.value)
        with pytest.raises(accel.StaleRefError) as torn:
            await device.get(kept)
        assert torn.value.reason == "torn"
        await device.put(np.zeros(4), out=kept)
        np.testing.assert_array_equal(await device.get(kept), np.zeros(4))
        assert (device.state, device.generation) == (accel.DeviceState.READY, 1)
