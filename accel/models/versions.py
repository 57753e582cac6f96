"""The versions of one model: the one that comes, the one that serves, the one kept for a rollback, and those that leave.

Each is one set of weights on the device: loaded, described, run, and unloaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from accel._log import get_logger
from accel.errors import (
    AccelError,
    ClosedError,
    ContextPoisonedError,
    DeviceLostError,
    InvalidArgumentError,
    LibraryError,
    MailboxFullError,
    OutOfMemoryError,
    StaleRefError,
    UnsupportedError,
)
from accel.memory import memory_size
from accel.models.relations import Relations, tried_lengths
from accel.models.runner import FunctionRunner, LibraryRunner, device_of, is_world
from accel.models.split import Split
from accel.models.weights import Collected, collect, tell_nothing
from accel.models.world_function import WorldFunctionRunner
from accel.models.world_runner import WorldRunner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from accel.actors.system import ActorSystem
    from accel.models.adapters.base import ModelSource
    from accel.models.outputs import OutputSpecs
    from accel.models.relations import BatchAxis
    from accel.models.runner import ModelHome, Runner
    from accel.models.tensor_spec import Buckets
    from accel.models.weights import Progress

__all__ = ["Coming", "Version", "VersionLoader", "Versions"]

logger = get_logger()

_PART = 4
"""Of this process's memory, one part in this many may be inputs of a batch: making random ones takes two more."""

_PAUSE = 0.05
"""Seconds until a device that has faulted is asked again."""

_FIRST_CALLS = (1, 2, 4, 8, 16)
"""Calls of a version after which its weights are compared with their checksums."""

_INTERVAL = 60.0
"""Seconds after which they are compared again, at the end of a call."""


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
    files : Collected or None
        Where its weights can be read again; ``None`` if they were arrays.
    """

    def __init__(self, home: ModelHome, number: int, runner: Runner, relations: Relations) -> None:
        self._home = home
        self.number = number
        self.runner = runner
        self.relations = relations
        self.files: Collected | None = None
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

    def check(self) -> None:
        """Raise if a weight is torn."""
        if self.runner.is_torn:
            raise StaleRefError(
                f"the weights of the model on {self._home.name} are torn: the device's memory was lost, or does not hold them any more",
                reason="torn",
                device=self._home.name,
                remedy="Give it weights: `await model.swap(weights)`, or `await service.swap(weights)` for all replicas.",
            )

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
        return Version(home, number, runner, Relations(home, runner, self._buckets, self._system, self._batch_axis))

    async def collected(self, weights: Any) -> Collected:
        """Find out what is in a source of weights; reads no elements."""
        return weights if isinstance(weights, Collected) else await collect(self._system, weights)

    async def load(self, version: Version, weights: Collected, on_progress: Progress | None = None, *, like: Version | None = None) -> None:
        """Put weights on the device, build the model around them, and see what it returns: with the weights of ``like`` the same.

        After an error the version is to be unloaded.
        """
        of_weights, of_buckets = [tell_nothing if on_progress is None else partial(on_progress, stage) for stage in ("weights", "buckets")]
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


class Versions:
    """The versions of one model, each in one state: it comes, serves, is kept for a rollback, or leaves.

    ====================  ===================================================================================================================
    :meth:`coming`        the next version comes; the kept one leaves before it is loaded. At the end of the block it serves, and what served is
                          kept; if the block raises or is cancelled, it leaves
    :meth:`end_coming`    the version that comes leaves
    :meth:`roll_back`     the kept version serves, and what served leaves
    :meth:`release`       the kept version leaves
    :meth:`close`         all leave, and none comes any more
    ====================  ===================================================================================================================

    A transition is made in one turn of the loop: it is made or it is not, whatever is cancelled. A version that leaves is unloaded by a task of its own,
    which runs to its end; cancelling :meth:`gone` ends the wait alone.

    Parameters
    ----------
    home
        The device, or the world.
    loader
        Makes versions.
    patience
        Seconds that :meth:`gone` waits for versions that leave.

    Attributes
    ----------
    kept : Version or None
        What served before, until it is released.
    loader : VersionLoader
    latest : int
        The largest number of a version that has served; 0 before. None is used for two sets of weights.
    is_closed : bool
    """

    def __init__(self, home: ModelHome, loader: VersionLoader, patience: float) -> None:
        self._home = home
        self.loader = loader
        self._patience = patience
        self.latest = 0
        self._coming: Coming | None = None
        self._serving: Version | None = None
        self.kept: Version | None = None
        self.is_closed = False
        self._leaving: dict[Version, asyncio.Task[None]] = {}

    def elsewhere(self, home: ModelHome) -> Versions:
        """Return the versions of the same model on another device or world, which has none yet."""
        return Versions(home, self.loader.elsewhere(home), self._patience)

    @property
    def serving(self) -> Version:
        """The one that answers calls.

        Raises
        ------
        ClosedError
            The model is closed.
        """
        if self._serving is None:
            raise self._closed()
        return self._serving

    @contextlib.asynccontextmanager
    async def coming(
        self, weights: Any, on_progress: Progress | None = None, *, number: int | None = None, like: Version | None = None
    ) -> AsyncIterator[Version]:
        """Load the next version; it serves when the block ends. One block at a time.

        Parameters
        ----------
        weights, on_progress
            As for :meth:`accel.models.Model.swap`.
        number
            Of the version; ``None``: one more than any before.
        like
            Has the same weights, on another device.

        Raises
        ------
        OutOfMemoryError
            There is no room for it beside the one that serves.
        ClosedError, DeviceLostError
            The model or the device was closed, or the device was lost, before the version served: waits in the block are ended by that.
        LibraryError
            :meth:`end_coming` came before.
        """
        if self.is_closed:
            raise self._closed()
        version = self.loader.begin(self.latest + 1 if number is None else number)
        coming = self._coming = Coming()
        try:
            try:
                async with coming.ended_early(self._home):
                    collected = await self.loader.collected(weights)
                    if self._serving is not None:
                        self._check_room(self.loader.nbytes(collected))
                    self.release()
                    await self.gone()
                    await self.loader.load(version, collected, on_progress, like=like)
                    version.files = collected.kept()
                    yield version
                coming.check()
            finally:
                self._coming = None
                coming.over.set_result(None)
            self.latest = max(self.latest, version.number)
            self.kept, self._serving = self._serving, version
        except BaseException as error:
            self._leave(version)
            if not isinstance(error, asyncio.CancelledError):
                await self.gone()
            raise

    def end_coming(self) -> bool:
        """Let the version that comes leave instead of serving; return whether there is one."""
        if self._coming is None:
            return False
        text = "the swap was ended by a rollback before its weights served"
        self._coming.end(LibraryError(text, op="swap", device=self._home.name, remedy="Swap again."))
        return True

    def roll_back(self) -> Version:
        """Serve the kept version, and return what leaves.

        Raises
        ------
        ClosedError
            The model is closed.
        InvalidArgumentError
            None is kept.
        """
        left = self.serving
        if self.kept is None:
            raise InvalidArgumentError("the model has no weights to go back to", remedy="Roll back before release, after a swap.")
        self._serving, self.kept = self.kept, None
        self._leave(left)
        return left

    def release(self) -> None:
        """Let the kept version leave, if there is one."""
        left, self.kept = self.kept, None
        self._leave(left)

    def close(self) -> None:
        """Let all versions leave, for good."""
        self.is_closed = True
        if self._coming is not None:
            self._coming.end(self._closed())
        left, self._serving = self._serving, None
        self._leave(left)
        self.release()

    async def gone(self) -> None:
        """Wait until the versions that leave have gone, but no longer than the patience lasts: a call that does not end keeps its version."""
        try:
            async with asyncio.timeout(self._patience):
                while ending := self._ending():
                    await asyncio.wait(ending)
        except TimeoutError:
            numbers = [version.number for version in self._leaving]
            logger.warning("model_versions_in_use", device=self._home.name, versions=numbers, seconds=self._patience)

    def _check_room(self, needed: int) -> None:
        """Refuse a version for which there is no memory, before anything is let go."""
        device = device_of(self._home)
        memory = device.info().memory
        used = memory.used - sum(version.runner.nbytes for version in (self.kept, *self._leaving) if version is not None)
        if memory.limit is not None and used + needed > memory.limit:
            raise OutOfMemoryError(
                f"a second set of weights of {needed} bytes does not fit beside the {used} bytes in use",
                requested=needed,
                used=used,
                limit=memory.limit,
                device=device.name,
                remedy="Open the device with a larger memory_limit, or free other buffers first.",
            )

    def _ending(self) -> list[asyncio.Future[None]]:
        coming = [self._coming.over] if self._coming is not None and self._coming.is_ended else []
        return [*self._leaving.values(), *coming]

    def _leave(self, version: Version | None) -> None:
        """Have a version unloaded, if there is one."""
        if version is not None:
            task = self._leaving[version] = asyncio.get_running_loop().create_task(version.unload())
            task.add_done_callback(lambda task: self._left(version, task))

    def _left(self, version: Version, task: asyncio.Task[None]) -> None:
        del self._leaving[version]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("model_version_not_unloaded", device=self._home.name, version=version.number, error=error)

    def _closed(self) -> ClosedError:
        return ClosedError(f"the model on {self._home.name} is closed", device=self._home.name, remedy="Load it again.")


class Coming:
    """A version that comes, and what has ended that before it served.

    Attributes
    ----------
    over : Future
        Done when the version serves, or leaves.
    """

    def __init__(self) -> None:
        self._why: AccelError | None = None
        self._scope: asyncio.Timeout | None = None  # while there is something to end
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_ended(self) -> bool:
        """Whether the version will not serve."""
        return self._why is not None

    def end(self, why: AccelError) -> None:
        """Let the version never serve, and end what is waited for in the block."""
        if self._why is None:
            self._why = why
            if self._scope is not None:
                self._scope.reschedule(0.0)

    def check(self) -> None:
        """Raise why it has ended, if it has."""
        if self._why is not None:
            raise self._why from None

    @contextlib.asynccontextmanager
    async def ended_early(self, home: ModelHome) -> AsyncIterator[None]:
        """Return the block that :meth:`end` ends with its error; so does the end of the device."""
        watch: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(None) as self._scope:
                watch = asyncio.get_running_loop().create_task(self._watch(home))
                yield
        except TimeoutError:
            self.check()
            raise
        finally:
            self._scope = None  # it holds the task, whose error's traceback holds this frame
            if watch is not None:
                watch.cancel()

    async def _watch(self, home: ModelHome) -> None:
        try:
            async for _ in home.generations():
                pass
        except AccelError as error:
            self.end(error.clone())
        else:
            self.end(ClosedError(f"{home.name} was closed", device=home.name))
