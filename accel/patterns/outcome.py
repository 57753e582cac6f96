"""What an error means for the callers of a batch: whether to try again, and an instance for each of them."""

from __future__ import annotations

import copy

from accel.errors import AccelError, ContextPoisonedError, FaultScope, StaleRefError

__all__ = ["is_fault", "is_suspicious", "is_worth_a_retry", "own_instance"]


def is_worth_a_retry(error: Exception) -> bool:
    """Return whether a rebuild is what kept the work from being done, so that the next generation may well do it.

    Parameters
    ----------
    error
        Decided from its class and scope: a retryable fault of the context or the process, or a ref of an earlier generation.
    """
    if isinstance(error, StaleRefError):
        return error.reason == "generation"
    return isinstance(error, AccelError) and error.retryable and FaultScope.OP < error.scope < FaultScope.DEVICE


def is_fault(error: object) -> bool:
    """Return whether a context died of work that was on it, so that the work may be why. What had not reached the device is not."""
    if isinstance(error, ContextPoisonedError) and error.executed == "no":
        return False
    return isinstance(error, AccelError) and FaultScope.OP < error.scope < FaultScope.DEVICE


def is_suspicious(error: Exception) -> bool:
    """Return whether the work may be why the context died, and another context follows."""
    return is_fault(error) and is_worth_a_retry(error)


def own_instance(error: Exception, given: set[int]) -> Exception:
    """Return ``error`` for the first caller, and a copy for each further one, so that what one adds to it is not seen by another.

    Parameters
    ----------
    error
        What the handler gave; an exception that cannot be copied is shared.
    given
        Identities of the instances that were handed out; updated.
    """
    if isinstance(error, StopIteration):
        # A future refuses it: raised inside a coroutine it would mean something else.
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
