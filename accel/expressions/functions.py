"""What all functions of a namespace stand on."""

from __future__ import annotations

import difflib
import inspect
import operator
import reprlib
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from accel.errors import AccelError, InvalidArgumentError
from accel.expressions.array import Array, AxisError, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.dtype import DType

__all__ = ["Functions", "axis_of", "call_op", "explained", "named"]

C = TypeVar("C", bound=type)


def explained(space: str) -> Callable[[C], C]:
    """Return a decorator of a class: what its functions raise for wrong arguments names the function, and how it is called.

    Arguments are looked at by what is computed with them. What that raises tells of a step inside; the caller wants to know of the call. The error for a
    function that is not there says which are.

    Parameters
    ----------
    space
        What the functions are reached by: ``"xp"``.
    """

    def decorate(cls: C) -> C:
        for name in dir(cls):
            function = inspect.getattr_static(cls, name)
            if inspect.isfunction(function) and not name.startswith("_") and not inspect.iscoroutinefunction(function):
                setattr(cls, name, _explained(f"{space}.{name}", function))

        def absent(self: object, name: str) -> NoReturn:
            raise _missing(space, type(self), name)

        cls.__getattr__ = absent  # type: ignore[attr-defined]  # for a type checker, a function that is not there is an error
        return cls

    return decorate


def _explained(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # self is the first; arrays are given by their place.
    arrays = [place for place, each in enumerate(inspect.signature(function).parameters.values()) if each.annotation == "Array"]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for place in arrays:
            if place < len(args) and not isinstance(args[place], Array):
                raise _no_array(name, function, place, args[place])
        try:
            return function(*args, **kwargs)
        except (AccelError, MemoryError):
            raise
        except Exception as error:
            raise _explanation(name, function, args, kwargs, error) from error

    return call


def _no_array(name: str, function: Callable[..., Any], place: int, value: object) -> InvalidArgumentError:
    parameter = list(inspect.signature(function).parameters)[place]
    return InvalidArgumentError(
        f"{parameter} of {name} is {reprlib.repr(value)}, which is no array of xp",
        argument=parameter,
        remedy=f"Use {name}(xp.asarray({parameter})).",
    )


def _explanation(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Exception:
    """Return what to raise for an error of a function: a ``TypeError`` if the arguments are not even its parameters."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as wrong:
        return TypeError(f"{name}() {wrong}")
    _, *parameters = signature.parameters.values()
    shown = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in given.items() if key != "self" and not isinstance(value, Array))
    called = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)).replace("'", "")
    return InvalidArgumentError(f"{name} with {shown or 'these arrays'}: {error}", remedy=f"It is called as {name}{called}.")


_ELSEWHERE = {
    "norm": "linalg.vector_norm(x) or linalg.matrix_norm(x)",
    "dot": "vecdot(x1, x2) for vectors, x1 @ x2 for matrices",
    "inner": "vecdot(x1, x2)",
    "matrix_power": "linalg.matrix_power(x, n), or await device.solver.matrix_power(ref, n)",
    "concatenate": "concat(arrays)",
    "array": "asarray(value)",
    "transpose": "permute_dims(x, axes), or x.T",
    "amax": "max(x)",
    "amin": "min(x)",
    "absolute": "abs(x)",
    "clip_by_value": "clip(x, min, max)",
    "softmax": "x.softmax()",
}
"""What numpy and others call a function -> what there is."""


def _missing(space: str, owner: object, name: str) -> AttributeError:
    """Return the error for a function that is not there: it says which there are."""
    found = difflib.get_close_matches(name, [each for each in dir(owner) if not each.startswith("_")], n=3)
    remedy = (
        f"Use xp.{_ELSEWHERE[name]}."
        if name in _ELSEWHERE
        else f"Did you mean {' or '.join(found)}?"
        if found
        else "dir(xp) lists what there is."
    )
    return AttributeError(f"{space} has no {name!r}: it has the functions of the array API standard. {remedy}", name=name)


def named(family: str, name: str, *arguments: Any, **options: Any) -> tuple[Any, ...]:
    """Return the arguments of :func:`call_op`: which op, and what it is given behind its operands. They can be hashed."""
    return family, name, arguments, tuple(options.items())


def call_op(batch: Any, *operands: Any) -> Any:
    """Record an op of a family: the step of most functions."""
    *refs, family, name, arguments, options = operands
    return getattr(getattr(batch, family), name)(*refs, *arguments, **dict(options))


def axis_of(axis: Any, ndim: int) -> int:
    """Return the number of an axis, counted from the first one."""
    number = operator.index(axis)
    if isinstance(axis, bool):
        raise AxisError(f"axis is {axis}", remedy="Give an int.")
    if not -ndim <= number < ndim:
        raise AxisError(f"axis {axis} is not one of {ndim} dimension(s)", remedy="Count from 0, or from the end from -1.")
    return number % ndim


class Functions:
    """The part of a namespace that makes arrays.

    Parameters
    ----------
    device
        What computes them.

    Attributes
    ----------
    array_type
        The class of its arrays.
    """

    array_type: type[Array] = Array

    def __init__(self, device: Any) -> None:
        self.device = device

    def make(self, shape: Shape, dtype: DType, step: Any, inputs: tuple[Any, ...] = (), arguments: tuple[Any, ...] = ()) -> Array:
        """Return an array that is not computed yet; see :class:`~accel.expressions.array.Step`."""
        return self.array_type(self, shape, dtype, step, inputs, arguments)

    def check_device(self, device: Any) -> None:
        """Raise unless ``device`` is that of the namespace, or ``None``."""
        if device is not None and device is not self.device:
            raise InvalidArgumentError(f"{device!r} is another device", remedy="Use that device's own xp.")
