"""Images on any device: blurred and searched for edges by convolutions, and scaled down by pooling; the bright rectangle in each noisy image is found.

Run: ``pip install .``, in a checkout, then ``python examples/image_pipeline.py``.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np

import accel

IMAGES, HEIGHT, WIDTH = 16, 96, 128
STRONG = 2.0
"""Squared gradient of an edge, where white is 1."""
NEAR = 3
"""How many pixels the found edges may be off: as many as the filters reach."""

Array = np.ndarray[Any, Any]


def pictures(rng: np.random.Generator) -> tuple[Array, Array]:
    """Return images of 8-bit grey with a rectangle each, and the rectangles: first and last row, first and last column."""
    images = rng.integers(0, 40, (IMAGES, 1, HEIGHT, WIDTH)).astype(np.uint8)
    boxes = []
    for image in images[:, 0]:
        top, left = int(rng.integers(8, HEIGHT // 2)), int(rng.integers(8, WIDTH // 2))
        bottom, right = top + int(rng.integers(16, 40)), left + int(rng.integers(16, 56))
        image[top : bottom + 1, left : right + 1] += 200
        boxes.append((top, bottom, left, right))
    return images, np.array(boxes)


def filters() -> tuple[Array, Array]:
    """Return a filter that blurs, and the two that find edges, as (results, channels, rows, columns)."""
    bell = np.array([1, 4, 6, 4, 1], np.float32) / 16
    across = np.array([1, 2, 1], np.float32)[:, None] * np.array([-1, 0, 1], np.float32)
    return np.outer(bell, bell)[None, None], np.stack((across, across.T))[:, None]


async def edges_and_thumbnails(device: accel.Device, images: Array) -> tuple[Array, Array, Array]:
    """Return which rows and which columns of each image have strong edges, and the images in an eighth of their size."""
    bell, gradients = [await device.put(each) for each in filters()]
    pixels = await device.put(images)
    async with device.batch() as batch:
        grey = batch.elementwise.binary("div", batch.elementwise.cast(pixels, "float32"), 255)
        smooth = batch.dnn.conv2d(grey, bell, padding=2)
        slopes = batch.dnn.conv2d(smooth, gradients, padding=1)
        strength = batch.reduce("sum", batch.elementwise.binary("mul", slopes, slopes), axis=1)
        is_edge = batch.elementwise.binary("greater", strength, STRONG)
        rows, columns = batch.reduce("any", is_edge, axis=2), batch.reduce("any", is_edge, axis=1)
        small = batch.dnn.avg_pool(grey, 8)
    return await device.get(rows), await device.get(columns), await device.get(small)


async def main() -> int:
    """Run the example and return its exit status."""
    images, boxes = pictures(np.random.default_rng())
    async with accel.System() as system:
        device = await system.open_device("auto", libraries=("dnn", "elementwise", "reduce"))
        rows, columns, small = await edges_and_thumbnails(device, images)
        name = device.name
    ends = [(np.flatnonzero(row)[[0, -1]], np.flatnonzero(column)[[0, -1]]) for row, column in zip(rows, columns, strict=True)]
    off = int(np.abs(np.array(ends).reshape(IMAGES, 4) - boxes).max())
    means = images.reshape(IMAGES, 1, HEIGHT // 8, 8, WIDTH // 8, 8).mean(axis=(3, 5)) / 255
    print(f"{name}: {IMAGES} rectangles found, within {NEAR} pixels:", off <= NEAR)
    print(f"thumbnails of {small.shape[2]} x {small.shape[3]}:", np.allclose(small, means, atol=1e-5))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
