"""A library whose work fails in several ways, for tests of hazards. Child processes import it too."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import accel
from accel.ops import Plan, Spec

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 20.0
"""Seconds after which a wait of a test has failed."""


class UnprintableError(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@dataclass(frozen=True, eq=False, slots=True)
class Work(accel.KernelOp):
    """``-x``, computed by work in the stream; or what `way` says, or a negative element of ``x`` ("checked")."""

    library: ClassVar[str] = "ways"
    kind: ClassVar[str] = "work"

    x: accel.AccelRef
    way: str = ""
    out: accel.AccelRef | None = None
    gated: bool = False

    def plan(self) -> Plan:
        if self.out is None:
            return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))
        return Plan((self.x,), (self.out,), ())


class Ways(accel.KernelLibrary):
    """Work that goes well, or fails in one of several ways."""

    name = "ways"
    gate: ClassVar[threading.Event] = threading.Event()
    """What gated work waits for, in this process."""

    @accel.kernel(Work)
    def work(self, op: Work, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        x, out = np.asarray(inputs[0]), np.asarray(outputs[0])
        raising: dict[str, Callable[[], BaseException]] = {
            "raise": lambda: ValueError("a bad request"),
            "memory": lambda: MemoryError("no room for a temporary"),
            "cancel": asyncio.CancelledError,
            "exit": GeneratorExit,
            "unprintable": UnprintableError,
            "fault": lambda: accel.DriverError("illegal address", code=700, scope=accel.FaultScope.CONTEXT),
        }

        def work() -> None:
            if op.gated:
                self.gate.wait(PATIENCE)
            if op.way == "checked" and (x < 0).any():
                raise ValueError("a bad request")
            if op.way in raising:
                error = raising[op.way]()
                raise error
            np.negative(x, out=out)

        stream.submit(work, 1.0 if op.gated else 1e-6)


@dataclass(frozen=True, eq=False, slots=True)
class Halves(accel.KernelOp):
    """The first and the second half of ``x``."""

    library: ClassVar[str] = "halves"
    kind: ClassVar[str] = "halves"

    x: accel.AccelRef
    out: accel.AccelRef | None = None

    def plan(self) -> Plan:
        half = Spec((self.x.shape[0] // 2,), self.x.dtype)
        return Plan((self.x,), (), (half, half)) if self.out is None else Plan((self.x,), (self.out,), (half,))


@dataclass(frozen=True, eq=False, slots=True)
class Trip(accel.KernelOp):
    """Raises in the method."""

    library: ClassVar[str] = "halves"
    kind: ClassVar[str] = "trip"

    x: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Halving(accel.KernelLibrary):
    """Two results of one op, and a method that raises."""

    name = "halves"

    @accel.kernel(Halves)
    def halves(self, op: Halves, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        x, (first, second) = np.asarray(inputs[0]), map(np.asarray, outputs)

        def work() -> None:
            first[:], second[:] = np.split(x, 2)

        stream.submit(work, 1e-6)

    @accel.kernel(Trip)
    def trip(self, op: Trip, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        self.deep_in_the_kernel()

    def deep_in_the_kernel(self) -> None:
        raise ZeroDivisionError("tripped")
