"""Handwritten digits over HTTP with FastAPI: batched, supervised, alive through faults.

To run it::

    $ pip install '.[web]'                         # in a checkout
    $ python examples/fastapi_digits.py            # PORT=8000 and ACCEL_DEVICE=auto, unless set
    $ curl -s localhost:8000/samples/7 | curl -s -H 'content-type: application/json' -d @- localhost:8000/digits
    $ FAULT_AT=100 python examples/fastapi_digits.py   # the context faults at the 100th op that it serves; all is answered
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import uvicorn
from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel, Field

import accel
from accel.cli.digits import Digits, Model, load_digits
from accel.integrations.fastapi import cancel_on_disconnect, get_state, install, lifespan
from accel.patterns import DynamicBatcher


class Image(BaseModel):
    """8 x 8 pixels, row by row."""

    pixels: list[Annotated[float, Field(ge=0, le=1)]] = Field(min_length=64, max_length=64)


@dataclass
class Classifier:
    """What handlers work with."""

    digits: Digits
    batcher: DynamicBatcher[np.ndarray[Any, Any], int]


@contextlib.asynccontextmanager
async def open_classifier(device: accel.Device) -> AsyncIterator[Classifier]:
    """Fit the model on the device before the first request; answer what was submitted after the last one."""
    digits = await asyncio.to_thread(load_digits)
    model = await Model.load(device, digits)
    if FAULT_AT:
        faults.poison_at(faults.count + FAULT_AT)  # counted from here: the service is ready
    # Classifying twice does no harm, so what a rebuild cuts short is tried again: idempotent.
    async with DynamicBatcher(model.classify, device=device, idempotent=True, overload="reject", max_pending=1024) as batcher:
        yield Classifier(digits, batcher)


def setting(name: str, most: int, default: int = 0) -> int:
    """Return a whole number from the environment, or end the program with a word on what is wrong."""
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdecimal() and int(text) <= most):
        sys.exit(f"{name} is {text!r}: give a whole number from 0 to {most}")
    return int(text)


DEVICE = os.environ.get("ACCEL_DEVICE", "auto")
FAULT_AT = setting("FAULT_AT", 10**9)
faults = accel.testing.FaultPlan()

app = FastAPI(lifespan=lifespan(open_classifier, device=DEVICE, faults=faults))
install(app, body_limit=1 << 20, body_timeout=30)  # errors become statuses, longer bodies 413, slower ones 408; /healthz and /readyz


@app.post("/digits")
async def classify(image: Image, request: Request, classifier: Annotated[Classifier, Depends(get_state)]) -> dict[str, int]:
    """Tell which digit an image shows."""
    async with cancel_on_disconnect(request):
        return {"digit": await classifier.batcher.submit(np.array(image.pixels, np.float32), timeout=5.0)}


@app.get("/samples/{number}")
async def sample(number: int, classifier: Annotated[Classifier, Depends(get_state)]) -> dict[str, Any]:
    """Give an image that the model has not seen, and what it shows."""
    number %= len(classifier.digits.held_out_labels)
    return {"pixels": classifier.digits.held_out_images[number].tolist(), "label": int(classifier.digits.held_out_labels[number])}


if __name__ == "__main__":
    port = setting("PORT", 65535, default=8000)
    try:
        accel.registry.find_device(DEVICE)  # here and not when the server has started, where its absence would be a traceback in the log
    except accel.AccelError as error:
        sys.exit(f"ACCEL_DEVICE: {error}")
    # On SIGTERM uvicorn answers what is in flight, closes the lifespan, and then raises the signal once more: that is the end, and a good one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    uvicorn.run(app, host="127.0.0.1", port=port, timeout_graceful_shutdown=10)
