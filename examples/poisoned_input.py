"""One request in a hundred kills the process that computes it; the other ninety-nine are answered, and the one is named.

Run: ``pip install .``, in a checkout, then ``python examples/poisoned_input.py``.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import accel
from accel.ops import Plan, Spec
from accel.patterns import DynamicBatcher

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@dataclass(frozen=True, eq=False, slots=True)
class LookUp(accel.KernelOp):
    """``table[index]``, by a kernel that trusts its index."""

    library: ClassVar[str] = "trusting"
    kind: ClassVar[str] = "look_up"

    table: accel.AccelRef
    index: accel.AccelRef

    def plan(self) -> Plan:
        """Say what is read and made. The values of ``index`` are on the device: nobody has looked at them."""
        return Plan((self.table, self.index), (), (Spec(self.index.shape, self.table.dtype),))


class Trusting(accel.KernelLibrary):
    """Reads wherever it is told to."""

    name = "trusting"

    def open(self, stream: Any) -> None:
        """Make nothing ready."""

    @accel.kernel(LookUp)
    def look_up(self, op: LookUp, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        """Enqueue."""
        (table, index), (out,) = inputs, map(np.asarray, outputs)

        def work() -> None:
            for place, at in enumerate(np.asarray(index)):
                out[place] = ctypes.c_double.from_address(table.address + 8 * int(at)).value

        stream.submit(work, 1e-6)


async def handler_on(device: accel.Device) -> Callable[[list[int]], Awaitable[list[float]]]:
    """Put the table on a device, and return what answers batches there."""
    table = np.linspace(0.0, 1.0, 1000)
    current = await device.put(table)

    async def handler(indices: list[int]) -> list[float]:
        nonlocal current
        if current.is_stale:
            current = await device.put(table)
        found = await device.run(LookUp(current, await device.put(np.array(indices))))
        return [float(each) for each in await device.get(found)]

    return handler


async def main() -> int:
    """Run the example and return its exit status."""
    requests = list(range(0, 1000, 10))
    requests[66] = 1 << 50
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        await device.register(Trusting)
        handler = await handler_on(device)
        async with DynamicBatcher(handler, max_items=100, idempotent=True, device=device, quarantine=handler_on) as batcher:
            answers = await asyncio.gather(*map(batcher.submit, requests), return_exceptions=True)
            statistics = batcher.statistics()
        print(sum(isinstance(each, float) for each in answers), "answered")
        for each in answers:
            if isinstance(each, accel.PoisonedInputError):
                print(f"poison: {each.item}, because of {type(each.__cause__).__name__}")
        print(f"generation {device.generation}, {statistics.isolated} isolated, {statistics.poisoned} poisoned")
    return 0


if __name__ == "__main__":
    # Not this module's own: the child that runs the library could not find it in __main__.
    sys.exit(asyncio.run(importlib.import_module("poisoned_input").main()))
