"""What waiting for a kernel costs on a GPU: ``python benchmarks/cuda_latency.py [--json FILE] [--quick]``.

The budgets P1, P2, P4, P5 and P6, on asyncio and uvloop, each beside its raw twin in the same run. The op is an empty kernel (or one that spins for a
given time) behind ``device.elementwise.unary``, so that the whole path of an op is measured and no arithmetic.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import uvloop

import accel
from accel.cli.bench.measure import CpuMeter, Samples, awaited, called, compare, together
from accel_cuda import CudaBackend
from accel_cuda.compiler import compile_source
from accel_cuda.context import CudaDevice
from accel_cuda.driver import Handle, LaunchConfig
from benchmarks.cuda_machine import Report

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.backend import Kernel

_SPIN = """
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
"""
_TASKS = 64
_MICRO = 1e6


class Kernels:
    """The empty and the spinning kernel, as an op of a device and raw.

    Attributes
    ----------
    nanoseconds : int
        How long the op's kernel spins; 0 for the empty one.
    """

    def __init__(self) -> None:
        self.nanoseconds = 0
        self._context = CudaBackend().open(0)
        driver = self._context.driver
        major, minor = (int(driver.call("cuDeviceGetAttribute", driver.CUdevice_attribute(each), 0)) for each in (75, 76))
        module = driver.call("cuModuleLoadData", compile_source(_SPIN, f"sm_{major}{minor}"))
        self._spin = Handle(int(driver.call("cuModuleGetFunction", module, b"spin")))
        stream = self._context.create_stream()
        self._config = LaunchConfig(1, 1, 1, 1, 1, 1, 0, stream.handle, None, 0)
        self._stream = driver.CUstream(stream.handle)
        self._synchronize = importlib.import_module("cuda.bindings.driver").cuStreamSynchronize

    def of(self, context: CudaDevice, library: str) -> dict[str, Kernel]:
        """Return what stands in for ``CudaDevice.kernels``: one op, which launches one of the two."""
        if library != "elementwise":
            return {}

        def unary(lane: Any, op: Any, inputs: Any, outputs: Any) -> None:
            stream = lane.stream
            stream.ready()
            if self.nanoseconds:
                stream.launch(self._spin, 1, 1, self.nanoseconds)
            else:
                stream.launch(context.functions["empty"], 1, 1)

        return {"unary": unary}

    def raw(self) -> Callable[[], object]:
        """Return a function that launches the empty kernel and waits for it, with nothing between it and the driver."""
        launch, config, empty = self._context.driver.hot.launch, ctypes.byref(self._config), self._context.functions["empty"]
        synchronize, stream = self._synchronize, self._stream

        def run() -> None:
            launch(config, empty, None, None)
            synchronize(stream)

        return run


def cupy_op() -> Callable[[], Awaitable[None]] | None:
    """Return CuPy's way to await an empty kernel: RawKernel and ``launch_host_func``; ``None`` without CuPy."""
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError:
        return None
    kernel = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    stream = cupy.cuda.Stream(non_blocking=True)
    loop = asyncio.get_running_loop()

    def wake(future: asyncio.Future[None]) -> None:
        loop.call_soon_threadsafe(future.set_result, None)

    async def op() -> None:
        future: asyncio.Future[None] = loop.create_future()
        with stream:
            kernel((1,), (1,), ())
        stream.launch_host_func(wake, future)
        await future

    return op


async def measure(loop: str, kernels: Kernels, report: Report, rounds: int) -> None:
    """Measure everything on the running loop."""
    async with accel.System() as system:
        device = await system.open_device("cuda", libraries=("elementwise",))
        x = await device.put(np.ones(4, np.float32))

        async def op() -> None:
            await device.elementwise.unary("neg", x, out=x)

        await short(loop, op, kernels, report, rounds)
        await long(loop, op, kernels, report)
        await busy(loop, op, report)
        await asyncio.sleep(0.5)
        with CpuMeter() as meter:
            await asyncio.sleep(3.0)
        report.add("P5", loop, meter.percent)


async def short(loop: str, op: Callable[[], Awaitable[None]], kernels: Kernels, report: Report, rounds: int) -> None:
    """P1 and P2."""
    theirs = cupy_op()
    subjects = {"ours": awaited(op, 2000), "raw": called(kernels.raw(), 2000), "tasks": together(op, _TASKS, 200)}
    if theirs is not None:
        subjects |= {"cupy": awaited(theirs, 500), "cupy tasks": together(theirs, _TASKS, 60)}
    got = await compare(subjects, rounds)
    ours, raw = got["ours"], got["raw"]
    parts = {"us": ours.median * _MICRO, "p99_us": ours.percentile(99) * _MICRO, "raw_us": raw.median * _MICRO}
    report.add("P1", loop, ours.median / raw.median, **parts)
    if theirs is not None:
        rates = {"op/s": got["tasks"].rate, "cupy_op/s": got["cupy tasks"].rate, "cupy_us": got["cupy"].median * _MICRO}
        report.add("P2", loop, got["tasks"].rate / got["cupy tasks"].rate, **rates)


async def long(loop: str, op: Callable[[], Awaitable[None]], kernels: Kernels, report: Report) -> None:
    """P4: what waiting adds to kernels of known length, and what it costs the processor."""
    added = {}
    for microseconds, count in ((20, 500), (50, 400), (200, 400), (1000, 400), (5000, 150)):
        kernels.nanoseconds = 1000 * microseconds
        samples = Samples()
        await awaited(op, 20)(Samples())
        with CpuMeter() as meter:
            await awaited(op, count)(samples)
        added[microseconds] = samples.median * _MICRO - microseconds
        where = f"{loop}, {microseconds} us"
        report.add("added us", where, added[microseconds], p99=samples.percentile(99) * _MICRO - microseconds, cpu_percent=meter.percent)
        if microseconds in (1000, 5000):
            report.add(f"P4-cpu-{microseconds // 1000}ms", loop, meter.percent)
    kernels.nanoseconds = 0
    report.add("P4", loop, max(added[1000], added[5000]))


async def busy(loop: str, op: Callable[[], Awaitable[None]], report: Report) -> None:
    """P6: the same op beside a thread that computes in Python."""
    idle, one, many = Samples(), Samples(), Samples()
    await awaited(op, 300)(Samples())
    await together(op, _TASKS, 200)(idle)
    stop = threading.Event()

    def compute() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        await awaited(op, 2000)(one)
        await together(op, _TASKS, 100)(many)
    finally:
        stop.set()
        thread.join()
    report.add("P6", loop, one.median * _MICRO, p99_us=one.percentile(99) * _MICRO)
    report.add("P6-rate", loop, many.rate / idle.rate, **{"op/s": many.rate, "idle_op/s": idle.rate})


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    report, kernels = Report(), Kernels()
    print(report.machine())
    with mock.patch.object(CudaDevice, "kernels", lambda context, library: kernels.of(context, library)):
        for name, run in (("asyncio", asyncio.run), ("uvloop", uvloop.run)):
            run(measure(name, kernels, report, 2 if options.quick else 5))
    report.write(options.json)


if __name__ == "__main__":
    main()
