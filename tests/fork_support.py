"""What the tests of forkservers import and run, and a parent to be killed: ``python -m tests.fork_support TARGET``."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import accel
from accel.ops import Plan, Spec

if TYPE_CHECKING:
    from collections.abc import Iterable

IMPORTED_BY = os.getpid()


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in descriptors:
        os.close(fd)


def prepare(data: bytes) -> str:
    """Import a module, or run a piece of program."""
    text = data.decode()
    if text.replace(".", "_").isidentifier():
        importlib.import_module(text)
    else:
        exec(text, {})
    return ""


@dataclass(frozen=True, eq=False, slots=True)
class Double(accel.KernelOp):
    """``2 * x``."""

    library: ClassVar[str] = "quiet"
    kind: ClassVar[str] = "double"

    x: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Quiet(accel.KernelLibrary):
    """Doubles, and says in which process what it needs was imported."""

    name = "quiet"

    @classmethod
    def preload(cls, *args: Any, **kwargs: Any) -> None:
        importlib.import_module("tests.own_library_support")

    @accel.kernel(Double)
    def double(self, op: Double, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        import numpy as np

        source, target = np.asarray(inputs[0]), np.asarray(outputs[0])
        stream.submit(lambda: np.multiply(source, 2.0, out=target), 1e-6)


@dataclass(frozen=True, eq=False, slots=True)
class Negate(Double):
    """``-x``."""

    library: ClassVar[str] = "threaded"
    kind: ClassVar[str] = "negate"


class Threaded(accel.KernelLibrary):
    """Needs a module that starts a thread."""

    name = "threaded"

    @classmethod
    def preload(cls, *args: Any, **kwargs: Any) -> None:
        importlib.import_module("tests.fork_thread")

    @accel.kernel(Negate)
    def negate(self, op: Negate, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        raise NotImplementedError


class Importing:
    """A model whose module is imported when it is built; it answers by which process."""

    def open(self, weights: Any, description: Any, stream: Any) -> None:
        from tests import late_import

        self.imported_by = late_import.IMPORTED_BY

    def run(self, inputs: Any) -> Any:
        import numpy as np

        return np.full(len(np.asarray(inputs["x"])), self.imported_by, np.int64)


async def parent(target: str) -> None:
    from accel.actors import ActorSystem
    from accel.process.forkserver_client import ForkserverClient

    async with ActorSystem() as system:
        forks = await ForkserverClient.start(system, "tests.fork_support:prepare", lambda status: None, close_all)
        await forks.prepare(b"tests.child_programs", 60.0)
        child = await forks.fork(f"tests.child_programs:{target}", uvloop=False, on_exit=lambda status: None)
        assert child is not None
        assert await asyncio.get_running_loop().sock_recv(child.sock, 100)
        print(forks.child.pid, child.pid, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(parent(sys.argv[1]))
