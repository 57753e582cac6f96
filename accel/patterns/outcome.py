"""What an error means for a batch: whether to retry, whether to search for its cause, and an instance for each caller."""

from __future__ import annotations

import copy

from accel.errors import AccelError, ContextPoisonedError, FaultScope, StaleRefError

__all__ = ["is_fault", "is_suspicious", "is_worth_a_retry", "own_instance"]


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


def is_suspicious(error: Exception) -> bool:
    """Return whether the work may be the cause of the fault, and another context follows."""
    return is_fault(error) and is_worth_a_retry(error)


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
