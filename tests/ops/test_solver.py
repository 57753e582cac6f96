"""Factorizations: what they are put together to, what fails and how, and what is refused."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

import accel
from accel import ops

pytestmark = pytest.mark.usefixtures("nothing_left")

Host = Literal["inline", "process"]


def singular(rng: np.random.Generator, *stack: int) -> np.ndarray[Any, Any]:
    """Return matrices of 4 rows; in the last one row 1 is 3 times row 0, and column 2 is 0."""
    a = rng.standard_normal((*stack, 4, 4)) + 4 * np.eye(4)
    last = a.reshape(-1, 4, 4)[-1]
    last[:, 2] = 0
    return a


async def test_a_matrix_that_is_singular_is_told_with_its_place_in_the_stack(hosted: accel.Device, rng: np.random.Generator) -> None:
    a, b = singular(rng, 2, 3), rng.standard_normal((4, 2))
    x, y = await hosted.put(a), await hosted.put(b)
    for running in (hosted.solver.solve(x, y), hosted.solver.inv(x), hosted.solver.lu_factor(x)):
        with pytest.raises(accel.LinAlgError, match=r"matrix \(1, 2\) is singular: element 3 of the diagonal of U is 0") as told:
            await running
        assert told.value.info == (0, 0, 0, 0, 0, 3)
        assert isinstance(told.value, np.linalg.LinAlgError)
    found, info = await hosted.solver.solve(x, y, check=False)
    assert (await hosted.get(info)).tolist() == [[0, 0, 0], [0, 0, 3]]
    solutions = (await hosted.get(found)).reshape(-1, 4, 2)
    np.testing.assert_allclose(a.reshape(-1, 4, 4)[:-1] @ solutions[:-1], np.broadcast_to(b, (5, 4, 2)), rtol=1e-9, atol=1e-9)
    assert (await hosted.get(await hosted.solver.det(x)))[1, 2] == 0
    sign, log = await hosted.solver.slogdet(x)
    assert ((await hosted.get(sign))[1, 2], (await hosted.get(log))[1, 2]) == (0, -np.inf)


async def test_a_matrix_that_is_not_definite_fails_its_op_in_a_batch_and_a_graph(device: accel.Device, rng: np.random.Generator) -> None:
    good = rng.standard_normal((5, 5))
    good, bad = good @ good.T + np.eye(5), np.diag([1.0, 2.0, -3.0, 4.0, 5.0])
    x, y = await device.put(good), await device.put(bad)
    with pytest.raises(accel.LinAlgError, match="the matrix is not positive definite: its leading minor of order 3 is not") as told:
        async with device.batch() as batch:
            first = batch.solver.cholesky(x)
            batch.solver.cholesky(y)
    assert (told.value.op_index, told.value.info, told.value.op, told.value.library) == (1, 3, "cholesky", "solver")
    lower = await device.get(first)
    np.testing.assert_allclose(lower @ lower.T, good, rtol=1e-12)
    async with device.graph() as graph:
        factor = graph.solver.cholesky(x)
        solved = graph.solver.cho_solve(factor, y)
    await graph.replay()
    np.testing.assert_allclose(good @ await device.get(solved), bad, atol=1e-9)
    await device.put(bad, out=x)
    with pytest.raises(accel.LinAlgError):
        await graph.replay()
    await device.put(2 * good, out=x)
    await graph.replay()
    np.testing.assert_allclose(2 * good @ await device.get(solved), bad, atol=1e-9)
    assert device.generation == 1


async def test_factors_solve_many_right_hand_sides(device: accel.Device, rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((3, 1, 6, 6)), rng.standard_normal((2, 6, 4))
    lu, piv = await device.solver.lu_factor(await device.put(a))
    x = await device.get(await device.solver.lu_solve(lu, piv, await device.put(b)))
    np.testing.assert_allclose(a @ x, np.broadcast_to(b, (3, 2, 6, 4)), atol=1e-9)
    vector = rng.standard_normal(6)
    x = await device.get(await device.solver.solve(await device.put(a), await device.put(vector)))
    np.testing.assert_allclose(np.einsum("abij,abj->abi", a, x), np.broadcast_to(vector, (3, 1, 6)), atol=1e-9)
    u, s, vh = await device.solver.svd(await device.put(a), full_matrices=False)
    np.testing.assert_allclose((await device.get(u) * (await device.get(s))[..., None, :]) @ await device.get(vh), a, atol=1e-12)


async def test_least_squares_of_any_rank_are_numpy_s(device: accel.Device, rng: np.random.Generator) -> None:
    a = rng.standard_normal((7, 4))
    a[:, 3] = a[:, 0] - a[:, 1]
    b = rng.standard_normal(7)
    found = await device.solver.lstsq(await device.put(a), await device.put(b))
    x, residuals, rank, values = [await device.get(each) for each in found]
    expected, _, expected_rank, expected_values = np.linalg.lstsq(a, b, rcond=None)
    np.testing.assert_allclose(x, expected, atol=1e-12)
    np.testing.assert_allclose(residuals, ((b - a @ expected) ** 2).sum(), rtol=1e-12)
    assert rank == expected_rank == 3
    np.testing.assert_allclose(values, expected_values, atol=1e-12)
    inverse = await device.get(await device.solver.pinv(await device.put(np.stack([a, 2 * a]))))
    np.testing.assert_allclose(inverse, np.linalg.pinv(np.stack([a, 2 * a]), rtol=1e-12), atol=1e-12)
    with pytest.raises(accel.LinAlgError, match="matrix_power: the matrix is singular"):
        await device.solver.matrix_power(await device.put(np.ones((2, 2))), -1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_iterations_end_for_elements_that_are_not_finite(device: accel.Device, value: float, rng: np.random.Generator) -> None:
    a = rng.standard_normal((2, 5, 5)) + 0j
    a[1, 3, 2] = value
    x, b = await device.put(a), await device.put(rng.standard_normal(5) + 0j)
    solver = device.solver
    for call in (
        solver.eigh,
        solver.eigvalsh,
        solver.eig,
        solver.eigvals,
        solver.svd,
        solver.svdvals,
        solver.pinv,
        lambda x, **o: solver.lstsq(x, b, **o),
    ):
        with pytest.raises(accel.LinAlgError, match=r"matrix \(1,\) has elements that are not finite") as told:
            await call(x)
        assert told.value.info == (0, -1)
        *found, info = await call(x, check=False)
        assert (await device.get(info)).tolist() == [0, -1]
        first, last = await device.get(found[0])
        assert np.isfinite(first).all()
        assert np.isnan(last).all()
    assert device.generation == 1


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
async def test_eigenvectors_of_matrices_that_are_not_normal(device: accel.Device, dtype: str, rng: np.random.Generator) -> None:
    a = (rng.standard_normal((2, 6, 6)) + (1j if dtype == "complex128" else 0) * rng.standard_normal((2, 6, 6))).astype(dtype)
    w, v = [await device.get(each) for each in await device.solver.eig(await device.put(a))]
    np.testing.assert_allclose(a @ v, v * w[:, None, :], atol=1e-11)
    np.testing.assert_allclose(np.linalg.norm(v, axis=1), 1)
    only = await device.get(await device.solver.eigvals(await device.put(a)))
    np.testing.assert_allclose(np.sort_complex(only), np.sort_complex(w), atol=1e-11)
    one, bad = await device.put(np.eye(3)), await device.put(-np.eye(3))
    _, _, info = await device.solver.eigh(one, bad, check=False)
    assert await device.get(info) == 4
    with pytest.raises(accel.LinAlgError, match="has a b that is not positive definite: the leading minor of order 1 is not"):
        await device.solver.eigh(one, bad)
    with pytest.raises(accel.LinAlgError, match=r"elements that are not finite, .*info -1"):
        await device.solver.eigh(await device.put(np.full((3, 3), np.nan)), one)


@pytest.mark.parametrize(
    ("call", "shapes", "error"),
    [
        (ops.Cholesky, [(3, 4)], "a has shape"),
        (ops.Det, [(3,)], "a has shape"),
        (ops.Svd, [(3,)], "a has shape"),
        (ops.Solve, [(3, 3), (4,)], "b has shape"),
        (ops.Solve, [(3, 3), (4, 3)], "b has shape"),
        (ops.Solve, [(2, 3, 3), (5, 3, 1)], "shapes"),
        (ops.LuSolve, [(3, 3), (3,), (3,)], "piv is float64"),
        (lambda a: ops.Qr(a, "r"), [(3, 3)], "mode is 'r'"),  # type: ignore[arg-type]
        (ops.Lstsq, [(3, 4), (4,)], "b has shape"),
        (ops.Eigh, [(3, 3), (2, 3, 3)], "b is"),
        (lambda a: ops.Pinv(a, -1.0), [(3, 3)], "rtol is -1.0"),
        (lambda a: ops.MatrixPower(a, 1.5), [(3, 3)], "n is 1.5"),  # type: ignore[arg-type]
        (lambda a: ops.Inv(a, check=1), [(3, 3)], "check is 1"),  # type: ignore[arg-type]
        (lambda a: ops.Eigh(a, upper="L"), [(3, 3)], "upper is 'L'"),  # type: ignore[arg-type]
        (lambda a: ops.Svd(a, full_matrices=0), [(3, 3)], "full_matrices is 0"),  # type: ignore[arg-type]
    ],
)
async def test_what_does_not_fit_is_refused(device: accel.Device, call: Any, shapes: list[tuple[int, ...]], error: str) -> None:
    with pytest.raises(accel.InvalidArgumentError, match=error):
        await device.run(call(*[await device.zeros(shape, "float64") for shape in shapes]))


async def test_dtypes_without_a_solver_are_refused(device: accel.Device) -> None:
    with pytest.raises(accel.UnsupportedError, match="eigh is not offered for float16"):
        await device.solver.eigh(await device.zeros((3, 3), "float16"))
    with pytest.raises(accel.InvalidArgumentError, match="differ in dtype"):
        await device.solver.solve(await device.zeros((3, 3), "float64"), await device.zeros(3, "float32"))
