"""What ``device.fft`` and ``device.rng`` are; see :mod:`accel.device.libraries`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from accel import ops
from accel.device.op_namespace import OpNamespace
from accel.dtype import DType, DTypeLike
from accel.ops.base import as_shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from accel.ops.fft import Norm
    from accel.ops.rng import Generator
    from accel.ref import AccelRef

__all__ = ["Fft", "Rng"]

T_co = TypeVar("T_co", covariant=True)


class Fft(OpNamespace[T_co]):
    """Discrete Fourier transforms over one to three axes, in float32 or float64, with the meaning of numpy's ``fftn`` and its siblings.

    ``axes`` is one axis or up to three, the others are a batch; ``norm`` is ``"backward"`` (the inverse is divided by the number of elements),
    ``"ortho"`` or ``"forward"``. ``out=`` names a buffer to write instead of making one; ``timeout=`` (seconds) is when waiting ends with
    :class:`~accel.DeadlineExceededError`.
    """

    __slots__ = ()

    def fft(
        self,
        x: AccelRef,
        *,
        axes: int | Iterable[int] = -1,
        norm: Norm = "backward",
        out: AccelRef | None = None,
        timeout: float | None = None,
    ) -> T_co:
        """Transform complex elements; ``out`` may be ``x``. See :class:`accel.ops.Fft`."""
        return self._submit(ops.Fft(x, cast("Any", axes), norm, out), timeout)

    def ifft(
        self,
        x: AccelRef,
        *,
        axes: int | Iterable[int] = -1,
        norm: Norm = "backward",
        out: AccelRef | None = None,
        timeout: float | None = None,
    ) -> T_co:
        """Transform complex elements back; ``out`` may be ``x``. See :class:`accel.ops.Ifft`."""
        return self._submit(ops.Ifft(x, cast("Any", axes), norm, out), timeout)

    def rfft(
        self,
        x: AccelRef,
        *,
        axes: int | Iterable[int] = -1,
        norm: Norm = "backward",
        out: AccelRef | None = None,
        timeout: float | None = None,
    ) -> T_co:
        """Transform real elements; of the last of ``axes``, n // 2 + 1 frequencies are kept. See :class:`accel.ops.Rfft`."""
        return self._submit(ops.Rfft(x, cast("Any", axes), norm, out), timeout)

    def irfft(
        self,
        x: AccelRef,
        *,
        n: int | None = None,
        axes: int | Iterable[int] = -1,
        norm: Norm = "backward",
        out: AccelRef | None = None,
        timeout: float | None = None,
    ) -> T_co:
        """Undo :meth:`rfft`; ``n``, if odd, is the length of the last of ``axes``. ``x`` is left as it is. See :class:`accel.ops.Irfft`."""
        return self._submit(ops.Irfft(x, cast("Any", axes), norm, out, n), timeout)


class Rng(OpNamespace[T_co]):
    """Random numbers, each a pure function of ``seed`` and its place in the seed's stream; see :mod:`accel.ops.rng`.

    ``seed`` is an int below 2**64, or ``None`` for one from the system's entropy. ``offset`` is how many numbers of the stream to skip: what is read in
    pieces is what is read at once. ``generator`` is ``"philox"``, the only one. ``out=`` names a buffer to write instead of making one; ``timeout=``
    (seconds) is when waiting ends with :class:`~accel.DeadlineExceededError`.
    """

    __slots__ = ()

    aliases: ClassVar[Mapping[str, str]] = {"rand": ".uniform(shape)", "randn": ".normal(shape)", "randint": ".integers(shape, low, high)"}

    def uniform(
        self,
        shape: int | Iterable[int],
        dtype: DTypeLike = "float32",
        *,
        low: float = 0.0,
        high: float = 1.0,
        seed: int | None = None,
        offset: int = 0,
        generator: Generator = "philox",
        out: AccelRef | None = None,
        timeout: float | None = None,
    ) -> T_co:
        """Draw float32 or float64 from ``low`` up to, and without, ``high``; see :class:`accel.ops.Uniform`."""
        return self._submit(ops.Uniform(as_shape(shape), DType.of(dtype), seed, offset, generator, out, low, high), timeout)

    def normal(
        self,
        shape: int | Iterable[int],
        dtype: DTypeLike = "float32",
        *,
        mean: float = 0.0,
        std: float = 1.0,
        seed: int | None = None,
        offset: int = 0,
        generator: Generator = "philox",
        out: AccelRef | None = None,
        timeout: float | None = None,
    ) -> T_co:
        """Draw normal float32 or float64; see :class:`accel.ops.Normal`."""
        return self._submit(ops.Normal(as_shape(shape), DType.of(dtype), seed, offset, generator, out, mean, std), timeout)

    def lognormal(
        self,
        shape: int | Iterable[int],
        dtype: DTypeLike = "float32",
        *,
        mean: float = 0.0,
        sigma: float = 1.0,
        seed: int | None = None,
        offset: int = 0,
        generator: Generator = "philox",
        out: AccelRef | None = None,
        timeout: float | None = None,
    ) -> T_co:
        """Draw float32 or float64 whose logarithm is normal, of ``mean`` and ``sigma``; see :class:`accel.ops.Lognormal`."""
        return self._submit(ops.Lognormal(as_shape(shape), DType.of(dtype), seed, offset, generator, out, mean, sigma), timeout)

    def integers(
        self,
        shape: int | Iterable[int],
        low: int,
        high: int,
        dtype: DTypeLike = "int64",
        *,
        seed: int | None = None,
        offset: int = 0,
        generator: Generator = "philox",
        out: AccelRef | None = None,
        timeout: float | None = None,
    ) -> T_co:
        """Draw integers of any integer dtype from ``low`` up to, and without, ``high``, without bias; see :class:`accel.ops.Integers`."""
        return self._submit(ops.Integers(as_shape(shape), DType.of(dtype), seed, offset, generator, out, low, high), timeout)
