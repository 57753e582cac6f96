"""One device of a chaos run, with what was done to it and how it came through."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import accel

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.testing import FaultPlan

__all__ = ["FAILURE_CODE", "Entry", "Subject"]

FAILURE_CODE = 4242


class Entry:
    """One request.

    Attributes
    ----------
    number : int
    kind : str
        What was asked.
    subject : Subject
        Of whom.
    began : float
        When.
    generation : int
        The device's then.
    timeout : float or None
        What was given to the device, so after how long an answer may be that it ran out.
    allows : frozenset of str
        What else may be answered: ``"oom"``, ``"freed"``, ``"torn"``, ``"batcher"``.
    """

    __slots__ = ("allows", "began", "generation", "is_answered", "kind", "number", "subject", "timeout")

    def __init__(self, number: int, kind: str, subject: Subject, timeout: float | None, allows: frozenset[str]) -> None:
        self.number = number
        self.kind = kind
        self.subject = subject
        self.began = time.perf_counter()
        self.generation = subject.device.generation
        self.timeout = timeout
        self.allows = allows
        self.is_answered = False

    def __str__(self) -> str:
        return f"request {self.number} ({self.kind} on {self.subject.label}, sent in generation {self.generation})"


class Subject:
    """A device under load.

    Parameters
    ----------
    label
        For reports.
    device
        The device.
    plan
        Its fault plan.
    is_doomed
        Whether its restart budget is there to be spent.
    is_calm
        Whether no fault is sent to it.
    rejects
        Whether it was opened with ``overload="reject"``.
    violation
        Told what must not be.

    Attributes
    ----------
    faults : int
        Faults so far, each of which may cost a generation.
    has_faulted : bool
        Whether a generation has ended, so that refs may be stale.
    is_closing : bool
        Whether requests may be told that it is closed.
    handler_failures : Counter
        Errors that its batcher's handler has raised, by class.
    recoveries, notices : list of float
        Seconds from the first answer that told of a fault to the first right one of the next generation; and from the fault to that first answer.
    """

    failure_code = FAILURE_CODE

    def __init__(
        self,
        label: str,
        device: accel.Device,
        plan: FaultPlan,
        violation: Callable[[str], None],
        *,
        is_doomed: bool = False,
        is_calm: bool = False,
        rejects: bool = False,
    ) -> None:
        self.label = label
        self.device = device
        self.plan = plan
        self.is_doomed = is_doomed
        self.is_calm = is_calm
        self.rejects = rejects
        self.is_closing = False
        self.faults = 0
        self.handler_failures: Counter[type[BaseException]] = Counter()
        self.recoveries: list[float] = []
        self.notices: list[float] = []
        self.causes: Counter[str] = Counter()
        self._violation = violation
        self._credits: Counter[str] = Counter()
        self._injected_at: float | None = None
        self._surfaced_at: float | None = None
        self._lost_generation = 0
        self._last = 0

    def describe(self) -> str:
        """Say how the device is."""
        info = self.device.info()
        return (
            f"[{self.label}: {info.state.value}, generation {info.generation}, host {info.host}, pid {info.pid}, {self.faults} faults, "
            f"{info.queued} queued, {info.in_flight} in flight]"
        )

    @property
    def has_faulted(self) -> bool:
        """Whether refs may be stale."""
        return bool(self.faults) and (self.device.generation > 1 or self.device.state is not accel.DeviceState.READY)

    # -- what is done to it

    def faulted(self) -> None:
        """Note that a fault was just sent that ends its generation."""
        self.faults += 1
        if self._injected_at is None:
            self._injected_at = time.perf_counter()

    def credit(self, what: str) -> None:
        """Note that one request may fail in this way (``"oom"``, ``"fail"``)."""
        self._credits[what] += 1

    def take(self, what: str) -> bool:
        """Return whether a request may fail in this way, and use it up."""
        if not self._credits[what]:
            return False
        self._credits[what] -= 1
        return True

    # -- how it comes through

    def answered_by(self, entry: Entry, error: BaseException) -> None:
        """Take note of an error: the first that tells of a fault begins an outage."""
        if not isinstance(error, accel.ContextPoisonedError):
            return
        self._lost_generation = max(self._lost_generation, error.generation or 0)
        if self._surfaced_at is None:
            now = self._surfaced_at = time.perf_counter()
            cause = error.__cause__
            self.causes[f"{type(cause).__name__} {getattr(cause, 'code', None) or getattr(cause, 'signal', None) or ''}".strip()] += 1
            if self._injected_at is not None:
                self.notices.append(now - self._injected_at)

    def answered_right(self, entry: Entry) -> None:
        """Take note of a right answer: the first of a new generation ends an outage."""
        if self._surfaced_at is not None and self.device.generation > self._lost_generation:
            self.recoveries.append(time.perf_counter() - self._surfaced_at)
            self._surfaced_at = self._injected_at = None

    async def watch(self) -> None:
        """See every generation, until the device is closed: they must rise, and each be explained by a fault."""
        try:
            async for generation in self.device.generations():
                if generation <= self._last:
                    self._violation(f"{self.label}: generation {generation} came after {self._last}")
                if generation - 1 > self.faults:
                    self._violation(f"{self.label}: generation {generation} after only {self.faults} faults")
                self._last = generation
        except accel.DeviceLostError:
            if not self.is_doomed:
                self._violation(f"{self.label} is lost: {self.device.health().reason}")
