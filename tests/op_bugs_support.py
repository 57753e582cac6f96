"""Ops of a user with bugs, which children can import: each says by ``how`` where it goes wrong, and how."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np

import accel
from accel.ops import Plan, Spec

RELEASE = threading.Event()
"""Ends the work that ``"held"`` enqueues, in this process."""


class UnprintableError(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Odd(BaseException):
    """Is no Exception."""


class Demanding(accel.AccelError):
    """Takes other arguments than its parent."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class LibraryOwnError(RuntimeError):
    """What a library calls the device's error."""


KINDS: dict[str, type[BaseException]] = {
    "value": ValueError,
    "unprintable": UnprintableError,
    "cancelled": asyncio.CancelledError,
    "generator": GeneratorExit,
    "stop": StopIteration,
    "base": Odd,
    "memory": MemoryError,
    "exit": SystemExit,
    "interrupt": KeyboardInterrupt,
}
ODD = ("unprintable", "cancelled", "generator", "base", "demanding")
"""Those that used to leave an op without an answer."""


def throw(kind: str) -> NoReturn:
    """Raise an exception of a kind."""
    if kind == "demanding":
        raise Demanding(1, 2)
    raise KINDS[kind]("on purpose")


@dataclass(frozen=True, eq=False, slots=True)
class Bug(accel.KernelOp):
    """Adds 1, or goes wrong."""

    library: ClassVar[str] = "bugs"
    kind: ClassVar[str] = "bug"

    x: accel.AccelRef
    how: str = ""
    out: accel.AccelRef | None = None

    def plan(self) -> Plan:
        where, _, kind = self.how.partition(":")
        if where == "plan":
            throw(kind)
        if where == "nonsense":
            made: Plan = NONSENSE[kind](self.x)
            return made
        if self.out is not None:
            return Plan((self.x,), (self.out,), ())
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))

    def result(self, refs: tuple[accel.AccelRef, ...]) -> Any:
        where, _, kind = self.how.partition(":")
        if where == "result":
            throw(kind)
        return refs[0]


NONSENSE: dict[str, Any] = {
    "dtype": lambda x: Plan((x,), (), (Spec((4,), "float64"),)),  # type: ignore[arg-type]
    "none": lambda x: None,
    "no ref": lambda x: Plan((1,), (), ()),  # type: ignore[arg-type]
    "negative": lambda x: Plan((x,), (), (Spec((-4,), x.dtype),)),
    "fraction": lambda x: Plan((x,), (), (Spec((2.5,), x.dtype),)),  # type: ignore[arg-type]
    "no spec": lambda x: Plan((x,), (), ((4,),)),  # type: ignore[arg-type]
}


class Bugs(accel.KernelLibrary):
    """Kernels that go wrong, called on a thread beside the loop."""

    name = "bugs"

    def open(self, stream: Any) -> None:
        """Take nothing."""

    @accel.kernel(Bug)
    def bug(self, op: Bug, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        """Enqueue the sum, and raise before or after it."""
        where, _, kind = op.how.partition(":")
        if where == "kernel":
            throw(kind)
        x, out = np.asarray(inputs[0]), np.asarray(outputs[0])
        if where == "held":

            def late() -> None:
                RELEASE.wait(20)
                np.copyto(out, 7.0)

            stream.submit(late, 1.0)
        elif where == "slow":
            stream.submit(lambda: threading.Event().wait(0.3), 1.0)
        else:
            stream.submit(lambda: np.add(x, 1, out=out), 0.0)
        if kind:
            throw(kind)


class BugsOnTheLoop(Bugs):
    """The same, called on the loop's thread."""

    blocking = False


class Poisoned(accel.KernelLibrary):
    """Finds the device's fault first, as torch does, and raises it as an error of its own."""

    name = "bugs"

    def __init__(self, opens: bool = True) -> None:
        self.opens = opens

    def open(self, stream: Any) -> None:
        """Raise the device's fault as an error of its own, if it is to."""
        if not self.opens:
            _fault(stream)

    @accel.kernel(Bug)
    def bug(self, op: Bug, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        """Bring a fault about where the op says so, or where a token is out of range, wait for it, and raise something else."""
        x, out = np.asarray(inputs[0]), np.asarray(outputs[0])
        if op.how == "poison" or bool((x < 0).any()):
            _fault(stream)
        stream.submit(lambda: np.add(x, 1, out=out), 0.0)


class PoisonedOnTheLoop(Poisoned):
    """The same, called on the loop's thread."""

    blocking = False


def _fault(stream: Any) -> NoReturn:
    def work() -> NoReturn:
        raise accel.DriverError("an illegal address", code=700, library="driver", scope=accel.FaultScope.CONTEXT)

    stream.submit(work, 0.0)
    try:
        stream.synchronize()
    except accel.AccelError:
        raise LibraryOwnError("an illegal memory access was encountered") from None
    raise AssertionError("the stream is not poisoned")
