"""What a kernel actor is sent: ops of one submission that go into one lane, bound to addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.actors import ActorRef
    from accel.backend import Injection, Kernel
    from accel.device.lane import Lane
    from accel.device.submission import Submission
    from accel.errors import AccelError
    from accel.memory.usage import Dependency
    from accel.ops import KernelOp

__all__ = ["Launch", "Port", "Run"]


class Port:
    """Where the ops of one library go.

    Attributes
    ----------
    lane : Lane
        The stream they are enqueued in.
    kernels : mapping
        Op kind -> kernel.
    actor : ActorRef
        The kernel actor.
    """

    __slots__ = ("actor", "kernels", "lane")

    def __init__(self, lane: Lane, kernels: Mapping[str, Kernel], actor: ActorRef[Run, None]) -> None:
        self.lane = lane
        self.kernels = kernels
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
    """

    __slots__ = ("action", "dependencies", "index", "inputs", "kernel", "op", "outputs", "seq")

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


class Run:
    """Consecutive launches of one submission into one lane.

    Attributes
    ----------
    submission, port, launches
        What goes where.
    lane : Lane
        The port's.
    retires : int
        How many ops are over once this run's mark is passed; 0 where a later run's mark stands for this one too.
    is_last : bool
        Whether the submission ends with it.
    join : tuple of (Lane, int)
        Points of other lanes that the mark must wait for, because it stands for them too.
    after : (Lane, int) or None
        Where the run before it in the same batch ends. The host launches a batch in its order; the device need not run it so.
    """

    __slots__ = ("after", "is_last", "join", "lane", "launches", "port", "retires", "submission")

    def __init__(self, submission: Submission, port: Port, launches: list[Launch]) -> None:
        self.submission = submission
        self.port = port
        self.lane = port.lane
        self.launches = launches
        self.retires = 0
        self.is_last = False
        self.join: tuple[tuple[Lane, int], ...] = ()
        self.after: tuple[Lane, int] | None = None
