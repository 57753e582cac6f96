"""Streams and events of the CPU backend.

A stream is an ordered queue of Python callables. Small ones run on the caller's thread, large ones on the stream's worker thread. A stream
counts what was put into it and what has ended. A fault stops it, and its count stands still: marks passed before the fault stay passed,
every other mark raises the fault. An event is a stream and a count, so that a query compares two integers.

The worker of an idle stream waits for a lock and uses no CPU.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from accel.cpu.context import is_fault
from accel.cpu.views import Array, array, fill_memory, move, move_small
from accel.errors import AccelError, ClosedError, InvalidArgumentError
from accel.shortage import no_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.backend import HostFunction, Injection
    from accel.cpu.context import CpuContext

__all__ = ["INLINE_LIMIT", "CpuEvent", "CpuSpan", "CpuStream"]

INLINE_LIMIT = 50e-6
"""Work estimated below this many seconds runs on the caller's thread when its stream is idle: handing it to a thread costs more."""

_BYTES_PER_SECOND = 10e9
_SMALL_COPY = 1 << 15
_PATTERNS = (1, 2, 4, 8, 16)
_ALWAYS_ON_WORKER = math.inf
_PAUSE_INTERVAL = 0.0005
_NO_OP = 0  # the number of work that belongs to no op


class CpuStream:
    """An ordered queue of work on this process's memory; see :class:`~accel.backend.AccelStream`. Made by ``CpuDevice.create_stream``.

    All methods may be called from any thread. Those that enqueue raise the context's fault once it is poisoned, as a driver does, and
    :class:`~accel.ClosedError` after :meth:`close`; nothing was enqueued then.

    Parameters
    ----------
    context
        What the stream shares with the other streams of its device: the fault.
    name
        Name of the worker thread.

    Raises
    ------
    OutOfMemoryError
        If the operating system has no thread for the worker.
    AccelError
        The context's fault.

    Attributes
    ----------
    completed : int
        How many items have ended, in order. Stands still after a fault.
    fault : AccelError or None
        What stopped the stream.
    """

    __slots__ = (
        "_active",
        "_blocked",
        "_changed",
        "_ending",
        "_lock",
        "_number",
        "_park",
        "_queue",
        "_refusal",
        "_span",
        "_submitted",
        "_tell",
        "_thread",
        "_touching",
        "_waiting",
        "completed",
        "context",
        "fault",
        "name",
    )

    def __init__(self, context: CpuContext, name: str) -> None:
        self.context = context
        self.name = name
        self.completed = 0
        self.fault: AccelError | None = None
        self._submitted = 0
        self._span: CpuSpan | None = None  # what the work of ops is timed for
        self._refusal: AccelError | None = None  # what enqueuing raises: the fault, or ClosedError
        self._lock = threading.Lock()
        self._queue: deque[tuple[Callable[[], object], object, int]] = deque()
        self._number: Callable[[], int] = _no_op
        self._tell: Callable[[int, BaseException], object] = lambda number, error: None
        self._active = False  # some thread owns the right to run items: the worker, or one running inline
        self._touching = False  # the item being run may use device memory
        self._ending = False  # the worker shall end instead of parking
        self._park = threading.Lock()  # held while the worker sleeps; released to wake it
        self._park.acquire()
        self._changed = threading.Condition(self._lock)  # an item has ended, or the stream was stopped
        self._waiting = 0  # threads that wait for that
        self._blocked: CpuStream | None = None  # where the worker waits
        context.add(self)
        # Now, and not with the first work for it: what is enqueued must not fail for want of a thread.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            context.remove(self)
            raise no_thread(error, "a stream has no worker") from error

    def submit(self, work: Callable[[], object], cost: float = _ALWAYS_ON_WORKER, keep: object = None, *, is_op: bool = True) -> None:
        """Enqueue ``work``.

        It runs on this thread, before this returns, if the stream is idle and ``cost`` is below :data:`INLINE_LIMIT`; else on the stream's
        worker. What it raises is told to who asked for that (:meth:`report_failures`), and the stream goes on. An :class:`~accel.AccelError` whose scope
        is more than the op poisons the context; so does anything else that was enqueued without an op, as a :class:`~accel.LibraryError`. ``submit`` itself
        raises neither, only ``KeyboardInterrupt`` and ``SystemExit`` of work that runs on this thread.

        Parameters
        ----------
        work
            Called without arguments, once, after everything enqueued before has ended.
        cost
            Estimated seconds on one core; not given, the worker runs it, so that it never blocks the loop.
        keep
            Object to keep alive until the work has ended or was dropped.
        is_op
            Whether the work belongs to the op that is being enqueued.
        """
        if self._span is not None and is_op:
            work = partial(self._span.run, work)
        with self._lock:
            if self._refusal is not None:
                raise self._refusal.clone()
            if self._active or cost >= INLINE_LIMIT:
                self._queue.append((work, keep, self._number() if is_op else _NO_OP))
                self._submitted += 1
                if not self._active:
                    self._active = True
                    self._park.release()
                return
            self._submitted += 1
            self._active = self._touching = True
        try:
            work()
        except BaseException as error:
            op, leaves = self._number() if is_op else _NO_OP, isinstance(error, (KeyboardInterrupt, SystemExit))
            if op == _NO_OP or not leaves:
                self._failed(error, op)
            if leaves:  # the work is half done, and the caller must still be told
                raise
        finally:
            self._on_ended(is_inline=True)

    def report_failures(self, number: Callable[[], int], tell: Callable[[int, BaseException], object]) -> None:
        """See :class:`accel.backend.ReportsFailures`."""
        self._number, self._tell = number, tell

    def begin_span(self) -> CpuSpan:
        """See :class:`accel.backend.TimesWork`."""
        self._span = span = CpuSpan()
        return span

    def end_span(self, span: CpuSpan) -> None:
        """See :class:`accel.backend.TimesWork`."""
        self._span = None

    def _failed(self, error: BaseException, number: int) -> None:
        """Tell of what work raised, or poison the context."""
        if number == _NO_OP or is_fault(error):
            self.context.poison(self.context.failure(error))
        else:
            self._tell(number, error)

    def record(self, event: CpuEvent) -> bool:
        """Put a mark after everything enqueued so far; return ``True`` if that has already been passed."""
        if self._refusal is not None:
            raise self._refusal.clone()
        if event.context is not self.context:
            raise _foreign()
        event.stream, event.ticket = self, self._submitted
        return self.completed >= event.ticket

    def wait(self, event: CpuEvent) -> None:
        """Let later work wait for the event's mark as it is recorded now."""
        if event.context is not self.context:
            raise _foreign()
        source, ticket = event.stream, event.ticket
        if source is None or source is self or source.completed >= ticket:
            if self._refusal is not None:
                raise self._refusal.clone()
            return
        self.submit(lambda: self._wait_for(source, ticket), is_op=False)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy ``nbytes`` of memory from address to address."""
        mover = move_small if nbytes <= _SMALL_COPY else move
        self.submit(lambda: mover(destination, source, nbytes), nbytes / _BYTES_PER_SECOND)

    def fill(self, destination: int, pattern: bytes, count: int) -> None:
        """Write ``pattern`` ``count`` times.

        Raises
        ------
        InvalidArgumentError
            If ``pattern`` is not of 1, 2, 4, 8 or 16 bytes, or ``count`` is negative.
        """
        if len(pattern) not in _PATTERNS or count < 0:
            raise InvalidArgumentError(
                f"fill of {count} patterns of {len(pattern)} bytes", remedy="Use 1, 2, 4, 8 or 16 bytes, and a count of 0 or more."
            )
        self.submit(lambda: fill_memory(destination, pattern, count), len(pattern) * count / _BYTES_PER_SECOND)

    def copy_htod(self, destination: int, source: memoryview) -> None:
        """Copy host memory to device memory; it is kept alive until that has ended."""
        data = np.frombuffer(source, np.uint8) if source.nbytes else np.empty(0, np.uint8)
        self.submit(partial(_copy, array(destination, data.shape, data.dtype), data), data.size / _BYTES_PER_SECOND)

    def copy_dtoh(self, destination: memoryview, source: int) -> None:
        """Copy device memory to host memory, which is kept alive until that has ended."""
        data = np.frombuffer(destination, np.uint8) if destination.nbytes else np.empty(0, np.uint8)
        self.submit(partial(_copy, data, array(source, data.shape, data.dtype)), data.size / _BYTES_PER_SECOND)

    def launch_host_function(self, function: HostFunction) -> None:
        """Call ``function`` once everything enqueued so far has ended, on this thread or the worker. After a fault it is never called."""
        self.submit(function, 0.0, is_op=False)

    def synchronize(self) -> None:
        """Block this thread until everything enqueued so far has ended, releasing the GIL; raises the context's fault."""
        self.wait_passed(self._submitted)
        if self.fault is not None:
            raise self.fault.clone()

    def close(self, *, abandon: bool = False) -> None:
        """End the worker after what is enqueued; enqueuing raises :class:`~accel.ClosedError` from now on. Idempotent.

        Parameters
        ----------
        abandon
            Return at once: what has not begun is dropped and marks not yet passed raise :class:`~accel.ClosedError`. Work that is
            running cannot be stopped: it ends on its daemon thread, which then ends too (a hang, once it is released).
        """
        closed = ClosedError("the stream is closed", device=self.context.device_name)
        with self._lock:
            if self._refusal is None:
                self._refusal = closed
        if abandon:
            self.stop(closed)
        else:
            self._wait(self._submitted)
        with self._lock:
            self._ending = True
            if not self._active:
                self._active = True
                self._park.release()
        if not abandon:
            if self._thread is not threading.current_thread():
                self._thread.join()
            self.context.remove(self)

    # What the context, events and other streams call.

    def passed(self, ticket: int) -> bool:
        """Return whether item ``ticket`` has ended, or raise the fault that keeps it from ending."""
        # The fault is read first: once it is set, `completed` changes no more, and the answer can never flip.
        fault = self.fault
        if self.completed >= ticket:
            return True
        if fault is None:
            return False
        raise fault.clone()

    def wait_passed(self, ticket: int) -> None:
        """Block this thread until item ``ticket`` has ended; raises as :meth:`passed` does."""
        self._wait(ticket)
        self.passed(ticket)

    def pause(self, deadline: float) -> bool:
        """Begin no more work, and wait until none runs that is not this thread's own; return whether none does. See :class:`accel.fork.Pausable`."""
        if self._thread is threading.current_thread():  # its work forks
            return False
        while self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            if not self._touching:
                return True
            self._lock.release()
            if time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE_INTERVAL)
        return False

    def resume(self) -> None:
        """Go on after :meth:`pause` has returned ``True``."""
        self._lock.release()

    def inject(self, injection: Injection) -> None:
        """Enqueue a fault or a hang. Both always run on the worker, so that they surface later, as a device's do."""
        if injection.kind == "poison":
            error = self.context.injected(injection.error)
            self.submit(lambda: self.context.poison(error), is_op=False)
        else:
            release = injection.release
            self.submit(lambda: self._hang(release), is_op=False)

    def stop(self, fault: AccelError) -> None:
        """Run nothing more: drop what has not begun, and wake whoever waits. The first fault stands."""
        with self._lock:
            if self.fault is None:
                self.fault = fault
            if self._refusal is None:
                self._refusal = fault
            dropped, self._queue = self._queue, deque()
            blocked = self._blocked
            self._changed.notify_all()
        if blocked is not None:
            blocked.wake()
        dropped.clear()  # outside the lock, as every item

    def wake(self) -> None:
        """Let the threads that wait here look again whether it is over."""
        with self._changed:
            self._changed.notify_all()

    @property
    def is_touching(self) -> bool:
        """Whether work is being run that may use device memory."""
        return self._touching

    def _wait(self, ticket: int) -> None:
        self._wait_until(lambda: self.completed >= ticket or self.fault is not None)

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        """Block this thread until it is over, which is asked whenever an item has ended or the stream was stopped."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(is_over)
            self._waiting -= 1

    def _wait_for(self, source: CpuStream, ticket: int) -> None:
        """Run on the worker: block until another stream has passed ``ticket``, or this one was stopped."""
        self._touching = False
        with self._lock:
            self._blocked = source
        source._wait_until(lambda: source.completed >= ticket or source.fault is not None or self.fault is not None)
        self._blocked = None
        if source.fault is not None and source.completed < ticket:
            self.stop(source.fault)

    def _hang(self, release: Callable[[], None] | None) -> None:
        self._touching = False
        if release is not None:
            release()
        else:
            self._wait(self._submitted + 1)  # no item has this number yet: only a fault or abandoning ends it

    def _on_ended(self, *, is_inline: bool) -> None:
        """Count the item that was run; if the caller's thread has run it, give the right to run items back."""
        with self._lock:
            self._touching = False
            if self.fault is None:
                self.completed += 1
                if self._waiting:
                    self._changed.notify_all()
            if is_inline:
                if self._queue or self._ending:
                    self._park.release()  # the worker has the right to run items now
                else:
                    self._active = False
        if self.context.leftovers:
            self.context.settle()

    def _work(self) -> None:
        """Body of the worker thread."""
        self._park.acquire()
        while True:
            with self._lock:
                item = self._queue.popleft() if self._queue else None
                if item is None:
                    self._active = False
                    if self._ending:
                        return
                else:
                    self._touching = True
            if item is None:
                self._park.acquire()
                continue
            try:
                item[0]()
            except BaseException as error:  # the thread has no one else to tell
                self._failed(error, item[2])
            del item  # here and not under the lock: what it kept alive may do anything when it goes
            self._on_ended(is_inline=False)


class CpuSpan:
    """Sums up the time of work, which one thread at a time runs; see :class:`accel.backend.WorkSpan`."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds = 0.0

    def run(self, work: Callable[[], object]) -> None:
        """Run work and add its time."""
        began = time.perf_counter()
        try:
            work()
        finally:
            self._seconds += time.perf_counter() - began

    def seconds(self) -> float:
        """Return the sum."""
        return self._seconds


class CpuEvent:
    """A mark in a :class:`CpuStream`; see :class:`~accel.backend.AccelEvent`. Made by ``CpuDevice.create_event``.

    Attributes
    ----------
    stream : CpuStream or None
        Where it was recorded last; see :meth:`CpuStream.record`.
    ticket : int
        How many items were in that stream then.
    """

    __slots__ = ("context", "stream", "ticket")

    def __init__(self, context: CpuContext) -> None:
        self.context = context
        self.stream: CpuStream | None = None
        self.ticket = 0

    def query(self) -> bool:
        """Return whether the stream has passed the mark. Never blocks; an event that was never recorded has passed.

        Raises
        ------
        AccelError
            The context's fault, if the mark was not passed before it; :class:`~accel.ClosedError` if the stream was abandoned.
        """
        stream = self.stream
        if stream is None or stream.completed >= self.ticket:
            return True
        if stream.fault is None:
            return False
        return stream.passed(self.ticket)

    def synchronize(self) -> None:
        """Block this thread until the stream has passed the mark, releasing the GIL; raises as :meth:`query` does."""
        if self.stream is not None:
            self.stream.wait_passed(self.ticket)

    def close(self) -> None:
        """Forget the mark: a closed event has passed. Idempotent."""
        self.stream = None


def _foreign() -> AccelError:
    return InvalidArgumentError("the event belongs to another context", remedy="Create events on the device whose streams use them.")


def _copy(destination: Array, source: Array) -> None:
    destination[...] = source


def _no_op() -> int:
    return _NO_OP
