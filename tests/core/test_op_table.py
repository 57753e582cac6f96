"""The short form of ops on the wire: what comes back is what was sent, whatever the classes of a user's fields do."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import accel
from accel.ops import KernelOp, Plan
from accel.remote.op_table import OpReader, OpWriter

if TYPE_CHECKING:
    from collections.abc import Callable


class Unhashable(enum.Enum):
    ONE = 1

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


class First(enum.IntEnum):
    SAME = 1


class Second(enum.IntEnum):
    SAME = 1


class Flags(enum.Flag):
    A = 1
    B = 2


@dataclass(frozen=True, eq=False, slots=True)
class Own(KernelOp):
    library: ClassVar[str] = "own"
    kind: ClassVar[str] = "own"

    mode: Any

    def plan(self) -> Plan:
        return Plan((), (), ())


def pair() -> tuple[OpWriter, Callable[[KernelOp], Any]]:
    """Return a writer, and what reads what it has written as the other process does."""

    def ref_of(*_: object) -> accel.AccelRef:
        raise AssertionError("no op has a ref")

    reader = OpReader(ref_of, {})
    writer = OpWriter(reader.learn)
    return writer, lambda op: reader.read(writer.write(op))


def test_members_are_the_same_each_time_they_are_sent() -> None:
    _, sent = pair()
    for _ in range(2):
        for member in (Unhashable.ONE, First.SAME, Second.SAME, Flags.A, Flags.A | Flags.B, Flags(0), accel.DType.FLOAT32):
            mode = sent(Own(member)).mode
            assert mode is member, "of two classes that have equal members too"


def test_plain_values_and_tuples_of_them_are_equal() -> None:
    _, sent = pair()
    for value in (None, True, 3, 2.5, 1j, "text", b"bytes", (1, "two", 3.0)):
        mode = sent(Own(value)).mode
        assert (mode, type(mode)) == (value, type(value))
