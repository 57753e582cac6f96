"""Products of matrices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.expressions.array import Array, broadcast, cast
from accel.expressions.manipulation import axes_of, known
from accel.expressions.promotion import COMPLEX, FLOATS, promoted
from accel.expressions.reduction import ReductionFunctions
from accel.ops import Einsum, Matmul
from accel.ops.contraction import parsed, sizes_of

if TYPE_CHECKING:
    from accel.ops.linalg import Activation
    from accel.ref import AccelRef

__all__ = ["LinearFunctions", "product"]


def product(batch: Any, a: AccelRef, b: AccelRef, bias: AccelRef | None = None, activation: Activation | None = None) -> AccelRef:
    """Record a product of matrices; transposed views are read where they are."""
    made: AccelRef = batch.run(Matmul(a, b, bias=bias, activation=activation))
    return made


def _einsum(batch: Any, *operands: Any) -> AccelRef:
    *refs, subscripts, optimize = operands
    made: AccelRef = batch.run(Einsum(subscripts, refs, optimize=optimize))
    return made


class LinearFunctions(ReductionFunctions):
    """Products of matrices. The operands are promoted."""

    def matmul(self, x1: Array, x2: Array, /) -> Array:
        """Return ``x1 @ x2``; the dimensions before the last two are broadcast, a vector is one row on the left, one column on the right."""
        first, second = x1.shape, x2.shape
        if len(first) == 2 == len(second) and first[1] == second[0] is not None and x1.dtype is x2.dtype and x1.dtype in FLOATS:
            return self.make((first[0], second[1]), x1.dtype, product, (x1, x2))  # what comes most
        if not first or not second:
            raise InvalidArgumentError("an operand has no dimensions", remedy="Use x1 * x2.")
        if x1.dtype is not x2.dtype:
            dtype = promoted(x1.dtype, x2.dtype)
            x1, x2 = cast(x1, dtype), cast(x2, dtype)
        dtype = x1.dtype
        a = self.expand_dims(x1, 0) if x1.ndim == 1 else x1
        b = self.expand_dims(x2, 1) if x2.ndim == 1 else x2
        if a.shape[-1] != b.shape[-2] and None not in (a.shape[-1], b.shape[-2]):
            raise InvalidArgumentError(f"shapes {x1.shape} and {x2.shape} have no product", remedy="x1 has as many columns as x2 has rows.")
        made = self._matrices(a, b, dtype)
        axes = [-2] * (x1.ndim == 1) + [-1] * (x2.ndim == 1)
        return self.squeeze(made, tuple(axes)) if axes else made

    def _matrices(self, a: Array, b: Array, dtype: DType) -> Array:
        if dtype is DType.BOOL:
            raise InvalidArgumentError("products of bool matrices are not offered", remedy="Convert them: xp.astype(x, xp.int32).")
        stacks = broadcast(a.shape[:-2], b.shape[:-2]) if a.ndim > 2 or b.ndim > 2 else ()
        shape = (*stacks, a.shape[-2], b.shape[-1])
        made = self.make(shape, DType.INT32 if dtype is DType.INT8 else dtype, product, (a, b))
        return cast(made, dtype)

    def vecdot(self, x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
        """Return the sums along ``axis`` of products of the conjugates of ``x1`` and of ``x2``."""
        if not -min(x1.ndim, x2.ndim) <= axis < 0:
            raise InvalidArgumentError(f"axis is {axis}", remedy="Count from the end, from -1.")
        if x1.shape[axis] != x2.shape[axis]:
            raise InvalidArgumentError(f"shapes {x1.shape} and {x2.shape} differ along axis {axis}", remedy="Give both as many elements.")
        dtype = promoted(x1.dtype, x2.dtype)
        return self.sum(self.conj(x1) * x2, axis=axis, dtype=dtype)

    def tensordot(self, x1: Array, x2: Array, /, *, axes: Any = 2) -> Array:
        """Return sums of products along axes of both: the last of ``x1`` and the first of ``x2``, as many as ``axes`` says, or those that it names."""
        if isinstance(axes, int):
            if not 0 <= axes <= min(x1.ndim, x2.ndim):
                raise InvalidArgumentError(
                    f"axes is {axes}, the arrays have {x1.ndim} and {x2.ndim}", remedy="Give as many as both have, or fewer."
                )
            first, second = tuple(range(x1.ndim - axes, x1.ndim)), tuple(range(axes))
        else:
            first, second = axes_of(tuple(axes[0]), x1.ndim), axes_of(tuple(axes[1]), x2.ndim)
        if [x1.shape[each] for each in first] != [x2.shape[each] for each in second]:
            raise InvalidArgumentError(f"shapes {x1.shape} and {x2.shape} differ along axes {axes}", remedy="Name axes of one length.")
        rows = tuple([each for each in range(x1.ndim) if each not in first])
        columns = tuple([each for each in range(x2.ndim) if each not in second])
        left, right = known(tuple([x1.shape[each] for each in rows])), known(tuple([x2.shape[each] for each in columns]))
        inner = math.prod(known(tuple([x1.shape[each] for each in first])))
        a = self.reshape(self.permute_dims(x1, rows + first), (math.prod(left), inner))
        b = self.reshape(self.permute_dims(x2, second + columns), (inner, math.prod(right)))
        return self.reshape(self.matmul(a, b), left + right)

    def einsum(self, subscripts: str, /, *operands: Array, optimize: Any = "auto") -> Array:
        """Return sums of products of any indices, as numpy.einsum has them; see :class:`~accel.ops.Einsum`. It is not in the standard."""
        if not operands:
            raise InvalidArgumentError("no operands are given", remedy="Give one for each term of the subscripts.")
        dtype = operands[0].dtype
        for each in operands[1:]:
            dtype = promoted(dtype, each.dtype)
        if dtype not in FLOATS and dtype not in COMPLEX:
            raise InvalidArgumentError(f"einsum of {dtype.value}", remedy="Give floats or complex numbers: xp.astype(x, xp.float32).")
        shapes = [known(each.shape) for each in operands]
        terms, output = parsed(subscripts, shapes)
        sizes = sizes_of(terms, shapes)
        how = Einsum(subscripts, (), optimize=optimize).optimize
        shape = tuple([sizes[label] for label in output])
        return self.make(shape, dtype, _einsum, tuple([cast(each, dtype) for each in operands]), (subscripts, how))
