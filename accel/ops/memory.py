"""Ops that move, make and fill buffers, and that say where managed memory is used."""

from __future__ import annotations

from dataclasses import field
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.ops.base import KernelOp, Plan, Shape, Spec, checked_spec, element, op, operand, plan_of, result_in
from accel.ref import AccelRef, overlap
from accel.values import check_choice

__all__ = ["Advise", "Checksum", "Copy", "Empty", "Fill", "Free", "Get", "Prefetch", "Put"]

Array = np.ndarray[Any, np.dtype[Any]]
Advice: TypeAlias = Literal["read_mostly", "preferred_device", "preferred_host", "accessed_by_device", "accessed_by_host"]
ADVICES: tuple[Advice, ...] = get_args(Advice)


@op("memory")
class Put(KernelOp):
    """Copy a host array to the device.

    Parameters
    ----------
    source
        C-contiguous array in native byte order (see :func:`accel.dtype.native`). It is read until the op has ended.
    out
        Buffer to write; a new one is made where it is ``None``.
    durable
        Whether the buffer outlives the context.
    """

    source: Array
    out: AccelRef | None = None
    durable: bool = False

    def plan(self) -> Plan:
        source, out, durable = self.source, self.out, self.durable
        if out is None and durable is False:  # mostly they are
            return plan_of(((), (), (Spec(source.shape, DType.of(source.dtype)),), "", DType.UINT8, False, None))
        return Plan((), *result_in(out, source.shape, DType.of(source.dtype), durable=durable))


@op("memory")
class Get(KernelOp[Any]):
    """Copy a buffer to the host. The result is ``destination``.

    Parameters
    ----------
    source
        Buffer to read.
    destination
        Writable C-contiguous array of the same shape and dtype; it is written until the op has ended.
    """

    source: AccelRef
    destination: Array

    @classmethod
    def into(cls, source: AccelRef, out: Array | None) -> Get:
        """Return the op that fills ``out``, or a new array."""
        if out is None:
            out = np.empty(source.shape, source.dtype.numpy)
        elif not isinstance(out, np.ndarray):
            raise InvalidArgumentError(
                f"out is a {type(out).__name__}, not a numpy array", remedy="Give np.empty(ref.shape, ref.dtype.numpy)."
            )
        return cls(source, out)

    def plan(self) -> Plan:
        source, destination = self.source, self.destination
        if type(source) is not AccelRef:
            operand("source", source)
        dtype = source.dtype.numpy
        if destination.shape != source.shape or (destination.dtype is not dtype and destination.dtype != dtype):
            raise InvalidArgumentError(
                f"out is {destination.dtype}{list(destination.shape)}, the buffer is {source.dtype.value}{list(source.shape)}",
                remedy="Give an array of the buffer's shape and dtype, or leave out= out.",
            )
        flags = destination.flags
        if not (flags.c_contiguous and flags.writeable):
            raise InvalidArgumentError("out is not a writable C-contiguous array", remedy="Get into a new array and copy from there.")
        return plan_of(((source,), (), (), "", DType.UINT8, False, None))

    def result(self, refs: tuple[AccelRef, ...]) -> Any:
        """Return the filled array."""
        return self.destination


@op("memory")
class Empty(KernelOp):
    """Make a buffer without setting its contents; ``durable`` if it shall outlive the context."""

    shape: Shape
    dtype: DType
    durable: bool = False

    def plan(self) -> Plan:
        return Plan((), (), (checked_spec(self.shape, self.dtype, self.durable),))


@op("memory")
class Fill(KernelOp):
    """Make (or overwrite) a buffer whose elements are all ``value``.

    Parameters
    ----------
    shape, dtype
        Of the buffer.
    value
        A number. An integer type takes whole numbers in its range, a boolean one 0 and 1; floats round it, and beyond the largest it is infinite.
    out
        Buffer to overwrite; a new one is made where it is ``None``.
    durable
        Whether the buffer outlives the context.
    """

    shape: Shape
    dtype: DType
    value: Any = 0
    out: AccelRef | None = None
    durable: bool = False

    def plan(self) -> Plan:
        shape, dtype, _ = checked_spec(self.shape, self.dtype, self.durable)
        self.pattern()
        return Plan((), *result_in(self.out, shape, dtype, durable=self.durable))

    def pattern(self) -> bytes:
        """Return the bytes of one element.

        Raises
        ------
        InvalidArgumentError
            If ``value`` is no number, ``dtype`` is no float and cannot hold it, or it is complex and the type is not.
        """
        if type(self.value) is int and not self.value:
            return bytes(self.dtype.itemsize)  # as zeros() asks for: a 0 of any dtype has no bit set
        return element("value", self.value, self.dtype).tobytes()


@op("memory")
class Copy(KernelOp):
    """Copy one buffer into another of the same shape and dtype.

    Parameters
    ----------
    source
        Buffer to read.
    destination
        Buffer to write; a new one is made where it is ``None``.
    durable
        Whether a new one outlives the context.
    """

    source: AccelRef
    destination: AccelRef | None = None
    durable: bool = False

    def plan(self) -> Plan:
        source = operand("source", self.source)
        if self.destination is None:
            return Plan((source,), *result_in(None, source.shape, source.dtype, durable=self.durable))
        destination = operand("destination", self.destination)
        if overlap(destination, source):
            what = "are the same buffer" if destination is source else "overlap: they are views of one buffer"
            raise InvalidArgumentError(f"source and destination {what}", remedy="Give two buffers, or parts that do not overlap.")
        if destination.shape != source.shape or destination.dtype is not source.dtype:
            raise InvalidArgumentError(
                f"source is {source.dtype.value}{list(source.shape)}, destination is {destination.dtype.value}{list(destination.shape)}",
                remedy="Give two buffers of one shape and dtype.",
            )
        return Plan((source,), (destination,), ())


@op("memory")
class Lend(KernelOp[Any]):
    """Lend a whole buffer to another device. The result is the loan, with whose end the read ends.

    Parameters
    ----------
    source
        The buffer.
    mapped
        Numbers of slabs that the other device has mapped: their descriptors are not sent again.
    """

    source: AccelRef
    mapped: tuple[int, ...] = ()

    def plan(self) -> Plan:
        return Plan((operand("source", self.source),), (), ())

    def result(self, refs: tuple[AccelRef, ...]) -> Any:
        """Return the loan, which begins with the op's place in the device's order."""
        return self.source.owner.sharing.lend(self.source, self.mapped)


@op("memory")
class Checksum(Get):
    """Fetch a checksum of 64 bits of all bytes of a buffer. The result is ``destination``, an array of that number.

    It is the backend's own: the same bytes give the same number on every device of the backend, in every process. Fault
    plans do not count it.
    """

    destination: Array = field(default_factory=partial(np.empty, 1, np.uint64))

    def plan(self) -> Plan:
        # The device adds the number up in a buffer that no caller sees.
        return Plan((operand("source", self.source),), (), (Spec((1,), DType.UINT64),))


@op("memory")
class Free(KernelOp[Any]):
    """Give a buffer's memory back, after the ops sent before. Fault plans do not count it."""

    ref: AccelRef

    def plan(self) -> Plan:
        operand("ref", self.ref)
        return Plan((), (), ())


def _managed(ref: object) -> AccelRef:
    found = operand("ref", ref)
    if found.is_strided:
        raise InvalidArgumentError(f"{found!r} is no run of bytes", remedy="Give its base, or a contiguous part.")
    if not found.is_managed:
        raise InvalidArgumentError(f"{found!r} is not managed memory", remedy="Make the buffer with device.managed(shape, dtype).")
    return found


@op("memory")
class Prefetch(KernelOp):
    """Move a managed buffer, or a view of one, before it is used there.

    Parameters
    ----------
    ref
        What is moved, by pages.
    to
        ``"device"`` or ``"host"``.
    """

    ref: AccelRef
    to: Literal["device", "host"] = "device"

    def plan(self) -> Plan:
        ref = _managed(self.ref)
        check_choice("to", self.to, "device", "host")
        return Plan((ref,), (), ())


@op("memory")
class Advise(KernelOp):
    """Tell the driver how a managed buffer, or a view of one, is going to be used.

    Parameters
    ----------
    ref
        What the advice is about, by pages.
    advice
        One of :data:`ADVICES`.
    undo
        Take the advice back.
    """

    ref: AccelRef
    advice: Advice
    undo: bool = False

    def plan(self) -> Plan:
        ref = _managed(self.ref)
        check_choice("advice", self.advice, *ADVICES)
        return Plan((ref,), (), ())
