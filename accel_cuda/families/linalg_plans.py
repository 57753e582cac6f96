"""cuBLASLt's products of one context: descriptors and the algorithm for each kind of product, made when it is first needed."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from accel import DType, Transpose, UnsupportedError
from accel.ops.linalg import MatmulMemory
from accel_cuda.core.libraries import VendorLibrary, load_library, load_module
from accel_cuda.core.memo import Memo
from accel_cuda.core.plan_cache import PlanCache
from accel_cuda.core.stream import WORKSPACE
from accel_cuda.core.tuning import quickest
from accel_cuda.errors import error_of

if TYPE_CHECKING:
    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["CUBLASLT", "KEPT", "MatmulPlans", "MatmulSpec", "Operand", "Way"]

CUBLASLT = VendorLibrary("cublasLt", "nvidia-cublas", "nvmath.bindings.cublasLt", "cuBLASLtError")

KEPT = 256
"""How many plans a context keeps; see :class:`~accel_cuda.core.plan_cache.PlanCache`. They are in host memory."""

_CANDIDATES = 8
_NOT_SUPPORTED = 15
_FLOAT8 = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2})
_ELEMENTS = {
    DType.FLOAT16: "CUDA_R_16F",
    DType.BFLOAT16: "CUDA_R_16BF",
    DType.FLOAT32: "CUDA_R_32F",
    DType.FLOAT64: "CUDA_R_64F",
    DType.COMPLEX64: "CUDA_C_32F",
    DType.COMPLEX128: "CUDA_C_64F",
    DType.INT8: "CUDA_R_8I",
    DType.INT32: "CUDA_R_32I",
    DType.FLOAT8_E4M3FN: "CUDA_R_8F_E4M3",
    DType.FLOAT8_E5M2: "CUDA_R_8F_E5M2",
}
# Type of the operands -> what is computed in, and the type of the factors; all others compute in float32.
_COMPUTED = {
    DType.FLOAT64: ("COMPUTE_64F", DType.FLOAT64),
    DType.COMPLEX64: ("COMPUTE_32F", DType.COMPLEX64),
    DType.COMPLEX128: ("COMPUTE_64F", DType.COMPLEX128),
    DType.INT8: ("COMPUTE_32I", DType.INT32),
}
_OPERATIONS = {Transpose.NONE: 0, Transpose.TRANSPOSE: 1, Transpose.CONJUGATE: 2}  # cublasOperation_t
# Addresses of an op -> attributes of the library, whose A is our b.
_ADDRESSES = {
    "bias": "BIAS_POINTER",
    "scale_a": "B_SCALE_POINTER",
    "scale_b": "A_SCALE_POINTER",
    "scale_out": "D_SCALE_POINTER",
    "aux": "EPILOGUE_AUX_POINTER",
    "amax": "AMAX_D_POINTER",
}
_ANY_ADDRESS = 256
_TURNED = "Give b as (n, k) with transpose_b=True, and do not transpose a; let k be a multiple of"
_REMEDIES = {
    DType.INT8: f"{_TURNED} 4, and let views begin at such.",
    **dict.fromkeys(_FLOAT8, f"{_TURNED} 16, and rows of the result of 16 bytes, and let views begin at such."),
}


Way: TypeAlias = Literal["library", "stacks", "integers", "nothing"]
"""cuBLASLt; cuBLAS, if it is a strided batch; a kernel; or nothing, where there is no result, or sums are of no products."""


class Operand(NamedTuple):
    """A matrix as cuBLASLt sees it: column-major, so that it has the rows of ours as columns.

    Attributes
    ----------
    dtype
        Its elements.
    rows, columns
        Its size, after it is transposed.
    transpose
        What is done to it.
    step
        How many matrices further the next one of a batch lies.
    alignment
        What its address is a multiple of, up to 256.
    """

    dtype: DType
    rows: int
    columns: int
    transpose: Transpose
    step: int
    alignment: int

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.rows * self.columns * self.dtype.itemsize


@dataclass(frozen=True, eq=False, slots=True)
class MatmulSpec:
    """A product as it is computed: the key of its plan, by identity.

    Attributes
    ----------
    way
        What computes it.
    a, b, out
        The caller's operands and the result.
    batch
        How many products are one call.
    starts
        With which matrices of a, b and the result each call begins.
    bias, activation
        Dtype of the bias, and name of the activation, as far as there are any.
    addresses
        Which addresses of :class:`accel.ops.linalg.MatmulMemory` there are besides those of a, b and out.
    allow_tf32, autotune
        As the caller gave them.
    """

    way: Way
    a: Operand
    b: Operand
    out: Operand
    batch: int
    starts: tuple[tuple[int, int, int], ...]
    bias: DType | None
    activation: str | None
    addresses: tuple[str, ...]
    allow_tf32: bool
    autotune: bool


class _Plan:
    """Descriptors, and algorithms with the likely quickest first.

    Attributes
    ----------
    description, a, b, c, out : int
        The library's descriptors.
    found : ndarray
        What the library's heuristic answered.
    algorithms : list
        Address of each algorithm, and how many bytes it works in.
    factors : ndarray
        The two factors: 1 of the product, and 0 of what was in the result.
    one, zero : int
        Their addresses.
    address : c_int64
        Where an address lies for the library to read; ``at`` points to it.
    pointers : list
        Attribute of each address that is set, and which of :class:`accel.ops.linalg.MatmulMemory` it is.
    starts : list
        Bytes from the beginning of a, b and the result to those of each call.
    """

    __slots__ = (
        "a",
        "address",
        "algorithms",
        "at",
        "b",
        "c",
        "description",
        "factors",
        "found",
        "one",
        "out",
        "pointers",
        "starts",
        "zero",
    )

    def __init__(self) -> None:
        self.description = self.a = self.b = self.c = self.out = self.one = self.zero = 0
        self.algorithms: list[tuple[int, int]] = []
        self.found: Any = None
        self.factors: Any = None
        self.address = ctypes.c_int64()
        self.at = ctypes.byref(self.address)
        self.pointers: list[tuple[int, int]] = []
        self.starts: list[tuple[int, int, int]] = []


class MatmulPlans:
    """The plans of one context. Any thread may call it.

    A plan's descriptor has the addresses of bias, scales and the like, so one thread at a time uses it. Setting them keeps the GIL: it copies 8 bytes.

    Parameters
    ----------
    context
        The context.
    """

    def __init__(self, context: CudaContext) -> None:
        self._lt = CUBLASLT.load()
        self._error: Any = CUBLASLT.load_error()
        self._data: Any = load_module("nvmath", "nvmath-python").CudaDataType
        self._compute: Any = load_module("nvmath.bindings.cublas", "nvmath-python").ComputeType
        self._attributes: Any = self._lt.MatmulDescAttribute
        self._set_address = _setter(load_library(CUBLASLT.name, CUBLASLT.wheel))
        self._context = context
        try:
            with context.section:
                self._handle = int(self._lt.create())
        except self._error as error:
            raise error_of(int(error.status), "create", library=CUBLASLT.name, device=context.description.spec) from error
        self._cache: PlanCache[MatmulSpec, _Plan] = PlanCache(self._make, self._destroy, KEPT)
        self._tuned: Memo[MatmulSpec, int] = Memo()

    def is_ready(self, spec: MatmulSpec) -> bool:
        """Return whether :meth:`enqueue` does not block. Never blocks."""
        return self._cache.is_ready(spec) and (not spec.autotune or spec in self._tuned)

    def enqueue(self, stream: CudaStream, spec: MatmulSpec, memory: MatmulMemory, workspace: int) -> None:
        """Enqueue a product. The context is current. May block where the product is not ready.

        Raises
        ------
        UnsupportedError
            If cuBLASLt has no algorithm for it.
        """
        with self._cache.use(spec, stream) as plan:
            which = self._which(stream, spec, plan, memory, workspace) if spec.autotune else 0
            for start_a, start_b, start_out in plan.starts:
                each = memory
                if start_a or start_b or start_out:
                    moved = {"a": memory.a + start_a, "b": memory.b + start_b, "out": memory.out + start_out, "aux": memory.aux + start_out}
                    each = memory._replace(**moved)
                if spec.autotune:
                    self._run(stream, plan, which, each, workspace)
                else:
                    self._run_first(stream, plan, each, workspace)

    def close(self) -> None:
        """Destroy the plans. May block; the streams have ended, and the context is healthy."""
        self._cache.close()
        with self._context.section, contextlib.suppress(self._error):  # what else there is is given back all the same
            self._lt.destroy(self._handle)

    def _run(self, stream: CudaStream, plan: _Plan, which: int, memory: MatmulMemory, workspace: int) -> None:
        for attribute, place in plan.pointers:
            plan.address.value = memory[place]
            status = self._set_address(plan.description, attribute, plan.at, 8)
            if status:
                raise stream.failure(status, "matmul_desc_set_attribute", CUBLASLT.name)
        algorithm, nbytes = plan.algorithms[which]
        # What was in the result is not read; where it has another dtype, the library is told of none.
        before = memory.out if plan.c == plan.out else 0
        try:
            self._lt.matmul(
                self._handle, plan.description, plan.one, memory.b, plan.b, memory.a, plan.a, plan.zero, before, plan.c, memory.out, plan.out,
                algorithm, workspace, nbytes, stream.handle,
            )  # fmt: skip
        except self._error as error:
            raise stream.failure(int(error.status), "matmul", CUBLASLT.name) from error

    def _run_first(self, stream: CudaStream, plan: _Plan, memory: MatmulMemory, workspace: int) -> None:
        """Run the likely quickest algorithm; one that the library has found, and refuses to run all the same, gives way to the next."""
        while True:
            try:
                return self._run(stream, plan, 0, memory, workspace)
            except UnsupportedError:
                if len(plan.algorithms) == 1:
                    raise
                del plan.algorithms[0]

    def _which(self, stream: CudaStream, spec: MatmulSpec, plan: _Plan, memory: MatmulMemory, workspace: int) -> int:
        """Return which algorithm is the quickest, by trying them the first time. While a graph is captured nothing can be tried."""
        if spec not in self._tuned and not stream.is_capturing:
            self._tuned[spec] = quickest(stream, len(plan.algorithms), lambda which: self._run(stream, plan, which, memory, workspace))
        return self._tuned.get(spec, 0)

    def _make(self, spec: MatmulSpec) -> _Plan:
        plan = _Plan()
        try:
            with self._context.section:
                self._describe(plan, spec)
                self._find(plan, spec)
        except self._error as error:
            self._destroy(plan)
            if int(error.status) == _NOT_SUPPORTED:
                raise self._unsupported(spec) from error
            raise error_of(
                int(error.status), "matmul_algo_get_heuristic", library=CUBLASLT.name, device=self._context.description.spec
            ) from error
        except UnsupportedError:
            self._destroy(plan)
            raise
        return plan

    def _describe(self, plan: _Plan, spec: MatmulSpec) -> None:
        """Make the descriptors of a plan: b is the library's A, and a its B."""
        lt, attributes = self._lt, self._attributes
        compute, factor = _COMPUTED.get(spec.a.dtype, ("COMPUTE_32F", DType.FLOAT32))
        if spec.allow_tf32:
            compute = "COMPUTE_32F_FAST_TF32"
        plan.factors = np.array([1, 0], factor.numpy)
        plan.one = plan.factors.ctypes.data
        plan.zero = plan.one + factor.itemsize
        plan.pointers = [(int(attributes[_ADDRESSES[name]]), MatmulMemory._fields.index(name)) for name in spec.addresses]
        sizes = spec.a.nbytes, spec.b.nbytes, spec.out.nbytes
        plan.starts = [(a * sizes[0], b * sizes[1], out * sizes[2]) for a, b, out in spec.starts]
        plan.description = int(lt.matmul_desc_create(int(self._compute[compute]), self._type(factor)))
        plan.a, plan.b, plan.out = (self._layout(each, each.dtype, spec.batch) for each in (spec.a, spec.b, spec.out))
        # What float8 results are added to would be bfloat16.
        plan.c = self._layout(spec.out, DType.BFLOAT16, spec.batch) if spec.out.dtype in _FLOAT8 else plan.out
        values = {
            "TRANSA": _OPERATIONS[spec.b.transpose],
            "TRANSB": _OPERATIONS[spec.a.transpose],
            "EPILOGUE": int(lt.Epilogue[_epilogue(spec)]),
        }
        if spec.bias is not None:
            values["BIAS_DATA_TYPE"] = self._type(spec.bias)
        if "aux" in spec.addresses:
            values |= {"EPILOGUE_AUX_LD": spec.out.rows, "EPILOGUE_AUX_BATCH_STRIDE": spec.out.rows * spec.out.columns}
        # The heuristic looks whether there are addresses, and perhaps what they are multiples of.
        values |= {_ADDRESSES[name]: spec.out.alignment if name == "aux" else _ANY_ADDRESS for name in spec.addresses}
        for name, value in values.items():
            self._put(lt.matmul_desc_set_attribute, lt.get_matmul_desc_attribute_dtype, plan.description, attributes[name], value)

    def _layout(self, matrix: Operand, dtype: DType, batch: int) -> int:
        lt = self._lt
        size = (matrix.rows, matrix.columns) if matrix.transpose is Transpose.NONE else (matrix.columns, matrix.rows)
        layout = int(lt.matrix_layout_create(self._type(dtype), *size, size[0]))
        if batch > 1:
            for name, value in (("BATCH_COUNT", batch), ("STRIDED_BATCH_OFFSET", matrix.step * matrix.rows * matrix.columns)):
                attribute = lt.MatrixLayoutAttribute[name]
                self._put(lt.matrix_layout_set_attribute, lt.get_matrix_layout_attribute_dtype, layout, attribute, value)
        return layout

    def _find(self, plan: _Plan, spec: MatmulSpec) -> None:
        """Ask for algorithms."""
        lt, names = self._lt, self._lt.MatmulPreferenceAttribute
        aligned = {"A": spec.b.alignment, "B": spec.a.alignment, "C": spec.out.alignment, "D": spec.out.alignment}
        values = {"MAX_WORKSPACE_BYTES": WORKSPACE, **{f"MIN_ALIGNMENT_{which}_BYTES": nbytes for which, nbytes in aligned.items()}}
        if spec.out.dtype.itemsize <= 2:
            # Parts of sums are not rounded to the result's type before they are added up.
            values["REDUCTION_SCHEME_MASK"] = int(lt.ReductionScheme.COMPUTE_TYPE)
        plan.found = np.zeros(_CANDIDATES, lt.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        preference = int(lt.matmul_preference_create())
        try:
            for name, value in values.items():
                self._put(lt.matmul_preference_set_attribute, lt.get_matmul_preference_attribute_dtype, preference, names[name], value)
            lt.matmul_algo_get_heuristic(
                self._handle,
                plan.description,
                plan.b,
                plan.a,
                plan.c,
                plan.out,
                preference,
                _CANDIDATES,
                plan.found.ctypes.data,
                count.ctypes.data,
            )
        finally:
            lt.matmul_preference_destroy(preference)
        start, step = plan.found.ctypes.data, plan.found.itemsize
        usable = [i for i in range(int(count[0])) if plan.found["state"][i] == 0]
        plan.algorithms = [(start + i * step, int(plan.found["workspace_size"][i])) for i in usable]
        if not usable:
            raise self._unsupported(spec)
        if not spec.autotune:  # the others are for where the first is refused, and work in no more memory
            plan.algorithms = [each for each in plan.algorithms if each[1] <= plan.algorithms[0][1]]

    def _put(self, put: Any, dtype_of: Any, descriptor: int, attribute: Any, value: int) -> None:
        held = np.array([value], dtype_of(int(attribute)))
        put(descriptor, int(attribute), held.ctypes.data, held.nbytes)

    def _type(self, dtype: DType) -> int:
        return int(self._data[_ELEMENTS[dtype]])

    def _unsupported(self, spec: MatmulSpec) -> UnsupportedError:
        a, b, out = spec.a, spec.b, spec.out
        what = f"{a.dtype.value} ({a.columns}, {a.rows}) @ {b.dtype.value} ({b.columns}, {b.rows}) to {out.dtype.value}, {_epilogue(spec)}"
        return UnsupportedError(
            f"cuBLASLt has no algorithm for {what}: matmul_algo_get_heuristic answered NOT_SUPPORTED",
            remedy=_REMEDIES.get(a.dtype, "Leave out what follows the product: bias, activation and aux."),
            code=_NOT_SUPPORTED,
            library=CUBLASLT.name,
            device=self._context.description.spec,
        )

    def _destroy(self, plan: _Plan) -> None:
        lt = self._lt
        with self._context.section, contextlib.suppress(self._error):  # what else there is is given back all the same
            for layout in {plan.a, plan.b, plan.c, plan.out} - {0}:
                lt.matrix_layout_destroy(layout)
            if plan.description:
                lt.matmul_desc_destroy(plan.description)


def _setter(path: str) -> Any:
    """Return the library's function that sets an attribute of a product, to be called with the GIL held."""
    function = ctypes.PyDLL(path).cublasLtMatmulDescSetAttribute
    function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    return function


def _epilogue(spec: MatmulSpec) -> str:
    """Return the name of what follows the product."""
    parts = [
        *([spec.activation.upper()] if spec.activation else []),
        *(["AUX"] if "aux" in spec.addresses else []),
        *(["BIAS"] if spec.bias else []),
    ]
    return "_".join(parts) or "DEFAULT"
