"""A library of the user's own that another process can import."""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import accel
from accel.completion.signalled import SignalledWatcher
from accel.ops import Plan, Spec
from accel.remote.answers import Answers


@dataclass(frozen=True, eq=False, slots=True)
class Scale(accel.KernelOp):
    """``factor * x``."""

    library: ClassVar[str] = "sent"
    kind: ClassVar[str] = "scale"

    x: accel.AccelRef
    factor: float = 2.0

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


@dataclass(frozen=True, eq=False, slots=True)
class ScaleAs(Scale):
    """``factor * x``, in a dtype that is named."""

    kind: ClassVar[str] = "scale_as"

    dtype: Any = "float32"

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.dtype),))


@dataclass(frozen=True, eq=False, slots=True)
class Where(Scale):
    """The number of the process that runs it."""

    kind: ClassVar[str] = "where"


@dataclass(frozen=True, eq=False, slots=True)
class Stall(Scale):
    """Ends at once; or never gets enqueued, with the interpreter's lock in hand or without; or what is to say or to see that it has ended fails."""

    kind: ClassVar[str] = "stall"

    way: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Spread(accel.KernelOp):
    """A copy of ``x``."""

    library: ClassVar[str] = "spread"
    kind: ClassVar[str] = "spread"

    x: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Scaling(accel.KernelLibrary):
    """Scales with numpy."""

    name = "sent"

    def __init__(self, extra: float = 1.0, *, fails: bool = False, faults: bool = False) -> None:
        self.extra = extra
        self.fails = fails
        self.faults = faults

    def open(self, stream: Any) -> None:
        if self.fails:
            raise RuntimeError("no such library")
        if self.faults:
            raise accel.DriverError("illegal address", code=700, scope=accel.FaultScope.CONTEXT)

    @accel.kernel(Scale)
    def scale(self, op: Scale, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        source, target = np.asarray(inputs[0]), np.asarray(outputs[0])
        stream.submit(lambda: np.multiply(source, op.factor * self.extra, out=target), 1e-6)

    @accel.kernel(ScaleAs)
    def scale_as(self, op: ScaleAs, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        self.scale(op, stream, inputs, outputs)

    @accel.kernel(Where)
    def where(self, op: Where, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        target = np.asarray(outputs[0])
        stream.submit(lambda: target.fill(os.getpid()), 1e-6)

    @accel.kernel(Stall)
    def stall(self, op: Stall, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        if op.way == "answers":
            Answers._send = _broken  # type: ignore[method-assign,assignment]
        if op.way == "looks":
            SignalledWatcher._poll = _broken  # type: ignore[method-assign,assignment]
        while op.way == "locked":
            ctypes.PyDLL(None).pause()
        if op.way == "waits":
            threading.Event().wait()


def _broken(_: object) -> None:
    raise RuntimeError("this is broken")
