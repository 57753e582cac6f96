"""A model served by two devices to two tenants, with metrics, traces and a page: kill a process, and watch the service recover.

Run: ``pip install '.[web,metrics,otel]'``, in a checkout, then ``python examples/watched_service.py``, and open http://localhost:8000/accel.
The page names the processes: ``kill -9`` one. PORT=8000, unless set. Spans go to the provider that ``opentelemetry-instrument`` sets up.
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
from accel.integrations.otel import instrument


class Scorer:
    """A model in numpy; a torch module or an ONNX file is loaded by the same call."""

    def open(self, weights: Any, description: Any, stream: Any) -> None:
        """Keep the weights, which are in the device's durable memory."""
        self.table = np.asarray(weights["table"])

    def run(self, inputs: Any) -> Any:
        """Answer a batch."""
        return {"score": np.tanh(np.asarray(inputs["x"]) @ self.table)}


async def ask(service: accel.ModelService, tenant: str) -> None:
    """Send requests for ever, so that there is something to see."""
    while True:
        with contextlib.suppress(accel.AccelError):
            await service.submit({"x": np.ones(256, np.float32)}, tenant=tenant, timeout=2.0)
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def setup(pool: accel.Pool) -> AsyncIterator[accel.ModelService]:
    """Load the model, serve it, and have it asked until the application ends."""
    instrument(pool[0])
    weights, inputs = {"table": np.eye(256, dtype=np.float32)}, {"x": accel.TensorSpec(("batch", 256), "float32")}
    models = await pool.load_model("watched_service:Scorer", weights=weights, inputs=inputs, buckets={"batch": (1, 8, 64)})
    async with accel.serve(models, shares={"gold": 3, "free": 1}, overload="reject") as service, asyncio.TaskGroup() as group:
        add_model(app, "/score", service)
        clients = [group.create_task(ask(service, tenant)) for tenant in ("gold", "free") * 4]
        yield service
        for client in clients:
            client.cancel()


app = FastAPI(lifespan=lifespan(setup, pool="cpu", count=2, host="process", standby="model"))
install(app, metrics="/metrics", page="/accel", tenant=lambda request: "free")  # an application asks its session, or its token
if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ.get("PORT", "8000")), timeout_graceful_shutdown=10)
