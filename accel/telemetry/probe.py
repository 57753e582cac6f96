"""Probes: observers that a system tells what it does, what they are told of, and the device time that work is charged."""

from __future__ import annotations

import inspect
import re
import signal
from contextvars import ContextVar
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, TypeVarTuple

from accel._log import get_logger
from accel.errors import HostDiedError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextvars import Token
    from types import TracebackType

    from accel.errors import AccelError

__all__ = ["CHARGED", "METHODS", "DeviceTime", "DeviceWork", "Probe", "Probes", "ServedBatch", "ServedRequest", "Service", "fault_code"]

Ts = TypeVarTuple("Ts")

if TYPE_CHECKING:
    Told: TypeAlias = tuple[tuple["Probe", Callable[[*Ts], object]], ...]  # probes, and a method of each

logger = get_logger()


class Probe:
    """Observes a system: subclass it, and override the methods of interest. They do nothing here.

    ``system.probes.add(probe)`` begins, ``system.probes.remove(probe)`` ends it.

    All methods are called on the thread of the system's loop, in the course of what they tell of.
    So they must be quick and must not block: what writes to a file or a network hands over to a
    task or a thread of its own. They are plain functions, return nothing, and may not send work to
    a device, close anything, or change what they are given. Objects may be kept, and are compared
    by identity; the items and results of users are in none of them. Times are readings of
    ``time.perf_counter()``, in seconds.

    A method that raises is logged, and its probe is removed.

    Attributes
    ----------
    times_work : bool
        Whether the device time of everything that is sent is measured, not that of batches of
        services alone. On CUDA that costs some 10 us each.
    """

    times_work: bool = False

    def request_begun(self, request: ServedRequest) -> None:
        """Note a request that a service has taken; in the task of its caller, who has its context variables.

        Its end is told to what is given to :meth:`ServedRequest.on_end`.
        """

    def request_quarantined(self, request: ServedRequest) -> None:
        """Note that a request was on the device at a fault, and waits to be tried apart."""

    def batch_launched(self, batch: ServedBatch) -> None:
        """Note a batch that goes to the handler of a service; in a task of the service."""

    def batch_ended(self, batch: ServedBatch) -> None:
        """Note that the handler has ended and its results are given, before callers go on; in the same task."""

    def op_sent(self, work: DeviceWork) -> None:
        """Note that an op, or the first ops of a batch, were sent to the device.

        In a child process that holds the context the same is told to the probes of that process.
        """

    def op_ended(self, work: DeviceWork) -> None:
        """Note that nothing of an op or a batch is on the device any more; once for each :meth:`op_sent`.

        After a fault that is so at once.
        """

    def state_changed(self, device: str, state: str, generation: int) -> None:
        """Note the new state of a device.

        Parameters
        ----------
        device
            Its name.
        state
            A value of :class:`~accel.DeviceState`, such as ``"ready"``.
        generation
            Of the newest context that became ready.
        """

    def fault(self, device: str, generation: int, error: AccelError) -> None:
        """Note the first fault of a context, before the state of its device changes.

        Parameters
        ----------
        device, generation
            The context.
        error
            With its ``code``, ``scope``, ``library`` and ``op``.
        """


METHODS = [name for name, value in vars(Probe).items() if inspect.isfunction(value)]
"""Names of the methods of a probe."""


class Probes:
    """The probes of a system.

    Attributes
    ----------
    all : tuple of Probe
        Those that are told, in the order in which they were added.
    times_work : bool
        Whether one of them wants the device time of everything that is sent.
    request_begun, batch_launched, batch_ended, ... : tuple
        For each method those that override it, each with its own. Empty, it costs what a look at it costs.
    """

    __slots__ = (*METHODS, "all", "times_work")

    request_begun: Told[ServedRequest]
    request_quarantined: Told[ServedRequest]
    batch_launched: Told[ServedBatch]
    batch_ended: Told[ServedBatch]
    op_sent: Told[DeviceWork]
    op_ended: Told[DeviceWork]
    state_changed: Told[str, str, int]
    fault: Told[str, int, AccelError]

    def __init__(self) -> None:
        self._set(())

    def add(self, probe: Probe) -> None:
        """Tell a probe of what happens from now on. One that is told already is not told twice.

        Raises
        ------
        InvalidArgumentError
            It is not an instance of a subclass of :class:`Probe`, or one of its methods is a
            coroutine function.
        """
        if not isinstance(probe, Probe):
            raise InvalidArgumentError(f"probe is {probe!r}", remedy="Give an instance of a subclass of accel.Probe.")
        for name in METHODS:
            if inspect.iscoroutinefunction(getattr(probe, name)):
                raise InvalidArgumentError(
                    f"{name} of {probe!r} is a coroutine function", remedy="Write it with 'def': nothing would await it."
                )
        if probe not in self.all:
            self._set((*self.all, probe))

    def remove(self, probe: Probe) -> None:
        """Tell a probe no more; does nothing if it is not told, as after it has raised."""
        self._set(tuple([other for other in self.all if other is not probe]))

    def _set(self, probes: tuple[Probe, ...]) -> None:
        self.all: tuple[Probe, ...] = probes
        for name in METHODS:
            setattr(self, name, tuple([(probe, getattr(probe, name)) for probe in probes if _overrides(probe, name)]))
        self.times_work = any(probe.times_work for probe in probes)

    def tell(self, told: Told[*Ts], *arguments: *Ts) -> None:
        """Call a method of every probe that overrides it: ``probes.tell(probes.fault, ...)``. Raises nothing of theirs."""
        for probe, method in told:
            try:
                method(*arguments)
            except BaseException as error:  # a CancelledError of its own, too, is not the caller's
                if isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise
                self.remove(probe)
                logger.exception("probe_removed", probe=repr(probe), method=getattr(method, "__name__", ""), error=error)


def _overrides(probe: Probe, name: str) -> bool:
    return getattr(getattr(probe, name), "__func__", None) is not vars(Probe)[name]


class Service:
    """What answers requests: a :class:`~accel.patterns.DynamicBatcher`, or the service of a model.

    Attributes
    ----------
    name : str
        Its handler or model, as the log has it. Several may have one name.
    device : str
        Name of its device, with several of the first; empty without one.
    probes : Probes
        Those of the device's system; without a device its own.
    statistics : callable
        Returns its counters: see :class:`~accel.patterns.BatcherStatistics`.
    """

    __slots__ = ("__weakref__", "device", "name", "probes", "statistics")

    def __init__(self, name: str, device: str, probes: Probes, statistics: Callable[[], Any]) -> None:
        self.name = name
        self.device = device
        self.probes = probes
        self.statistics = statistics


class ServedRequest(Protocol):
    """One request of a service."""

    @property
    def service(self) -> Service:
        """Return the service that took it."""

    @property
    def number(self) -> int:
        """Return its place among all requests of the service, from 1."""

    @property
    def size(self) -> int:
        """Return how many items it counts for."""

    @property
    def begun_at(self) -> float:
        """Return when it was taken."""

    @property
    def launches(self) -> int:
        """Return in how many batches it was; more than one after retries."""

    @property
    def is_suspect(self) -> bool:
        """Return whether it is in quarantine."""

    def on_end(self, told: Callable[[BaseException | None], object]) -> None:
        """Call a function when the request has ended, before its caller goes on.

        Parameters
        ----------
        told
            Called with what the caller gets instead of an answer, or with ``None``;
            :class:`asyncio.CancelledError` if the caller was cancelled. An error must not be kept:
            its traceback holds the frames of the caller. Called with the context variables of this
            call; what it raises is logged by the loop.
        """


class ServedBatch:
    """Requests that a handler gets at once, or that are tried together in quarantine.

    Attributes
    ----------
    service : Service
    requests : sequence of ServedRequest
    device : str
        Name of the device that has it; of a trial in quarantine, of the one whose suspects they are.
    answered : sequence of ServedRequest
        Those whose callers have got results from it.
    items : int
        The sum of their sizes.
    launched_at, ended_at : float
        When the handler was called, and when it had ended; 0 before.
    device_seconds : float or None
        Device time that was charged; ``None`` if nothing was measured.
    error : str
        Name of the class of what the handler raised; empty where it returned.
    version : int or None
        Of the weights that answered; ``None`` where it is not known.
    """

    __slots__ = ("answered", "device", "device_seconds", "ended_at", "error", "items", "launched_at", "requests", "service", "version")

    def __init__(self, service: Service, requests: Sequence[ServedRequest], items: int, device: str = "") -> None:
        self.service = service
        self.device = device or service.device
        self.requests = requests
        self.answered: Sequence[ServedRequest] = ()
        self.items = items
        self.launched_at = perf_counter()
        self.ended_at = 0.0
        self.device_seconds: float | None = None
        self.error = ""
        self.version: int | None = None


class DeviceTime:
    """Measures the device time of what is sent in its block, by the task and by tasks that it starts there.

    ::

        with accel.DeviceTime() as spent:
            y = await device.blas.gemm(a, b)
        print(spent.seconds)

    An op or a batch is charged once it has ended, so the sum is whole when all that was sent has
    been awaited. It is charged the time from the begin of its first command in its stream to the
    end of its last one; on the CPU, and in a child on the CPU, the time in which its work ran. Ops
    in different streams overlap, and each is charged its own time: so sums may exceed the clock.

    Blocks may be nested: work is charged to the innermost one.

    Attributes
    ----------
    seconds : float or None
        Charged so far; ``None`` where nothing was measured: nothing was sent or has ended, or the
        device cannot measure.
    """

    __slots__ = ("_token", "seconds")

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._token: Token[DeviceTime | None] | None = None

    def __repr__(self) -> str:
        return f"<DeviceTime {'not measured' if self.seconds is None else f'{self.seconds:.6f} s'}>"

    def __enter__(self) -> Self:
        if self._token is not None:
            raise InvalidArgumentError("a DeviceTime is entered once at a time", remedy="Make one for each block.")
        self._token = CHARGED.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        token, self._token = self._token, None
        if token is not None:
            CHARGED.reset(token)


CHARGED: ContextVar[DeviceTime | None] = ContextVar("accel_device_time", default=None)
"""What the work of the present task is charged to."""


class DeviceWork:
    """An op, or the ops of one batch, on its way to a device and there.

    Attributes
    ----------
    name : str
        The op's kind, or the batch's name.
    ops : tuple of (str, str)
        Library and kind of each op.
    device, generation
        Where it was sent; empty and 0 before.
    queued_at, sent_at, ended_at : float
        When its caller sent it, when it was sent to the device, and when it had ended there; 0
        before.
    is_timed : bool
        Whether its device time is measured, where the device can.
    device_seconds : float or None
        Device time that it was charged; ``None`` if it was not measured, or has not ended.
    error : str
        Name of the class of the caller's error; empty without one.
    """

    __slots__ = (
        "_charged",
        "device",
        "device_seconds",
        "ended_at",
        "error",
        "generation",
        "is_timed",
        "name",
        "ops",
        "queued_at",
        "sent_at",
    )

    def __init__(self, name: str, ops: tuple[tuple[str, str], ...], charged: DeviceTime | None, *, is_timed: bool) -> None:
        self.name = name
        self.ops = ops
        self._charged = charged
        self.is_timed = is_timed
        self.device = ""
        self.generation = 0
        self.queued_at = perf_counter()
        self.sent_at = self.ended_at = 0.0
        self.device_seconds: float | None = None
        self.error = ""

    def charge(self, seconds: float) -> None:
        """Add device time that was measured."""
        self.device_seconds = (self.device_seconds or 0.0) + seconds
        if (block := self._charged) is not None:
            block.seconds = (block.seconds or 0.0) + seconds


def fault_code(error: AccelError) -> str:
    """Return the driver's code of a fault, or how the process ended: ``"SIGKILL"``, ``"exit code 1"``, ``"hung"``; else nothing.

    A code that is neither a number nor a name, but a text, is ``"other"``: it may say what only the log may.
    """
    if error.code is not None:
        return code if re.fullmatch(r"[\w-]{1,64}", code := str(error.code), re.ASCII) else "other"
    if not isinstance(error, HostDiedError):
        return ""
    if error.hung:
        return "hung"
    if error.signal is None:
        return "" if error.exit_code is None else f"exit code {error.exit_code}"
    return next((known.name for known in signal.Signals if known == error.signal), f"signal {error.signal}")
