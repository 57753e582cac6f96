"""A library of the user's own that holds durable buffers, and keeps a journal of its life in a file, from any process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import accel
from accel.ops import Plan, Spec
from tests.device_support import bounded


@dataclass(frozen=True, eq=False, slots=True)
class Apply(accel.KernelOp):
    """``x @ w + b``, with what the library holds; after ``pause`` seconds of work on the device."""

    library: ClassVar[str] = "affine"
    kind: ClassVar[str] = "apply"

    x: accel.AccelRef
    pause: float = 0.0

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Affine(accel.KernelLibrary):
    """Computes with its weights where they are."""

    name = "affine"

    def __init__(self, journal: str, weights: dict[str, Any], more: Any = (), *, way: str = "") -> None:
        self.journal = Path(journal)
        self.weights = weights
        self.more = more
        self.way = way

    def note(self, what: str) -> None:
        with self.journal.open("a", encoding="utf-8") as file:
            file.write(f"{what} {os.getpid()}\n")

    def open(self, stream: Any) -> None:
        if self.way == "slow":
            time.sleep(0.4)
        if self.way == "fails later" and "open" in read(self.journal):
            raise RuntimeError("not a second time")
        if self.way.startswith("only ") and self.journal.exists() and self.way != f"only {os.getpid()}":
            raise RuntimeError("not in this process")
        self.w, self.b = np.asarray(self.weights["w"]), np.asarray(self.weights["b"])
        assert not self.weights["w"].is_output
        assert not self.w.flags.writeable
        self.note("open")

    @accel.kernel(Apply)
    def apply(self, op: Apply, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        x, y = np.asarray(inputs[0]), np.asarray(outputs[0])

        def work() -> None:
            time.sleep(op.pause)
            np.add(x @ self.w, self.b, out=y)

        stream.submit(work, 1.0 if op.pause else 1e-6)

    def close(self) -> None:
        del self.w, self.b  # work that came after this would fail
        self.note("close")


class Eager(Affine):
    """The same, opened before each generation begins."""

    eager = True


class Spread(Eager):
    """The same on the streams of the built-in libraries."""

    several_streams = True


class Weights:
    """Random weights, on the device and here."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.w, self.b = rng.standard_normal((6, 6)), rng.standard_normal(6)
        self._rng = rng

    async def put(self, device: accel.Device) -> dict[str, accel.AccelRef]:
        pair = await device.put(np.stack([np.zeros(6), self.b]), durable=True)
        return {"w": await device.put(self.w, durable=True), "b": pair[1]}

    async def holds(self, device: accel.Device) -> None:
        """See that the library computes with these weights."""
        x = self._rng.standard_normal((3, 6))
        y = await bounded(device.get(await device.run(Apply(await device.put(x)))))
        exact = x.astype(np.longdouble) @ self.w.astype(np.longdouble) + self.b
        np.testing.assert_allclose(y, exact.astype(np.float64), rtol=1e-12, atol=1e-12)


def read(journal: Path) -> list[str]:
    """Return what happened."""
    return [line.split()[0] for line in journal.read_text().splitlines()] if journal.exists() else []


def pids(journal: Path) -> list[int]:
    """Return where it happened."""
    return [int(line.split()[1]) for line in journal.read_text().splitlines()]
