"""A probe that records what it is told, and an op that takes as long as it is told; a child can import it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import accel
from accel.ops import Plan, Spec
from accel.telemetry.probe import METHODS

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Nap", "Napping", "Recorder"]


class Recorder(accel.Probe):
    """Has the name of each method that was called, and what it was given."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[Any, ...]]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.told]

    def of(self, *names: str) -> list[Any]:
        """Return the first thing that each call of these methods was given."""
        return [arguments[0] for name, arguments in self.told if name in names]


def _recording(name: str) -> Callable[..., None]:
    def method(self: Recorder, *arguments: Any) -> None:
        self.told.append((name, arguments))

    return method


for _name in METHODS:
    setattr(Recorder, _name, _recording(_name))


@dataclass(frozen=True, eq=False, slots=True)
class Nap(accel.KernelOp[accel.AccelRef]):
    """A copy of ``x``, which the device has worked ``seconds`` for."""

    kind: ClassVar[str] = "nap"

    library: str  # type: ignore[misc]
    x: accel.AccelRef
    seconds: float

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Napping(accel.KernelLibrary):
    """Sleeps on the stream's worker."""

    name = "napping"

    @accel.kernel(Nap)
    def nap(self, op: Nap, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        source, target = np.asarray(inputs[0]), np.asarray(outputs[0])

        def work() -> None:
            time.sleep(op.seconds)
            target[...] = source

        stream.submit(work)
