"""The versions of one model: the one that comes, the one that serves, the one kept for a rollback, and those that leave."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from accel._log import get_logger
from accel.errors import AccelError, ClosedError, InvalidArgumentError, LibraryError, OutOfMemoryError
from accel.models.runner import device_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from accel.models.runner import ModelHome
    from accel.models.version import Version, VersionLoader
    from accel.models.weights import Progress

__all__ = ["Coming", "Versions"]

logger = get_logger()


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
