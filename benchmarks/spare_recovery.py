"""What a forkserver gives a device over children that are started: spares after faults, and children of a quarantine.

``python benchmarks/spare_recovery.py [--imports torch] [--faults 4] [--pause 0] [--ways forked,started] [--spares 2]``. Each fault is a SIGKILL of the
serving child, ``--pause`` seconds after the last one. ``started`` is the same device without its forkserver. ``stdlib`` measures what
``multiprocessing.forkserver`` takes to fork a process that has the same imports, and no more: not a context, and not what its children lack.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import accel
from accel.ops import Plan

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_PATIENCE = 120.0


@dataclass(frozen=True, eq=False, slots=True)
class Nothing(accel.KernelOp[Any]):
    """Does nothing."""

    library: ClassVar[str] = "importing"
    kind: ClassVar[str] = "nothing"

    def plan(self) -> Plan:
        """See :meth:`accel.KernelOp.plan`."""
        return Plan((), (), ())


class Importing(accel.KernelLibrary):
    """Imports a module when it is opened, as a model does."""

    name = "importing"
    eager: ClassVar[bool] = True

    def __init__(self, module: str) -> None:
        self._module = module

    @classmethod
    def preload(cls, module: str) -> None:
        """See :meth:`accel.KernelLibrary.preload`."""
        importlib.import_module(module)

    def open(self, stream: Any) -> None:
        """See :meth:`accel.KernelLibrary.open`."""
        importlib.import_module(self._module)

    @accel.kernel(Nothing)
    def nothing(self, op: Nothing, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        """Do nothing."""


async def measure(module: str | None, faults: int, pause: float, spares: int) -> None:
    """Print what one device takes."""
    restart = accel.RestartStrategy(max_restarts=10_000, backoff=(0.0, 0.0))
    began = time.perf_counter()

    def said(what: str, since: float) -> None:
        print(f"  {what:44s} {time.perf_counter() - since:7.3f} s", flush=True)

    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="model", spares=spares, libraries=("blas",), restart=restart)
        said("the device is ready", began)
        if module is not None:
            since = time.perf_counter()
            await device.register(Importing, module)
            said("a library with the imports is open", since)
        since = time.perf_counter()
        await ready_spares(device, spares)
        said(f"{spares} spares are ready", since)
        for number in range(1, faults + 1):
            await asyncio.sleep(pause if number > 1 else 0.0)
            since = time.perf_counter()
            await kill(device)
            said(f"fault {number}: the next good answer", since)
        since = time.perf_counter()
        await ready_spares(device, 1)
        said("a spare is ready again", since)
        await ready_spares(device, spares)
        said("all spares are ready again", since)
        since = time.perf_counter()
        async with device.quarantine() as other:
            said("a quarantine is open", since)
            for number in range(1, faults + 1):
                since = time.perf_counter()
                await kill(other)
                said(f"death {number} in it: the next good answer", since)


async def ready_spares(device: accel.Device, count: int) -> None:
    """Wait until the device has this number of spares ready."""
    children: Any = device._host.children
    async with asyncio.timeout(_PATIENCE):
        await asyncio.sleep(0.1)
        await children.forkserver.wait_settled(_PATIENCE)  # it imports what was registered, and forks nothing meanwhile
        while sum(each.state == "ready" for each in children.spares) < count:  # noqa: ASYNC110 - of the second one no event tells
            await asyncio.sleep(0.005)


async def kill(device: accel.Device) -> None:
    """Kill the serving child, and wait for the next good answer."""
    async with asyncio.timeout(_PATIENCE):
        pid, generation = device.info().pid, device.generation
        while pid is None:
            await asyncio.sleep(0.001)
            pid = device.info().pid
        os.kill(pid, signal.SIGKILL)
        async for newest in device.generations():
            if newest > generation:
                break
        await device.zeros(4)


def answer(connection: Connection, module: str | None) -> None:
    """Run in a process of the standard library's forkserver."""
    connection.send(module is None or module in sys.modules)


def measure_stdlib(module: str | None, faults: int) -> None:
    """Print what the standard library's forkserver takes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["accel.remote.service", "accel.cpu.backend", "benchmarks.spare_recovery", *([module] if module else [])]
    )
    for number in range(1, faults + 1):
        since = time.perf_counter()
        ours, theirs = context.Pipe()
        process = context.Process(target=answer, args=(theirs, module))
        process.start()
        has_imports = ours.recv()
        print(
            f"  process {number} answers, imports {'there' if has_imports else 'missing'} {time.perf_counter() - since:20.3f} s", flush=True
        )
        process.join()


def main() -> int:
    """Measure each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imports", help="a module that children need")
    parser.add_argument("--faults", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--spares", type=int, default=2)
    parser.add_argument("--ways", default="forked,started,stdlib")
    given = parser.parse_args()
    for way in given.ways.split(","):
        print(f"{way}, imports {given.imports or 'numpy'}")
        if way == "stdlib":
            measure_stdlib(given.imports, given.faults)
            continue
        refused = accel.BackendUnavailableError("it is not to be used")
        with (
            mock.patch("accel.process.forkserver_client.ForkserverClient.start", side_effect=refused)
            if way == "started"
            else contextlib.nullcontext()
        ):
            asyncio.run(measure(given.imports, given.faults, given.pause, given.spares))
    return 0


if __name__ == "__main__":
    # Children find the library by its module, which is another one than this program.
    from benchmarks import spare_recovery

    sys.exit(spare_recovery.main())
