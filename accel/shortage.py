"""Shortages of the operating system as errors of the tree: no descriptor, no thread, no memory now. The same call works once the shortage is over."""

from __future__ import annotations

import errno
from typing import Final

from accel.errors import BackendUnavailableError, OutOfMemoryError

__all__ = ["REMEDIES", "is_shortage", "no_thread", "raise_shortage", "shortage"]

_FILES: Final = "Raise the limit of open files (ulimit -n), or close what is not needed; then send it again."
_THREADS: Final = "Raise the limit of processes and threads (ulimit -u, pids.max of the control group), or end some; then send it again."

REMEDIES: Final = {
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.EAGAIN: _THREADS,
    errno.ENOMEM: "Free memory of this machine, or raise the control group's limit; then send it again.",
}
"""errno -> what to do, of all errors that mean a shortage."""


def shortage(error: BaseException, what: str) -> OutOfMemoryError | None:
    """Return the error that tells of a shortage, with ``error`` as its cause; ``None`` where ``error`` stands for something else.

    Parameters
    ----------
    error
        What was raised; an ``OSError`` is told by its errno.
    what
        What could not be done, as the beginning of the message.
    """
    number = error.errno if isinstance(error, OSError) else errno.ENOMEM if isinstance(error, MemoryError) else None
    remedy = None if number is None else REMEDIES.get(number)
    if number is None or remedy is None:
        return None
    # An errno, and not str(error): what a class of the user's says of itself may raise.
    text = error.strerror if isinstance(error, OSError) else "out of memory"
    found = OutOfMemoryError(f"{what}: {text}", code=errno.errorcode[number], library="os", remedy=remedy)
    found.__cause__ = error.with_traceback(None)  # whose frames would keep what they name, such as operands
    return found


def is_shortage(error: BaseException | None) -> bool:
    """Return whether an error tells of a shortage: of what this module makes, and of a child process that could not be started for one."""
    return isinstance(error, (OutOfMemoryError, BackendUnavailableError)) and error.library == "os" and error.retryable


def raise_shortage(error: BaseException, what: str) -> None:
    """Raise what :func:`shortage` returns, if it is one. Its traceback holds this frame, which therefore must not hold it."""
    found = shortage(error, what)
    if found is not None:
        try:
            raise found from error
        finally:
            del found, error


def no_thread(error: RuntimeError, what: str) -> OutOfMemoryError:
    """Return the error for a ``Thread.start`` that raised: the operating system has no thread now."""
    found = OutOfMemoryError(f"{what}: no thread could be started", code="EAGAIN", library="os", remedy=_THREADS)
    found.__cause__ = error.with_traceback(None)  # as above
    return found
