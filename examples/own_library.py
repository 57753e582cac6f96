"""Functions of your own as ops of a device, on any machine: scipy and numpy, alone, in a batch, in a graph, and through a fault.

Run: ``pip install '.[cpu]'``, in a checkout, then ``python examples/own_library.py``.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys

import numpy as np

import accel
from accel.ops import Spec
from accel.testing import FaultPlan


@accel.kernel_op(makes=lambda x, y: Spec((x.shape[0], y.shape[0]), x.dtype))
def distances(out: accel.Operand, x: accel.AccelRef, y: accel.AccelRef) -> None:
    """Compute Euclidean distances between the rows of ``x`` and those of ``y``."""
    importlib.import_module("scipy.spatial.distance").cdist(np.asarray(x), np.asarray(y), out=np.asarray(out))


@accel.kernel_op(makes=lambda values, k: Spec((values.shape[0], k), accel.DType.INT64))
def nearest(out: accel.Operand, values: accel.AccelRef, k: int = 1) -> None:
    """Find the columns of the ``k`` smallest elements of each row, smallest first."""
    np.asarray(out)[...] = np.argsort(np.asarray(values), axis=1)[:, :k]


async def main() -> int:
    """Run the example and return its exit status."""
    if importlib.util.find_spec("scipy") is None:
        print("This example needs scipy (pip install '.[cpu]').", file=sys.stderr)
        return 1
    rng = np.random.default_rng()
    known, asked = rng.standard_normal((500, 16)), rng.standard_normal((20, 16))
    expected = np.linalg.norm(asked[:, None] - known, axis=2).argmin(axis=1)

    async with accel.System() as system:
        device = await system.open_device("cpu", faults=FaultPlan().poison_at(3))
        x, y = await device.put(asked), await device.put(known)
        try:
            await device.run(distances(x, y))
        except accel.ContextPoisonedError as error:
            print(f"a fault in {error.op}; the device makes a new context")
        x, y = await device.put(asked), await device.put(known)
        places = await device.run(nearest(await device.run(distances(x, y))))
        print(f"one op after the other, generation {device.generation}:", np.array_equal((await device.get(places))[:, 0], expected))

        async with device.batch(timeout=1.0) as batch:
            between = batch.run(distances(x, y))
            places, least = batch.run(nearest(between, 3)), batch.reduce("min", between, axis=1)
        found, all_distances = await device.get(places), await device.get(between)
        print("in a batch, with an op of accel's:", np.array_equal(all_distances[np.arange(20), found[:, 0]], await device.get(least)))

        async with device.graph() as graph:
            places = graph.run(nearest(graph.run(distances(x, y))))
        await device.put(known[:20], out=x)
        await graph.replay()
        print("in a graph, with other inputs:", np.array_equal((await device.get(places))[:, 0], np.arange(20)))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
