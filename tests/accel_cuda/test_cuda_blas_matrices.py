"""cuBLAS's typed calls on the GPU: sizes of many blocks, unaligned views, graphs, and numbers that the library writes into device memory."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import accel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

LIBRARIES = ("blas",)

TOLERANCE = {"float32": 2e-4, "float64": 1e-11, "complex64": 2e-4, "complex128": 1e-11}


def random(rng: np.random.Generator, shape: Any, dtype: str) -> Any:
    values = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_large_triangles_are_solved_and_multiplied(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    n = 1537
    a = (random(rng, (n, n), dtype) / n + 2 * np.eye(n)).astype(dtype)
    b = random(rng, (n, 65), dtype)
    ra, rb, rx = await device.put(a), await device.put(b), await device.put(b[:, 0].copy())
    for lower in (False, True):
        for trans in ("n", "t", "c"):
            form: Any = {"lower": lower, "trans": trans}
            solved = await device.get(await device.blas.trsm(ra, await device.blas.trmm(ra, rb, **form), **form))
            np.testing.assert_allclose(solved, b, rtol=0, atol=TOLERANCE[dtype], err_msg=str(form))
            found = await device.get(await device.blas.trsv(ra, await device.blas.trmv(ra, rx, **form), **form))
            np.testing.assert_allclose(found, b[:, 0], rtol=0, atol=TOLERANCE[dtype], err_msg=str(form))


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_vectors_of_many_blocks_and_views_that_begin_anywhere(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    x = random(rng, 2_000_003, dtype)
    ref, wide = await device.put(x), x.astype("complex128")
    for first in (0, 1, 3):
        sizes = np.abs(x[first:].real) + np.abs(x[first:].imag)
        view = ref[first:]
        assert (await device.get(await device.blas.iamax(view))).item() == np.argmax(sizes), first
        assert (await device.get(await device.blas.iamin(view))).item() == np.argmin(sizes), first
        total = (await device.get(await device.blas.asum(view))).item()
        assert total == pytest.approx(sizes.astype(np.float64).sum(), rel=1e-4), first
        product = (await device.get(await device.blas.dotc(view, view))).item()
        assert product == pytest.approx(np.vdot(wide[first:], wide[first:]), rel=1e-4), first


def batches(blas: Any, a: Any, b: Any, one: Any) -> list[Any]:
    n, m = one.shape
    return [
        *(blas.symm(a, b), blas.hemm(a, one, alpha=2.0), blas.symm(a[0], b.reshape(-1, n), side="right")),
        *(blas.symm(a[0], b.reshape(-1, m, n), side="right"), blas.syrk(b, lower=True), blas.herk(b[:, :, 1:], lower=True)),
        *(blas.geam(b, b, alpha=0.5), blas.geam(b, one, beta=-1.0), blas.geam(one, b)),
        blas.geam(b, one, transpose_a="c", transpose_b=True),
    ]


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_batches_of_symmetric_matrices_and_of_sums(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    """Few large ones, and more than the loop's thread enqueues; awaited and replayed."""
    for count, n, m in ((3, 257, 130), (300, 9, 5)):
        a, b, one = random(rng, (count, n, n), dtype), random(rng, (count, n, m), dtype), random(rng, (n, m), dtype)
        ra, rb, rone = await device.put(a), await device.put(b), await device.put(one)
        a, b, one = (each.astype("complex128" if dtype.startswith("complex") else "float64") for each in (a, b, one))
        half = np.triu(a, 1)
        symmetric, hermitian = half + half.swapaxes(1, 2) + a * np.eye(n), half + half.conj().swapaxes(1, 2) + a.real * np.eye(n)
        triangle, turned = np.tri(n, dtype=bool), b.swapaxes(1, 2)
        expected = [
            *(symmetric @ b, 2 * hermitian @ one, b.reshape(-1, n) @ symmetric[0]),
            *(b.reshape(-1, m, n) @ symmetric[0], np.where(triangle, b @ turned, 0)),
            np.where(triangle, b[:, :, 1:] @ turned[:, 1:].conj(), 0),
            *(1.5 * b, b - one, one + b, turned.conj() + one.T),
        ]
        limit = TOLERANCE[dtype] * n
        for i, (call, right) in enumerate(zip(batches(device.blas, ra, rb, rone), expected, strict=True)):
            np.testing.assert_allclose(await device.get(await call), right, rtol=0, atol=limit, err_msg=f"{count} of {n}, call {i}")
        async with device.graph() as graph:
            results = batches(graph.blas, ra, rb, rone)
            graph.blas.geam(rb, rone, out=rb)
        await graph.replay()
        for i, (ref, right) in enumerate(zip(results, expected, strict=True)):
            np.testing.assert_allclose(await device.get(ref), right, rtol=0, atol=limit, err_msg=f"{count} of {n}, replayed {i}")
        np.testing.assert_allclose(await device.get(rb), b + one, rtol=0, atol=limit)
        await graph.aclose()


async def test_many_in_flight_and_products_between_keep_their_factors(device: accel.Device, rng: np.random.Generator) -> None:
    """The host's pointer mode holds for what follows a call with a result in device memory."""
    a = rng.standard_normal((64, 64)).astype(np.float32)
    ra = await device.put(a)

    async def one(i: int) -> None:
        alpha = float(i + 1)
        total, product = await asyncio.gather(device.blas.asum(ra), device.blas.symm(ra, ra, alpha=alpha))
        half = np.triu(a, 1)
        np.testing.assert_allclose(
            await device.get(product), alpha * ((half + half.T + np.diag(a.diagonal())) @ a), rtol=0, atol=1e-3 * alpha
        )
        assert (await device.get(total)).item() == pytest.approx(np.abs(a).sum(), rel=1e-5)

    await asyncio.gather(*[one(i) for i in range(32)])


def flat(arrays: list[Any], apart: int) -> tuple[Any, list[int]]:
    """Return arrays one behind the other, each at a multiple of ``apart`` elements, and where each begins."""
    places = [int(each) for each in np.cumsum([0, *(-(-each.size // apart) * apart for each in arrays)])]
    whole = np.zeros(places[-1], arrays[0].dtype)
    for place, each in zip(places, arrays, strict=False):
        whole[place : place + each.size] = each.ravel()
    return whole, places


@pytest.mark.parametrize("apart", [1, 16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", *TOLERANCE])
async def test_groups_of_products_of_many_sizes(device: accel.Device, rng: np.random.Generator, dtype: str, apart: int) -> None:
    kind = accel.DType.of(dtype)
    wide: Any = np.complex128 if kind.is_complex else np.float64
    sizes = [(int(m), int(n), int(k)) for m, n, k in rng.integers(1, 200, (40, 3))] + [(5, 7, 3)] * 3000  # more than one call takes
    operands: list[list[Any]] = [[], [], []]
    for m, n, k in sizes:
        for arrays, shape in zip(operands, ((m, k), (k, n), (m, n)), strict=True):
            arrays.append(random(rng, shape, "complex128" if kind.is_complex else "float64").astype(kind.numpy))
    hosts = [flat(arrays, apart) for arrays in operands]
    wholes = [await device.put(whole) for whole, _ in hosts]
    refs = [
        [ref[place : place + each.size].reshape(each.shape) for place, each in zip(places, arrays, strict=False)]
        for ref, (_, places), arrays in zip(wholes, hosts, operands, strict=True)
    ]
    error = {2: 2.0**-7, 4: 1e-5, 8: 1e-5 if kind.is_complex else 1e-12, 16: 1e-12}[kind.itemsize]

    async def check(how: str) -> None:
        found, places = await device.get(wholes[2]), hosts[2][1]
        for x, y, c, place in zip(*operands, places, strict=False):
            got = found[place : place + c.size].reshape(c.shape).astype(wide)
            expected = 0.5 * x.astype(wide) @ y.astype(wide) - c.astype(wide)
            terms = np.abs(x.astype(wide)) @ np.abs(y.astype(wide)) + np.abs(c.astype(wide)) + 1
            assert (np.abs(got - expected) <= error * terms).all(), f"{how}: {x.shape} @ {y.shape}"

    made = await device.blas.gemm_grouped(refs[0], refs[1], out=refs[2], alpha=0.5, beta=-1.0)
    assert all(one is other for one, other in zip(made, refs[2], strict=True))
    await check("awaited")
    await device.put(hosts[2][0], out=wholes[2])
    async with device.graph() as graph:
        graph.blas.gemm_grouped(refs[0][:90], refs[1][:90], out=refs[2][:90], alpha=0.5, beta=-1.0)
        graph.blas.gemm_grouped(refs[0][90:], refs[1][90:], out=refs[2][90:], alpha=0.5, beta=-1.0)
    await graph.replay()
    await check("replayed")
    await graph.aclose()


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_many_triangles_are_solved_in_one_call_and_few_large_ones_one_by_one(
    device: accel.Device, rng: np.random.Generator, dtype: str
) -> None:
    for count, n in ((5000, 3), (70, 33), (3, 257), (9, 130)):
        a = (random(rng, (count, n, n), dtype) / n + 2 * np.eye(n)).astype(dtype)
        x = random(rng, (count, n, 7), dtype)
        ra, rx = await device.put(a), await device.put(x)
        for trans in ("n", "c"):
            b = await device.blas.trmm(ra, rx, lower=True, trans=trans, alpha=2.0)
            found = await device.get(await device.blas.trsm(ra, b, lower=True, trans=trans, alpha=0.5, out=b))
            np.testing.assert_allclose(found, x, rtol=0, atol=TOLERANCE[dtype], err_msg=f"{count} of {n}, {trans}")
        async with device.graph() as graph:
            solved = graph.blas.trsm(ra, graph.blas.trmm(ra, rx, lower=True), lower=True)
        await graph.replay()
        np.testing.assert_allclose(await device.get(solved), x, rtol=0, atol=TOLERANCE[dtype], err_msg=f"{count} of {n}, replayed")
        await graph.aclose()
