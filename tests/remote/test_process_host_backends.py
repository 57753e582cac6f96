"""What only some backends have, on process hosts and on the way there: compilers, a shared fate, memory that comes back late; and the child's log."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.device_support import child_pid, generation
from tests.process_backend_support import BROKEN, SLOW, TAKEN, RichBackend, TwinBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")

LOST = accel.DriverError("illegal address", code=700, scope=accel.FaultScope.PROCESS)
TYPES = ("float32*", "const float32*", "int64")


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[RichBackend]:
    made = RichBackend()
    monkeypatch.setattr(RichBackend, "service", os.getpid())
    monkeypatch.setattr("accel.device.system.find_device", lambda spec: (made, made.devices()[0]))
    yield made
    RichBackend.opened.clear()


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    found = [getattr(record, "accel", {}) for record in caplog.records]
    return [each for each in found if each.get("event") == name]


async def test_kernels_are_compiled_and_launched_in_the_child(rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        source = rng.standard_normal(100).astype(np.float32)
        copy = await device.compiler.compile("copy", "copy", parameters=TYPES)
        for _ in range(2):
            x, out = await device.put(source), await device.zeros(100, "float32")
            assert await copy.launch(1, 32, (out, x, 60)) is out
            np.testing.assert_array_equal((await device.get(out))[:60], source[:60])
        with pytest.raises(accel.InvalidArgumentError):
            await copy.launch(1, 4096, (out, x, 60))
        (compiling,) = events(caplog, "compiling")
        assert compiling["pid"] not in (0, os.getpid())
        assert compiling["percent"] == "100%"


async def test_a_kernel_outlives_its_child() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", faults=FaultPlan().kill_host_at(1))
        copy = await device.compiler.compile("copy", "copy", parameters=TYPES)
        with pytest.raises(accel.ContextPoisonedError):
            await asyncio.wait_for(device.zeros(4), 20)
        x, out = await asyncio.wait_for(device.put(np.ones(4, np.float32)), 20), await device.zeros(4, "float32")
        async with device.batch() as batch:
            batch.compiler.launch(copy, 1, 1, (out, x, 4))
        np.testing.assert_array_equal(await device.get(out), np.ones(4, np.float32))
        async with device.graph() as graph:
            graph.compiler.launch(copy, 1, 1, (out, graph.elementwise.unary("neg", x), 4))
        await graph.replay()
        np.testing.assert_array_equal(await device.get(out), -np.ones(4, np.float32))


async def test_a_program_that_does_not_compile_says_why() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        with pytest.raises(accel.CompileError) as caught:
            await device.compiler.compile(BROKEN, "copy")
        assert caught.value.log == "line 3: what is this?"
        assert (caught.value.op, caught.value.device) == ("compile", "cpu:0")
        await device.zeros(4)


async def test_compiling_holds_nobody_up_and_ends_with_the_child() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", hang_timeout=0.3)
        slow = asyncio.ensure_future(device.compiler.compile(SLOW, "copy"))
        for _ in range(20):
            await device.zeros(4)
        assert not slow.done()
        await slow
        slow = asyncio.ensure_future(device.compiler.compile(SLOW, "copy"))
        async with asyncio.timeout(30):
            while not device._host.context._questions:
                await asyncio.sleep(0)
        os.kill(child_pid(device), 9)
        with pytest.raises(accel.ContextPoisonedError):
            await asyncio.wait_for(slow, 20)
        slow = asyncio.ensure_future(device.compiler.compile(SLOW, "copy"))
        await asyncio.sleep(0)
        slow.cancel()
        await asyncio.wait({slow})
        await asyncio.wait_for(device.compiler.compile("copy", "copy"), 20)


async def test_an_inline_device_is_told_of_a_fault_that_surfaced_elsewhere() -> None:
    async with accel.System() as one, accel.System() as two:
        devices = [await system.open_device("cpu") for system in (one, two)]
        inline = await two.open_device("cpu", host="inline")
        assert all(device.info().host == "inline" for device in devices)

        def surface() -> None:  # one of them has seen it, on whatever thread
            for device in tuple(RichBackend.opened):
                device.on_fault(LOST)

        thread = threading.Thread(target=surface)
        thread.start()
        await asyncio.gather(*(generation(device, 2) for device in devices))
        thread.join()
        assert all(device.info().host == "process" for device in devices)
        pids = {device.info().pid for device in devices}
        assert len(pids) == 2
        assert os.getpid() not in pids
        for device in devices:
            await device.zeros(4)
        assert inline.state is accel.DeviceState.LOST


async def test_a_process_that_has_lost_the_backend_opens_devices_in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    async with accel.System() as system:
        monkeypatch.setattr(RichBackend, "fault", LOST)
        device = await system.open_device("cpu")
        assert device.info().host == "process"
        await device.zeros(4)


async def test_memory_of_the_last_generation_may_come_back_late(monkeypatch: pytest.MonkeyPatch) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=FaultPlan().poison_at(1, LOST))
        monkeypatch.setenv("ACCEL_TEST_OUT_OF_MEMORY", "40")
        with pytest.raises(accel.ContextPoisonedError):
            await asyncio.wait_for(device.zeros(4), 20)
        await asyncio.wait_for(device.zeros(4), 20)
        assert device.generation == 2


async def test_memory_that_nobody_held_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with accel.System() as system:
        monkeypatch.setenv("ACCEL_TEST_OUT_OF_MEMORY", "40")
        device = await system.open_device("cpu", host="process")
        with pytest.raises(accel.OutOfMemoryError):
            await asyncio.wait_for(device.zeros(4), 20)


async def test_a_context_in_reserve_is_refused_where_the_device_is_one_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RichBackend, "shareable", False)
    async with accel.System() as system:
        with pytest.raises(accel.UnsupportedError, match="one process's at a time"):
            await system.open_device("cpu", standby="context")
        device = await system.open_device("cpu", standby="imports")
        await device.zeros(4)


async def test_the_childs_log_is_told_here(caplog: pytest.LogCaptureFixture) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", libraries=("blas", "reduce"))
        (told,) = events(caplog, "preloading")
        assert told == {"event": "preloading", "libraries": "blas,reduce", "device": "cpu:0", "pid": device.info().pid, "host": "process"}
        assert caplog.records[0].levelno == logging.WARNING


async def test_a_device_that_its_process_has_for_itself_cannot_move_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TAKEN, "1")
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=FaultPlan().poison_at(1, LOST))
        with pytest.raises(accel.ContextPoisonedError):
            await asyncio.wait_for(device.zeros(4), 20)
        with pytest.raises(accel.DeviceLostError) as lost:
            await asyncio.wait_for(device.zeros(4), 20)
        assert lost.value.code == 46
        assert "Have the mode set back." in str(lost.value.__cause__)
        assert "one process's at a time" in device.health().reason
        with pytest.raises(accel.BackendUnavailableError, match="one process's at a time"):
            await asyncio.wait_for(system.open_device("cpu", host="process"), 20)


async def test_of_devices_opened_at_once_that_share_fate_one_is_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    made = TwinBackend()
    monkeypatch.setattr("accel.device.system.find_device", lambda spec: (made, made.devices()[int(spec[-1])]))
    async with accel.System() as system:
        devices = await asyncio.gather(*[system.open_device(f"cpu:{index}") for index in range(2)])
        assert sorted(device.info().host for device in devices) == ["inline", "process"]


async def test_a_device_that_failed_to_open_keeps_no_place_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made = TwinBackend()
    monkeypatch.setattr("accel.device.system.find_device", lambda spec: (made, made.devices()[int(spec[-1])]))
    async with accel.System() as system:
        with monkeypatch.context() as patched:
            patched.setattr(TwinBackend, "open", refuse)
            with pytest.raises(accel.BackendUnavailableError):
                await system.open_device("cpu:0")
        device = await system.open_device("cpu:1")
        assert device.info().host == "inline"


def refuse(backend: TwinBackend, index: int) -> Any:
    raise accel.BackendUnavailableError(f"cpu:{index} is not there")
