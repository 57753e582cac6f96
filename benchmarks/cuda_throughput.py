"""How fast data moves and products are computed on a GPU, each beside its raw twin: ``python benchmarks/cuda_throughput.py [--json FILE]``.

Copies of pageable arrays (P7), awaited gemms beside cuBLAS called directly (P8), and elementwise ops and reductions beside the device's own copy.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import accel
from accel.cli.bench.measure import awaited, called, compare, together
from accel_cuda import CudaBackend
from benchmarks.cuda_machine import Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_cuda.compute import CudaCompute
    from accel_cuda.stream import CudaStream

_GIB = 1 << 30
_SIDE = 4096
_FLOPS = 2 * _SIDE**3
_IN_FLIGHT, _EACH = 8, 15
_NONE = accel.Transpose.NONE


async def copies(device: accel.Device, stream: CudaStream, report: Report) -> None:
    """P7 for pageable arrays."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    for mib in (64, 512):
        nbytes = mib << 20
        source = np.random.default_rng().integers(0, 256, nbytes, np.uint8)
        target, ref = np.zeros_like(source), await device.put(source)
        slab = stream.context.create_slab(nbytes)
        stream.context.enter()
        subjects = {
            "put": awaited(lambda source=source, ref=ref: device.put(source, out=ref), 4),  # type: ignore[misc]
            "raw put": called(lambda slab=slab, source=source: driver.cuMemcpyHtoD(slab.address, source.ctypes.data, source.nbytes), 4),  # type: ignore[misc]
            "get": awaited(lambda ref=ref, target=target: device.get(ref, out=target), 4),  # type: ignore[misc]
            "raw get": called(lambda slab=slab, target=target: driver.cuMemcpyDtoH(target.ctypes.data, slab.address, target.nbytes), 4),  # type: ignore[misc]
        }
        got = await compare(subjects, 3)
        for way in ("put", "get"):
            ours, raw = (nbytes / got[name].median / 1e9 for name in (way, f"raw {way}"))
            report.add(f"P7-{way}", f"pageable, {mib} MiB", ours / raw, **{"GB/s": ours, "raw_GB/s": raw})
        slab.close()


async def products(device: accel.Device, compute: CudaCompute, report: Report) -> None:
    """P8: 8 awaited gemms in flight, and one, beside cuBLAS itself called from Python."""
    for name in ("float32", "float16", "bfloat16"):
        dtype = accel.DType.of(name)
        values = np.random.default_rng().standard_normal((_SIDE, _SIDE)).astype(dtype.numpy)
        a, b = await device.put(values), await device.put(values)
        outs = [await device.empty((_SIDE, _SIDE), name) for _ in range(_IN_FLIGHT)]
        pointers = [compute.alloc(values.nbytes) for _ in range(3)]
        for pointer in pointers:
            compute.copy_htod(pointer, values.reshape(-1).view(np.uint8).data)

        free = asyncio.Queue[accel.AccelRef]()
        for out in outs:
            free.put_nowait(out)

        async def one(a: accel.AccelRef = a, b: accel.AccelRef = b, free: asyncio.Queue[accel.AccelRef] = free) -> None:
            out = free.get_nowait()
            await device.blas.gemm(a, b, out=out)
            free.put_nowait(out)

        def raw(count: int, pointers: list[int] = pointers, dtype: accel.DType = dtype) -> None:
            for _ in range(count):
                a, b, c = pointers
                compute.gemm(_NONE, _NONE, _SIDE, _SIDE, _SIDE, 1.0, a, _SIDE, b, _SIDE, 0.0, c, _SIDE, dtype=dtype)
            compute.synchronize()

        subjects = {
            "ours": together(one, _IN_FLIGHT, _EACH),
            "raw": called(lambda raw=raw: raw(_IN_FLIGHT * _EACH), 1, ops=_IN_FLIGHT * _EACH),  # type: ignore[misc]
            "one": awaited(one, 20),
            "raw one": called(lambda raw=raw: raw(1), 20),  # type: ignore[misc]
        }
        got = await compare(subjects, 3)
        seconds = {key: samples.median for key, samples in got.items()} | {"ours": 1 / got["ours"].rate, "raw": 1 / got["raw"].rate}
        tera = {"TFLOP/s": _FLOPS / seconds["ours"] / 1e12, "raw_TFLOP/s": _FLOPS / seconds["raw"] / 1e12}
        report.add("P8", f"{name}, 8 in flight", seconds["raw"] / seconds["ours"], **tera)
        report.add("P8-one", f"{name}, awaited", 1e6 * (seconds["one"] - seconds["raw one"]), us=1e6 * seconds["one"])
        for pointer in pointers:
            compute.free(pointer)


def kernels(stream: CudaStream, compute: CudaCompute, report: Report) -> None:
    """Bandwidth of the backend's own kernels on 1 GiB, beside a copy on the device."""
    slab = stream.context.create_slab(3 * _GIB)
    a, b, c = (slab.address + part * _GIB for part in range(3))
    stream.fill(a, b"\0", 3 * _GIB)
    n = _GIB // 4
    rows = (n // 4096, 4096)
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2 * _GIB, lambda: stream.copy(a, b, _GIB)),
        "neg float32": (2 * _GIB, lambda: compute.unary(accel.UnaryOp.NEG, a, b, n)),
        "sigmoid float32": (2 * _GIB, lambda: compute.unary(accel.UnaryOp.SIGMOID, a, b, n)),
        "add float32": (3 * _GIB, lambda: compute.binary(accel.BinaryOp.ADD, a, b, c, n)),
        "sum float32 of all": (_GIB, lambda: compute.reduce(accel.ReduceOp.SUM, a, b, (n,), 0)),
        f"sum float32 {rows} axis 1": (_GIB, lambda: compute.reduce(accel.ReduceOp.SUM, a, b, rows, 1)),
        f"sum float32 {rows} axis 0": (_GIB, lambda: compute.reduce(accel.ReduceOp.SUM, a, b, rows, 0)),
    }
    rates = {name: nbytes / best(call, stream) / 1e9 for name, (nbytes, call) in cases.items()}
    for name, rate in rates.items():
        report.add("GB/s", name, rate, of_copy=rate / rates["copy"])
    slab.close()


def best(call: Callable[[], object], stream: CudaStream, count: int = 10) -> float:
    """Return the seconds of one of ``count`` calls in a row, of the best of three rounds."""
    call()
    found = float("inf")
    for _ in range(3):
        stream.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            call()
        stream.synchronize()
        found = min(found, (time.perf_counter() - began) / count)
    return found


async def measure(report: Report) -> None:
    """Measure everything."""
    context = CudaBackend().open(0)
    stream = context.create_stream()
    compute = context.create_compute(stream, "blas")
    async with accel.System() as system:
        device = await system.open_device("cuda")
        kernels(stream, compute, report)
        await products(device, compute, report)
        await copies(device, stream, report)
    context.close()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE")
    options = parser.parse_args()
    report = Report()
    print(report.machine())
    asyncio.run(measure(report))
    report.write(options.json)


if __name__ == "__main__":
    main()
