"""One set of a model's weights on a device: loaded, described, run, and unloaded."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from accel._log import get_logger
from accel.errors import (
    AccelError,
    ContextPoisonedError,
    DeviceLostError,
    InvalidArgumentError,
    MailboxFullError,
    OutOfMemoryError,
    UnsupportedError,
)
from accel.memory import memory_size
from accel.models.relations import Relations, tried_lengths
from accel.models.runner import FunctionRunner, LibraryRunner, device_of, is_world
from accel.models.split import Split
from accel.models.weights import Collected, collect
from accel.models.world_function import WorldFunctionRunner
from accel.models.world_runner import WorldRunner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel.actors.system import ActorSystem
    from accel.models.adapters.base import ModelSource
    from accel.models.outputs import OutputSpecs
    from accel.models.relations import BatchAxis
    from accel.models.runner import ModelHome, Runner
    from accel.models.tensor_spec import Buckets
    from accel.models.weights import Progress

__all__ = ["Version", "VersionLoader"]

logger = get_logger()

Array: TypeAlias = np.ndarray[Any, Any]

_PART = 4
"""Of this process's memory, one part in this many may be inputs of a batch: making random ones takes two more."""

_PAUSE = 0.05
"""Seconds until a device that has faulted is asked again."""

_FIRST_CALLS = (1, 2, 4, 8, 16)
"""Calls of a version after which its weights are compared with their checksums."""

_INTERVAL = 60.0
"""Seconds after which they are compared again, at the end of a call."""


def _nothing(done: int, total: int) -> None:
    """Tell nothing of how far it has come."""


class Version:
    """One set of weights, and what runs the model with them; made by :class:`VersionLoader`.

    ``with version`` counts a call that uses it.

    Attributes
    ----------
    number : int
        From 1, counted up by every swap, also after a rollback.
    runner : Runner
    relations : Relations
        What its outputs have to do with its inputs.
    """

    def __init__(self, home: ModelHome, number: int, runner: Runner, relations: Relations) -> None:
        self._home = home
        self.number = number
        self.runner = runner
        self.relations = relations
        self._calls = self._ended = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._compare_at = monotonic() + _INTERVAL
        self._comparing: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._calls += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self._calls -= 1
        self._ended += 1
        if self._ended in _FIRST_CALLS or monotonic() >= self._compare_at:
            self._begin_to_compare()
        if not self._calls:
            self._idle.set()

    @property
    def outputs(self) -> OutputSpecs:
        """What the model returns."""
        return self.relations.outputs

    def _begin_to_compare(self) -> None:
        """Compare the weights with their checksums beside the calls, unless that is going on."""
        if self._comparing is None or self._comparing.done():
            self._compare_at = monotonic() + _INTERVAL
            self._comparing = asyncio.get_running_loop().create_task(self._compare())

    async def _compare(self) -> None:
        """Look for a weight that the model, or something else, has changed. It is torn, and calls raise that from then on."""
        try:
            changed = await self.runner.changed_weight()
        except AccelError:  # the device is full, faults or is closed, or a weight is torn: calls are told of that
            return
        if changed is not None:
            logger.error(
                "model_weight_changed",
                device=self._home.name,
                version=self.number,
                weight=changed,
                remedy="Weights are only read: have the model change a copy, and swap to good weights.",
            )

    async def unload(self) -> None:
        """Wait until no call uses it, and let the model and its weights go, however far it was loaded. A device that is full, or faults, is asked again."""
        await self._idle.wait()
        comparing, self._comparing = self._comparing, None
        if comparing is not None:
            comparing.cancel()
            await asyncio.wait({comparing})
        del comparing  # the traceback of its end holds refs of weights
        while True:
            try:
                await self.runner.close()
            except (MailboxFullError, ContextPoisonedError, DeviceLostError) as error:
                await asyncio.sleep(getattr(error, "retry_after", None) or _PAUSE)
            else:
                break


class VersionLoader:
    """Makes versions of one model on one device.

    Parameters
    ----------
    home
        The device, or the world.
    source
        Makes the model's adapter.
    buckets
        The model's inputs.
    system
        Runs what blocks.
    batch_axis
        What the user says of outputs.
    split
        What each rank of a world has of the weights.
    """

    def __init__(
        self,
        home: ModelHome,
        source: ModelSource,
        buckets: Buckets,
        system: ActorSystem,
        batch_axis: BatchAxis = None,
        split: Mapping[str, int] | None = None,
    ) -> None:
        self._home = home
        self._split = Split(split, len(home.devices)) if is_world(home) else None
        self._source = source
        self._buckets = buckets
        self._system = system
        self._batch_axis = batch_axis

    def elsewhere(self, home: ModelHome) -> VersionLoader:
        """Return a loader of the same model on another device or world."""
        if is_world(home) is not is_world(self._home):
            raise InvalidArgumentError(
                f"the model is built for {self._home.name}, and {home.name} is no such thing",
                remedy="Give a device where it was loaded on one, and a world of as many ranks where it was loaded on a world.",
            )
        axes = None if self._split is None else self._split.axes
        return VersionLoader(home, self._source, self._buckets, self._system, self._batch_axis, axes)

    def nbytes(self, weights: Collected) -> int:
        """Return the bytes of weights on the device, or on that of the first rank."""
        return weights.nbytes if self._split is None else self._split.parts(weights)[0].nbytes

    def begin(self, number: int) -> Version:
        """Return a version that has nothing yet."""
        home, given = self._home, (self._source, self._buckets, self._system)
        runner: Runner
        if is_world(home):
            assert self._split is not None, "a world has ranks"
            runner = (WorldRunner if self._source.function is None else WorldFunctionRunner)(home, *given, self._split)
        else:
            runner = (LibraryRunner if self._source.function is None else FunctionRunner)(home, *given)
        return Version(home, number, runner, Relations(device_of(home), runner, self._buckets, self._system, self._batch_axis))

    async def collected(self, weights: Any) -> Collected:
        """Find out what is in a source of weights; reads no elements."""
        return weights if isinstance(weights, Collected) else await collect(self._system, weights)

    async def load(self, version: Version, weights: Collected, on_progress: Progress | None = None, *, like: Version | None = None) -> None:
        """Put weights on the device, build the model around them, and see what it returns: with the weights of ``like`` the same.

        After an error the version is to be unloaded.
        """
        of_weights, of_buckets = [_nothing if on_progress is None else partial(on_progress, stage) for stage in ("weights", "buckets")]
        self._check_room()
        await version.runner.load(weights, of_weights, of_buckets)
        if like is not None:
            await version.relations.adopt(like.relations)
            return
        try:
            await version.relations.establish()
        except InvalidArgumentError:
            await self._check_unchanged(version)  # or answers change for that reason
            raise
        await self._check_unchanged(version)

    async def _check_unchanged(self, version: Version) -> None:
        """Refuse a model that has changed its weights while it was warmed up and tried."""
        changed = await version.runner.changed_weight()
        if changed is not None:
            raise UnsupportedError(
                f"the model changes its weight {changed!r} when it runs",
                device=self._home.name,
                remedy="Weights are only read, in all generations: have it change a copy, or a buffer of the module.",
            )

    def _check_room(self) -> None:
        """Refuse inputs, of which a file says the shapes, that the device or this process has no room for: before they are made."""
        buckets, limit = self._buckets, device_of(self._home).info().memory.limit
        if size := memory_size():
            limit = size // _PART if limit is None else min(limit, size // _PART)
        sizes = {dim: max(tried_lengths(dim, buckets)) for dim in buckets.dims}
        sizes |= {dim: lengths[-1] for dim, lengths in buckets.lengths.items()}
        needed = sum([math.prod(spec.of_size(sizes)) * spec.dtype.itemsize for spec in buckets.inputs.values()])
        if limit is not None and needed > limit:
            raise OutOfMemoryError(
                f"the inputs of the model take {needed} bytes for {sizes}",
                requested=needed,
                limit=limit,
                device=self._home.name,
                remedy="Look at the shapes that the file declares, and give smaller buckets: they may take memory_limit, and a quarter of the memory.",
            )
