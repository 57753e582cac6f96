"""Discrete Fourier transforms over one to three axes, with numpy's meaning."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY
from typing import ClassVar, Literal, get_args

from accel.dtype import REAL_OF, DType, DTypeLike
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import OutOp, Plan, Shape, Spec, op, operand, planned, to_real
from accel.ops.cosine import Dct, Dst, Idct, Idst
from accel.ops.family import Family
from accel.ops.fields import convert_fields, integer, set_fields, to_integer, unless_none
from accel.ops.filters import Convolve, Correlate
from accel.ops.namespace import M, OpNamespace, method
from accel.ops.pieces import OfOne, Piece, axes_of, integers
from accel.ops.rearranged import Roll
from accel.ref import AccelRef
from accel.values import check_choice

__all__ = ["Fft", "FftOps", "Fftfreq", "Fftshift", "Hfft", "Ifft", "Ifftshift", "Ihfft", "Irfft", "Rfft", "Rfftfreq"]


Norm = Literal["backward", "ortho", "forward"]
"""Which direction is scaled: the inverse by 1/N, both by 1/sqrt(N), or the forward one by 1/N."""

_MOST_AXES = 3
_LONGEST = 1 << 53
_COMPLEX = {part: whole for whole, part in REAL_OF.items()}
_AXES = "Give one to three different axes of x, counted from 0 or, from the end, from -1."


def _axes(value: object, ndim: int) -> tuple[int, ...]:
    """Return the axes counted from 0, in the order in which they were given."""
    try:
        given = tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, AccelRef)) else (value,)
    except Exception as error:  # iterating may raise anything
        raise InvalidArgumentError(f"axes is {value!r}", remedy=_AXES) from error
    axes = tuple(integer("axes", axis, _AXES) for axis in given)
    if not 1 <= len(axes) <= _MOST_AXES:
        raise InvalidArgumentError(f"axes names {len(axes)} axes", remedy=_AXES)
    if any(not -ndim <= axis < ndim for axis in axes):
        raise InvalidArgumentError(f"axes is {value!r}, and x has {ndim} dimension(s)", remedy=_AXES)
    counted = tuple(axis % ndim for axis in axes)
    if len(set(counted)) < len(counted):
        raise InvalidArgumentError(f"axes is {value!r}, which names an axis twice", remedy=_AXES)
    return counted


@op("fft")
class Transform(OutOp):
    """What the four transforms share.

    Parameters
    ----------
    x
        What is transformed, of any shape; it is left as it is, unless it is ``out`` too.
    axes
        One axis or up to three, each at most once. Along the others it is a batch.
    norm
        What is scaled; see :data:`Norm`.
    out
        Buffer to write.
    """

    is_forward: ClassVar[bool] = True
    takes: ClassVar[dict[DType, DType]] = REAL_OF
    """The dtypes of ``x``."""
    instead: ClassVar[str] = "Use rfft, which takes real elements; or convert them before they are put on the device."
    """What to do with elements of the other kind."""

    x: AccelRef
    _: KW_ONLY
    axes: int | Iterable[int] = (-1,)
    norm: Norm = "backward"

    def __post_init__(self) -> None:
        """Count ``axes`` from 0, once ``x`` is a ref."""
        convert_fields(self)
        if isinstance(self.x, AccelRef):
            set_fields(self, axes=self.counted())

    def counted(self) -> tuple[int, ...]:
        """Return the axes counted from 0, in the order in which they were given."""
        return _axes(self.axes, len(self.x.shape))

    def lengths(self) -> Shape:
        """Return how long the transforms are along :attr:`axes`, in real space."""
        return tuple(self.x.shape[axis] for axis in self.counted())

    def scale(self) -> float:
        """Return what the sums are multiplied by."""
        count = math.prod(self.lengths())
        if self.norm == "ortho":
            return 1 / math.sqrt(count)
        return 1 / count if (self.norm == "forward") is self.is_forward else 1.0

    def spec(self) -> Spec:
        """Return shape and dtype of the result."""
        return Spec(self.x.shape, self.x.dtype)

    def plan(self) -> Plan:
        x = operand("x", self.x)
        check_choice("norm", self.norm, *get_args(Norm))
        if x.dtype not in self.takes:
            names = " or ".join(dtype.value for dtype in self.takes)
            if x.dtype in REAL_OF or x.dtype in _COMPLEX:
                raise InvalidArgumentError(f"x is {x.dtype.value}, {names} is needed", remedy=self.instead)
            raise UnsupportedError(f"there is no transform of {x.dtype.value}", remedy=f"Use {names}.")
        if 0 in self.lengths():
            raise InvalidArgumentError(f"a transform of length 0 has no value (x has shape {x.shape})", remedy="Leave empty axes out.")
        shape, dtype, _ = self.spec()
        return planned(self.out, {"x": x}, shape, dtype, in_place=("x",))


@op()
class Fft(Transform):
    """numpy's ``fftn(x, axes=axes, norm=norm)`` of complex64 or complex128. ``out`` may be ``x``. See :class:`Transform` for the parameters."""


@op()
class Ifft(Transform):
    """numpy's ``ifftn(x, axes=axes, norm=norm)`` of complex64 or complex128. ``out`` may be ``x``. See :class:`Transform` for the parameters."""

    is_forward: ClassVar[bool] = False


@op()
class Rfft(Transform):
    """numpy's ``rfftn(x, axes=axes, norm=norm)`` of float32 or float64.

    The last of ``axes`` keeps the n // 2 + 1 frequencies that are not the conjugate of another. See :class:`Transform` for the parameters.
    """

    takes: ClassVar[dict[DType, DType]] = _COMPLEX
    instead: ClassVar[str] = "Use fft, which takes complex elements."

    def spec(self) -> Spec:
        shape, last = self.x.shape, self.counted()[-1]
        return Spec((*shape[:last], shape[last] // 2 + 1, *shape[last + 1 :]), _COMPLEX[self.x.dtype])


@op(convert={"n": unless_none(to_integer("Give an int, or leave n out."))})
class Irfft(Transform):
    """numpy's ``irfftn(x, axes=axes, norm=norm)`` of complex64 or complex128, whose result is real; ``x`` is left as it is.

    Parameters
    ----------
    n
        Length of the result along the last of ``axes``, of which x has m = n // 2 + 1 frequencies: 2 * (m - 1), which is the default, or one more.
    """

    is_forward: ClassVar[bool] = False
    instead: ClassVar[str] = "irfft takes what rfft gives."

    _: KW_ONLY
    n: int | None = None

    def length(self) -> int:
        """Return the length of the result along the last axis."""
        last = self.counted()[-1]
        count = self.x.shape[last]
        if self.n is None:
            return 2 * (count - 1)
        if self.n < 1 or self.n // 2 + 1 != count:
            raise InvalidArgumentError(
                f"n is {self.n}",
                remedy=f"x has m = {count} frequencies along axis {last}: give 2 * (m - 1), 2 * m - 1, or leave n out.",
            )
        return self.n

    def lengths(self) -> Shape:
        return (*(self.x.shape[axis] for axis in self.counted()[:-1]), self.length())

    def spec(self) -> Spec:
        shape, last = self.x.shape, self.counted()[-1]
        return Spec((*shape[:last], self.length(), *shape[last + 1 :]), REAL_OF[self.x.dtype])


@op()
class Hfft(Irfft):
    """scipy's ``hfftn(x, axes=axes, norm=norm)``, along one axis numpy's ``hfft``, of complex64 or complex128: the real spectrum of a Hermitian signal.

    ``x`` has the first half of the signal along the last of ``axes``, and is left as it is. See :class:`Irfft` for the parameters.
    """

    is_forward: ClassVar[bool] = True


@op()
class Ihfft(Rfft):
    """scipy's ``ihfftn(x, axes=axes, norm=norm)``, along one axis numpy's ``ihfft``, of float32 or float64: the inverse of ``hfft``.

    See :class:`Transform` for the parameters.
    """

    is_forward: ClassVar[bool] = False


@op("fft", convert={"axes": unless_none(integers)})
class Fftshift(OfOne):
    """``x`` with the frequency 0 of ``axes``, or all axes, in the middle: numpy's ``fftshift``, of any dtype."""

    is_back: ClassVar[bool] = False

    axes: int | Iterable[int] | None = None

    def shape(self) -> Shape:
        axes_of(self.axes, self.x.ndim)
        return self.x.shape

    def pieces(self) -> list[Piece]:
        axes = axes_of(self.axes, self.x.ndim)
        halves = [self.x.shape[axis] // 2 for axis in axes]
        return Roll(self.x, [-half for half in halves] if self.is_back else halves, axes).pieces()


@op()
class Ifftshift(Fftshift):
    """numpy's ``ifftshift``: the inverse of ``fftshift``, of any dtype."""

    is_back: ClassVar[bool] = True


@op("fft")
class Fftfreq(OutOp):
    """numpy's ``fftfreq(n, d)``: the frequencies of a transform of length ``n``, whose elements are ``d`` apart.

    Parameters
    ----------
    n
        1 or more.
    d
        Distance of elements; not 0.
    dtype
        float32 or float64.
    out
        Buffer to write.
    """

    n: int
    d: float = 1.0
    dtype: DTypeLike = DType.FLOAT64

    def __post_init__(self) -> None:
        remedy = "Give an int of 1 or more."
        n = integer("n", self.n, remedy)
        d = to_real("d", self.d)
        if not 1 <= n < _LONGEST:
            raise InvalidArgumentError(f"n is {n}", remedy=remedy)
        if not math.isfinite(d) or not n * d or not math.isfinite(1 / (n * d)):
            raise InvalidArgumentError(f"d is {self.d!r}", remedy="Give a finite real number that is not 0.")
        set_fields(self, n=n, d=d, dtype=DType.of(self.dtype))

    def counts(self) -> tuple[int, int]:
        """Return how many frequencies there are, and how many of them are not negative."""
        return self.n, (self.n + 1) // 2

    def step(self) -> float:
        """Return the distance of frequencies."""
        return 1 / (self.n * self.d)

    def plan(self) -> Plan:
        dtype = DType.of(self.dtype)
        if dtype not in _COMPLEX:
            raise UnsupportedError(f"there are no frequencies of {dtype.value}", remedy="Use float32 or float64.")
        return planned(self.out, {}, (self.counts()[0],), dtype)


@op()
class Rfftfreq(Fftfreq):
    """numpy's ``rfftfreq(n, d)``: the frequencies of ``rfft``. See :class:`Fftfreq` for the parameters."""

    def counts(self) -> tuple[int, int]:
        return self.n // 2 + 1, self.n // 2 + 1


class FftOps(OpNamespace[M]):
    """Discrete Fourier transforms over one to three axes, in float32 or float64, with the meaning of numpy's ``fftn`` and its siblings, and ops made of them.

    ``axes`` is one axis or up to three, the others are a batch; ``norm`` is ``"backward"`` (the inverse is divided by the number of elements),
    ``"ortho"`` or ``"forward"``. ``out=`` names a buffer to write instead of making one; ``timeout=`` (seconds) is when waiting ends with
    :class:`~accel.DeadlineExceededError`.
    """

    __slots__ = ()

    library: ClassVar = "fft"

    fft = method(Fft)
    ifft = method(Ifft)
    rfft = method(Rfft)
    irfft = method(Irfft)
    hfft = method(Hfft)
    ihfft = method(Ihfft)
    dct = method(Dct)
    idct = method(Idct)
    dst = method(Dst)
    idst = method(Idst)
    convolve = method(Convolve)
    correlate = method(Correlate)
    fftshift = method(Fftshift)
    ifftshift = method(Ifftshift)
    fftfreq = method(Fftfreq)
    rfftfreq = method(Rfftfreq)


FAMILY = Family(FftOps)
