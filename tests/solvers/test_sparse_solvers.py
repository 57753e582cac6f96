"""Iterative solvers: the same iterations as scipy's, a few small copies to the host, and an end in every case."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import accel
from accel.device.graph import Graph

scipy = pytest.importorskip("scipy.sparse")
linalg = pytest.importorskip("scipy.sparse.linalg")
pytestmark = pytest.mark.usefixtures("nothing_left")

DTYPES = ("float32", "float64", "complex64", "complex128")


def positive(rng: np.random.Generator, side: int, dtype: str) -> Any:
    """Return a positive definite matrix of side**2 rows: a plane's Laplacian, whose rows and columns are scaled, and turned if they are complex."""
    line = scipy.diags_array([-np.ones(side - 1), 2 * np.ones(side), -np.ones(side - 1)], offsets=[-1, 0, 1])
    plane = scipy.kron(line, scipy.eye_array(side)) + scipy.kron(scipy.eye_array(side), line)
    scale = 1 + 3 * rng.random(side**2)
    if dtype.startswith("complex"):
        scale = scale * np.exp(1j * rng.random(side**2))
    d = scipy.diags_array(scale)
    return (d @ plane @ d.conj()).tocsr().astype(dtype)


def vector(rng: np.random.Generator, n: int, dtype: str) -> Any:
    return (rng.standard_normal(n) + (1j * rng.standard_normal(n) if dtype.startswith("complex") else 0)).astype(dtype)


def skewed(rng: np.random.Generator, source: Any, dtype: str) -> Any:
    """Return a positive definite matrix less its symmetry, which stays so far from singular that GMRES converges."""
    n = source.shape[0]
    return (source + scipy.diags_array([np.ones(n), 0.1 * vector(rng, n - 1, dtype)], offsets=[0, 1])).tocsr().astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", ["none", "jacobi", "matrix", "diagonal"])
async def test_conjugate_gradients_take_as_many_iterations_as_scipys(
    device: accel.Device, rng: np.random.Generator, dtype: str, given: str
) -> None:
    source = positive(rng, 12, dtype)
    b, inverse = vector(rng, source.shape[0], dtype), scipy.diags_array(1 / source.diagonal()).tocsr()
    a, ref = await device.sparse.put(source), await device.put(b)
    preconditioner: Any = {
        "none": None,
        "jacobi": "jacobi",
        "matrix": await device.sparse.put(inverse.astype(dtype)),
        "diagonal": await device.put(inverse.diagonal().astype(dtype)),
    }[given]  # fmt: skip
    seen: list[tuple[int, float]] = []
    x, info = await device.sparse.cg(a, ref, rtol=1e-3, M=preconditioner, check_every=7, callback=lambda *each: seen.append(each))
    found = await device.get(x)
    theirs: list[Any] = []
    linalg.cg(source, b, rtol=1e-3, M=None if given == "none" else inverse, callback=theirs.append)
    assert info == 0
    assert abs(seen[-1][0] - len(theirs)) <= 1, "rounding may make one more or less"
    assert [count for count, _ in seen[:-1]] == list(range(7, seen[-1][0], 7))
    residual = np.linalg.norm(b - source @ found)
    assert residual <= 1.01e-3 * np.linalg.norm(b)
    assert seen[-1][1] == pytest.approx(residual, rel=0.05)
    np.testing.assert_allclose(found, theirs[-1], atol=2e-2 * abs(theirs[-1]).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", ["none", "jacobi", "matrix", "diagonal"])
async def test_gmres_solves_what_is_not_symmetric(device: accel.Device, rng: np.random.Generator, dtype: str, given: str) -> None:
    source = positive(rng, 12, dtype)
    n = source.shape[0]
    source = skewed(rng, source, dtype)
    b, inverse = vector(rng, n, dtype), scipy.diags_array(1 / source.diagonal()).tocsr()
    a, ref = await device.sparse.put(source), await device.put(b)
    preconditioner: Any = {
        "none": None,
        "jacobi": "jacobi",
        "matrix": await device.sparse.put(inverse.astype(dtype)),
        "diagonal": await device.put(inverse.diagonal().astype(dtype)),
    }[given]  # fmt: skip
    seen: list[tuple[int, float]] = []
    x, info = await device.sparse.gmres(a, ref, rtol=1e-4, restart=30, M=preconditioner, callback=lambda *each: seen.append(each))
    residual = np.linalg.norm(b - source @ await device.get(x))
    assert info == 0
    assert residual <= 1.01e-4 * np.linalg.norm(b)
    assert seen[-1][1] == pytest.approx(residual, rel=0.05, abs=1e-5)
    theirs: list[Any] = []
    linalg.gmres(source, b, rtol=1e-4, restart=30, M=None if given == "none" else inverse, callback=theirs.append, callback_type="x")
    assert len(seen) <= len(theirs) + 1, "as many cycles as scipy's"


async def test_a_start_is_used_and_not_written(device: accel.Device, rng: np.random.Generator) -> None:
    source = positive(rng, 9, "float64")
    b = vector(rng, 81, "float64")
    exact = linalg.spsolve(source.tocsc(), b)
    a, ref, start = await device.sparse.put(source), await device.put(b), await device.put(exact + 1e-9)
    for solve in (device.sparse.cg, device.sparse.gmres):
        seen: list[int] = []
        x, info = await solve(a, ref, start, callback=lambda count, _, seen=seen: seen.append(count))  # type: ignore[misc]
        assert (info, seen) == (0, []), "it is good enough already"
        np.testing.assert_array_equal(await device.get(x), exact + 1e-9)
        far = await device.put(exact + rng.standard_normal(81))
        before = await device.get(far)
        x, info = await solve(a, ref, far, rtol=1e-10)
        assert info == 0
        np.testing.assert_allclose(await device.get(x), exact, rtol=1e-6, atol=1e-8)
        np.testing.assert_array_equal(await device.get(far), before)


async def test_zeros_are_solved_by_zeros_and_no_rows_by_nothing(device: accel.Device, rng: np.random.Generator) -> None:
    a = await device.sparse.put(positive(rng, 5, "float64"))
    none = await device.sparse.csr((np.empty(0), np.empty(0, int), np.zeros(1, int)), shape=(0, 0))
    for solve in (device.sparse.cg, device.sparse.gmres):
        x, info = await solve(a, await device.zeros((25,), "float64"))
        assert info == 0
        assert not (await device.get(x)).any()
        x, info = await solve(none, await device.zeros((0,), "float64"))
        assert (info, x.shape) == (0, (0,))


_SCALES = [("float32", 1e20), ("float32", 1e35), ("float32", 1e-30), ("complex64", 1e25), ("float64", 1e200), ("complex128", 1e-200)]


@pytest.mark.parametrize("method", ["cg", "gmres"])
@pytest.mark.parametrize(("dtype", "scale"), _SCALES)
async def test_right_sides_of_any_scale_are_solved(
    device: accel.Device, rng: np.random.Generator, dtype: str, scale: float, method: str
) -> None:
    source = positive(rng, 5, dtype)
    wide = source.astype("complex128" if dtype.startswith("complex") else "float64")
    exact, start = (vector(rng, 25, dtype) * np.array(scale, dtype) for _ in range(2))
    b = (wide @ exact).astype(dtype)
    a, ref = await device.sparse.put(source), await device.put(b)
    norms: list[float] = []
    for x0 in (None, await device.put(start)):
        solve = getattr(device.sparse, method)
        x, info = await solve(a, ref, x0, rtol=1e-5, callback=lambda _, norm: norms.append(norm / scale))
        left = (b - wide @ await device.get(x)) / scale
        assert info == 0
        assert np.linalg.norm(left) <= 1.1e-5 * np.linalg.norm(b / scale)
        assert norms[-1] == pytest.approx(np.linalg.norm(left), rel=0.2, abs=1e-4)


@pytest.mark.parametrize("method", ["cg", "gmres"])
async def test_a_solution_beyond_the_numbers_of_its_dtype_is_none(device: accel.Device, method: str) -> None:
    a = await device.sparse.put((1e-10 * scipy.eye_array(3)).tocsr().astype("float32"))
    solve = getattr(device.sparse, method)
    for right in (np.full(3, 1e35, np.float32), np.array([1, np.inf, 1], np.float32), np.array([1, np.nan, 1], np.float32)):
        _, info = await solve(a, await device.put(right))
        assert info > 0, right
    x, info = await solve(a, await device.zeros(3), await device.put(np.ones(3, np.float32)))
    assert (info, (await device.get(x)).tolist()) == (0, [0, 0, 0]), "b is 0: x0 is not looked at, as in scipy"


async def test_what_does_not_converge_says_how_often_it_was_tried(device: accel.Device, rng: np.random.Generator) -> None:
    source = positive(rng, 20, "float64")
    a, b = await device.sparse.put(source), vector(rng, 400, "float64")
    ref = await device.put(b)
    theirs: list[Any] = []
    linalg.cg(source, b, rtol=1e-12, maxiter=21, callback=lambda x: theirs.append(x.copy()))
    x, info = await device.sparse.cg(a, ref, rtol=1e-12, maxiter=21)
    assert info == 21, "not a multiple of check_every: the device counts"
    np.testing.assert_allclose(await device.get(x), theirs[-1], rtol=1e-6, atol=1e-8)
    _, info = await device.sparse.gmres(a, ref, rtol=1e-12, maxiter=3, restart=5)
    assert info == 3
    singular = await device.sparse.csr((np.ones(1), np.zeros(1, int), np.array([0, 1, 1])), shape=(2, 2))
    for solve in (device.sparse.cg, device.sparse.gmres):
        _, info = await solve(singular, await device.put(np.array([0.0, 1.0])), maxiter=40)
        assert info > 0
        _, info = await solve(a, await device.full((400,), np.nan, "float64"))
        assert info > 0, "NaN is no solution"


async def test_a_space_that_ends_early_is_enough(device: accel.Device) -> None:
    a = await device.sparse.put(scipy.diags_array(np.array([1.0, 1.0, 2.0, 2.0, 3.0])).tocsr())
    b = await device.put(np.ones(5))
    for solve in (device.sparse.cg, device.sparse.gmres):
        x, info = await solve(a, b, rtol=1e-12)
        assert info == 0
        np.testing.assert_allclose(await device.get(x), [1, 1, 0.5, 0.5, 1 / 3], rtol=1e-12)


async def test_deadlines_and_cancellation_end_it_and_leave_the_device_as_it_was(
    device: accel.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Singular, and b is not in its range: no iteration ever makes the residual smaller.
    a = await device.sparse.csr((np.ones(1), np.zeros(1, int), np.array([0, 1, 1])), shape=(2, 2))
    b = await device.put(np.array([0.0, 1.0]))
    with pytest.raises(accel.DeadlineExceededError):
        await device.sparse.cg(a, b, timeout=0)
    replays = 0
    entered, replay = asyncio.Event(), Graph.replay

    async def endless(self: Graph, *, timeout: float | None = None) -> None:
        nonlocal replays
        replays += 1
        entered.set()
        await replay(self, timeout=timeout)

    monkeypatch.setattr(Graph, "replay", endless)
    for solve in (device.sparse.cg, device.sparse.gmres):
        with pytest.raises(accel.DeadlineExceededError):
            await solve(a, b, maxiter=1 << 24, timeout=0.3)
        entered.clear()
        running = asyncio.ensure_future(solve(a, b, maxiter=1 << 24))
        await entered.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        sent = replays
        assert float(await device.get(await device.blas.dot(b, b))) > 0
        assert replays == sent, "no replay follows"


async def test_what_does_not_fit_is_refused(device: accel.Device, rng: np.random.Generator) -> None:
    sparse = device.sparse
    a, b = await sparse.put(positive(rng, 4, "float64")), await device.zeros((16,), "float64")
    wide = await sparse.put(scipy.random_array((16, 20), density=0.2, rng=rng))
    half = await sparse.csr((np.ones(1, np.float16), np.zeros(1, int), np.array([0, 1])), shape=(1, 1))
    wrong: list[Any] = [
        sparse.cg(wide, b),
        sparse.cg(a, await device.zeros((15,), "float64")),
        sparse.cg(a, await device.zeros((16,), "float32")),
        sparse.cg(a, b, await device.zeros((15,), "float64")),
        sparse.cg(a, b, await device.zeros((16,), "float32")),
        sparse.cg(a, b, rtol=-1.0),
        sparse.cg(a, b, atol=float("nan")),
        sparse.cg(a, b, maxiter=0),
        sparse.cg(a, b, check_every=0),
        sparse.cg(a, b, M="ilu"),
        sparse.cg(a, b, M=wide),
        sparse.cg(a, b, M=await device.zeros((15,), "float64")),
        sparse.cg(a, b, M=await device.zeros((16,), "float32")),
        sparse.cg(a, b, timeout="soon"),  # type: ignore[arg-type]
        sparse.gmres(a, b, restart=0),
        sparse.gmres(a, b, maxiter=True),
    ]
    for call in wrong:
        with pytest.raises(accel.InvalidArgumentError):
            await call
    with pytest.raises(accel.UnsupportedError, match="float16"):
        await sparse.cg(half, await device.zeros((1,), "float16"))
