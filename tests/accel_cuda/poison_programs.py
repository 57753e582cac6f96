"""The library of :mod:`tests.poison_support` in CUDA, whose kernel strays where an element is poison, and a program that serves it from this process."""

from __future__ import annotations

import asyncio
import importlib
import sys
from typing import Any

import numpy as np

import accel
from accel.patterns import DynamicBatcher
from tests.poison_support import POISON, Double, Service

__all__ = ["Stray", "find_poison"]

SOURCE = """
extern "C" __global__ void stray(double *out, const double *x, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2.0 * (x[i] == -1.0 ? x[1ll << 45] : x[i]);
}
"""
BLOCK = 256
PATIENCE = 50.0


class Stray(accel.KernelLibrary):
    """Doubles, and reads out of range where an element is poison."""

    name = "fragile"

    def open(self, stream: Any) -> None:
        self._core: Any = importlib.import_module("cuda.core")
        device = self._device()
        self._kernel = (
            self._core.Program(SOURCE, "c++", self._core.ProgramOptions(arch=f"sm_{device.arch}")).compile("cubin").get_kernel("stray")
        )

    def _device(self) -> Any:
        device = self._core.Device(self.description.index)
        device.set_current()
        return device

    @accel.kernel(Double)
    def double(self, op: Double, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        self._device()
        x, out = inputs[0], outputs[0]
        config = self._core.LaunchConfig(grid=-(-x.size // BLOCK), block=BLOCK)
        self._core.launch(stream, config, self._kernel, out.address, x.address, np.int64(x.size))


async def find_poison(host: Any) -> None:
    """Serve 64 items of which one is poison, and further ones while it is searched."""
    items = [float(n) for n in range(1, 65)]
    items[37] = POISON
    async with accel.System() as system:
        device = await system.open_device("cuda", host=host, restart=accel.RestartStrategy(max_restarts=1))
        await device.register(Stray)
        service = Service(device)
        async with (
            DynamicBatcher(service.handler, idempotent=True, device=device, quarantine=service.quarantine) as batcher,
            asyncio.timeout(PATIENCE),
        ):
            began = asyncio.get_running_loop().time()
            found = asyncio.gather(*(batcher.submit(item) for item in items), return_exceptions=True)
            while not service.tried:
                await asyncio.sleep(0)
            others, last = 0, began
            while not found.done():
                assert await batcher.submit(0.5) == 1.0
                others += 1
            last = asyncio.get_running_loop().time()
            results = await found
        for item, result in zip(items, results, strict=True):
            if item == POISON:
                assert isinstance(result, accel.PoisonedInputError), result
                assert (result.item, result.code) == (POISON, 700)
            else:
                assert result == 2 * item
        assert others > 0
        assert service.starts <= 3
        assert (device.generation, device.info().restarts, device.state) == (2, 1, accel.DeviceState.READY)
        print(
            f"host={host}: found in {last - began:.2f} s with {service.starts} contexts, {len(service.tried)} trials, {others} others served meanwhile"
        )


if __name__ == "__main__":
    # Not this module's own: what is in __main__ is not found in a child.
    asyncio.run(importlib.import_module("tests.accel_cuda.poison_programs").find_poison(sys.argv[1]))
