"""The steps of the ``solver`` family on a column-major cuSOLVER and BLAS in numpy: all samples, through an engine whose device memory is the host's."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from scipy.linalg import lapack

import accel
from accel import DType, LibraryError, UnsupportedError, ops
from accel.cpu.backend import CpuBackend
from accel.cpu.parts import PARTS
from accel.cpu.views import array
from accel.ops.families import FAMILIES
from accel.testing.conformance.device_harness import DeviceHarness
from accel.testing.conformance.families import check_samples
from accel_cuda.families.cublas import CUBLAS, LETTERS, Blas
from accel_cuda.families.kernels import CODES
from accel_cuda.families.solver import SolverLibrary
from accel_cuda.families.solver_calls import CUSOLVER
from tests.cuda_support import FakeLibrary, Numbers
from tests.cuda_twins import NAMES, ROOM, ColumnMajor, Stream, column_major, product, products

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.usefixtures("nothing_left")

CODED = {code: dtype.numpy for dtype, code in CODES.items()}
LETTERED = {letter: dtype.numpy for dtype, letter in LETTERS.items()}
NUMBERED = {
    NAMES[name]: np.dtype(kind) for name, kind in (("CUDA_R_32F", "f4"), ("CUDA_R_64F", "f8"), ("CUDA_C_32F", "c8"), ("CUDA_C_64F", "c16"))
}
I32, I64 = np.dtype(np.int32), np.dtype(np.int64)
LOWER, UPPER = 0, 1
ON_DEVICE, ON_HOST, GUARD = 4096, 64, 1024


def real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.zeros(0, dtype).real.dtype


class Solver(FakeLibrary):
    """cuSOLVER by LAPACK. Every call works in 4096 bytes, which it overwrites; those of one kind in memory of the host's too."""

    def __init__(self, needs_host: str = "xsyevd") -> None:
        super().__init__(CUSOLVER.module, CUSOLVER.error)
        self.needs_host = needs_host
        self.ran: list[str] = []

    def __getattr__(self, name: str) -> Any:
        answered = super().__getattr__(name)
        if name[0].isupper() or name in ("create", "destroy", "set_stream", "create_params", "destroy_params"):
            return answered
        is_size, asked = name.endswith("_buffer_size"), name.removesuffix("_buffer_size")

        def call(handle: int, *arguments: int) -> Any:
            answered(handle, *arguments)
            typed = asked[0] != "x"
            if is_size:
                return ON_DEVICE // LETTERED[asked[0]].itemsize if typed else (ON_DEVICE, ON_HOST * (asked == self.needs_host))
            self.ran.append(asked)
            if typed:
                *rest, work, nbytes, info = arguments
                kind = asked[1:].replace("ung", "org").replace("hegvd", "sygvd")
                assert nbytes * LETTERED[asked[0]].itemsize == ON_DEVICE
                self.overwrite(work, ON_DEVICE)
                found = getattr(self, f"do_{kind}")(LETTERED[asked[0]], *rest)
            elif asked == "xgetrs":
                *rest, info = arguments[1:]
                found = self.do_getrs(*rest)
            else:
                *rest, work, nbytes, host, on_host, info = arguments[1:]
                assert (nbytes, on_host, bool(host)) == (ON_DEVICE, ON_HOST * (asked == self.needs_host), asked == self.needs_host)
                self.overwrite(work, nbytes)
                self.overwrite(host, on_host)
                found = getattr(self, f"do_{asked[1:]}")(*rest)
            array(info, (), I32)[...] = found
            return None

        return call

    @staticmethod
    def overwrite(address: int, nbytes: int) -> None:
        ctypes.memset(address, 0xFF, nbytes)

    @staticmethod
    def function(name: str, dtype: np.dtype[Any]) -> Callable[..., Any]:
        return lapack.get_lapack_funcs((name,), dtype=dtype)[0]  # type: ignore[no-any-return]

    def do_potrf(self, fill: int, n: int, kind: int, a: int, lda: int, compute: int) -> int:
        assert kind == compute
        matrix = column_major(a, n, n, lda, NUMBERED[kind])
        found, info = self.function("potrf", matrix.dtype)(matrix, lower=fill == LOWER, clean=False)
        kept = np.tri(n, dtype=bool)
        np.copyto(matrix, found, where=kept if fill == LOWER else kept.T)
        return int(info)

    def do_getrf(self, m: int, n: int, kind: int, a: int, lda: int, piv: int, compute: int) -> int:
        assert kind == compute
        matrix = column_major(a, m, n, lda, NUMBERED[kind])
        assert np.isfinite(matrix).all()
        matrix[...], pivots, info = self.function("getrf", matrix.dtype)(matrix)
        array(piv, (min(m, n),), I64)[...] = pivots + 1
        return int(info)

    def do_getrs(self, trans: int, n: int, k: int, kind: int, a: int, lda: int, piv: int, kind_b: int, b: int, ldb: int) -> int:
        assert kind == kind_b
        matrix, sides = (column_major(each, n, columns, ld, NUMBERED[kind]) for each, columns, ld in ((a, n, lda), (b, k, ldb)))
        pivots = array(piv, (n,), I64)
        assert ((pivots >= 1) & (pivots <= n)).all()
        how = {NAMES.N: 0, NAMES.T: 1, NAMES.C: 2}[trans]
        with np.errstate(all="ignore"):
            sides[...], info = self.function("getrs", matrix.dtype)(matrix, pivots - 1, sides, trans=how)
        return int(info)

    def do_geqrf(self, m: int, n: int, kind: int, a: int, lda: int, kind_tau: int, tau: int, compute: int) -> int:
        assert kind == kind_tau == compute
        matrix = column_major(a, m, n, lda, NUMBERED[kind])
        assert np.isfinite(matrix).all()
        matrix[...], array(tau, (min(m, n),), matrix.dtype)[...], _, info = self.function("geqrf", matrix.dtype)(matrix)
        return int(info)

    def do_orgqr(self, dtype: np.dtype[Any], m: int, n: int, k: int, a: int, lda: int, tau: int) -> int:
        matrix = column_major(a, m, n, lda, dtype)
        name = "ungqr" if dtype.kind == "c" else "orgqr"
        matrix[...], _, info = self.function(name, dtype)(matrix, array(tau, (k,), dtype))
        return int(info)

    def do_syevd(self, job: int, fill: int, n: int, kind: int, a: int, lda: int, kind_w: int, w: int, compute: int) -> int:
        matrix = column_major(a, n, n, lda, NUMBERED[kind])
        assert (kind, NUMBERED[kind_w]) == (compute, real(matrix.dtype))
        name = "heevd" if matrix.dtype.kind == "c" else "syevd"
        array(w, (n,), NUMBERED[kind_w])[...], found, info = self.function(name, matrix.dtype)(matrix, compute_v=job, lower=fill == LOWER)
        matrix[...] = found if job else np.nan
        return int(info)

    def do_sygvd(self, dtype: np.dtype[Any], itype: int, job: int, fill: int, n: int, a: int, lda: int, b: int, ldb: int, w: int) -> int:
        assert (itype, job) == (1, 1)
        first, second = column_major(a, n, n, lda, dtype), column_major(b, n, n, ldb, dtype)
        name = "hegvd" if dtype.kind == "c" else "sygvd"
        values, first[...], info = self.function(name, dtype)(first, second, uplo="L" if fill == LOWER else "U")
        array(w, (n,), real(dtype))[...] = values
        second[...] = np.nan
        return int(info)

    def do_gesvd(
        self, job_u: int, job_vt: int, m: int, n: int, kind: int, a: int, lda: int, kind_s: int, s: int, kind_u: int, u: int, ldu: int, kind_vt: int,
        vt: int, ldvt: int, compute: int,
    ) -> int:  # fmt: skip
        dtype = NUMBERED[kind]
        assert m >= n, "cuSOLVER decomposes no others"
        assert kind == kind_u == kind_vt == compute
        assert (job_u, NUMBERED[kind_s]) == (job_vt, real(dtype))
        job, matrix = chr(job_u), column_major(a, m, n, lda, dtype)
        assert np.isfinite(matrix).all()
        found = self.function("gesvd", dtype)(matrix, compute_uv=job != "N", full_matrices=job == "A")
        if job != "N":
            column_major(u, m, m if job == "A" else n, ldu, dtype)[...] = found[0]
            column_major(vt, n, n, ldvt, dtype)[...] = found[2]
        array(s, (n,), real(dtype))[...] = found[1]
        matrix[...] = np.nan
        return int(found[3])

    def do_geev(
        self, job_vl: int, job_vr: int, n: int, kind: int, a: int, lda: int, kind_w: int, w: int, kind_vl: int, vl: int, ldvl: int, kind_vr: int,
        vr: int, ldvr: int, compute: int,
    ) -> int:  # fmt: skip
        dtype = NUMBERED[kind]
        assert kind == kind_vl == kind_vr == compute
        assert (job_vl, vl, NUMBERED[kind_w]) == (0, 0, np.result_type(dtype, np.complex64))
        matrix = column_major(a, n, n, lda, dtype)
        assert np.isfinite(matrix).all()
        *values, _, vectors, info = self.function("geev", dtype)(matrix, compute_vl=False, compute_vr=job_vr)
        array(w, (n,), NUMBERED[kind_w])[...] = values[0] if len(values) == 1 else values[0] + 1j * values[1]
        if job_vr:
            column_major(vr, n, n, ldvr, dtype)[...] = vectors
        matrix[...] = np.nan
        return int(info)


# -- the backend's own kernels: name without the dtype -> what it does with its arguments


def finite(dtype: np.dtype[Any], x: int, flag: int, count: int, columns: int, part: int) -> None:
    matrix = array(x, (count // columns, columns), dtype)
    kept = {0: np.ones_like(matrix, bool), 1: np.tril(np.ones_like(matrix, bool)), 2: np.triu(np.ones_like(matrix, bool))}[part]
    if not np.isfinite(matrix[kept]).all():
        array(flag, (), I32)[...] = 1


def blank(width: int, flag: int, x: int, count: int, word: int) -> None:
    if array(flag, (), I32):
        array(x, (count,), np.dtype(f"u{width}"))[...] = word


def triangle(dtype: np.dtype[Any], x: int, info: int, count: int, rows: int, columns: int, upper: int) -> None:
    matrices = array(x, (count // (rows * columns), rows, columns), dtype)
    matrices[...] = (np.triu if upper else np.tril)(matrices)
    for i, each in enumerate(matrices if info else ()):
        bad = np.flatnonzero(np.isnan(np.diagonal(each)))
        told = array(info, (len(matrices),), I32)
        if bad.size and (not told[i] or bad[0] + 1 < told[i]):
            told[i] = bad[0] + 1


def eye(dtype: np.dtype[Any], x: int, count: int, rows: int, columns: int) -> None:
    array(x, (count // (rows * columns), rows, columns), dtype)[...] = np.eye(rows, columns)


@np.errstate(all="ignore")
def det(dtype: np.dtype[Any], lu: int, piv: int, sign: int, log: int, n: int) -> None:
    diagonal = np.diagonal(array(lu, (n, n), dtype)).astype(np.result_type(dtype, np.float64))
    size = np.abs(diagonal)
    swaps = (array(piv, (n,), I64) != np.arange(1, n + 1)).sum()
    found = np.where(size == 0, 0, diagonal / size).prod() * (-1.0) ** swaps
    total = np.log(size).sum()
    array(sign, (), dtype)[...] = found if log else found * np.exp(total)
    if log:
        array(log, (), real(dtype))[...] = total


def scaled(dtype: np.dtype[Any], u: int, s: int, rank: int, rows: int, columns: int, rtol: int) -> None:
    matrix, values = column_major(u, rows, columns, rows, dtype), array(s, (columns,), real(dtype))
    factor = ctypes.c_double.from_buffer(ctypes.c_uint64(rtol)).value
    counts = values > real(dtype).type(factor) * values[0]
    matrix[...] = np.where(counts, matrix / np.where(counts, values, 1), 0)
    if rank:
        array(rank, (), I64)[...] = counts.sum()


def lengths(dtype: np.dtype[Any], x: int, out: int, rows: int, columns: int) -> None:
    matrix = array(x, (rows, columns), dtype).astype(np.result_type(dtype, np.float64))
    array(out, (columns,), real(dtype))[...] = (np.abs(matrix) ** 2).sum(axis=0)


def pairs(dtype: np.dtype[Any], x: int, w: int, v: int, n: int) -> None:
    made = np.result_type(dtype, np.complex64)
    vectors, values, out = column_major(x, n, n, n, dtype), array(w, (n,), made), array(v, (n, n), made)
    for j, value in enumerate(values):
        if value.imag > 0:
            out[:, j] = vectors[:, j] + 1j * vectors[:, j + 1]
        else:
            out[:, j] = vectors[:, j - 1] - 1j * vectors[:, j] if value.imag else vectors[:, j]


def piv_out(x: int, y: int, n: int) -> None:
    array(y, (n,), I32)[...] = array(x, (n,), I64) - 1


def piv_in(x: int, y: int, status: int, n: int) -> None:
    rows = array(x, (n,), I32).astype(I64)
    for row in rows[(rows < 0) | (rows >= n)]:
        array(status, (2,), I64)[...] = 1, row
    array(y, (n,), I64)[...] = rows.clip(0, n - 1) + 1


TYPED = {each.__name__: each for each in (finite, triangle, eye, det, scaled, lengths, pairs)}
FUNCTIONS = {
    **{f"solver_{name}_{code}": partial(each, CODED[code]) for name, each in TYPED.items() for code in ("f32", "f64", "c64", "c128")},
    "solver_blank_4": partial(blank, 4),
    "solver_blank_8": partial(blank, 8),
    "solver_piv_out": piv_out,
    "solver_piv_in": piv_in,
}


class SolverStream(Stream):
    functions: Any = FUNCTIONS
    is_capturing = False
    pointer = transfers = None

    def __init__(self, context: Any) -> None:
        self.context = context

    def ready(self) -> Any:
        return self.context

    def launch(self, function: Any, blocks: int, threads: int, *arguments: int) -> None:
        assert 1 <= blocks <= 4096
        assert threads == 256
        function(*arguments)


@pytest.fixture
def solver(monkeypatch: pytest.MonkeyPatch) -> Solver:
    cublas, made = ColumnMajor(), Solver()
    cublas.install(monkeypatch, CUBLAS.name)
    made.install(monkeypatch, CUBLAS.name, CUSOLVER.name)
    monkeypatch.setattr(sys.modules["nvmath"], "CudaDataType", Numbers(), raising=False)
    return made


@pytest.fixture
def lane(solver: Solver, context: Any) -> Any:
    stream: Any = SolverStream(context)
    blas: Any = Blas(stream, ROOM.ctypes.data, ROOM.nbytes)
    blas.gemm, blas.batched_gemm = product, products  # twins of their own
    stream.blas = blas
    return SimpleNamespace(stream=stream)


@pytest.fixture
def library(context: Any, lane: Any, monkeypatch: pytest.MonkeyPatch) -> SolverLibrary:
    """Have the CPU backend run the kernels of the CUDA backend, whose results and memory are NaN before."""
    made = SolverLibrary(context)

    def run(op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        if made.scratch_nbytes(op) is None:
            made.measure(op)
        nbytes = made.scratch_nbytes(op)
        assert nbytes is not None
        scratch = np.full(nbytes + GUARD, 0xFF, np.uint8)
        for spec, address in zip(plan.creates, outputs, strict=False):
            ctypes.memset(address, 0xFF, spec.nbytes)
        made.kernels[op.kind](lane, op, plan, inputs, (*outputs, scratch.ctypes.data))
        assert (scratch[nbytes:] == 0xFF).all(), "more memory than was measured is written to"

    def beside(cpu_lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        cpu_lane.stream.submit(partial(run, op, plan, inputs, outputs), 0.0)

    part = PARTS["solver"]
    monkeypatch.setitem(PARTS, "solver", replace(part, kernels=dict.fromkeys(made.kernels, beside)))
    return made


async def test_every_sample_is_right_on_a_column_major_solver(library: SolverLibrary, solver: Solver) -> None:
    await check_samples(DeviceHarness(CpuBackend()), next(family for family in FAMILIES if family.name == "solver"))
    typed = {"sorgqr", "dorgqr", "cungqr", "zungqr", "ssygvd", "dsygvd", "chegvd", "zhegvd"}
    assert set(solver.ran) == {"xpotrf", "xgetrf", "xgetrs", "xgeqrf", "xsyevd", "xgesvd", "xgeev", *typed}
    library.close()
    assert solver.names()[-2:] == ["destroy_params", "destroy"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(5, 5), (7, 3), (3, 7)])
async def test_no_iteration_sees_what_is_not_finite(
    library: SolverLibrary, rng: np.random.Generator, value: float, shape: tuple[int, int]
) -> None:
    a = rng.standard_normal((2, *shape)) + 1j
    a[1, 2, 1] = value
    async with accel.System() as system:
        device = await system.open_device("cpu")
        solver, x, b = device.solver, await device.put(a), await device.put(rng.standard_normal((shape[0], 2)) + 1j)
        square: list[Any] = [solver.eigh, solver.eigvalsh, solver.eig, solver.eigvals] if shape == (5, 5) else []
        for call in (*square, solver.svd, solver.svdvals, solver.pinv, lambda x, **o: solver.lstsq(x, b, **o)):
            *found, info = await call(x, check=False)
            assert (await device.get(info)).tolist() == [0, -1]
            for each in found:
                good, bad = await device.get(each)
                assert np.isfinite(good).all()
                assert np.isnan(bad).all() or (each.dtype is DType.INT64 and bad == 0)


async def test_a_pivot_that_is_no_row_is_the_op_s_error_and_the_library_gets_rows_only(
    library: SolverLibrary, rng: np.random.Generator
) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu")
        lu, piv = await device.solver.lu_factor(await device.put(rng.standard_normal((2, 6, 6))))
        b = await device.put(rng.standard_normal((6, 2)))
        for wrong in (6, -1, 2**31 - 1):  # the library's twin asserts that it is given rows
            rows = (await device.get(piv)).copy()
            rows[1, 3] = wrong
            with pytest.raises(accel.InvalidArgumentError, match=f"pivot {wrong} is no row"):
                await device.solver.lu_solve(lu, await device.put(rows), b)
        assert np.isfinite(await device.get(await device.solver.lu_solve(lu, piv, b))).all()


async def test_one_matrix_is_factored_once_for_many_right_hand_sides(
    library: SolverLibrary, solver: Solver, rng: np.random.Generator
) -> None:
    a, b = rng.standard_normal((6, 6)), rng.standard_normal((5, 6, 2))
    singular = np.ones((2, 2))
    async with accel.System() as system:
        device = await system.open_device("cpu")
        x = await device.get(await device.solver.solve(await device.put(a), await device.put(b)))
        np.testing.assert_allclose(a @ x, b, atol=1e-9)
        assert (solver.ran.count("xgetrf"), solver.ran.count("xgetrs")) == (1, 5)
        x, residuals, rank, values = await device.solver.lstsq(await device.put(a[:, :4]), await device.put(b))
        assert solver.ran.count("xgesvd") == 1
        assert (await device.get(rank)).tolist() == [4] * 5
        np.testing.assert_allclose(await device.get(values), np.broadcast_to(np.linalg.svd(a[:, :4])[1], (5, 4)), atol=1e-12)
        expected = [np.linalg.lstsq(a[:, :4], each) for each in b]
        np.testing.assert_allclose(await device.get(x), np.stack([each[0] for each in expected]), atol=1e-12)
        np.testing.assert_allclose(await device.get(residuals), np.stack([each[1] for each in expected]), atol=1e-12)
        _, info = await device.solver.solve(await device.put(singular), await device.put(b[:3, :2]), check=False)
        assert (await device.get(info)).tolist() == [2, 2, 2]


class Owner:
    name, identity, live_generation, is_closing = "cuda:0", "1", 1, False
    dropped: ClassVar[deque[int]] = deque()


def ref(*shape: int, dtype: DType = DType.FLOAT64) -> Any:
    return accel.AccelRef(Owner(), 1, shape, dtype, 1)  # type: ignore[arg-type]


def call(library: SolverLibrary, lane: Any, op: Any, a: np.ndarray[Any, Any], made: Sequence[np.ndarray[Any, Any]]) -> None:
    """Do what the layers above do."""
    library.measure(op)
    scratch = np.empty(library.scratch_nbytes(op), np.uint8)  # type: ignore[arg-type]
    library.kernels[op.kind](lane, op, op.plan(), (a.ctypes.data,), (*[each.ctypes.data for each in made], scratch.ctypes.data))


def test_what_the_host_takes_part_in_is_no_part_of_a_graph(library: SolverLibrary, lane: Any, solver: Solver) -> None:
    a, made, info = np.eye(3), np.empty((3, 3)), np.empty((), np.int32)
    lane.stream.is_capturing = True
    call(library, lane, ops.Cholesky(ref(3, 3)), a, (made, info))
    np.testing.assert_array_equal(made, a)
    begun = [each for each in solver.called if each[0] in ("create", "set_stream", "xpotrf")]
    assert [each[:2] for each in begun] == [("create",), ("set_stream", 1), ("xpotrf", 1), ("set_stream", 1)], "no handle is made meanwhile"
    assert [each[2] for each in begun if each[0] == "set_stream"] == [lane.stream.handle, 0]
    with pytest.raises(UnsupportedError, match="svdvals cannot become a part of a graph"):
        call(library, lane, ops.Svdvals(ref(3, 3)), a, (made, info))
    solver.needs_host = "xgeqrf"
    with pytest.raises(UnsupportedError, match="geqrf cannot become a part of a graph: cuSOLVER computes a part of it on the host"):
        call(library, lane, ops.Qr(ref(3, 3)), a, (made, made.copy()))


def test_memory_of_the_host_is_kept_until_the_stream_has_passed(library: SolverLibrary, lane: Any, context: Any) -> None:
    kept = library.loaded()._used
    a, values, info = np.eye(3), np.empty(3), np.empty((), np.int32)
    context.driver.fails["query"] = 600  # not ready
    for count in (1, 2):
        call(library, lane, ops.Eigvalsh(ref(3, 3)), a, (values, info))
        assert len(kept) == count
    context.driver.fails.clear()
    call(library, lane, ops.Eigvalsh(ref(3, 3)), a, (values, info))
    assert [len(room) for _, room in kept] == [ON_HOST]
    library.close()
    assert not kept


def test_a_call_that_fails_says_what_the_library_answered(library: SolverLibrary, lane: Any, solver: Solver) -> None:
    a, made, info = np.eye(3), np.empty((3, 3)), np.empty((), np.int32)
    op = ops.Cholesky(ref(3, 3))
    assert library.may_block(lane, op)
    assert (library.scratch_nbytes(op), library.commands(op)) == (None, 64)
    solver.fails["xpotrf_buffer_size"] = 3
    with pytest.raises(accel.InvalidArgumentError, match="buffer_size of potrf"):
        library.measure(op)
    solver.fails = {"xpotrf": 7}
    with pytest.raises(LibraryError) as told:
        call(library, lane, op, a, (made, info))
    assert (told.value.code, told.value.library) == (7, "cusolver")


async def test_a_stack_works_in_the_memory_of_one_matrix_which_is_the_op_s_alone(library: SolverLibrary, rng: np.random.Generator) -> None:
    sizes = []
    async with accel.System() as system:
        device = await system.open_device("cpu")
        for stack in ((1,), (4,)):
            a = rng.standard_normal((*stack, 70, 3))
            q, r = [await device.get(each) for each in await device.solver.qr(await device.put(a), mode="complete")]
            np.testing.assert_allclose(q @ r, a, atol=1e-12)
            np.testing.assert_allclose(q @ q.swapaxes(1, 2), np.broadcast_to(np.eye(70), (*stack, 70, 70)), atol=1e-12)
            sizes.append(library.scratch_nbytes(ops.Qr(ref(*stack, 70, 3), mode="complete")))
    # Behind the matrix are the factors of its reflectors, an info, a flag, and what a call works in.
    assert sizes == [70 * 70 * 8 + 224 + 256 + 256 + 256 + ON_DEVICE] * 2
