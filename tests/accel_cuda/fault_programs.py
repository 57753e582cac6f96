"""Every fault that a CUDA kernel can bring about, survived, each in a process of its own.

``python -m tests.accel_cuda.fault_programs KIND HOST STANDBY [torch]`` runs one.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from tests.accel_cuda.cuda_programs import failure
from tests.accel_cuda.standby_programs import computes, spare_ready

if TYPE_CHECKING:
    from tests.accel_cuda.standby_programs import Host, Standby

__all__ = ["FAULTS", "SOURCE", "Torch", "survives", "told"]

FAULTS: dict[str, tuple[int, ...]] = {
    "illegal_address": (700,),
    "misaligned": (716,),
    "trap": (719,),
    "assertion": (710,),
    "bad_program_counter": (715, 718),
    "shared_out_of_range": (715,),
}
"""Kernel -> the driver's codes. Where the program counter goes astray, hardware and driver decide which of two it is."""

SOURCE = """
extern "C" __global__ void illegal_address(float* x) { *(volatile int*)0x10 = 1; }
extern "C" __global__ void misaligned(float* x) { *(volatile int*)((char*)x + 1) = 1; }
extern "C" __global__ void trap(float* x) { asm volatile("trap;"); }
extern "C" __global__ void assertion(float* x) { __assertfail("it", "file", 1, "function", 1); }
extern "C" __global__ void bad_program_counter(float* x) { void (*f)() = (void (*)())0x123450; f(); }
extern "C" __global__ void shared_out_of_range(float* x) { extern __shared__ int s[]; ((volatile int*)s)[1 << 22] = 3; }
"""


class Torch:
    """torch in the same process, with work whose result is known."""

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._x = self._torch.randn(512, 512, device="cuda")
        self._y = self._x @ self._x
        self._torch.cuda.synchronize()

    def check(self, *, is_alive: bool) -> None:
        """Assert that torch computes as before, or that its CUDA has ended."""
        ended = ""
        try:
            self._torch.cuda.synchronize()
        except Exception as error:  # torch raises what it likes
            ended = type(error).__name__
        print(f"torch: {ended or 'goes on'}")
        assert is_alive != bool(ended), f"it should {'go on' if is_alive else 'have ended'}"
        assert ended or self._torch.equal(self._x @ self._x, self._y), "torch gives another result"


def told(error: accel.ContextPoisonedError, kind: str) -> None:
    """Assert that an error is the fault's."""
    assert error.code in FAULTS[kind], error
    assert (error.scope, error.retryable) == (accel.FaultScope.PROCESS, True), error


class Run:
    """One device with kernels that fault.

    Parameters
    ----------
    device
        The device.
    torch
        Beside it, or ``None``.
    """

    def __init__(self, device: accel.Device, torch: Torch | None) -> None:
        self.device, self.torch = device, torch
        self.seed = int(np.random.SeedSequence().generate_state(1)[0])
        self.array = np.random.default_rng(self.seed).standard_normal(100_003)
        self.kept: accel.AccelRef

    async def begin(self) -> None:
        """Put what is to outlive all faults."""
        self.kept = await self.device.put(self.array, durable=True)
        if self.torch is not None:
            self.torch.check(is_alive=True)

    async def through(self, kind: str) -> tuple[float, float]:
        """Fault once; see that everybody is told and that all is well again. Return the seconds until it was told, and from there to a good product."""
        device, before = self.device, self.device.info()
        kernel = await device.compiler.compile(SOURCE, kind, parameters=("float32*",))
        ordinary, x = await device.put(self.array), await device.put(np.zeros(4, np.float32))
        await computes(device)
        began = time.perf_counter()
        told(await failure(kernel.launch(1, 1, (x,)), accel.ContextPoisonedError), kind)
        surfaced = time.perf_counter() - began
        stale = await failure(device.get(ordinary), accel.StaleRefError)
        assert stale.reason == "generation", stale
        assert not self.kept.is_stale
        took = await computes(device)
        info = device.info()
        assert (info.host, info.generation, info.restarts) == ("process", before.generation + 1, before.restarts + 1), info
        assert np.array_equal(await device.get(self.kept), self.array), f"seed {self.seed}: durable data has changed"
        if self.torch is not None:
            self.torch.check(is_alive=before.host == "process")
        return surfaced, took


def survives(kind: str, host: Host, standby: Standby, companion: str = "") -> None:
    """A kernel of the user's faults, or one of each kind after the other (``"every"``); with a spare child, the same one again.

    Who else is in the process comes through it only if the context was in a child.
    """
    torch = Torch() if companion == "torch" and importlib.util.find_spec("torch") else None

    async def main() -> None:
        async with accel.System() as system:
            restart = accel.RestartStrategy(max_restarts=10, backoff=(0.0, 0.1))
            device = await system.open_device("cuda", host=host, standby=standby, libraries=("blas",), restart=restart)
            assert device.info().host == ("inline" if host == "auto" else "process")
            run = Run(device, torch)
            await run.begin()
            for each in FAULTS if kind == "every" else [kind] * (1 if standby == "none" else 2):
                if standby != "none":
                    await spare_ready(device)
                surfaced, took = await run.through(each)
                print(f"SURVIVED {each} {host} {standby}: told after {surfaced * 1e3:.0f} ms, good gemm {took * 1e3:.1f} ms later")

    asyncio.run(main())
    if torch is not None and host == "auto":
        sys.stdout.flush()
        os._exit(0)  # torch would wait for its dead context


if __name__ == "__main__":
    survives(*sys.argv[1:])  # type: ignore[arg-type]
