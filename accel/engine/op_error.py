"""One rule for all of an op's path: whatever goes wrong in one op is that op's error."""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from accel.errors import AccelError, FaultScope, LibraryError, OutOfMemoryError, said
from accel.shortage import shortage

if TYPE_CHECKING:
    import asyncio


__all__ = ["op_error", "raise_op_error"]

_TURNS = 8
"""Event loop iterations in which the op's waiters act on its answer before the program ends."""

_WHERE = "In the kernel (most recent call last):\n"


def op_error(
    raised: BaseException, what: str, loop: asyncio.AbstractEventLoop, *, is_out_of_memory: bool = False, **fields: Any
) -> AccelError:
    """Return the error of an op for what was raised on its way.

    Any thread may call it; never raises.

    An error of the tree stands for itself, a shortage of the operating system is retryable, and
    anything else is the cause of a :class:`~accel.LibraryError`: a ``CancelledError`` or a
    ``GeneratorExit`` too, which code that was called and not awaited cannot mean.
    ``KeyboardInterrupt`` and ``SystemExit`` leave through the loop besides, once the op is
    answered.

    Parameters
    ----------
    raised
        What was raised.
    what
        What raised it, as the subject of the message: ``"the gemm kernel"``.
    loop
        The device's.
    is_out_of_memory
        Whether ``raised`` is how some library says that the device has no memory.
    **fields
        Of the error, such as ``library``.
    """
    if isinstance(raised, AccelError) and _is_whole(raised):
        return raised
    error: AccelError | None
    if is_out_of_memory:
        error = OutOfMemoryError(f"{what} found no memory on the device: {type(raised).__name__}: {said(raised)}")
    else:
        error = shortage(raised, f"{what} failed for a shortage")
    if error is None:
        if isinstance(raised, (KeyboardInterrupt, SystemExit)):
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_leave, raised, loop, _TURNS)
        # What is gone by now was this frame's own: a class of the user's may raise even from what
        # it says of itself.
        error = LibraryError(f"{what} raised {type(raised).__name__}: {said(raised)}", remedy=_REMEDY)
    for name, value in fields.items():
        setattr(error, name, getattr(error, name) if value is None else value)
    if isinstance(raised, AccelError):
        with contextlib.suppress(Exception):
            error.scope = FaultScope(raised.scope)
    error.__cause__ = _without_frames(raised)
    return error


def _is_whole(error: AccelError) -> bool:
    """Return whether an error has its fields, and can be cloned for each of its waiters.

    The constructor of a user's class may not have called the base's.
    """
    try:
        copy = error.clone(op=error.op, library=error.library, device=error.device, generation=error.generation, op_index=error.op_index)
        return isinstance(copy, AccelError) and isinstance(error.scope, FaultScope)
    except BaseException:
        return False


def raise_op_error(
    raised: BaseException, what: str, loop: asyncio.AbstractEventLoop, *, op_index: int | None = None, library: str | None = None
) -> NoReturn:
    """Raise what :func:`op_error` returns.

    Its traceback holds this frame, which therefore must not hold it: operands would live until
    cycles are collected.
    """
    error = op_error(raised, what, loop, library=library)
    error.op_index = op_index
    try:
        raise error from error.__cause__
    finally:
        del error, raised


def _leave(raised: BaseException, loop: asyncio.AbstractEventLoop, turns: int) -> None:
    if not turns:
        raise raised
    loop.call_soon(_leave, raised, loop, turns - 1)


def _without_frames(error: BaseException) -> BaseException:
    """Return what was raised with its traceback as text.

    The frames would keep alive what called them, and so the op, whose future holds the error: its
    operands would be free only when cycles are collected.
    """
    with contextlib.suppress(Exception):  # a class of the user's may have notes of another kind
        lines = traceback.format_tb(error.__traceback__)[1:]  # the first is of this package
        if lines and not any(
            note.startswith(_WHERE) for note in getattr(error, "__notes__", ())
        ):  # some raise one instance again and again
            error.add_note(_WHERE + "".join(lines).rstrip())
    return error.with_traceback(None)


_REMEDY = "Its cause, and the cause's notes, say where it was raised: mend the library. Only this op failed."
