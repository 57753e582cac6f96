"""The ``tensor`` family on a GPU: cuTENSOR's calls, where its wheel is installed.

cuTENSOR moves elements, sums and multiplies them in any order, and contracts where copies for a
product of matrices would take longer than the product. Ops of other families compute the rest.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from accel import DType
from accel.ops.contraction import Products, Term
from accel_cuda.core.family import CudaPart, FamilyState, derived
from accel_cuda.core.libraries import VendorLibrary, load_module, version_of
from accel_cuda.core.memo import Memo
from accel_cuda.core.plan_cache import PlanCache
from accel_cuda.core.tuning import quickest
from accel_cuda.errors import error_of
from accel_cuda.families.linalg import alignment_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["CUTENSOR", "KEPT", "PART", "TensorLibrary", "TensorSpec"]

CUTENSOR = VendorLibrary("cutensor", "cutensor-cu13", "nvmath.bindings.cutensor", "cuTENSORError", extra="tensor")

KEPT = 256
"""How many plans a context keeps, in host memory."""

_COMMANDS = 8
"""Commands of an op at most: the library may transpose operands and result, clear it, and add up
parts of sums.
"""

Call: TypeAlias = Literal["contract", "reduce", "permute", "multiply"]

_TYPES: Mapping[DType, tuple[str, str, DType]] = {
    DType.FLOAT16: ("CUDA_R_16F", "COMPUTE_32F", DType.FLOAT32),
    DType.BFLOAT16: ("CUDA_R_16BF", "COMPUTE_32F", DType.FLOAT32),
    DType.FLOAT32: ("CUDA_R_32F", "COMPUTE_32F", DType.FLOAT32),
    DType.FLOAT64: ("CUDA_R_64F", "COMPUTE_64F", DType.FLOAT64),
    DType.COMPLEX64: ("CUDA_C_32F", "COMPUTE_32F", DType.COMPLEX64),
    DType.COMPLEX128: ("CUDA_C_64F", "COMPUTE_64F", DType.COMPLEX128),
}
"""Dtype of a result -> the library's element type, what is computed in, and the type of factors."""

_FIRST = (("DEFAULT", 0),)
_CANDIDATES = (
    *_FIRST,
    *(("DEFAULT_PATIENT", 0), ("GETT", 0), ("GETT", 1), ("GETT", 2), ("TGETT", 0), ("TGETT", 1), ("TTGT", 0)),
)
"""Algorithms, and their kernels counted from the one that the library takes for the quickest."""

_IDENTITY, _ADD, _MULTIPLY = 1, 3, 5  # cutensorOperator_t
_NOT_SUPPORTED = 15


class TensorSpec(NamedTuple):
    """A call: the key of its plan.

    Attributes
    ----------
    call
        What the library computes.
    terms
        The operands, and then the result, without axes of one element. Labels are counted from 0.
    dtypes, alignments
        Of each; an alignment is what the address is a multiple of, up to 256.
    is_reversed
        Whether the second operand of the op is the first one here.
    allow_tf32, autotune
        As the caller gave them, of contractions alone: the library has neither for other calls.
    """

    call: Call
    terms: tuple[Term, ...]
    dtypes: tuple[DType, ...]
    alignments: tuple[int, ...]
    is_reversed: bool
    allow_tf32: bool
    autotune: bool


class _Plan:
    """The kernels of a call, the likely quickest first.

    Attributes
    ----------
    ways : list
        The library's plan of each, and how many bytes it works in.
    factors : ndarray
        1, and 0 for what was in the result.
    """

    __slots__ = ("factors", "ways")

    def __init__(self, factor: DType) -> None:
        self.ways: list[tuple[int, int]] = []
        self.factors = np.array([1, 0], factor.numpy)


class TensorPlans:
    """The plans of one context. Any thread may call it.

    Attributes
    ----------
    sizes : Memo
        Call -> bytes that it works in, of those that were measured.
    """

    def __init__(self, context: CudaContext) -> None:
        self._tensor = CUTENSOR.load()
        self._error: Any = CUTENSOR.load_error()
        self._data: Any = load_module("nvmath", "nvmath-python").CudaDataType
        self._context = context
        try:
            with context.section:
                self._handle = int(self._tensor.create())
        except self._error as error:
            raise self._failure(error, "create") from error
        self.cache: PlanCache[TensorSpec, _Plan] = PlanCache(self._make, self._destroy, KEPT)
        self.sizes: Memo[TensorSpec, int] = Memo()
        self._tuned: Memo[TensorSpec, int] = Memo()

    def is_ready(self, spec: TensorSpec) -> bool:
        """Return whether :meth:`enqueue` does not block. Never blocks."""
        return self.cache.is_ready(spec) and (not spec.autotune or spec in self._tuned)

    def measure(self, spec: TensorSpec) -> None:
        """See that :attr:`sizes` has a call. May block."""
        self.sizes[spec] = max(nbytes for _, nbytes in self.cache.prepare(spec).ways)

    def enqueue(self, stream: CudaStream, spec: TensorSpec, addresses: Sequence[int], scratch: int) -> None:
        """Enqueue a call; the context is current. May block where it is not ready.

        Parameters
        ----------
        addresses
            Of the operands, and of the result.
        scratch
            Memory to work in, as much as was measured.
        """
        with self.cache.use(spec, stream) as plan:
            # While a graph is captured, nothing can be tried.
            if spec.autotune and spec not in self._tuned and not stream.is_capturing:
                self._tuned[spec] = quickest(stream, len(plan.ways), lambda which: self._run(stream, spec, plan, which, addresses, scratch))
            self._run(stream, spec, plan, self._tuned.get(spec, 0) if spec.autotune else 0, addresses, scratch)

    def close(self) -> None:
        """Destroy the plans. May block; the streams have ended, and the context is healthy."""
        self.cache.close()
        # What else there is is given back all the same.
        with self._context.section, contextlib.suppress(self._error):
            self._tensor.destroy(self._handle)

    def _run(self, stream: CudaStream, spec: TensorSpec, plan: _Plan, which: int, addresses: Sequence[int], scratch: int) -> None:
        tensor, handle, (way, nbytes) = self._tensor, self._handle, plan.ways[which]
        one = plan.factors.ctypes.data
        zero, out = one + plan.factors.itemsize, addresses[-1]
        try:
            match spec.call:
                case "contract":
                    tensor.contract(handle, way, one, *addresses[:2], zero, out, out, scratch, nbytes, stream.handle)
                case "reduce":
                    tensor.reduce(handle, way, one, addresses[0], zero, out, out, scratch, nbytes, stream.handle)
                case "permute":
                    tensor.permute(handle, way, one, *addresses, stream.handle)
                case "multiply":
                    tensor.elementwise_binary_execute(handle, way, one, addresses[0], one, *addresses[1:], stream.handle)
        except self._error as error:
            raise stream.failure(int(error.status), spec.call, CUTENSOR.name) from error

    def _make(self, spec: TensorSpec) -> _Plan:
        plan = _Plan(_TYPES[spec.dtypes[-1]][2])
        try:
            with self._context.section, contextlib.ExitStack() as owned:
                operation = self._describe(spec, owned)
                for algorithm, rank in _CANDIDATES if spec.autotune else _FIRST:
                    try:
                        self._add(plan, operation, algorithm, rank)
                    except self._error as error:
                        if not plan.ways or int(error.status) != _NOT_SUPPORTED:
                            raise
        except self._error as error:
            self._destroy(plan)
            raise self._failure(error, f"create_plan of {spec.call}") from error
        return plan

    def _describe(self, spec: TensorSpec, owned: contextlib.ExitStack) -> int:
        """Return the descriptor of the operation.

        ``owned`` destroys it, and those of the tensors, once there are plans.
        """
        tensor, handle, parts = self._tensor, self._handle, []
        for term, dtype, alignment in zip(spec.terms, spec.dtypes, spec.alignments, strict=True):
            layout = len(term.labels), term.lengths, term.strides, int(self._data[_TYPES[dtype][0]]), alignment
            made = int(tensor.create_tensor_descriptor(handle, *layout))
            owned.callback(tensor.destroy_tensor_descriptor, made)
            parts.append((made, term.labels, _IDENTITY))
        compute = "COMPUTE_TF32" if spec.allow_tf32 else _TYPES[spec.dtypes[-1]][1]
        precision = int(getattr(tensor.ComputeDesc, compute)())
        operands, result = [each for part in parts[:-1] for each in part], parts[-1]
        match spec.call:
            case "contract":
                made = tensor.create_contraction(handle, *operands, *result, *result[:2], precision)
            case "reduce":
                made = tensor.create_reduction(handle, *operands, *result, *result[:2], _ADD, precision)
            case "permute":
                made = tensor.create_permutation(handle, *operands, *result[:2], precision)
            case "multiply":
                made = tensor.create_elementwise_binary(handle, *operands, *result[:2], _MULTIPLY, precision)
        owned.callback(tensor.destroy_operation_descriptor, int(made))
        return int(made)

    def _add(self, plan: _Plan, operation: int, algorithm: str, rank: int) -> None:
        """Add a way to compute an operation."""
        tensor, handle, names = self._tensor, self._handle, self._tensor.PlanPreferenceAttribute
        preference = int(tensor.create_plan_preference(handle, int(tensor.Algo[algorithm]), int(tensor.JitMode.NONE)))
        try:
            for name, value in (("CACHE_MODE", 0), ("KERNEL_RANK", rank)):  # the cache of plans is ours
                held = np.array([value], np.int32)
                tensor.plan_preference_set_attribute(handle, preference, int(names[name]), held.ctypes.data, held.nbytes)
            limit = int(tensor.estimate_workspace_size(handle, operation, preference, int(tensor.WorksizePreference.WORKSPACE_DEFAULT)))
            way, nbytes = int(tensor.create_plan(handle, operation, preference, limit)), np.zeros(1, np.uint64)
            plan.ways.append((way, limit))
            tensor.plan_get_attribute(handle, way, int(tensor.PlanAttribute.REQUIRED_WORKSPACE), nbytes.ctypes.data, nbytes.nbytes)
            plan.ways[-1] = way, int(nbytes[0])
        finally:
            tensor.destroy_plan_preference(preference)

    def _destroy(self, plan: _Plan) -> None:
        with self._context.section:
            for way, _ in plan.ways:
                with contextlib.suppress(self._error):  # what else there is is given back all the same
                    self._tensor.destroy_plan(way)

    def _failure(self, error: Any, call: str) -> Exception:
        return error_of(int(error.status), call, library=CUTENSOR.name, device=self._context.description.spec)


class TensorLibrary(FamilyState[TensorPlans]):
    """cuTENSOR in one context, if its wheel is installed."""

    commands = _COMMANDS

    def __init__(self, context: CudaContext) -> None:
        super().__init__(context, TensorPlans)
        self.kernels = {"contract": self._contract}
        if version_of(CUTENSOR.wheel) is not None:
            self.capabilities = {"contract": frozenset(_TYPES)}

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing ``op`` loads the library, makes a plan, uses one for the first time, or tries several."""
        return self.library is None or not self.library.is_ready(derived(op, _spec_of))

    def prepare(self, stream: CudaStream) -> None:
        """Load cuTENSOR, if it is installed and not loaded. May block."""
        if self.capabilities:
            self.loaded()

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes an op works in, or ``None`` if its call has not been measured."""
        return None if self.library is None else self.library.sizes.get(derived(op, _spec_of))

    def measure(self, op: Any) -> None:
        """See that :meth:`scratch_nbytes` knows. May block."""
        self.loaded().measure(derived(op, _spec_of))

    def _contract(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        stream, spec = lane.stream, derived(op, _spec_of)
        operands = inputs[::-1] if spec.is_reversed else inputs
        with stream.ready().section:
            self.loaded().enqueue(stream, spec, (*operands, outputs[0]), outputs[-1])


def _spec_of(op: Any) -> TensorSpec:
    step, refs, result = op.step, op.operands, _packed(op.step.result)
    call: Call = "reduce" if getattr(step, "summed", 0) else "permute"
    terms, is_reversed = step.terms, False
    if len(refs) == 2:
        lying = [term.ordered(result.labels) == (result.lengths, result.strides) for term in terms]
        call = "multiply" if isinstance(step, Products) and any(lying) else "contract"
        is_reversed = call == "multiply" and not lying[1]  # the library's second operand lies as the result does
    if is_reversed:
        terms, refs = terms[::-1], refs[::-1]
    numbers = {label: n for n, label in enumerate(dict.fromkeys([label for term in terms for label in term.labels]))}
    named = tuple([term._replace(labels=tuple([numbers[label] for label in term.labels])) for term in (*terms, result)])
    dtype = next((ref.dtype for ref in refs if ref.dtype.is_complex), refs[0].dtype)
    dtypes, alignments = (*[ref.dtype for ref in refs], dtype), tuple([alignment_of(ref) for ref in (*refs, op.out)])
    is_product = call == "contract"
    return TensorSpec(call, named, dtypes, alignments, is_reversed, op.allow_tf32 and is_product, op.autotune and is_product)


def _packed(term: Term) -> Term:
    """Return a term without axes of one element."""
    axes = [each for each in zip(*term, strict=True) if each[1] != 1]
    return Term(*zip(*axes, strict=True)) if axes else Term((), (), ())


PART = CudaPart(open=TensorLibrary)
