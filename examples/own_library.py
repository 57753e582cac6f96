"""A kernel library of your own, on any machine: scipy and numpy as ops of a device, alone, in a batch, in a graph, and through a fault.

Run: ``pip install '.[cpu]'``, in a checkout, then ``python examples/own_library.py``.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import accel
from accel.ops import Plan, Spec
from accel.testing import FaultPlan


@dataclass(frozen=True, eq=False, slots=True)
class Distances(accel.KernelOp):
    """Euclidean distances between the rows of ``x`` and those of ``y``."""

    library: ClassVar[str] = "neighbours"
    kind: ClassVar[str] = "distances"

    x: accel.AccelRef
    y: accel.AccelRef

    def plan(self) -> Plan:
        """Say what is read and made; what does not fit is refused here, before anything is sent."""
        for name, ref in (("x", self.x), ("y", self.y)):
            if len(ref.shape) != 2 or ref.dtype is not accel.DType.FLOAT64:
                raise accel.InvalidArgumentError(f"{name} is {ref.dtype.value}{list(ref.shape)}", remedy="Give float64 of two dimensions.")
        if self.x.shape[1] != self.y.shape[1]:
            raise accel.InvalidArgumentError(f"rows of {self.x.shape[1]} and of {self.y.shape[1]}", remedy="Give rows of one length.")
        return Plan((self.x, self.y), (), (Spec((self.x.shape[0], self.y.shape[0]), self.x.dtype),))


@dataclass(frozen=True, eq=False, slots=True)
class Nearest(accel.KernelOp):
    """The columns of the ``k`` smallest elements of each row, smallest first."""

    library: ClassVar[str] = "neighbours"
    kind: ClassVar[str] = "nearest"

    distances: accel.AccelRef
    k: int

    def plan(self) -> Plan:
        """Say what is read and made."""
        rows, columns = self.distances.shape
        if not 0 < self.k <= columns:
            raise accel.InvalidArgumentError(f"k is {self.k}", remedy=f"Give a number from 1 to {columns}.")
        return Plan((self.distances,), (), (Spec((rows, self.k), accel.DType.INT64),))


class Neighbours(accel.KernelLibrary):
    """Enqueues both: scipy computes distances, numpy finds the nearest."""

    name = "neighbours"

    def open(self, stream: Any) -> None:
        """Import what takes long, once for each context."""
        self._cdist = importlib.import_module("scipy.spatial.distance").cdist

    @accel.kernel(Distances)
    def distances(self, op: Distances, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        """Enqueue: what is submitted is called in its turn, by the stream's thread if it takes longer than 50 us."""
        (x, y), (out,) = map(np.asarray, inputs), map(np.asarray, outputs)
        stream.submit(lambda: self._cdist(x, y, out=out), 2e-9 * out.size * x.shape[1])

    @accel.kernel(Nearest)
    def nearest(self, op: Nearest, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        """Enqueue."""
        (distances,), (places,) = map(np.asarray, inputs), map(np.asarray, outputs)
        stream.submit(lambda: np.copyto(places, np.argsort(distances, axis=1)[:, : op.k]), 2e-8 * distances.size)


async def main() -> int:
    """Run the example and return its exit status."""
    rng = np.random.default_rng()
    known, asked = rng.standard_normal((500, 16)), rng.standard_normal((20, 16))
    expected = np.linalg.norm(asked[:, None] - known, axis=2).argmin(axis=1)

    async with accel.System() as system:
        device = await system.open_device("cpu", faults=FaultPlan().poison_at(3))
        try:
            await device.register(Neighbours)
        except accel.LibraryError as error:
            print(f"This example needs scipy (pip install '.[cpu]'): {error}", file=sys.stderr)
            return 1

        x, y = await device.put(asked), await device.put(known)
        try:
            await device.run(Distances(x, y))
        except accel.ContextPoisonedError as error:
            print(f"a fault in {error.op}; the device makes a new context, and the library is opened anew")
        x, y = await device.put(asked), await device.put(known)
        places = await device.run(Nearest(await device.run(Distances(x, y)), 1))
        print(f"one op after the other, generation {device.generation}:", np.array_equal((await device.get(places))[:, 0], expected))

        async with device.batch(timeout=1.0) as batch:
            distances = batch.run(Distances(x, y))
            places, least = batch.run(Nearest(distances, 3)), batch.reduce("min", distances, axis=1)
        found, all_distances = await device.get(places), await device.get(distances)
        print("in a batch, with an op of accel's:", np.array_equal(all_distances[np.arange(20), found[:, 0]], await device.get(least)))

        async with device.graph() as graph:
            places = graph.run(Nearest(graph.run(Distances(x, y)), 1))
        await device.put(known[:20], out=x)
        await graph.replay()
        print("in a graph, with other inputs:", np.array_equal((await device.get(places))[:, 0], np.arange(20)))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
