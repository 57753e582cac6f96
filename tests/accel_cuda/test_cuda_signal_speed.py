"""Throughput of transforms and random numbers beside raw calls of cuFFT and cuRAND in the same run; run with ``-s`` to see the numbers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel_cuda.core.libraries import load_library, load_module

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

REPEATS, ROUNDS = 120, 4
"""Ops of a round: of fewer than a hundred, the time that a batch takes before its first op is enqueued, 0.8 ms, is a large part."""


class Raw:
    """Memory, a stream and a clock for raw calls, in the device's own context."""

    def __init__(self, device: accel.Device) -> None:
        context: Any = device._host.context
        self.context: Any = context.device
        self.driver: Any = self.context.driver
        self.context.enter()
        self.stream = int(self.driver.call("cuStreamCreate", 1))
        self.blocks: list[int] = []

    def memory(self, nbytes: int) -> int:
        self.blocks.append(int(self.driver.call("cuMemAlloc", nbytes)))
        return self.blocks[-1]

    def seconds(self, call: Callable[[], object], repeats: int = REPEATS, rounds: int = ROUNDS + 1) -> float:
        best = float("inf")
        for _ in range(rounds):
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            self.driver.call("cuStreamSynchronize", self.stream)
            best = min(best, (time.perf_counter() - began) / repeats)
        return best

    def close(self) -> None:
        for block in self.blocks:
            self.driver.call("cuMemFree", block)
        self.driver.call("cuStreamDestroy", self.stream)


async def batched(device: accel.Device, record: Callable[[Any], object], rounds: int = ROUNDS + 1) -> float:
    """Return the seconds of one op of a batch of them."""
    best = float("inf")
    for _ in range(rounds):
        async with device.batch() as batch:
            for _ in range(REPEATS):
                record(batch)
            # Nothing is sent before the block ends.
            began = time.perf_counter()
        best = min(best, (time.perf_counter() - began) / REPEATS)
    return best


async def test_one_awaited_op_costs_little_over_a_raw_call() -> None:
    load_library("cufft", "nvidia-cufft")
    cufft = load_module("nvmath.bindings.cufft", "nvmath-python")
    async with accel.System() as system:
        device = await system.open_device("cuda", libraries=("fft", "rng"))
        x, out = await device.zeros((8, 1024), "complex64"), await device.empty((8, 1024), "complex64")
        numbers = await device.empty(1024)
        raw = Raw(device)
        source, target = raw.memory(8 << 13), raw.memory(8 << 13)
        plan = cufft.create()
        cufft.make_plan_many64(plan, 1, (1024,), (1024,), 1, 1024, (1024,), 1, 1024, 0x29, 8)
        cufft.set_stream(plan, raw.stream)
        times: dict[str, list[float]] = {"fft": [], "uniform": [], "raw": []}
        # By turns: medians of the same seconds of the same machine.
        for _ in range(400):
            began = time.perf_counter()
            await device.fft.fft(x, out=out)
            times["fft"].append(time.perf_counter() - began)
            began = time.perf_counter()
            await device.rng.uniform(1024, seed=1, out=numbers)
            times["uniform"].append(time.perf_counter() - began)
            times["raw"].append(raw.seconds(lambda: cufft.exec_c2c(plan, source, target, -1), repeats=1, rounds=1))
        cufft.destroy(plan)
        raw.close()
    middle = {name: float(np.median(each)) * 1e6 for name, each in times.items()}
    print(f"\none awaited fft {middle['fft']:.1f} us, uniform {middle['uniform']:.1f} us; cuFFT and synchronize {middle['raw']:.1f} us")
    assert middle["fft"] < 10 * middle["raw"]


@pytest.mark.parametrize(("rows", "length"), [(4096, 4096), (64, 1 << 18)])
async def test_transforms_keep_up_with_cufft(rows: int, length: int) -> None:
    load_library("cufft", "nvidia-cufft")
    cufft = load_module("nvmath.bindings.cufft", "nvmath-python")
    async with accel.System() as system:
        device = await system.open_device("cuda", libraries=("fft",))
        x = await device.rng.normal((rows, length, 2), seed=1)
        x = await device.put((await device.get(x)).view(np.complex64)[..., 0])
        out = await device.empty((rows, length), "complex64")
        raw = Raw(device)
        source, target = raw.memory(8 * rows * length), raw.memory(8 * rows * length)
        plan = cufft.create()
        cufft.make_plan_many64(plan, 1, (length,), (length,), 1, length, (length,), 1, length, 0x29, rows)
        cufft.set_stream(plan, raw.stream)
        ours = scaled = theirs = float("inf")
        # By turns: the clocks of the GPU rise during the first rounds.
        for _ in range(ROUNDS + 1):
            ours = min(ours, await batched(device, lambda batch: batch.fft.fft(x, out=out), rounds=1))
            theirs = min(theirs, raw.seconds(lambda: cufft.exec_c2c(plan, source, target, -1), rounds=1))
            scaled = min(scaled, await batched(device, lambda batch: batch.fft.ifft(x, out=out), rounds=1))
        cufft.destroy(plan)
        raw.close()
    gigabytes = 16 * rows * length / 1e9
    rates = [f"{name} {gigabytes / seconds:.0f} GB/s" for name, seconds in (("fft", ours), ("ifft", scaled), ("cuFFT", theirs))]
    print(f"\n{rows} x {length} complex64: {', '.join(rates)}; ratio {theirs / ours:.3f}")
    assert theirs / ours > 0.8


KINDS: tuple[tuple[str, str, str, tuple[float, ...]], ...] = (
    ("uniform", "float32", "generate_uniform", ()),
    ("uniform", "float64", "generate_uniform_double", ()),
    ("normal", "float32", "generate_normal", (0.0, 1.0)),
    ("normal", "float64", "generate_normal_double", (0.0, 1.0)),
    ("lognormal", "float32", "generate_log_normal", (0.0, 1.0)),
)

_CURAND_PHILOX = 161
"""CURAND_RNG_PSEUDO_PHILOX4_32_10."""


async def test_random_numbers_keep_up_with_curand() -> None:
    load_library("curand", "nvidia-curand")
    curand = load_module("nvmath.bindings.curand", "nvmath-python")
    n = 1 << 26
    async with accel.System() as system:
        device = await system.open_device("cuda", libraries=("rng",))
        outs = {name: await device.empty(n, name) for name in ("float32", "float64", "uint32")}
        raw = Raw(device)
        target = raw.memory(8 * n)
        handle = curand.create_generator(_CURAND_PHILOX)
        curand.set_stream(handle, raw.stream)
        slowest = 10.0
        for kind, dtype, call, parameters in KINDS:
            out = outs[dtype]
            options = {"seed": 7, "out": out}
            ours = await batched(device, lambda batch: getattr(batch.rng, kind)(n, dtype, **options))  # noqa: B023
            aside = await batched(device, lambda batch: getattr(batch.rng, kind)(n, dtype, offset=3, **options))  # noqa: B023
            theirs = raw.seconds(lambda: getattr(curand, call)(handle, target, n, *parameters))  # noqa: B023
            gigabytes = out.nbytes / 1e9
            rates = [f"{name} {gigabytes / each:.0f}" for name, each in (("from 0", ours), ("from 3", aside), ("cuRAND", theirs))]
            print(f"\n{kind} {dtype} GB/s: {', '.join(rates)}; ratio {theirs / ours:.2f}", end="")
            slowest = min(slowest, theirs / ours)
        ours = await batched(device, lambda batch: batch.rng.integers(n, 0, 1000, "uint32", seed=7, out=outs["uint32"]))
        print(f"\nintegers uint32: {4 * n / 1e9 / ours:.0f} GB/s")

        def seeded() -> None:
            curand.set_pseudo_random_generator_seed(handle, 7)
            curand.set_generator_offset(handle, 3)
            curand.generate_uniform(handle, target, 1024)

        small = await device.empty(1024)
        ours = await batched(device, lambda batch: batch.rng.uniform(1024, seed=7, offset=3, out=small))
        theirs = raw.seconds(seeded)
        print(f"1024 numbers of a new seed and offset: {ours * 1e6:.1f} us, cuRAND {theirs * 1e6:.1f} us")
        curand.destroy_generator(handle)
        raw.close()
    assert slowest > 0.6
