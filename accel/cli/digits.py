"""The model that the demo and the example services serve: handwritten digits, told apart by a classifier fitted on the device.

``digits.npz`` beside this module is the test set of E. Alpaydin and C. Kaynak, `Optical Recognition of Handwritten Digits
<https://doi.org/10.24432/C50P49>`_, UCI Machine Learning Repository, 1998 (CC BY 4.0): the images and labels that scikit-learn ships too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel import AccelRef, Device

__all__ = ["PIXELS", "Digits", "Model", "load_digits"]

PIXELS = 64
"""Pixels of an image: 8 rows of 8, flattened."""

_CLASSES = 10


@dataclass(frozen=True, slots=True)
class Digits:
    """The 1,797 handwritten digits, split in two.

    Parameters
    ----------
    train_images, held_out_images
        float32 of shape (n, 64), brightness from 0 to 1.
    train_labels, held_out_labels
        int64 of shape (n,), the digits 0 to 9.
    """

    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    held_out_images: NDArray[np.float32]
    held_out_labels: NDArray[np.int64]


def load_digits(seed: int = 0, *, held_out: float = 0.2) -> Digits:
    """Load the digits: a file of 45 KB.

    Parameters
    ----------
    seed
        Decides which digits are held out; the same seed, the same split.
    held_out
        Fraction that is not for fitting.
    """
    with (resources.files("accel.cli") / "digits.npz").open("rb") as file, np.load(file) as loaded:
        images = loaded["images"].astype(np.float32) / np.float32(16)
        labels = loaded["labels"].astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(labels))
    kept = round(len(labels) * (1 - held_out))
    first, last = order[:kept], order[kept:]
    return Digits(images[first], labels[first], images[last], labels[last])


class Model:
    """Ridge regression onto the ten classes, over random features: ``relu(image @ projection) @ weights``. Made by :meth:`load`.

    The numbers live on the host too, so that they can be put on the device again after a rebuild; :meth:`predict` sees to that.

    Parameters
    ----------
    device
        Where it runs.
    projection
        float32 of shape (65, features): from pixels, and a one for the bias, to features.
    weights
        float32 of shape (features, 10).
    durable
        Keep them on the device in buffers that outlive faults.

    Attributes
    ----------
    puts : int
        How often they were put on the device.
    """

    def __init__(self, device: Device, projection: NDArray[np.float32], weights: NDArray[np.float32], *, durable: bool = False) -> None:
        self.device = device
        self.durable = durable
        self.puts = 0
        self.projection = projection
        self.weights = weights
        self._refs: tuple[AccelRef, AccelRef] | None = None
        self._putting = asyncio.Lock()

    @classmethod
    async def load(
        cls, device: Device, digits: Digits | None = None, *, seed: int = 0, features: int = 512, ridge: float = 0.1, durable: bool = False
    ) -> Model:
        """Fit the model on a device, and leave its weights there.

        The features, their Gram matrix and the right-hand side are computed on the device; the small system of equations is solved on the host.

        Parameters
        ----------
        device
            Where to fit and to serve.
        digits
            What to fit; ``None`` loads them, in a thread.
        seed
            Of the split and of the random projection.
        features
            Number of random features.
        ridge
            How much large weights are punished.
        durable
            Keep the weights on the device in buffers that outlive faults.
        """
        if digits is None:
            digits = await asyncio.to_thread(load_digits, seed)
        rng = np.random.default_rng(seed)
        projection = rng.standard_normal((PIXELS + 1, features), np.float32) / np.float32(4)
        # The first feature is the bias itself.
        projection[:, 0] = 0
        projection[PIXELS, 0] = 1
        targets = np.where(digits.train_labels[:, None] == np.arange(_CLASSES), 1, -1).astype(np.float32)
        async with device.batch() as batch:
            images = batch.put(_with_bias(digits.train_images))
            hidden = batch.blas.gemm(images, batch.put(projection))
            batch.elementwise.unary("relu", hidden, out=hidden)
            gram = batch.blas.gemm(hidden, hidden, transpose_a=True)
            right = batch.blas.gemm(hidden, batch.put(targets), transpose_a=True)
        system = (await device.get(gram)).astype(np.float64) + ridge * np.eye(features)
        weights = (await asyncio.to_thread(np.linalg.solve, system, await device.get(right))).astype(np.float32)
        model = cls(device, projection, weights, durable=durable)
        await model._on_device()
        return model

    async def predict(self, images: NDArray[Any]) -> NDArray[np.int64]:
        """Tell which digits the images show.

        Parameters
        ----------
        images
            Shape (n, 64), brightness from 0 to 1.

        Returns
        -------
        numpy.ndarray
            int64 of shape (n,).

        Raises
        ------
        InvalidArgumentError
            The shape is another.
        AccelError
            What the device raised; after a rebuild the weights are put there again by the next call.
        """
        rows = _with_bias(images)
        projection, weights = await self._on_device()
        async with self.device.batch() as batch:
            hidden = batch.blas.gemm(batch.put(rows), projection)
            batch.elementwise.unary("relu", hidden, out=hidden)
            scores = batch.blas.gemm(hidden, weights)
        labels: NDArray[np.int64] = np.argmax(await self.device.get(scores), axis=1)
        return labels

    async def classify(self, images: list[NDArray[Any]]) -> Sequence[int]:
        """Tell which digits single images of shape (64,) show: the handler for a :class:`~accel.patterns.DynamicBatcher`."""
        labels: list[int] = (await self.predict(np.stack(images))).tolist()
        return labels

    def reference(self, images: NDArray[Any]) -> NDArray[np.float64]:
        """Compute with numpy, in float64, the scores of shape (n, 10) whose largest :meth:`predict` goes by."""
        hidden = np.maximum(_with_bias(images).astype(np.float64) @ self.projection.astype(np.float64), 0)
        scores: NDArray[np.float64] = hidden @ self.weights.astype(np.float64)
        return scores

    async def is_intact(self) -> bool:
        """Return whether projection and weights are on the device, from whenever they were put there, bit by bit as they are here."""
        on_device = [await self.device.get(ref) for ref in await self._on_device()]
        return all(there.tobytes() == here.tobytes() for there, here in zip(on_device, (self.projection, self.weights), strict=True))

    async def _on_device(self) -> tuple[AccelRef, AccelRef]:
        """Return projection and weights on the device, after putting them there if a rebuild took them away."""
        while (refs := self._refs) is None or refs[0].is_stale or refs[1].is_stale:
            async with self._putting:
                if self._refs is refs:
                    put = partial(self.device.put, durable=self.durable)
                    self._refs = await put(self.projection), await put(self.weights)
                    self.puts += 1
        return refs


def _with_bias(images: NDArray[Any]) -> NDArray[np.float32]:
    """Return the images as float32 with a column of ones behind."""
    if images.ndim != 2 or images.shape[1] != PIXELS:
        raise InvalidArgumentError(f"the images have shape {images.shape}", remedy=f"Give shape (n, {PIXELS}).")
    rows = np.ones((len(images), PIXELS + 1), np.float32)
    rows[:, :PIXELS] = images
    return rows
