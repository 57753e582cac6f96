"""Who judges: each request is entered when it is sent and struck out when it is answered, and its answer must be right for what was happening."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import accel
from benchmarks.chaos_parts.subject import Entry, Subject

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["Ledger", "WrongAnswerError"]

_SLACK = 5.0
"""Seconds by which the end of a wait with a timeout may be late, on a machine that has more to do than it can."""
_MOST = 50
"""Violations that are kept in words."""


class WrongAnswerError(Exception):
    """An answer that is not what numpy computes."""


class Ledger:
    """All requests of a run, and what was wrong with them.

    Attributes
    ----------
    open : dict
        Requests that were not answered yet, oldest first.
    outcomes : Counter
        ``(kind, outcome)`` -> how many.
    answered : int
    violations : list of str
        The first of them, in words.
    violated : int
        How many there were.
    on_answer : callable
        Called after each answer.
    """

    def __init__(self) -> None:
        self.open: dict[int, Entry] = {}
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.sent = self.answered = self.violated = 0
        self.violations: list[str] = []
        self.latest = 0.0
        self.on_answer: Callable[[], None] = lambda: None

    def begin(self, kind: str, subject: Subject, *, timeout: float | None = None, allows: frozenset[str] = frozenset()) -> Entry:
        """Enter a request that is about to be sent."""
        self.sent += 1
        entry = self.open[self.sent] = Entry(self.sent, kind, subject, timeout, allows)
        return entry

    def right(self, entry: Entry) -> None:
        """Strike a request out whose answer was right."""
        entry.subject.answered_right(entry)
        self._end(entry, "right")

    def cancelled(self, entry: Entry) -> None:
        """Strike a request out that its client has cancelled."""
        self._end(entry, "cancelled")

    def failed(self, entry: Entry, error: BaseException) -> None:
        """Strike a request out that was answered with an error, which must be one that this request could get."""
        wrong = self._wrong_with(entry, error)
        if wrong is not None:
            self.violation(f"{entry}: {wrong}: {type(error).__name__}: {error}", entry.subject.describe())
        entry.subject.answered_by(entry, error)
        self._end(entry, type(error).__name__ if wrong is None else "VIOLATION")

    def violation(self, what: str, more: str = "") -> None:
        """Note that something was not as it must be."""
        self.violated += 1
        if len(self.violations) < _MOST:
            self.violations.append(f"{what} {more}".rstrip())

    def loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take what reaches the event loop's exception handler: nothing may."""
        self.violation(f"the event loop was told: {context.get('message')}: {context.get('exception')!r}")

    def overdue(self, patience: float) -> list[Entry]:
        """Return requests that have waited longer than any may."""
        limit = time.perf_counter() - patience
        found = []
        for entry in self.open.values():
            if entry.began > limit:
                break
            found.append(entry)
        return found

    def _end(self, entry: Entry, outcome: str) -> None:
        if entry.is_answered:
            self.violation(f"{entry} was answered twice, now {outcome}")
            return
        entry.is_answered = True
        self.open.pop(entry.number)
        self.answered += 1
        self.outcomes[entry.kind, outcome] += 1
        self.on_answer()

    # -- what may be answered

    def _wrong_with(self, entry: Entry, error: BaseException) -> str | None:
        """Say why a request cannot get this error; ``None`` if it can."""
        subject = entry.subject
        if "batcher" in entry.allows and subject.handler_failures[type(error)]:
            return None
        check = _CHECKS.get(type(error))
        return "no request may end so" if check is None else check(self, entry, error)

    def _poisoned(self, entry: Entry, error: Any) -> str | None:
        subject = entry.subject
        if not subject.faults:
            return "a device without faults faulted"
        device = subject.device
        if device.state is accel.DeviceState.READY and device.generation <= entry.generation:
            return "the device goes on in the same generation"
        if not isinstance(error.__cause__, accel.AccelError) or error.executed not in ("no", "unknown"):
            return "it does not say why, or whether the op ran"
        if error.retryable == (device.state is accel.DeviceState.LOST) and not subject.is_closing:
            return f"retryable is {error.retryable}, and the device is {device.state.value}"
        return None

    def _stale(self, entry: Entry, error: Any) -> str | None:
        if error.reason in ("freed", "torn"):
            return None if error.reason in entry.allows else f"nothing made it {error.reason}"
        return None if entry.subject.has_faulted else "no generation has ended"

    def _expired(self, entry: Entry, error: Any) -> str | None:
        if entry.timeout is None:
            return "there was no timeout"
        late = time.perf_counter() - entry.began - entry.timeout
        self.latest = max(self.latest, late)
        return "too early" if late < -0.01 else "too late" if late > _SLACK else None

    def _no_memory(self, entry: Entry, _: Any) -> str | None:
        return None if "oom" in entry.allows or entry.subject.take("oom") else "there was memory"

    def _broken(self, entry: Entry, error: Any) -> str | None:
        return None if error.code == entry.subject.failure_code and entry.subject.take("fail") else "it was not planned"

    def _full(self, entry: Entry, error: Any) -> str | None:
        if not entry.subject.rejects:
            return "the device waits for room"
        return None if error.retry_after is not None and error.retry_after > 0 else "it does not say when there will be room"

    def _lost(self, entry: Entry, _: Any) -> str | None:
        subject = entry.subject
        return None if subject.is_doomed and subject.device.state is accel.DeviceState.LOST else "the device must not be lost"

    def _closed(self, entry: Entry, _: Any) -> str | None:
        return None if entry.subject.is_closing else "the device is open"

    def _wrong(self, entry: Entry, _: Any) -> str | None:
        return "the answer is wrong"


_CHECKS: dict[type[BaseException], Callable[[Ledger, Entry, Any], str | None]] = {
    accel.ContextPoisonedError: Ledger._poisoned,
    accel.StaleRefError: Ledger._stale,
    accel.DeadlineExceededError: Ledger._expired,
    accel.OutOfMemoryError: Ledger._no_memory,
    accel.LibraryError: Ledger._broken,
    accel.MailboxFullError: Ledger._full,
    accel.DeviceLostError: Ledger._lost,
    accel.ClosedError: Ledger._closed,
    WrongAnswerError: Ledger._wrong,
}
