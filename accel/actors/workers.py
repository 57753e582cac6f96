"""Worker threads for blocking functions: owned by one system, named and bounded.

The standard library's thread pool is joined when the interpreter exits: one call that never returns
(a hung device) would keep the process alive for ever. These threads are daemons, and closing waits
for them until a deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from accel.errors import ClosedError
from accel.fork import close_after_fork
from accel.shortage import no_thread
from accel.values import check_count

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WorkerPool"]

P = ParamSpec("P")
T = TypeVar("T")


class _Job:
    """A function to run on a worker thread, and the future of its outcome.

    Parameters
    ----------
    function, arguments
        The function, with its positional and its keyword arguments.
    loop
        Makes the future one of this event loop; ``None``: one for any thread. That one, wrapped in
        a future of the loop, would cost tens of microseconds more.
    """

    __slots__ = ("arguments", "context", "error", "function", "future", "loop", "result")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, Any], loop: asyncio.AbstractEventLoop | None) -> None:
        self.function = function
        self.arguments = arguments
        self.loop = loop
        self.context = contextvars.copy_context()
        self.result: Any = None
        self.error: BaseException | None = None
        self.future: Any = concurrent.futures.Future() if loop is None else loop.create_future()

    def try_start(self) -> bool:
        """Return whether the job is to run: not if its future is cancelled, as it cannot be now."""
        if self.loop is not None:
            return not self.future.done()  # a cancellation at this moment is the same as one a moment later
        is_wanted: bool = self.future.set_running_or_notify_cancel()
        return is_wanted

    def run(self) -> None:
        """Run the function on this thread.

        The thread has let go of what it was given before the outcome is reported: the waiter may
        count what is left. The outcome is the job's, which lets go of it for the waiter: this
        thread may still be here when the waiter drops it.
        """
        if not self.try_start():
            return
        function, (args, kwargs) = self.function, self.arguments
        del self.function, self.arguments
        try:
            self.result = self.context.run(function, *args, **kwargs)
        except BaseException as error:
            self.error = error
        del function, args, kwargs
        try:
            self.finish()
        finally:
            del self  # the waiter keeps an error, whose traceback keeps this frame

    def finish(self) -> None:
        """Set the outcome of the future, on its loop if it is one of a loop."""
        if self.loop is None:
            self._set_outcome()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the waiter
            self.loop.call_soon_threadsafe(self._set_outcome, context=self.context)

    def _set_outcome(self) -> None:
        """Set the outcome of the future, unless its waiter has gone. On its loop."""
        future, result, error = self.future, self.result, self.error
        del self.future, self.result, self.error
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):  # a future refuses it: it would end the waiting coroutine as if that had returned
            raised = RuntimeError("the function raised StopIteration")
            raised.__cause__ = error
            future.set_exception(raised)
        else:
            future.set_exception(error)


class WorkerPool:
    """Up to ``size`` daemon threads, started on demand, that run functions in order.

    Parameters
    ----------
    size
        The most threads, at least 1.
    name
        Threads are named ``<name>-0``, ``<name>-1``, ...
    """

    def __init__(self, size: int, name: str = "accel-worker") -> None:
        self._size = check_count("the number of worker threads", size)
        self._name = name
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._running: set[threading.Thread] = set()
        self._ended: asyncio.Future[None] | None = None  # done when the last thread has ended
        self._idle: list[threading.Lock] = []  # one for each idle thread; the thread that worked last is woken first
        self._closed = False
        close_after_fork(self)

    def close_inherited(self) -> None:
        """Forget the threads and their jobs, which a forked child does not have.

        See :class:`accel.fork.Inherited`.
        """
        self._lock = threading.Lock()
        self._closed = True
        self._ended = None
        for inherited in (self._jobs, self._threads, self._running, self._idle):
            inherited.clear()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        """Queue a function, to run in a copy of the caller's context variables.

        Raises
        ------
        ClosedError
            The pool is closed.
        OutOfMemoryError
            The pool has no thread, and the operating system refuses one.
        """
        job = _Job(function, (args, kwargs), None)
        future: concurrent.futures.Future[T] = job.future
        self._queue(job)
        return future

    def _queue(self, job: _Job) -> None:
        """Queue a job, and wake an idle thread or start one."""
        with self._lock:
            if self._closed:
                raise ClosedError("the worker pool is closed")
            self._jobs.append(job)
            if self._idle:
                self._idle.pop().release()
            elif len(self._threads) < self._size:
                self._start_thread()

    def _start_thread(self) -> None:
        """Start a thread; raise only if there is no other one for the job. The lock is held."""
        thread = threading.Thread(target=self._run_thread, name=f"{self._name}-{len(self._threads)}", daemon=True)
        self._running.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            self._running.discard(thread)
            if not self._threads:
                self._jobs.pop()
                raise no_thread(error, "nothing can be done beside the loop") from error
        else:
            self._threads.append(thread)

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on a worker thread and return what it returns.

        Raises
        ------
        Exception
            What the function raised.
        ClosedError
            The pool is closed, or closed before the function started.

        Notes
        -----
        Cancelling detaches the waiter at once. A function that has not started is dropped. One that
        has started runs to its end, and its outcome is discarded: it must own the objects that it
        works on.
        """
        job = _Job(function, (args, kwargs), asyncio.get_running_loop())
        future = job.future
        self._queue(job)
        del job
        try:
            result: T = await future
            return result
        finally:
            del future  # it keeps an error, whose traceback keeps this frame

    def _run_thread(self) -> None:
        """Run jobs, and report the end of the last thread: the body of a thread."""
        try:
            self._run_jobs()
        finally:
            # A join blocks, and there may be no thread to do it: so the last thread reports its
            # end.
            with self._lock:
                self._running.discard(threading.current_thread())
                ended = None if self._running else self._ended
            if ended is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the waiter
                    ended.get_loop().call_soon_threadsafe(_settle, ended)

    def _run_jobs(self) -> None:
        """Run jobs until the pool is closed, and wait on a lock of this thread between them."""
        wake = threading.Lock()
        wake.acquire()
        while True:
            job = None
            with self._lock:
                if self._jobs:
                    job = self._jobs.popleft()
                elif self._closed:
                    return
                else:
                    self._idle.append(wake)
            if job is None:
                wake.acquire()
            else:
                job.run()
                del job

    def close(self) -> None:
        """Refuse further jobs, and fail those that did not start. Idempotent; does not wait.

        They get :class:`~accel.errors.ClosedError`.
        """
        with self._lock:
            self._closed = True
            dropped = list(self._jobs)
            self._jobs.clear()
            idle, self._idle = self._idle, []
        for wake in idle:
            wake.release()
        for job in dropped:
            if job.try_start():
                job.error = ClosedError("the worker pool closed before this started")
                job.finish()

    async def aclose(self, deadline: float) -> tuple[str, ...]:
        """Close, and wait until the threads have ended.

        Parameters
        ----------
        deadline
            The loop's time after which waiting ends.

        Returns
        -------
        tuple of str
            Names of the threads that still run.
        """
        self.close()
        loop = asyncio.get_running_loop()
        with self._lock:
            is_ended = not self._running
            ended = self._ended = loop.create_future()
        if not is_ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await ended
        with self._lock:
            self._ended = None
            left = set(self._running)
        for thread in self._threads:
            if thread not in left:
                thread.join()  # it has reported its end
        return tuple(thread.name for thread in left)


def _settle(future: asyncio.Future[None]) -> None:
    """Wake the waiter of a future."""
    if not future.done():
        future.set_result(None)
