"""Reports that a child loads or compiles, which the parent must not count as a hang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.engine.offloaded import OffloadedCalls
from accel.remote.messages import Kind

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from accel.engine.registration import RegisteredLibrary
    from accel.ops import KernelOp
    from accel.process.channel import Channel

__all__ = ["Busy", "BusyCalls"]


class Busy:
    """``with busy:`` reports to the parent that the child is busy: it opens, loads or compiles.

    The parent allows a busy child more time. Sections nest, and overlap those of other tasks; the
    child is reported as not busy at the end of the last one. The parent may count it as not busy
    before, once nothing is in flight.

    Parameters
    ----------
    channel
        The connection to the parent.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._count = 0  # sections that have not ended

    def __enter__(self) -> None:
        self._count += 1
        # Also if it is busy already: the parent counts it as not busy once nothing is in flight.
        self._channel.send(Kind.BUSY, b"\1")
        self._channel.flush()  # an import may block the loop

    def __exit__(self, *_: object) -> None:
        """End a section; :class:`BusyCalls` has the loop call this.

        The connection may have been closed since the section began. To raise then would hide what
        the section itself has raised.
        """
        self._count -= 1
        if not self._count and not self._channel.is_closed:
            self._channel.send(Kind.BUSY, b"\0")
            self._channel.flush()


class BusyCalls(OffloadedCalls):
    """Calls kernels on worker threads, and reports the child as busy while one may load or compile.

    The server puts it in the place of the context's own :class:`OffloadedCalls`.

    Parameters
    ----------
    loop
        The loop of the child.
    busy
        Reports that the child is busy.
    registered
        The registered libraries that are open in the context, by name: the context's own
        dictionary, which changes. Of each of their kernels the first call here counts as loading.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, busy: Busy, registered: Mapping[str, RegisteredLibrary]) -> None:
        super().__init__(registered)
        self._libraries = registered
        self._loop = loop
        self._busy = busy

    def call_kernel(self, kernel: Callable[..., None], lane: Any, op: KernelOp, *operands: Any) -> None:
        """Call a kernel on this worker thread; report the child as busy if the call may load.

        The first call of a registered library's kernel may, and every call of another kernel that
        is made here.
        """
        library = self._libraries.get(op.library)
        if library is not None and type(op) in library.loaded:
            super().call_kernel(kernel, lane, op, *operands)
            return
        self._loop.call_soon_threadsafe(self._busy.__enter__)
        try:
            super().call_kernel(kernel, lane, op, *operands)
            if library is not None:
                library.loaded.add(type(op))
        finally:
            self._loop.call_soon_threadsafe(self._busy.__exit__)
