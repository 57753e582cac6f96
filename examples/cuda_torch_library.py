"""A torch module as an op of a device: ``await device.run(Classify(x))``, in accel's order and streams, alone and in a batch.

Run: ``pip install '.[cuda]' torch``, in a checkout, then ``python examples/cuda_torch_library.py``. Where something is missing it says what, and ends with
status 1.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import accel
from accel.ops import Plan, Spec

INPUTS, HIDDEN, CLASSES = 64, 256, 10


@dataclass(frozen=True, eq=False, slots=True)
class Classify(accel.KernelOp):
    """Scores of the classes for each row of ``x``, a bfloat16 array of rows of 64."""

    library: ClassVar[str] = "classifier"
    kind: ClassVar[str] = "classify"

    x: accel.AccelRef

    def plan(self) -> Plan:
        """Say what is read and made; what does not fit is refused here, before anything is sent."""
        if len(self.x.shape) != 2 or self.x.shape[1] != INPUTS or self.x.dtype is not accel.DType.BFLOAT16:
            raise accel.InvalidArgumentError(f"x is {self.x.dtype.value}{list(self.x.shape)}", remedy=f"Give bfloat16 rows of {INPUTS}.")
        return Plan((self.x,), (), (Spec((self.x.shape[0], CLASSES), self.x.dtype),))


def make_module(torch: Any) -> Any:
    """Return the model, with weights that are always the same."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(INPUTS, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)).to(torch.bfloat16)


class Classifier(accel.KernelLibrary):
    """Enqueues the module into the stream that it is given."""

    name = "classifier"

    def open(self, stream: Any) -> None:
        """Import torch and load the weights, once for each context."""
        self._torch: Any = importlib.import_module("torch")
        with self._working_in(stream):
            self._module = make_module(self._torch).to(f"cuda:{self.description.index}")
            # Batches come in another stream, which knows nothing of this one.
            self._torch.cuda.current_stream().synchronize()

    def _working_in(self, stream: Any) -> Any:
        """Return a block in which torch enqueues into accel's stream."""
        torch = self._torch
        return torch.cuda.stream(torch.cuda.ExternalStream(stream.handle, device=self.description.index))

    @accel.kernel(Classify)
    def classify(self, op: Classify, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        """Enqueue the module and a copy of what it gives. What torch allocates in between, it reuses in this stream's order."""
        torch = self._torch
        with self._working_in(stream), torch.inference_mode():
            torch.from_dlpack(outputs[0]).copy_(self._module(torch.from_dlpack(inputs[0])))


async def main() -> int:
    """Run the example and return its exit status."""
    if importlib.util.find_spec("torch") is None:
        print("This example needs torch: pip install torch", file=sys.stderr)
        return 1
    rows = np.random.default_rng().standard_normal((256, INPUTS)).astype(accel.DType.BFLOAT16.numpy)
    async with accel.System() as system:
        try:
            device = await system.open_device("cuda")
        except accel.BackendUnavailableError as error:
            print(f"This example needs an NVIDIA GPU: {error}", file=sys.stderr)
            return 1
        try:
            await device.register(Classifier)
        except accel.LibraryError as error:
            print(f"This example needs a torch that can use the GPU: {error}", file=sys.stderr)
            return 1
        x = await device.put(rows)
        scores = await device.get(await device.run(Classify(x), timeout=30.0))

        async with device.batch() as batch:
            doubled = batch.elementwise.binary("add", batch.run(Classify(x)), batch.run(Classify(x)))
        same = np.array_equal(await device.get(doubled), scores + scores)

    torch: Any = importlib.import_module("torch")
    with torch.inference_mode():
        expected = make_module(torch).float()(torch.from_numpy(rows.astype(np.float32))).numpy()
    difference = np.abs(scores.astype(np.float32) - expected).max()
    print(f"{len(rows)} rows, largest difference from torch's float32 on the CPU: {difference:.1e}; a batch gives the same: {same}")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
