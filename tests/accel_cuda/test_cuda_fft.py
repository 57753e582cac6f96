"""Fourier transforms on the GPU against numpy in double precision."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel_cuda.core.driver import load_driver
from tests.accel_cuda.compute_support import opened

if TYPE_CHECKING:
    from accel.ops.fft import Norm
    from accel_cuda.core.plan_cache import PlanCache

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

Array = np.ndarray[Any, Any]
NORMS: tuple[Norm, ...] = ("backward", "ortho", "forward")
TOLERANCE = {np.dtype(np.complex64): 3e-6, np.dtype(np.complex128): 1e-14}


def signal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    values: Array = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def close(got: Array, expected: Array, dtype: Any, what: object = "") -> None:
    assert got.shape == expected.shape
    assert got.dtype == dtype
    tolerance = TOLERANCE[np.result_type(dtype, np.complex64)] * math.log2(expected.size + 2)
    assert np.max(np.abs(got - expected), initial=0.0) <= tolerance * np.max(np.abs(expected), initial=1e-300), what


async def check_all(
    device: accel.Device, rng: np.random.Generator, shape: tuple[int, ...], axes: tuple[int, ...], norm: Norm, single: bool
) -> None:
    """Compare the four transforms, and that they leave alone what they read."""
    real, whole = (np.float32, np.complex64) if single else (np.float64, np.complex128)
    z, x = signal(rng, shape, whole), signal(rng, shape, real)
    rz, rx = await device.put(z), await device.put(x)
    wide_z, wide_x = z.astype(np.complex128), x.astype(np.float64)
    what = shape, axes, norm, single
    out = await device.full(shape, np.nan, whole)
    assert await device.fft.fft(rz, axes=axes, norm=norm, out=out) is out
    close(await device.get(out), np.fft.fftn(wide_z, axes=axes, norm=norm), whole, what)
    close(await device.get(await device.fft.ifft(rz, axes=axes, norm=norm)), np.fft.ifftn(wide_z, axes=axes, norm=norm), whole, what)
    spectrum = await device.fft.rfft(rx, axes=axes, norm=norm)
    close(await device.get(spectrum), np.fft.rfftn(wide_x, axes=axes, norm=norm), whole, what)
    n = 2 * (shape[axes[-1]] - 1) + int(rng.integers(2)) if shape[axes[-1]] > 1 else 1
    lengths = (*(shape[axis] for axis in axes[:-1]), n)
    # Not the spectrum of any real signal: numpy ignores what is of no use, and so must this.
    back = await device.fft.irfft(rz, axes=axes, norm=norm, n=n)
    close(await device.get(back), np.fft.irfftn(wide_z, s=lengths, axes=axes, norm=norm), real, what)
    np.testing.assert_array_equal(await device.get(rz), z)
    np.testing.assert_array_equal(await device.get(rx), x)
    assert await device.fft.ifft(rz, axes=axes, norm=norm, out=rz) is rz
    close(await device.get(rz), np.fft.ifftn(wide_z, axes=axes, norm=norm), whole, what)


@pytest.mark.parametrize("single", [True, False])
async def test_transforms_of_any_shape_and_axes_are_numpys(device: accel.Device, single: bool, rng: np.random.Generator) -> None:
    for _ in range(40):
        shape = tuple(int(n) for n in rng.integers(1, 24, rng.integers(1, 5)))
        axes = tuple(int(axis) for axis in rng.permutation(len(shape))[: rng.integers(1, min(3, len(shape)) + 1)])
        await check_all(device, rng, shape, axes, NORMS[rng.integers(3)], single)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((1,), (0,)),
        ((1, 1, 3), (0, 1)),
        ((1009,), (0,)),
        ((3, 65537), (1,)),
        ((7, 1021, 3), (1,)),
        ((40, 33, 65), (1,)),
        ((2, 3, 64, 5), (2,)),
        ((128, 64), (0,)),
        ((31, 37, 41), (0, 1, 2)),
        ((5, 16, 16, 16), (1, 2, 3)),
        ((16, 16, 16, 5), (0, 1, 2)),
        ((20, 12, 18, 7), (1, 2)),
        ((64, 1 << 14), (1,)),
        ((1 << 20,), (0,)),
    ],
)
async def test_odd_prime_long_and_middle_axes(shape: tuple[int, ...], axes: tuple[int, ...], rng: np.random.Generator) -> None:
    async with opened(libraries=("fft",)) as device:
        await check_all(device, rng, shape, axes, NORMS[rng.integers(3)], True)
        await check_all(device, rng, shape, axes, NORMS[rng.integers(3)], False)


def plans_of(device: accel.Device) -> PlanCache[Any, Any]:
    context: Any = device._host.context
    cache: PlanCache[Any, Any] = context.device.families.states["fft"].library.cache
    return cache


async def test_plans_are_kept_and_the_oldest_go(device: accel.Device, rng: np.random.Generator) -> None:
    x = signal(rng, (4096,), np.complex128)
    outs = {n: await device.put(x[:n]) for n in range(100, 200)}
    for n, each in outs.items():
        close(await device.get(await device.fft.fft(each)), np.fft.fft(x[:n]), np.complex128, n)
    plans = plans_of(device)
    assert (plans.made, len(plans)) == (100, 64)
    await device.fft.fft(outs[199])
    await device.fft.ifft(outs[199])
    assert plans.made == 100
    close(await device.get(await device.fft.fft(outs[100])), np.fft.fft(x[:100]), np.complex128)
    assert (plans.made, len(plans)) == (101, 64)


@pytest.mark.parametrize("streams", [8])
async def test_streams_share_one_plan(streams: int, rng: np.random.Generator) -> None:
    # A length with a large prime factor: its plan has a work area, which is each op's own.
    inputs = [signal(rng, (16, 4099), np.complex64) for _ in range(8)]
    async with opened(streams=streams, libraries=("fft",)) as device:
        refs = [await device.put(x) for x in inputs]
        for _ in range(4):
            for x, result in zip(inputs, await asyncio.gather(*(device.fft.fft(ref, axes=(1,)) for ref in refs)), strict=True):
                close(await device.get(result), np.fft.fft(x.astype(np.complex128), axis=1), np.complex64)
        assert plans_of(device).made == 1


async def test_streams_share_plans_that_come_and_go(rng: np.random.Generator) -> None:
    x = signal(rng, (4096,), np.complex128)
    async with opened(streams=8) as device:
        refs = {n: await device.put(x[:n]) for n in range(100, 200)}
        for _ in range(3):
            for n, result in zip(refs, await asyncio.gather(*(device.fft.fft(each) for each in refs.values())), strict=True):
                close(await device.get(result), np.fft.fft(x[:n]), np.complex128, n)


async def test_a_plan_is_made_beside_the_loop(device: accel.Device) -> None:
    x = await device.zeros((8, 8192), "complex64")
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counter = asyncio.create_task(count())
    await device.fft.fft(x)
    counter.cancel()
    # Loading the library and making the plan take tens of milliseconds; a turn takes microseconds.
    assert turns > 100


@pytest.mark.parametrize("streams", [8, 1])
async def test_a_graph_keeps_its_plans(streams: int, rng: np.random.Generator) -> None:
    x = signal(rng, (9, 50, 22), np.float32)
    async with opened(streams=streams) as device:
        ref = await device.put(x)
        async with device.graph() as graph:
            spectrum = graph.fft.rfft(ref, axes=(1,))
            back = graph.fft.irfft(spectrum, axes=(1,), norm="forward")
            noise = graph.rng.normal(1001, seed=3)
        for n in range(200, 300):
            await device.fft.fft(await device.zeros(n, "complex64"))
        expected_noise = await device.get(await device.rng.normal(1001, seed=3))
        for _ in range(3):
            x = signal(rng, x.shape, np.float32)
            await device.put(x, out=ref)
            await graph.replay()
            expected = np.fft.rfft(x.astype(np.float64), axis=1)
            close(await device.get(spectrum), expected, np.complex64)
            close(await device.get(back), np.fft.irfft(expected, axis=1, norm="forward"), np.float32)
            np.testing.assert_array_equal(await device.get(noise), expected_noise)
        await graph.aclose()


async def test_no_room_for_a_plan_is_out_of_memory(device: accel.Device) -> None:
    x = await device.empty((1 << 33,), "complex64")  # 64 GiB, and as much for the result and the work area
    with pytest.raises(accel.OutOfMemoryError):
        await device.fft.fft(x)
    await device.free(x)
    small = await device.zeros(8, "complex64")
    assert not (await device.get(await device.fft.fft(small))).any()


MIB = 1 << 20


def taken() -> int:
    """Return how many bytes of the device's memory are taken, by whomever."""
    driver = load_driver()
    with driver.section(int(driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", 0)))):
        free, total = driver.call("cuMemGetInfo")
    driver.call("cuDevicePrimaryCtxRelease", driver.call("cuDeviceGet", 0))
    return int(total) - int(free)


async def test_what_transforms_work_in_is_the_contexts_and_comes_back() -> None:
    async with opened(libraries=("fft",)) as device:
        x = await device.zeros((4, 1 << 23), "complex64")
        warm = await device.fft.fft(x[0, :1024])
        del warm
        before, reserved = taken(), device.info().memory.reserved
        for axes in ((1,), (0, 1)):
            result = await device.fft.fft(x, axes=axes)
            assert not (await device.get(result[0, :16])).any()
            del result
        assert device.info().memory.used == x.nbytes
        grown = device.info().memory.reserved - reserved
        outside = taken() - before - grown
        print(f"slabs grew by {grown / MIB:.0f} MiB, everything else by {outside / MIB:.0f} MiB")
        assert grown >= x.nbytes, "there was room for the result without a slab: nothing is shown"
        assert outside <= 64 * MIB, "cuFFT works in memory that nobody counts"


async def test_a_limit_holds_for_what_transforms_work_in() -> None:
    async with opened(memory_limit=128 * MIB) as device:
        x = await device.zeros((5 * MIB,), "complex64")
        with pytest.raises(accel.OutOfMemoryError) as caught:
            # A length with a large prime factor: cuFFT works in several times as much.
            await device.fft.fft(x[: 5 * MIB - 27], out=x[: 5 * MIB - 27])
            await device.fft.fft(x.reshape((5, MIB)), axes=0)
        assert caught.value.limit == 128 * MIB
        small = await device.put(np.ones(1000, np.complex64))
        assert abs((await device.get(await device.fft.fft(small)))[0] - 1000) < 1e-3
        assert device.info().memory.reserved <= 128 * MIB


@pytest.mark.parametrize("single", [True, False])
async def test_cosine_transforms_of_long_lines_and_middle_axes_are_scipys(single: bool, rng: np.random.Generator) -> None:
    scipy = pytest.importorskip("scipy.fft")
    dtype = np.float32 if single else np.float64
    async with opened(libraries=("fft",)) as device:
        for shape, axis in (((1 << 18,), 0), ((5, 10_007), 1), ((3, 1024, 65), 1), ((2049, 40), 0)):
            x = signal(rng, shape, dtype)
            ref = await device.put(x)
            for kind in ("dct", "idct", "dst", "idst"):
                for number in (1, 2, 3, 4):
                    norm = NORMS[rng.integers(3)]
                    expected = getattr(scipy, kind)(x.astype(np.float64), number, axis=axis, norm=norm)
                    what = kind, number, shape, norm
                    close(await device.get(await getattr(device.fft, kind)(ref, number, axis=axis, norm=norm)), expected, dtype, what)
            np.testing.assert_array_equal(await device.get(ref), x)
            assert await device.fft.dct(ref, axis=axis, out=ref) is ref
            close(await device.get(ref), scipy.dct(x.astype(np.float64), axis=axis), dtype, shape)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
async def test_convolutions_of_long_and_of_many_arrays_are_scipys(dtype: Any, rng: np.random.Generator) -> None:
    scipy = pytest.importorskip("scipy.signal")
    wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    cases: tuple[tuple[tuple[int, ...], tuple[int, ...], Any], ...] = (
        ((100_003,), (4_001,), None),
        ((7,), (5_000,), None),
        ((300, 411), (31, 17), None),
        ((40, 2_000), (1, 64), 1),
        ((1, 2_000), (40, 64), 1),
        ((3, 30, 31, 32), (3, 5, 6, 7), (1, 2, 3)),
    )
    async with opened(libraries=("fft",)) as device:
        for shape_a, shape_b, axes in cases:
            a, b = signal(rng, shape_a, dtype), signal(rng, shape_b, dtype)
            ra, rb = await device.put(a), await device.put(b)
            count = len(shape_a) if axes is None else 1 if axes == 1 else 3
            turned = np.conj(np.flip(b, tuple(range(-count, 0))))
            for mode in ("full", "same", "valid"):
                for kind, other in (("convolve", b), ("correlate", turned)):
                    # scipy's "same" cuts the axes that are broadcast too.
                    every = np.broadcast_to(a, (max(len(a), len(b)), *a.shape[1:])) if axes == 1 else a
                    expected = scipy.fftconvolve(every.astype(wide), other.astype(wide), mode, axes=axes)
                    got = await device.get(await getattr(device.fft, kind)(ra, rb, mode, axes=axes))
                    # Errors are relative to the largest of all sums.
                    whole = scipy.fftconvolve(np.abs(a.astype(wide)), np.abs(other.astype(wide)), axes=axes)
                    assert got.shape == expected.shape
                    assert np.max(np.abs(got - expected)) <= TOLERANCE[np.result_type(dtype, np.complex64)] * np.max(whole), (
                        kind,
                        mode,
                        shape_a,
                    )
