"""Fourier transforms on the CPU against numpy in double precision, and what the ops refuse."""

from __future__ import annotations

import math
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import ops
from accel.cpu.families.fft import _library
from accel.testing import FaultPlan
from tests.device_support import Array, failure, opened

if TYPE_CHECKING:
    from accel.ops.fft import Norm

pytestmark = pytest.mark.usefixtures("nothing_left")

NORMS: tuple[Norm, ...] = ("backward", "ortho", "forward")
TOLERANCE = {np.dtype(np.complex64): 3e-6, np.dtype(np.complex128): 1e-14}


def signal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    values: Array = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def close(got: Array, expected: Array, dtype: Any) -> None:
    assert got.shape == expected.shape
    assert got.dtype == dtype
    tolerance = TOLERANCE[np.result_type(dtype, np.complex64)] * math.log2(expected.size + 2)
    assert np.max(np.abs(got - expected), initial=0.0) <= tolerance * np.max(np.abs(expected), initial=1e-300)


def any_axes(rng: np.random.Generator, ndim: int) -> tuple[int, ...]:
    chosen = rng.permutation(ndim)[: rng.integers(1, min(3, ndim) + 1)]
    return tuple(int(axis) - ndim * int(rng.integers(2)) for axis in chosen)


@pytest.mark.parametrize("single", [True, False])
async def test_transforms_are_numpys(single: bool, rng: np.random.Generator) -> None:
    real, whole = (np.float32, np.complex64) if single else (np.float64, np.complex128)
    async with opened() as device:
        for _ in range(12):
            shape = tuple(int(n) for n in rng.integers(1, 14, rng.integers(1, 5)))
            axes, norm = any_axes(rng, len(shape)), NORMS[rng.integers(3)]
            z, x = signal(rng, shape, whole), signal(rng, shape, real)
            rz, rx = await device.put(z), await device.put(x)
            wide_z, wide_x = z.astype(np.complex128), x.astype(np.float64)
            close(await device.get(await device.fft.fft(rz, axes=axes, norm=norm)), np.fft.fftn(wide_z, axes=axes, norm=norm), whole)
            close(await device.get(await device.fft.ifft(rz, axes=axes, norm=norm)), np.fft.ifftn(wide_z, axes=axes, norm=norm), whole)
            spectrum = await device.fft.rfft(rx, axes=axes, norm=norm)
            close(await device.get(spectrum), np.fft.rfftn(wide_x, axes=axes, norm=norm), whole)
            back = await device.fft.irfft(spectrum, axes=axes, norm=norm, n=shape[axes[-1]])
            close(await device.get(back), wide_x, real)
            np.testing.assert_array_equal(await device.get(rz), z)


async def test_irfft_of_what_is_no_spectrum_of_a_real_signal_is_numpys_and_keeps_it(rng: np.random.Generator) -> None:
    z = signal(rng, (3, 4, 6), np.complex128)
    async with opened() as device:
        ref = await device.put(z)
        for n in (None, 10, 11):
            close(
                await device.get(await device.fft.irfft(ref, n=n, axes=(0, 2))), np.fft.irfftn(z, s=(3, n or 10), axes=(0, 2)), np.float64
            )
            np.testing.assert_array_equal(await device.get(ref), z)


async def test_out_is_written_and_may_be_the_operand_of_a_whole_transform(rng: np.random.Generator) -> None:
    z = signal(rng, (5, 7), np.complex128)
    async with opened() as device:
        ref, out = await device.put(z), await device.full((5, 7), np.nan, "complex128")
        assert await device.fft.fft(ref, axes=(0, 1), out=out) is out
        close(await device.get(out), np.fft.fft2(z), np.complex128)
        assert await device.fft.ifft(out, axes=(0, 1), out=out) is out
        close(await device.get(out), z, np.complex128)


async def test_a_large_transform_is_computed_beside_the_loop(rng: np.random.Generator) -> None:
    z = signal(rng, (64, 4096), np.complex64)
    async with opened() as device:
        close(await device.get(await device.fft.fft(await device.put(z))), np.fft.fft(z.astype(np.complex128)), np.complex64)


async def test_a_batch_transforms_there_and_back(rng: np.random.Generator) -> None:
    x = signal(rng, (6, 9), np.float64)
    async with opened(libraries=("fft",)) as device:
        async with device.batch() as batch:
            spectrum = batch.fft.rfft(batch.put(x), axes=(0, 1))
            back = batch.fft.irfft(spectrum, axes=(0, 1), n=9)
        assert spectrum.shape == (6, 5)
        close(await device.get(spectrum), np.fft.rfft2(x), np.complex128)
        close(await device.get(back), x, np.float64)


async def test_a_graph_transforms_what_was_put(rng: np.random.Generator) -> None:
    async with opened() as device:
        ref = await device.zeros((4, 6), "complex128")
        async with device.graph() as graph:
            result = graph.fft.fft(ref, axes=(0, 1))
            noise = graph.rng.uniform(5, "float64", seed=4)
        for _ in range(3):
            z = signal(rng, (4, 6), np.complex128)
            await device.put(z, out=ref)
            await graph.replay()
            close(await device.get(result), np.fft.fft2(z), np.complex128)
            np.testing.assert_array_equal(await device.get(noise), await device.get(await device.rng.uniform(5, "float64", seed=4)))


async def test_an_empty_batch_of_transforms_is_empty() -> None:
    async with opened() as device:
        ref = await device.fft.rfft(await device.empty((0, 8), "float64"))
        assert (await device.get(ref)).shape == (0, 5)


@pytest.mark.parametrize(
    ("shape", "dtype", "kind", "options", "error"),
    [
        ((4,), "float32", "fft", {}, "rfft"),
        ((4,), "complex64", "rfft", {}, "Use fft"),
        ((4,), "float64", "irfft", {}, "rfft"),
        ((4, 4), "complex64", "fft", {"axes": (0, -2)}, "twice"),
        ((4, 4), "complex64", "fft", {"axes": 2}, "2 dimension"),
        ((4, 4), "complex64", "fft", {"axes": ()}, "0 axes"),
        ((1, 1, 1, 1), "complex64", "fft", {"axes": (0, 1, 2, 3)}, "4 axes"),
        ((4,), "complex64", "fft", {"axes": 0.5}, "0.5"),
        ((4,), "complex64", "fft", {"axes": "0"}, "'0'"),
        ((), "complex64", "fft", {}, "0 dimension"),
        ((4,), "complex64", "fft", {"norm": None}, "None"),
        ((4,), "complex64", "irfft", {"n": 8}, "4 frequencies"),
        ((4,), "complex64", "irfft", {"n": "6"}, "'6'"),
        ((1,), "complex64", "irfft", {}, "length 0"),
        ((2, 0), "complex64", "fft", {}, "length 0"),
    ],
)
async def test_what_does_not_fit_is_refused(shape: tuple[int, ...], dtype: str, kind: str, options: dict[str, Any], error: str) -> None:
    async with opened() as device:
        ref = await device.empty(shape, dtype)
        refused = await failure(getattr(device.fft, kind)(ref, **options), accel.InvalidArgumentError)
        assert error in f"{refused.message} {refused.remedy}"
        assert refused.op == kind


async def test_other_elements_are_not_offered() -> None:
    async with opened() as device:
        await failure(device.fft.rfft(await device.empty(4, "float16")), accel.UnsupportedError)
        wrong = await failure(
            device.fft.fft(await device.empty(4, "complex64"), out=await device.empty(4, "float32")), accel.InvalidArgumentError
        )
        assert "complex64[4]" in wrong.message


async def test_a_pickled_op_runs_and_a_plan_of_faults_knows_the_kinds(rng: np.random.Generator) -> None:
    z = signal(rng, (3, 5), np.complex128)
    async with opened(faults=FaultPlan().fail_at(2, accel.LibraryError("planned"), op="fft")) as device:
        ref = await device.put(z)
        op = pickle.loads(pickle.dumps(ops.Fft(ref, axes=(0,), norm="ortho")))
        close(await device.get(await device.run(op)), np.fft.fft(z, axis=0, norm="ortho"), np.complex128)
        await failure(device.fft.fft(ref), accel.LibraryError)
        await device.fft.fft(ref)


async def test_a_backend_without_kernels_of_its_own_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.cpu.backend.PARTS", {})
    async with opened(libraries=("fft", "rng")) as device:
        refused = await failure(device.fft.fft(await device.empty(4, "complex64")), accel.UnsupportedError)
        assert "fft has no fft on cpu" in refused.message
        await failure(device.rng.uniform(3), accel.UnsupportedError)
        await device.zeros(3)


async def test_without_scipy_the_transforms_are_numpys(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setattr("accel.cpu.families.fft.importlib.util.find_spec", lambda name: None)
    _library.cache_clear()
    try:
        z = signal(rng, (6, 7, 8), np.complex64)
        async with opened() as device:
            got = await device.get(await device.fft.ifft(await device.put(z), axes=(2, 0), norm="ortho"))
            close(got, np.fft.ifftn(z.astype(np.complex128), axes=(2, 0), norm="ortho"), np.complex64)
            assert _library() is np.fft
    finally:
        _library.cache_clear()
