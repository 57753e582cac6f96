"""A C function in a side stream posts a semaphore, and one thread that waits for it wakes the loop.

No Python runs in the callback: it is ``sem_post`` of the C library, which takes no lock that Python code can hold. It runs in a stream of its own, because a
host function stalls the stream that it is in. It is only a hint: after a fault it never runs, and on other systems such callbacks were seen to run
after failed work. So every mark is queried before it ends, and the oldest marks are queried at a long interval besides.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accel.completion.signalled import SignalledWatcher, check_watch_interval
from accel.completion.strategy import CompletionStrategy, thread_end
from accel.errors import UnsupportedError
from accel.shortage import no_thread

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable

    from accel.backend import AccelDevice, AccelEvent, AccelStream, HostFunction
    from accel.completion.strategy import Mark

__all__ = ["HostFnCompletion", "HostFnWatcher", "Semaphore"]


@dataclass(frozen=True)
class HostFnCompletion(CompletionStrategy):
    """Be woken by the device: uses no CPU while waiting, however long, and adds two thread switches to every op.

    Parameters
    ----------
    watch_interval
        Seconds between two queries of the oldest marks. They find what no host function reports: a fault.
    """

    name: ClassVar[str] = "host_fn"
    watch_interval: float = 0.01

    def __post_init__(self) -> None:
        check_watch_interval(self.watch_interval)

    def open(self, device: AccelDevice, loop: asyncio.AbstractEventLoop, shared: dict[Any, Any]) -> HostFnWatcher:
        """Return a watcher with a thread of its own.

        Raises
        ------
        UnsupportedError
            If the system has no unnamed POSIX semaphores.
        """
        return HostFnWatcher(loop, device, self.watch_interval)


class Semaphore:
    """A POSIX semaphore, which is also the host function that posts it (see :class:`~accel.backend.HostFunction`).

    Attributes
    ----------
    address : int
        Address of the C library's ``sem_post``.
    argument : int
        Address of the semaphore.
    """

    def __init__(self) -> None:
        keeping, releasing = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
        # Larger than any system's sem_t, and aligned for it.
        self._storage = (ctypes.c_uint64 * 16)()
        self._pointer = ctypes.byref(self._storage)
        self.argument = ctypes.addressof(self._storage)
        self._post, self._try_wait, self._wait = keeping.sem_post, keeping.sem_trywait, releasing.sem_wait
        self.address = ctypes.cast(self._post, ctypes.c_void_p).value or 0
        if keeping.sem_init(self._pointer, 0, 0) != 0:
            raise UnsupportedError("this system has no unnamed semaphores", code=ctypes.get_errno(), remedy="Use completion='adaptive'.")

    def __call__(self) -> None:
        """Post: let one waiting thread go on. Never blocks."""
        self._post(self._pointer)

    def wait(self) -> None:
        """Block this thread, releasing the GIL, until the semaphore has been posted; several posts are taken together."""
        while self._wait(self._pointer) != 0:  # interrupted by a signal
            pass
        while self.take():
            pass

    def take(self) -> bool:
        """Take one post back, and return whether there was one. Never blocks."""
        taken: bool = self._try_wait(self._pointer) == 0
        return taken


class _Waiter:
    """The thread that turns posts into callbacks of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, posted: Callable[[], None]) -> None:
        self.semaphore = Semaphore()
        self.stopped: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._posted = posted
        self._stopping = False
        self._is_called = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise no_thread(error, "nothing can wait for the device's work") from error

    async def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self.semaphore()
        await self.stopped
        await thread_end(self._thread)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no waiter is left
            while True:
                self.semaphore.wait()
                if self._stopping:
                    self._loop.call_soon_threadsafe(self._say_stopped)
                    return
                if not self._is_called:  # else the loop has not polled yet, and finds this one too
                    self._is_called = True
                    self._loop.call_soon_threadsafe(self._call_back)

    def _call_back(self) -> None:
        self._is_called = False  # before the poll: what is posted from now on needs another call
        self._posted()

    def _say_stopped(self) -> None:
        if not self.stopped.done():
            self.stopped.set_result(None)


class _Side:
    """A lane's side stream. One for each lane: in a common one, a mark would be reported after those of slower lanes."""

    __slots__ = ("stream",)

    def __init__(self, device: AccelDevice) -> None:
        self.stream: AccelStream | None = None
        with contextlib.suppress(Exception):
            self.stream = device.create_stream()

    def report(self, event: AccelEvent, function: HostFunction) -> bool:
        """Have ``function`` called once ``event`` is passed, or return ``False``: a poisoned context takes no more work."""
        if self.stream is None:
            return False
        try:
            self.stream.wait(event)
            self.stream.launch_host_function(function)
        except Exception:  # the mark is queried all the same
            return False
        return True


class HostFnWatcher(SignalledWatcher):
    """Lets the device wake the loop, and queries the oldest marks once per ``watch_interval`` besides."""

    def __init__(self, loop: asyncio.AbstractEventLoop, device: AccelDevice, watch_interval: float) -> None:
        super().__init__(loop, watch_interval)
        self._device = device
        self._sides: dict[Hashable, _Side] = {}
        self._waiter = _Waiter(loop, f"accel-host-fn-{device.description.spec}", self._poll)

    def _ask_for_signal(self, mark: Mark) -> None:
        side = self._sides.get(mark.lane)
        if side is None:
            side = self._sides[mark.lane] = _Side(self._device)
        if not side.report(mark.event, self._waiter.semaphore):
            self._waiter.semaphore()

    async def _release(self, *, abandon: bool) -> None:
        await super()._release(abandon=abandon)
        sides = [side.stream for side in self._sides.values() if side.stream is not None]
        self._sides.clear()
        try:
            if abandon:
                _close(sides, abandon=True)
            elif sides:
                await self._loop.run_in_executor(None, _close, sides)
        finally:
            await self._waiter.stop()


def _close(sides: list[AccelStream], *, abandon: bool = False) -> None:
    for side in sides:
        side.close(abandon=abandon)
