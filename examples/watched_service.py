"""A served model with metrics and a page: kill the process that computes, and watch the service recover.

Run: ``pip install '.[web,metrics]'``, in a checkout, then ``python examples/watched_service.py``, and open http://127.0.0.1:8000/accel.
The page names the process: ``kill -9`` it. PORT=8000 and ACCEL_DEVICE=auto, unless set.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI

import accel
from accel.integrations.fastapi import add_model, install, lifespan


class Scorer:
    """A model in numpy; a torch module or an ONNX file is loaded by the same call."""

    def open(self, weights: Any, description: Any, stream: Any) -> None:
        """Keep the weights, which are on the device."""
        self.table = np.asarray(weights["table"])

    def run(self, inputs: Any) -> Any:
        """Answer a batch."""
        return {"score": np.tanh(np.asarray(inputs["x"]) @ self.table)}


async def client(service: accel.ModelService) -> None:
    """Ask for ever, so that there is something to see."""
    rng = np.random.default_rng()
    while True:
        with contextlib.suppress(accel.AccelError):
            await service.submit({"x": rng.random(256, np.float32)}, timeout=2.0)
        await asyncio.sleep(rng.exponential(0.05))


@contextlib.asynccontextmanager
async def setup(device: accel.Device) -> AsyncIterator[accel.ModelService]:
    """Load the model, serve it, and ask it until the application ends."""
    spec = {"x": accel.TensorSpec(("batch", 256), "float32")}
    weights = {"table": np.random.default_rng(0).standard_normal((256, 256), np.float32)}
    model = await device.load_model("watched_service:Scorer", weights=weights, inputs=spec, buckets={"batch": (1, 8, 64)})
    async with accel.serve(model, overload="reject") as service, asyncio.TaskGroup() as clients:
        add_model(app, "/score", service)
        asking = [clients.create_task(client(service)) for _ in range(8)]
        yield service
        for task in asking:
            task.cancel()


app = FastAPI(lifespan=lifespan(setup, device=os.environ.get("ACCEL_DEVICE", "auto"), host="process", standby="model"))
install(app, metrics="/metrics", page="/accel")

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ.get("PORT", "8000")), timeout_graceful_shutdown=10)
