"""What both example services offer, whatever their framework: digits told apart in batches, and samples to try it with."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cli.digits import PIXELS, Digits, Model
from accel.errors import InvalidArgumentError
from accel.patterns import DynamicBatcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from numpy.typing import NDArray

    from accel import Device

__all__ = ["BODY_LIMIT", "DigitsService", "open_service"]

BODY_LIMIT = 1 << 20
"""Bytes of a request's body. An image has a few hundred; JSON of this size takes a few tens of MiB while it is parsed."""

_TIMEOUT = 5.0
"""Seconds that a client waits at most: longer than a rebuild takes."""


class DigitsService:
    """The routes' work.

    Parameters
    ----------
    batcher
        Classifies single images in batches.
    digits
        Where samples come from.
    """

    def __init__(self, batcher: DynamicBatcher[NDArray[np.float32], int], digits: Digits) -> None:
        self._batcher = batcher
        self._digits = digits

    async def classify(self, image: Any) -> dict[str, int]:
        """Tell which digit an image shows: ``{"digit": 3}``.

        Parameters
        ----------
        image
            ``{"pixels": [...]}`` with 64 numbers from 0 to 1; other keys do not matter.

        Raises
        ------
        InvalidArgumentError
            It is something else.
        AccelError
            What the batcher raised.
        """
        try:
            pixels = np.array(image["pixels"], np.float64)
        except (KeyError, TypeError, ValueError, OverflowError):
            pixels = np.empty(0)
        # Checked here, not in the batch, where one wrong image would be everybody's error.
        if pixels.shape != (PIXELS,) or not (pixels.min() >= 0 and pixels.max() <= 1):
            raise InvalidArgumentError(f'an image is {{"pixels": [...]}} with {PIXELS} numbers from 0 to 1')
        return {"digit": await self._batcher.submit(pixels.astype(np.float32), timeout=_TIMEOUT)}

    def sample(self, number: int) -> dict[str, Any]:
        """Return a digit that the model has not seen: its ``pixels``, and as ``label`` what it shows; ``number`` wraps around."""
        digits = self._digits
        number %= len(digits.held_out_labels)
        return {"pixels": digits.held_out_images[number].tolist(), "label": int(digits.held_out_labels[number])}


@contextlib.asynccontextmanager
async def open_service(device: Device, digits: Digits) -> AsyncIterator[DigitsService]:
    """Fit the model on the device, and serve until the block ends; what was submitted by then is answered."""
    model = await Model.load(device, digits)
    async with DynamicBatcher(model.classify, device=device, idempotent=True, overload="reject", max_pending=1024) as batcher:
        yield DigitsService(batcher, digits)
