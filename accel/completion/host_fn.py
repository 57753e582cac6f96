"""A C function in a side stream posts a semaphore, and one thread that waits for it wakes the loop.

No Python runs in the callback: it is ``sem_post`` of the C library, which takes no lock that Python
code can hold. It runs in a stream of its own, because a host function stalls the stream that it is
in. It is only a hint: after a fault it never runs, and on other systems such callbacks were seen to
run after failed work. So every mark is queried before it ends, and the oldest marks are queried at
a long interval besides.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accel.completion.signalled import SignalledWatcher
from accel.completion.strategy import CompletionStrategy
from accel.completion.threads import start_thread, wait_ended
from accel.semaphore import Semaphore
from accel.values import check_seconds

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Hashable

    from accel.backend import AccelDevice, AccelStream
    from accel.completion.strategy import Mark

__all__ = ["HostFnCompletion", "HostFnWatcher"]


@dataclass(frozen=True)
class HostFnCompletion(CompletionStrategy):
    """Be woken by the device: uses no CPU while waiting, and adds two thread switches to every op.

    Parameters
    ----------
    watch_interval
        Seconds between two queries of the oldest marks. They find what no host function reports: a
        fault.
    """

    name: ClassVar[str] = "host_fn"
    watch_interval: float = 0.01

    def __post_init__(self) -> None:
        check_seconds("watch_interval", self.watch_interval, or_zero=False)

    def open(self, device: AccelDevice, loop: asyncio.AbstractEventLoop, shared: dict[Any, Any]) -> HostFnWatcher:
        """Return a watcher with a thread of its own.

        Raises
        ------
        UnsupportedError
            If the system has no unnamed POSIX semaphores.
        """
        return HostFnWatcher(loop, device, self.watch_interval)


class HostFnWatcher(SignalledWatcher):
    """Signalled by a host function in a side stream, of which each lane has one.

    In a common side stream a slow lane would delay the signals of the others. Making the watcher
    starts its thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, device: AccelDevice, watch_interval: float) -> None:
        self._device = device
        self._side_streams: dict[Hashable, AccelStream] = {}
        self._semaphore = Semaphore()
        self._is_stopping = False
        self._thread = start_thread(f"accel-host-fn-{device.description.spec}", self._run)
        # Last, as it opens a timer: the system may have had no semaphore, or no thread. The thread
        # signals nothing before the first mark.
        super().__init__(loop, watch_interval)

    def _request_signal(self, mark: Mark) -> None:
        """Have the lane's side stream, made at its first mark, wait for the mark and then post."""
        try:
            side_stream = self._side_streams.get(mark.lane)
            if side_stream is None:
                side_stream = self._side_streams[mark.lane] = self._device.create_stream()
            side_stream.wait(mark.event)
            side_stream.launch_host_function(self._semaphore)
        except Exception:  # a poisoned context takes no more work
            self._semaphore()  # the loop then queries the mark, which raises why

    def _run(self) -> None:
        """Signal the loop at each post of the semaphore: the body of the thread."""
        while True:
            self._semaphore.wait()
            if self._is_stopping:
                return
            self.signal()

    async def _release(self, *, abandon: bool) -> None:
        """Close the side streams, off the loop unless ``abandon``, then end the thread."""
        await super()._release(abandon=abandon)
        side_streams, self._side_streams = list(self._side_streams.values()), {}
        try:
            if abandon:
                _close(side_streams, abandon=True)
            elif side_streams:
                await self._loop.run_in_executor(None, _close, side_streams)
        finally:
            self._is_stopping = True
            self._semaphore()  # wakes the thread, which then returns
            await wait_ended(self._thread)


def _close(side_streams: list[AccelStream], *, abandon: bool = False) -> None:
    """Close all streams, and raise the last error of any. May block unless ``abandon``."""
    with ExitStack() as stack:  # it calls all, whatever one raises
        for side_stream in side_streams:
            stack.callback(side_stream.close, abandon=abandon)
