"""What the tests of durable buffers share: a device of each host, and what takes its context away."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.child_support import links_of
from tests.device_support import child_pid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Array = np.ndarray[Any, Any]
Way = Literal["inline", "auto", "process", "killed"]
WAYS: tuple[Way, ...] = ("inline", "auto", "process", "killed")
"""A fault of the context inline; one that moves the device to a child; one in a child; a child that is killed."""
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
HERE_AND_KILLED = pytest.mark.parametrize("way", ["inline", "killed"])
HERE_AND_THERE = pytest.mark.parametrize("way", ["inline", "process"])
"""For faults that an op of the test brings about."""

_LOST = accel.DriverError("illegal address", code=700, scope=accel.FaultScope.PROCESS)
_MANY = accel.RestartStrategy(max_restarts=100, within=1000.0, backoff=(0.0, 0.0))


class Faults:
    """What faults the context at the next op of a kind when it is told to; see ``accel.testing.FaultPlan``."""

    def __init__(self, error: accel.AccelError | None) -> None:
        self._error = error
        self.armed: str | None = None
        self._hang: FaultPlan | None = None

    def hang(self, kind: str) -> FaultPlan:
        """Let the next op of a kind hang instead, until what is returned is released."""
        self.armed, self._hang = kind, FaultPlan().hang_at(1)
        return self._hang

    def take(self, kind: str) -> Any:
        """Fault, if this is the op."""
        if self.armed != kind:
            return None
        self.armed = None
        plan, self._hang = self._hang or FaultPlan().poison_at(1, self._error), None
        return plan.take(kind)


@dataclass
class Patient:
    """A device, and the way in which it loses its contexts."""

    device: accel.Device
    way: Way
    faults: Faults

    async def fault(self) -> None:
        """Take the context away with nothing in flight, and wait for the next generation."""
        wanted = self.device.generation + 1
        if self.way == "killed":
            os.kill(child_pid(self.device), signal.SIGKILL)
        else:
            await self.poison("conv2d", conv(self.device))
        await self.until(wanted)

    async def poison(self, kind: str, work: Any) -> accel.ContextPoisonedError:
        """Let ``work``, which is an op of a kind, fault the context, and return its error; the next generation is not waited for."""
        self.faults.armed = kind
        try:
            await asyncio.wait_for(work, 30)
        except accel.ContextPoisonedError as error:
            return error
        raise AssertionError(f"{kind} did not fault")

    async def until(self, generation: int) -> None:
        """Wait for a generation."""
        async with asyncio.timeout(30):
            async for number in self.device.generations():
                if number >= generation:
                    return


async def conv(device: accel.Device) -> None:
    """Run an op that tests use for nothing else."""
    await device.dnn.conv2d(await device.zeros((1, 1, 2, 2)), await device.zeros((1, 1, 1, 1)))


@contextlib.asynccontextmanager
async def opened(way: Way, **options: Any) -> AsyncIterator[Patient]:
    """Open a device."""
    faults = Faults(_LOST if way == "auto" else None)
    async with accel.System() as system:
        host = "process" if way == "killed" else way
        device = await system.open_device("cpu", host=host, faults=faults, restart=_MANY, **options)
        yield Patient(device, way, faults)


def seeded() -> tuple[np.random.Generator, str]:
    """Return a generator, and what tests say of it when they fail."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return np.random.default_rng(seed), f"seed {seed}"


def wild_write(array: Array, new: int | None = None) -> None:
    """Change one byte of the device memory that holds ``array``, as a stray kernel would: to ``new``, or to what it is not."""
    found = 0
    for fd, link in links_of().items():
        if "memfd:accel-slab" not in link:
            continue
        with mmap.mmap(fd, 0) as memory:
            at = memory.find(array.tobytes())
            if at >= 0:
                place = at + array.nbytes // 2
                memory[place] = memory[place] ^ 0xFF if new is None else new
                found += 1
                break
    assert found, "the buffer is in no slab that this process holds"
