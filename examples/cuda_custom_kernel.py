"""A kernel of your own: CUDA C++ compiled on the device, launched like any op, alone and in a batch. ``python examples/cuda_custom_kernel.py``.

It needs an NVIDIA GPU, and ``pip install '.[cuda]'`` in a checkout. Where something is missing it says what, and ends with status 1.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

import accel

SOURCE = """
template <class T> __global__ void swish(T *out, const T *x, long long n, T beta) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] / (T(1) + exp(-beta * x[i]));
}
"""
PARAMETERS = ("float32*", "const float32*", "int64", "float32")
BLOCK = 256


async def main() -> int:
    """Run the example and return its exit status."""
    x = np.random.default_rng().standard_normal(1 << 20, dtype=np.float32)
    async with accel.System() as system:
        try:
            device = await system.open_device("cuda")
        except accel.BackendUnavailableError as error:
            print(f"This example needs an NVIDIA GPU: {error}", file=sys.stderr)
            return 1
        # The first time it is compiled; after that it comes from a cache on disk.
        swish = await device.compiler.compile(SOURCE, "swish<float>", ("--use_fast_math",), parameters=PARAMETERS)
        grid = -(-x.size // BLOCK)
        source = await device.put(x)
        out = await swish.launch(grid, BLOCK, (await device.empty(x.shape), source, x.size, 1.5))
        expected = x / (1 + np.exp(-1.5 * x.astype(np.float64)))
        print(f"one launch: largest error {np.abs(await device.get(out) - expected).max():.1e}")

        async with device.batch() as batch:
            hidden = batch.compiler.launch(swish, grid, BLOCK, (batch.empty(x.shape), source, x.size, 1.0))
            total = batch.reduce("sum", hidden)
        print(f"in a batch: sum {(await device.get(total)).item():.1f}, with numpy {(x / (1 + np.exp(-x.astype(np.float64)))).sum():.1f}")

        try:
            await device.compiler.compile("__global__ void broken(float *x) { x[0] = nothing; }", "broken")
        except accel.CompileError as error:
            print(f"what does not compile says why:\n{error.log}")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
