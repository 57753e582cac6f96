"""One model over two ranks: each has half of the hidden units, and a rank that is killed fails no request.

Run: ``pip install '.[torch]'``, in a checkout, then ``python examples/tensor_parallel.py``, or ``python examples/tensor_parallel.py cuda`` with two GPUs.
"""

import asyncio
import os
import signal
import sys

import numpy as np
import torch

import accel


class Layers(torch.nn.Module):
    """Two layers, or one rank's part of them: the ranks' scores add up to those of the whole."""

    def __init__(self, hidden: int, group: accel.models.ModelGroup | None = None) -> None:
        super().__init__()
        self.group, self.up, self.down = group, torch.nn.Linear(64, hidden), torch.nn.Linear(hidden, 10, bias=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.down(torch.relu(self.up(image)))
        return scores if self.group is None else self.group.all_reduce(scores)


def build(group: accel.models.ModelGroup) -> Layers:
    """Return a rank's part of the model."""
    return Layers(512 // group.size, group)


async def main(spec: str = "cpu") -> None:
    """Serve the model, and kill a rank."""
    whole, images, inputs = Layers(512), np.random.default_rng().random((32, 64)), {"image": accel.TensorSpec(("batch", 64), "float32")}
    async with accel.System() as system:
        world = await system.open_world(spec, ranks=2, standby="model")
        split = {"up.*": 0, "down.weight": 1}  # each rank gets its part along these dimensions
        model = await world.load_model("tensor_parallel:build", weights=whole.state_dict(), split=split, inputs=inputs)
        async with accel.serve(model) as service:
            answers = [await service.submit(image) for image in images]
            os.kill(world.devices[1].info().pid or 0, signal.SIGKILL)
            again = [await service.submit(image) for image in images]
            same, failed = np.allclose(answers, whole(torch.from_numpy(images).float()).detach(), atol=1e-4), service.statistics().failed
            print(f"as the whole model: {same}; same bits in epoch {world.epoch}: {np.array_equal(answers, again)}; {failed} failed")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
