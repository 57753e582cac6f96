"""Calls of a context on worker threads; nothing that they use is closed under them."""

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
    """The calls of one context that run beside the loop.

    The wait for a call can be cancelled; the call itself cannot be, and goes on using streams,
    handles and memory. So they are closed through :meth:`when_over`.

    Parameters
    ----------
    own
        Names of the registered libraries, whose calls may do their work here; all others load or
        compile.
    """

    def __init__(self, own: Container[str]) -> None:
        self._own = own
        self._changed = threading.Condition()
        self._running = self._loading = 0
        self._loading_since = self._loaded_before = 0.0
        self._is_over = False
        self._then: Callable[[], None] | None = None

    def run(self, kernel: Callable[..., None], lane: Any, op: KernelOp, *operands: Any) -> None:
        """Call a kernel on this thread.

        Raises :class:`~accel.ClosedError` if the context is being closed.
        """
        with self._one_more(1 if op.library not in self._own else 0):
            kernel(lane, op, *operands)

    def make(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call ``call`` on this thread, which no op waits for; raises as :meth:`run` does."""
        with self._one_more(0):
            return call(*arguments)

    @contextlib.contextmanager
    def _one_more(self, loading: int) -> Iterator[None]:
        with self._changed:
            if self._is_over:
                raise ClosedError("the context was closed before this began")
            self._running += 1
            self._load(loading)
        try:
            yield
        finally:
            then: Callable[[], None] | None = None
            with self._changed:
                self._running -= 1
                self._load(-loading)
                if not self._running:
                    then, self._then = self._then, None
                    self._changed.notify_all()
            if then is not None:
                then()

    def _load(self, change: int) -> None:
        if change:
            self._loaded_before, self._loading_since = self.busy_seconds(), monotonic()
            self._loading += change

    def busy_seconds(self) -> float:
        """Return for how many seconds so far something was loaded or compiled here.

        Any thread may ask.
        """
        return self._loaded_before + (monotonic() - self._loading_since if self._loading else 0.0)

    def when_over(self, give_back: Callable[[], None], *, wait: bool) -> None:
        """Refuse further calls, and call ``give_back`` once when none runs any more.

        Parameters
        ----------
        give_back
            What gives back what the calls use.
        wait
            Whether to block until then. Otherwise this returns at once, and the thread whose call
            ends last does it.
        """
        with self._changed:
            self._is_over = True
            while wait and self._running:
                self._changed.wait()
            if self._running:
                self._then = give_back
                return
        give_back()
