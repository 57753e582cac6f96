"""Arrays that are made: of data, of numbers, and ranges."""

from __future__ import annotations

from typing import Any

import numpy as np

from accel import ops
from accel.dtype import DType, native, rounded
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.expressions.array import Array, cast
from accel.expressions.elementwise import ElementwiseFunctions
from accel.expressions.functions import call_op, named
from accel.expressions.promotion import DEFAULT, default_of, kind_of, promoted
from accel.ops.base import as_shape
from accel.ref import AccelRef
from accel.values import check_choice

__all__ = ["CreationFunctions"]


def _put(batch: Any, array: np.ndarray[Any, Any]) -> AccelRef:
    made: AccelRef = batch.put(array)
    return made


def _run(batch: Any, op: ops.FamilyOp | ops.Fill) -> AccelRef:
    made: AccelRef = batch.run(op)
    return made


def _fill(batch: Any, shape: tuple[int, ...], dtype: DType, value: Any) -> AccelRef:
    made: AccelRef = batch.run(ops.Fill(shape, dtype, value))
    return made


_COPIED = named("arrays", "part", ...)


class CreationFunctions(ElementwiseFunctions):
    """Functions that make arrays."""

    def asarray(self, obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Array:
        """Return an array of a ref, of anything that numpy takes, or of nested sequences of numbers.

        Parameters
        ----------
        obj
            Refs and numpy arrays are read when the array is awaited: do not change them before.
        dtype
            What it is converted to. Python's floats are float32 and complex numbers complex64 where it is left out.
        device
            The namespace's, or ``None``.
        copy
            ``True`` copies a ref's elements, or a numpy array's now; ``False`` raises where elements must be copied to the device.
        """
        self.check_device(device)
        wanted = None if dtype is None else DType.of(dtype)
        if isinstance(obj, Array):
            made = obj if copy is not True else self.make(obj.shape, obj.dtype, call_op, (obj,), _COPIED)
        elif isinstance(obj, AccelRef):
            made = self._of_ref(obj)
            made = made if copy is not True else self.make(made.shape, made.dtype, call_op, (made,), _COPIED)
        elif copy is False:
            raise InvalidArgumentError("copy=False, and the elements are not on the device", remedy="Leave copy out.")
        else:
            return self._of_host(obj, wanted, copy is True)
        return made if wanted is None else cast(made, wanted)

    def _of_ref(self, ref: AccelRef) -> Array:
        ref.check()
        if ref.device is not self.device:
            raise InvalidArgumentError(f"{ref!r} is on another device", remedy="Use that device's own xp.")
        made = self.make(ref.shape, ref.dtype, None)
        made.settle(ref)
        return made

    def _of_host(self, obj: Any, dtype: DType | None, is_copied: bool) -> Array:
        if isinstance(obj, np.ndarray):
            array = native(obj)
        else:
            array = native(obj)
            if not isinstance(obj, np.generic) and not hasattr(obj, "__array__") and not hasattr(obj, "__buffer__") and dtype is None:
                # Lists of Python's numbers; those of numpy's arrays and scalars keep their dtypes.
                dtype = {DType.FLOAT64: DEFAULT["real floating"], DType.COMPLEX128: DEFAULT["complex floating"]}.get(DType.of(array.dtype))
        if dtype is not None:
            with np.errstate(all="ignore"):
                array = rounded(array, dtype.numpy)
        if is_copied and isinstance(obj, np.ndarray) and np.may_share_memory(array, obj):
            array = array.copy()
        return self.make(array.shape, DType.of(array.dtype), _put, (), (array,))

    def from_dlpack(self, x: Any, /, *, device: Any = None, copy: bool | None = None) -> Array:
        """Return an array of what speaks DLPack: an array of this device as it is, what is in the host's memory by a copy."""
        self.check_device(device)
        if isinstance(x, Array):
            return self.asarray(x, copy=copy)
        if copy is False:
            raise InvalidArgumentError("copy=False, and the elements are not on the device", remedy="Wrap it: await device.wrap(x).")
        try:
            array = np.from_dlpack(x)
        except (AttributeError, BufferError, RuntimeError, TypeError) as error:
            raise InvalidArgumentError(
                f"{type(x).__name__} is not in the host's memory, or does not speak DLPack: {error}",
                remedy="For what is on the device: xp.asarray(await device.wrap(x)).",
            ) from error
        return self._of_host(array, None, is_copied=copy is True)

    # -- of one number

    def full(self, shape: Any, fill_value: complex, *, dtype: Any = None, device: Any = None) -> Array:
        """Return an array whose elements are all ``fill_value``."""
        self.check_device(device)
        value = fill_value.item() if isinstance(fill_value, np.generic) else fill_value
        kind = default_of(kind_of(type(value))) if dtype is None else DType.of(dtype)
        if kind is not DType.BOOL and isinstance(value, bool):
            value = int(value)
        return self.make(lengths := as_shape(shape), kind, _fill, (), (lengths, kind, value))

    def empty(self, shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
        """Return an array of zeros: one that is not set could not be told from one that is computed."""
        return self.zeros(shape, dtype=dtype, device=device)

    def zeros(self, shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
        """Return an array of zeros, by default of float32."""
        return self.full(shape, 0, dtype=DEFAULT["real floating"] if dtype is None else dtype, device=device)

    def ones(self, shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
        """Return an array of ones, by default of float32."""
        return self.full(shape, 1, dtype=DEFAULT["real floating"] if dtype is None else dtype, device=device)

    def full_like(self, x: Array, /, fill_value: complex, *, dtype: Any = None, device: Any = None) -> Array:
        """Return an array of the shape, and by default the dtype, of ``x``, whose elements are all ``fill_value``."""
        if None in x.shape:
            self.check_device(device)
            return self.broadcast_of(x, DType.of(x.dtype if dtype is None else dtype), fill_value)
        return self.full(x.shape, fill_value, dtype=x.dtype if dtype is None else dtype, device=device)

    def broadcast_of(self, x: Array, dtype: DType, value: complex) -> Array:
        """Return ``value`` in the shape of ``x``, which is not known yet."""
        return self.make(x.shape, dtype, lambda batch, ref: _fill(batch, ref.shape, dtype, value), (x,))

    def empty_like(self, x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
        """Return an array of zeros of the shape, and by default the dtype, of ``x``."""
        return self.full_like(x, 0, dtype=dtype, device=device)

    def zeros_like(self, x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
        """Return an array of zeros of the shape, and by default the dtype, of ``x``."""
        return self.full_like(x, 0, dtype=dtype, device=device)

    def ones_like(self, x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
        """Return an array of ones of the shape, and by default the dtype, of ``x``."""
        return self.full_like(x, 1, dtype=dtype, device=device)

    # -- ranges and matrices

    def arange(self, start: float, /, stop: float | None = None, step: float = 1, *, dtype: Any = None, device: Any = None) -> Array:
        """Return the numbers from ``start``, or 0, up to ``stop``, which is left out, in steps."""
        self.check_device(device)
        if stop is None:
            start, stop = 0, start
        kind = default_of(max(kind_of(type(each)) for each in (start, stop, step)) or 1) if dtype is None else DType.of(dtype)
        try:
            return self.of_op(ops.Arange(start, stop, step, kind))
        except UnsupportedError:  # a range of floats as integers
            return self._of_host(np.arange(start, stop, step), kind, is_copied=False)

    def of_op(self, op: ops.FamilyOp) -> Array:
        """Return what an op without operands makes."""
        (spec,) = op.plan().creates
        return self.make(spec.shape, spec.dtype, _run, (), (op,))

    def linspace(
        self, start: complex, stop: complex, /, num: int, *, dtype: Any = None, device: Any = None, endpoint: bool = True
    ) -> Array:
        """Return ``num`` numbers at equal distances, from ``start`` to ``stop``, or short of it without ``endpoint``."""
        self.check_device(device)
        kind = default_of(max(2, kind_of(type(start)), kind_of(type(stop)))) if dtype is None else DType.of(dtype)
        try:
            return self.of_op(ops.Linspace(start, stop, num, dtype=kind, endpoint=endpoint))  # type: ignore[arg-type]  # it refuses complex ones
        except (UnsupportedError, InvalidArgumentError):  # complex numbers
            return self._of_host(np.linspace(start, stop, num, endpoint=endpoint), kind, is_copied=False)

    def eye(self, n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: Any = None) -> Array:
        """Return a matrix with ones on the ``k``-th diagonal, and zeros elsewhere."""
        self.check_device(device)
        kind = DEFAULT["real floating"] if dtype is None else DType.of(dtype)
        columns = n_rows if n_cols is None else n_cols
        return self.of_op(ops.Eye(n_rows, columns, k, kind))

    def tril(self, x: Array, /, *, k: int = 0) -> Array:
        """Return matrices with zeros above the ``k``-th diagonal."""
        return self.make(x.shape, x.dtype, call_op, (x,), named("arrays", "tril", k))

    def triu(self, x: Array, /, *, k: int = 0) -> Array:
        """Return matrices with zeros below the ``k``-th diagonal."""
        return self.make(x.shape, x.dtype, call_op, (x,), named("arrays", "triu", k))

    def meshgrid(self, *arrays: Array, indexing: str = "xy") -> list[Array]:
        """Return for each of several one-dimensional arrays its elements along one axis of a grid."""
        check_choice("indexing", indexing, "xy", "ij")
        if not arrays:
            return []
        promoted(*[each.dtype for each in arrays])
        xp: Any = self
        order = list(range(len(arrays)))
        if indexing == "xy" and len(arrays) > 1:
            order[:2] = 1, 0
        shape = tuple([arrays[axis].size for axis in order])
        made = []
        for number, each in enumerate(arrays):
            lengths = [1] * len(arrays)
            lengths[order.index(number)] = -1
            made.append(xp.broadcast_to(xp.reshape(each, tuple(lengths)), shape))
        return made
