"""Programs about what the backend leaves of the threads that call it: the current context, the capture mode, captures that the user has begun."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from accel_cuda.core.driver import load_driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.completion import CompletionName

LIBRARY = ctypes.PyDLL("libcuda.so.1")
RELAXED, THREAD_LOCAL = 2, 1


def current() -> int:
    """Return this thread's current context, as the driver says it."""
    handle = ctypes.c_void_p()
    assert LIBRARY.cuCtxGetCurrent(ctypes.byref(handle)) == 0
    return handle.value or 0


def make_current(context: int) -> None:
    """Make a context current, or none: that takes the one below off the stack too."""
    popped = ctypes.c_void_p()
    while current():
        assert LIBRARY.cuCtxPopCurrent_v2(ctypes.byref(popped)) == 0
    if context:
        assert LIBRARY.cuCtxSetCurrent(ctypes.c_void_p(context)) == 0


def capture_mode(new: int) -> int:
    """Give this thread another capture mode, and return the one it had."""
    mode = ctypes.c_int(new)
    assert LIBRARY.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    return mode.value


async def every_kind_of_op(device: accel.Device, rng: np.random.Generator, between: Callable[[], None]) -> None:
    """Compute with every library, staged and pageable copies and a batch, calling ``between`` before each op, and check the results."""
    a = rng.standard_normal((96, 96)).astype(np.float32)
    large = rng.standard_normal((1 << 18) + 1)
    between()
    x = await device.put(a)
    between()
    y = await device.put(large)
    between()
    product = await device.blas.gemm(x, x)
    between()
    absolute = await device.elementwise.unary("abs", product)
    between()
    total = await device.reduce("sum", absolute, axis=1)
    between()
    async with device.batch() as batch:
        again = batch.blas.gemm(x, x)
        both = batch.elementwise.binary("sub", again, product)
    between()
    filled = await device.full((1000,), 3.0)
    between()
    wide = a.astype(np.float64)
    np.testing.assert_allclose(await device.get(total), np.abs(wide @ wide).sum(axis=1), rtol=1e-3)
    between()
    assert not (await device.get(both)).any()
    between()
    assert np.array_equal(await device.get(y), large)
    between()
    assert np.array_equal(await device.get(filled), np.full(1000, 3.0))


def leaves_the_current_context(completion: CompletionName) -> None:
    """Whatever context is current on the loop's thread, ops are right and it stays so; the capture mode too."""
    driver = load_driver()
    other = int(driver.call("cuCtxCreate", None, 0, driver.call("cuDeviceGet", 0)))
    primary = int(driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", 0)))
    rng = np.random.default_rng()

    async def main() -> None:
        for context in (0, other, primary):
            make_current(context)
            assert capture_mode(THREAD_LOCAL) == 0
            async with accel.System() as system:
                device = await system.open_device("cuda", completion=completion)

                def unchanged(expected: int = context) -> None:
                    assert current() == expected, f"{current():#x} is current where {expected:#x} was"

                for _ in range(2):
                    await every_kind_of_op(device, rng, unchanged)
            unchanged()
            assert capture_mode(0) == THREAD_LOCAL, "the capture mode was changed"

    asyncio.run(main())


def follows_switches_between_awaits(completion: CompletionName) -> None:
    """The user makes another context current, or none, before every op."""
    driver = load_driver()
    other = int(driver.call("cuCtxCreate", None, 0, driver.call("cuDeviceGet", 0)))
    primary = int(driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", 0)))
    rng = np.random.default_rng()
    torch: Any = importlib.import_module("torch")
    turns: list[Callable[[], object]] = [
        lambda: make_current(0),
        lambda: make_current(other),
        lambda: make_current(primary),
        lambda: torch.ones(3, device="cuda").sum(),
    ]

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", completion=completion)
            count = 0

            def switch() -> None:
                nonlocal count
                turns[count % len(turns)]()
                count += 1

            for _ in range(5):
                await every_kind_of_op(device, rng, switch)

    asyncio.run(main())


def leaves_captures_alone(completion: CompletionName) -> None:
    """``torch.cuda.graph`` in its strictest mode, on the loop's thread and on another, while ops of every kind come and go."""
    torch: Any = importlib.import_module("torch")
    torch.zeros(8, device="cuda").add_(1)
    torch.cuda.synchronize()

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", completion=completion)
            # The first round opens libraries, loads kernels and takes slabs during the capture, the second has them.
            for _ in range(2):
                await _capture_on_the_loop(torch, device)
                await _capture_beside(torch, device)

    asyncio.run(main())


async def _capture_on_the_loop(torch: Any, device: accel.Device) -> None:
    total, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        total += 1
        await every_kind_of_op(device, np.random.default_rng(), lambda: None)
        total += 1
    _replay(torch, graph, total)


async def _capture_beside(torch: Any, device: accel.Device) -> None:
    begun, enough = threading.Event(), threading.Event()

    def capture() -> None:
        total, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            total += 1
            begun.set()
            assert enough.wait(30)
            total += 1
        _replay(torch, graph, total)

    capturing = asyncio.ensure_future(asyncio.to_thread(capture))
    while not begun.is_set() and not capturing.done():
        await asyncio.sleep(0)
    try:
        await every_kind_of_op(device, np.random.default_rng(), lambda: None)
    finally:
        enough.set()
    await capturing


def _replay(torch: Any, graph: Any, total: Any) -> None:
    graph.replay()
    torch.cuda.synchronize()
    assert total[0].item() == 2.0, "the capture missed something"


def serves_two_gpus(completion: CompletionName) -> None:
    """Two devices and torch, which is told to use one GPU and then the other, in one loop, with ops interleaved."""
    torch: Any = importlib.import_module("torch")
    rng = np.random.default_rng()

    async def main() -> None:
        async with accel.System() as system:
            first = await system.open_device("cuda:0", completion=completion)
            second = await system.open_device("cuda:1", completion=completion)
            count = 0

            def switch() -> None:
                nonlocal count
                index = count % 2
                if count:
                    assert torch.cuda.current_device() == (count - 1) % 2, "torch's device was changed"
                torch.cuda.set_device(index)
                x = torch.full((64, 64), 2.0, device="cuda")
                assert x.device.index == index
                assert (x @ x)[0, 0].item() == 256.0
                count += 1

            for _ in range(3):
                await every_kind_of_op(first, rng, switch)
                await every_kind_of_op(second, rng, switch)
            await asyncio.gather(*(every_kind_of_op(device, rng, lambda: None) for device in (first, second) * 4))
            a = rng.standard_normal((64, 64))
            there = await second.put(await first.get(await first.blas.gemm(await first.put(a), await first.put(a))))
            np.testing.assert_allclose(await second.get(there), a @ a)

    asyncio.run(main())


PROGRAMS: dict[str, Callable[[Any], None]] = {
    program.__name__: program
    for program in (leaves_the_current_context, follows_switches_between_awaits, leaves_captures_alone, serves_two_gpus)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
