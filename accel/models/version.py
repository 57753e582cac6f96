"""One set of a model's weights on a device: loaded, described, run, and let go."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from accel.errors import ClosedError, DeviceLostError
from accel.models.runner import FunctionRunner, LibraryRunner, deadline_of, left
from accel.models.tensor_spec import BATCH
from accel.models.weights import load_weights
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.models.adapters.base import ModelSource
    from accel.models.outputs import OutputSpecs
    from accel.models.runner import ModelDevice, Operand, Runner
    from accel.models.tensor_spec import Buckets, Sizes
    from accel.models.weights import Progress, RunBlocking

__all__ = ["Version", "VersionLoader"]

Array: TypeAlias = np.ndarray[Any, Any]

_TRIED = 16
"""Length of a dimension without buckets on which a model is tried."""


class Version:
    """One set of weights, and what runs the model with them; made by :class:`VersionLoader`.

    ``with version`` counts a call that uses it.

    Attributes
    ----------
    number : int
        From 1, counted up by every swap, also after a rollback.
    weights : dict of str to AccelRef
        Durable.
    outputs : OutputSpecs
        What the model returns.
    """

    def __init__(self, device: ModelDevice, buckets: Buckets, number: int, runner: Runner, weights: dict[str, AccelRef]) -> None:
        self._device = device
        self._buckets = buckets
        self.number = number
        self._runner = runner
        self.weights = weights
        self.outputs: OutputSpecs
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self._calls += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self._calls -= 1
        if not self._calls:
            self._idle.set()

    async def forward(
        self, arrays: Mapping[str, Any], bucket: Sizes, sizes: Sizes, timeout: float | None, *, to_host: bool
    ) -> Sequence[Any]:
        """Run inputs in a bucket. On the host the outputs have only the rows that are wanted, in their other dimensions they are as the bucket has them."""
        deadline, outputs = deadline_of(timeout), self.outputs
        operands = [await self._operand(name, each, bucket, deadline) for name, each in arrays.items()]
        if not to_host:
            return await self._runner.run(operands, outputs.specs(bucket), left(deadline))
        rows = [sizes[BATCH] if shape[:1] == (BATCH,) else None for shape in outputs.shapes]
        return await self._runner.fetch(operands, outputs.specs(bucket), rows, left(deadline))

    async def _operand(self, name: str, value: Any, bucket: Sizes, deadline: float | None) -> Operand:
        """Return an input of the size of a bucket."""
        spec = self._buckets.inputs[name]
        if not isinstance(value, AccelRef):
            return self._buckets.padded(name, value, bucket)
        widths = [(0, wanted - length) for wanted, length in zip(spec.of_size(bucket), value.shape, strict=True)]
        if not any(after for _, after in widths):
            return value
        padded: AccelRef = await self._device.arrays.pad(value, widths, value=spec.pad, timeout=left(deadline))
        return padded

    async def unload(self) -> None:
        """Wait until no call uses it, and let the model and its weights go.

        Raises
        ------
        MailboxFullError
            The device was opened with ``overload="reject"`` and is full. Nothing has changed.
        """
        await self._idle.wait()
        with contextlib.suppress(ClosedError, DeviceLostError):  # it has gone with the device
            await self._runner.close()
        self.weights.clear()


class VersionLoader:
    """Makes versions of one model on one device.

    Parameters
    ----------
    device
        Where.
    source
        Makes the model's adapter.
    buckets
        The model's inputs.
    run_blocking
        Runs what blocks.
    """

    def __init__(self, device: ModelDevice, source: ModelSource, buckets: Buckets, run_blocking: RunBlocking) -> None:
        self._device = device
        self._source = source
        self._buckets = buckets
        self._run_blocking = run_blocking

    def elsewhere(self, device: ModelDevice) -> VersionLoader:
        """Return a loader of the same model on another device."""
        return VersionLoader(device, self._source, self._buckets, self._run_blocking)

    async def load(self, number: int, weights: Any, on_progress: Progress | None = None) -> Version:
        """Put weights on the device, build the model around them, and see what it returns. After an error nothing of it is left."""
        buckets = self._buckets
        given = () if weights is None else weights
        refs = await load_weights(self._device, given, run_blocking=self._run_blocking, on_progress=on_progress)
        make = LibraryRunner if self._source.function is None else FunctionRunner
        runner = make(self._device, self._source, buckets)
        version = Version(self._device, buckets, number, runner, refs)
        try:
            refs |= await load_weights(self._device, await runner.initial(tuple(refs)), run_blocking=self._run_blocking)
            await runner.open(refs)
            try:
                version.outputs = await self._described(runner)
            except BaseException:
                await version.unload()
                raise
        except BaseException:
            refs.clear()  # the traceback keeps this frame
            raise
        return version

    async def _described(self, runner: Runner) -> OutputSpecs:
        """Return what the model returns. It is run on two lengths of each dimension: what is different between the outputs follows that dimension."""
        buckets = self._buckets
        lengths = {dim: _two_lengths(dim, buckets.lengths.get(dim)) for dim in buckets.dims}
        sizes = {dim: length for dim, (length, _) in lengths.items()}
        found = await self._describe(runner, sizes)
        for dim, (_, other) in lengths.items():
            changed = {**sizes, dim: other}
            found = found.named(sizes, await self._describe(runner, changed), changed)
        return found

    async def _describe(self, runner: Runner, sizes: Sizes) -> OutputSpecs:
        device = self._device
        inputs = [await device.put(np.full(spec.of_size(sizes), spec.pad, spec.dtype.numpy)) for spec in self._buckets.inputs.values()]
        return await runner.describe(tuple(inputs))


def _two_lengths(dim: str, lengths: tuple[int, ...] | None) -> tuple[int, int]:
    """Return two lengths of a dimension on which to try a model: of its buckets, if it has two."""
    if lengths is None:
        return (1, 2) if dim == BATCH else (_TRIED, _TRIED + 1)
    if len(lengths) > 1:
        return lengths[0], lengths[1]
    return lengths[0], lengths[0] - 1 or 2
