"""What a chaos run does, drawn from its seed: which fault comes next, on which device, after how many more answers."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["FAULTS", "Fault", "Options", "Schedule"]

FAULTS: dict[str, str] = {
    "illegal": "a kernel touches memory that is not there",
    "trap": "a kernel traps",
    "assert": "an assertion in a kernel fails",
    "poison": "a fault plan poisons the context",
    "hang": "a kernel never ends, or the call that enqueues it",
    "stuck": "native code of the child never gives the interpreter's lock back",
    "oom": "a fault plan lets an op find no memory",
    "fail": "a fault plan lets an op fail",
    "kill": "SIGKILL to the child",
    "planned_kill": "a fault plan has the child killed at an op",
    "exit": "the child ends by itself, with status 0",
    "stop": "SIGSTOP to the child",
    "cut": "the socket between the two is shut down",
    "spare": "SIGKILL or SIGSTOP to a child that does not serve: a standby, or one that is just starting",
    "rebuild": "SIGKILL to the child, and to its successor while that starts",
    "visit": "a device is opened and closed while its child is killed",
    "rank_kill": "SIGKILL to a rank of a world",
    "rank_stop": "SIGSTOP to a rank of a world",
    "rank_fault": "a fault plan poisons the context of a rank",
    "agent_kill": "SIGKILL to the agent of a node, which is started again",
    "link_cut": "the connections to a node are cut",
    "budget": "a device with a budget of two restarts is killed a third time",
}
"""Kind of fault -> what it is."""

_RARE = {"visit": 0.6, "spare": 0.6, "stop": 0.5, "stuck": 0.5, "rank_stop": 0.5, "agent_kill": 0.4, "budget": 0.0}
"""Weights of those that are not drawn as often as the others; ``budget`` comes at fixed places."""


@dataclass(frozen=True)
class Options:
    """A chaos run.

    Parameters
    ----------
    device
        ``"cpu"`` or ``"cuda"``.
    seconds
        How long faults arrive.
    seed
        Where all that is random comes from.
    clients
        How many tasks send requests.
    suspects
        How many more send items of which one is poison now and then, to a batcher that looks for it.
    models
        How many more ask a served model, whose weights are swapped meanwhile; poison is among their requests too.
    replicas
        Devices of a pool on which one more model is served, while its members are killed, stopped, drained and added; 0: none.
    ranks
        Devices of a world whose ranks sum arrays, while some are killed, stopped and poisoned; 0: none.
    node
        Whether a device of a node is asked besides, whose agent is killed and whose link is cut; on the CPU.
    hosts
        The hosts of the devices that faults are sent to, one device each.
    faults
        Kinds of faults; see :data:`FAULTS`.
    gap
        Answers between two faults, on average.
    standby, durable, hang_timeout
        As the device's options; ``durable`` puts weights that have to be there until the end. Devices that serve models have ``standby="model"`` on a GPU,
        and where this is ``"context"``.
    patience
        Seconds after which a request without an answer is a violation, and so is what the run has left behind.
    plant
        A violation made on purpose, which the run must find: ``"lost"``, ``"wrong"``, ``"twice"``, ``"child"``, ``"descriptor"``, ``"thread"``,
        ``"memory"``, ``"task"`` or empty.
    log
        File for what accel logged, or empty.
    """

    device: str = "cpu"
    seconds: float = 60.0
    seed: int = 0
    clients: int = 200
    suspects: int = 8
    models: int = 8
    replicas: int = 2
    ranks: int = 2
    node: bool = True
    hosts: tuple[str, ...] = ("process", "auto")
    faults: tuple[str, ...] = tuple(FAULTS)
    gap: int = 400
    standby: str = "none"
    durable: bool = True
    hang_timeout: float | None = None
    patience: float = 60.0
    plant: str = ""
    log: str = ""

    @property
    def silence(self) -> float:
        """Seconds after which a child that does not answer is given up: less than devices wait by themselves."""
        return 2.5 if self.device == "cpu" else 5.0


@dataclass(frozen=True)
class Fault:
    """One fault to come.

    Parameters
    ----------
    number
        Counted from 1.
    kind
        See :data:`FAULTS`.
    target
        Which of the devices that faults are sent to.
    gap
        Answers that all clients together get before it, since the fault before.
    luck
        In [0, 1): what the kind decides by.
    """

    number: int
    kind: str
    target: int
    gap: int
    luck: float


class Schedule:
    """An endless row of faults, the same for the same options.

    Parameters
    ----------
    options
        Of them the seed, the kinds, the mean gap and the number of devices count.
    """

    def __init__(self, options: Options) -> None:
        self._random = random.Random(f"{options.seed} schedule")
        self._kinds = [kind for kind in options.faults if _RARE.get(kind, 1.0) > 0]
        self._weights = [_RARE.get(kind, 1.0) for kind in self._kinds]
        self._with_budget = "budget" in options.faults
        self._targets = len(options.hosts)
        self._gap = options.gap
        self._round: list[str] = []
        self._count = 0

    def next(self) -> Fault | None:
        """Return the next fault; ``None`` if there is no kind to draw from.

        Each kind comes once before any is drawn by its weight, so that even a short run has seen as many kinds as it has faults.
        """
        draw = self._random
        self._count += 1
        kind = self._kind(draw)
        if kind is None:
            return None
        gap = max(1, round(self._gap * draw.uniform(0.1, 1.9)))
        return Fault(self._count, kind, draw.randrange(self._targets), gap, draw.random())

    def _kind(self, draw: random.Random) -> str | None:
        if self._count == 1:
            self._round = draw.sample(self._kinds, len(self._kinds))
        if self._with_budget and self._count in (2, 5, 8):
            return "budget"
        if self._round:
            return self._round.pop()
        return draw.choices(self._kinds, self._weights)[0] if self._kinds else None
