"""Ops on the wire, from the parent to its child: numbers and plain values for ``marshal``, and pickles only of what has no plain form.

The form of an op is ``(number of its class, values of its fields, marks)``. A mark ``(index, how)`` says that a value stands for something else. With
class number 0 the only value is the op itself, pickled. A class, a member of an enumeration and a compiled kernel have numbers, which the parent announces
before it uses them. Only the child loads what its parent sent; nothing that a child sends is ever unpickled.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import io
import operator
import pickle
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from accel.dtype import DType
from accel.engine.by_value import by_value
from accel.engine.program import Program
from accel.errors import AccelError, UnsupportedError
from accel.ops import CompiledKernel, KernelOp
from accel.ref import AccelRef, ForeignRef, ManagedRef, RefView, StridedRef, view_of
from accel.remote.messages import ArenaSlice, WireOp

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

__all__ = ["OpReader", "OpWriter"]

_REF, _NAMED, _TUPLE, _ARRAY, _PROGRAM, _PICKLED = range(6)
"""What a value stands for: a ref, a named object, a tuple with marks of its own, an array in shared memory, a recorded graph, or anything else."""

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_DTYPES = {member.value: member for member in DType}
_IMPORTABLE = "Define its class, and what its fields hold, at the top of a module that can be imported."
_set = object.__setattr__


class OpWriter:
    """The parent's end, for one child.

    Parameters
    ----------
    announce
        Sends the child an object and its number, before the number is used.
    """

    def __init__(self, announce: Callable[[int, object], None]) -> None:
        self._announce = announce
        self._numbers: dict[Hashable, int] = {}
        self._members: dict[int, tuple[int, object]] = {}  # of enumerations, by id(): not all can be hashed
        self._classes: dict[type, tuple[int, Callable[[Any], tuple[Any, ...]] | None]] = {}

    def write(self, op: KernelOp, place: ArenaSlice | None = None) -> WireOp:
        """Return an op as :meth:`OpReader.read` takes it. Whether its refs are valid is not checked here.

        Parameters
        ----------
        op
            What to send.
        place
            Where the array of a put or get lies in shared memory.

        Raises
        ------
        UnsupportedError
            If the op holds an array, a ref outside its fields and their tuples, or something that cannot be pickled, such as an object of a class
            that cannot be imported by name.
        """
        cls = type(op)
        try:
            if cls not in self._classes:
                getter = _getter(cls)
                self._classes[cls] = 0 if getter is None else self._number(cls, cls), getter
            number, get = self._classes[cls]
            if get is None:
                return 0, [_pickled(op)], [(0, _PICKLED)]
            return number, *self._encode(list(get(op)), place)
        except AccelError as error:
            raise error.clone(op=op.kind) from None
        except Exception as error:  # pickle raises anything, and so does a user's class
            raise UnsupportedError(
                f"{cls.__qualname__} cannot be sent to the device's process: {error}", op=op.kind, remedy=_IMPORTABLE
            ) from error

    def _encode(self, values: list[Any], place: ArenaSlice | None = None) -> tuple[list[Any], list[tuple[int, int]]]:
        """Replace in ``values`` what is not plain; return them with the marks that say what is replaced."""
        marks = []
        for i, value in enumerate(values):
            kind = type(value)
            if kind in _PLAIN:
                continue
            if kind is AccelRef:
                values[i], how = (value.buffer, value.shape, value.dtype.value), _REF
            elif (member := self._members.get(id(value))) is not None:
                values[i], how = member[0], _NAMED
            elif isinstance(value, AccelRef):
                values[i], how = _described(value), _REF
            elif kind is tuple:
                if _PLAIN.issuperset(map(type, value)):
                    continue
                values[i], how = self._encode(list(value)), _TUPLE
            elif isinstance(value, np.ndarray) and place is not None:
                values[i], how = (place.block, place.offset, place.shape, place.dtype.value), _ARRAY
            elif isinstance(value, np.ndarray):
                # Without a dimension it is one number, which users give where a number is taken.
                values[i], how = _pickled(value[()]) if value.ndim == 0 else _refuse_array(value), _PICKLED
            elif (key := _key_of(value)) is not None:
                values[i], how = self._number(key, value), _NAMED
                if isinstance(value, enum.Enum):
                    self._members[id(value)] = values[i], value  # kept, so that no other object has its id
            elif isinstance(value, Program):
                values[i], how = value.handle.buffer, _PROGRAM
            else:
                values[i], how = _pickled(value), _PICKLED
            marks.append((i, how))
        return values, marks

    def _number(self, key: Hashable, value: object) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = len(self._numbers) + 1
            self._announce(number, value)
            self._numbers[key] = number
        return number


class OpReader:
    """The child's end.

    Parameters
    ----------
    ref_of
        Returns the child's own ref of a whole buffer, given its number, shape and dtype.
    array_of
        Returns the array at a place in shared memory.
    programs
        The graphs of the child, by the buffers that stand for them.
    """

    def __init__(
        self,
        ref_of: Callable[[int, tuple[int, ...], DType], AccelRef],
        array_of: Callable[[ArenaSlice], np.ndarray[Any, Any]],
        programs: Mapping[int, Program],
    ) -> None:
        self._ref_of = ref_of
        self._array_of = array_of
        self._programs = programs
        self._named: dict[int, Any] = {}
        self._fields: dict[int, tuple[str, ...]] = {}

    def learn(self, number: int, value: object) -> None:
        """Store the object that a number names. ``None``: the object cannot be imported in this process."""
        self._named[number] = value
        if isinstance(value, type):
            self._fields[number] = _names(value)

    def read(self, wire: WireOp) -> KernelOp:
        """Return the op that :meth:`OpWriter.write` was given.

        Parameters
        ----------
        wire
            From a trusted sender: parts of it are unpickled.

        Raises
        ------
        UnsupportedError
            If it cannot be loaded in this process.
        """
        number, values, marks = wire
        self._decode(values, marks)
        if not number:
            return _checked(values[0])
        cls = self._find(number)
        op: KernelOp = cls.__new__(cls)
        names = self._fields[number]
        for name, value in zip(names, values, strict=False):
            _set(op, name, value)
        if len(values) > len(names):
            vars(op).update(values[-1])
        return _checked(op)

    def _decode(self, values: list[Any], marks: Sequence[tuple[int, int]]) -> None:
        for i, how in marks:
            value = values[i]
            if how == _REF:
                base = self._ref_of(value[0], value[1], _DTYPES[value[2]])
                values[i] = base if len(value) == 3 else view_of(base, value[3], value[4], _DTYPES[value[5]], value[6])
            elif how == _NAMED:
                values[i] = self._find(value)
            elif how == _TUPLE:
                self._decode(*value)
                values[i] = tuple(value[0])
            elif how == _ARRAY:
                values[i] = self._array_of(ArenaSlice(value[0], value[1], value[2], _DTYPES[value[3]]))
            elif how == _PROGRAM:
                values[i] = self._programs[value]
            else:
                values[i] = _loaded(value)

    def _find(self, number: int) -> Any:
        found = self._named[number]
        if found is None:
            raise UnsupportedError("the op cannot be loaded in the device's process", remedy=_IMPORTABLE)
        return found


def _described(ref: AccelRef) -> tuple[Any, ...]:
    """Return a ref's buffer with shape and dtype of the whole; after them, of a view, where it starts, its shape, its dtype and its strides."""
    if isinstance(ref, RefView):
        base = ref.base
        return ref.buffer, base.shape, base.dtype.value, ref.offset, ref.shape, ref.dtype.value, ref.strides
    return ref.buffer, ref.shape, ref.dtype.value


def _key_of(value: object) -> Hashable | None:
    """Return the key of an object that both ends name by a number, or ``None`` for any other. A member of an enumeration need not be hashable."""
    if isinstance(value, enum.Enum):
        # Flags that are combined are no members, and may be many.
        return (type(value), value._name_) if value._name_ in type(value).__members__ else None
    return (value.key, value.layout, value.parameters) if type(value) is CompiledKernel else None


def _names(cls: type) -> tuple[str, ...]:
    return tuple([each.name for each in dataclasses.fields(cls)]) if dataclasses.is_dataclass(cls) else ()


def _getter(cls: type) -> Callable[[Any], tuple[Any, ...]] | None:
    """Return a function that returns the values of an op's fields, and a dict of its other attributes where it has some.

    ``None``: the class itself says how its objects are pickled, or has slots that are no fields.
    """
    names = _names(cls)
    slots = {name for base in cls.__mro__ for name in base.__dict__.get("__slots__", ())} - {*KernelOp.__slots__}
    if not _is_plain(cls) or not slots.issubset(names):
        return None
    get: Callable[[Any], tuple[Any, ...]] = (
        operator.attrgetter(*names) if len(names) > 1 else lambda op: tuple([getattr(op, n) for n in names])
    )
    if not cls.__dictoffset__:
        return get

    def with_others(op: object) -> tuple[Any, ...]:
        others = {name: value for name, value in vars(op).items() if name not in names}
        return (*get(op), others) if others else get(op)

    return with_others


def _is_plain(cls: Any) -> bool:
    """Return whether objects of the class are what their attributes are: the class does not say itself how they are pickled."""
    own = any(hasattr(cls, name) for name in ("__getnewargs__", "__getnewargs_ex__"))
    reduced = cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__
    getting, setting = cls.__getstate__, getattr(cls, "__setstate__", None)
    # A dataclass with slots has functions of the standard library's own, which do nothing else.
    ours = getting is object.__getstate__ or getting.__module__ == "dataclasses"
    return ours and (setting is None or setting.__module__ == "dataclasses") and not own and not reduced


class _Reducers(dict[Any, Any]):
    """What is pickled otherwise than copyreg says, also than what it is told later."""

    def __missing__(self, kind: type) -> Any:
        return copyreg.dispatch_table[kind]


def _refuse_array(array: object) -> NoReturn:
    raise UnsupportedError(
        f"the op holds a {type(array).__name__}, and arrays inside ops are not sent to the device's process",
        remedy="Put the array on the device and give the op the ref.",
    )


def _refuse_ref(ref: object) -> NoReturn:
    raise UnsupportedError(
        f"{ref!r} is neither a field of the op nor in a tuple that is one", remedy="Give each ref a field, or put the refs into a tuple."
    )


class _Pickler(pickle.Pickler):
    """Refuses arrays, which it would copy, and refs, which are valid in their own process only."""

    dispatch_table = _Reducers(
        {np.ndarray: _refuse_array} | dict.fromkeys((AccelRef, RefView, StridedRef, ForeignRef, ManagedRef), _refuse_ref)
    )


def _pickled(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file, 5).dump(value)
    data = file.getvalue()
    return by_value(value) if b"__main__" in data else data


def _loaded(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise UnsupportedError(
            f"the op cannot be loaded in the device's process: {type(error).__name__}: {error}", remedy=_IMPORTABLE
        ) from error


def _checked(op: object) -> KernelOp:
    if not isinstance(op, KernelOp):
        raise UnsupportedError(f"{op!r} is not a KernelOp", remedy="Send an op, such as accel.ops.Gemm(a, b).")
    return op
