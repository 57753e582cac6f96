"""What a context in this process does before its generation begins: it maps the durable memory of the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.engine.checksums import verify

if TYPE_CHECKING:
    from accel.engine.context import Context

__all__ = ["bind_durable"]


async def bind_durable(context: Context) -> None:
    """Map what the device's book keeps, and see that what has a checksum is as it was.

    Raises
    ------
    AccelError
        What keeps the memory from being mapped; the generation does not begin.
    """
    book = context.core.durable
    book.is_offered = context.durables.is_offered
    kept = await book.slabs_to_bind()
    slabs = await context.durables.bind(context.buffers, kept)
    for each, slab in zip(kept, slabs, strict=True):
        book.on_slab_mapped(each.number, slab.closed)
    await verify(context, context.core)
