"""Fourier transforms on the CPU against numpy in double precision, and what the ops refuse."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

import accel
from accel import ops
from accel.cpu.families.fft import _library
from accel.testing import FaultPlan
from tests.device_support import Array, failure, opened

pytestmark = pytest.mark.usefixtures("nothing_left")

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


async def test_irfft_of_what_is_no_spectrum_of_a_real_signal_is_numpys_and_keeps_it(device: accel.Device, rng: np.random.Generator) -> None:
    z = signal(rng, (3, 4, 6), np.complex128)
    ref = await device.put(z)
    for n in (None, 10, 11):
        close(await device.get(await device.fft.irfft(ref, n=n, axes=(0, 2))), np.fft.irfftn(z, s=(3, n or 10), axes=(0, 2)), np.float64)
        np.testing.assert_array_equal(await device.get(ref), z)


async def test_out_is_written_and_may_be_the_operand_of_a_whole_transform(device: accel.Device, rng: np.random.Generator) -> None:
    z = signal(rng, (5, 7), np.complex128)
    ref, out = await device.put(z), await device.full((5, 7), np.nan, "complex128")
    assert await device.fft.fft(ref, axes=(0, 1), out=out) is out
    close(await device.get(out), np.fft.fft2(z), np.complex128)
    assert await device.fft.ifft(out, axes=(0, 1), out=out) is out
    close(await device.get(out), z, np.complex128)


async def test_an_empty_batch_of_transforms_is_empty(device: accel.Device) -> None:
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
async def test_what_does_not_fit_is_refused(
    device: accel.Device, shape: tuple[int, ...], dtype: str, kind: str, options: dict[str, Any], error: str
) -> None:
    ref = await device.empty(shape, dtype)
    refused = await failure(getattr(device.fft, kind)(ref, **options), accel.InvalidArgumentError)
    assert error in f"{refused.message} {refused.remedy}"
    assert refused.op == kind


async def test_other_elements_are_not_offered(device: accel.Device) -> None:
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


async def test_without_scipy_the_transforms_are_numpys(
    device: accel.Device, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(_library, "_module", None)
    z = signal(rng, (6, 7, 8), np.complex64)
    got = await device.get(await device.fft.ifft(await device.put(z), axes=(2, 0), norm="ortho"))
    close(got, np.fft.ifftn(z.astype(np.complex128), axes=(2, 0), norm="ortho"), np.complex64)
    assert _library() is np.fft


async def test_what_ops_made_of_transforms_refuse(device: accel.Device) -> None:
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
