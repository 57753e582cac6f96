"""What `accel serve` serves unless it is told otherwise: digits told apart in batches, and samples to try it with."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from accel.cli.digits import PIXELS, Model, load_digits
from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.patterns import DynamicBatcher
from accel.values import converted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from accel import Device

__all__ = ["digits", "samples"]

_TIMEOUT = 5.0
"""Seconds that a client waits at most: longer than a rebuild takes."""


@contextlib.asynccontextmanager
async def digits(device: Device) -> AsyncIterator[Callable[[Any], Awaitable[dict[str, int]]]]:
    """Fit the model on a device, and give the function that tells which digit an image shows; what was submitted at the end is answered."""
    model = await Model.load(device)
    async with DynamicBatcher(model.classify, device=device, idempotent=True, overload="reject", max_pending=1024) as batcher:

        async def classify(image: Any) -> dict[str, int]:
            # Checked here, not in the batch, where one wrong image would be the error of all.
            given = image.get("pixels") if isinstance(image, dict) else None
            pixels = converted("pixels", given, DType.FLOAT32, argument="pixels")
            if pixels.shape != (PIXELS,) or not (pixels.min() >= 0 and pixels.max() <= 1):
                raise InvalidArgumentError(f'an image is {{"pixels": [...]}} with {PIXELS} numbers from 0 to 1', argument="pixels")
            return {"digit": await batcher.submit(pixels, timeout=_TIMEOUT)}

        yield classify


async def samples(device: Device) -> Callable[[Any], Awaitable[dict[str, Any]]]:
    """Return the function that gives a digit that the model has not seen: its ``pixels``, and as ``label`` what it shows."""
    loaded = await asyncio.to_thread(load_digits)

    async def sample(number: Any) -> dict[str, Any]:
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidArgumentError("a sample's number is an integer", argument="body")
        number %= len(loaded.held_out_labels)
        return {"pixels": loaded.held_out_images[number], "label": int(loaded.held_out_labels[number])}

    return sample
