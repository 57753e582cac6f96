"""Checksums of sealed buffers: compared before a generation begins with what they hold then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.engine.launches import OpSubmission
from accel.ops import Checksum

if TYPE_CHECKING:
    from accel.engine.core import DeviceCore
    from accel.engine.in_flight import ContextBase

__all__ = ["verify"]


async def verify(context: ContextBase, core: DeviceCore) -> None:
    """Compare the sealed buffers with their checksums; one that differs is torn from now on.

    Called once a context is made, before its generation begins.

    Raises
    ------
    AccelError
        A checksum cannot be made: the context is not usable.
    """
    book = core.durable
    for buffer, seal in tuple(book.sealed.items()):
        durable_buffer = book.buffers.get(buffer)  # None if freed meanwhile
        ref = None if durable_buffer is None else durable_buffer.ref()
        if ref is None or seal.checksum is None:
            continue
        op, future = Checksum(ref), core.loop.create_future()
        context.check_alive()  # a context that has faulted ends no submission
        await context.dispatch(OpSubmission(op, op.plan(), future, context.generation))
        # The seal may have ended with its buffer meanwhile.
        if int((await future)[0]) != seal.checksum and book.sealed.get(buffer) is seal:
            book.on_mismatch(ref)
