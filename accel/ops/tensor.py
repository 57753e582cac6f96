"""Sums of products of any indices: ``einsum`` and ``tensordot``.

A library contracts them, or they are products of matrices.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from accel.dtype import DType
from accel.enums import BinaryOp, ReduceOp, Transpose
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import Plan, Shape, Spec, check_tf32, op, operand, planned, same_dtype
from accel.ops.composed import ComposedOp
from accel.ops.contraction import Contraction, Layout, Matrices, Path, Products, Sums, contraction, parsed
from accel.ops.elementwise import Binary, Cast
from accel.ops.family import Family
from accel.ops.fields import AXIS, flag, integer
from accel.ops.linalg import Matmul
from accel.ops.namespace import M, OpNamespace, method
from accel.ops.pieces import axes_of, integers
from accel.ops.rearranged import Part
from accel.ops.reduce import Reduce
from accel.ref import AccelRef, view_of

if TYPE_CHECKING:
    from accel.ops.composed import Run

__all__ = ["Einsum", "TensorOps", "Tensordot"]


Optimize: TypeAlias = str | Sequence[str | Sequence[int]]

_DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128)
_MIXED = {DType.FLOAT64, DType.COMPLEX128}
_SEARCHES = ("auto", "greedy", "optimal")
_OPTIMIZE = "Give 'auto', 'greedy', 'optimal', or a path, as opt_einsum.contract_path and numpy.einsum_path return."


@op("tensor")
class _Contracted(ComposedOp):
    """An op whose result is sums of products."""

    _: KW_ONLY
    out: AccelRef | None = None
    allow_tf32: bool = False
    autotune: bool = False

    @abstractmethod
    def given(self) -> tuple[AccelRef, ...]:
        """Return the operands."""

    @abstractmethod
    def contraction(self) -> Contraction:
        """Return how it is computed."""

    def plan(self) -> Plan:
        refs = {f"operand {n}": operand(f"operand {n}", ref) for n, ref in enumerate(self.given())}
        if not refs:
            raise InvalidArgumentError("no operands are given", remedy="Give one for each term of the subscripts.")
        dtype = _result_type(refs)
        if dtype not in _DTYPES:
            raise UnsupportedError(
                f"{self.kind} is not offered for {dtype.value}",
                remedy=f"Convert the operands with elementwise.cast to one of {', '.join(each.value for each in _DTYPES)}.",
            )
        check_tf32(self.allow_tf32, dtype)
        flag("autotune", self.autotune)
        plan = planned(self.out, refs, self.contraction().shape, dtype)
        return self.composed(plan.reads, plan.writes, plan.creates)

    def compose(self, run: Run) -> AccelRef:
        found, refs, out = self.contraction(), list(self.given()), self.out
        into = None if out is not None and out.is_strided else out
        for n, step in enumerate(found.steps, 1):
            operands = tuple([refs[place] for place in step.of])
            to = into if n == len(found.steps) else None
            refs.append(run(_Contract(operands, step, out=to, allow_tf32=self.allow_tf32, autotune=self.autotune)))
        return refs[-1] if out is into else run(Part(refs[-1], ..., out=out))


def _result_type(refs: Mapping[str, AccelRef]) -> DType:
    """Return the dtype of sums of products; complex operands may be among real ones."""
    return DType.COMPLEX128 if {ref.dtype for ref in refs.values()} == _MIXED else same_dtype(**refs)


@op("tensor", kind="contract")
class _Contract(ComposedOp):
    """One step: a product of matrices, a sum, or products of elements.

    Where elements are moved, it is one call of a library, if the backend has such.
    """

    operands: tuple[AccelRef, ...]
    step: Sums | Products | Matrices
    _: KW_ONLY
    out: AccelRef | None = None
    allow_tf32: bool = False
    autotune: bool = False

    def plan(self) -> Plan:
        refs = {f"operand {n}": ref for n, ref in enumerate(self.operands)}
        dtype, step = _result_type(refs), self.step
        plan = planned(self.out, refs, step.result.lengths, dtype)
        is_mixed = any(ref.dtype is not dtype for ref in self.operands)
        is_for_library = step.is_regular and (isinstance(step, Matrices) if is_mixed else step.is_moving)
        return self.composed(plan.reads, plan.writes, plan.creates, "contract" if is_for_library else "", dtype)

    def compose(self, run: Run) -> AccelRef:
        step, out = self.step, self.out
        if isinstance(step, Matrices):
            return self._multiply_matrices(run, step)
        if isinstance(step, Products):
            x, y = (self._seen(run, *each, is_copied=False) for each in zip(self.operands, step.layouts, strict=True))
            return run(Binary(BinaryOp.MUL, x, y, out=out))
        x, ndim = _seen(self.operands[0], step.layout), len(step.layout.lengths)
        if not step.summed:
            return run(Part(x, ..., out=out))
        return run(Reduce(ReduceOp.SUM, x, axis=tuple(range(ndim - step.summed, ndim)), out=out))

    def _multiply_matrices(self, run: Run, step: Matrices) -> AccelRef:
        out, operands = self.out, []
        for ref, layout, shape, is_copied in zip(self.operands, step.layouts, step.shapes, step.copied, strict=True):
            operands.append(self._seen(run, ref, layout, is_copied=is_copied).reshape(shape))
        turn_a, turn_b = (Transpose.TRANSPOSE if is_turned else Transpose.NONE for is_turned in step.transposed)
        a, b = operands
        product = _Product(
            a, b, transpose_a=turn_a, transpose_b=turn_b, allow_tf32=self.allow_tf32, autotune=self.autotune, lengths=step.lengths
        )
        if step.turned is not None:
            return run(_Contract((run(product),), Sums.copy(step.turned), out=out))
        if out is None:
            return run(product)
        stack, m, n, _ = product.sizes()
        run(replace(product, out=out.reshape((*stack, m, n))))
        return out

    def _seen(self, run: Run, ref: AccelRef, layout: Layout, *, is_copied: bool) -> AccelRef:
        """Return an operand as it is seen, in the dtype of the result; or a copy, in order."""
        x, dtype = _seen(ref, layout), _result_type({f"operand {n}": each for n, each in enumerate(self.operands)})
        if x.dtype is not dtype:
            return run(Cast(x, dtype))
        return run(_Contract((ref,), Sums.copy(layout))) if is_copied else x


@op(kind="matmul")
class _Product(Matmul):
    """A product whose result, a buffer of its own, has ``lengths`` as its axes: those that rows and columns are of."""

    lengths: Shape = field(default=(), kw_only=True)

    def plan(self) -> Plan:
        plan = Matmul.plan(self)
        return plan if plan.writes else plan._replace(creates=(Spec(self.lengths, plan.dtype),))


def _seen(ref: AccelRef, layout: Layout) -> AccelRef:
    return view_of(ref, ref.offset, layout.lengths, ref.dtype, layout.strides)


def _operands(name: str, value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _optimize(name: str, value: Any) -> str | Path:
    if isinstance(value, str):
        if value not in _SEARCHES:
            raise InvalidArgumentError(f"optimize is {value!r}", remedy=_OPTIMIZE)
        return value
    if not isinstance(value, (tuple, list)):
        raise InvalidArgumentError(f"optimize is {value!r}", remedy=_OPTIMIZE)
    steps = value[1:] if value and value[0] == "einsum_path" else value
    if not all(isinstance(step, (tuple, list)) for step in steps):
        raise InvalidArgumentError(f"optimize is {value!r}", remedy=_OPTIMIZE)
    return tuple([integers("optimize", step) for step in steps])


@op(convert={"operands": _operands, "optimize": _optimize})
class Einsum(_Contracted):
    """Sums of products of the operands' elements: which indices are multiplied, summed over and kept, ``subscripts`` says as numpy.einsum's do.

    An index of the result is kept, all others are summed over. An index that one operand has twice is its diagonal. ``...`` stands for all other axes, which
    are broadcast. Nothing is conjugated.

    Parameters
    ----------
    subscripts
        ``"ij,jk->ik"``, ``"...ij->...ji"``, ``"ii"``. Without ``->`` the result has the axes of ``...``, then the indices that are there once, in the order of
        the alphabet.
    operands
        Refs of one dtype, one after the other: float16, bfloat16, float32, float64, complex64 or complex128; or of float64 and complex128, whose result is
        complex128. Sums of 16-bit floats are float32; what is between two contractions is rounded to the dtype. Axes of one index have the same length, or
        length 1.
    out
        Buffer to write; it shares no memory with an operand.
    optimize
        The order of contractions: ``"auto"`` is the best one for up to 5 operands, else what a greedy search finds; ``"greedy"``, ``"optimal"``; or a path as
        ``opt_einsum.contract_path`` and ``numpy.einsum_path`` return. The search runs on the loop's thread, once for each kind of call.
    allow_tf32
        As in :class:`~accel.ops.Gemm`.
    autotune
        As in :class:`~accel.ops.Matmul`, for each contraction.
    """

    subscripts: str
    operands: Sequence[AccelRef]
    _: KW_ONLY
    optimize: Optimize = "auto"

    def given(self) -> tuple[AccelRef, ...]:
        return tuple(self.operands)

    def contraction(self) -> Contraction:
        refs = self.given()
        terms, output = parsed(self.subscripts, [ref.shape for ref in refs])
        optimize: Any = self.optimize
        return contraction(terms, tuple([ref.shape for ref in refs]), tuple([ref.strides for ref in refs]), output, optimize)


def einsum(
    subscripts: str,
    *operands: AccelRef,
    out: AccelRef | None = None,
    optimize: Optimize = "auto",
    allow_tf32: bool = False,
    autotune: bool = False,
    timeout: float | None = None,
) -> Einsum:
    """Return the op of these operands."""
    return Einsum(subscripts, operands, out=out, optimize=optimize, allow_tf32=allow_tf32, autotune=autotune, timeout=timeout)


_PAIR = "Give an int, or a pair: the axes of a, and those of b."


def _axes(name: str, value: Any) -> int | tuple[Shape, Shape]:
    """Return a number of axes, or the axes of both operands."""
    if not isinstance(value, (tuple, list)):
        return integer(name, value, _PAIR)
    if len(value) != 2:
        raise InvalidArgumentError(f"axes is {value!r}", remedy=_PAIR)
    return integers(name, value[0]), integers(name, value[1])


@op(convert={"axes": _axes})
class Tensordot(_Contracted):
    """Sums of products along axes of both, as numpy.tensordot has them: the result has the other axes of ``a``, then those of ``b``.

    Parameters
    ----------
    a, b
        Of one dtype, as in :class:`~accel.ops.Einsum`.
    axes
        How many axes are summed over, the last ones of ``a`` and the first ones of ``b``; or a pair: the axes of ``a``, and those of ``b``, an int or as many.
    out
        Buffer to write; it shares no memory with an operand.
    allow_tf32
        As in :class:`~accel.ops.Gemm`.
    autotune
        As in :class:`~accel.ops.Einsum`.
    """

    a: AccelRef
    b: AccelRef
    axes: int | Sequence[int | Sequence[int]] = 2

    def given(self) -> tuple[AccelRef, ...]:
        return self.a, self.b

    def contraction(self) -> Contraction:
        a, b, axes = self.a, self.b, self.axes
        if isinstance(axes, int):
            if not 0 <= axes <= min(a.ndim, b.ndim):
                raise InvalidArgumentError(f"axes is {axes}, and the operands have {a.ndim} and {b.ndim} dimension(s)", remedy=AXIS)
            first, second = tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes))
        else:
            first, second = axes_of(axes[0], a.ndim), axes_of(axes[1], b.ndim)
        if [a.shape[axis] for axis in first] != [b.shape[axis] for axis in second]:
            raise InvalidArgumentError(
                f"shapes {a.shape} and {b.shape} differ along axes {axes}", remedy="Name as many axes of both, of the same lengths."
            )
        left = tuple(range(a.ndim))
        shared = dict(zip(second, first, strict=True))
        right = tuple([shared.get(axis, a.ndim + axis) for axis in range(b.ndim)])
        output = tuple([label for label in left + right if label not in first])
        return contraction((left, right), (a.shape, b.shape), (a.strides, b.strides), output, "auto")


class TensorOps(OpNamespace[M]):
    """Sums of products of any indices. Other ops compute them: elements are moved where they must be, matrices multiplied, and sums made along axes.

    A backend with a library of contractions contracts what is not a product of matrices as it lies.
    """

    __slots__ = ()

    library: ClassVar = "tensor"
    aliases: ClassVar = {
        "contract": ".einsum('ij,jk->ik', a, b)",
        "permute": ".einsum('ijk->kij', x), or arrays.transpose(x, (2, 0, 1))",
    }

    einsum = method(einsum, Einsum)
    tensordot = method(Tensordot)


FAMILY = Family(TensorOps, uses=("tensor", "linalg", "elementwise", "reduce", "arrays"))
