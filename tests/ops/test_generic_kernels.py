"""Ops on a backend that has nothing but a ComputeBackend: its kernels are those of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.compute import DeviceCompute, kernels_of
from accel.cpu.backend import CpuBackend, CpuDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

own_kernels = CpuDevice.kernels


@pytest.fixture(autouse=True)
def without_own_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the CPU's ops run by a compute interface, which another context of the CPU stands for."""
    computes: dict[Any, DeviceCompute] = {}
    own = CpuBackend().open(0)

    def compute(stream: Any) -> DeviceCompute:
        if stream not in computes:
            computes[stream] = DeviceCompute(own, stream)
            computes[stream].init()
        return computes[stream]

    kernels = kernels_of(compute)
    monkeypatch.setattr(CpuDevice, "kernels", lambda self, library: own_kernels(own, library) if self is own else kernels.get(library, {}))
    yield
    for each in computes.values():
        each.close()
    own.close()


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    array = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        array = array + 1j * rng.standard_normal(shape)
    return array.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("n", [0, 1, 257])
async def test_vector_ops_agree_with_numpy(device: accel.Device, dtype: str, n: int) -> None:
    seed = int(np.random.default_rng().integers(1 << 32))
    rng = np.random.default_rng(seed)
    x, y = random(rng, (n,), dtype), random(rng, (n,), dtype)

    def close(actual: Any, expected: Any) -> None:
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=f"seed {seed}")

    rx, ry = await device.put(x), await device.put(y)
    close(await device.get(await device.blas.dot(rx, ry)), (x.astype("c16") * y).sum())
    assert await device.blas.axpy(rx, ry, alpha=2.5) is ry
    close(await device.get(ry), y + 2.5 * x.astype("c16"))
    assert await device.blas.scal(rx, -3.0) is rx
    close(await device.get(rx), -3.0 * x.astype("c16"))


@pytest.mark.parametrize("n", [0, 1, 1000])
async def test_the_norm_agrees_with_numpy(device: accel.Device, n: int) -> None:
    seed = int(np.random.default_rng().integers(1 << 32))
    x = random(np.random.default_rng(seed), (n,), "float64")
    norm = await device.get(await device.blas.nrm2(await device.put(x)))
    np.testing.assert_allclose(norm, np.linalg.norm(x), err_msg=f"seed {seed}")


async def test_neighbouring_axes_are_reduced(device: accel.Device) -> None:
    x = await device.put(np.arange(24.0).reshape(2, 3, 4))
    np.testing.assert_array_equal(await device.get(await device.reduce("sum", x, axis=(1, 2))), np.arange(24.0).reshape(2, 12).sum(1))
    with pytest.raises(accel.UnsupportedError, match="neighbouring axes"):
        await device.reduce("sum", x, axis=(0, 2))
    with pytest.raises(accel.UnsupportedError, match="without ddof"):
        await device.reduce("var", x, ddof=1)
