"""A kernel library around CUDA C++ of your own, compiled and launched by cuda-core in accel's stream.

For a kernel or two ``device.compiler`` is less work (``examples/cuda_custom_kernel.py``). A library of your own gives ops with names, checks and results of
their own, and may do more than one launch.

Run: ``pip install '.[cuda]'``, in a checkout, then ``python examples/cuda_nvrtc_library.py``. Where something is missing it says what, and ends with status 1.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import accel
from accel.ops import Plan, Spec

SOURCE = """
template <class T> __global__ void swish(T *out, const T *x, long long n, T beta) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] / (T(1) + exp(-beta * x[i]));
}
"""
NAMES = {accel.DType.FLOAT32: "swish<float>", accel.DType.FLOAT64: "swish<double>"}
BLOCK = 256


@dataclass(frozen=True, eq=False, slots=True)
class Swish(accel.KernelOp):
    """``x / (1 + exp(-beta * x))``, into ``out`` or a new buffer."""

    library: ClassVar[str] = "activations"
    kind: ClassVar[str] = "swish"

    x: accel.AccelRef
    beta: float = 1.0
    out: accel.AccelRef | None = None

    def plan(self) -> Plan:
        """Say what is read, and written or made; what does not fit is refused here, before anything is sent."""
        if self.x.dtype not in NAMES:
            raise accel.UnsupportedError(f"swish of {self.x.dtype.value}", remedy="Give float32 or float64.")
        if self.out is None:
            return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))
        if (self.out.shape, self.out.dtype) != (self.x.shape, self.x.dtype):
            raise accel.InvalidArgumentError(f"out is {self.out.dtype.value}{list(self.out.shape)}", remedy="Give a buffer like x.")
        return Plan((self.x,), (self.out,), ())


class Activations(accel.KernelLibrary):
    """Compiles the kernels, and launches them in the stream that it is given."""

    name = "activations"
    capturable = True  # the kernels work in inputs and outputs alone

    def open(self, stream: Any) -> None:
        """Compile for this GPU, once for each context."""
        self._core: Any = importlib.import_module("cuda.core")
        options = self._core.ProgramOptions(std="c++17", arch=f"sm_{self._device().arch}")
        module = self._core.Program(SOURCE, "c++", options).compile("cubin", name_expressions=tuple(NAMES.values()))
        self._kernels = {dtype: module.get_kernel(name) for dtype, name in NAMES.items()}

    def _device(self) -> Any:
        """Return cuda-core's name of the GPU, current on this thread: worker threads change from call to call."""
        device = self._core.Device(self.description.index)
        device.set_current()
        return device

    @accel.kernel(Swish)
    def swish(self, op: Swish, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        """Launch: accel's streams speak ``__cuda_stream__``, so cuda-core takes them as they are."""
        (x,), (out,) = inputs, outputs
        if not x.size:
            return
        self._device()
        config = self._core.LaunchConfig(grid=-(-x.size // BLOCK), block=BLOCK)
        beta = x.dtype.numpy.type(op.beta)
        self._core.launch(stream, config, self._kernels[x.dtype], out.address, x.address, np.int64(x.size), beta)


async def main() -> int:
    """Run the example and return its exit status."""
    x = np.random.default_rng().standard_normal(1 << 20)
    expected = x / (1 + np.exp(-1.5 * x))
    async with accel.System() as system:
        try:
            device = await system.open_device("cuda")
        except accel.BackendUnavailableError as error:
            print(f"This example needs an NVIDIA GPU: {error}", file=sys.stderr)
            return 1
        await device.register(Activations)
        source = await device.put(x)
        result = await device.get(await device.run(Swish(source, 1.5)))
        print(f"one op: largest error {np.abs(result - expected).max():.1e}")

        async with device.graph() as graph:
            hidden = graph.run(Swish(source, 1.5))
            total = graph.reduce("sum", hidden)
        await device.put(-x, out=source)
        await graph.replay()
        print(
            f"in a graph, of other inputs: sum {(await device.get(total)).item():.3f}, with numpy {(-x / (1 + np.exp(1.5 * x))).sum():.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
