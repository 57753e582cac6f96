"""The ``sparse`` family on a GPU: cuSPARSE's generic interface, its conversions and sums, and kernels of the backend's own for what it does not do.

These copy a diagonal or look for zeros on it, and make csr of a dense matrix, with CUB's running sums between two of them; ``sparse.cu`` says why.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from accel import DType, SparseRef, Transpose, UnsupportedError
from accel_cuda.core.cub import CUB, Cub, RunningOp
from accel_cuda.core.family import CudaPart, FamilyState, Source
from accel_cuda.families.cublas import scale
from accel_cuda.families.kernels import CODES, aligned, clear, launch_each
from accel_cuda.families.sparse_direct import DirectSolver, solve_scratch
from accel_cuda.families.sparse_plans import CUSPARSE, Matrix, SparsePlans, SparseSpec
from accel_cuda.families.sparse_products import PRODUCTS, enqueue_spgemm, enqueue_spgemm_size, spgemm_scratch
from accel_cuda.families.sparse_structure import copy_structure, is_sound, structure_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.backend import Kernel
    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["PART", "SparseLibrary"]

_BLOCK = 256
_COMMANDS = 64
"""Commands of an op at most: the library sorts in some of its calls, and does not say in how many steps."""

_NONE, _TRANSPOSE, _CONJUGATE = Transpose.NONE, Transpose.TRANSPOSE, Transpose.CONJUGATE
_PRODUCTS = ("spmv", "spmm")
_AS_CSR = "Convert it first: await device.sparse.tocsr(a)."
_CONVERSIONS = ("tocsr", "tocsc", "tocoo")


class SparseLibrary(FamilyState[SparsePlans]):
    """cuSPARSE in one context, and what else the ops need."""

    commands = _COMMANDS

    def __init__(self, context: CudaContext) -> None:
        super().__init__(context, SparsePlans)
        of_matrices: dict[str, Kernel] = {
            **dict.fromkeys(_PRODUCTS, self._multiply),
            **dict.fromkeys(_CONVERSIONS, self._convert),
            "todense": self._todense,
            "diagonal": self._diagonal,
            "add": self._add,
            "spgemm": self._spgemm,
            "spgemm_size": self._spgemm,
            "sddmm": self._sddmm,
            "spsolve_triangular": self._solve,
            "solve": self._direct,
        }
        checked = {kind: partial(_checked, kernel) for kind, kernel in of_matrices.items()}
        self.kernels = {**checked, "fromdense": self._fromdense}
        self._cub = Cub(context)
        self._direct_solver: DirectSolver | None = None

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing ``op`` loads the library, makes a handle or a plan, or uses a plan for the first time."""
        plans = self.library
        if op.kind in ("tocsr", "todense") and op.a[0] == "bsr":
            return False
        if op.kind in PRODUCTS or op.kind == "solve":
            return True  # the library waits for the device
        if op.kind == "diagonal":
            return False  # its kernel is all that it needs, and whether that is there is asked elsewhere
        if op.kind == "fromdense":
            return not self._cub.is_ready(_running(op))
        if plans is None or not plans.has_handle(lane.stream):
            return True
        spec = _spec(op)
        # A result without products is scaled by a kernel, which may have to be compiled.
        return bool(op.kind != "add" and getattr(op, "beta", 0)) if spec is None else not plans.cache.is_ready(spec)

    def prepare(self, stream: CudaStream) -> None:
        """Load cuSPARSE, if it is not loaded, and make the stream's handle. May block. CUB's sums, which one op needs, are left to its first use."""
        with self.context.section:
            self.loaded().handle(stream)

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes an op works in, or ``None`` if its call has not been measured; see :class:`accel.backend.TakesScratch`."""
        if op.kind == "fromdense":
            return self._cub.scratch_nbytes(_running(op), op.x.shape[0] + 1) if op.x.size else 0
        nbytes = self._call_nbytes(op)
        return None if nbytes is None else structure_nbytes(op) + nbytes

    def _call_nbytes(self, op: Any) -> int | None:
        if op.kind == "solve":
            return solve_scratch(op)
        if op.kind in PRODUCTS:
            return spgemm_scratch(op)
        spec = _spec(op)
        if spec is None:
            return 0
        nbytes = None if self.library is None else self.library.sizes.get(spec)
        return None if nbytes is None else _room(op) + nbytes

    def measure(self, op: Any) -> None:
        """See that :meth:`scratch_nbytes` knows. May block."""
        if op.kind in PRODUCTS or op.kind == "solve":
            return  # what they work in needs no asking
        if op.kind == "fromdense":
            self._cub.measure(_running(op), op.x.shape[0] + 1)
            return
        plans, spec = self.loaded(), _spec(op)
        if spec is not None:
            plans.measure(spec)

    def close(self) -> None:
        self._cub.close()
        super().close()

    def _multiply(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        stream, spec, out = lane.stream, _spec(op), outputs[0]
        with stream.ready().section:
            if spec is None:
                rows = _matrix_of(op).shape[op.transpose_a is not _NONE]
                columns = 1 if op.kind == "spmv" else op.b.shape[op.transpose_b is _NONE]
                _scale(lane, op, rows * columns, out)
            else:
                self.loaded().run(stream, spec, inputs[:3], (inputs[3], out), outputs[-1], op.alpha, op.beta)

    def _todense(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        stream, spec, a = lane.stream, _spec(op), _matrix_of(op)
        with stream.ready().section:
            # The library does not promise to write what the matrix does not store.
            stream.fill(outputs[0], bytes(1), math.prod(a.shape) * a.dtype.itemsize)
            if a.format == "bsr":
                if a.nnz:
                    self._unblock(stream, a, "dense", a.nnz, *inputs[:3], outputs[0])
            elif spec is not None:
                self.loaded().run(stream, spec, inputs[:3], outputs[:1], outputs[-1])

    @staticmethod
    def _unblock(stream: CudaStream, a: SparseRef, target: str, threads: int, *addresses: int) -> None:
        """Launch the kernel that takes blocks apart."""
        name = f"sparse_blocks_{target}_{CODES[a.dtype]}_{a.indices.dtype.itemsize}"
        launch_each(stream, name, threads, *addresses, a.major, *a.blocksize, a.shape[1], a.nnz)

    @staticmethod
    def _diagonal(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        stream, a, n = lane.stream, _matrix_of(op), min(_matrix_of(op).shape)
        if not n:
            return
        with stream.ready().section:
            clear(stream, (outputs[0], n * a.dtype.itemsize))
            if a.nnz:
                form, count = ("_coo", a.nnz) if a.format == "coo" else ("", n)
                launch_each(
                    stream, f"sparse_extract{form}_{CODES[a.dtype]}_{a.indices.dtype.itemsize}", count, *inputs[:3], outputs[0], count
                )

    def _fromdense(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        stream, x, (data, indices, indptr, count, scratch) = lane.stream, op.x, outputs
        (rows, columns), room, width = x.shape, op.room(x.size), op.index_type.itemsize
        with stream.ready().section:
            clear(stream, (data, room * x.dtype.itemsize), (indices, room * width), (count, 8))
            if not x.size:
                clear(stream, (indptr, (rows + 1) * width))
                return
            name, blocks = f"{CODES[x.dtype]}_{width}", -(-rows // (_BLOCK // 32))
            stream.launch(stream.functions[f"sparse_count_{name}"], blocks, _BLOCK, inputs[0], indptr, rows, columns)
            self._cub.run(stream, _running(op), scratch, rows + 1, indptr, indptr)
            addresses = inputs[0], indptr, data, indices, count
            stream.launch(stream.functions[f"sparse_pick_{name}"], blocks, _BLOCK, *addresses, rows, columns, room)

    def _add(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        stream, spec, a, (data, indices, indptr, count, scratch) = lane.stream, _spec(op), _matrix_of(op), outputs
        most = a.nnz + op.b[1].size
        room, itemsize, width = op.room(most), a.dtype.itemsize, a.indices.dtype.itemsize
        if spec is None and most:
            raise UnsupportedError("cuSPARSE adds matrices with indices of int32 only", op=op.kind, remedy="Give int32 indices.")
        with stream.ready().section:
            clear(stream, (data, room * itemsize), (indices, room * width), (count, 8))
            if spec is None:
                clear(stream, (indptr, a.indptr.nbytes))
                return
            made = data, indices
            if room < most:  # the library writes as many as there are
                made = scratch, scratch + aligned(most * itemsize)
                clear(stream, (scratch, _room(op)))
            matrices = *inputs[:6], *made, indptr, count
            self.loaded().run(stream, spec, matrices, (), scratch + _room(op), op.alpha, op.beta)
            if room < most:
                stream.copy(data, made[0], room * itemsize)
                stream.copy(indices, made[1], room * width)

    def _spgemm(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        enqueue = enqueue_spgemm if op.kind == "spgemm" else enqueue_spgemm_size
        with lane.stream.ready().section:
            enqueue(self.loaded(), lane.stream, op, inputs, outputs)

    def _sddmm(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        stream, spec, pattern, out = lane.stream, _spec(op), _matrix_of(op), outputs[0]
        with stream.ready().section:
            if op.beta:
                stream.copy(out, inputs[2], pattern.data.nbytes)
            if spec is None:
                _scale(lane, op, pattern.nnz, out)
                return
            if not op.beta:  # else the library scales what is there
                stream.fill(out, bytes(1), pattern.data.nbytes)
            matrix = out, inputs[3], inputs[4]
            self.loaded().run(stream, spec, matrix, inputs[:2], outputs[-1], op.alpha, op.beta)

    def _solve(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        stream, spec, a, info = lane.stream, _spec(op), _matrix_of(op), outputs[1]
        n = a.shape[0]
        if a.format == "csc" and a.dtype.is_complex and op.transpose_a is _CONJUGATE:
            raise UnsupportedError(
                "cuSPARSE solves no conjugate transpose of csc", op=op.kind, remedy="Convert it first: await device.sparse.tocsr(a)."
            )
        with stream.ready().section:
            if not op.check:
                stream.fill(info, bytes(4), 1)
            if not op.unit_diagonal:
                launch_each(stream, f"sparse_diagonal_{CODES[a.dtype]}_{a.indices.dtype.itemsize}", n, *inputs[:3], info, n)
            if spec is not None:
                self.loaded().run(stream, spec, inputs[:3], (inputs[3], outputs[0]), outputs[-1])
            elif op.b.size:  # the matrix stores nothing: the diagonal is 1, or the status says that it is 0
                stream.copy(outputs[0], inputs[3], op.b.nbytes)

    def _direct(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        with self._lock:
            solver = self._direct_solver = self._direct_solver or DirectSolver()
        with lane.stream.ready().section:
            solver.run(lane, op, inputs, outputs)

    def _convert(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Enqueue copies where the order of elements stays, else what brings csr into the order of csc. Of coo, indptr is made, or made into rows."""
        stream, a, target = lane.stream, _matrix_of(op), op.target
        index, marks = a.indices.dtype.itemsize, 1 + (a.shape[1] if target == "csc" else a.shape[0])
        with stream.ready().section:
            if not a.nnz:
                if target != "coo":
                    stream.fill(outputs[2], bytes(1), marks * index)
                return
            if a.format == "bsr":
                self._unblock(stream, a, "csr", max(a.nnz, marks), *inputs[:3], *outputs[:3])
                return
            if target == a.format:
                for source, made, ref in zip(inputs, outputs, a.refs, strict=False):
                    stream.copy(made, source, ref.nbytes)
                return
            if a.indices.dtype is not DType.INT32:
                raise UnsupportedError(
                    f"cuSPARSE converts {a.format} to {target} with indices of int32 only", op=op.kind, remedy="Give int32 indices."
                )
            self._converted(stream, op, a, inputs, outputs)

    def _converted(self, stream: CudaStream, op: Any, a: SparseRef, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        plans = self.loaded()
        handle, sparse, target, spec, scratch = plans.handle(stream), plans.handle(stream).module, op.target, _spec(op), outputs[-1]
        data, indices, indptr = inputs[:3]
        made = outputs[2]
        try:
            if spec is None:  # csr and coo have the same order
                stream.copy(outputs[0], data, a.data.nbytes)
                stream.copy(outputs[1], indices, a.indices.nbytes)
            if a.format == "coo":
                pointers = made if spec is None else scratch
                sparse.xcoo2csr(handle.value, indptr, a.nnz, a.shape[0], pointers, 0)
                indptr = pointers
            if spec is not None:
                pointers = scratch if target == "coo" else made
                plans.run(stream, spec, (data, indices, indptr, outputs[0], outputs[1], pointers), (), scratch + _room(op))
                indptr = pointers
            if target == "coo":
                sparse.xcsr2coo(handle.value, indptr, a.nnz, a.shape[0], made, 0)
        except handle.error as error:
            raise handle.failure(error, op.kind) from error


def _checked(kernel: Kernel, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue an op with copies of its matrices' indices, which are sound whatever the indices say."""
    taken = copy_structure(lane.stream, op, inputs, outputs)
    if (op.kind in PRODUCTS or op.kind == "solve") and not lane.stream.is_capturing and not is_sound(lane, outputs):
        return  # these wait for the device, so the library need not be called
    kernel(lane, op, plan, *taken)


def _matrix_of(op: Any) -> SparseRef:
    """Return the sparse matrix of an op."""
    return SparseRef(*(op.pattern if op.kind == "sddmm" else op.a))


def _spec(op: Any) -> SparseSpec | None:
    """Return the call of an op; ``None`` if there is nothing to compute, or if only copies and changes of indptr are to be enqueued.

    Raises
    ------
    UnsupportedError
        For a product of blocks that are not square, or of their transpose.
    """
    a = _matrix_of(op)
    if a.format == "bsr" and op.kind in _PRODUCTS and op.transpose_a is not _NONE:
        raise UnsupportedError(
            "cuSPARSE multiplies no transpose of bsr: cusparseSpMV_bufferSize answers NOT_SUPPORTED",
            op=op.kind,
            library="cusparse",
            remedy=_AS_CSR,
        )
    if a.format == "bsr" and op.kind in _PRODUCTS and a.blocksize[0] != a.blocksize[1]:
        raise UnsupportedError(
            "cuSPARSE multiplies no blocks that are not square: cusparseCreateBsr answers INVALID_VALUE",
            op=op.kind,
            library="cusparse",
            remedy=_AS_CSR,
        )
    if op.kind == "add":
        nnz, is_narrow = op.b[1].size, a.indices.dtype is DType.INT32
        return SparseSpec("add", _as_csr(a, _NONE)[0], nnz=nnz) if is_narrow and a.nnz + nnz else None
    if not a.nnz or op.kind == "diagonal" or (a.format == "bsr" and op.kind not in _PRODUCTS):
        return None
    if op.kind in _CONVERSIONS:
        form = "csc" if op.target == "csc" else "csr"
        if a.indices.dtype is not DType.INT32 or a.format == op.target or form == ("csr" if a.format == "coo" else a.format):
            return None
        # What is csc of a matrix is csr of its transpose.
        return SparseSpec("turn", Matrix("csr", a.shape[::-1] if a.format == "csc" else a.shape, a.nnz, a.dtype, a.indices.dtype))
    if op.kind == "todense":
        return SparseSpec("todense", _as_is(a), (a.shape,))
    if op.kind == "sddmm":
        k = op.a.shape[op.transpose_a is _NONE]
        return SparseSpec("sddmm", _as_is(a), (op.a.shape, op.b.shape), (op.transpose_a, op.transpose_b)) if k else None
    matrix, turn = _as_csr(a, op.transpose_a)
    if op.kind == "spsolve_triangular":
        if not op.b.size or matrix.form != "csr":
            return None
        lower = op.lower is (a.format == "csr")
        return SparseSpec("spsv" if op.b.ndim == 1 else "spsm", matrix, (op.b.shape,) * 2, (turn, _NONE), lower, op.unit_diagonal)
    rows = a.shape[op.transpose_a is not _NONE]
    if op.kind == "spmv":
        return SparseSpec("spmv", matrix, (op.x.shape, (rows,)), (turn, _NONE))
    columns = op.b.shape[op.transpose_b is _NONE]
    return SparseSpec("spmm", matrix, (op.b.shape, (rows, columns)), (turn, op.transpose_b)) if columns else None


def _as_is(a: SparseRef) -> Matrix:
    return Matrix(a.format, a.shape, a.nnz, a.dtype, a.indices.dtype, a.blocksize)


def _as_csr(a: SparseRef, transpose: Transpose) -> tuple[Matrix, Transpose]:
    """Return csc as csr of the transpose, for which the library has the better kernels, and what is done to it then."""
    if transpose is _CONJUGATE and not a.dtype.is_complex:
        transpose = _TRANSPOSE
    if a.format != "csc" or transpose is _CONJUGATE:
        return _as_is(a), transpose
    turned = _TRANSPOSE if transpose is _NONE else _NONE
    return _as_is(a)._replace(form="csr", shape=(a.shape[1], a.shape[0])), turned


def _room(op: Any) -> int:
    """Return the bytes of what is neither given nor a result: an indptr between csc and coo, or a sum that is larger than its room."""
    if op.kind == "add":
        a, most = _matrix_of(op), op.a[1].size + op.b[1].size
        return aligned(most * a.dtype.itemsize) + aligned(most * 4) if op.room(most) < most else 0
    if op.kind not in _CONVERSIONS or {op.target, op.a[0]} != {"csc", "coo"}:
        return 0
    return aligned(4 * (_matrix_of(op).shape[0] + 1))


def _running(op: Any) -> RunningOp:
    return RunningOp("cumsum", op.index_type)


def _scale(lane: Any, op: Any, count: int, out: int) -> None:
    """Enqueue ``out *= beta``: there are no products to add."""
    dtype = _matrix_of(op).dtype
    if not count:
        return
    if op.beta:
        scale(lane.stream, out, count, 1, count, 0, 1, op.beta, dtype)
    else:
        lane.stream.fill(out, bytes(1), count * dtype.itemsize)


PART = CudaPart(
    open=SparseLibrary,
    libraries=(CUSPARSE, CUB),
    programs=(Source("sparse", lambda code: ("sparse.cu", "")),),
    program="sparse",
)
