"""What a kernel actor is sent: ops of one submission that go into one lane, bound to addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.actors import ActorRef
    from accel.backend import Injection, Kernel
    from accel.device.lane import Lane
    from accel.device.submission import Submission
    from accel.errors import AccelError
    from accel.memory.usage import Dependency
    from accel.ops import KernelOp

__all__ = ["BATCH", "Launch", "Port", "Run"]


BATCH = "batch"
"""Name of the kernel actor that enqueues the ops of batches, whatever their libraries."""


class Port:
    """Where ops go: a lane, and the kernel actor that enqueues into it.

    Attributes
    ----------
    lane : Lane
        The stream they are enqueued in.
    actor : ActorRef
        The kernel actor.
    """

    __slots__ = ("actor", "lane")

    def __init__(self, lane: Lane, actor: ActorRef[Run, None]) -> None:
        self.lane = lane
        self.actor = actor


class Launch:
    """One op, ready to be enqueued.

    Attributes
    ----------
    op, kernel
        What to do, and how.
    inputs, outputs : sequence of int
        Addresses.
    seq : int
        Its number on the lane's clock.
    dependencies : list
        What must be over on other lanes before it starts.
    action : Injection or AccelError or None
        What a fault plan does to it.
    index : int
        Its place in the submission.
    beside : bool or None
        Whether it is enqueued on another thread, because that may block; ``None`` until the backend was asked.
    """

    __slots__ = ("action", "beside", "dependencies", "index", "inputs", "kernel", "op", "outputs", "seq")

    def __init__(
        self,
        op: KernelOp,
        kernel: Kernel,
        inputs: Sequence[int],
        outputs: Sequence[int],
        seq: int,
        dependencies: list[Dependency],
        action: Injection | AccelError | None,
        index: int,
    ) -> None:
        self.op = op
        self.kernel = kernel
        self.inputs = inputs
        self.outputs = outputs
        self.seq = seq
        self.dependencies = dependencies
        self.action = action
        self.index = index
        self.beside: bool | None = None


class Run:
    """Consecutive launches of one submission into one lane, and the mark that ends them.

    Attributes
    ----------
    submission, launches
        What goes there.
    lane, actor
        Where, and by whom.
    is_last : bool
        Whether the submission ends with it.
    """

    __slots__ = ("actor", "is_last", "lane", "launches", "submission")

    def __init__(self, submission: Submission, port: Port, launches: list[Launch], *, is_last: bool) -> None:
        self.submission = submission
        self.lane = port.lane
        self.actor = port.actor
        self.launches = launches
        self.is_last = is_last
