"""What the checks are written with: contexts of the backend under test, random data, guarded device memory, and comparison."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np

from accel.compute import DeviceCompute
from accel.dtype import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accel.backend import AccelBackend, AccelDevice, AccelStream
    from accel.compute import ComputeBackend

__all__ = ["Array", "Case", "Harness", "difference", "rounding", "sum_rounding", "wide"]

Array: TypeAlias = np.ndarray[Any, Any]

_GUARD = 256
# Every byte set: NaN in all our float types. Reading past a buffer spreads it, and writing past a buffer changes it.
_POISON = 0xFF


class Harness:
    """The backend under test, and the random data it is tested with.

    Parameters
    ----------
    backend
        What is tested.
    index
        Which of its devices.
    seed
        Seed of the random inputs; a fresh one where left out.
    compute
        ``compute(device, stream)`` makes the compute interface under test: that of the device's kernels, unless a backend has another one.

    Attributes
    ----------
    rng : numpy.random.Generator
        Source of all random inputs.
    """

    def __init__(
        self,
        backend: AccelBackend,
        index: int = 0,
        *,
        seed: int | None = None,
        compute: Callable[[AccelDevice, AccelStream], ComputeBackend] = DeviceCompute,
    ) -> None:
        self.backend = backend
        self.index = index
        self.seed = secrets.randbits(32) if seed is None else seed
        self._compute = compute
        self.rng = np.random.default_rng(self.seed)

    @contextmanager
    def open_context(self) -> Iterator[AccelDevice]:
        """Open a context on the device, and close it afterwards (without waiting for its streams if the check failed)."""
        context = self.backend.open(self.index)
        try:
            yield context
        except BaseException:
            context.close(abandon=True)
            raise
        context.close()

    @contextmanager
    def open_compute(self) -> Iterator[ComputeBackend]:
        """Open a context with one stream, and give its compute interface."""
        with self.open_context() as context:
            stream = context.create_stream()
            compute = self._compute(context, stream)
            compute.init()
            try:
                yield compute
            finally:
                stream.close()
                if isinstance(compute, DeviceCompute):
                    compute.close()

    @contextmanager
    def case(self, compute: ComputeBackend, what: str) -> Iterator[Case]:
        """Give device memory for one call; afterwards check that nothing was written beside it, and free it."""
        case = Case(compute, f"{what} (seed {self.seed})")
        yield case
        case.close()

    def random(self, shape: tuple[int, ...] | int, dtype: DType) -> Array:
        """Return random elements: normally distributed ones, or integers of the whole range."""
        if dtype.is_integer:
            limits = np.iinfo(dtype.numpy)
            return self.rng.integers(limits.min, limits.max, shape, dtype.numpy, endpoint=True)
        if dtype.kind == "bool":
            return self.rng.integers(0, 2, shape).astype(bool)
        values: Array = self.rng.standard_normal(shape)
        if dtype.is_complex:
            values = values + 1j * self.rng.standard_normal(shape)
        return values.astype(dtype.numpy)


class Case:
    """Device memory for one call, guarded on both sides, and comparison of what the call made of it.

    Parameters
    ----------
    compute
        What computes.
    what
        What is being checked; every message begins with it.
    """

    def __init__(self, compute: ComputeBackend, what: str) -> None:
        self.compute = compute
        self.what = what
        self._blocks: dict[int, int] = {}

    def put(self, array: Array) -> int:
        """Return the address of a copy of ``array`` on the device."""
        data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        block = np.full(data.size + 2 * _GUARD, _POISON, np.uint8)
        block[_GUARD : _GUARD + data.size] = data
        pointer = self.compute.alloc(block.size)
        self.compute.copy_htod(pointer, block.data)
        self._blocks[pointer] = data.size
        return pointer + _GUARD

    def poisoned(self, shape: tuple[int, ...] | int, dtype: DType) -> int:
        """Return the address of memory for an output: NaN, or integers with every bit set."""
        return self.put(poison(shape, dtype))

    def get(self, pointer: int, shape: tuple[int, ...] | int, dtype: DType) -> Array:
        """Wait for the stream and return the elements at ``pointer``."""
        result = np.zeros(shape, dtype.numpy)
        raw = np.zeros(result.nbytes, np.uint8)
        self.compute.copy_dtoh(raw.data, pointer)
        self.compute.synchronize()
        return np.frombuffer(raw.tobytes(), dtype.numpy).reshape(result.shape)

    def close(self) -> None:
        """Check the guards of all memory, and free it."""
        for pointer, nbytes in self._blocks.items():
            block = np.zeros(nbytes + 2 * _GUARD, np.uint8)
            self.compute.copy_dtoh(block.data, pointer)
            self.compute.synchronize()
            self.require(bool((block[:_GUARD] == _POISON).all()), "wrote before a buffer")
            self.require(bool((block[_GUARD + nbytes :] == _POISON).all()), "wrote behind a buffer")
            self.compute.free(pointer)
        self._blocks.clear()

    def require(self, holds: bool, message: str) -> None:
        """Fail with ``message`` unless it holds."""
        if not holds:
            raise AssertionError(f"{self.what}: {message}")

    def same(self, got: Array, expected: Array, message: str = "the result") -> None:
        """Fail unless both have the same bytes."""
        self.require(got.shape == expected.shape, f"{message} has shape {got.shape}, not {expected.shape}")
        if got.tobytes() != np.ascontiguousarray(expected).tobytes():  # the texts of arrays take longer than what is checked
            raise AssertionError(f"{self.what}: {message} is {got!r}, not {expected!r}")

    def close_to(self, got: Array, expected: Array, error: Array | float = 0.0) -> None:
        """Fail unless ``got`` is what ``expected`` rounds to; see :func:`difference`."""
        wrong = difference(got, expected, error)
        self.require(not wrong, wrong)


def difference(got: Array, expected: Array, error: Array | float = 0.0) -> str:
    """Return what is wrong with a result, or nothing.

    Parameters
    ----------
    got
        The result.
    expected
        The reference, in higher precision; integers are compared exactly.
    error
        How far the result may be off before it is rounded.
    """
    if got.shape != expected.shape:
        return f"the result has shape {got.shape}, not {expected.shape}"
    dtype = DType.of(got.dtype)
    if dtype.is_integer or dtype.kind == "bool":
        return "" if np.array_equal(got, expected.astype(got.dtype)) else f"the result is {got!r}, not {expected!r}"
    with np.errstate(all="ignore"):
        value = wide(got)
        rounded = wide(expected.astype(got.dtype))
        unit = rounding(dtype)
        allowed = 1.01 * unit * np.abs(expected) + error + float(_finfo(dtype).smallest_subnormal)
        good = np.where(np.isfinite(rounded), np.abs(value - expected) <= allowed, _alike(value, rounded))
    if good.all():
        return ""
    where = tuple(int(i) for i in np.argwhere(~good)[0])
    return f"{int((~good).sum())} of {good.size} are wrong; at {where}: {value[where]}, expected {expected[where]}"


def poison(shape: tuple[int, ...] | int, dtype: DType) -> Array:
    """Return an array whose every byte is set."""
    result = np.zeros(shape, dtype.numpy)
    return np.frombuffer(b"\xff" * result.nbytes, dtype.numpy).reshape(result.shape)


def rounding(dtype: DType) -> float:
    """Return the largest relative error of rounding to ``dtype``; 0 for integers."""
    return 0.0 if dtype.is_integer else float(_finfo(dtype).eps) / 2


def sum_rounding(dtype: DType) -> float:
    """Return :func:`rounding` of the type that sums are accumulated in."""
    return rounding(DType.FLOAT32) if dtype.itemsize == 2 else rounding(dtype)


def wide(array: Array) -> Array:
    """Return the same values as float64 or complex128; integers as they are."""
    if array.dtype.kind in "iub":
        return array
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _finfo(dtype: DType) -> Any:
    finfo: Any = ml_dtypes.finfo if dtype.is_extended else np.finfo
    return finfo(dtype.numpy)


def _alike(value: Array, expected: Array) -> Array:
    """Return where both are NaN or the same infinity."""
    result: Array = np.where(np.isnan(expected), np.isnan(value), value == expected)
    return result
