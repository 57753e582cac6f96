"""Sparse systems solved directly on the GPU, where cuDSS is installed; and what is said where it is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import accel
from accel_cuda.families.sparse_direct import CUDSS
from tests.accel_cuda.compute_support import longest_gap

scipy = pytest.importorskip("scipy.sparse")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

LIBRARIES = ("sparse",)


def is_there() -> bool:
    try:
        CUDSS.load()
    except accel.BackendUnavailableError:
        return False
    return True


@pytest.fixture
def cudss() -> None:
    if not is_there():
        pytest.skip("cuDSS is not installed: pip install '.[sparse-direct]'")


def system(rng: np.random.Generator, n: int, dtype: str) -> Any:
    """Return a matrix whose large elements are far from the diagonal, on which some are missing."""
    large = (scipy.eye_array(n, format="csr") * 3)[rng.permutation(n)]
    found = (scipy.random_array((n, n), density=min(1.0, 4 / n), rng=rng) + large).tocsr().astype(dtype)
    if dtype.startswith("complex"):
        found.data = (found.data * np.exp(1j * rng.random(found.nnz))).astype(dtype)
    return found


async def test_without_the_library_the_error_says_how_to_install_it(device: accel.Device) -> None:
    if is_there():
        pytest.skip("cuDSS is installed")
    a, b = await device.sparse.put(scipy.eye_array(3, format="csr")), await device.put(np.ones(3))
    with pytest.raises(accel.BackendUnavailableError, match="cudss") as caught:
        await device.sparse.solve(a, b)
    assert "sparse-direct" in caught.value.remedy
    assert (await device.get(await device.sparse.spmv(a, b))).tolist() == [1, 1, 1]


@pytest.mark.usefixtures("cudss")
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
async def test_systems_are_solved_directly(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    error = 1e6 * float(np.finfo(dtype).eps)
    for n in (1, 50, 1001):
        source = system(rng, n, dtype)
        a = await device.sparse.put(source)
        for shape in ((n,), (n, 1), (n, 7)):
            b = rng.standard_normal(shape).astype(dtype)
            ref, out = await device.put(b), await device.zeros(shape, dtype)
            x = await device.get(await device.sparse.solve(a, ref))
            np.testing.assert_allclose(source @ x, b, rtol=error, atol=error * abs(x).max())
            await device.sparse.solve(a, ref, out=out)
            assert np.isfinite(await device.get(out)).all()
            _, info = await device.sparse.solve(a, ref, check=False)
            assert int(await device.get(info)) == 0


@pytest.mark.usefixtures("cudss")
async def test_a_large_plane_is_solved_while_the_loop_goes_on(device: accel.Device, rng: np.random.Generator) -> None:
    side = 400
    line = scipy.diags_array([-np.ones(side - 1), 2 * np.ones(side), -np.ones(side - 1)], offsets=[-1, 0, 1])
    source = (scipy.kron(line, scipy.eye_array(side)) + scipy.kron(scipy.eye_array(side), line)).tocsr()
    b = rng.standard_normal(side**2)
    a, ref = await device.sparse.put(source), await device.put(b)
    await device.sparse.solve(a, ref)
    solution, longest = await longest_gap(device.sparse.solve(a, ref))
    assert longest < 0.05
    x = await device.get(solution)
    np.testing.assert_allclose(source @ x, b, rtol=1e-8, atol=1e-8)


@pytest.mark.usefixtures("cudss")
async def test_matrices_with_zeros_on_the_diagonal_are_no_singular_ones(device: accel.Device, rng: np.random.Generator) -> None:
    turned = scipy.csr_array(np.array([[0.0, 1], [1, 0]]))
    constraint = rng.random((3, 40))
    dense = np.block([[2 * np.eye(40), constraint.T], [constraint, np.zeros((3, 3))]])
    for source in (turned, scipy.csr_array(dense)):
        b = rng.standard_normal(source.shape[0])
        x = await device.get(await device.sparse.solve(await device.sparse.put(source), await device.put(b)))
        np.testing.assert_allclose(source @ x, b, rtol=1e-8, atol=1e-8)


@pytest.mark.usefixtures("cudss")
async def test_singular_systems_are_errors_and_the_device_goes_on(device: accel.Device) -> None:
    sparse, b = device.sparse, await device.put(np.ones(3))
    row = scipy.csr_array(np.array([[1.0, 2, 0], [0, 0, 0], [0, 1, 1]]))
    zeros = row.copy()
    zeros.data[:2] = 0
    twice = scipy.csr_array(np.array([[1.0, 2, 0], [2, 4, 0], [0, 1, 1]]))
    good = await sparse.put(scipy.eye_array(3, format="csr") * 2)
    for source in (row, zeros, twice, scipy.csr_array((3, 3))):
        a = await sparse.put(source)
        with pytest.raises(accel.LinAlgError, match="singular"):
            await sparse.solve(a, b)
        _, info = await sparse.solve(a, b, check=False)
        assert int(await device.get(info)) > 0
        assert (await device.get(await sparse.solve(good, b))).tolist() == [0.5] * 3
    with pytest.raises(accel.UnsupportedError, match="graph"):
        async with device.graph() as graph:
            graph.sparse.solve(good, b)
    assert (await device.get(await sparse.solve(good, b))).tolist() == [0.5] * 3
