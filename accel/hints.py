"""What to use instead: errors of Python's own protocols (attributes, operators, ``with``) that name the remedy.

Type checkers see none of this: what is an error for them stays one.
"""

from __future__ import annotations

from numbers import Number
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["REF_HINTS", "AsyncOnly", "NoArray", "NoModel", "NotEntered", "hinted", "hinted_in_class"]

T = TypeVar("T")


def hinted(remedies: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Let names that users of other libraries try on an object raise :class:`AttributeError` with what to use instead.

    They come from ``__getattr__``. That makes every attribute of the class slower, by 20 to 35 ns, and a call
    of a method by 80 to 100 ns (CPython 3.11): not measurable in an op or a message, which touch few of a
    device, a batch or the address of an actor. Refs have :func:`hinted_in_class`.

    Parameters
    ----------
    remedies
        Name -> a sentence with the remedy. Names that the class has are left alone.
    """

    def add(kind: type[T]) -> type[T]:
        def __getattr__(self: object, name: str) -> Any:  # noqa: N807
            if name in remedies and not hasattr(type(self), name):
                raise _missing(f"{type(self).__name__!r} object", name, remedies[name])
            # Python's own error, or that of a property, which has led here.
            return object.__getattribute__(self, name)

        kind.__getattr__ = __getattr__  # type: ignore[attr-defined]
        return kind

    return add


def hinted_in_class(remedies: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """As :func:`hinted`, by attributes of the class that raise, for classes of which an op touches many attributes.

    With ``__getattr__`` on refs, an awaited gemm took 26.7 us and not 25.2, an op of a batch 18.9 and not 18.0.
    """

    def add(kind: type[T]) -> type[T]:
        missing = remedies.keys() - set(dir(kind))
        for name in missing:
            setattr(kind, name, _Missing(name, remedies[name]))
        kind.__dir__ = lambda self: [name for name in object.__dir__(self) if name not in missing]  # type: ignore[method-assign]
        return kind

    return add


class _Missing:
    """An attribute that is not there and says what to use instead; ``hasattr`` is ``False``."""

    __slots__ = ("_name", "_remedy")

    def __init__(self, name: str, remedy: str) -> None:
        self._name = name
        self._remedy = remedy

    def __get__(self, instance: object, owner: type) -> NoReturn:
        what = f"type object {owner.__name__!r}" if instance is None else f"{owner.__name__!r} object"
        raise _missing(what, self._name, self._remedy)


def _missing(what: str, name: str, remedy: str) -> AttributeError:
    return AttributeError(f"{what} has no attribute {name!r}. {remedy}", name=name)


class AsyncOnly:
    """What is entered by ``async with`` says so when it is entered by ``with``, or awaited."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise TypeError(f"{type(self).__name__} is entered by `async with`, not by `with`")

        def __exit__(self, *error: object) -> None:
            """Complete the protocol, without which ``with`` would not ask for :meth:`__enter__`."""

        def __await__(self) -> NoReturn:
            raise TypeError(f"{type(self).__name__} is entered by `async with`, and not awaited")


class NotEntered:
    """What is closed by its owner says so when it is entered."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise TypeError(f"{self!r} is not entered: its system closes it, or `await {type(self).__name__.lower()}.aclose()`")

        async def __aenter__(self) -> NoReturn:
            self.__enter__()

        def __exit__(self, *error: object) -> None:
            """Complete the protocol, without which ``with`` would not ask for :meth:`__enter__`."""

        async def __aexit__(self, *error: object) -> None:
            """See :meth:`__exit__`."""


class NoModel:
    """What pydantic, and so FastAPI, is told where the class is written as the type of data."""

    __slots__ = ()

    _not_data: ClassVar[str]
    """What to write instead."""

    if not TYPE_CHECKING:

        @classmethod
        def __get_pydantic_core_schema__(cls, source: object, handler: Callable[[object], object]) -> object:
            try:
                return handler(source)  # a model may allow it as an arbitrary type
            except Exception as error:
                raise TypeError(f"{cls.__name__} is no type of data for requests and responses. {cls._not_data}") from error


_HOST = "opy it to the host: array = await device.get(ref)"
_DATA = f"is a handle to device memory, not its data; c{_HOST}"

_BINARY = {
    **{
        name: f"{_DATA}, or use await device.elementwise.binary({op!r}, x, y) with two refs"
        for name, op in {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div"}.items()
    },
    "matmul": f"{_DATA}, or use await device.blas.gemm(x, y) with two refs",
    **dict.fromkeys(("floordiv", "mod", "pow", "and", "or", "xor"), _DATA),
}
_COMPARISONS = dict.fromkeys(("lt", "le", "gt", "ge"), _DATA)
_UNARY = {
    **{name: f"{_DATA}, or use await device.elementwise.unary({name!r}, ref)" for name in ("neg", "abs")},
    **dict.fromkeys(("pos", "invert", "round", "float", "int", "complex", "iter", "contains"), _DATA),
    "setitem": "is not assigned to: write a part of it with await device.put(array, out=ref[index])",
    "await": "is not awaited: a method of a batch or graph returns its ref at once, without `await`, and the data is there after the batch's block",
}
"""Name of the method -> what is said of the ref."""

_TRANSPOSED = "Use ref.T or ref.transpose(axes), which are views."
_CONVERTED = "Convert the array before it is put on the device, or after: (await device.get(ref)).astype(...)."

REF_HINTS = {
    **dict.fromkeys(("numpy", "cpu", "get", "item", "tolist", "tobytes", "detach", "data"), f"C{_HOST}."),
    **dict.fromkeys(("mT", "t", "swapaxes", "permute"), _TRANSPOSED),
    **dict.fromkeys(("astype", "to", "float", "double", "half", "cuda"), _CONVERTED),
    **{name: f"Use await device.reduce({name!r}, ref, axis=...)." for name in ("sum", "mean", "max", "min")},
    **{name: f"Use await device.elementwise.unary({name!r}, ref)." for name in ("relu", "sigmoid", "tanh", "exp", "log", "sqrt", "abs")},
    **dict.fromkeys(("dot", "matmul", "mm"), "Use await device.blas.gemm(x, y)."),
    **dict.fromkeys(("copy", "clone"), "Use await device.copy(ref, await device.empty(ref.shape, ref.dtype))."),
    **dict.fromkeys(("free", "close", "release"), "Use await device.free(ref), or drop the last reference to it."),
    **dict.fromkeys(("fill", "fill_", "zero_", "copy_", "put"), "Write into it: await device.put(array, out=ref)."),
    **dict.fromkeys(("data_ptr", "ptr"), "Use `with ref.address() as pointer:`."),
    **dict.fromkeys(("flatten", "squeeze", "unsqueeze"), "Use ref.ravel() or ref.reshape(shape)."),
}
"""What users of numpy and torch try on a ref -> what to use instead."""


class NoArray(NoModel):
    """What a handle answers where it is used as the array itself: :class:`TypeError` with the remedy."""

    __slots__ = ()

    _not_data = f"C{_HOST}, and return array.tolist()."

    if not TYPE_CHECKING:

        def __format__(self, spec: str) -> str:
            if spec:
                raise TypeError(f"{self!r} {_DATA}")
            return str(self)

        @property
        def __pydantic_serializer__(self) -> Any:
            """What pydantic, and so FastAPI, asks a value of a type that it does not know."""
            try:
                from pydantic_core import SchemaSerializer, core_schema
            except ImportError:
                raise AttributeError("pydantic is not installed") from None
            refusal = core_schema.plain_serializer_function_ser_schema(_no_json)
            return SchemaSerializer(core_schema.any_schema(serialization=refusal))


def _no_json(ref: object) -> NoReturn:
    raise TypeError(f"{ref!r} {_DATA}")


def _refuse(name: str, text: str, reflected: str | None = None) -> None:
    """Let the method say so. Where the other operand's type has the reflected one, that is asked: it may know what to do with a ref."""

    def refuse(self: NoArray, *operands: object) -> Any:
        if reflected and not isinstance(operands[0], (NoArray, Number)) and hasattr(operands[0], f"__{reflected}__"):
            return NotImplemented
        raise TypeError(f"{self!r} {text}")

    refuse.__name__ = refuse.__qualname__ = f"__{name}__"
    setattr(NoArray, refuse.__name__, refuse)


for _name, _text in _BINARY.items():
    _refuse(_name, _text, f"r{_name}")
    _refuse(f"r{_name}", _text)
for _name, _text in _COMPARISONS.items():
    _refuse(_name, _text, _name)
for _name, _text in _UNARY.items():
    _refuse(_name, _text)
