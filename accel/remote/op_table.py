"""The short form of ops on the wire: classes are numbers that both ends know, and what both have seen is not said again.

What it has no form for goes by :mod:`accel.remote.op_codec`, which can do more, and costs more.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from typing import TYPE_CHECKING, Any, cast

from accel.dtype import DType
from accel.errors import UnsupportedError
from accel.ref import AccelRef, RefView
from accel.remote.op_codec import dump_op, is_plain, load_op

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.ops import KernelOp
    from accel.remote.op_codec import RefOf

__all__ = ["OpReader", "OpWriter"]

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_set = object.__setattr__


class OpWriter:
    """The parent's end, for one child.

    Parameters
    ----------
    announce
        Tells the child which class a number stands for, before it is used.

    Attributes
    ----------
    told : set of int
        Buffers whose shape and dtype the child has been told. Who frees one takes it out.
    """

    def __init__(self, announce: Callable[[int, type], None]) -> None:
        self.told: set[int] = set()
        self._announce = announce
        self._numbers: dict[type, int] = {}
        self._enums: dict[tuple[type, str], tuple[Any, int]] = {}  # class and name -> what stands for members whose values are plain
        self._getters: dict[type, Callable[[Any], tuple[Any, ...]] | None] = {}

    def write(self, op: KernelOp) -> bytes | tuple[Any, ...]:
        """Return an op as :meth:`OpReader.read` takes it, of what ``marshal`` can write.

        Raises
        ------
        UnsupportedError
            See :func:`accel.remote.op_codec.dump_op`.
        """
        cls = type(op)
        try:
            getter = self._getters[cls]
        except KeyError:
            getter = self._getters[cls] = _getter(cls)
        if getter is None:
            return dump_op(op)
        values = list(getter(op))
        refs: list[int] = []
        enums: list[tuple[int, int]] = []
        for i, value in enumerate(values):
            kind = type(value)
            if kind in _PLAIN:
                continue
            if kind is AccelRef:
                values[i] = value.buffer if value.buffer in self.told else self._introduce(value)
                refs.append(i)
            elif kind is RefView:
                values[i] = (value.buffer, value.shape, value.dtype.value, value.offset)
                refs.append(i)
            elif isinstance(value, enum.Enum) and (known := self._enums.get((kind, value._name_)) or self._member(value)) is not None:
                values[i], number = known
                enums.append((i, number))
            elif kind is not tuple or not _PLAIN.issuperset(map(type, value)):
                return dump_op(op)
        return self._number(cls), values, refs, enums

    def _introduce(self, ref: AccelRef) -> tuple[Any, ...]:
        self.told.add(ref.buffer)
        return ref.buffer, ref.shape, ref.dtype.value, None

    def _member(self, member: enum.Enum) -> tuple[Any, int] | None:
        """Return a member's value, if that is plain, and its class's number, and keep them: by its name, for it need not be hashable."""
        cls, value = type(member), member.value
        if type(value) not in _PLAIN:
            return None
        known = value, self._number(cls)
        if type(member._name_) is str:  # several flags together have none
            self._enums[cls, member._name_] = known
        return known

    def _number(self, cls: type) -> int:
        number = self._numbers.get(cls)
        if number is None:
            number = len(self._numbers) + 1
            try:
                self._announce(number, cls)
            except Exception as error:  # pickle raises what it likes
                raise UnsupportedError(
                    f"{cls.__qualname__} cannot be sent to the device's process: {error}",
                    remedy="Define it at the top of a module that can be imported.",
                ) from error
            self._numbers[cls] = number
        return number


class OpReader:
    """The child's end.

    Parameters
    ----------
    ref_of
        See :data:`accel.remote.op_codec.RefOf`.
    known
        Buffer -> ref, of those that need not be described.
    """

    def __init__(self, ref_of: RefOf, known: dict[int, AccelRef]) -> None:
        self._ref_of = ref_of
        self._known = known
        self._classes: dict[int, tuple[Any, tuple[str, ...]] | None] = {}

    def learn(self, number: int, cls: type | None) -> None:
        """Take note of what a number stands for; ``None``: of something that cannot be imported here."""
        self._classes[number] = None if cls is None else (cls, () if issubclass(cls, enum.Enum) else _names(cls))

    def read(self, data: bytes | tuple[Any, ...]) -> KernelOp:
        """Return the op that :meth:`OpWriter.write` was given.

        Raises
        ------
        UnsupportedError
            If it cannot be loaded in this process.
        """
        if type(data) is bytes:
            return load_op(data, self._ref_of)
        number, values, refs, enums = cast("tuple[int, list[Any], list[int], list[tuple[int, int]]]", data)
        cls, names = self._class(number)
        known = self._known
        for i in refs:
            value = values[i]
            if type(value) is int:
                values[i] = known[value]
            else:
                buffer, shape, dtype, offset = value
                values[i] = self._ref_of(buffer, shape, DType(dtype), 0, offset)
        for i, kind in enums:
            values[i] = self._class(kind)[0](values[i])
        op: KernelOp = cls.__new__(cls)
        for name, value in zip(names, values, strict=True):
            _set(op, name, value)
        return op

    def _class(self, number: int) -> tuple[Any, tuple[str, ...]]:
        found = self._classes[number]
        if found is None:
            raise UnsupportedError(
                "the op cannot be loaded in the device's process", remedy="Define its class in a module that this process can import."
            )
        return found


def _names(cls: Any) -> tuple[str, ...]:
    return tuple(each.name for each in dataclasses.fields(cls))


def _getter(cls: Any) -> Callable[[Any], tuple[Any, ...]] | None:
    """Return what gives the fields of a class's ops; ``None`` if there is more to an op than its fields."""
    if cls.__dictoffset__ or not is_plain(cls) or not dataclasses.is_dataclass(cls):
        return None
    names = _names(cls)
    if not names:
        return lambda _: ()
    get = operator.attrgetter(*names)
    return get if len(names) > 1 else lambda op: (get(op),)
