"""The options of ``open_device``, checked once: honoured or rejected, never ignored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, cast

from accel.actors import Directive, RestartStrategy
from accel.completion import CompletionStrategy, resolve_strategy
from accel.engine.hosts import ProcessHost
from accel.engine.kernels import LIBRARIES
from accel.errors import InvalidArgumentError
from accel.ops.families import FAMILIES, FamilyName
from accel.values import check_choice, check_count, check_flag

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from accel.backend import Injection
    from accel.completion import CompletionName
    from accel.errors import AccelError

__all__ = ["DeviceOptions", "FaultSource", "Library", "check_libraries", "check_options"]

Library: TypeAlias = Literal["memory", "graph", "capture", "compiler", "collective"] | FamilyName
"""A name in :data:`accel.engine.kernels.LIBRARIES`."""

_STREAMS = "Give the number of streams that independent ops are spread over: 8, which is the default, or 1 to run everything in one stream."
_MOST_STREAMS = 128
"""No GPU runs more kernels side by side; each stream costs a thread, or staging memory."""

_USED: Mapping[str, tuple[str, ...]] = {family.name: family.uses for family in FAMILIES if family.uses}


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
    """Return the names of ``libraries=``, with a family replaced by the libraries that it uses."""
    try:
        wanted: tuple[Library, ...] = (names,) if isinstance(names, str) else tuple(names)
    except Exception as error:  # of an iterable of the caller's
        raise InvalidArgumentError(f"libraries is {names!r}", remedy="Give names of libraries.") from error
    for name in wanted:
        if not isinstance(name, str) or name not in LIBRARIES:
            raise InvalidArgumentError(f"there is no library {name!r}", remedy=f"Use some of {', '.join(LIBRARIES)}.")
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
    """Return the fault plan, or raise for a class or anything else that is none."""
    if isinstance(value, type) or (value is not None and not callable(getattr(value, "take", None))):
        raise InvalidArgumentError(f"faults is {value!r}", remedy="Give an instance: accel.testing.FaultPlan().")
    return value
