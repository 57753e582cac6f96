"""Calls of a context on worker threads; what they use is closed only when they have returned."""

from __future__ import annotations

import contextlib
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from accel.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from accel.ops import KernelOp

__all__ = ["OffloadedCalls"]

T = TypeVar("T")


class OffloadedCalls:
    """Counts the calls of one context that run on worker threads.

    The wait for a call can be cancelled; the call itself cannot be, and still uses streams,
    handles and memory. So these are released through :meth:`close`.

    Parameters
    ----------
    registered
        Names of the registered libraries. Their kernels may do their work on the worker thread; all
        other kernels are called there because they load or compile.
    """

    def __init__(self, registered: Container[str]) -> None:
        self._registered = registered
        self._changed = threading.Condition()
        self._running = self._loading = 0
        self._loading_since = self._loaded_before = 0.0
        self._is_closed = False
        self._on_idle: Callable[[], None] | None = None

    def call_kernel(self, kernel: Callable[..., None], lane: Any, op: KernelOp, *operands: Any) -> None:
        """Call a kernel on this worker thread.

        Raises
        ------
        ClosedError
            If the context is being closed.
        """
        with self._running_call(0 if op.library in self._registered else 1):
            kernel(lane, op, *operands)

    def call(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call any other function on this worker thread; raises as :meth:`call_kernel` does."""
        with self._running_call(0):
            return call(*arguments)

    @contextlib.contextmanager
    def _running_call(self, loading: int) -> Iterator[None]:
        """Count one call as running inside the block; ``loading`` is 1 if it loads or compiles.

        The last one to end calls the ``release_all`` of a :meth:`close` that did not wait.
        """
        with self._changed:
            if self._is_closed:
                raise ClosedError("the context was closed before this began")
            self._running += 1
            self._count_loading(loading)
        try:
            yield
        finally:
            on_idle: Callable[[], None] | None = None
            with self._changed:
                self._running -= 1
                self._count_loading(-loading)
                if not self._running:
                    on_idle, self._on_idle = self._on_idle, None
                    self._changed.notify_all()
            if on_idle is not None:
                on_idle()

    def _count_loading(self, change: int) -> None:
        """Count a call that loads or compiles as begun (1) or ended (-1); 0 changes nothing."""
        if change:  # the time until now is added up before the number of calls changes
            self._loaded_before, self._loading_since = self.busy_seconds(), monotonic()
            self._loading += change

    def busy_seconds(self) -> float:
        """Return for how many seconds so far a kernel was loading or compiling. Thread-safe."""
        with self._changed:  # may be held by this thread already
            return self._loaded_before + (monotonic() - self._loading_since if self._loading else 0.0)

    def close(self, release_all: Callable[[], None], *, wait: bool) -> None:
        """Refuse further calls, and call ``release_all`` once, when no call runs any more.

        Parameters
        ----------
        release_all
            Releases what the calls use.
        wait
            Whether to block until then. Otherwise this returns at once, and the thread whose call
            ends last calls ``release_all``.
        """
        with self._changed:
            self._is_closed = True
            while wait and self._running:
                self._changed.wait()
            if self._running:
                self._on_idle = release_all
                return
        release_all()
