"""Factorizations on the GPU: large ones, what fails and how, replays, stacks, and the loop meanwhile; the samples of the family have all ops and dtypes."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import numpy as np
import pytest

import accel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

LIBRARIES = ("solver",)


def general(rng: np.random.Generator, *shape: int, dtype: str = "float64") -> np.ndarray[Any, Any]:
    a = np.asarray(rng.standard_normal(shape), dtype)
    return a + 1j * rng.standard_normal(shape) if dtype.startswith("c") else a


def definite(rng: np.random.Generator, n: int, dtype: str = "float64") -> np.ndarray[Any, Any]:
    a = general(rng, n, n, dtype=dtype)
    return np.asarray(a @ a.conj().T / n + np.eye(n, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
async def test_large_matrices_are_solved_and_decomposed(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    n, solver = 700, device.solver
    a, h, b = general(rng, n, n, dtype=dtype), definite(rng, n, dtype), general(rng, n, 5, dtype=dtype)
    x, y, z = [await device.put(each) for each in (a, h, b)]
    np.testing.assert_allclose(a @ await device.get(await solver.solve(x, z)), b, atol=1e-8)
    np.testing.assert_allclose(a @ await device.get(await solver.inv(x)), np.eye(n), atol=1e-8)
    lu, piv = await solver.lu_factor(x)
    turns: tuple[tuple[Literal["n", "t", "c"], np.ndarray[Any, Any]], ...] = (("n", a), ("t", a.T), ("c", a.conj().T))
    for transpose, turned in turns:
        np.testing.assert_allclose(turned @ await device.get(await solver.lu_solve(lu, piv, z, transpose=transpose)), b, atol=1e-8)
    for upper in (False, True):
        factor = await solver.cholesky(y, upper=upper)
        np.testing.assert_allclose(h @ await device.get(await solver.cho_solve(factor, z, upper=upper)), b, atol=1e-9)
        np.testing.assert_allclose(h @ await device.get(await solver.cholesky_inverse(factor, upper=upper)), np.eye(n), atol=1e-9)
    sign, log = [await device.get(each) for each in await solver.slogdet(x)]
    np.testing.assert_allclose((sign, log), np.linalg.slogdet(a), rtol=1e-10)
    w, v = [await device.get(each) for each in await solver.eigh(y)]
    np.testing.assert_allclose(h @ v, v * w, atol=1e-10)
    w, v = [await device.get(each) for each in await solver.eig(x)]
    np.testing.assert_allclose(a @ v, v * w, atol=1e-8)
    np.testing.assert_allclose(await device.get(await solver.matrix_power(y, 5)), np.linalg.matrix_power(h, 5), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("shape", [(600, 301), (301, 600), (400, 400)])
async def test_large_matrices_of_any_shape(device: accel.Device, rng: np.random.Generator, shape: tuple[int, int]) -> None:
    a, b = general(rng, *shape), general(rng, shape[0], 3)
    x, y = await device.put(a), await device.put(b)
    for mode in ("reduced", "complete"):
        q, r = [await device.get(each) for each in await device.solver.qr(x, mode=mode)]
        np.testing.assert_allclose(q @ r, a, atol=1e-10)
        np.testing.assert_allclose(q.T @ q, np.eye(q.shape[1]), atol=1e-10)
    u, s, vh = [await device.get(each) for each in await device.solver.svd(x, full_matrices=False)]
    np.testing.assert_allclose((u * s) @ vh, a, atol=1e-9)
    np.testing.assert_allclose(await device.get(await device.solver.pinv(x)), np.linalg.pinv(a), atol=1e-8)
    solution, _, rank, _ = await device.solver.lstsq(x, y)
    np.testing.assert_allclose(await device.get(solution), np.linalg.lstsq(a, b)[0], atol=1e-8)
    assert await device.get(rank) == min(shape)


async def test_what_fails_is_told_with_its_place_and_the_device_goes_on(device: accel.Device, rng: np.random.Generator) -> None:
    a = general(rng, 2, 3, 4, 4) + 4 * np.eye(4)
    a[1, 2, :, 2] = 0
    x = await device.put(a)
    for call in (device.solver.lu_factor, device.solver.inv):
        with pytest.raises(accel.LinAlgError, match="element 3 of the diagonal") as told:
            await call(x)
        assert told.value.info == (0, 0, 0, 0, 0, 3)
    assert (await device.get(await device.solver.det(x)))[1, 2] == 0
    bad = np.stack([np.eye(5), np.diag([1.0, 2, -3, 4, 5]), np.diag([1.0, np.nan, 3, 4, 5])])
    _, info = await device.solver.cholesky(await device.put(bad), check=False)
    assert (await device.get(info)).tolist() == [0, 3, 2]
    one, negative = await device.put(np.eye(3)), await device.put(-np.eye(3))
    *_, info = await device.solver.eigh(one, negative, check=False)
    assert await device.get(info) == 4
    assert device.generation == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["eigh", "eigvalsh", "eig", "eigvals", "svd", "svdvals", "pinv"])
async def test_iterations_end_for_what_is_not_finite(device: accel.Device, rng: np.random.Generator, kind: str, value: float) -> None:
    a = general(rng, 2, 65, 65)
    a[1, 40, 3] = value
    *found, info = await getattr(device.solver, kind)(await device.put(a), check=False, timeout=60)
    assert (await device.get(info)).tolist() == [0, -1]
    good, bad = await device.get(found[0])
    assert np.isfinite(good).all()
    assert np.isnan(bad).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [2, 3, 65, 200])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
async def test_factorizations_make_no_finite_number_of_what_is_not_finite(
    device: accel.Device, rng: np.random.Generator, dtype: str, n: int, value: float
) -> None:
    a, b = general(rng, 2, n, n, dtype=dtype).astype(dtype), general(rng, n, 3, dtype=dtype).astype(dtype)
    row, column = rng.integers(n, size=2)
    a[1, row, column] = value
    solver, x, sides = device.solver, await device.put(a), await device.put(b)
    calls: dict[str, Any] = {
        "solve": solver.solve(x, sides, timeout=60),
        "inv": solver.inv(x, timeout=60),
        "det": solver.det(x, timeout=60),
        "slogdet": solver.slogdet(x, timeout=60),
        "lu_factor": solver.lu_factor(x, timeout=60),
        "matrix_power": solver.matrix_power(x, -2, timeout=60),
        "qr": solver.qr(x, timeout=60),
    }
    for name, call in calls.items():
        found = await call
        for each in found if isinstance(found, tuple) else (found,):
            good, bad = await device.get(each)
            assert name == "det" or np.isfinite(good).all(), (name, row, column)  # the determinant of a large matrix may be infinite
            if bad.dtype == np.int32:
                assert ((bad >= 0) & (bad < n)).all()
            else:
                assert np.isnan(bad[np.triu_indices(n)] if name == "qr" else bad).all(), (name, row, column)
        if name == "solve":
            tolerance = 1e-2 if dtype in ("float32", "complex64") else 1e-8
            np.testing.assert_allclose(a[0] @ (await device.get(found))[0], b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("n", [3, 65])
async def test_solutions_of_right_hand_sides_that_are_not_finite(
    device: accel.Device, rng: np.random.Generator, n: int, dtype: str
) -> None:
    """A column of the solution is NaN where its right-hand side has a NaN, as LAPACK's is; the other columns are right."""
    a, b = (definite(rng, n) + 0 * general(rng, n, n)).astype(dtype), general(rng, n, 3, dtype=dtype).astype(dtype)
    expected = np.linalg.solve(a, b)
    b[0, 1] = np.nan
    solver, x, sides = device.solver, await device.put(a), await device.put(b)
    lu, piv = await solver.lu_factor(x)
    factors = await solver.cholesky(x)
    for call in (solver.solve(x, sides), solver.lu_solve(lu, piv, sides), solver.cho_solve(factors, sides)):
        found = await device.get(await call)
        assert np.isnan(found[:, 1]).all()
        np.testing.assert_allclose(found[:, ::2], expected[:, ::2], rtol=1e-2 if dtype == "float32" else 1e-9, atol=1e-4)


async def test_replays_solve_what_is_there_then(device: accel.Device, rng: np.random.Generator) -> None:
    """Whether all of these can be captured is cuSOLVER's choice: a call that waits for the device, or computes on the host, cannot."""
    n = 300
    x, b = await device.put(definite(rng, n)), await device.put(general(rng, n, 4))
    async with device.graph() as graph:
        solved = graph.solver.cho_solve(graph.solver.cholesky(x), b)
        same = graph.solver.solve(x, b)
        sign, log = graph.solver.slogdet(x)
        q, r = graph.solver.qr(x)
    for _ in range(3):
        a, sides = definite(rng, n), general(rng, n, 4)
        await device.put(a, out=x)
        await device.put(sides, out=b)
        await graph.replay()
        for each in (solved, same):
            np.testing.assert_allclose(a @ await device.get(each), sides, atol=1e-9)
        np.testing.assert_allclose((await device.get(sign), await device.get(log)), np.linalg.slogdet(a), rtol=1e-10)
        np.testing.assert_allclose(await device.get(q) @ await device.get(r), a, atol=1e-10)
    await device.put(-np.eye(n), out=x)
    with pytest.raises(accel.LinAlgError, match="leading minor of order 1"):
        await graph.replay()
    await graph.aclose()


@pytest.mark.parametrize("kind", ["eigh", "svd", "pinv", "eig"])
async def test_iterations_are_no_part_of_a_graph(device: accel.Device, kind: str) -> None:
    x = await device.put(np.eye(4))
    with pytest.raises(accel.UnsupportedError, match=f"{kind} cannot become a part of a graph"):
        async with device.graph() as graph:
            getattr(graph.solver, kind)(x)
    assert (await device.get(await device.solver.det(x))) == 1


async def test_streams_solve_side_by_side(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda", libraries=("solver",), streams=8)
        matrices = [general(rng, n, n) for n in (1, 2, 33, 100, 257) * 4]
        refs = [await device.put(a) for a in matrices]
        made = await asyncio.gather(*[device.solver.inv(x) for x in refs])
        for a, ref in zip(matrices, made, strict=True):
            np.testing.assert_allclose(a @ await device.get(ref), np.eye(len(a)), atol=1e-7)
