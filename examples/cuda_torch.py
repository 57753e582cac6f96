"""torch and accel on one GPU, without copies: a model of torch's makes features, accel multiplies them, torch takes the result.

Run: ``pip install '.[cuda]' torch``, in a checkout, then ``python examples/cuda_torch.py``. Where something is missing it says what, and ends with status 1.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from typing import Any

import accel

BATCH, INPUTS, FEATURES, CLASSES = 256, 64, 128, 10


async def main() -> int:
    """Classify random inputs, and check the classes against torch's own; return the exit status."""
    if importlib.util.find_spec("torch") is None:
        print("This example needs torch: pip install torch", file=sys.stderr)
        return 1
    async with accel.System() as system:
        try:
            device = await system.open_device("cuda", libraries=("blas",))
        except accel.BackendUnavailableError as error:
            print(f"This example needs an NVIDIA GPU: {error}", file=sys.stderr)
            return 1
        torch: Any = importlib.import_module("torch")
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(INPUTS, FEATURES), torch.nn.ReLU()).to("cuda")
        head = torch.randn(FEATURES, CLASSES, device="cuda")
        inputs = torch.randn(BATCH, INPUTS, device="cuda")
        with torch.no_grad():
            # torch has only enqueued its kernels when this returns; accel's ops come after them on the device, and nobody waits.
            features = model(inputs)
        weights = await device.wrap(head)
        scores = await device.blas.gemm(await device.wrap(features), weights)
        # torch reads the buffer of accel's; it is kept as long as the tensor.
        classes = torch.from_dlpack(scores).argmax(dim=1)
        expected = (features @ head).argmax(dim=1)
        print(f"{BATCH} inputs, {int((classes == expected).sum())} classes as torch has them, on {device.name}")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
