"""cuSPARSE's descriptors of one context: made for one kind of call on matrices of one size, and pointed to the operands of each op."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from accel import DType, Transpose, UnsupportedError
from accel_cuda.core.libraries import VendorLibrary, load_module
from accel_cuda.core.library_handle import StreamHandles
from accel_cuda.core.memo import Memo
from accel_cuda.core.plan_cache import PlanCache
from accel_cuda.errors import error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["CUSPARSE", "KEPT", "Matrix", "Plan", "SparsePlans", "SparseSpec"]

CUSPARSE = VendorLibrary("cusparse", "nvidia-cusparse", "nvmath.bindings.cusparse", "cuSPARSEError")

KEPT = 256
"""How many plans a context keeps; see :class:`~accel_cuda.core.plan_cache.PlanCache`. They are in host memory."""

_ANY_ADDRESS = 256
"""Stands for operands where the library is asked how much memory a call works in: it reads none of them."""

_DATA = {
    DType.FLOAT16: "CUDA_R_16F",
    DType.BFLOAT16: "CUDA_R_16BF",
    DType.FLOAT32: "CUDA_R_32F",
    DType.FLOAT64: "CUDA_R_64F",
    DType.COMPLEX64: "CUDA_C_32F",
    DType.COMPLEX128: "CUDA_C_64F",
}
_COMPUTED = {DType.FLOAT16: DType.FLOAT32, DType.BFLOAT16: DType.FLOAT32}
_INDICES = {DType.INT32: 2, DType.INT64: 3}  # cusparseIndexType_t
_OPERATIONS = {Transpose.NONE: 0, Transpose.TRANSPOSE: 1, Transpose.CONJUGATE: 2}  # cusparseOperation_t
_SOLVES = ("spsv", "spsm")
_UNRECORDED = ("turn", *_SOLVES)
"""Calls that are not recorded: replays of csr2csc_ex2 read an illegal address, and SpSM's analysis ends the process by SIGFPE."""
_FUNCTIONS = {
    "spmv": "sp_mv",
    "spmm": "sp_mm",
    "sddmm": "sddmm",
    "todense": "sparse_to_dense",
    "spsv": "sp_sv",
    "spsm": "sp_sm",
    "turn": "csr2csc_ex2",
}
_SUMS = {
    DType.FLOAT32: "scsrgeam2",
    DType.FLOAT64: "dcsrgeam2",
    DType.COMPLEX64: "ccsrgeam2",
    DType.COMPLEX128: "zcsrgeam2",
}
_ROWS, _BASE, _DEFAULT = 2, 0, 0  # the order of C, indices from 0 on, and the algorithm that the library chooses
_TURN = 1  # csr2csc: the algorithm that keeps elements in order


class Matrix(NamedTuple):
    """A sparse matrix as a descriptor has it."""

    form: str
    shape: tuple[int, int]
    nnz: int
    dtype: DType
    index_type: DType
    block: tuple[int, int] = (1, 1)


class SparseSpec(NamedTuple):
    """A call: the key of its plan.

    Attributes
    ----------
    call
        ``"spmv"``, ``"spmm"``, ``"todense"``, ``"sddmm"``, ``"spsv"``, ``"spsm"``; ``"turn"``, which makes csc of csr; or ``"add"``.
    matrix
        The sparse matrix; of a sum, the first.
    dense
        Shapes of the dense operands, in the order of the call.
    turns
        What is done to the first two operands.
    lower, unit
        Of a triangular system: which triangle, and whether the diagonal is 1.
    nnz
        Of a sum: how many elements the second matrix has.
    """

    call: str
    matrix: Matrix
    dense: tuple[tuple[int, ...], ...] = ()
    turns: tuple[Transpose, Transpose] = (Transpose.NONE, Transpose.NONE)
    lower: bool = True
    unit: bool = False
    nnz: int = 0


class Plan:
    """The descriptors of one call.

    Attributes
    ----------
    matrix : int
        Descriptor of the sparse matrix, or of all three of a sum; 0 of ``"turn"``.
    dense : list of int
        Those of the dense operands.
    factors : ndarray
        The two factors, where the library reads them during the call.
    arguments : tuple of int
        Of the call, but the handle and the memory.
    nbytes : int
        How much memory the call works in.
    owned : list
        Descriptors that end with the plan, each with the function that destroys it.
    """

    __slots__ = ("arguments", "dense", "factors", "matrix", "nbytes", "owned")

    def __init__(self, dtype: DType) -> None:
        self.matrix = 0
        self.dense: list[int] = []
        self.factors = np.ones(2, dtype.numpy)  # not 0: `SpMM_bufferSize` of csr returns 0 for alpha = 0
        self.arguments: tuple[int, ...] = ()
        self.nbytes = 0
        self.owned: list[tuple[Callable[[int], object], int]] = []


class SparsePlans(StreamHandles):
    """The plans of one context, a handle for each of its streams, and how much memory each call works in. Any thread may call it.

    Parameters
    ----------
    context
        The context.

    Attributes
    ----------
    cache : PlanCache
        Call -> plan.
    sizes : Memo
        Call -> bytes that it works in, of those that were measured.
    """

    def __init__(self, context: CudaContext) -> None:
        super().__init__(CUSPARSE)
        self._data: Any = load_module("nvmath", "nvmath-python").CudaDataType
        self._context = context
        try:
            with context.section:
                self._handle = int(self._bindings.create())
        except self._error as error:
            raise self._failure(error, "create") from error
        self.cache: PlanCache[SparseSpec, Plan] = PlanCache(self._make, self._destroy, KEPT)
        self.sizes: Memo[SparseSpec, int] = Memo()

    def type_of(self, dtype: DType) -> int:
        """Return the library's number of a dtype."""
        return int(self._data[_DATA[dtype]])

    def measure(self, spec: SparseSpec) -> None:
        """See that :attr:`sizes` has a call. May block."""
        if spec not in self.sizes:
            self.sizes[spec] = self.cache.prepare(spec).nbytes

    def run(
        self, stream: CudaStream, spec: SparseSpec, matrix: Sequence[int], dense: Sequence[int], scratch: int, alpha: complex = 1.0,
        beta: complex = 0.0,
    ) -> None:  # fmt: skip
        """Enqueue a call; the context is current. May block where the plan is not ready.

        Parameters
        ----------
        stream, spec
            Where it goes, and what it is.
        matrix
            Addresses of the sparse matrix: data, indices and indptr. Of ``"turn"``, those of the result come next; of ``"add"``, those of the second matrix and
            of the result, and the number of its elements.
        dense
            Addresses of the dense operands.
        scratch
            Memory to work in, as much as was measured.
        alpha, beta
            Factors.

        Raises
        ------
        UnsupportedError
            If the stream is captured and the call cannot be part of a graph.
        """
        if stream.is_capturing and spec.call in _UNRECORDED:
            raise UnsupportedError(
                f"cuSPARSE's {spec.call} cannot be part of a graph",
                op=spec.call,
                remedy="Send it outside of the graph, and give the graph its result.",
            )
        handle = self.handle(stream)
        with self.cache.use(spec, stream) as plan:
            try:
                self._point(plan, spec, matrix, dense)
                plan.factors[0], plan.factors[1] = (alpha, beta) if spec.matrix.dtype.is_complex else (alpha.real, beta.real)
                self._call(handle.value, plan, spec, matrix, scratch)
            except self._error as error:
                raise handle.failure(error, spec.call) from error

    def close(self) -> None:
        """Destroy the plans. May block; the streams have ended, and the context is healthy."""
        self.cache.close()
        with self._context.section, contextlib.suppress(self._error):  # what else there is is given back all the same
            self._bindings.destroy(self._handle)

    def _point(self, plan: Plan, spec: SparseSpec, matrix: Sequence[int], dense: Sequence[int]) -> None:
        """Let the descriptors name the operands of this op."""
        sparse = self._bindings
        if spec.call not in ("turn", "add"):
            data, indices, indptr = matrix
            if spec.matrix.form == "bsr":  # the library has nothing that points such a descriptor elsewhere
                sparse.destroy_sp_mat(plan.matrix)
                plan.owned.pop()
                self._describe_matrix(plan, spec.matrix, indptr, indices, data)
                plan.arguments = self._arguments(plan, spec, self.type_of(_COMPUTED.get(spec.matrix.dtype, spec.matrix.dtype)))
            elif spec.matrix.form == "coo":
                sparse.coo_set_pointers(plan.matrix, indptr, indices, data)
            else:
                (sparse.csr_set_pointers if spec.matrix.form == "csr" else sparse.csc_set_pointers)(plan.matrix, indptr, indices, data)
        for descriptor, shape, address in zip(plan.dense, spec.dense, dense, strict=True):
            (sparse.dn_vec_set_values if len(shape) == 1 else sparse.dn_mat_set_values)(descriptor, address)

    def _call(self, handle: int, plan: Plan, spec: SparseSpec, matrix: Sequence[int], scratch: int) -> None:
        sparse = self._bindings
        if spec.call == "turn":
            sparse.csr2csc_ex2(handle, *self._turned(spec.matrix, matrix), scratch)
        elif spec.call == "add":
            self._add(handle, plan, spec, matrix, scratch)
        elif spec.call in _SOLVES:
            self._solve(handle, plan, _FUNCTIONS[spec.call], scratch)
        else:
            getattr(sparse, _FUNCTIONS[spec.call])(handle, *plan.arguments, scratch)

    def _turned(self, matrix: Matrix, addresses: Sequence[int]) -> tuple[int, ...]:
        """Return the arguments of ``csr2csc_ex2`` but the handle and the memory."""
        data, indices, indptr, made, made_indices, made_indptr = addresses
        kind = self.type_of(matrix.dtype)
        return (*matrix.shape, matrix.nnz, data, indptr, indices, made, made_indptr, made_indices, kind, 1, _BASE, _TURN)

    def _sum(self, plan: Plan, spec: SparseSpec, matrix: Sequence[int]) -> tuple[Any, ...]:
        """Return the arguments of ``csrgeam2`` but the handle and the memory. Where there is no element, an address is 0, which the library refuses."""
        a, ind_a, ptr_a, b, ind_b, ptr_b, made, made_indices, made_indptr = (each or _ANY_ADDRESS for each in matrix[:9])
        alpha = plan.factors.ctypes.data
        first = alpha, plan.matrix, spec.matrix.nnz, a, ptr_a, ind_a
        second = alpha + plan.factors.itemsize, plan.matrix, spec.nnz, b, ptr_b, ind_b
        return (*spec.matrix.shape, *first, *second, plan.matrix, made, made_indptr, made_indices)

    def _add(self, handle: int, plan: Plan, spec: SparseSpec, matrix: Sequence[int], scratch: int) -> None:
        """Enqueue a sum in two steps. The first writes indptr, and the number of elements to the device: the host does not wait for it."""
        sparse, descriptor = self._bindings, plan.matrix
        rows, columns, _, _, nnz_a, _, ptr_a, ind_a, _, _, nnz_b, _, ptr_b, ind_b, _, _, made_indptr, _ = self._sum(plan, spec, matrix)
        first, second = (descriptor, nnz_a, ptr_a, ind_a), (descriptor, nnz_b, ptr_b, ind_b)
        sparse.set_pointer_mode(handle, int(sparse.PointerMode.DEVICE))
        try:
            sparse.xcsrgeam2nnz(handle, rows, columns, *first, *second, descriptor, made_indptr, matrix[9], scratch)
        finally:
            sparse.set_pointer_mode(handle, int(sparse.PointerMode.HOST))
        getattr(sparse, _SUMS[spec.matrix.dtype])(handle, *self._sum(plan, spec, matrix), scratch)

    def _solve(self, handle: int, plan: Plan, name: str, scratch: int) -> None:
        """Analyse a triangular matrix, whose elements may be others each time, and solve."""
        sparse = self._bindings
        descriptor, destroy = int(getattr(sparse, f"{name}_create_descr")()), getattr(sparse, f"{name}_destroy_descr")
        try:
            getattr(sparse, f"{name}_buffer_size")(handle, *plan.arguments, descriptor)
            getattr(sparse, f"{name}_analysis")(handle, *plan.arguments, descriptor, scratch)
            getattr(sparse, f"{name}_solve")(handle, *plan.arguments, descriptor)
        finally:
            destroy(descriptor)

    def _make(self, spec: SparseSpec) -> Plan:
        computed = _COMPUTED.get(spec.matrix.dtype, spec.matrix.dtype)
        plan = Plan(computed)
        try:
            with self._context.section:
                if spec.call == "add":
                    plan.matrix = int(self._bindings.create_mat_descr())  # a general matrix, whose indices begin at 0
                    plan.owned.append((self._bindings.destroy_mat_descr, plan.matrix))
                elif spec.call != "turn":
                    self._describe(plan, spec)
                    plan.arguments = self._arguments(plan, spec, self.type_of(computed))
                plan.nbytes = self._measured(plan, spec)
        except self._error as error:
            self._destroy(plan)
            raise self._failure(error, f"buffer_size of {spec.call}") from error
        return plan

    def _describe(self, plan: Plan, spec: SparseSpec) -> None:
        """Make the descriptors."""
        sparse, matrix, at = self._bindings, spec.matrix, _ANY_ADDRESS
        kind = self.type_of(matrix.dtype)
        for shape in spec.dense:
            if len(shape) == 1:
                made, destroy = sparse.create_dn_vec(shape[0], at, kind), sparse.destroy_dn_vec
            else:
                made, destroy = sparse.create_dn_mat(*shape, shape[1], at, kind, _ROWS), sparse.destroy_dn_mat
            plan.dense.append(int(made))
            plan.owned.append((destroy, plan.dense[-1]))
        self._describe_matrix(plan, matrix, at, at, at)
        if spec.call in _SOLVES:
            for name, value in (("FILL_MODE", not spec.lower), ("DIAG_TYPE", spec.unit)):
                held = np.array([int(value)], np.int32)
                sparse.sp_mat_set_attribute(plan.matrix, int(sparse.SpMatAttribute[name]), held.ctypes.data, held.nbytes)

    def _describe_matrix(self, plan: Plan, matrix: Matrix, indptr: int, indices: int, data: int) -> None:
        """Make the descriptor of the sparse matrix, the last one that the plan owns."""
        sparse, kind, index = self._bindings, self.type_of(matrix.dtype), _INDICES[matrix.index_type]
        if matrix.form == "coo":
            made = sparse.create_coo(*matrix.shape, matrix.nnz, indptr, indices, data, index, _BASE, kind)
        elif matrix.form == "bsr":
            (rows, columns), (height, width) = matrix.shape, matrix.block
            counts = rows // height, columns // width, matrix.nnz // (height * width), height, width
            made = sparse.create_bsr(*counts, indptr, indices, data, index, index, _BASE, kind, _ROWS)
        else:
            create = sparse.create_csr if matrix.form == "csr" else sparse.create_csc
            made = create(*matrix.shape, matrix.nnz, indptr, indices, data, index, index, _BASE, kind)
        plan.matrix = int(made)
        plan.owned.append((sparse.destroy_sp_mat, plan.matrix))

    @staticmethod
    def _arguments(plan: Plan, spec: SparseSpec, compute: int) -> tuple[int, ...]:
        """Return the arguments of a call but the handle and the memory."""
        alpha = plan.factors.ctypes.data
        beta, matrix, dense = alpha + plan.factors.itemsize, plan.matrix, plan.dense
        turn, turn_b = (_OPERATIONS[each] for each in spec.turns)
        match spec.call:
            case "todense":
                return matrix, dense[0], _DEFAULT
            case "spmv":
                return turn, alpha, matrix, dense[0], beta, dense[1], compute, _DEFAULT
            case "spmm":
                return turn, turn_b, alpha, matrix, dense[0], beta, dense[1], compute, _DEFAULT
            case "sddmm":
                return turn, turn_b, alpha, dense[0], dense[1], beta, matrix, compute, _DEFAULT
            case "spsv":
                return turn, alpha, matrix, *dense, compute, _DEFAULT
            case _:
                return turn, turn_b, alpha, matrix, *dense, compute, _DEFAULT

    def _measured(self, plan: Plan, spec: SparseSpec) -> int:
        """Return how much memory a call works in."""
        sparse, handle = self._bindings, self._handle
        if spec.call == "add":
            measure = getattr(sparse, f"{_SUMS[spec.matrix.dtype]}_buffer_size_ext")
            return int(measure(handle, *self._sum(plan, spec, (_ANY_ADDRESS,) * 9)))
        name = _FUNCTIONS[spec.call]
        measure = getattr(sparse, f"{name}_buffer_size")
        if spec.call == "turn":
            return int(measure(handle, *self._turned(spec.matrix, (_ANY_ADDRESS,) * 6)))
        if spec.call == "sddmm":  # the one function that writes the size to an address
            size = np.zeros(1, np.uint64)
            measure(handle, *plan.arguments, size.ctypes.data)
            return int(size[0])
        if spec.call not in _SOLVES:
            return int(measure(handle, *plan.arguments))
        descriptor = int(getattr(sparse, f"{name}_create_descr")())
        try:
            return int(measure(handle, *plan.arguments, descriptor))
        finally:
            getattr(sparse, f"{name}_destroy_descr")(descriptor)

    def _destroy(self, plan: Plan) -> None:
        with self._context.section:
            for destroy, descriptor in plan.owned:
                with contextlib.suppress(self._error):  # what else there is is given back all the same
                    destroy(descriptor)

    def _failure(self, error: Any, call: str) -> Exception:
        return error_of(int(error.status), call, library=CUSPARSE.name, device=self._context.description.spec)
