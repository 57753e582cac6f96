"""Sparse matrices on the GPU: large ones, replays, first uses, and the limits of cuSPARSE; the samples of the family have all dtypes and formats."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import accel

scipy = pytest.importorskip("scipy.sparse")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

LIBRARIES = ("sparse",)


def matrix(rng: np.random.Generator, rows: int, columns: int, per_row: int, form: str) -> Any:
    count = rows * per_row
    places = rng.integers(0, rows, count), rng.integers(0, columns, count)
    return scipy.coo_array((rng.standard_normal(count), places), shape=(rows, columns)).tocsr().asformat(form)


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
async def test_large_matrices_are_multiplied_and_converted(device: accel.Device, rng: np.random.Generator, form: str) -> None:
    source = matrix(rng, 200_003, 100_001, 12, form)
    x, b = rng.standard_normal(100_001), rng.standard_normal((100_001, 17))
    a = await device.sparse.put(source)
    csr = source.tocsr()
    for transpose in (False, True):
        operand, each, many = (csr.T, rng.standard_normal(200_003), None) if transpose else (csr, x, b)
        got = await device.get(await device.sparse.spmv(a, await device.put(each), transpose_a=transpose))
        np.testing.assert_allclose(got, operand @ each, rtol=1e-10, atol=1e-10)
        if many is not None:
            got = await device.get(await device.sparse.spmm(a, await device.put(many)))
            np.testing.assert_allclose(got, operand @ many, rtol=1e-10, atol=1e-10)
    for target in ("csr", "csc", "coo"):
        made = await device.sparse.get(await getattr(device.sparse, f"to{target}")(a))
        assert made.format == target
        assert abs(made.tocsr() - csr).max() == 0


async def test_replays_multiply_what_is_there_then(device: accel.Device, rng: np.random.Generator) -> None:
    source = matrix(rng, 3000, 2000, 8, "csr")
    a, x = await device.sparse.put(source), await device.put(rng.standard_normal(2000))
    async with device.graph() as graph:
        y = graph.sparse.spmv(a, x)
        z = graph.sparse.spmv(a, y, transpose_a=True, alpha=0.5)
    for _ in range(3):
        values, vector = rng.standard_normal(source.nnz), rng.standard_normal(2000)
        await device.put(values, out=a.data)
        await device.put(vector, out=x)
        await graph.replay()
        source.data[:] = values
        np.testing.assert_allclose(await device.get(z), 0.5 * (source.T @ (source @ vector)), rtol=1e-10, atol=1e-9)
    await graph.aclose()


async def test_what_graphs_cannot_hold_is_refused_and_the_device_goes_on(device: accel.Device, rng: np.random.Generator) -> None:
    source = (scipy.tril(matrix(rng, 300, 300, 4, "csr"), -1) * 0.1 + scipy.eye_array(300)).tocsr()
    a, b = await device.sparse.put(source), await device.put(rng.standard_normal((300, 2)))
    calls: dict[str, Any] = {
        "tocsc": lambda sparse: sparse.tocsc(a),
        "solve": lambda sparse: sparse.spsolve_triangular(a, b),
        "solve of a vector": lambda sparse: sparse.spsolve_triangular(a, b[:, 0]),
    }
    for call in calls.values():
        with pytest.raises(accel.UnsupportedError, match="graph"):
            async with device.graph() as graph:
                call(graph.sparse)
        assert abs((await device.sparse.get(await device.sparse.tocsc(a))).tocsr() - source).max() == 0


async def test_a_triangular_matrix_whose_elements_change_is_analysed_anew(device: accel.Device, rng: np.random.Generator) -> None:
    n = 20_000
    lower = (scipy.tril(matrix(rng, n, n, 4, "csr"), -1) * 0.1 + 2 * scipy.eye_array(n)).tocsr()
    lower.sort_indices()
    a, b = await device.sparse.put(lower), rng.standard_normal((n, 3))
    ref = await device.put(b)
    for factor in (1.0, 3.0):
        await device.put(lower.data * factor, out=a.data)
        x = await device.get(await device.sparse.spsolve_triangular(a, ref))
        np.testing.assert_allclose(factor * (lower @ x), b, rtol=1e-8, atol=1e-8)
        x = await device.get(await device.sparse.spsolve_triangular(a, ref[:, 0], transpose_a=True))
        np.testing.assert_allclose(factor * (lower.T @ x), b[:, 0], rtol=1e-8, atol=1e-8)


async def test_zeros_and_holes_on_a_diagonal_are_found_and_the_device_goes_on(device: accel.Device) -> None:
    n = 5000
    whole = scipy.eye_array(n, format="csr")
    for row in (0, 1234, n - 1):
        zero = whole.copy()
        zero.data[row] = 0
        hole = whole.copy()
        hole.data[row] = 0
        hole.eliminate_zeros()
        for source in (zero, hole):
            a, b = await device.sparse.put(source), await device.put(np.ones(n))
            with pytest.raises(accel.LinAlgError) as caught:
                await device.sparse.spsolve_triangular(a, b)
            assert caught.value.info == row + 1
    good = await device.sparse.put(whole)
    assert (await device.get(await device.sparse.spsolve_triangular(good, b))).sum() == n


async def test_many_sizes_and_streams_share_the_plans(device: accel.Device, rng: np.random.Generator) -> None:
    sources = [matrix(rng, 50 + 3 * i, 40, 3, "csr") for i in range(300)]  # more than the plans that are kept
    refs, x = [await device.sparse.put(source) for source in sources], rng.standard_normal(40)
    ref = await device.put(x)
    for _ in range(2):
        made = await asyncio.gather(*[device.sparse.spmv(a, ref) for a in refs])
        for source, y in zip(sources, made, strict=True):
            np.testing.assert_allclose(await device.get(y), source @ x, rtol=1e-10, atol=1e-12)


async def test_sums_and_matrices_of_dense_ones(device: accel.Device, rng: np.random.Generator) -> None:
    left, right = matrix(rng, 5003, 3001, 9, "csr"), matrix(rng, 5003, 3001, 7, "csr")
    a, b = await device.sparse.put(left), await device.sparse.put(right)
    wanted = left + 2 * right
    for total in (await device.sparse.add(a, b, beta=2.0), (await device.sparse.add(a.T, b.T, beta=2.0)).T):
        assert abs(await device.sparse.get(total) - wanted).max() < 1e-12
    dense = await device.put(left.toarray())
    made = await device.sparse.fromdense(dense)
    assert made.nnz == left.nnz
    assert (await device.sparse.get(made) != left).nnz == 0
    async with device.graph() as graph:
        few, count = graph.sparse.add(a, b, size=100)
        some, number = graph.sparse.fromdense(dense, size=50)
    await graph.replay()
    assert int(await device.get(count)) == (left + right).nnz
    np.testing.assert_allclose(await device.get(few.data), (left + right).data[:100])
    assert int(await device.get(number)) == left.nnz
    np.testing.assert_array_equal(await device.get(some.data), left.data[:50])
    np.testing.assert_array_equal(await device.get(some.indices), left.indices[:50])
    await graph.aclose()


async def test_what_cusparse_has_not_is_refused(device: accel.Device) -> None:
    data, index, marks = [await device.put(each) for each in (np.ones(2, np.complex64), np.array([0, 1]), np.array([0, 1, 2]))]
    wide = await device.sparse.csr((data, index, marks), shape=(2, 2))
    with pytest.raises(accel.UnsupportedError, match="int32"):
        await device.sparse.tocsc(wide)
    with pytest.raises(accel.UnsupportedError, match="conjugate"):
        await device.sparse.spsolve_triangular(wide.T, data, transpose_a="c")
    assert (await device.get(await device.sparse.spmv(wide, data))).tolist() == [1, 1]


@pytest.mark.parametrize("form", ["csr", "csc"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
async def test_large_sparse_products(device: accel.Device, rng: np.random.Generator, form: str, dtype: str) -> None:
    left, right = (matrix(rng, *shape, form).astype(dtype) for shape in ((30_011, 20_003, 11), (20_003, 25_007, 13)))
    a, b = await device.sparse.put(left), await device.sparse.put(right)
    made = await device.sparse.spgemm(a, b, alpha=0.5)
    found, wanted = await device.sparse.get(made), (left @ right) * np.dtype(dtype).type(0.5)
    assert (made.format, found.shape) == (form, wanted.shape)
    assert found.nnz >= wanted.nnz
    assert all((np.diff(found.indices[first:last]) > 0).all() for first, last in zip(found.indptr[:50], found.indptr[1:], strict=False))
    assert abs(found - wanted).max() <= 100 * np.finfo(dtype).eps
    turned = await device.sparse.tocsr(made.T)
    assert abs((await device.sparse.get(turned)).T - wanted).max() <= 100 * np.finfo(dtype).eps, "its parts are in order"


async def test_sparse_products_in_batches_bring_what_the_library_works_in(device: accel.Device, rng: np.random.Generator) -> None:
    left, right = matrix(rng, 503, 301, 4, "csr"), matrix(rng, 301, 407, 5, "csr")
    a, b = await device.sparse.put(left), await device.sparse.put(right)
    workspace, products = (await device.get(await device.sparse.spgemm_size(a, b))).tolist()
    assert (workspace > 0, products) == (True, -1)
    workspace, products = (await device.get(await device.sparse.spgemm_size(a, b, workspace=workspace))).tolist()
    assert products == ((abs(left) != 0).astype(int) @ (abs(right) != 0).astype(int)).sum()
    wanted = (left @ right).nnz
    async with device.batch() as batch:
        total, number = batch.sparse.spgemm(a, b, size=products, workspace=workspace)
        few, count = batch.sparse.spgemm(a, b, size=wanted - 1, workspace=workspace)
    assert int(await device.get(number)) == int(await device.get(count)) == wanted
    assert abs(await device.sparse.get(total.trimmed(wanted)) - left @ right).max() < 1e-12
    assert not (await device.get(few.data)).any(), "no element is stored where there is no room for all"
    with pytest.raises(accel.InvalidArgumentError, match="workspace"):
        async with device.batch() as batch:
            batch.sparse.spgemm(a, b, size=products)
    with pytest.raises(accel.UnsupportedError, match="graph"):
        async with device.graph() as graph:
            graph.sparse.spgemm(a, b, size=products, workspace=workspace)
    with pytest.raises(accel.InvalidArgumentError, match="size"):
        await device.sparse.spgemm(a, b, size=wanted - 1)
    empty = await device.sparse.put(scipy.csr_array((407, 12)))
    assert (await device.sparse.spgemm(b, empty)).nnz == 0
    parts = [await device.put(each) for each in (np.ones(2), np.array([0, 1]), np.array([0, 1, 2]))]
    wide = await device.sparse.csr((parts[0], parts[1], parts[2]), shape=(2, 2))
    with pytest.raises(accel.UnsupportedError, match="int32"):
        await device.sparse.spgemm(wide, wide)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
async def test_large_matrices_of_blocks(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    for size in (2, 5, 16):
        pattern = matrix(rng, 4001, 3001, 6, "csr")
        blocks = rng.standard_normal((pattern.nnz, size, size)).astype(dtype)
        source = scipy.bsr_array((blocks, pattern.indices, pattern.indptr), shape=(4001 * size, 3001 * size))
        a, csr = await device.sparse.put(source), source.tocsr()
        x, b = rng.standard_normal(csr.shape[1]).astype(dtype), rng.standard_normal((csr.shape[1], 9)).astype(dtype)
        error = 1000 * float(np.finfo(dtype).eps)
        got = await device.get(await device.sparse.spmv(a, await device.put(x)))
        np.testing.assert_allclose(got, csr @ x, rtol=error, atol=error)
        got = await device.get(await device.sparse.spmm(a, await device.put(b)))
        np.testing.assert_allclose(got, csr @ b, rtol=error, atol=error)
        made = await device.sparse.get(await device.sparse.tocsr(a))
        assert made.nnz == source.data.size
        assert abs(made - csr).max() == 0
        ref, out = await device.put(x), await device.zeros((csr.shape[0],), dtype)
        async with device.graph() as graph:
            graph.sparse.spmv(a, ref, out=out)
        for _ in range(2):
            x = rng.standard_normal(csr.shape[1]).astype(dtype)
            await device.put(x, out=ref)
            await graph.replay()
            np.testing.assert_allclose(await device.get(out), csr @ x, rtol=error, atol=error)
        await graph.aclose()
    with pytest.raises(accel.UnsupportedError, match="transpose"):
        await device.sparse.spmv(a, await device.zeros((csr.shape[0],), dtype), transpose_a=True)


async def test_a_product_of_a_million_rows_stays_in_its_memory(device: accel.Device, rng: np.random.Generator) -> None:
    """``cusparseSpMM`` wrote behind what it was measured to work in, up to the end of the slab and beyond."""
    n, each = 1 << 20, 16
    indices = np.sort(rng.integers(0, n, (n, each), dtype=np.int32), axis=1).ravel()
    data, indptr = rng.standard_normal(n * each, np.float32), np.arange(n + 1, dtype=np.int32) * each
    b = rng.standard_normal((n, 32), np.float32)
    refs = [await device.put(part) for part in (data, indices, indptr)]
    matrix, right = accel.SparseRef("csr", refs[0], refs[1], refs[2], (n, n)), await device.put(b)
    for _ in range(4):
        y = await device.get(await device.sparse.spmm(matrix, right))
    for row in (0, 1, n // 2, n - 1):
        part = slice(row * each, (row + 1) * each)
        np.testing.assert_allclose(y[row], data[part].astype(np.float64) @ b[indices[part]], rtol=1e-4, atol=1e-4)
    assert device.generation == 1
