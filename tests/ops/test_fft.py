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
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(_library, "_module", None)
    z = signal(rng, (6, 7, 8), np.complex64)
    async with opened() as device:
        got = await device.get(await device.fft.ifft(await device.put(z), axes=(2, 0), norm="ortho"))
        close(got, np.fft.ifftn(z.astype(np.complex128), axes=(2, 0), norm="ortho"), np.complex64)
        assert _library() is np.fft


async def test_hermitian_transforms_are_scipys_over_several_axes(rng: np.random.Generator) -> None:
    scipy = pytest.importorskip("scipy.fft")
    async with opened() as device:
        for _ in range(6):
            shape = tuple(int(n) for n in rng.integers(2, 9, rng.integers(1, 4)))
            axes, norm = any_axes(rng, len(shape)), NORMS[rng.integers(3)]
            z, x = signal(rng, shape, np.complex128), signal(rng, shape, np.float64)
            rz, rx = await device.put(z), await device.put(x)
            lengths = [shape[axis] for axis in axes]
            lengths[-1] = 2 * lengths[-1] - 1
            got = await device.get(await device.fft.hfft(rz, axes=axes, norm=norm, n=lengths[-1]))
            close(got, scipy.hfftn(z, s=lengths, axes=axes, norm=norm), np.float64)
            close(await device.get(await device.fft.ihfft(rx, axes=axes, norm=norm)), scipy.ihfftn(x, axes=axes, norm=norm), np.complex128)
            np.testing.assert_array_equal(await device.get(rz), z)


async def test_cosine_transforms_are_scipys(rng: np.random.Generator) -> None:
    scipy = pytest.importorskip("scipy.fft")
    async with opened() as device:
        for kind in ("dct", "idct", "dst", "idst"):
            for number in (1, 2, 3, 4):
                shape = tuple(int(n) for n in rng.integers(2, 14, rng.integers(1, 4)))
                axis, norm = int(rng.integers(-len(shape), len(shape))), NORMS[rng.integers(3)]
                for dtype in (np.float32, np.float64):
                    x = signal(rng, shape, dtype)
                    ref = await device.put(x)
                    expected = getattr(scipy, kind)(x.astype(np.float64), number, axis=axis, norm=norm)
                    close(await device.get(await getattr(device.fft, kind)(ref, number, axis=axis, norm=norm)), expected, dtype)
                    assert await getattr(device.fft, kind)(ref, number, axis=axis, norm=norm, out=ref) is ref
                    close(await device.get(ref), expected, dtype)


async def test_convolutions_are_scipys(rng: np.random.Generator) -> None:
    scipy = pytest.importorskip("scipy.signal")
    async with opened() as device:
        for mode in ("full", "same", "valid"):
            for dtype in (np.float32, np.float64, np.complex64, np.complex128):
                shape_b = tuple(int(n) for n in rng.integers(1, 9, rng.integers(1, 4)))
                shape_a = tuple(n + int(rng.integers(9)) for n in shape_b)
                a, b = signal(rng, shape_a, dtype), signal(rng, shape_b, dtype)
                ra, rb = await device.put(a), await device.put(b)
                wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
                got = await device.get(await device.fft.convolve(ra, rb, mode))
                close(got, scipy.convolve(a.astype(wide), b.astype(wide), mode, "direct"), dtype)
                got = await device.get(await device.fft.correlate(ra, rb, mode))
                close(got, scipy.correlate(a.astype(wide), b.astype(wide), mode, "direct"), dtype)
        short, long = signal(rng, (5,), np.float64), signal(rng, (9,), np.float64)
        rs, rl = await device.put(short), await device.put(long)
        close(await device.get(await device.fft.convolve(rs, rl, "valid")), scipy.convolve(short, long, "valid"), np.float64)
        many = signal(rng, (4, 3, 20), np.float64)
        got = await device.get(await device.fft.convolve(await device.put(many), await device.put(short[None, None]), "same", axes=-1))
        close(got, scipy.fftconvolve(many, short[None, None], "same", axes=-1), np.float64)
        assert (await device.fft.convolve(await device.zeros((0, 20)), await device.zeros((1, 4)), axes=1)).shape == (0, 23)


async def test_shifts_and_frequencies_are_numpys(rng: np.random.Generator) -> None:
    x = signal(rng, (4, 5, 6), np.float32)
    async with opened() as device:
        ref = await device.put(x)
        for axes in (None, 1, (-1, 0)):
            shifted = await device.fft.fftshift(ref, axes)
            np.testing.assert_array_equal(await device.get(shifted), np.fft.fftshift(x, axes))
            np.testing.assert_array_equal(await device.get(await device.fft.ifftshift(shifted, axes)), x)
        np.testing.assert_array_equal(await device.get(await device.fft.fftshift(ref.T)), np.fft.fftshift(x.T))
        for n, d in ((1, 1.0), (8, 0.1), (9, -3.0)):
            np.testing.assert_array_equal(await device.get(await device.fft.fftfreq(n, d)), np.fft.fftfreq(n, d))
            single = await device.get(await device.fft.rfftfreq(n, d, "float32"))
            np.testing.assert_array_equal(single, np.fft.rfftfreq(n, d).astype(np.float32))


async def test_what_ops_made_of_transforms_refuse() -> None:
    async with opened() as device:
        x, z, one = await device.zeros((3, 4), "float32"), await device.zeros((3, 4), "complex64"), await device.zeros((3, 1), "float32")
        fft: Any = device.fft
        for call in (
            fft.dct(x, 5),
            fft.dct(x, 1.5),
            fft.dct(one, 1),
            fft.dst(await device.zeros((3, 0))),
            fft.idct(x, axis=2),
            fft.idst(x, norm="none"),
            fft.convolve(x, await device.zeros((3,))),
            fft.convolve(x, await device.zeros((2, 2)), axes=1),
            fft.convolve(x, await device.zeros((2, 5)), "valid"),
            fft.convolve(x, x, "most"),
            fft.convolve(x, z),
            fft.correlate(x, x, out=x),
            fft.convolve(await device.zeros((0,)), await device.zeros((2,))),
            fft.hfft(x),
            fft.ihfft(z),
            fft.fftshift(x, 2),
            fft.fftfreq(0),
            fft.fftfreq(4, 0.0),
            fft.fftfreq(4, 10**400),
            fft.rfftfreq(4, math.nan),
        ):
            await failure(call, accel.InvalidArgumentError)
        for call in (
            fft.dct(z),
            fft.dct(await device.zeros(4, "float16")),
            fft.convolve(x, x, axes=0),
            fft.convolve(await device.zeros((2,) * 4), await device.zeros((2,) * 4)),
            fft.convolve(await device.zeros(4, "int32"), await device.zeros(4, "int32")),
            fft.fftfreq(4, dtype="float16"),
        ):
            await failure(call, accel.UnsupportedError)
