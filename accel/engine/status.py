"""The status of ops whose success only the device knows, checked when the op has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from accel.errors import AccelError
from accel.ops import KernelOp, Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.backend import AccelDevice, AccelEvent, Kernel
    from accel.engine.stream_clock import StreamClock
    from accel.ops import Status

__all__ = ["STATUS_COMMANDS", "PendingStatus"]

STATUS_COMMANDS = 3
"""Commands that a status adds to an op's own: a fill, a copy, and gathering in a graph."""


@dataclass(frozen=True, eq=False, slots=True)
class _ReadBack(KernelOp[None]):
    """A small ``get`` of a status; only to ask the backend whether such a copy may block."""

    library: ClassVar[str] = "memory"
    kind: ClassVar[str] = "get"

    destination: np.ndarray[Any, Any]

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        return Plan((), (), ())


class PendingStatus:
    """The status of one op that was dispatched; it wraps the op's kernel, and is called instead.

    It has an event of the lane's pool, until :meth:`close`.

    Parameters
    ----------
    status
        The status that the op's plan declares.
    kernel
        The op's kernel.
    lane
        The op's lane.

    Attributes
    ----------
    address : int
        Device memory for the status, until the op has ended.
    """

    __slots__ = ("_bytes", "_event", "_host", "_is_enqueued", "_is_skipped", "_kernel", "_status", "address")

    def __init__(self, status: Status, kernel: Kernel, lane: StreamClock) -> None:
        self._status = status
        self._kernel = kernel
        self.address = 0
        self._bytes = bytearray(status.spec.nbytes)
        self._host = np.ndarray(status.spec.shape, status.spec.dtype.numpy, self._bytes)
        self._event: AccelEvent = lane.events.acquire()
        self._is_enqueued = self._is_skipped = False

    def may_block(self, device: AccelDevice, lane: StreamClock) -> bool:
        """Return whether enqueuing the copy to the host may block."""
        return device.may_block(lane, _ReadBack(self._host))

    def __call__(self, lane: StreamClock, op: KernelOp, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Enqueue the op between a fill that clears its status and the copy of it to the host.

        An event after them tells :meth:`is_known` that the copy has ended.
        """
        lane.stream.fill(self.address, b"\0", len(self._bytes))
        self._kernel(lane, op, plan, inputs, outputs)
        lane.stream.copy_dtoh(memoryview(self._bytes), self.address)
        lane.stream.record(self._event)
        self._is_enqueued = True

    def skip(self) -> None:
        """Ignore the status, unless it was enqueued: the kernel has raised, or is never called."""
        self._is_skipped = not self._is_enqueued

    def is_known(self) -> bool:
        """Return whether the status is on the host, or is ignored; raises the context's fault."""
        return self._is_skipped or (self._is_enqueued and self._event.query())

    def failure(self) -> BaseException | None:
        """Return the op's error as its status says, or ``None``; the status must be known.

        The check is code of the op's family: what it raises is the op's error too.
        """
        if self._is_skipped:
            return None
        try:
            error: object = self._status.check(self._host)
        except BaseException as raised:
            return raised
        if error is None or isinstance(error, AccelError):
            return error
        return TypeError(f"the check of a status returned {error!r:.200}, which is no AccelError")

    def close(self, lane: StreamClock) -> None:
        """Give the event back to the lane: the stream has passed it, or it is never recorded."""
        lane.events.release(self._event)
