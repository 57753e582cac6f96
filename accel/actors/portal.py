"""Calls from other threads: they run on the system's event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import inspect
import threading
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from accel._log import get_logger
from accel.errors import ClosedError, DeadlineExceededError, InvalidArgumentError, MailboxFullError
from accel.fork import close_after_fork
from accel.values import check_timeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from accel.actors.home import Home

__all__ = ["Portal"]

P = ParamSpec("P")
T = TypeVar("T")

logger = get_logger()


class Portal:
    """Runs coroutine functions and callbacks on an event loop, from any thread but the loop's own.

    Thread-safe.

    Parameters
    ----------
    home
        The event loop and its thread.
    group
        Owns the tasks of the coroutines.
    limit
        The most calls in flight, over all threads.
    """

    def __init__(self, home: Home, group: asyncio.TaskGroup, limit: int = 1024) -> None:
        if limit < 1:
            raise InvalidArgumentError(f"a portal admits at least one call, not {limit}")
        self._home = home
        self._group = group
        self._limit = limit
        self._lock = threading.Lock()
        self._calls: dict[concurrent.futures.Future[Any], asyncio.Task[None] | None] = {}
        self._closed = False
        close_after_fork(self)

    def close_inherited(self) -> None:
        """See :class:`accel.fork.Inherited`."""
        self._lock = threading.Lock()  # a thread that is not here may hold it
        self._calls.clear()

    @property
    def in_flight(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def run(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any, timeout: float | None = None) -> T:
        """Call a coroutine function on the loop, and block this thread until it ends.

        Parameters
        ----------
        function, *args
            The coroutine function and its arguments: ``portal.run(ref.ask, message)``. It runs in a
            copy of this thread's context variables.
        timeout
            Seconds to wait; after that the coroutine is cancelled.

        Returns
        -------
        object
            What it returned.

        Raises
        ------
        Exception
            What it raised.
        DeadlineExceededError
            ``timeout`` ran out.
        concurrent.futures.CancelledError
            The coroutine was cancelled on the loop.
        InvalidArgumentError
            ``function`` is not a coroutine function; a coroutine is none: its function and
            arguments are passed separately.
        ClosedError
            The system is closed, or closed before the coroutine ended; or this is the loop's own
            thread, or another process.
        MailboxFullError
            Too many calls are in flight.
        """
        check_timeout(timeout)
        future = self.start(function, *args)
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():  # the function's own
                raise
            raise DeadlineExceededError(f"{_name_of(function)} did not end within {timeout:g} s") from None
        finally:
            future.cancel()  # no effect on one that ended; otherwise this thread stopped waiting, and the coroutine is cancelled
            del future

    def start(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> concurrent.futures.Future[T]:
        """Call a coroutine function on the loop, and return at once.

        Returns
        -------
        concurrent.futures.Future
            For the result; cancelling it cancels the coroutine.

        Raises
        ------
        InvalidArgumentError, ClosedError, MailboxFullError
            As for :meth:`run`.
        """
        _check_callable(function)
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        context = contextvars.copy_context()
        self._admit(future, lambda: self._start_task(future, context, function, args))
        future.add_done_callback(self._on_done)
        return future

    def call_soon(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a plain function on the loop, soon, and return at once.

        An exception that it raises is logged.

        Raises
        ------
        ClosedError, MailboxFullError
            As for :meth:`run`.
        """
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise InvalidArgumentError(
                f"{function!r} is not a plain function", remedy="Use portal.start(f, *args) for one defined with 'async def'."
            )
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        context = contextvars.copy_context()

        def call() -> None:
            self._forget(future)
            if self._closed:
                return
            try:
                context.run(function, *args, **kwargs)
            except Exception as error:
                logger.exception("portal_call_failed", error=error)

        self._admit(future, call)

    def _admit(self, future: concurrent.futures.Future[Any], call: Callable[[], None]) -> None:
        """Count a call, and have the loop make it; raise if it may not be made. On any thread."""
        if self._home.is_inherited:
            raise ClosedError("this portal belongs to the process that this one was forked from")
        if threading.get_ident() == self._home.thread:
            raise ClosedError(
                "a portal is for other threads than the loop's own", remedy="Await it directly: here, waiting would block the loop."
            )
        with self._lock:
            if self._closed:
                raise ClosedError("the system that this portal leads to is closed")
            if len(self._calls) >= self._limit:
                raise MailboxFullError(
                    f"{self._limit} calls through the portal are in flight",
                    remedy="Let some of them end, or call from fewer threads at once.",
                )
            self._calls[future] = None
            try:
                self._home.loop.call_soon_threadsafe(call)
            except RuntimeError as error:
                del self._calls[future]
                raise ClosedError("the loop that this portal leads to is closed") from error

    # -- on the loop

    def _start_task(
        self,
        future: concurrent.futures.Future[Any],
        context: contextvars.Context,
        function: Callable[..., Coroutine[Any, Any, Any]],
        args: Any,
    ) -> None:
        """Start the task of a coroutine. On the loop."""
        if self._closed or future.cancelled():
            return
        task = self._group.create_task(self._run_call(future, function, args), name="accel-portal-call", context=context)
        with self._lock:
            if future in self._calls:
                self._calls[future] = task
        if future.cancelled():  # between the check and the entry
            task.cancel()

    async def _run_call(self, future: concurrent.futures.Future[Any], function: Callable[..., Coroutine[Any, Any, Any]], args: Any) -> None:
        """Await the coroutine, and settle the future of its thread: the body of the task."""
        try:
            result = await _awaitable_of(function, args)
        except asyncio.CancelledError:
            if not self._closed:
                future.cancel()
            raise
        except Exception as error:
            _settle(future, error=error)
        except BaseException as fatal:
            _settle(future, error=fatal)
            raise
        else:
            _settle(future, result=result)
        finally:
            del future  # it keeps an error, whose traceback keeps this frame

    def _on_done(self, future: concurrent.futures.Future[Any]) -> None:
        """Remove the call; cancel the coroutine if its future was cancelled. Runs on any thread."""
        task = self._forget(future)
        if task is not None and future.cancelled():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the task with it
                self._home.loop.call_soon_threadsafe(task.cancel)

    def _forget(self, future: concurrent.futures.Future[Any]) -> asyncio.Task[None] | None:
        """Count a call as ended, and return its task, if it has one."""
        with self._lock:
            return self._calls.pop(future, None)

    def close(self) -> None:
        """Admit no more calls, cancel the coroutines, and fail the waiting threads. Idempotent.

        They get :class:`~accel.errors.ClosedError`.
        """
        with self._lock:
            self._closed = True
            calls = dict(self._calls)
        for future, task in calls.items():
            _settle(future, error=ClosedError("the system closed before this call ended"))
            if task is not None:
                task.cancel()


def _check_callable(function: object) -> None:
    """Raise unless ``function`` can be called; a coroutine cannot."""
    if inspect.iscoroutine(function):
        function.close()  # it will not be awaited: this avoids the warning
    if not callable(function):
        raise InvalidArgumentError(
            f"{function!r} is not a function", remedy="Pass the function and its arguments: portal.run(ref.ask, message)."
        )


def _awaitable_of(function: Callable[..., Any], args: Any) -> Awaitable[Any]:
    """Call a coroutine function; raise if it returns nothing to await."""
    answer: Any = function(*args)
    if inspect.isawaitable(answer):
        return answer
    raise InvalidArgumentError(
        f"{_name_of(function)} returned a {type(answer).__name__}, and nothing to await",
        remedy="Pass a function defined with 'async def'; for others there is portal.call_soon(f, *args).",
    )


def _name_of(function: object) -> str:
    """Return the name of a function for errors."""
    return getattr(function, "__qualname__", None) or repr(function)


def _settle(future: concurrent.futures.Future[Any], *, result: Any = None, error: BaseException | None = None) -> None:
    """Set an outcome, unless the future has one."""
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except concurrent.futures.InvalidStateError:
        pass
