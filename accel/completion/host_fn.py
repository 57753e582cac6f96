"""A C function in a side stream posts a semaphore, and one thread that waits for it wakes the loop.

No Python runs in the callback: it is ``sem_post`` of the C library, which takes no lock that Python
code can hold. It runs in a stream of its own, because a host function stalls the stream that it is
in. It is only a hint: after a fault it never runs, and on other systems such callbacks were seen to
run after failed work. So every mark is queried before it ends, and the oldest marks are queried at
a long interval besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accel.completion.semaphore import Semaphore
from accel.completion.signalled import SignalledWatcher
from accel.completion.strategy import CompletionStrategy, check_seconds
from accel.completion.threads import start_thread, wait_ended

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
        check_seconds("watch_interval", self.watch_interval)

    def open(self, device: AccelDevice, loop: asyncio.AbstractEventLoop, shared: dict[Any, Any]) -> HostFnWatcher:
        """Return a watcher with a thread of its own.

        Raises
        ------
        UnsupportedError
            If the system has no unnamed POSIX semaphores.
        """
        return HostFnWatcher(loop, device, self.watch_interval)


class HostFnWatcher(SignalledWatcher):
    """Has a side stream for each lane: in a common one, slow lanes would hold up the others."""

    def __init__(self, loop: asyncio.AbstractEventLoop, device: AccelDevice, watch_interval: float) -> None:
        super().__init__(loop, watch_interval)
        self._device = device
        self._sides: dict[Hashable, AccelStream] = {}
        self._semaphore = Semaphore()
        self._is_stopping = False
        self._thread = start_thread(f"accel-host-fn-{device.description.spec}", self._run)

    def _request_signal(self, mark: Mark) -> None:
        try:
            side = self._sides.get(mark.lane)
            if side is None:
                side = self._sides[mark.lane] = self._device.create_stream()
            side.wait(mark.event)
            side.launch_host_function(self._semaphore)
        except Exception:  # a poisoned context takes no more work: the query of the mark tells
            self._semaphore()

    def _run(self) -> None:
        while True:
            self._semaphore.wait()
            if self._is_stopping:
                return
            self.signal()

    async def _release(self, *, abandon: bool) -> None:
        await super()._release(abandon=abandon)
        sides, self._sides = list(self._sides.values()), {}
        try:
            if abandon:
                _close(sides, abandon=True)
            elif sides:
                await self._loop.run_in_executor(None, _close, sides)
        finally:
            self._is_stopping = True
            self._semaphore()
            await wait_ended(self._thread)


def _close(sides: list[AccelStream], *, abandon: bool = False) -> None:
    for side in sides:
        side.close(abandon=abandon)
