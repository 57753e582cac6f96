"""Faults on purpose: which op of a device shall fail, and how."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Self

from accel.backend import Injection
from accel.errors import AccelError, InvalidArgumentError, OutOfMemoryError
from accel.ops import Checksum, Free, KernelOp
from accel.values import check_count

__all__ = ["FaultPlan"]

_REMEDY = "A fault plan asked for it: see that what was tested copes with it."


@dataclass(slots=True)
class _Planned:
    n: int
    op: str | None
    action: Injection | AccelError
    is_fired: bool = False


class FaultPlan:
    """A plan of faults for one device: ``await system.open_device("cpu", faults=FaultPlan().poison_at(3))``.

    ``n`` counts the device's ops from 1 in the order in which they are dispatched, over all rebuilds; puts and gets count, frees and checksums do not.
    With ``op="gemm"`` only ops of that kind are counted; it may be the kind of an op class of your own, which is defined before the plan is made. Each
    entry fires once. Methods return the plan, so that they chain.
    """

    def __init__(self) -> None:
        self._planned: list[_Planned] = []
        self._counts: dict[str | None, int] = {}
        self._released = threading.Event()

    def __repr__(self) -> str:
        left = sum(not planned.is_fired for planned in self._planned)
        return f"<FaultPlan {left} of {len(self._planned)} to come, {self.count} ops counted>"

    @property
    def count(self) -> int:
        """Ops counted so far."""
        return self._counts.get(None, 0)

    @property
    def fired(self) -> int:
        """Entries that have fired."""
        return sum(planned.is_fired for planned in self._planned)

    def fail_at(self, n: int, error: AccelError, *, op: str | None = None) -> Self:
        """Let op ``n`` fail with ``error`` when it is launched; the error's scope decides what else happens."""
        if not isinstance(error, AccelError):
            raise InvalidArgumentError(f"{error!r} is not an AccelError", remedy="Use one, such as accel.LibraryError('...').")
        return self._plan(n, op, error)

    def poison_at(self, n: int, error: AccelError | None = None, *, op: str | None = None) -> Self:
        """Let the context fault at op ``n``, on the device: every op in flight ends with :class:`~accel.ContextPoisonedError`."""
        return self._plan(n, op, Injection("poison", error))

    def hang_at(self, n: int, *, op: str | None = None) -> Self:
        """Let the stream stop before op ``n`` until :meth:`release`."""
        return self._plan(n, op, Injection("hang", release=self._wait_released))

    def out_of_memory_at(self, n: int, *, op: str | None = None) -> Self:
        """Let op ``n`` find no memory."""
        return self._plan(n, op, OutOfMemoryError("out of memory, as the fault plan asks", remedy=_REMEDY))

    def kill_host_at(self, n: int, *, op: str | None = None) -> Self:
        """Let the process that holds the context be killed at op ``n``.

        With an inline host, whose process is this one, the op fails instead, with :class:`~accel.UnsupportedError`.
        """
        return self._plan(n, op, Injection("kill"))

    def release(self) -> None:
        """End all hangs, those to come too. Callable from any thread."""
        self._released.set()

    def take(self, kind: str) -> Injection | AccelError | None:
        """Count an op of this kind, and return what shall happen to it; called by the device."""
        if kind == Checksum.kind:
            return None
        total = self._counts[None] = self._counts.get(None, 0) + 1
        own = self._counts[kind] = self._counts.get(kind, 0) + 1
        for planned in self._planned:
            if not planned.is_fired and (planned.n == total if planned.op is None else planned.op == kind and planned.n == own):
                planned.is_fired = True
                return planned.action
        return None

    def _wait_released(self) -> None:
        self._released.wait()

    def _plan(self, n: int, op: str | None, action: Injection | AccelError) -> Self:
        check_count("n", n, remedy="Ops are counted from 1.")
        kinds = _kinds()
        if op is not None and (not isinstance(op, str) or op not in kinds):
            raise InvalidArgumentError(
                f"op is {op!r}, and no op that is counted is called that",
                remedy=f"Use one of {', '.join(sorted(kinds))}; or import the module that defines yours before.",
            )
        self._planned.append(_Planned(n, op, action))
        return self


def _kinds() -> set[str]:
    """Return the kinds of all op classes that there are now, those of users included, but of what is not counted."""
    found: set[str] = set()
    classes: list[type] = [KernelOp]
    while classes:
        each = classes.pop()
        classes += each.__subclasses__()
        kind = getattr(each, "kind", None)
        if isinstance(kind, str) and not each.__name__.startswith("_"):
            found.add(kind)
    return found - {Checksum.kind, Free.kind}
