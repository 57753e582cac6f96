"""The ``linalg`` family on a GPU: products of cuBLASLt, whose epilogues add the bias and apply the activation; stacks of cuBLAS; a kernel for integers.

cuBLASLt has column-major matrices, and a C-order matrix is the transpose of one: a product is computed as ``D^T = op(B)^T op(A)^T``. So the library's A is
our b, its rows are our columns, and the bias has an element for each of our columns.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from accel import DType, Transpose
from accel.enums import CAPABILITIES
from accel_cuda.core.family import CudaPart, FamilyState, Source, derived
from accel_cuda.core.memo import Memo
from accel_cuda.families.cublas import CUBLAS, blas_of
from accel_cuda.families.kernels import CODES
from accel_cuda.families.linalg_plans import CUBLASLT, MatmulPlans, MatmulSpec, Operand, Way

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel import AccelRef
    from accel.ops.linalg import MatmulMemory
    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["PART", "LinalgLibrary", "alignment_of", "spread"]

_BLAS = CAPABILITIES["gemm"]
_INTEGERS = frozenset({dtype for dtype in CODES if dtype.is_integer and dtype is not DType.INT8})
_SIDE, _LINES = 32, 8
_MOST = 65_535
_ALIGNMENT = 256
_BELOW = _ALIGNMENT - 1
_VECTOR = 16
_ADDRESSES = ("bias", "scale_a", "scale_b", "scale_out", "aux", "amax")


class Spread(NamedTuple):
    """How the products of broadcast stacks are strided batches.

    Attributes
    ----------
    rows
        How many matrices of a are the rows of one.
    batch, step_a, step_b
        Products of one call, and how many matrices further those of a and of b are each time.
    starts
        Where each call begins: a matrix of a, of b, and of the result. Matrices whose rows are those of one count as one.
    """

    rows: int
    batch: int
    step_a: int
    step_b: int
    starts: tuple[tuple[int, int, int], ...]


_NOTHING = Spread(1, 1, 0, 0, ((0, 0, 0),))


def spread(batch: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], *, joins_rows: bool) -> Spread:
    """Return how stacks of shapes ``a`` and ``b`` are multiplied, broadcast to ``batch``.

    Parameters
    ----------
    joins_rows
        Whether rows of one matrix of a are followed by those of the next: with one b for all, such a stack is one matrix.
    """
    steps_a, steps_b = _steps(batch, a), _steps(batch, b)
    count, step_a, step_b = 1, 0, 0
    axes = [axis for axis, length in enumerate(batch) if length != 1]
    while axes:
        axis = axes[-1]
        if count == 1:
            step_a, step_b = steps_a[axis], steps_b[axis]
        elif (steps_a[axis], steps_b[axis]) != (step_a * count, step_b * count):
            break
        count *= batch[axis]
        axes.pop()
    starts = [(0, 0, 0)]
    for axis in axes:
        # Results of this axis lie as many matrices apart as all further axes have.
        step = count
        for other in axes[axes.index(axis) + 1 :]:
            step *= batch[other]
        starts = [(x + i * steps_a[axis], y + i * steps_b[axis], z + i * step) for x, y, z in starts for i in range(batch[axis])]
    if joins_rows and step_a == 1 and step_b == 0:
        return Spread(count, 1, 0, 0, tuple([(x // count, y, z // count) for x, y, z in starts]))
    return Spread(1, count, step_a, step_b, tuple(starts))


def _steps(batch: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    """Return for each axis how many matrices of a stack lie between neighbours; 0 where one is used for all."""
    lengths = (1,) * (len(batch) - len(shape)) + shape
    steps, step = [], 1
    for length in reversed(lengths):
        steps.append(step if length != 1 else 0)
        step *= length
    return steps[::-1]


class LinalgLibrary(FamilyState[MatmulPlans]):
    """cuBLASLt in one context, and what its products are."""

    def __init__(self, context: CudaContext) -> None:
        super().__init__(context, MatmulPlans)
        self.kernels = {"matmul": self._matmul}
        self._ran: Memo[MatmulSpec, None] = Memo()

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing ``op`` loads the library, asks it for an algorithm, loads a kernel, or tries several."""
        spec = derived(op, _spec_of)
        if spec.way == "library":
            return self.library is None or not lane.stream.workspaces or not self.library.is_ready(spec)
        return spec.way == "stacks" and (spec not in self._ran or lane.stream.blas is None)

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes an op works in besides the stream's workspace, or ``None`` where the library it needs is not loaded.

        A graph is captured once this is known: the library must not be loaded meanwhile.
        """
        return None if self.library is None and derived(op, _spec_of).way == "library" else _bias_room(op)

    def measure(self, op: Any) -> None:
        """Load the library. May block."""
        self.loaded()

    def commands(self, op: Any) -> int:
        """Return how many commands an op enqueues at most; see :class:`accel.backend.CountsCommands`."""
        spec = derived(op, _spec_of)
        # A product whose sums are split over blocks takes two launches.
        return 2 * len(spec.starts) + (_bias_room(op) > 0)

    def _matmul(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Enqueue one product, or as many strided batches as broadcasting needs."""
        stream, memory, spec = lane.stream, op.memory(inputs, outputs), derived(op, _spec_of)
        with stream.ready().section:
            if spec.way == "library":
                if _bias_room(op):
                    stream.copy(outputs[-1], memory.bias, op.bias.nbytes)
                    memory = memory._replace(bias=outputs[-1])
                self.loaded().enqueue(stream, spec, memory, stream.prepare_workspace())
            elif spec.way == "stacks":
                _multiply_stacks(stream, spec, memory)
                self._ran[spec] = None
            elif spec.way == "integers":
                _multiply_integers(stream, spec, memory)
            else:
                if memory.amax:
                    stream.fill(memory.amax, bytes(4), 1)
                batch, m, n, _ = op.sizes()
                stream.fill(memory.out, bytes(op.result_type().itemsize), math.prod(batch) * m * n)


def _multiply_stacks(stream: CudaStream, spec: MatmulSpec, memory: MatmulMemory) -> None:
    blas, a, b, out = blas_of(stream), spec.a, spec.b, spec.out
    n, m, k = out.rows, out.columns, a.rows
    ld_a, ld_b = k if a.transpose is Transpose.NONE else m, n if b.transpose is Transpose.NONE else k
    for start_a, start_b, start in spec.starts:
        addresses = memory.a + start_a * a.nbytes, memory.b + start_b * b.nbytes, memory.out + start * out.nbytes
        blas.batched_gemm(
            b.transpose, a.transpose, n, m, k, 1.0, addresses[1], ld_b, b.step * k * n, addresses[0], ld_a, a.step * m * k, 0.0, addresses[2], n,
            m * n, spec.batch, a.dtype, spec.allow_tf32,
        )  # fmt: skip


def _multiply_integers(stream: CudaStream, spec: MatmulSpec, memory: MatmulMemory) -> None:
    a, b, out = spec.a, spec.b, spec.out
    n, m, k = out.rows, out.columns, a.rows
    steps_a = (k, 1) if a.transpose is Transpose.NONE else (1, m)
    steps_b = (n, 1) if b.transpose is Transpose.NONE else (1, k)
    function = stream.functions[f"matmul_{CODES[out.dtype]}"]
    grid = -(-m // _SIDE) * -(-n // _SIDE), min(spec.batch, _MOST)
    for start_a, start_b, start in spec.starts:
        addresses = memory.a + start_a * a.nbytes, memory.b + start_b * b.nbytes, memory.out + start * out.nbytes
        layout = *steps_a, a.step * m * k, *steps_b, b.step * k * n, spec.batch
        stream.launch_wide(function, grid, (_SIDE, _LINES), 0, *addresses, m, n, k, *layout)


def _program(op: Any) -> str:
    return "linalg" if op.a.dtype in _INTEGERS else ""


def alignment_of(ref: AccelRef | None) -> int:
    """Return the largest power of two, up to 256, that an address is a multiple of."""
    if ref is None:
        return _ALIGNMENT
    place = ref.offset | ref.alignment | _ALIGNMENT
    return place & -place


def _alignment_of_results(op: Any) -> int:
    """Return that of all that lies as the result does: the library is told one number for them."""
    return min(alignment_of(op.out), alignment_of(op.aux))


def _bias_room(op: Any) -> int:
    """Return the bytes of an aligned copy of the bias, where it begins between two vectors: the library has no number for the alignment of a bias."""
    if op.bias is None or not (op.bias.offset | op.bias.alignment) % _VECTOR:
        return 0
    nbytes: int = op.bias.nbytes
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


_SPECS: Memo[Any, MatmulSpec] = Memo()
_MAKING = threading.Lock()


def _spec_of(op: Any) -> MatmulSpec:
    """Return what op is to the library; ops that are alike have one."""
    a, b, bias, aux = op.a, op.b, op.bias, op.aux
    at_a, at_b, at_results = a.offset | a.alignment, b.offset | b.alignment, 0
    for ref in (op.out, aux):
        if ref is not None:
            at_results |= ref.offset | ref.alignment
    key = (
        *(a.shape, b.shape, a.dtype, b.dtype, op.out_dtype, op.transpose_a, op.transpose_b, op.activation, op.allow_tf32, op.autotune),
        *(bias is None, aux is None, op.amax is None, op.scale_a is None, op.scale_b is None, op.scale_out is None),
        # The lowest bits alone count: there are other kernels for what begins between two vectors.
        *(at_a & -at_a & _BELOW, at_b & -at_b & _BELOW, at_results & -at_results & _BELOW),
    )
    found = _SPECS.get(key)
    if found is None:
        with _MAKING:  # plans are found by the identity of a spec
            found = _SPECS[key] = _SPECS.get(key) or _new_spec(op)
    return found


def _new_spec(op: Any) -> MatmulSpec:
    batch, m, n, k = op.sizes()
    a, b = op.a, op.b
    turn_a, turn_b = _operation(a, op.transpose_a), _operation(b, op.transpose_b)
    is_nothing = 0 in a.shape or 0 in b.shape  # no result, or sums of no products
    part = _NOTHING if is_nothing else spread(batch, a.shape[:-2], b.shape[:-2], joins_rows=turn_a is Transpose.NONE)
    m *= part.rows
    operands = [
        Operand(a.dtype, k, m, turn_a, part.step_a, alignment_of(a)),
        Operand(b.dtype, n, k, turn_b, part.step_b, alignment_of(b)),
        Operand(op.result_type(), n, m, Transpose.NONE, 1, _alignment_of_results(op)),
    ]
    if len(part.starts) > 1:  # products begin with any matrix
        operands = [each._replace(alignment=min(each.alignment, each.nbytes & -each.nbytes)) for each in operands]
    addresses = tuple([name for name in _ADDRESSES if getattr(op, name) is not None])
    is_bare = op.activation is None and not addresses and not op.autotune
    way: Way = "library"
    if is_nothing:
        way = "nothing"
    elif a.dtype in _INTEGERS:
        way = "integers"
    elif part.batch > 1 and is_bare and op.result_type() is a.dtype and a.dtype in _BLAS:
        way = "stacks"  # cuBLAS has better algorithms for strided batches without more than cuBLASLt finds first
    bias = None if op.bias is None else op.bias_type()
    left, right, out = operands
    return MatmulSpec(way, left, right, out, part.batch, part.starts, bias, op.activation, addresses, op.allow_tf32, op.autotune)


def _source(code: str) -> tuple[str, str]:
    return "linalg.cu", "\n".join(sorted(f"MATMUL({CODES[dtype]})" for dtype in _INTEGERS))


def _operation(ref: AccelRef, transpose: Transpose) -> Transpose:
    return Transpose.TRANSPOSE if transpose is Transpose.CONJUGATE and not ref.dtype.is_complex else transpose


PART = CudaPart(
    open=LinalgLibrary,
    libraries=(CUBLAS, CUBLASLT),
    programs=(Source("linalg", _source, functions=("matmul",), on_demand=True),),
    program={"matmul": _program},
    workspaces=1,
    prepare=blas_of,
)
