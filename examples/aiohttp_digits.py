"""Handwritten digits over HTTP with aiohttp: batched, supervised, alive through faults.

To run it::

    $ pip install '.[web]'                         # in a checkout
    $ python examples/aiohttp_digits.py            # PORT=8000 and ACCEL_DEVICE=auto, unless set
    $ curl -s localhost:8000/samples/7 | curl -s -H 'content-type: application/json' -d @- localhost:8000/digits
    $ FAULT_AT=100 python examples/aiohttp_digits.py   # the context faults at the 100th op that it serves; all is answered
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator

import numpy as np
from aiohttp import web

import accel
from accel.cli.digits import Digits, Model, load_digits
from accel.integrations.aiohttp import DEVICE, install, read_json
from accel.patterns import DynamicBatcher

DIGITS = web.AppKey("digits", Digits)
BATCHER = web.AppKey("batcher", DynamicBatcher)


async def open_classifier(app: web.Application) -> AsyncIterator[None]:
    """Fit the model on the device before the first request; answer what was submitted after the last one."""
    app[DIGITS] = await asyncio.to_thread(load_digits)
    model = await Model.load(app[DEVICE], app[DIGITS])
    if FAULT_AT:
        faults.poison_at(faults.count + FAULT_AT)  # counted from here: the service is ready
    # Classifying twice does no harm, so what a rebuild cuts short is tried again: idempotent.
    batcher = DynamicBatcher(model.classify, device=app[DEVICE], idempotent=True, overload="reject", max_pending=1024)
    async with batcher as app[BATCHER]:
        yield


async def classify(request: web.Request) -> web.Response:
    """Tell which digit an image shows: ``{"pixels": [64 numbers from 0 to 1]}``."""
    try:
        pixels = np.array((await read_json(request))["pixels"], np.float64)
    except (KeyError, TypeError, ValueError, OverflowError):
        pixels = np.empty(0)
    # Checked here, not in the batch, where one wrong image would be everybody's error.
    if pixels.shape != (64,) or not (pixels.min() >= 0 and pixels.max() <= 1):
        raise accel.InvalidArgumentError("pixels is a list of 64 numbers from 0 to 1", argument="pixels")
    return web.json_response({"digit": await request.app[BATCHER].submit(pixels.astype(np.float32), timeout=5.0)})


async def sample(request: web.Request) -> web.Response:
    """Give an image that the model has not seen, and what it shows."""
    digits = request.app[DIGITS]
    number = int(request.match_info["number"]) % len(digits.held_out_labels)
    return web.json_response({"pixels": digits.held_out_images[number].tolist(), "label": int(digits.held_out_labels[number])})


def setting(name: str, most: int, default: int = 0) -> int:
    """Return a whole number from the environment, or end the program with a word on what is wrong."""
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdecimal() and int(text) <= most):
        sys.exit(f"{name} is {text!r}: give a whole number from 0 to {most}")
    return int(text)


FAULT_AT = setting("FAULT_AT", 10**9)
faults = accel.testing.FaultPlan()


def make_app(device: str = "auto") -> web.Application:
    """Return the application."""
    app = web.Application()
    # The device, errors as statuses, longer bodies 413 and slower ones 408; /healthz and /readyz.
    install(app, device, body_limit=1 << 20, body_timeout=30, faults=faults)
    app.cleanup_ctx.append(open_classifier)
    app.router.add_post("/digits", classify)
    app.router.add_get(r"/samples/{number:\d{1,18}}", sample)
    return app


if __name__ == "__main__":
    device, port = os.environ.get("ACCEL_DEVICE", "auto"), setting("PORT", 65535, default=8000)
    try:
        accel.registry.find_device(device)  # here and not when the server has started, where its absence would be a traceback in the log
    except accel.AccelError as error:
        sys.exit(f"ACCEL_DEVICE: {error}")
    # handler_cancellation: a client that goes away takes its work along.
    web.run_app(make_app(device), host="127.0.0.1", port=port, handler_cancellation=True, shutdown_timeout=10)
