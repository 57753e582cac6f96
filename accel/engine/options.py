"""The options of ``open_device``, checked once: honoured or rejected, never ignored; and the places of contexts, with their limits."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, cast

from accel.actors import Directive, RestartStrategy
from accel.completion import CompletionStrategy, resolve_strategy
from accel.engine.kernels import LIBRARIES
from accel.errors import InvalidArgumentError
from accel.ops.families import FAMILIES, FamilyName
from accel.values import check_choice, check_count, check_flag, check_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from accel.backend import Injection
    from accel.completion import CompletionName
    from accel.errors import AccelError

__all__ = ["DeviceOptions", "FaultSource", "HostOption", "InlineHost", "Library", "ProcessHost", "check_libraries", "check_options"]

Library: TypeAlias = Literal["memory", "graph", "capture", "compiler", "collective"] | FamilyName
"""A name in :data:`accel.engine.kernels.LIBRARIES`."""

_STREAMS = "Give the number of streams that independent ops are spread over: 8, which is the default, or 1 to run everything in one stream."
_MOST_STREAMS = 128
"""No GPU runs more kernels side by side; each stream costs a thread, or staging memory."""

# Families with composed ops -> the libraries that compute these.
_USED: Mapping[str, tuple[str, ...]] = {family.name: family.uses for family in FAMILIES if family.uses}


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineHost:
    """Contexts in this process; ``host="inline"`` is one with the defaults.

    Parameters
    ----------
    stall_after
        Seconds. :meth:`Device.health` is not ready while the oldest op in flight takes longer than
        ops of its kind usually do, and this besides. The first op of a kind, loading and compiling
        do not count. ``None``: ops are not looked at.
    """

    stall_after: float | None = 2.0

    def __post_init__(self) -> None:
        _check_times(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHost:
    """Contexts in child processes of their own; ``host="process"`` is one with the defaults.

    Parameters
    ----------
    after_fault
        Whether contexts are made in this process until a fault of scope PROCESS, and in children
        from then on, as with ``host="auto"``.
    stall_after
        See :class:`InlineHost`.
    busy_timeout
        Seconds that a child may take to map durable memory, to open a registered library or to
        compile a kernel; and seconds of loading and compiling that do not count as a hang of one
        op. After that the child is killed, and another one replaces it. A large library loads in
        tens of seconds.
    heartbeat_interval
        Seconds between two heartbeats that a child must answer. :meth:`Device.health` is not ready
        while one is unanswered for longer.
    heartbeat_timeout
        Seconds without an answer after which the child is killed, and another one replaces it; six
        times as many while it loads or compiles. A library call that keeps the GIL delays answers.
    """

    after_fault: bool = False
    stall_after: float | None = 2.0
    busy_timeout: float = 120.0
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 10.0

    def __post_init__(self) -> None:
        check_flag("after_fault", self.after_fault)
        _check_times(self)
        if self.heartbeat_timeout < self.heartbeat_interval:
            raise InvalidArgumentError(
                f"heartbeat_timeout is {self.heartbeat_timeout!r} and heartbeat_interval {self.heartbeat_interval!r}",
                remedy="Allow at least one interval of silence.",
            )


HostOption: TypeAlias = Literal["auto", "inline", "process"] | InlineHost | ProcessHost
"""The values of ``host=``."""


class FaultSource(Protocol):
    """Plans faults for tests; :class:`accel.testing.FaultPlan` implements it."""

    def take(self, kind: str) -> Injection | AccelError | None:
        """Count one op of this kind, and return the fault to inject, if any."""


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """The options of ``open_device``, checked. See :meth:`accel.System.open_device`."""

    completion: CompletionStrategy
    streams: int
    """Over how many streams independent ops are spread; with one, everything is in that one."""
    libraries: tuple[Library, ...]
    memory_limit: int | None
    pinned_limit: int | None
    pending_limit: int
    max_in_flight: int
    overload: Literal["wait", "reject"]
    restart: RestartStrategy
    faults: FaultSource | None
    debug: bool
    standby: Literal["none", "imports", "context", "model"] = "none"
    spares: int = 1
    hang_timeout: float | None = None
    limits: ProcessHost = field(default_factory=ProcessHost)  # of contexts in this process, ``stall_after`` alone


def check_options(
    completion: CompletionName | CompletionStrategy,
    streams: int,
    libraries: Library | Iterable[Library],
    memory_limit: int | None,
    pinned_limit: int | None,
    pending_limit: int,
    max_in_flight: int,
    overload: Literal["wait", "reject"],
    restart: RestartStrategy | None,
    faults: FaultSource | None,
    *,
    debug: bool,
) -> DeviceOptions:
    """Return the options if each is what :meth:`accel.System.open_device` says.

    Raises
    ------
    InvalidArgumentError
        If one is not; it says which, and what would do.
    """
    if check_count("streams", streams, remedy=_STREAMS) > _MOST_STREAMS:
        raise InvalidArgumentError(f"streams is {streams}, and {_MOST_STREAMS} are the most", remedy=_STREAMS)
    check_choice("overload", overload, "wait", "reject")
    check_flag("debug", debug)
    return DeviceOptions(
        completion=resolve_strategy(completion),
        # One after the other over all libraries: with several streams, a fault would surface in
        # whichever is waited for.
        streams=1 if debug else streams,
        libraries=check_libraries(libraries),
        memory_limit=None if memory_limit is None else check_count("memory_limit", memory_limit),
        pinned_limit=None if pinned_limit is None else check_count("pinned_limit", pinned_limit),
        pending_limit=check_count("pending_limit", pending_limit),
        max_in_flight=check_count("max_in_flight", max_in_flight),
        overload=overload,
        restart=_check_restart(restart),
        faults=_check_faults(faults),
        debug=debug,
    )


def check_libraries(names: Library | Iterable[Library]) -> tuple[Library, ...]:
    """Return the names of ``libraries=``, each once, in their order.

    A family with composed ops is replaced by the libraries that compute these.
    """
    try:
        wanted: tuple[Library, ...] = (names,) if isinstance(names, str) else tuple(names)
    except Exception as error:  # of an iterable of the caller's
        raise InvalidArgumentError(f"libraries is {names!r:.80}", remedy="Give names of libraries.") from error
    for name in wanted:
        if not isinstance(name, str) or name not in LIBRARIES:
            raise InvalidArgumentError(f"there is no library {name!r:.80}", remedy=f"Use some of {', '.join(LIBRARIES)}.")
    ready = dict.fromkeys(used for name in wanted for used in _USED.get(name, (name,)))
    return cast("tuple[Library, ...]", tuple(ready))


def _check_restart(value: RestartStrategy | None) -> RestartStrategy:
    """Return the restart strategy, or the default."""
    if value is None:
        return RestartStrategy()
    if not isinstance(value, RestartStrategy):
        raise InvalidArgumentError(f"restart is {value!r}", remedy="Give an accel.RestartStrategy.")
    if value.on_exception is not Directive.RESTART:
        raise InvalidArgumentError(
            f"restart has on_exception={value.on_exception}: a device has no state that could go on",
            remedy="Leave it out; it is for actors.",
        )
    return value


def _check_faults(value: FaultSource | None) -> FaultSource | None:
    """Return the fault plan or ``None``; raise for the class itself, or anything without a ``take`` method."""
    if isinstance(value, type) or (value is not None and not callable(getattr(value, "take", None))):
        raise InvalidArgumentError(f"faults is {value!r}", remedy="Give an instance: accel.testing.FaultPlan().")
    return value


def _check_times(host: InlineHost | ProcessHost) -> None:
    """Raise unless each field that holds a time is seconds above 0."""
    for limit in fields(host):
        seconds = getattr(host, limit.name)
        if limit.name != "after_fault" and not (seconds is None and limit.name == "stall_after"):
            check_seconds(limit.name, seconds, or_zero=False, or_endless=True)
