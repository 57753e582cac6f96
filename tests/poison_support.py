"""A library whose kernel ends its process at certain values, and a batcher that serves it: for tests of the search for poison."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from benchmarks.chaos_parts.suspects import Double

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["HANG", "KILLED", "POISON", "Double", "Fragile", "Service", "double"]

POISON = -1.0
KILLED = -1000.0
HANG = np.inf


class Fragile(accel.KernelLibrary):
    """Doubles, and crashes where an element is poison, as every negative one is; at :data:`KILLED` it ends as if something had killed it."""

    name = "fragile"

    def open(self, stream: Any) -> None:
        pass

    @accel.kernel(Double)
    def double(self, op: Double, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        source, target = np.asarray(inputs[0]), np.asarray(outputs[0])

        def work() -> None:
            # To this thread: a signal to the process may reach another one, while this one goes on to the next line.
            if (source == KILLED).any():
                signal.raise_signal(signal.SIGKILL)
            if (source < 0).any():
                signal.raise_signal(signal.SIGSEGV)
            if (source == HANG).any():
                signal.raise_signal(signal.SIGSTOP)
            np.multiply(source, 2.0, out=target)

        stream.submit(work, 1e-6)


class Service:
    """Handlers of single floats on a device, and on its quarantine; both note what they were called with."""

    def __init__(self, device: accel.Device) -> None:
        self.device = device
        self.served: list[list[float]] = []
        self.tried: list[list[float]] = []
        self.twins: list[accel.Device] = []
        self.starts = 0

    async def handler(self, items: list[float]) -> list[float | Exception]:
        self.served.append(items)
        return await double(self.device, items)

    async def quarantine(self, device: accel.Device) -> Callable[[list[float]], Awaitable[list[float | Exception]]]:
        self.starts += 1
        if device not in self.twins:
            self.twins.append(device)
        factor = await device.put(np.ones(1))  # as weights would be

        async def twin(items: list[float]) -> list[float | Exception]:
            self.tried.append(items)
            factor.check()
            return await double(device, items)

        return twin


async def double(device: accel.Device, items: list[float]) -> list[float | Exception]:
    """Return the items, doubled by one op."""
    x = await device.put(np.array(items))
    return [float(each) for each in await device.get(await device.run(Double(x)))]
