"""Arrays that are not computed before they are awaited: an expression is a graph of them."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Generator
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.expressions.promotion import COMPLEX, COMPLEX_RANK, FLOAT_RANK, FLOATS, INTEGER_RANK, default_of, kind_of, promoted, real_of
from accel.ops.base import element
from accel.ops.fused import FUNCTIONS
from accel.ref import AccelRef

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "Array",
    "AxisError",
    "Cut",
    "LazyArrayError",
    "Shape",
    "Step",
    "apply",
    "beside",
    "broadcast",
    "cast",
    "dtype_of",
    "floor_divide",
    "is_number",
    "where",
]

Shape: TypeAlias = tuple[int | None, ...]
"""Lengths along axes; ``None`` where only the values of other arrays tell."""

Step: TypeAlias = Callable[..., Any]
"""``step(batch, *refs, *arguments)`` records ops, and returns the ref of the result."""

Operator: TypeAlias = "Callable[[Array, Any], Array]"

_NUMBERS = (bool, int, float, complex, np.generic)

SHOWN = 1000
"""The most elements whose values ``repr`` shows: as many as numpy's does without leaving some out."""

_next_number = itertools.count().__next__


class LazyArrayError(InvalidArgumentError):
    """The values of an array were asked for where nothing can be awaited."""


class AxisError(InvalidArgumentError, IndexError):
    """An axis or an index that an array does not have."""


class Cut:
    """A step whose result's shape depends on values: the expression is cut there, into batches.

    Parameters
    ----------
    run
        ``await run(device, *refs, *arguments)`` returns the ref of the result.
    """

    __slots__ = ("run",)

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run


def is_number(value: object) -> bool:
    """Return whether ``value`` is one of Python's or numpy's numbers, which take the dtype of the arrays beside them."""
    return isinstance(value, _NUMBERS)


def _operators(name: str) -> tuple[Operator, Operator]:
    """Return what an operator calls, as in ``x + y``, and what it calls where its left operand is no array."""

    def operator(self: Array, other: Any) -> Array:
        return _operator(name, self, other)

    def reflected(self: Array, other: Any) -> Array:
        return _operator(name, other, self)

    return operator, reflected


class Array:
    """An array of the Python array API standard that is not computed before it is awaited: ``y = await (x @ w + b).relu()``.

    Operators, methods and functions of ``device.xp`` record what to compute and return new arrays at once; shapes and dtypes are checked then. ``await``
    sends all that is not computed yet as one batch, and returns the same array, which keeps its result. Arrays are immutable: ``x += y`` makes
    another array, and ``x[key] = value`` raises.

    Attributes
    ----------
    shape : tuple of int or None
        ``None`` for a length that depends on values, until the array was awaited.
    dtype : DType
    xp : Namespace
        The functions of arrays of its device.
    step, inputs, arguments
        What computes it, of what: the name of a function of elements, a :data:`Step` or a :class:`Cut`. Nothing once it is computed.
    result : AccelRef or None
        What was computed; ``ref`` raises where there is nothing.
    signature : tuple or None
        Of a result that is one ref: its shape and dtype, and its strides, if it is not dense.
    number : int
        Larger than those of the arrays that it is computed from.
    running : Future or None
        Ends with the evaluation that computes it.
    values : numpy.ndarray or None
        Those of a small result that were copied to the host, for ``repr``: in an interactive session by
        the evaluation, elsewhere by :meth:`numpy`.

    Notes
    -----
    What is used by several parts of what is awaited together is computed once; what two awaits have in common is computed by each, unless it was
    awaited itself. Conversions that would have to wait (``bool(x)``, ``float(x)``, ``np.asarray(x)``) raise :class:`LazyArrayError`.
    """

    __slots__ = ("__weakref__", "arguments", "dtype", "inputs", "number", "result", "running", "shape", "signature", "step", "values", "xp")

    __hash__ = object.__hash__
    __array_priority__ = 1000
    instead_of_ref: ClassVar[str] = "Await the array, and give its ref: (await x).ref."
    """What to do where an op wants a ref."""

    __array_ufunc__: ClassVar[None] = None
    """numpy's operators leave theirs to the array's: ``numpy_array + x`` raises instead of converting."""

    def __init__(
        self, xp: Any, shape: Shape, dtype: DType, step: str | Step | Cut | None, inputs: tuple[Any, ...], arguments: tuple[Any, ...] = ()
    ) -> None:
        self.xp = xp  # the namespace, whose module is above this one
        self.shape = shape
        self.dtype = dtype
        self.step = step
        self.inputs = inputs
        self.arguments = arguments
        self.number = _next_number()
        self.result: AccelRef | None = None
        self.signature: tuple[Any, ...] | None = None
        self.running: asyncio.Future[None] | None = None
        self.values: np.ndarray[Any, Any] | None = None

    # -- what it is

    @property
    def device(self) -> Any:
        """The device that computes it."""
        return self.xp.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int | None:
        """Number of elements; ``None`` while it is not known."""
        size = 1
        for length in self.shape:
            if length is None:
                return None
            size *= length
        return size

    @property
    def ref(self) -> AccelRef:
        """The result.

        Raises
        ------
        LazyArrayError
            If the array was not awaited.
        """
        if self.result is None:
            raise LazyArrayError("the array is not computed yet", remedy="Await it first: (await x).ref.")
        return self.result

    @property
    def T(self) -> Array:  # noqa: N802  # the standard's name
        """The transpose of a matrix."""
        if self.ndim != 2:
            raise InvalidArgumentError(f"x.T of {self.ndim} dimension(s)", remedy="Use x.mT for stacks of matrices, or xp.permute_dims.")
        return self.mT

    @property
    def mT(self) -> Array:  # noqa: N802  # the standard's name
        """The transposes of a stack of matrices."""
        result: Array = self.xp.matrix_transpose(self)
        return result

    def __repr__(self) -> str:
        if self.values is not None:
            text = np.array2string(self.values, separator=", ", prefix="Array(")
            return f"Array({text}, {self.dtype.value}, {self.xp.device.name})"
        state = "computed" if self.result is not None else "not awaited"
        shape = ", ".join("?" if length is None else str(length) for length in self.shape)
        return f"<Array {self.dtype.value}[{shape}] {state} on {self.xp.device.name}>"

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """Return the namespace, ``device.xp``."""
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12"):
            raise InvalidArgumentError(f"api_version is {api_version!r}", remedy="Leave it out, or give '2024.12'.")
        return self.xp

    def to_device(self, device: Any, /, *, stream: Any = None) -> Array:
        """Return the array itself: it stays on the device that it is on."""
        if stream is not None:
            raise InvalidArgumentError("stream is given", remedy="Leave it out: the device orders its streams.")
        if device is not self.device:
            raise InvalidArgumentError(f"{device!r} is another device", remedy="Copy by the host: other.xp.asarray(await x.numpy()).")
        return self

    # -- values

    def __await__(self) -> Generator[Any, Any, Array]:
        return self._awaited().__await__()

    async def _awaited(self) -> Array:
        if self.result is None:
            await self.xp.evaluate(self)
        return self

    async def numpy(self) -> np.ndarray[Any, Any]:
        """Compute the array and copy it to the host."""
        await self
        result: np.ndarray[Any, Any] = await self.device.get(self.ref)
        if result.size <= SHOWN and self.values is None:
            self.values = result.copy()  # the caller may write into the other one
        return result

    def settle(self, ref: AccelRef) -> None:
        """Keep the result, and nothing of what it was computed from."""
        self.result = ref
        if isinstance(ref, AccelRef):  # not several results of one op
            self.shape = ref.shape
            self.signature = ref.shape, ref.dtype, ref.is_strided and ref.strides
        self.step, self.inputs, self.arguments = None, (), ()

    def _refuse(self, what: str) -> NoReturn:
        raise LazyArrayError(f"{what} needs values, and nothing can be awaited there", remedy="Use `value = await x.numpy()` first.")

    def __bool__(self) -> bool:
        self._refuse("bool(x)")

    def __int__(self) -> int:
        self._refuse("int(x)")

    def __float__(self) -> float:
        self._refuse("float(x)")

    def __complex__(self) -> complex:
        self._refuse("complex(x)")

    def __index__(self) -> int:
        self._refuse("x as an index")

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        self._refuse("np.asarray(x)")

    def __array_function__(self, function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuse numpy's functions, which would compute on the host, but those of the shape."""
        name = function.__name__
        if name in ("shape", "ndim", "size"):
            return function.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        instead = (
            f"x.xp.{name}(...)" if callable(getattr(self.xp, name, None)) else "the functions of x.xp, or `value = await x.numpy()` first"
        )
        raise LazyArrayError(f"np.{name} computes on the host", remedy=f"Use {instead}.")

    def __iter__(self) -> Any:
        raise LazyArrayError("rows are not iterated over by accident", remedy="Use xp.unstack(x), or x[i].")

    def __len__(self) -> int:
        if not self.shape or self.shape[0] is None:
            raise LazyArrayError("the array has no length, or one that depends on values", remedy="Await it first, and use x.shape.")
        return self.shape[0]

    def __dlpack__(
        self,
        /,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        return self.ref.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.ref.__dlpack_device__()

    def __getitem__(self, key: Any) -> Array:
        result: Array = self.xp.indexed(self, key)
        return result

    def __setitem__(self, key: Any, value: Any) -> None:
        raise InvalidArgumentError("arrays are immutable", remedy="Use x = xp.where(mask, value, x), which makes another array.")

    # -- operators

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("sub")
    __mul__, __rmul__ = _operators("mul")
    __truediv__, __rtruediv__ = _operators("div")
    __floordiv__, __rfloordiv__ = _operators("floor_divide")
    __mod__, __rmod__ = _operators("remainder")
    __pow__, __rpow__ = _operators("pow")
    __and__, __rand__ = _operators("bitwise_and")
    __or__, __ror__ = _operators("bitwise_or")
    __xor__, __rxor__ = _operators("bitwise_xor")
    __lshift__, __rlshift__ = _operators("left_shift")
    __rshift__, __rrshift__ = _operators("right_shift")

    def __eq__(self, other: object) -> Array:  # type: ignore[override]  # the standard's
        return _operator("equal", self, other)

    def __ne__(self, other: object) -> Array:  # type: ignore[override]  # the standard's
        return _operator("not_equal", self, other)

    def __lt__(self, other: Any) -> Array:
        return _operator("less", self, other)

    def __le__(self, other: Any) -> Array:
        return _operator("less_equal", self, other)

    def __gt__(self, other: Any) -> Array:
        return _operator("greater", self, other)

    def __ge__(self, other: Any) -> Array:
        return _operator("greater_equal", self, other)

    def __matmul__(self, other: Any) -> Array:
        if not isinstance(other, Array):
            return NotImplemented
        result: Array = self.xp.matmul(self, other)
        return result

    def __neg__(self) -> Array:
        result: Array = self.xp.negative(self)
        return result

    def __pos__(self) -> Array:
        return self

    def __abs__(self) -> Array:
        result: Array = self.xp.abs(self)
        return result

    def __invert__(self) -> Array:
        return apply("invert", self)

    # -- methods, for what is written from left to right

    def astype(self, dtype: Any) -> Array:
        """Return the elements converted to ``dtype``."""
        return cast(self, DType.of(dtype))

    def reshape(self, *shape: Any) -> Array:
        """Return the elements in another shape, in C order; one length may be -1."""
        result: Array = self.xp.reshape(self, shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
        return result

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            method = None if name.startswith("_") else self.xp.method(name)
            if method is None:
                raise AttributeError(f"an array has no {name!r}, and {self.xp!r} no function of arrays of that name", name=name)
            return types.MethodType(method, self)
    else:

        def __getattr__(self, name: str) -> Callable[..., Array]:
            raise AttributeError


def _operator(name: str, x: Any, y: Any) -> Array:
    if isinstance(x, Array):
        if isinstance(y, Array):
            if x.dtype is y.dtype and x.xp is y.xp:
                shape = x.shape if x.shape == y.shape else broadcast(x.shape, y.shape)
                return type(x)(x.xp, shape, _result(name, x.dtype), name, (x, y))
        elif isinstance(y, _NUMBERS):
            if beside(x.dtype, _class_of(y)) is x.dtype:
                return type(x)(x.xp, x.shape, _result(name, x.dtype), name, (x, number(y, x.dtype)))
        else:
            return _REFUSED
    elif not isinstance(x, _OPERANDS):
        return _REFUSED
    return apply(name, x, y)


_OPERANDS = (Array, *_NUMBERS)
_REFUSED: Array = NotImplemented  # operators return it for operands of others


# -- recording


@lru_cache(maxsize=1024)
def broadcast(*shapes: Shape) -> Shape:
    """Return the shape that arrays are broadcast to; beside ``None`` a length other than 1 decides.

    Raises
    ------
    InvalidArgumentError
        If they cannot be.
    """
    result: list[int | None] = []
    for lengths in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        known = {length for length in lengths if length is not None and length != 1}
        if len(known) > 1:
            raise InvalidArgumentError(
                f"shapes {' and '.join(map(str, shapes))} cannot be broadcast",
                remedy="Counted from the last axis, lengths must be equal or 1.",
            )
        result.append(known.pop() if known else None if None in lengths else 1)
    return tuple(reversed(result))


def cast(x: Array, dtype: DType) -> Array:
    """Return the elements of ``x`` as ``dtype``; ``x`` itself if it has it."""
    if x.dtype is dtype:
        return x
    if x.dtype.is_complex and not dtype.is_complex and dtype is not DType.BOOL:
        raise InvalidArgumentError(f"{x.dtype.value} as {dtype.value} would drop the imaginary part", remedy="Use xp.real(x).")
    return type(x)(x.xp, x.shape, dtype, dtype.value, (x,))


def apply(name: str, *values: Any, dtype: DType | None = None) -> Array:
    """Record a function of elements, one of :data:`accel.ops.fused.FUNCTIONS`, on arrays and numbers, which are promoted to one dtype and broadcast.

    Parameters
    ----------
    name
        The function.
    *values
        Arrays and Python's numbers; at least one is an array.
    dtype
        What they are converted to instead.

    Raises
    ------
    InvalidArgumentError, UnsupportedError
        If they have no dtype or shape in common, or the function does not take the dtype.
    """
    if len(values) == 1 and dtype is None and isinstance(values[0], Array):  # nothing is promoted
        x = values[0]
        return type(x)(x.xp, x.shape, _result(name, x.dtype), name, values)
    arrays = [value for value in values if isinstance(value, Array)]
    if not arrays:
        raise InvalidArgumentError(f"{name} of no array", remedy="Make an array of a number: xp.asarray(1.0).")
    first = arrays[0]
    xp, shape, is_mixed = first.xp, first.shape, len(arrays) < len(values)
    for value in arrays[1:]:
        if value.xp is not xp:
            raise InvalidArgumentError(
                "the arrays are of different devices", remedy="Copy by the host: device.xp.asarray(await x.numpy())."
            )
        if value.shape != shape:
            shape = broadcast(shape, value.shape)
        is_mixed = is_mixed or value.dtype is not first.dtype
    if dtype is None:
        dtype = dtype_of(*values) if is_mixed else first.dtype
    result = _result(name, dtype)
    if is_mixed or dtype is not first.dtype:
        values = tuple([cast(value, dtype) if isinstance(value, Array) else number(value, dtype) for value in values])
    return type(first)(xp, shape, result, name, values)


@lru_cache(maxsize=1024)
def _result(name: str, dtype: DType) -> DType:
    """Return the dtype of the result of a function."""
    function = FUNCTIONS[name]
    if dtype not in function.dtypes:
        raise InvalidArgumentError(f"{name} of {dtype.value} is not offered", remedy="Convert it first: xp.astype(x, dtype).")
    return dtype if function.result == "same" else DType.BOOL if function.result == "bool" else real_of(dtype)


def floor_divide(x1: Any, x2: Any) -> Array:
    """Record the largest whole numbers that are not above ``x1 / x2``: of infinities the standard's, which Python's need not be."""
    return apply("floor_divide", x1, x2)


def where(condition: Array, x1: Any, x2: Any) -> Array:
    """Record elements of ``x1`` where ``condition`` is true, else of ``x2``; one of the two may be a number."""
    dtype = dtype_of(x1, x2)
    inputs = (condition, *[cast(value, dtype) if isinstance(value, Array) else number(value, dtype) for value in (x1, x2)])
    shape = broadcast(*[value.shape for value in inputs if isinstance(value, Array)])
    return type(condition)(condition.xp, shape, dtype, "where", inputs)


def dtype_of(*values: Any) -> DType:
    """Return the dtype that arrays and numbers have in common: numbers raise it only if they are of a higher kind than all arrays."""
    for value in values:
        if not isinstance(value, (Array, *_NUMBERS)):
            raise InvalidArgumentError(f"{value!r:.100} is neither an array nor a number", remedy="Make an array of it: xp.asarray(...).")
    dtype = promoted(*[value.dtype for value in values if isinstance(value, Array)])
    for value in values:
        if not isinstance(value, Array):
            dtype = beside(dtype, _class_of(value))
    return dtype


def _class_of(value: Any) -> Any:
    return type(value)


@lru_cache(maxsize=1024)
def beside(dtype: DType, kind: Any) -> DType:
    """Return the dtype of an array of ``dtype`` beside a number of class ``kind``, which raises it only if it is of a higher kind."""
    rank = kind_of(kind)
    if rank == COMPLEX_RANK and dtype not in COMPLEX:
        return promoted(dtype, default_of(rank)) if dtype in FLOATS else default_of(rank)
    if (rank == FLOAT_RANK and dtype not in FLOATS and dtype not in COMPLEX) or (rank == INTEGER_RANK and dtype is DType.BOOL):
        return default_of(rank)
    return dtype


def number(value: Any, dtype: DType) -> np.generic:
    """Return a number as a scalar of ``dtype``."""
    # A cache would not tell 0.0 from -0.0.
    return _number(value, dtype) if type(value) in (int, float) and value else _number.__wrapped__(value, dtype)


@lru_cache(maxsize=4096, typed=True)
def _number(value: complex, dtype: DType) -> np.generic:
    made: Any = element("the number", value, dtype)
    result: np.generic = made[()]
    return result
