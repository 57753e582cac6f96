"""Ops of cuBLAS on triangular, symmetric and Hermitian matrices, and sums of matrices.

A C-order matrix is the transpose of cuBLAS's column-major one, and results are computed transposed. So the triangle stands on the other side and is the other
one of the two, and what is done to it stays the same. No element moves for this.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from accel import Transpose
from accel.ops.blas import stored
from accel.ops.blas_operands import applied
from accel_cuda.families.cublas import ADDRESSES, LETTERS, blas_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from accel.backend import Kernel
    from accel_cuda.core.stream import CudaStream

__all__ = ["KERNELS", "commands", "count_calls", "count_launches", "write_addresses"]

_WORD = 8
"""Bytes of an address."""
_BLOCK = 256

_NONE, _TURNED, _CONJUGATE = Transpose.NONE, Transpose.TRANSPOSE, Transpose.CONJUGATE
_OTHER_SIDE = {"left": "right", "right": "left"}
# The most triangles of a batch, and the fewest rows of each, that are solved one by one.
_FEW, _LARGE = 8, 64
# How many matrices one call solves for: each has two addresses.
_TOGETHER = ADDRESSES // (2 * _WORD)
# Rows of a triangle for which a solution takes a launch, and launches besides these.
_ROWS_PER_LAUNCH, _LAUNCHES = 16, 4
# Commands of any other call: a product whose sums are split over blocks takes two launches, and there may be a fill or a copy.
_PER_CALL = 3
# The most elements of matrices of which a batch is added in one call behind copies of a single one: with more, the copies take longer than calls do.
_SMALL = 1 << 16


def write_addresses(stream: CudaStream, out: int, first: int, step: int, count: int) -> None:
    """Enqueue the writing of the addresses of matrices that lie ``step`` bytes apart."""
    stream.launch(stream.functions["addresses_apart"], -(-count // _BLOCK), _BLOCK, out, first, step, count)


class _Triangle(NamedTuple):
    """A triangle as it is to cuBLAS: which one, what is done to it in a transposed product, and its leading dimension."""

    lower: bool
    trans: Transpose
    ld: int


def _triangle(op: Any) -> _Triangle:
    """Return ``op.a`` for a product that is computed transposed. What lies by columns already is the same triangle, and is transposed instead."""
    ld, trans = stored(op.a, op.trans)
    return _Triangle(op.lower is (trans is not op.trans), trans, ld)


def _ger(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply a column by a row: cuBLAS's ger adds to what is there, and has no 16-bit floats."""
    m, n = op.x.shape[0], op.y.shape[0]
    turn = _CONJUGATE if op.conjugate else _TURNED
    blas_of(lane.stream).gemm(turn, _NONE, n, m, 1, op.alpha, inputs[1], 1, inputs[0], 1, op.beta, outputs[0], n, op.x.dtype)


def _triangular_vector(kind: str, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply or solve in place, behind a copy. The conjugate of a C-order matrix is no operation of trmv and trsv: it is one of matrices of one row."""
    (a, x), out, n, dtype = inputs, outputs[0], op.x.shape[0], op.a.dtype
    lane.stream.ready()
    if not n:
        return
    blas = blas_of(lane.stream)
    if x != out:
        lane.stream.copy(out, x, op.x.nbytes)
    triangle, letter = _triangle(op), LETTERS[dtype]
    operation, diagonal, fill = blas.operation(dtype), blas.diagonal[op.unit_diagonal], blas.fill[triangle.lower]
    if op.trans is _CONJUGATE and dtype.is_complex:
        alpha, _ = blas.factors(dtype, 1.0, 0.0)
        result = (out, 1) if kind == "trm" else ()
        blas.call(
            f"{letter}{kind}m_64", blas.side["right"], fill, operation[_CONJUGATE], diagonal, 1, n, alpha, a, triangle.ld, out, 1, *result
        )
    else:
        trans = operation[_TURNED if triangle.trans is _NONE else _NONE]
        blas.call(f"{letter}{kind}v_64", fill, trans, diagonal, n, a, triangle.ld, out, 1)


def _matrices(op: Any, inputs: Sequence[int], out: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the addresses of a, b and the result, and how many rows these have, for each call: cuBLAS has no strided batches with one triangle.

    With one triangle on the right, the rows of a batch are those of one matrix.
    """
    a, b = inputs
    rows, columns = op.b.shape[-2:]
    if _has_one_call(op):
        yield a, b, out, rows * op.batch_count
        return
    step_a, step_b, step = _apart(op.a), _apart(op.b), rows * columns * op.b.dtype.itemsize
    for i in range(op.batch_count):
        yield a + i * step_a, b + i * step_b, out + i * step, rows


def _has_one_call(op: Any) -> bool:
    """Return whether the batch of a product with one triangle, if there is one, is one matrix of more rows."""
    return len(op.a.shape) == 2 and (op.side == "right" or len(op.b.shape) == 2)


def _is_empty(op: Any) -> bool:
    return 0 in op.b.shape or 0 in op.a.shape


def _triangular(kind: str, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply or solve. Solutions are made in place, behind a copy."""
    stream, dtype = lane.stream, op.a.dtype
    stream.ready()
    if _is_empty(op):
        return
    blas = blas_of(lane.stream)
    triangle, columns = _triangle(op), op.b.shape[-1]
    form = (
        blas.side[_OTHER_SIDE[op.side]],
        blas.fill[triangle.lower],
        blas.operation(dtype)[triangle.trans],
        blas.diagonal[op.unit_diagonal],
    )
    alpha, _ = blas.factors(dtype, op.alpha, 0.0)
    name = f"{LETTERS[dtype]}{kind}_64"
    if kind == "trsm" and _is_together(op):
        _solve_together(lane, op, inputs, outputs[0], (*form, columns, op.b.shape[-2], alpha), triangle.ld)
        return
    for a, b, out, rows in _matrices(op, inputs, outputs[0]):
        if kind == "trmm":
            blas.call(name, *form, columns, rows, alpha, a, triangle.ld, b, columns, out, columns)
            continue
        if b != out:
            stream.copy(out, b, rows * columns * dtype.itemsize)
        blas.call(name, *form, columns, rows, alpha, a, triangle.ld, out, columns)


def _is_together(op: Any) -> bool:
    """Return whether one call solves a batch: cuBLAS has one for many matrices, which is slow for large ones."""
    count: int = op.batch_count
    has_many = len(op.a.shape) == 3
    return count > 1 and (has_many or op.side == "left") and (count > _FEW or op.a.shape[-1] < _LARGE)


def _solve_together(lane: Any, op: Any, inputs: Sequence[int], result: int, form: tuple[int, ...], ld: int) -> None:
    """Solve a batch, behind copies, as many matrices in a call as there is room for their addresses."""
    stream, blas, letter = lane.stream, blas_of(lane.stream), LETTERS[op.a.dtype]
    step_a, columns = _apart(op.a), op.b.shape[-1]
    step = op.b.shape[-2] * columns * op.a.dtype.itemsize
    if len(op.b.shape) == 2:
        for i in range(op.batch_count):
            stream.copy(result + i * step, inputs[1], step)
    elif inputs[1] != result:
        stream.copy(result, inputs[1], op.batch_count * step)
    for start in range(0, op.batch_count, _TOGETHER):
        count = min(_TOGETHER, op.batch_count - start)
        triangles, matrices = blas.addresses, blas.addresses + _WORD * count
        write_addresses(stream, triangles, inputs[0] + start * step_a, step_a, count)
        write_addresses(stream, matrices, result + start * step, step, count)
        blas.call(f"{letter}trsm_batched_64", *form, triangles, ld, matrices, columns, count)


def _apart(a: Any) -> int:
    """Return how many bytes the matrices of several lie apart; 0 of one."""
    if len(a.shape) == 2:
        return 0
    step: int = a.strides[0] if a.is_strided else a.shape[-2] * a.shape[-1]
    return step * int(a.dtype.itemsize)


def _symmetric(kind: str, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    dtype, n, columns = op.a.dtype, op.a.shape[-1], op.b.shape[-1]
    lane.stream.ready()
    if _is_empty(op):
        return
    blas = blas_of(lane.stream)
    alpha, beta = blas.factors(dtype, op.alpha, op.beta)
    name = f"{LETTERS[dtype]}{kind if dtype.is_complex else 'symm'}_64"
    side, fill = blas.side[_OTHER_SIDE[op.side]], blas.fill[not op.lower]
    for a, b, out, rows in _matrices(op, inputs, outputs[0]):
        blas.call(name, side, fill, columns, rows, alpha, a, n, b, columns, beta, out, columns)


def _update(kind: str, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Compute one triangle; the other one of a new buffer is 0."""
    a, dtype, out, count = op.a, op.a.dtype, outputs[0], op.batch_count
    n, k = applied(a.shape, op.trans)
    lane.stream.ready()
    if not n or not count:
        return
    blas = blas_of(lane.stream)
    if op.out is None:
        lane.stream.fill(out, bytes(dtype.itemsize), count * n * n)
    alpha, beta = blas.factors(dtype, op.alpha, op.beta)
    turn = _CONJUGATE if kind == "herk" and dtype.is_complex else _TURNED
    trans = blas.operation(dtype)[turn if op.trans is _NONE else _NONE]
    name = f"{LETTERS[dtype]}{kind if dtype.is_complex else 'syrk'}_64"
    fill, ld, apart, step = blas.fill[not op.lower], stored(a, _NONE)[0], _apart(a), n * n * dtype.itemsize
    for i in range(count):
        blas.call(name, fill, trans, n, k, alpha, inputs[0] + i * apart, ld, beta, out + i * step, n)


class _Term(NamedTuple):
    """An operand of a sum: where it is, how many bytes its matrices lie apart (0 of one), its leading dimension and what is done to it."""

    factor: int
    place: int
    apart: int
    ld: int
    turn: Transpose


def _geam(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Add matrices. cuBLAS has no batches of sums: where nothing is transposed, the rows of a batch are those of one matrix."""
    dtype, count, out = op.a.dtype, op.batch_count, outputs[0]
    rows, columns = applied(op.a.shape, op.transpose_a)
    lane.stream.ready()
    if not (rows and columns and count):
        return
    blas = blas_of(lane.stream)
    alpha, beta = blas.factors(dtype, op.alpha, op.beta)
    a = _Term(alpha, inputs[0], _apart(op.a), op.a.shape[-1], op.transpose_a)
    b = _Term(beta, inputs[1], _apart(op.b), op.b.shape[-1], op.transpose_b)
    operation, name, step = blas.operation(dtype), f"{LETTERS[dtype]}geam_64", rows * columns * dtype.itemsize

    def add(first: _Term, second: _Term, height: int, i: int = 0) -> None:
        blas.call(
            name, operation[first.turn], operation[second.turn], columns, height, first.factor, first.place + i * first.apart, first.ld,
            second.factor, second.place + i * second.apart, second.ld, out + i * step, columns,
        )  # fmt: skip

    if _is_tall(op):
        add(a, b, rows * count)
        return
    one, many = (b, a) if len(op.a.shape) == 3 else (a, b)
    if not _is_spread(op) or many.place == out:
        for i in range(count):
            add(a, b, rows, i)
    else:
        # The single matrix is copied into the result as often as it is needed, in twice as many places each time; the batch is added to it.
        lane.stream.copy(out, one.place, step)
        filled = 1
        while filled < count:
            more = min(filled, count - filled)
            lane.stream.copy(out + filled * step, out, more * step)
            filled += more
        add(many, one._replace(place=out), rows * count)


def _is_tall(op: Any) -> bool:
    """Return whether a sum is one of two matrices, which may be those whose rows are those of batches."""
    if len(op.a.shape) == len(op.b.shape) == 2:
        return True
    return len(op.a.shape) == len(op.b.shape) and op.transpose_a is _NONE and op.transpose_b is _NONE


def _is_spread(op: Any) -> bool:
    """Return whether a single matrix is copied into the result, unless that is the batch itself, and many small matrices are then added to it in one call."""
    if op.transpose_a is not _NONE or op.transpose_b is not _NONE or len(op.a.shape) == len(op.b.shape):
        return False
    # A matrix whose factor is 0 is not read.
    factor = op.alpha if len(op.a.shape) == 2 else op.beta
    return bool(factor) and op.batch_count > _FEW and op.a.shape[-2] * op.a.shape[-1] <= _SMALL


def _is_in_place(op: Any) -> bool:
    """Return whether a sum is written over its batch."""
    many = op.a if len(op.a.shape) == 3 else op.b
    return op.out is not None and (op.out.buffer, op.out.offset) == (many.buffer, many.offset)


def _count_matrices(op: Any) -> int:
    """Return how many matrices cuBLAS is called for, at most."""
    count: int = getattr(op, "batch_count", 1)
    if count <= 1 or op.kind in ("syrk", "herk"):
        return count
    is_one = _is_tall(op) or (_is_spread(op) and not _is_in_place(op)) if op.kind == "geam" else _has_one_call(op)
    return 1 if is_one else count


def count_calls(op: Any) -> int:
    """Return how many calls an op takes at most; those that fill, copy and write addresses beside a call are not counted."""
    count = _count_matrices(op)
    # A single right-hand side is copied for each matrix.
    return -(-count // _TOGETHER) if op.kind == "trsm" and len(op.b.shape) == 3 and _is_together(op) else count


def _launches(op: Any) -> int:
    """Return how many commands a call takes at most."""
    is_triangular = op.kind in ("trmv", "trsv", "trmm", "trsm")
    # A copy, and what cuBLAS launches for blocks of rows.
    return _LAUNCHES + int(op.a.shape[-1]) // _ROWS_PER_LAUNCH if is_triangular else _PER_CALL


def count_launches(op: Any) -> int:
    """Return how many commands the calls of :func:`count_calls` take at most."""
    return _launches(op) * count_calls(op)


def commands(op: Any) -> int:
    """Return how many commands an op enqueues at most."""
    return _launches(op) * _count_matrices(op) + (1 + int(op.batch_count).bit_length() if op.kind == "geam" and _is_spread(op) else 0)


KERNELS: Mapping[str, Kernel] = {
    "ger": _ger,
    "trmv": partial(_triangular_vector, "trm"),
    "trsv": partial(_triangular_vector, "trs"),
    "trmm": partial(_triangular, "trmm"),
    "trsm": partial(_triangular, "trsm"),
    "symm": partial(_symmetric, "symm"),
    "hemm": partial(_symmetric, "hemm"),
    "syrk": partial(_update, "syrk"),
    "herk": partial(_update, "herk"),
    "geam": _geam,
}
