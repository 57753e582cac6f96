"""Nearest neighbours on any device: distances by one product, and the least of them by top-k; a batch is one message.

Run: ``pip install .``, in a checkout, then ``python examples/nearest_neighbours.py``.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np

import accel

KNOWN, ASKED, FEATURES, NEAREST = 5000, 64, 32, 5

Array = np.ndarray[Any, Any]


class Index:
    """Points on a device, with what their distances need of them.

    Parameters
    ----------
    device
        Where they are.
    points
        (points, features).
    squares
        The square of each point's length.
    """

    def __init__(self, device: accel.Device, points: accel.AccelRef, squares: accel.AccelRef) -> None:
        self.device, self.points, self.squares = device, points, squares

    @classmethod
    async def of(cls, device: accel.Device, points: Array) -> Index:
        """Put points on a device."""
        ref = await device.put(points)
        async with device.batch() as batch:
            squares = batch.reduce("sum", batch.elementwise.binary("mul", ref, ref), axis=1)
        return cls(device, ref, squares)

    async def nearest(self, asked: Array, k: int) -> tuple[Array, Array]:
        """Return the squared distances to the ``k`` nearest points of each row, nearest first, and which these are.

        ``|x - y|**2`` is ``|x|**2 + |y|**2 - 2 x y``, so a product has all of them.
        """
        x = await self.device.put(asked)
        async with self.device.batch() as batch:
            lengths = batch.reduce("sum", batch.elementwise.binary("mul", x, x), axis=1, keepdims=True)
            products = batch.linalg.matmul(x, self.points, transpose_b=True)
            sums = batch.elementwise.binary("add", lengths, self.squares)
            distances = batch.elementwise.binary("sub", sums, batch.elementwise.binary("mul", products, 2))
            values, places = batch.sort.topk(distances, k, largest=False)
        return await self.device.get(values), await self.device.get(places)


async def main() -> int:
    """Run the example and return its exit status."""
    rng = np.random.default_rng()
    known = rng.standard_normal((KNOWN, FEATURES)).astype(np.float32)
    asked = known[rng.integers(KNOWN, size=ASKED)] + 0.01 * rng.standard_normal((ASKED, FEATURES)).astype(np.float32)
    async with accel.System() as system:
        device = await system.open_device("auto", libraries=("linalg", "elementwise", "reduce", "sort"))
        index = await Index.of(device, known)
        distances, places = await index.nearest(asked, NEAREST)
        name = device.name
    expected = ((asked[:, None].astype(np.float64) - known) ** 2).sum(axis=2)
    ordered = np.sort(expected, axis=1)[:, :NEAREST]
    found = np.take_along_axis(expected, places, axis=1)
    print(f"{name}: nearest of {KNOWN} points:", np.array_equal(places[:, 0], expected.argmin(axis=1)))
    print(f"{NEAREST} nearest, nearest first:", np.allclose(found, ordered, atol=1e-3))
    print("their distances:", np.allclose(distances, ordered, atol=1e-3))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
