"""Sparse matrices: how they come to the device and back, their refs, and what is refused. Values are compared by the samples of the family."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import ops
from accel.solvers import DeviceSparse
from tests.device_support import failure, opened

if TYPE_CHECKING:
    from accel.sparse_ref import SparseFormat

scipy = pytest.importorskip("scipy.sparse")
pytestmark = pytest.mark.usefixtures("nothing_left")


def matrix(rng: np.random.Generator, rows: int = 30, columns: int = 20, form: str = "csr") -> Any:
    return scipy.random_array((rows, columns), density=0.15, format=form, rng=rng)


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
async def test_a_matrix_comes_back_as_it_was_put(device: accel.Device, rng: np.random.Generator, form: str) -> None:
    source = matrix(rng, form=form)
    ref = await device.sparse.put(source)
    assert (ref.format, ref.shape, ref.nnz, ref.dtype, ref.ndim) == (form, (30, 20), source.nnz, accel.DType.FLOAT64, 2)
    assert ref.indices.dtype is ref.indptr.dtype is accel.DType.INT32
    back = await device.sparse.get(ref)
    assert back.format == form
    assert (back != source).nnz == 0
    lil = await device.sparse.put(source.tolil())
    assert lil.format == "csr"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
async def test_elements_that_scipy_has_not_come_as_float32(device: accel.Device, rng: np.random.Generator, dtype: str, form: str) -> None:
    source = scipy.random_array((5, 7), density=0.4, rng=rng, dtype=np.float32)
    wide = await device.put(source.toarray())
    matrix = await getattr(device.sparse, f"to{form}")(await device.sparse.fromdense(await device.elementwise.cast(wide, dtype)))
    found = await device.sparse.get(matrix)
    assert (found.format, found.dtype) == (form, np.float32)
    expected = source.toarray().astype(accel.DType.of(dtype).numpy).astype(np.float32)
    np.testing.assert_array_equal(found.toarray(), expected)


async def test_host_arrays_are_brought_into_order_and_added_up(device: accel.Device) -> None:
    data, rows, columns = np.array([1.0, 2.0, 4.0, 8.0]), np.array([2, 0, 2, 0]), np.array([1, 3, 1, 0])
    a = await device.sparse.coo((data, (rows, columns)), shape=(3, 4))
    assert [(await device.get(each)).tolist() for each in a.refs] == [[8, 2, 5], [0, 3, 1], [0, 0, 2]]
    b = await device.sparse.csr((data, np.array([3, 0, 2, 2]), np.array([0, 2, 2, 4], np.int64)), shape=(3, 4))
    assert [(await device.get(each)).tolist() for each in b.refs] == [[2, 1, 12], [0, 3, 2], [0, 2, 2, 3]]
    c = await device.sparse.csc((data[:2], np.array([1, 0]), np.array([0, 1, 2])), shape=(2, 2))
    assert (await device.get(await device.sparse.todense(c))).tolist() == [[0, 2], [1, 0]]
    empty = await device.sparse.csr((np.empty(0, np.float32), np.empty(0, int), np.zeros(4, int)), shape=(3, 0))
    assert empty.nnz == 0


async def test_refs_are_taken_as_they_are_and_the_transpose_has_the_same(device: accel.Device) -> None:
    refs = [await device.put(each) for each in (np.ones(2, np.float32), np.array([0, 2]), np.array([0, 1, 2]))]
    a = await device.sparse.csr((refs[0], refs[1], refs[2]), shape=(2, 3))
    assert a.refs == tuple(refs)
    turned = a.T
    assert (turned.format, turned.shape, turned.refs) == ("csc", (3, 2), a.refs)
    assert (turned.T.format, turned.T.shape) == ("csr", (2, 3))
    made = await device.sparse.tocsr(turned)
    assert (await device.get(await device.sparse.todense(made))).tolist() == [[1, 0], [0, 0], [0, 1]]


async def test_what_does_not_fit_is_refused(device: accel.Device, rng: np.random.Generator) -> None:
    sparse = device.sparse
    a, whole = await sparse.put(matrix(rng)), await device.zeros((30, 20), "float64")
    coo, square = await sparse.tocoo(a), await sparse.put(matrix(rng, 5, 5))
    x, single = await device.zeros((20,), "float64"), await device.zeros((20,), "float32")
    ones, two, marks = await device.put(np.ones(2)), await device.put(np.array([0, 1])), await device.put(np.array([0, 1, 2]))
    wrong: list[Any] = [
        sparse.spmv(whole, x),  # type: ignore[arg-type]
        sparse.spmv(a, single),
        sparse.spmv(a, x, transpose_a=True),
        sparse.spmv(a, x, beta=1.0),
        sparse.spmv(a, x, alpha=1j),
        sparse.spmv(a, x, transpose_a="what"),  # type: ignore[arg-type]
        sparse.spmv(square, a.data[:5], out=a.data[:5]),
        sparse.spmv(a, x, out=x),
        sparse.spmm(a, x),
        sparse.spmm(a, whole),
        sparse.spmm(a, whole, transpose_b=True, out=whole),
        sparse.todense(a, out=await device.zeros((20, 30), "float64")),
        sparse.sddmm(whole, whole, a),
        sparse.sddmm(whole, whole, coo, transpose_b=True),
        sparse.spsolve_triangular(a, x),
        sparse.spsolve_triangular(square, x),
        sparse.spsolve_triangular(await sparse.tocoo(square), x[:5]),
        sparse.spsolve_triangular(square, x[:5], lower=1),  # type: ignore[arg-type]
        sparse.fromdense(x),
        sparse.fromdense(whole, size=-1),
        sparse.add(a, coo),
        sparse.add(a, square),
        sparse.add(a, await sparse.tocsc(a)),
        sparse.add(a, a, alpha=1j),
        sparse.put(np.eye(3)),
        sparse.csr((ones, two, np.array([0, 1, 2])), shape=(2, 2)),
        sparse.csr((ones, two, marks), shape=(3, 2)),
        sparse.csr((ones, two, await device.put(np.array([0, 1, 2], np.int32))), shape=(2, 2)),
        sparse.csr((two, two, marks), shape=(2, 2)),
        sparse.csr((ones, two), shape=(2, 2)),  # type: ignore[arg-type]
        sparse.coo((ones, two, two), shape=(2, 2)),  # type: ignore[arg-type]
        sparse.csr((np.ones(2), np.array([0, 2]), np.array([0, 1, 2])), shape=(2, 2)),
        sparse.csr((np.ones(2), np.array([0, -1]), np.array([0, 1, 2])), shape=(2, 2)),
        sparse.csr((np.ones(2), np.array([0, 1]), np.array([0, 2, 1])), shape=(2, 2)),
        sparse.csr((np.ones(2), np.array([0.0, 1.0]), np.array([0, 1, 2])), shape=(2, 2)),
    ]
    for number, call in enumerate(wrong):
        error = await failure(call, accel.InvalidArgumentError)
        assert error.remedy, number
    with pytest.raises(accel.InvalidArgumentError, match="no transpose"):
        _ = coo.T
    half = await sparse.csr((await device.zeros((2,), "float16"), two, marks), shape=(2, 2))
    await failure(sparse.spsolve_triangular(half, await device.zeros((2,), "float16")), accel.UnsupportedError)


async def test_a_singular_matrix_is_the_ops_error_which_names_the_row(device: accel.Device) -> None:
    dense = np.array([[2.0, 0, 0], [1, 0, 0], [1, 1, 0]])
    for source in (scipy.csr_array(dense), scipy.csc_array(dense), scipy.csr_array((np.array([2.0, 0.0, 0.0]), [0, 1, 2], [0, 1, 2, 3]))):
        a, b = await device.sparse.put(source), await device.put(np.ones(3))
        error = await failure(device.sparse.spsolve_triangular(a, b), accel.LinAlgError)
        assert error.info == 2
        _, info = await device.sparse.spsolve_triangular(a, b, check=False)
        assert int(await device.get(info)) == 2
        x = await device.sparse.spsolve_triangular(a, b, unit_diagonal=True)
        triangle = np.tril(source.toarray(), -1) + np.eye(3)
        np.testing.assert_allclose(triangle @ await device.get(x), 1)
    good = await device.sparse.put(scipy.csr_array(np.eye(3)))
    async with device.batch() as batch:
        y, info = batch.sparse.spsolve_triangular(good, b, check=False)
    assert ((await device.get(y)).tolist(), int(await device.get(info))) == ([1, 1, 1], 0)


async def test_results_have_as_many_elements_as_there_are(device: accel.Device, rng: np.random.Generator) -> None:
    left, right = matrix(rng), matrix(rng)
    a, b = await device.sparse.put(left), await device.sparse.fromdense(await device.put(right.toarray()))
    assert b.nnz == right.nnz
    union = ((left != 0) + (right != 0)).nnz
    total = await device.sparse.add(a, b, beta=2.0)
    assert total.nnz == union
    np.testing.assert_allclose((await device.sparse.get(total)).toarray(), (left + 2 * right).toarray())
    error = await failure(device.sparse.add(a, b, size=union - 1), accel.InvalidArgumentError)
    assert f"{union} elements" in str(error)
    nothing = await device.sparse.add(a, a, beta=-1.0)
    assert nothing.nnz == left.nnz, "what is stored stays, also where the sum is 0"
    async with device.batch() as batch:
        with pytest.raises(accel.InvalidArgumentError, match="size="):
            batch.sparse.add(a, b)
        wide, number = batch.sparse.add(a, b, size=1000)
        few, also = batch.sparse.add(a, b, size=2)
    assert (wide.nnz, int(await device.get(number)), int(await device.get(also))) == (1000, union, union)
    trimmed = wide.trimmed(union)
    np.testing.assert_allclose((await device.sparse.get(trimmed)).toarray(), (left + right).toarray())
    np.testing.assert_array_equal(await device.get(few.data), (await device.get(wide.data))[:2])
    assert not (await device.get(wide.data))[union:].any()


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_ops_of_matrices_travel_and_are_recorded(rng: np.random.Generator, host: Any) -> None:
    source, x = matrix(rng), rng.standard_normal(20)
    async with opened(host=host) as device:
        a, ref = await device.sparse.put(source), await device.put(x)
        async with device.graph() as graph:
            turned = graph.sparse.tocsr(a.T)
            back = graph.sparse.spmv(turned, graph.sparse.spmv(a, ref), alpha=2.0)
        await graph.replay()
        np.testing.assert_allclose(await device.get(back), 2 * (source.T @ (source @ x)))
        op = pickle.loads(pickle.dumps(ops.Spmv(a, ref)))
        np.testing.assert_allclose(await device.get(await device.run(op)), source @ x)
        travelled = pickle.loads(pickle.dumps(a))
        await failure(device.sparse.spmv(travelled, ref), accel.InvalidArgumentError)
        assert travelled.resolved(device).refs == a.refs
        await device.free(a.data)
        assert a.is_stale
        await failure(device.sparse.spmv(a, ref), accel.StaleRefError)
        with pytest.raises(accel.StaleRefError):
            a.check()


async def test_a_durable_matrix_outlives_a_fault(rng: np.random.Generator) -> None:
    source, plan = matrix(rng), accel.testing.FaultPlan().poison_at(1, op="todense")
    async with opened(faults=plan) as device:
        kept, lost = await device.sparse.put(source, durable=True), await device.sparse.put(source)
        await failure(device.sparse.todense(kept), accel.ContextPoisonedError)
        np.testing.assert_array_equal(await device.get(await device.sparse.todense(kept)), source.toarray())
        assert lost.is_stale
        assert not kept.is_stale


async def test_without_scipy_products_say_what_to_install(device: accel.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from accel.cpu.families import sparse

    monkeypatch.setattr(sparse._scipy, "_module", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    a = await device.sparse.csr((np.ones(1), np.zeros(1, int), np.array([0, 1])), shape=(1, 1))
    error = await failure(device.sparse.spmv(a, await device.put(np.ones(1))), accel.BackendUnavailableError)
    assert "pip install" in error.remedy
    assert (await device.get(await device.sparse.todense(a))).tolist() == [[1]]


async def test_products_of_sparse_matrices_take_no_more_room_than_they_need(device: accel.Device, rng: np.random.Generator) -> None:
    for form in ("csr", "csc"):
        left, right = matrix(rng, 300, 200, form), matrix(rng, 200, 250, form)
        a, b = await device.sparse.put(left), await device.sparse.put(right)
        made = await device.sparse.spgemm(a, b, alpha=2.0)
        wanted = (abs(left) != 0).astype(float) @ (abs(right) != 0).astype(float)
        assert (made.format, made.shape, made.nnz) == (form, (300, 250), wanted.nnz)
        products = int(wanted.sum())
        assert (await device.get(await device.sparse.spgemm_size(a, b))).tolist() == [0, products]
        assert abs(await device.sparse.get(made) - 2 * (left @ right)).max() < 1e-12
        few = await device.sparse.spgemm(a, b, size=wanted.nnz)
        assert few.nnz == wanted.nnz
        with pytest.raises(accel.InvalidArgumentError, match="size"):
            await device.sparse.spgemm(a, b, size=wanted.nnz - 1)
        async with device.batch() as batch:
            total, number = batch.sparse.spgemm(a, b, size=wanted.nnz + 9)
        count = int(await device.get(number))
        assert count == wanted.nnz
        assert abs(await device.sparse.get(total.trimmed(count)) - left @ right).max() < 1e-12
    ones = await device.sparse.put(scipy.csr_array(np.ones((40, 40))))
    dense = await device.sparse.spgemm(ones, ones)
    assert dense.nnz == 1600, "of 64000 products"
    column, row = await device.sparse.put(scipy.csr_array(np.eye(400)[:, :1])), await device.sparse.put(scipy.csr_array((1, 7)))
    assert (await device.sparse.spgemm(column, row)).nnz == 0
    narrow = await device.sparse.put(scipy.csr_array(np.ones((1, 4000))))
    tall = await device.sparse.put(scipy.csr_array(np.ones((4000, 1))))
    few = await device.sparse.spgemm(narrow, tall)
    assert (await device.get(few.data)).tolist() == [4000]
    wide = await device.sparse.put(scipy.csr_array(np.concatenate([np.ones((4000, 1)), np.zeros((4000, 999))], axis=1)))
    few = await device.sparse.spgemm(narrow, wide)
    assert few.nnz == 1
    assert few.data.nbytes == 8
    assert few.data.offset == 0
    assert type(few.data) is accel.AccelRef, "a buffer of its own, not a part of one for 1000 elements"
    with pytest.raises(accel.DeadlineExceededError):
        await device.sparse.spgemm(ones, ones, timeout=0)


async def test_sizes_of_an_earlier_product_are_tried_before_the_device_is_asked(
    device: accel.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    size: Any = DeviceSparse.spgemm_size

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        return size(self, *args, **options)

    monkeypatch.setattr(DeviceSparse, "spgemm_size", counted)
    few, many = np.eye(50), np.zeros((50, 50))
    many[0] = 1.0  # the product of its transpose and it has 2500 elements, of as many operands as that of `few`
    small = await device.sparse.put(scipy.csr_array(few))
    column, row = await device.sparse.put(scipy.csr_array(many.T)), await device.sparse.put(scipy.csr_array(many))
    for a, b, wanted, times in (
        (small, small, few, 1),
        (small, small, few, 1),
        (column, row, many.T @ many, 2),
        (column, row, many.T @ many, 2),
    ):
        made = await device.sparse.spgemm(a, b)
        np.testing.assert_array_equal((await device.sparse.get(made)).toarray(), wanted)
        assert (made.nnz, asked) == (int(np.count_nonzero(wanted)), times)
    with pytest.raises(accel.InvalidArgumentError, match="size"):
        await device.sparse.spgemm(column, row, size=2499)
    assert asked == 3, "what is wrong is said by the device"
    made = await device.sparse.spgemm(small, small)
    assert (made.nnz, made.data.nbytes, asked) == (50, 400, 3), "it takes no more room than it needs"


async def test_products_of_sparse_matrices_that_do_not_fit_are_refused(device: accel.Device, rng: np.random.Generator) -> None:
    sparse = device.sparse
    a, b = await sparse.put(matrix(rng, 30, 20)), await sparse.put(matrix(rng, 20, 10))
    wrong: list[Any] = [
        sparse.spgemm(a, a),
        sparse.spgemm(a, await sparse.tocsc(b)),
        sparse.spgemm(await sparse.tocoo(a), await sparse.tocoo(b)),
        sparse.spgemm(a, await device.zeros((20, 10), "float64")),  # type: ignore[arg-type]
        sparse.spgemm(a, await sparse.put(matrix(rng, 20, 10).astype(np.float32))),
        sparse.spgemm(a, b, alpha=1j),
        sparse.spgemm(a, b, size=-1),
        sparse.spgemm_size(a, b, workspace=-1),
        sparse.spgemm_size(a, b, workspace=1.5),  # type: ignore[arg-type]
    ]
    for call in wrong:
        with pytest.raises(accel.InvalidArgumentError):
            await call
    with pytest.raises(accel.InvalidArgumentError, match="size"):
        async with device.batch() as batch:
            batch.sparse.spgemm(a, b)


async def test_blocks_come_back_as_they_were_put(device: accel.Device, rng: np.random.Generator) -> None:
    dense = rng.standard_normal((12, 20)) * np.repeat(np.repeat(rng.random((6, 5)) < 0.4, 2, 0), 4, 1)
    source = scipy.bsr_array(dense, blocksize=(2, 4))
    a = await device.sparse.put(source)
    assert (a.format, a.shape, a.nnz, a.blocksize, a.major) == ("bsr", (12, 20), source.data.size, (2, 4), 6)
    back = await device.sparse.get(a)
    assert (back.format, back.blocksize) == ("bsr", (2, 4))
    np.testing.assert_array_equal(back.toarray(), dense)
    x = rng.standard_normal(20)
    np.testing.assert_allclose(await device.get(await device.sparse.spmv(a, await device.put(x))), dense @ x, atol=1e-12)
    csr = await device.sparse.get(await device.sparse.tocsr(a))
    assert csr.nnz == source.data.size, "zeros of blocks are elements"
    np.testing.assert_array_equal(csr.toarray(), dense)
    data = np.arange(1.0, 13).reshape(3, 2, 2)
    b = await device.sparse.bsr((data, np.array([1, 0, 1]), np.array([0, 3, 3])), shape=(4, 4))
    assert b.data.shape == (2, 2, 2), "blocks of one place are added up"
    whole = await device.get(await device.sparse.todense(b))
    np.testing.assert_array_equal(whole, [[5, 6, 10, 12], [7, 8, 14, 16], [0, 0, 0, 0], [0, 0, 0, 0]])
    copy = pickle.loads(pickle.dumps(b)).resolved(device)
    assert (copy.format, copy.blocksize) == ("bsr", (2, 2))
    spd = scipy.bsr_array(np.kron(np.eye(5), [[2.0, 1], [1, 2]]), blocksize=(2, 2))
    solution, info = await device.sparse.cg(await device.sparse.put(spd), await device.put(np.ones(10)), rtol=1e-12)
    assert info == 0
    np.testing.assert_allclose(await device.get(solution), np.full(10, 1 / 3))


async def test_blocks_that_do_not_fit_are_refused(device: accel.Device, rng: np.random.Generator) -> None:
    sparse, data = device.sparse, np.ones((2, 2, 3))
    a = await sparse.bsr((data, np.array([0, 1]), np.array([0, 1, 2])), shape=(4, 6))
    wrong: list[Any] = [
        sparse.bsr((data, np.array([0, 1]), np.array([0, 1, 2])), shape=(4, 7)),
        sparse.bsr((data, np.array([0, 2]), np.array([0, 1, 2])), shape=(4, 6)),
        sparse.bsr((data[0], np.array([0, 1]), np.array([0, 1, 2])), shape=(4, 6)),
        sparse.bsr((data[:, :0], np.array([0, 1]), np.array([0, 1, 2])), shape=(4, 6)),
        sparse.bsr((data, np.array([0, 1]), np.array([0, 1, 1, 2])), shape=(4, 6)),
        sparse.tocsc(a),
        sparse.tocoo(a),
        sparse.diagonal(a),
        sparse.add(a, a),
        sparse.spgemm(a, a),
        sparse.spsolve_triangular(a, await device.zeros((4,), "float64")),
        sparse.spmv(a, await device.zeros((4,), "float64")),
    ]
    for call in wrong:
        with pytest.raises(accel.InvalidArgumentError):
            await call
    with pytest.raises(accel.InvalidArgumentError, match="transpose"):
        a.T.check()
    for shape in ((5, 6), (4, 5)):
        with pytest.raises(accel.InvalidArgumentError, match="blocks"):
            accel.SparseRef("bsr", *a.refs, shape)
    with pytest.raises(accel.InvalidArgumentError, match="3 dimensions"):
        accel.SparseRef("bsr", await device.zeros((2,), "float64"), a.indices, a.indptr, (4, 6))


async def test_singular_systems_are_errors_and_the_device_goes_on(device: accel.Device) -> None:
    sparse, b = device.sparse, await device.put(np.ones(3))
    row = await sparse.put(scipy.csr_array(np.array([[1.0, 2, 0], [0, 0, 0], [0, 1, 1]])))
    twice = await sparse.put(scipy.csr_array(np.array([[1.0, 2, 0], [2, 4, 0], [0, 1, 1]])))
    nothing = await sparse.put(scipy.csr_array((3, 3)))
    # Three columns of one row, which SuperLU reports in other words than a pivot of 0.
    places = np.array([17, 17, 17, 10]), np.array([0, 6, 12, 13])
    crowded = await sparse.put(scipy.coo_array((np.array([0.3, 0.9, 0.2, 0.4]), places), shape=(20, 20)).tocsr())
    good = await sparse.put(scipy.eye_array(3, format="csr") * 2)
    for a in (row, twice, nothing, crowded):
        sides = b if a is not crowded else await device.put(np.arange(20.0))
        with pytest.raises(accel.LinAlgError, match="singular") as caught:
            await sparse.solve(a, sides)
        assert isinstance(caught.value.info, int)
        assert caught.value.info > 0
        _, info = await sparse.solve(a, sides, check=False)
        assert int(await device.get(info)) > 0
    async with device.batch() as batch:
        x = batch.sparse.solve(good, b)
    assert (await device.get(x)).tolist() == [0.5] * 3
    with pytest.raises(accel.LinAlgError) as caught:
        async with device.batch() as batch:
            batch.sparse.solve(good, b)
            batch.sparse.solve(row, b)
    assert caught.value.op_index == 1
    wrong: list[Any] = [
        sparse.solve(good.T, b),
        sparse.solve(good, await device.zeros((4,), "float64")),
        sparse.solve(good, await device.zeros((3,), "float32")),
        sparse.solve(good, b, check=1),  # type: ignore[arg-type]
        sparse.solve(good, b, out=b),
    ]
    for call in wrong:
        with pytest.raises(accel.InvalidArgumentError):
            await call


WRONG: dict[str, tuple[SparseFormat, str, int, int, str]] = {
    # name -> format, the part, the place and the number that is wrong there, and what the error says; the matrix is 4 x 6 with 5 elements
    "a column": ("csr", "indices", 2, 6, "index 6"),
    "a negative column": ("csr", "indices", 0, -1, "index -1"),
    "a row of csc": ("csc", "indices", 4, 4, "index 4"),
    "a row of coo": ("coo", "indptr", 4, 4, "index 4"),
    "rows of coo that fall": ("coo", "indptr", 3, 0, "element 3 of the indptr"),
    "a block": ("bsr", "indices", 1, 3, "index 3"),
    "an indptr that falls": ("csr", "indptr", 2, 0, "element 2 of the indptr"),
    "an indptr beyond the elements": ("csr", "indptr", 4, 6, "element 4 of the indptr"),
    "an indptr that ends before them": ("csc", "indptr", 6, 4, "element 6 of the indptr"),
    "an indptr that begins later": ("csr", "indptr", 0, 1, "element 0 of the indptr"),
    "an indptr of blocks": ("bsr", "indptr", 2, 6, "element 2 of the indptr"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("index", [np.int32, np.int64])
async def test_indices_on_the_device_are_checked_before_they_are_used(device: accel.Device, wrong: str, index: Any) -> None:
    form, part, place, number, text = WRONG[wrong]
    dense = np.zeros((4, 6))
    dense[[0, 0, 1, 3, 3], [0, 5, 2, 1, 4]] = 1 + np.arange(5)
    source = scipy.bsr_array(dense, blocksize=(2, 2)) if form == "bsr" else scipy.csr_array(dense).asformat(form)
    numbers = (source.col, source.row) if form == "coo" else (source.indices, source.indptr)
    data, indices, indptr = [await device.put(each) for each in (source.data, *[each.astype(index) for each in numbers])]
    a, x = accel.SparseRef(form, data, indices, indptr, (4, 6)), await device.put(np.arange(6.0))
    np.testing.assert_array_equal(await device.get(await device.sparse.spmv(a, x)), dense @ np.arange(6.0))
    changed = numbers[part == "indptr"].astype(index)
    changed[place] = number
    await device.put(changed, out=getattr(a, part))
    out = await device.zeros((4,), "float64")
    for call in (device.sparse.spmv(a, x), device.sparse.spmv(a, x, out=out), device.sparse.todense(a), device.sparse.get(a)):
        error = await failure(call, accel.InvalidArgumentError)
        assert text in str(error)
        assert error.remedy
    await device.put(numbers[part == "indptr"].astype(index), out=getattr(a, part))
    np.testing.assert_array_equal(await device.get(await device.sparse.spmv(a, x, out=out)), dense @ np.arange(6.0))


@pytest.mark.parametrize("indices", [[1, 0, 2, 0], [0, 0, 2, 1], [0, 1, 1, 0]])
async def test_ops_that_rely_on_the_order_in_a_row_check_it(device: accel.Device, indices: list[int]) -> None:
    marks, good = await device.put(np.array([0, 3, 3, 4], np.int32)), [0, 1, 2, 0]
    data, b = await device.put(np.ones(4)), await device.put(np.ones(3))
    a = accel.SparseRef("csr", data, await device.put(np.array(indices, np.int32)), marks, (3, 3))
    for call in (device.sparse.add(a, a), device.sparse.add(a.T, a.T), device.sparse.solve(a, b)):
        assert "of the indices of a sparse matrix is out of order" in str(await failure(call, accel.InvalidArgumentError))
    y = await device.get(await device.sparse.spmv(a, b))
    assert y.tolist() == [3, 0, 1], "a product needs no order"
    await device.put(np.array(good, np.int32), out=a.indices)
    assert (await device.sparse.add(a, a)).nnz == 4, "the next row may begin with a smaller index"


async def test_indices_are_checked_in_batches_and_where_nothing_else_is(device: accel.Device) -> None:
    data, indices, indptr, wrong = [await device.put(np.array(each, kind)) for each, kind in (([2.0, 2], "f8"), ([0, 1], "i4"), ([0, 1, 2], "i4"), ([0, 7], "i4"))]  # fmt: skip  # noqa: E501
    good, bad = (accel.SparseRef("csr", data, each, indptr, (2, 2)) for each in (indices, wrong))
    b, sparse = await device.put(np.ones(2)), device.sparse
    with pytest.raises(accel.InvalidArgumentError, match="index 7") as caught:
        async with device.batch() as batch:
            x = batch.sparse.solve(good, b)
            batch.sparse.spmv(bad, b)
    assert caught.value.op_index == 1
    assert (await device.get(x)).tolist() == [0.5, 0.5]
    calls: list[Any] = [
        *(sparse.solve(bad, b, check=False), sparse.spsolve_triangular(bad, b, check=False), sparse.spsolve_triangular(bad, b)),
        *(sparse.add(good, bad), sparse.spgemm(good, bad), sparse.tocsr(bad), sparse.diagonal(bad), sparse.cg(bad, b)),
        *(sparse.gmres(bad, b), sparse.cg(good, b, M=bad), sparse.cg(bad, b, M="jacobi")),
    ]
    for number, call in enumerate(calls):
        assert "index 7" in str(await failure(call, accel.InvalidArgumentError)), number
    with pytest.raises(accel.InvalidArgumentError, match="trim"):
        async with device.batch() as batch:
            total, _ = batch.sparse.add(good, good, size=3)
            batch.sparse.spmv(total, b)


@pytest.mark.parametrize("kind", ["int8", "int32", "uint8", "uint32", "uint64"])
async def test_host_arrays_that_fall_or_are_unsigned_are_checked_by_value(device: accel.Device, kind: str) -> None:
    for indptr in ([0, 5, 3, 5], [1, 1, 2, 5], [0, 1, 2, 6]):
        call = device.sparse.csr((np.ones(5), np.array([0, 1, 2, 0, 1]), np.array(indptr, kind)), shape=(3, 3))
        assert "indptr does not rise" in str(await failure(call, accel.InvalidArgumentError))
    a = await device.sparse.csr((np.ones(3), np.array([2, 0, 1], kind), np.array([0, 2, 2, 3], kind)), shape=(3, 3))
    assert (await device.get(await device.sparse.todense(a))).tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    for where in (3, np.iinfo(kind).max):
        call = device.sparse.coo((np.ones(1), (np.array([0], kind), np.array([where], kind))), shape=(3, 3))
        assert "outside" in str(await failure(call, accel.InvalidArgumentError))
