"""What goes wrong in one op is that op's error: whatever is raised, wherever; every op is answered, and the device goes on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from tests.op_bugs_support import NONSENSE, ODD, RELEASE, Bug, Bugs, BugsOnTheLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable

PATIENCE = 10.0
"""Seconds for what takes milliseconds, on a machine that has much else to do."""

HOSTS = pytest.mark.parametrize("host", ["inline", "process"])


async def error_of(work: Awaitable[Any]) -> accel.AccelError:
    """Return what an op is answered with; an answer that is no error of the tree, or none in time, fails the test."""
    with pytest.raises(accel.AccelError) as caught:
        await asyncio.wait_for(work, PATIENCE)
    assert caught.value.scope is accel.FaultScope.OP
    return caught.value


async def still_works(device: accel.Device, before: accel.AccelRef) -> None:
    """See that the device has lost nothing, and takes the next op."""
    assert (device.state, device.generation) == (accel.DeviceState.READY, 1)
    assert device.health().is_ready
    assert not before.is_stale
    after = await asyncio.wait_for(device.run(Bug(before)), PATIENCE)
    np.testing.assert_array_equal(await asyncio.wait_for(device.get(after), PATIENCE), np.arange(4.0) + 1)


@HOSTS
@pytest.mark.parametrize("library", [Bugs, BugsOnTheLoop])
async def test_whatever_a_kernel_raises_is_its_ops_error(host: Any, library: type[Bugs]) -> None:
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host=host)
        await device.register(library)
        x = await device.put(np.arange(4.0))
        for kind in ODD:
            for where in ("kernel", "half"):
                error = await error_of(device.run(Bug(x, f"{where}:{kind}")))
                assert error.op == "bug"
                if kind != "demanding":  # an error of the tree is the answer as it is
                    assert isinstance(error, accel.LibraryError)
                    assert error.library == "bugs"
                    assert "bug" in error.message
                    assert "'bugs'" in error.message
                    assert error.__cause__ is not None
        await still_works(device, x)


@HOSTS
async def test_in_a_batch_a_graph_and_a_quarantine_too(host: Any) -> None:
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host=host)
        await device.register(BugsOnTheLoop)
        x = await device.put(np.arange(4.0))
        for kind in ODD:
            with pytest.raises(accel.AccelError) as caught:
                async with asyncio.timeout(PATIENCE), device.batch() as batch:
                    first = batch.run(Bug(x))
                    batch.run(Bug(x, f"kernel:{kind}"))
                    batch.run(Bug(x))
            assert caught.value.op_index == 1
            np.testing.assert_array_equal(await device.get(first), np.arange(4.0) + 1)
            with pytest.raises(accel.AccelError):
                async with asyncio.timeout(PATIENCE):
                    async with device.graph() as graph:
                        graph.run(Bug(x, f"kernel:{kind}"))
                    await graph.replay()
        await still_works(device, x)
        if host == "inline":
            async with asyncio.timeout(PATIENCE), device.quarantine() as other:
                y = await other.put(np.arange(4.0))
                assert isinstance(await error_of(other.run(Bug(y, "kernel:cancelled"))), accel.LibraryError)
                await still_works(other, y)


@HOSTS
async def test_what_result_and_plan_do_is_the_ops_error(host: Any) -> None:
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host=host)
        await device.register(Bugs)
        x = await device.put(np.arange(4.0))
        durable = await device.put(np.arange(3.0), durable=True)
        for kind in ("value", "stop", *ODD):
            await error_of(device.run(Bug(x, f"result:{kind}")))
        for nonsense in NONSENSE:
            error = await error_of(device.run(Bug(x, f"nonsense:{nonsense}")))
            assert isinstance(error, (accel.LibraryError, accel.InvalidArgumentError)), nonsense
        for kind in ("cancelled", "generator"):
            await error_of(device.run(Bug(x, f"plan:{kind}")))
        async with device.batch() as batch:
            for where in [f"result:{kind}" for kind in ("value", *ODD)] + ["plan:cancelled", "plan:generator"]:
                with pytest.raises(accel.AccelError):
                    batch.run(Bug(x, where))
            recorded = batch.run(Bug(x))
            assert len(batch) == 1
        np.testing.assert_array_equal(await device.get(recorded), np.arange(4.0) + 1)
        np.testing.assert_array_equal(await device.get(durable), np.arange(3.0))
        await still_works(device, x)
        assert device.info().restarts == 0


@HOSTS
async def test_durable_outputs_of_an_op_that_failed_halfway_are_torn(host: Any) -> None:
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host=host)
        await device.register(Bugs)
        x = await device.put(np.arange(4.0))
        sound, torn = await device.put(np.zeros(4), durable=True), await device.put(np.zeros(4), durable=True)
        view = torn[1:3]
        await error_of(device.run(Bug(x, "half:value", torn)))
        for ref in (torn, view):
            with pytest.raises(accel.StaleRefError) as caught:
                await asyncio.wait_for(device.get(ref), PATIENCE)
            assert caught.value.reason == "torn"
        np.testing.assert_array_equal(await device.get(sound), np.zeros(4))
        await device.put(np.full(4, 2.0), out=torn)
        np.testing.assert_array_equal(await device.get(torn), np.full(4, 2.0))
        np.testing.assert_array_equal(await device.get(view), np.full(2, 2.0))
        await still_works(device, x)


async def test_memory_of_an_op_that_failed_halfway_is_its_own_until_the_stream_has_passed() -> None:
    RELEASE.clear()
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host="inline")
        await device.register(Bugs)
        x = await device.put(np.arange(4.0))
        try:
            error = await error_of(device.run(Bug(x, "held:cancelled")))
            assert isinstance(error, accel.LibraryError)
            others = [await asyncio.wait_for(device.put(np.full(4, float(n))), PATIENCE) for n in range(8)]
        finally:
            RELEASE.set()
        await asyncio.wait_for(device.run(Bug(x)), PATIENCE)  # after the work that was held
        for n, other in enumerate(others):
            np.testing.assert_array_equal(await device.get(other), np.full(4, float(n)))


async def test_arrays_of_a_batch_that_failed_are_its_own_until_the_stream_has_passed() -> None:
    """The array that a child still has to read must not be given to the next op for its own."""
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host="process")
        await device.register(BugsOnTheLoop)
        x = await device.put(np.arange(4.0))
        ones, twos = np.ones(1 << 18), np.full(1 << 18, 2.0)
        with pytest.raises(accel.LibraryError):
            async with asyncio.timeout(PATIENCE), device.batch() as batch:
                batch.run(Bug(x, "slow"))
                first = batch.put(ones)
                batch.run(Bug(x, "kernel:value"))
        await asyncio.wait_for(device.put(twos), PATIENCE)
        np.testing.assert_array_equal(await asyncio.wait_for(device.get(first), PATIENCE), ones)
