"""What an error means for a batch: whether to retry it, whole or item by item, whether to search for its cause, and an instance for each caller."""

from __future__ import annotations

import copy
import signal
from typing import Literal

from accel.errors import (
    AccelError,
    ActorStoppedError,
    BackendUnavailableError,
    ClosedError,
    ContextPoisonedError,
    DeviceLostError,
    FaultScope,
    HostDiedError,
    KernelFaultError,
    MailboxFullError,
    NotInitializedError,
    StaleRefError,
)

__all__ = [
    "is_by_work",
    "is_fault",
    "is_of_an_item",
    "is_of_the_device",
    "is_same_fault",
    "is_suspicious",
    "is_worth_a_retry",
    "kind_of_fault",
    "own_instance",
]

_OF_NO_ITEM = (
    ActorStoppedError,
    BackendUnavailableError,
    ClosedError,
    MailboxFullError,
    NotInitializedError,
    StaleRefError,
    TimeoutError,
)
"""Errors that tell of the device, of its queue or of the time: they would meet each item of a batch alone too."""


def is_worth_a_retry(error: Exception) -> bool:
    """Return whether only a rebuild kept the work from being done, so that the next generation can do it.

    Parameters
    ----------
    error
        Decided from its class and scope: a retryable fault of the context or the process, or a ref of an earlier generation.
    """
    if isinstance(error, StaleRefError):
        return error.reason == "generation"
    return isinstance(error, AccelError) and error.retryable and FaultScope.OP < error.scope < FaultScope.DEVICE


def is_fault(error: object) -> bool:
    """Return whether a context faulted while the work was on the device. Work that had not reached the device does not count."""
    if isinstance(error, ContextPoisonedError) and error.executed == "no":
        return False
    return isinstance(error, AccelError) and FaultScope.OP < error.scope < FaultScope.DEVICE


def is_of_the_device(error: Exception) -> bool:
    """Return whether a device that is lost or closed did not do the work for that reason, so that another one can."""
    return is_fault(error) or isinstance(error, (ClosedError, ContextPoisonedError, DeviceLostError, StaleRefError))


def is_suspicious(error: Exception) -> bool:
    """Return whether the work may be the cause of the fault, and another context follows."""
    return is_fault(error) and is_worth_a_retry(error)


_BY_WORK = frozenset(
    (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
)
"""Signals by which a process ends itself. Others are sent: by an operator, by a supervisor, by the kernel when memory runs out."""


def is_by_work(fault: Exception) -> bool:
    """Return whether the work that was on the device has ended the context: a kernel faulted or hung, or the process crashed or left.

    Any other death, such as by SIGKILL, may have come from outside, and is no proof against what was in flight.
    """
    origin = _origin(fault)
    if isinstance(origin, HostDiedError):
        return origin.hung or origin.exit_code is not None or origin.signal in _BY_WORK
    return isinstance(origin, KernelFaultError)


def is_of_an_item(error: Exception) -> bool:
    """Return whether an error that a whole batch met may be of one of its items, so that the others are answered without that one."""
    if isinstance(error, _OF_NO_ITEM):
        return False
    return not (isinstance(error, AccelError) and error.is_fault)


def is_same_fault(fault: AccelError, other: AccelError) -> bool:
    """Return whether the work caused both, in the same way: the driver gave one status for both kernels, or the processes crashed by one signal.

    A hang proves less, because a machine that is busy or a process that was stopped looks the same.
    """
    first, second = _origin(fault), _origin(other)
    if isinstance(first, HostDiedError) and isinstance(second, HostDiedError):
        is_same = (first.signal, first.exit_code) == (second.signal, second.exit_code)
        return is_same and is_by_work(first) and not (first.hung or second.hung)
    return isinstance(first, KernelFaultError) and isinstance(second, KernelFaultError) and first.code == second.code


def _origin(fault: Exception) -> Exception:
    """Return the error that ended the context: the errors of callers have it as their cause."""
    while isinstance(fault.__cause__, AccelError):
        fault = fault.__cause__
    return fault


def kind_of_fault(fault: BaseException) -> Literal["fault", "hang"]:
    """Return whether a context died, or was ended because it hung."""
    cause: BaseException | None = fault
    while cause is not None:
        if isinstance(cause, HostDiedError) and cause.hung:
            return "hang"
        cause = cause.__cause__
    return "fault"


def own_instance(error: Exception, given: set[int]) -> Exception:
    """Return ``error`` for the first caller, and a copy for each further one: notes and tracebacks of one caller stay its own.

    Parameters
    ----------
    error
        The handler's exception; one that cannot be copied is shared.
    given
        Identities of the instances that were handed out; updated.
    """
    if isinstance(error, StopIteration):
        # A future refuses it: raised inside a coroutine, it would end the coroutine with a result.
        wrapped = RuntimeError("the handler gave a StopIteration")
        wrapped.__cause__ = error
        return wrapped
    if id(error) not in given:
        given.add(id(error))
        return error
    try:
        if isinstance(error, AccelError):
            return error.clone()
        own = copy.copy(error)
    except Exception:
        return error
    if type(own) is not type(error):
        return error
    own.__cause__ = error.__cause__
    return own.with_traceback(error.__traceback__)
