"""Graphs on a GPU: captured once, launched as one command, beside captures and work of others, and destroyed beside the loop."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import threading
from typing import Any

import numpy as np
import pytest

import accel
from accel_cuda import CudaBackend
from accel_cuda.core.graph import CudaGraph

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # what torch warns of is its own


async def test_replay_follows_its_inputs(device: accel.Device) -> None:
    rng = np.random.default_rng(np.random.SeedSequence().entropy)
    a, w = rng.standard_normal((2, 300, 300))
    x, weight = await device.put(a), await device.put(w)
    async with device.graph() as graph:
        h = graph.blas.gemm(x, weight)
        h = graph.elementwise.unary("relu", h, out=h)
        total = graph.reduce("sum", h, axis=0)
        filled = graph.full((300,), 2.0, "float64")
        doubled = graph.elementwise.binary("mul", total, filled)
        copied = graph.copy(doubled, filled)
    for _ in range(3):
        a = rng.standard_normal((300, 300))
        await device.put(a, out=x)
        await graph.replay()
        expected = np.maximum(a @ w, 0).sum(axis=0)
        np.testing.assert_allclose(await device.get(total), expected, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(await device.get(copied), 2 * expected, rtol=1e-10, atol=1e-10)


async def test_replays_wait_for_other_streams_and_are_waited_for(device: accel.Device) -> None:
    x = await device.zeros((1 << 20,), "float64")
    one = await device.full((1 << 20,), 1.0, "float64")
    async with device.graph() as graph:
        graph.elementwise.binary("add", x, one, out=x)
    waits: list[asyncio.Future[object]] = []
    for _ in range(50):
        waits.append(asyncio.ensure_future(graph.replay()))
        waits.append(asyncio.ensure_future(device.elementwise.binary("add", x, x, out=x)))
    await asyncio.gather(*waits)
    expected = 0.0
    for _ in range(50):
        expected = (expected + 1) * 2
    np.testing.assert_array_equal(await device.get(x), np.full(1 << 20, expected))


async def test_captures_beside_replays_and_ops_in_flight() -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda", streams=2)
        x = await device.full((1 << 16,), 1.0, "float64")

        async def worker(number: int) -> None:
            for _ in range(5):
                async with device.graph() as graph:
                    y = x
                    for _ in range(number):
                        y = graph.elementwise.binary("add", y, x)
                await asyncio.gather(*(graph.replay() for _ in range(3)))
                np.testing.assert_array_equal(await device.get(y), np.full(1 << 16, 1.0 + number))

        await asyncio.gather(*(worker(number) for number in range(1, 9)))
        gc.collect()
        await device.get(x)
        assert device.info().memory.used == x.nbytes


CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901


def test_a_mark_of_everybodys_work_breaks_a_capture_off() -> None:
    """Why they must not meet."""
    context = CudaBackend().open(0)
    stream, exchange = context.create_stream(), context.create_exchange()
    driver, event = context.driver, context.create_event()
    with context.section:
        driver.call("cuStreamBeginCapture", stream.handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        with pytest.raises(accel.DriverError) as caught:
            exchange.stream.record(event)
        assert caught.value.code == CAPTURE_UNSUPPORTED
        assert driver.status("cuStreamEndCapture", stream.handle) == CAPTURE_INVALIDATED
    assert context.fault is None
    event.close()
    context.close()


@pytest.mark.parametrize("devices", [1, 2])
async def test_ops_on_shared_memory_and_recordings_do_not_disturb_each_other(devices: int, rng: np.random.Generator) -> None:
    """With two devices on one GPU, which have what the driver calls a context in common, the one records while the other shares."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    torch: Any = importlib.import_module("torch")
    async with accel.System() as system:
        recorder = await system.open_device("cuda", host="inline", libraries=("elementwise",))
        sharer = recorder if devices == 1 else await system.open_device("cuda", host="inline", libraries=("elementwise",))
        x = rng.standard_normal(1 << 16)
        source = await recorder.put(x)
        tensor = torch.arange(4096, device="cuda", dtype=torch.float64)
        shared = await sharer.wrap(tensor)
        own = await sharer.put(np.ones(4096))
        exported = torch.from_dlpack(own)
        stop = False
        used = 0

        async def share() -> None:
            nonlocal used
            while not stop:
                result = await sharer.elementwise.unary("neg", shared)
                assert np.array_equal(await sharer.get(result), -np.arange(4096.0))
                await sharer.elementwise.unary("neg", own, out=own)
                used += 1

        users = [asyncio.ensure_future(share()) for _ in range(2)]
        for length in range(1, 13):
            async with recorder.graph() as graph:
                y = source
                for _ in range(length):
                    y = graph.elementwise.unary("neg", y)
                total = graph.blas.gemm(y.reshape((256, 256)), y.reshape((256, 256)))
            await graph.replay()
            np.testing.assert_array_equal(await recorder.get(y), x * (-1.0) ** length)
            np.testing.assert_allclose(await recorder.get(total), x.reshape(256, 256) @ x.reshape(256, 256), rtol=1e-9, atol=1e-9)
        stop = True
        await asyncio.gather(*users)
        assert used > 2
        assert set(exported.abs().cpu().tolist()) == {1.0}
        del exported, tensor
        gc.collect()


async def test_a_graph_is_destroyed_beside_the_loop(device: accel.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[threading.Thread] = []
    close = CudaGraph.close

    def closing(self: CudaGraph) -> None:
        closed.append(threading.current_thread())
        close(self)

    monkeypatch.setattr(CudaGraph, "close", closing)
    x = await device.put(np.ones(1 << 20))
    gc.collect()
    gc.disable()
    try:
        async with device.graph() as graph:
            for _ in range(50):
                graph.elementwise.unary("exp", x, out=x)
        await graph.replay()
        del graph
        async with asyncio.timeout(20):
            while not closed:
                device.info()  # frees the buffers of refs that were dropped
                await asyncio.sleep(0)
    finally:
        gc.enable()
    assert closed[0] is not threading.current_thread()
    assert device.info().memory.used == x.nbytes
