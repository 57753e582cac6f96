"""HTTP answers: for an error, and for the device's health. All integrations take them from here.

An answer depends on the error's class and scope and on the device's state, never on text. The client reads a sentence of this module, because
an error's message may name drivers, libraries, paths and addresses. Only an error that names what the client sent, its ``argument``, is answered with its
message, as far as it is not longer than an answer may be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from accel._log import get_logger
from accel.device import DeviceHealth, DeviceState, Pool
from accel.errors import (
    AccelError,
    ActorStoppedError,
    ClosedError,
    ContextPoisonedError,
    DeadlineExceededError,
    DeviceLostError,
    HostDiedError,
    InvalidArgumentError,
    MailboxFullError,
    NonFiniteError,
    OutOfMemoryError,
    PoisonedInputError,
    StaleRefError,
    UnknownTenantError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from accel.integrations._opening import Enough, Opened

__all__ = ["Answer", "error_answer", "health_answer", "ready_answer", "unopened_answer"]

_LONGEST_WAIT = 60
"""Bound of ``Retry-After``, in seconds: an estimate from few ops may be far off."""

_LONGEST_DETAIL = 500
_LONGEST_FIELD = 200
"""Characters of an answer that may be the client's own."""

_NO_STORE = {"Cache-Control": "no-store"}

logger = get_logger()


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, a JSON body, and headers."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=lambda: dict(_NO_STORE))


@dataclass(frozen=True, slots=True)
class _Rule:
    status: int
    detail: str
    retryable: bool


_FULL = _Rule(429, "The service has as much work as it takes. Send the request again later.", True)
_FULL_WHILE_DOWN = _Rule(503, "The accelerator is not ready, and no more requests can wait for it. Send the request again later.", True)
_REBUILT = _Rule(503, "The accelerator was restarted while it worked on the request. Send the request again.", True)
_GONE = _Rule(503, "The service cannot do this work any more.", False)
_NO_MEMORY = _Rule(503, "The accelerator has no memory for the request now. Send it again later.", True)
_LATE = _Rule(504, "The work did not end in time.", True)
_WRONG = _Rule(422, "The service does not take this input.", False)
_NO_SHARE = _Rule(403, "The service has no share of the accelerator for this client.", False)
_POISON = _Rule(422, "The accelerator faults, or hangs, at this input. It will not be tried again.", False)
_NOT_FINITE = _Rule(500, "The model has no finite answer to this input.", False)
_FAILED = _Rule(500, "The service failed on the request.", False)

# The most specific class of an error that is listed decides, so a service's own subclasses are answered like their parents.
_RULES: Mapping[type[BaseException], _Rule] = {
    ContextPoisonedError: _REBUILT,
    StaleRefError: _REBUILT,
    HostDiedError: _REBUILT,
    DeviceLostError: _GONE,
    ClosedError: _GONE,
    ActorStoppedError: _GONE,
    OutOfMemoryError: _NO_MEMORY,
    DeadlineExceededError: _LATE,
    InvalidArgumentError: _WRONG,
    UnknownTenantError: _NO_SHARE,
    UnsupportedError: _WRONG,
    PoisonedInputError: _POISON,
    NonFiniteError: _NOT_FINITE,
}


def _is_ready(opened: Opened) -> bool:
    return any(device.state is DeviceState.READY for device in (opened if isinstance(opened, Pool) else (opened,)))


def _rule(error: AccelError, opened: Opened | None) -> _Rule:
    if isinstance(error, MailboxFullError):
        return _FULL if opened is None or _is_ready(opened) else _FULL_WHILE_DOWN
    if isinstance(error, ContextPoisonedError) and not error.retryable:
        return _GONE  # the fault that lost the device
    if isinstance(error, StaleRefError) and error.reason == "freed":
        return _FAILED  # by the handler itself: no rebuild was in between
    for kind in type(error).__mro__:
        if kind in _RULES:
            return _RULES[kind]
    return _REBUILT if error.is_fault else _FAILED


def _retry_after(error: AccelError) -> str:
    seconds = error.retry_after if isinstance(error, MailboxFullError) else None
    return str(max(1, math.ceil(min(seconds or 0, _LONGEST_WAIT))))


def error_answer(error: AccelError, opened: Opened | None) -> Answer:
    """Return the answer to a client whose request failed with ``error``.

    Parameters
    ----------
    error
        What the handler raised. Errors of the service itself are logged: a 500, and use of something closed, or from another loop or thread,
        while the device is READY. So is, at the level INFO, a 403, and a 422 whose message the client does not get.
    opened
        The device that serves, or the pool. Its state decides between 429 (too much work) and 503 (not able to work). ``None`` if there is none.
    """
    rule = _rule(error, opened)
    if rule.status == 500 or (rule is _GONE and opened is not None and _is_ready(opened)):
        logger.error("request_failed", error=error)
    argument = error.argument if isinstance(error, InvalidArgumentError) else None
    if rule.status in (403, 422) and argument is None:
        logger.info("request_refused", error=error)
    generation = error.generation
    if generation is None and opened is not None and not isinstance(opened, Pool):
        generation = opened.generation
    headers = dict(_NO_STORE)
    if rule.retryable and rule.status in (429, 503):
        headers["Retry-After"] = _retry_after(error)
    body = {
        "error": type(error).__name__,
        "detail": rule.detail if argument is None else error.message[:_LONGEST_DETAIL],
        "retryable": rule.retryable and (rule is not _LATE or error.retryable),  # a suspect of a fault is not to be sent again
        "generation": generation,
    }
    if argument is not None:
        body["field"] = argument[:_LONGEST_FIELD]
    return Answer(rule.status, body, headers)


def _state(health: DeviceHealth, ok: bool) -> dict[str, Any]:
    body = {"ok": ok, "state": health.state.value, "generation": health.generation}
    if health.is_stalled:
        body |= {"stalled": True, "reason": health.reason}
    elif health.error:  # its class and code: a message may have more than clients are to see
        body["reason"] = health.error
    return body


def _health(opened: Opened, enough: Enough, which: Literal["is_live", "is_ready"]) -> Answer:
    if isinstance(opened, Pool):
        health = opened.health(enough)
        ok = getattr(health, which)
        devices = {name: _state(device, getattr(device, which)) for name, device in health.devices.items()}
        return Answer(200 if ok else 503, {"ok": ok, "ready": health.ready, "devices": devices})
    device_health = opened.health()
    ok = getattr(device_health, which)
    return Answer(200 if ok else 503, _state(device_health, ok))


def health_answer(opened: Opened, enough: Enough = "any") -> Answer:
    """Return the answer of ``/healthz``: 200 while the device serves or will by itself, 503 once it is lost or closed; of a pool, ``enough`` of them."""
    return _health(opened, enough, "is_live")


def unopened_answer(hint: str) -> Answer:
    """Return the answer of both routes where no device was opened, which is an error in the application; *hint* says how to open one."""
    return Answer(503, {"ok": False, "state": "not opened", "generation": None, "hint": hint})


def ready_answer(opened: Opened, enough: Enough = "any") -> Answer:
    """Return the answer of ``/readyz``: 200 while the device serves, or ``enough`` of a pool; 503 from a fault to the end of the rebuild, and while stalled."""
    return _health(opened, enough, "is_ready")
