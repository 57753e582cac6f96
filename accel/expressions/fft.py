"""Fourier transforms: ``xp.fft`` of the array API standard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from accel import ops
from accel.dtype import COMPLEX_OF, DType
from accel.errors import InvalidArgumentError
from accel.expressions.array import Array, cast
from accel.expressions.functions import axis_of, call_op, explained, named
from accel.expressions.manipulation import axes_of, known
from accel.expressions.promotion import COMPLEX, DEFAULT, real_of
from accel.values import check_choice

if TYPE_CHECKING:
    from accel.expressions.reduction import ReductionFunctions

__all__ = ["FourierFunctions"]

Norm: TypeAlias = Literal["backward", "ortho", "forward"]

_MOST = 3  # axes of one op


@explained("xp.fft")
class FourierFunctions:
    """Fourier transforms of complex64 and complex128, and of float32 and float64. Axes are cropped, or padded with zeros, to the lengths asked for.

    Parameters
    ----------
    xp
        The namespace.
    """

    def __init__(self, xp: ReductionFunctions) -> None:
        self._xp = xp

    def fft(self, x: Array, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Array:
        """Return the transform along one axis."""
        return self.fftn(x, s=None if n is None else (n,), axes=(axis,), norm=norm)

    def ifft(self, x: Array, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Array:
        """Return the inverse transform along one axis."""
        return self.ifftn(x, s=None if n is None else (n,), axes=(axis,), norm=norm)

    def fftn(self, x: Array, /, *, s: Any = None, axes: Any = None, norm: Norm = "backward") -> Array:
        """Return the transform along several axes, or all."""
        return self._whole("fft", self._complex(x), s, axes, norm)

    def ifftn(self, x: Array, /, *, s: Any = None, axes: Any = None, norm: Norm = "backward") -> Array:
        """Return the inverse transform along several axes, or all."""
        return self._whole("ifft", self._complex(x), s, axes, norm)

    def rfft(self, x: Array, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Array:
        """Return the frequencies of real elements along one axis that are not the conjugate of another."""
        return self.rfftn(x, s=None if n is None else (n,), axes=(axis,), norm=norm)

    def irfft(self, x: Array, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Array:
        """Return the real elements that have these frequencies; ``n`` of them, by default an even number."""
        return self.irfftn(x, s=None if n is None else (n,), axes=(axis,), norm=norm)

    def rfftn(self, x: Array, /, *, s: Any = None, axes: Any = None, norm: Norm = "backward") -> Array:
        """Return the frequencies of real elements along several axes; of the last one, those that are not the conjugate of another."""
        return self._half("rfft", x, s, axes, norm)

    def _half(self, name: str, x: Array, s: Any, axes: Any, norm: Norm) -> Array:
        if x.dtype not in COMPLEX_OF:
            raise InvalidArgumentError(f"x is {x.dtype.value}", remedy="Give float32 or float64.")
        places, lengths = _lengths(x, s, axes)
        x = self._fitted(x, places, lengths)
        last = places[-1]
        shape = (*x.shape[:last], lengths[-1] // 2 + 1, *x.shape[last + 1 :])
        made = self._made(name, x, shape, COMPLEX_OF[x.dtype], (last,), norm)
        return self._along("fft", made, places[:-1], norm)

    def irfftn(self, x: Array, /, *, s: Any = None, axes: Any = None, norm: Norm = "backward") -> Array:
        """Return the real elements that have these frequencies along several axes; see ``irfft``."""
        x = self._complex(x)
        places, lengths = _lengths(x, s, axes)
        last, length = places[-1], 2 * (lengths[-1] - 1) if s is None else lengths[-1]
        x = self._fitted(x, places, (*lengths[:-1], length // 2 + 1))
        x = self._along("ifft", x, places[:-1], norm)
        shape = (*x.shape[:last], length, *x.shape[last + 1 :])
        return self._made("irfft", x, shape, real_of(x.dtype), (last,), norm, n=length)

    def hfft(self, x: Array, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Array:
        """Return the real transform of elements of which the second half are conjugates of the first, which is given."""
        x = self._complex(x)
        (place,), (length,) = _lengths(x, None if n is None else (n,), (axis,))
        length = 2 * (length - 1) if n is None else length
        x = self._fitted(x, (place,), (length // 2 + 1,))
        shape = (*x.shape[:place], length, *x.shape[place + 1 :])
        return self._made("hfft", x, shape, real_of(x.dtype), (place,), norm, n=length)

    def ihfft(self, x: Array, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Array:
        """Return the inverse of ``hfft``."""
        return self._half("ihfft", x, None if n is None else (n,), (axis,), norm)

    def fftfreq(self, n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
        """Return the frequencies of a transform of length ``n``, whose elements are ``d`` apart."""
        return self._frequencies(ops.Fftfreq, n, d, dtype, device)

    def rfftfreq(self, n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
        """Return the frequencies of ``rfft``; see ``fftfreq``."""
        return self._frequencies(ops.Rfftfreq, n, d, dtype, device)

    def fftshift(self, x: Array, /, *, axes: Any = None) -> Array:
        """Return ``x`` with the frequency 0 in the middle."""
        return self._shifted("fftshift", x, axes)

    def ifftshift(self, x: Array, /, *, axes: Any = None) -> Array:
        """Return the inverse of ``fftshift``."""
        return self._shifted("ifftshift", x, axes)

    def _frequencies(self, op: type[ops.Fftfreq], n: int, d: float, dtype: Any, device: Any) -> Array:
        self._xp.check_device(device)
        return self._xp.of_op(op(n, d, DEFAULT["real floating"] if dtype is None else dtype))

    def _shifted(self, name: str, x: Array, axes: Any) -> Array:
        places = axes_of(axes, x.ndim)
        return self._xp.make(x.shape, x.dtype, call_op, (x,), named("fft", name, places)) if places else x

    def _complex(self, x: Array) -> Array:
        if x.dtype in COMPLEX:
            return x
        if x.dtype not in COMPLEX_OF:
            raise InvalidArgumentError(f"x is {x.dtype.value}", remedy="Give complex64 or complex128.")
        return cast(x, COMPLEX_OF[x.dtype])

    def _whole(self, name: str, x: Array, s: Any, axes: Any, norm: Norm) -> Array:
        places, lengths = _lengths(x, s, axes)
        return self._along(name, self._fitted(x, places, lengths), places, norm)

    def _along(self, name: str, x: Array, axes: tuple[int, ...], norm: Norm) -> Array:
        """Transform along any number of axes."""
        for first in range(0, len(axes), _MOST):
            x = self._made(name, x, x.shape, x.dtype, axes[first : first + _MOST], norm)
        return x

    def _made(self, name: str, x: Array, shape: Any, dtype: DType, axes: tuple[int, ...], norm: Norm, **options: int) -> Array:
        check_choice("norm", norm, "backward", "ortho", "forward")
        return self._xp.make(shape, dtype, call_op, (x,), named("fft", name, axes=axes, norm=norm, **options))

    def _fitted(self, x: Array, axes: tuple[int, ...], lengths: tuple[int, ...]) -> Array:
        """Crop axes, or pad them with zeros."""
        for axis, wanted, length in zip(axes, lengths, _at(x, axes), strict=True):
            if wanted < length:
                x = self._xp.indexed(x, (*(slice(None),) * axis, slice(wanted)))
            elif wanted > length:
                zeros = self._xp.zeros((*x.shape[:axis], wanted - length, *x.shape[axis + 1 :]), dtype=x.dtype)
                x = self._xp.concat((x, zeros), axis=axis)
        return x


def _at(x: Array, axes: tuple[int, ...]) -> tuple[int, ...]:
    return known(tuple([x.shape[axis] for axis in axes]))


def _lengths(x: Array, s: Any, axes: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return axes, and how long they are to be."""
    if s is not None and axes is None:
        axes = tuple(range(x.ndim - len(s), x.ndim))
    places = axes_of(None if axes is None else tuple([axis_of(axis, x.ndim) for axis in axes]), x.ndim)
    lengths = _at(x, places) if s is None else tuple(s)
    if not places or len(lengths) != len(places) or min(lengths) < 1:
        raise InvalidArgumentError(f"s is {s} and axes {axes}", remedy="Give one axis or more, and for each a length of 1 or more.")
    return places, lengths
