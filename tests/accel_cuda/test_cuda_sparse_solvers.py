"""Iterative solvers on the GPU: large systems, as few copies to the host as there are looks at the residual, and deadlines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import accel
from accel.ops import Get
from tests.solvers.test_sparse_solvers import DTYPES, positive, skewed, vector

scipy = pytest.importorskip("scipy.sparse")
linalg = pytest.importorskip("scipy.sparse.linalg")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

LIBRARIES = ("sparse", "blas", "elementwise")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [None, "jacobi"])
async def test_both_solvers_solve_what_scipys_do(device: accel.Device, rng: np.random.Generator, dtype: str, given: str | None) -> None:
    source = positive(rng, 40, dtype)
    b, inverse = vector(rng, 1600, dtype), scipy.diags_array(1 / source.diagonal())
    ref = await device.put(b)
    for form in ("csr", "csc", "coo"):
        a = await device.sparse.put(source.asformat(form))
        seen: list[tuple[int, float]] = []
        x, info = await device.sparse.cg(a, ref, rtol=1e-3, M=given, callback=lambda *each, seen=seen: seen.append(each))
        theirs: list[Any] = []
        linalg.cg(source, b, rtol=1e-3, M=None if given is None else inverse, callback=theirs.append)
        assert info == 0
        assert abs(seen[-1][0] - len(theirs)) <= 3, "rounding may make a few more or less"
        assert np.linalg.norm(b - source @ await device.get(x)) <= 1.05e-3 * np.linalg.norm(b)
    skew = skewed(rng, source, dtype)
    x, info = await device.sparse.gmres(await device.sparse.put(skew), ref, rtol=1e-4, restart=40, M=given)
    assert info == 0
    assert np.linalg.norm(b - skew @ await device.get(x)) <= 1.05e-4 * np.linalg.norm(b)


async def test_a_large_plane_is_solved_with_one_copy_for_each_replay(
    device: accel.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = 700
    line = scipy.diags_array([-np.ones(side - 1), 2 * np.ones(side), -np.ones(side - 1)], offsets=[-1, 0, 1])
    source = (scipy.kron(line, scipy.eye_array(side)) + scipy.kron(scipy.eye_array(side), line)).tocsr()
    b = rng.standard_normal(side**2)
    a, ref = await device.sparse.put(source), await device.put(b)
    copies, looks, into = 0, 0, Get.into

    def counted(*arguments: Any) -> Any:
        nonlocal copies
        copies += 1
        return into(*arguments)

    def look(iterations: int, norm: float) -> None:
        nonlocal looks
        looks += 1

    monkeypatch.setattr(Get, "into", counted)
    x, info = await device.sparse.cg(a, ref, rtol=1e-8, check_every=64, callback=look)
    monkeypatch.undo()
    assert info == 0
    assert copies == looks + 2, "and one for the norms of b and of its residual, one for that of x at the end"
    assert np.linalg.norm(b - source @ await device.get(x)) <= 2e-8 * np.linalg.norm(b)
    with pytest.raises(accel.DeadlineExceededError):
        await device.sparse.cg(a, ref, rtol=0.0, timeout=0.05)
    _, info = await device.sparse.cg(a, ref, rtol=1e-12, maxiter=100, check_every=64)
    assert info == 100
    again, info = await device.sparse.cg(a, ref, x, rtol=1e-7)
    assert info == 0
    np.testing.assert_array_equal(await device.get(again), await device.get(x))


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
async def test_diagonals_of_large_matrices(device: accel.Device, rng: np.random.Generator, form: str) -> None:
    source = scipy.random_array((50_003, 40_001), density=1e-3, rng=rng, format=form)
    a = await device.sparse.put(source)
    np.testing.assert_array_equal(await device.get(await device.sparse.diagonal(a)), source.tocsr().diagonal())
