"""Errors of single ops: whatever an op raises on its way becomes the error of that op alone."""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from accel.errors import AccelError, FaultScope, LibraryError, OutOfMemoryError, said
from accel.shortage import shortage

if TYPE_CHECKING:
    import asyncio


__all__ = ["op_error", "raise_op_error"]

_ITERATIONS = 8
"""Loop iterations in which the op's waiters handle its error before ``SystemExit`` is raised."""

_WHERE = "In the kernel (most recent call last):\n"

_REMEDY = "Its cause, and the cause's notes, say where it was raised: mend the library. Only this op failed."


def op_error(
    raised: BaseException, what: str, loop: asyncio.AbstractEventLoop, *, is_out_of_memory: bool = False, **fields: Any
) -> AccelError:
    """Return the error of an op for what was raised while it was dispatched or enqueued.

    Any thread may call it; never raises.

    An :class:`~accel.AccelError` is returned as it is, without ``fields``. A shortage of the
    operating system becomes a retryable error. Anything else becomes the cause of a
    :class:`~accel.LibraryError`: a ``CancelledError`` or a ``GeneratorExit`` too, because a kernel
    is called and never awaited; and an ``AccelError`` that cannot be cloned, which keeps its scope.
    ``KeyboardInterrupt`` and ``SystemExit`` are also raised from the loop, some iterations later,
    when the op has its error. ``raised`` loses its traceback, which becomes a note of it.

    Parameters
    ----------
    raised
        What was raised.
    what
        What raised it, as the subject of the message: ``"the gemm kernel"``.
    loop
        The device's loop.
    is_out_of_memory
        Whether ``raised`` is how some library says that the device has no memory.
    **fields
        Fields of the error to set, such as ``library``.
    """
    if isinstance(raised, AccelError) and _is_complete(raised):
        return raised
    error: AccelError | None
    if is_out_of_memory:
        error = OutOfMemoryError(f"{what} found no memory on the device: {type(raised).__name__}: {said(raised)}")
    else:
        error = shortage(raised, f"{what} failed for a shortage")
    if error is None:
        if isinstance(raised, (KeyboardInterrupt, SystemExit)):
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_raise_on_loop, raised, loop, _ITERATIONS)
        # `said` and not str(): a user's exception may raise even there.
        error = LibraryError(f"{what} raised {type(raised).__name__}: {said(raised)}", remedy=_REMEDY)
    for name, value in fields.items():
        setattr(error, name, getattr(error, name) if value is None else value)
    if isinstance(raised, AccelError):
        with contextlib.suppress(Exception):
            error.scope = FaultScope(raised.scope)
    error.__cause__ = _with_frames_as_notes(raised)
    return error


def _is_complete(error: AccelError) -> bool:
    """Return whether an error has all fields, so that it can be cloned for each waiter.

    The constructor of a user's subclass may not have called that of ``AccelError``.
    """
    try:
        copy = error.clone(op=error.op, library=error.library, device=error.device, generation=error.generation, op_index=error.op_index)
        return isinstance(copy, AccelError) and isinstance(error.scope, FaultScope)
    except BaseException:
        return False


def raise_op_error(
    raised: BaseException, what: str, loop: asyncio.AbstractEventLoop, *, op_index: int | None = None, library: str | None = None
) -> NoReturn:
    """Raise what :func:`op_error` returns, with its ``op_index`` set.

    The error's traceback holds this frame. So the frame must not hold the error, or the operands
    would live until cycles are collected.
    """
    error = op_error(raised, what, loop, library=library)
    error.op_index = op_index
    try:
        raise error from error.__cause__
    finally:
        del error, raised


def _raise_on_loop(raised: BaseException, loop: asyncio.AbstractEventLoop, iterations: int) -> None:
    """Raise ``KeyboardInterrupt`` or ``SystemExit`` from the loop, ``iterations`` later."""
    if not iterations:
        raise raised
    loop.call_soon(_raise_on_loop, raised, loop, iterations - 1)


def _with_frames_as_notes(error: BaseException) -> BaseException:
    """Replace the traceback of an exception by a note with its text, and return the exception.

    The frames would keep the op alive, whose future holds the error: a cycle, which would keep the
    operands until cycles are collected.
    """
    with contextlib.suppress(Exception):  # a class of the user's may have notes of another kind
        lines = traceback.format_tb(error.__traceback__)[1:]  # the first is of this package
        has_note = any(note.startswith(_WHERE) for note in getattr(error, "__notes__", ()))
        if lines and not has_note:  # some raise one instance again and again
            error.add_note(_WHERE + "".join(lines).rstrip())
    return error.with_traceback(None)
