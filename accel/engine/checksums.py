"""Checksums of durable buffers: made after what writes them, compared before the next generation begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from accel._log import get_logger
from accel.engine.launches import OpSubmission
from accel.ops import Checksum, Get

if TYPE_CHECKING:
    from accel.engine.core import DeviceCore
    from accel.engine.submission import Submission
    from accel.ref import AccelRef

__all__ = ["checksum_op", "value_op", "verify"]

logger = get_logger()


class _Dispatcher(Protocol):
    """A context, of any host."""

    generation: int

    def check_alive(self) -> None:
        """Raise once it has faulted."""

    async def dispatch(self, submission: Submission) -> None:
        """Send a submission."""


def checksum_op(core: DeviceCore, ref: AccelRef, generation: int) -> OpSubmission:
    """Return what makes the checksum of a buffer."""
    op = Checksum(ref)
    return OpSubmission(op, op.plan(), core.loop.create_future(), generation)


def value_op(core: DeviceCore, made: AccelRef, generation: int) -> OpSubmission:
    """Return what fetches a checksum; fault plans do not count it either."""
    op = Get(made, np.empty(made.shape, made.dtype.numpy))
    submission = OpSubmission(op, op.plan(), core.loop.create_future(), generation)
    submission.name = Checksum.kind
    return submission


async def verify(context: _Dispatcher, core: DeviceCore) -> None:
    """Compare the checksums that are known with what is in memory now. A buffer that differs is torn, and a log line says so.

    Of buffers whose checksum is not known, since the fault came before it was made, it is made now.

    Raises
    ------
    AccelError
        What keeps a checksum from being made: the context is not sound.
    """
    book = core.durable
    for buffer in sorted(book.checked):
        entry = book.buffers.get(buffer)
        ref = None if entry is None else entry.ref()
        if entry is None or ref is None or book.is_torn(entry):
            continue
        made = await _run(context, checksum_op(core, ref, context.generation))
        value: Any = await _run(context, value_op(core, made, context.generation))
        known = entry.checksum.value
        if known is None:
            entry.checksum.take_now(int(value[0]))
        elif int(value[0]) != known:
            logger.error("durable_checksum_differs", device=core.name, generation=context.generation, buffer=buffer, nbytes=ref.nbytes)
            book.mismatched(entry)


async def _run(context: _Dispatcher, submission: OpSubmission) -> Any:
    future = submission.future
    context.check_alive()  # a context that has faulted ends no submission
    await context.dispatch(submission)
    return await future
