"""Products: awaited gemms beside cuBLAS called directly, and PyTorch's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import DType, System
from accel.cli.bench.cases import OURS
from accel.cli.bench.measure import awaited, called
from benchmarks.cuda_cases.raw_blas import RawBlas
from benchmarks.cuda_cases.rig import TORCH_QUERY
from benchmarks.measures import together

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel import AccelRef, Device
    from accel.cli.bench.measure import Meter
    from accel.cli.bench.suite import Bench
    from benchmarks.cuda_cases.rig import Rig

__all__ = ["products", "products_of_all_sizes"]

_DTYPES = ("float32", "float16", "bfloat16")
_SIDE = 4096
_SIDES = (32, 64, 128, 256, 512, 1024, 2048, 8192)
_IN_FLIGHT = 8
_RAW = "raw cuBLAS + synchronize"
_TURNING = "raw cuBLAS, event.query each turn"
# What these machines compute each second, to choose how often to repeat.
_FLOPS = {"float32": 4e13, "float16": 5e14, "bfloat16": 5e14}


class _Products:
    """Square products of one size and dtype, ours and raw."""

    def __init__(self, device: Device, blas: RawBlas, n: int, name: str) -> None:
        self.device, self.blas, self.n = device, blas, n
        self.dtype = DType.of(name)
        self.seconds = 2 * n**3 / _FLOPS[name] + 30e-6
        self._a: AccelRef
        self._b: AccelRef
        self._free: list[AccelRef] = []
        self._slab: Any = None

    async def load(self, values: np.ndarray[Any, Any], rig: Rig, bench: Bench) -> None:
        """Put operands and results on the device, twice; check one product against a smaller one of numpy's."""
        device, n = self.device, self.n
        a, b = (np.ascontiguousarray(each[: n * n].reshape(n, n).astype(self.dtype.numpy)) for each in (values, values[::-1]))
        self._a, self._b = await device.put(a), await device.put(b)
        self._free = [await device.empty((n, n), self.dtype) for _ in range(_IN_FLIGHT)]
        raw = rig.raw(bench)
        self._slab = raw.context.create_slab(3 * a.nbytes)
        both = np.stack((a, b)).view(np.uint8)
        put, _ = raw.pageable_copies(self._slab.address, both)
        put()
        rows = min(n, 32)
        expected = a[:rows].astype(np.float64) @ b.astype(np.float64)
        found = (await device.get(await device.blas.gemm(self._a, self._b)))[:rows].astype(np.float64)
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        if not error < 0.02:
            raise AssertionError(f"gemm {n} in {self.dtype.value} is off by {error:.2g} of its largest element")

    async def one(self) -> None:
        """Await one product into a buffer that is free."""
        out = self._free.pop()
        await self.device.blas.gemm(self._a, self._b, out=out)
        self._free.append(out)

    def raw(self, count: int = 1) -> Callable[[], object]:
        """Return the twin: ``count`` products enqueued, and one wait."""
        return self.blas.blocking(self.raw_call(), count)

    def raw_call(self) -> Callable[[], object]:
        """Return what enqueues one product."""
        start, nbytes = self._slab.address, self.n * self.n * self.dtype.itemsize
        return self.blas.gemm(self.n, self.dtype, start, start + nbytes, start + 2 * nbytes)

    def count(self, seconds: float, limit: int) -> int:
        """Return how many fit into ``seconds``."""
        return max(2, min(limit, int(seconds / self.seconds)))

    def close(self) -> None:
        """Give the raw memory back."""
        if self._slab is not None:
            self._slab.close()


async def products(rig: Rig, bench: Bench) -> None:
    """P8: gemm 4096 with 8 in flight, and one at a time. The budgets are held by the worst dtype."""
    values = bench.rng.standard_normal(_SIDE * _SIDE, dtype=np.float32)
    many: dict[str, dict[str, float]] = {}
    single: dict[str, dict[str, float]] = {}
    blas = RawBlas(rig.raw(bench))
    try:
        async with System("bench") as system:
            device = await system.open_device(bench.spec)
            for name in _DTYPES:
                each = _Products(device, blas, _SIDE, name)
                try:
                    await each.load(values, rig, bench)
                    many[name] = await _judge_many(each, bench)
                    single[name] = await _judge_one(each, rig, bench)
                finally:
                    each.close()
    finally:
        blas.close()
    bench.report.hold("P8", min(each["ratio"] for each in many.values()), dtypes=many)
    bench.report.hold("P8-one", max(each[OURS] for each in single.values()), dtypes=single)


async def _judge_many(each: _Products, bench: Bench) -> dict[str, float]:
    """Measure products of which several are on their way, and return how we do beside the library alone."""
    calls = each.count(bench.scale(80, 40) / 1e3, 200) // _IN_FLIGHT + 1
    total = calls * _IN_FLIGHT
    subjects: dict[str, Meter] = {OURS: together(each.one, _IN_FLIGHT, calls), _RAW: called(each.raw(total), 1, ops=total)}
    case = f"gemm {_SIDE} {each.dtype.value}, {_IN_FLIGHT} in flight"
    results = await bench.compare(case, subjects, rounds=bench.scale(5, 2))
    ours, raw = results[OURS].rate, results[_RAW].rate
    tera = 2 * _SIDE**3 / 1e12
    return {"ratio": round(ours / raw, 4), "TFLOP_per_s": round(ours * tera, 1), "raw_TFLOP_per_s": round(raw * tera, 1)}


async def _judge_one(each: _Products, rig: Rig, bench: Bench) -> dict[str, float]:
    """Measure products that are awaited one by one, and return the microseconds by which they take longer than the library alone."""
    # In short turns: depending on its recent load, the GPU takes up to a tenth more or less for one.
    count = bench.scale(20, 4)
    subjects: dict[str, Meter] = {
        OURS: awaited(each.one, count),
        _RAW: called(each.raw(), count),
        _TURNING: awaited(rig.raw(bench).turning(each.raw_call()), count),
    }
    alone = await bench.compare(f"gemm {_SIDE} {each.dtype.value}, one", subjects, rounds=bench.scale(15, 4))
    return {subject: round((alone[subject].median - alone[_RAW].median) * 1e6, 3) for subject in (OURS, _TURNING)}


async def products_of_all_sizes(rig: Rig, bench: Bench) -> None:
    """Measure the sizes that P8 leaves out, one product at a time."""
    sides = _SIDES[:-1] if bench.quick else _SIDES
    values = bench.rng.standard_normal(sides[-1] ** 2, dtype=np.float32)
    torch = rig.torch(bench)
    blas = RawBlas(rig.raw(bench))
    try:
        async with System("bench") as system:
            device = await system.open_device(bench.spec)
            for name in _DTYPES:
                for n in sides:
                    each = _Products(device, blas, n, name)
                    try:
                        await each.load(values, rig, bench)
                        count = each.count(bench.scale(40, 15) / 1e3, 200)
                        subjects: dict[str, Meter] = {OURS: awaited(each.one, count), _RAW: called(each.raw(), count)}
                        if torch is not None:
                            subjects[TORCH_QUERY] = awaited(torch.queried(torch.matmul(n, name)), count)
                        await bench.compare(f"gemm {n} {name}", subjects, rounds=bench.scale(3, 2))
                    finally:
                        each.close()
                    await asyncio.sleep(0)
    finally:
        blas.close()
