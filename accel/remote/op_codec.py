"""Ops on the wire, from the service to its child: a pickle in which refs are numbers and no array is copied.

An op names its refs in its fields and in tuples of them (the places where :func:`accel.ops.base.with_refs` looks). There they are taken out before
pickling, so that all of it runs in C. Only the child loads what its parent sent; nothing that a child sends is ever unpickled.
"""

from __future__ import annotations

import copyreg
import enum
import io
import pickle
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NoReturn, cast

import numpy as np

from accel.dtype import DType
from accel.errors import AccelError, UnsupportedError
from accel.ops import KernelOp
from accel.ref import AccelRef, ForeignRef, ManagedRef, RefView

__all__ = ["RefOf", "dump_op", "is_plain", "load_op"]

RefOf = Callable[[int, tuple[int, ...], DType, int, "int | None"], AccelRef]
"""``ref_of(buffer, shape, dtype, generation, offset)``: the child's own ref. ``offset`` in bytes is given for a view, else it is ``None``."""

_HARMLESS = frozenset((type(None), bool, int, float, complex, str, bytes))
_set = object.__setattr__
_BY_NAME = {member.value: member for member in DType}


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
        f"{ref!r} is neither a field of the op nor in a tuple that is one", remedy="Give each ref a field, or put them into a tuple."
    )


class _OpPickler(pickle.Pickler):
    dispatch_table = _Reducers(
        {np.ndarray: _refuse_array, AccelRef: _refuse_ref, RefView: _refuse_ref, ForeignRef: _refuse_ref, ManagedRef: _refuse_ref}
    )


def _searched(content: object) -> bytes:
    file = io.BytesIO()
    _OpPickler(file, 5).dump(content)
    return file.getvalue()


def dump_op(op: KernelOp) -> bytes:
    """Return ``op`` as bytes for :func:`load_op` in another process.

    Whether its refs are alive is not looked at here.

    Raises
    ------
    UnsupportedError
        If the op holds an array, a ref outside its fields and their tuples, or something that cannot be pickled, such as an object of a class
        that cannot be imported by name.
    """
    state = _state_of(op)
    try:
        if state is None:
            return _searched((op, None, None))
        refs, needs_search = _take_refs(state)
        content = (type(op), state, refs)
        return _searched(content) if needs_search else pickle.dumps(content, 5)
    except AccelError as error:
        raise error.clone(op=op.kind) from None
    except Exception as error:
        raise UnsupportedError(
            f"{type(op).__qualname__} cannot be sent to the device's process: {error}",
            op=op.kind,
            remedy="Define the class, and what its fields hold, at the top of a module that can be imported.",
        ) from error


def load_op(data: bytes, ref_of: RefOf) -> KernelOp:
    """Return the op that :func:`dump_op` wrote, with the refs that ``ref_of`` gives.

    Parameters
    ----------
    data
        From a trusted sender: it is unpickled.
    ref_of
        Called once for each ref, in the order of the op's fields. What it raises is raised here.

    Raises
    ------
    UnsupportedError
        If it cannot be loaded in this process.
    """
    try:
        cls, state, refs = pickle.loads(data)
    except Exception as error:
        raise UnsupportedError(
            f"the op cannot be loaded in the device's process: {type(error).__name__}: {error}",
            remedy="Define its class in a module that this process can import; what is in __main__ is not.",
        ) from error
    if state is None:
        return _checked(cls)  # all of the op, in its class's own way
    for name, position, buffer, shape, dtype, generation, offset in refs:
        ref = ref_of(buffer, shape, _BY_NAME[dtype], generation, offset)
        if position is None:
            state[name] = ref
        else:
            state[name] = (*state[name][:position], ref, *state[name][position + 1 :])
    op = cls.__new__(cls)
    for name, value in state.items():
        _set(op, name, value)
    return _checked(op)


def _take_refs(state: dict[str, Any]) -> tuple[list[tuple[Any, ...]], bool]:
    """Take the refs out of an op's attributes; return them with their places, and whether what is left may hold an array or another ref."""
    refs: list[tuple[Any, ...]] = []
    needs_search = False  # it costs as much as all the rest
    for name, value in state.items():
        kind = type(value)
        if kind in _HARMLESS or isinstance(value, enum.Enum):
            continue
        if isinstance(value, AccelRef):
            state[name] = None
            refs.append((name, None, *_wire_ref(value)))
        elif kind is tuple:
            refs += [(name, i, *_wire_ref(each)) for i, each in enumerate(value) if isinstance(each, AccelRef)]
            state[name] = rest = tuple([None if isinstance(each, AccelRef) else each for each in value])
            needs_search = needs_search or not _HARMLESS.issuperset(map(type, rest))
        elif isinstance(value, np.ndarray):
            # Without a dimension it is one number, which users give where a number is taken.
            state[name] = value[()] if value.ndim == 0 else _refuse_array(value)
        else:
            needs_search = True
    return refs, needs_search


def _wire_ref(ref: AccelRef) -> tuple[int, tuple[int, ...], str, int, int | None]:
    return ref.buffer, ref.shape, ref.dtype.value, ref.generation, ref.offset if isinstance(ref, RefView) else None


@lru_cache(maxsize=256)
def is_plain(cls: Any) -> bool:
    """Whether objects of the class are what their attributes are: it does not say itself how they are pickled."""
    own = any(hasattr(cls, name) for name in ("__getnewargs__", "__getnewargs_ex__"))
    reduced = cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__
    getting, setting = cls.__getstate__, getattr(cls, "__setstate__", None)
    # A dataclass with slots has functions of the standard library's own, which do nothing else.
    ours = getting is object.__getstate__ or getting.__module__ == "dataclasses"
    return ours and (setting is None or setting.__module__ == "dataclasses") and not own and not reduced


def _state_of(op: Any) -> dict[str, Any] | None:
    """Return the op's attributes by name, or ``None`` where its class says itself how it is pickled."""
    if not is_plain(cast("Hashable", type(op))):
        return None
    state: Any = object.__getstate__(op)
    if type(state) is tuple:
        attributes, slots = state
        return {**attributes, **slots} if attributes else dict(slots)
    return dict(state) if state else {}


def _checked(op: object) -> KernelOp:
    if not isinstance(op, KernelOp):
        raise UnsupportedError(f"{op!r} is not a KernelOp", remedy="Send an op, such as accel.ops.Gemm(a, b).")
    return op
