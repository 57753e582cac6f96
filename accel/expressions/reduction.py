"""Functions along axes: sums, means, extremes, counts and differences."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.expressions.array import Array, apply, cast
from accel.expressions.functions import axis_of
from accel.expressions.manipulation import ManipulationFunctions, axes_of
from accel.expressions.promotion import DEFAULT
from accel.expressions.selection import summed

if TYPE_CHECKING:
    from accel.ref import AccelRef

__all__ = ["ReductionFunctions"]


def _reduce(batch: Any, x: AccelRef, name: str, axes: Any, keepdims: bool, ddof: int) -> AccelRef:
    made: AccelRef = batch.reduce(name, x, axis=axes, keepdims=keepdims, ddof=ddof)
    return made


class ReductionFunctions(ManipulationFunctions):
    """Functions along axes; ``axis`` is one, several, or ``None`` for all."""

    def _reduced(self, name: str, x: Array, axis: Any, keepdims: bool, dtype: DType, ddof: int = 0) -> Array:
        axes = axes_of(axis, x.ndim)
        shape = tuple([1 if place in axes else length for place, length in enumerate(x.shape) if keepdims or place not in axes])
        if not axes:  # axis=(): each element on its own; the op takes None for all
            return self._unreduced(name, x, dtype)
        return self.make(shape, dtype, _reduce, (x,), (name, axes[0] if len(axes) == 1 else axes, keepdims, ddof))

    def _unreduced(self, name: str, x: Array, dtype: DType) -> Array:
        if name in ("var", "std"):
            return apply("sub", x, x)
        return cast(x, dtype)

    def sum(self, x: Array, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Array:
        """Return sums; by default of integers as int64 or uint64."""
        x = cast(x, summed(x.dtype) if dtype is None else DType.of(dtype))
        return self._reduced("sum", x, axis, keepdims, x.dtype)

    def prod(self, x: Array, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Array:
        """Return products; by default of integers as int64 or uint64."""
        x = cast(x, summed(x.dtype) if dtype is None else DType.of(dtype))
        return self._reduced("prod", x, axis, keepdims, x.dtype)

    def mean(self, x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
        """Return means; integers are converted to the default float."""
        x = _floating(x)
        return self._reduced("mean", x, axis, keepdims, x.dtype)

    def var(self, x: Array, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Array:
        """Return variances; sums of squares are divided by the number of elements less ``correction``."""
        return self._spread("var", x, axis, correction, keepdims)

    def std(self, x: Array, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Array:
        """Return standard deviations; see ``var``."""
        return self._spread("std", x, axis, correction, keepdims)

    def _spread(self, name: str, x: Array, axis: Any, correction: float, keepdims: bool) -> Array:
        x = _floating(x)
        if correction == int(correction):
            return self._reduced(name, x, axis, keepdims, x.dtype, int(correction))
        lengths = [x.shape[place] for place in axes_of(axis, x.ndim)]
        if None in lengths:
            raise InvalidArgumentError(
                "the correction is no whole number, and the length depends on values", remedy="Await the array first."
            )
        count = math.prod(length for length in lengths if length is not None)
        made = self._reduced("var", x, axis, keepdims, x.dtype)
        made = made * (count / (count - correction)) if count != correction else made / 0
        return apply("sqrt", made) if name == "std" else made

    def max(self, x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
        """Return the largest elements; NaN if there is one."""
        return self._reduced("max", x, axis, keepdims, x.dtype)

    def min(self, x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
        """Return the smallest elements; NaN if there is one."""
        return self._reduced("min", x, axis, keepdims, x.dtype)

    def logsumexp(self, x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
        """Return ``log(sum(exp(x)))``, with no exponential that overflows."""
        x = _floating(x)
        return self._reduced("logsumexp", x, axis, keepdims, x.dtype)

    def softmax(self, x: Array, /, *, axis: int = -1) -> Array:
        """Return ``exp(x)`` divided by its sum along ``axis``, with no exponential that overflows."""
        x = _floating(x)
        powers = apply("exp", x - self.max(x, axis=axis, keepdims=True))
        return powers / self.sum(powers, axis=axis, keepdims=True)

    def all(self, x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
        """Return whether no element is 0."""
        return self._reduced("all", cast(x, DType.BOOL), axis, keepdims, DType.BOOL)

    def any(self, x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
        """Return whether an element is not 0."""
        return self._reduced("any", cast(x, DType.BOOL), axis, keepdims, DType.BOOL)

    def count_nonzero(self, x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
        """Return how many elements are not 0."""
        return self.sum(cast(x, DType.BOOL), axis=axis, keepdims=keepdims)

    def argmax(self, x: Array, /, *, axis: int | None = None, keepdims: bool = False) -> Array:
        """Return the index of the first largest element, of the first NaN if there is one; without ``axis`` as if ``x`` had one dimension."""
        return self._place("argmax", x, axis, keepdims)

    def argmin(self, x: Array, /, *, axis: int | None = None, keepdims: bool = False) -> Array:
        """Return the index of the first smallest element; see ``argmax``."""
        return self._place("argmin", x, axis, keepdims)

    def _place(self, name: str, x: Array, axis: int | None, keepdims: bool) -> Array:
        index = DEFAULT["indexing"]
        if axis is None:
            shape = (1,) * x.ndim if keepdims else ()
            return self.make(shape, index, _reduce, (x,), (name, None, keepdims, 0))
        return self._reduced(name, x, axis_of(axis, x.ndim), keepdims, index)

    def diff(self, x: Array, /, *, axis: int = -1, n: int = 1, prepend: Array | None = None, append: Array | None = None) -> Array:
        """Return the ``n``-th differences of neighbours along ``axis``, with ``prepend`` before and ``append`` behind the elements."""
        n = operator.index(n)
        if n < 0:
            raise InvalidArgumentError(f"n is {n}", remedy="Give 0 or more.")
        if not n:
            return x
        place = axis_of(axis, x.ndim)
        parts = [each for each in (prepend, x, append) if each is not None]
        if len(parts) > 1:
            x = self.concat(parts, axis=place)
        before = (slice(None),) * place
        length = x.shape[place]
        for _ in range(n if length is None else min(n, length)):  # nothing has no differences
            name = "not_equal" if x.dtype is DType.BOOL else "sub"
            x = apply(name, self.indexed(x, (*before, slice(1, None))), self.indexed(x, (*before, slice(None, -1))))
        return x


def _floating(x: Array) -> Array:
    return cast(x, DEFAULT["real floating"]) if x.dtype.is_integer or x.dtype is DType.BOOL else x
