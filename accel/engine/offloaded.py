"""Calls of a context on worker threads; what they use is closed only when they have returned."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

from accel.engine.stall import BusyTime
from accel.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Container

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

    Attributes
    ----------
    loading : BusyTime
        Counts the calls of kernels that load or compile.
    """

    def __init__(self, registered: Container[str]) -> None:
        self.loading = BusyTime()
        self._registered = registered
        self._changed = threading.Condition()
        self._running = 0
        self._is_closed = False
        self._on_idle: Callable[[], None] | None = None

    def call_kernel(self, kernel: Callable[..., None], lane: Any, op: KernelOp, *operands: Any) -> None:
        """Call a kernel on this worker thread; raises as :meth:`call` does."""
        if op.library in self._registered:
            self.call(kernel, lane, op, *operands)
        else:
            with self.loading:
                self.call(kernel, lane, op, *operands)

    def call(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call a function on this worker thread, and return its result.

        The last call to end also calls the ``release_all`` of a :meth:`close` that did not wait.

        Raises
        ------
        ClosedError
            If the context is being closed.
        """
        with self._changed:
            if self._is_closed:
                raise ClosedError("the context was closed before this began")
            self._running += 1
        try:
            return call(*arguments)
        finally:
            on_idle: Callable[[], None] | None = None
            with self._changed:
                self._running -= 1
                if not self._running:
                    on_idle, self._on_idle = self._on_idle, None
                    self._changed.notify_all()
            if on_idle is not None:
                on_idle()

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
