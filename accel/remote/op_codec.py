"""Ops on the wire, from a parent to its child: plain values, and pickles of the rest.

An op travels as ``(number of its class, values of its fields, marks)``. An entry ``(index, mark)``
of the marks says that the value at that index stands for another object, of the kind ``mark``.
Classes, members of enumerations and compiled kernels have numbers, which the parent announces
before it uses them. Only a child unpickles, and only messages of its parent.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import io
import operator
import pickle
from collections import ChainMap
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from accel.dtype import DType
from accel.engine.by_value import by_value
from accel.engine.program import Program
from accel.errors import AccelError, UnsupportedError
from accel.ops import CompiledKernel, KernelOp, Spec
from accel.ref import AccelRef, ForeignRef, ManagedRef, RefView, SharedRef, StridedRef, view_of
from accel.remote.messages import ArenaSlice, WireOp

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

__all__ = ["OpReader", "OpWriter"]

_REF, _NAMED, _TUPLE, _SPEC, _ARRAY, _PROGRAM, _PICKLED = range(7)
"""Marks: the value stands for a ref, a named object, a tuple or a Spec with marks of its own, an
array in shared memory, a recorded graph, or another object, pickled.
"""

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_DTYPES = {member.value: member for member in DType}
_IMPORTABLE_REMEDY = "Define its class, and what its fields hold, at the top of a module that can be imported."
_set_field = object.__setattr__


class OpWriter:
    """Encodes ops for one child.

    Parameters
    ----------
    announce
        Sends the child an object and its number, before the number is used.
    """

    def __init__(self, announce: Callable[[int, object], None]) -> None:
        self._announce = announce
        self._numbers: dict[Hashable, int] = {}  # of announced objects, by their class or _key_of()
        # Members of enumerations, by id(): not all can be hashed.
        self._numbered_members: dict[int, tuple[int, object]] = {}
        # Class -> its number, and the function that returns the values of an op's fields.
        self._classes: dict[type, tuple[int, Callable[[Any], tuple[Any, ...]]]] = {}

    def write(self, op: KernelOp, place: ArenaSlice | None = None) -> WireOp:
        """Return an op for :meth:`OpReader.read`. The caller has checked its refs.

        Its class, and objects that are sent once, are announced to the child if they are new.

        Parameters
        ----------
        op
            The op.
        place
            Where the array of a put or get lies in shared memory.

        Raises
        ------
        UnsupportedError
            If the op holds an array, a ref outside its fields and their tuples, or an object that
            cannot be pickled, such as one of a class that cannot be imported by name.
        """
        cls = type(op)
        try:
            if cls not in self._classes:
                self._classes[cls] = self._number_of(cls, cls), _values_getter(cls)
            number, values_of = self._classes[cls]
            return number, *self._encode_values(list(values_of(op)), place)
        except AccelError as error:
            raise error.clone(op=op.kind) from None
        except Exception as error:  # pickle raises anything, and so does a class of a user's
            raise UnsupportedError(
                f"{cls.__qualname__} cannot be sent to the device's process: {error}", op=op.kind, remedy=_IMPORTABLE_REMEDY
            ) from error

    def _encode_values(self, values: list[Any], place: ArenaSlice | None = None) -> tuple[list[Any], list[tuple[int, int]]]:
        """Replace the values that are not plain by plain ones that stand for them, in place.

        Return all values, and the marks of the replaced ones. The checks are in the order of how
        often such values occur.
        """
        marks = []
        for i, value in enumerate(values):
            kind = type(value)
            if kind in _PLAIN:
                continue
            if kind is AccelRef:
                values[i], mark = (value.buffer, value.shape, value.dtype.value), _REF
            elif (member := self._numbered_members.get(id(value))) is not None:
                values[i], mark = member[0], _NAMED
            elif isinstance(value, AccelRef):
                values[i], mark = _encode_ref(value), _REF
            elif kind is tuple or kind is Spec:
                if kind is tuple and _PLAIN.issuperset(map(type, value)):
                    continue
                values[i], mark = self._encode_values(list(value)), _TUPLE if kind is tuple else _SPEC
            elif isinstance(value, np.ndarray) and place is not None:
                values[i], mark = (place.block, place.offset, place.shape, place.dtype.value), _ARRAY
            elif isinstance(value, np.ndarray):
                if value.ndim:
                    _refuse_array(value)
                values[i], mark = _pickled(value[()]), _PICKLED  # without dimensions it is a number
            elif (key := _key_of(value)) is not None:
                values[i], mark = self._number_of(key, value), _NAMED
                if isinstance(value, enum.Enum):
                    self._numbered_members[id(value)] = values[i], value  # keeps the id from reuse
            elif isinstance(value, Program):
                values[i], mark = value.handle.buffer, _PROGRAM
            else:
                values[i], mark = _pickled(value), _PICKLED
            marks.append((i, mark))
        return values, marks

    def _number_of(self, key: Hashable, value: object) -> int:
        """Return the number of an object; the first time, announce it to the child.

        For objects that are the same in many ops: each is pickled once.

        Parameters
        ----------
        key
            Identifies the object: a class itself, or its :func:`_key_of`.
        value
            The object.
        """
        number = self._numbers.get(key)
        if number is None:
            number = len(self._numbers) + 1
            self._announce(number, value)
            self._numbers[key] = number
        return number


class OpReader:
    """Decodes the ops of the parent.

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
        self._named: dict[int, Any] = {}  # announced objects, by number
        self._fields: dict[int, tuple[str, ...]] = {}  # number of a class -> names of its fields

    def define(self, number: int, value: object) -> None:
        """Store an object that ops name by a number.

        ``None`` for one that cannot be loaded here: reading an op that names it raises then.
        """
        self._named[number] = value
        if isinstance(value, type):
            self._fields[number] = _field_names(value)

    def read(self, wire: WireOp) -> KernelOp:
        """Return the op that :meth:`OpWriter.write` was given.

        Parameters
        ----------
        wire
            From a trusted sender: parts of it are unpickled. Its values are decoded in place.

        Raises
        ------
        UnsupportedError
            If the op cannot be loaded in this process.
        """
        number, values, marks = wire
        self._decode_values(values, marks)
        cls = self._named_object(number)
        op: KernelOp = cls.__new__(cls)
        names = self._fields[number]
        for name, value in zip(names, values, strict=False):
            _set_field(op, name, value)
        if len(values) > len(names):  # the dict of other attributes: see _values_getter
            vars(op).update(values[-1])
        return op

    def _decode_values(self, values: list[Any], marks: Sequence[tuple[int, int]]) -> None:
        """Replace the values with marks by the objects that they stand for, in place.

        Raises if one cannot be loaded here; the values before it are replaced by then.
        """
        for i, mark in marks:
            value = values[i]
            if mark == _REF:
                base = self._ref_of(value[0], value[1], _DTYPES[value[2]])
                values[i] = base if len(value) == 3 else view_of(base, value[3], value[4], _DTYPES[value[5]], value[6])
            elif mark == _NAMED:
                values[i] = self._named_object(value)
            elif mark in (_TUPLE, _SPEC):
                self._decode_values(*value)
                values[i] = tuple(value[0]) if mark == _TUPLE else Spec(*value[0])
            elif mark == _ARRAY:
                values[i] = self._array_of(ArenaSlice(value[0], value[1], value[2], _DTYPES[value[3]]))
            elif mark == _PROGRAM:
                values[i] = self._programs[value]
            else:
                values[i] = _unpickled(value)

    def _named_object(self, number: int) -> Any:
        """Return the object of a number; raise if it could not be loaded in this process."""
        named = self._named[number]
        if named is None:
            raise UnsupportedError("the op cannot be loaded in the device's process", remedy=_IMPORTABLE_REMEDY)
        return named


def _encode_ref(ref: AccelRef) -> tuple[Any, ...]:
    """Return a ref's buffer, shape and dtype; of a view, those of its base, then its own layout."""
    if isinstance(ref, RefView):
        base = ref.base
        return ref.buffer, base.shape, base.dtype.value, ref.offset, ref.shape, ref.dtype.value, ref.strides
    return ref.buffer, ref.shape, ref.dtype.value


def _key_of(value: object) -> Hashable | None:
    """Return the identity of an object that is sent once, and then named by a number.

    These are members of enumerations, and compiled kernels; ``None`` for all other objects.
    """
    if isinstance(value, enum.Enum):  # a member need not be hashable
        # Combined flags are no members, and may be many.
        return (type(value), value._name_) if value._name_ in type(value).__members__ else None
    return (value.key, value.layout, value.parameters) if type(value) is CompiledKernel else None


def _field_names(cls: type) -> tuple[str, ...]:
    """Return the names of an op's fields, and of slots that are no fields."""
    fields = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    slots = [name for base in cls.__mro__ for name in base.__dict__.get("__slots__", ()) if name not in KernelOp.__slots__]
    return tuple(dict.fromkeys((*fields, *slots)))


def _values_getter(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the values of an op's fields and slots.

    A dict of the op's other attributes follows them, if it has some.
    """
    names = _field_names(cls)
    values_of: Callable[[Any], tuple[Any, ...]] = (
        operator.attrgetter(*names) if len(names) > 1 else lambda op: tuple([getattr(op, name) for name in names])
    )
    if not cls.__dictoffset__:
        return values_of

    def with_others(op: object) -> tuple[Any, ...]:
        others = {name: value for name, value in vars(op).items() if name not in names}
        return (*values_of(op), others) if others else values_of(op)

    return with_others


def _refuse_array(array: object) -> NoReturn:
    """Raise, because an array inside an op would be copied."""
    raise UnsupportedError(
        f"the op holds a {type(array).__name__}, and arrays inside ops are not sent to the device's process",
        remedy="Put the array on the device and give the op the ref.",
    )


def _refuse_ref(ref: object) -> NoReturn:
    """Raise, because a ref in a pickled object means nothing in another process."""
    raise UnsupportedError(
        f"{ref!r} is neither a field of the op nor in a tuple that is one", remedy="Give each ref a field, or put the refs into a tuple."
    )


_REFUSED = {np.ndarray: _refuse_array} | dict.fromkeys((AccelRef, RefView, StridedRef, ForeignRef, ManagedRef, SharedRef), _refuse_ref)
_DISPATCH: Any = ChainMap[Any, Any](_REFUSED, copyreg.dispatch_table)


class _Pickler(pickle.Pickler):
    """Refuses arrays, which would be copied, and refs, which are valid in their own process only."""

    dispatch_table = _DISPATCH


def _pickled(value: object) -> bytes:
    """Return an object pickled; a function of a script by its code, as the child cannot import it."""
    file = io.BytesIO()
    _Pickler(file, 5).dump(value)
    data = file.getvalue()
    return by_value(value) if b"__main__" in data else data


def _unpickled(data: bytes) -> Any:
    """Return an object that :func:`_pickled` was given; raise if it cannot be loaded here."""
    try:
        return pickle.loads(data)
    except Exception as error:
        raise UnsupportedError(
            f"the op cannot be loaded in the device's process: {type(error).__name__}: {error}", remedy=_IMPORTABLE_REMEDY
        ) from error
