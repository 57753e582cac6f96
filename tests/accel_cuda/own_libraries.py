"""Kernel libraries as users write them, by three ways to the GPU: for the tests of libraries, and for programs in processes of their own."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import accel
from accel.ops import Plan, Spec

__all__ = ["LIBRARIES", "Break", "ByCupy", "ByNvrtc", "ByTorch", "Scale", "Stray"]

SOURCE = """
extern "C" __global__ void scale(float *out, const float *x, long long n, float factor, long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = factor * x[i];
}
extern "C" __global__ void stray(float *out) { out[1ll << 45] = 1.0f; }
"""
BLOCK = 256


@dataclass(frozen=True, eq=False, slots=True)
class Scale(accel.KernelOp):
    """``factor * x`` of float32, after so many clock cycles of nothing."""

    library: ClassVar[str] = "own"
    kind: ClassVar[str] = "scale"

    x: accel.AccelRef
    factor: float = 2.0
    cycles: int = 0
    out: accel.AccelRef | None = None

    def plan(self) -> Plan:
        if self.out is None:
            return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))
        return Plan((self.x,), (self.out,), ())


@dataclass(frozen=True, eq=False, slots=True)
class Break(Scale):
    """Raises after it has enqueued something."""

    kind: ClassVar[str] = "break"


@dataclass(frozen=True, eq=False, slots=True)
class Stray(Scale):
    """Writes to an illegal address."""

    kind: ClassVar[str] = "stray"


class Own(accel.KernelLibrary):
    """What the three have in common."""

    name = "own"

    def enqueue(self, op: Scale, stream: Any, x: accel.Operand, out: accel.Operand) -> None:
        raise NotImplementedError

    @accel.kernel(Scale)
    def scale(self, op: Scale, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        self.enqueue(op, stream, inputs[0], outputs[0])

    @accel.kernel(Break)
    def break_it(self, op: Break, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        self.enqueue(op, stream, inputs[0], outputs[0])
        raise ValueError("broken on purpose")


class ByNvrtc(Own):
    """cuda-core: compiled in ``open``, launched with accel's stream as it is."""

    capturable = True

    def open(self, stream: Any) -> None:
        self._core: Any = importlib.import_module("cuda.core")
        device = self._device()
        module = self._core.Program(SOURCE, "c++", self._core.ProgramOptions(arch=f"sm_{device.arch}")).compile("cubin")
        self._scale, self._stray = module.get_kernel("scale"), module.get_kernel("stray")

    def _device(self) -> Any:
        device = self._core.Device(self.description.index)
        device.set_current()
        return device

    def enqueue(self, op: Scale, stream: Any, x: accel.Operand, out: accel.Operand) -> None:
        self._device()
        config = self._core.LaunchConfig(grid=-(-x.size // BLOCK), block=BLOCK)
        arguments = (out.address, x.address, np.int64(x.size), np.float32(op.factor), np.int64(op.cycles))
        self._core.launch(stream, config, self._scale, *arguments)

    @accel.kernel(Stray)
    def stray(self, op: Stray, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        self._device()
        self._core.launch(stream, self._core.LaunchConfig(grid=1, block=1), self._stray, outputs[0].address)


class ByCupy(Own):
    """CuPy: arrays by the CUDA array interface, its stream around accel's."""

    capturable = True  # its kernel works in the two arrays alone

    def open(self, stream: Any) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self._kernel = self._cupy.RawKernel(SOURCE, "scale")

    def enqueue(self, op: Scale, stream: Any, x: accel.Operand, out: accel.Operand) -> None:
        cupy, index = self._cupy, self.description.index
        with cupy.cuda.Device(index), cupy.cuda.ExternalStream(stream.handle, index):
            arguments = (cupy.asarray(out), cupy.asarray(x), np.int64(x.size), np.float32(op.factor), np.int64(op.cycles))
            self._kernel((-(-x.size // BLOCK),), (BLOCK,), arguments)


class ByTorch(Own):
    """torch: tensors by DLPack, a factor that is kept on the device as weights are."""

    capturable = True  # torch.mul(out=) makes no tensor

    def open(self, stream: Any) -> None:
        self._torch: Any = importlib.import_module("torch")
        with self._working_in(stream):
            self._one = self._torch.ones((), device=f"cuda:{self.description.index}")
            self._torch.cuda.current_stream().synchronize()

    def _working_in(self, stream: Any) -> Any:
        return self._torch.cuda.stream(self._torch.cuda.ExternalStream(stream.handle, device=self.description.index))

    def enqueue(self, op: Scale, stream: Any, x: accel.Operand, out: accel.Operand) -> None:
        torch = self._torch
        with self._working_in(stream), torch.inference_mode():
            if op.cycles:
                torch.cuda._sleep(op.cycles)
            source, target = torch.from_dlpack(x), torch.from_dlpack(out)
            # Outputs only, without anything in between, so that it may be captured.
            torch.mul(source, op.factor, out=target)
            target.mul_(self._one)


LIBRARIES: dict[str, type[Own]] = {"cuda.core": ByNvrtc, "cupy": ByCupy, "torch": ByTorch}
"""What has to be installed -> the library."""
