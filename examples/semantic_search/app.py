"""Search the documentation of numpy, scipy and scikit-learn by what a function does.

To run it, in a checkout: ``nox -s search``; or, in an environment with ``'.[web]'`` and the dependency group ``search``,
``python -m examples.semantic_search.app``. PORT=8000, ACCEL_DEVICE=cpu and ACCEL_STANDBY=none, unless set. ``--model FOLDER`` takes a
``transformers`` model of yours as the encoder. It answers searches while it still encodes the documents.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Query
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field

import accel
from accel.integrations.fastapi import DeviceDependency, get_state, install, lifespan
from examples.semantic_search.corpus import Document, versions
from examples.semantic_search.service import FOLDER, Search, open_search

PAGE = Path(__file__).with_name("page.html")


class NewDocument(BaseModel):
    """A document to insert."""

    name: str = Field(min_length=1, max_length=200)
    signature: str = Field("", max_length=2000)
    summary: str = Field(min_length=1, max_length=2000)
    body: str = Field("", max_length=100_000)


DEVICE: dict[str, Any] = {
    "device": os.environ.get("ACCEL_DEVICE", "cpu"),
    "host": "process",
    "standby": os.environ.get("ACCEL_STANDBY", "none"),
}

app = FastAPI(title="Semantic search", lifespan=lifespan(open_search, **DEVICE))
install(app, body_limit=1 << 20, body_timeout=30)
Served = Annotated[Search, Depends(get_state)]


@app.get("/", include_in_schema=False)
async def page() -> FileResponse:
    """Give the page."""
    return FileResponse(PAGE)


@app.get("/progress")
async def progress(search: Served) -> dict[str, Any]:
    """Tell how many documents are encoded, of how many."""
    return {"phase": search.phase, "done": search.index.count, "total": search.total, "versions": versions()}


@app.get("/search")
async def find(
    search: Served, q: Annotated[str, Query(min_length=1, max_length=1000)], k: Annotated[int, Query(ge=1, le=50)] = 10
) -> dict[str, Any]:
    """Find the documents that do what is asked for."""
    started = time.perf_counter()
    found = await search.find(q, k)
    return {
        "milliseconds": round(1000 * (time.perf_counter() - started), 2),
        "results": [
            {"name": document.name, "module": document.module, "signature": document.signature, "summary": document.summary, "score": score}
            for document, score in found
        ],
    }


@app.post("/documents", status_code=201)
async def insert(document: NewDocument, search: Served) -> dict[str, int]:
    """Insert a document; the next search finds it."""
    if search.phase != "ready":
        raise HTTPException(503, "the corpus is still being encoded", {"retry-after": "5"})
    return {"row": await search.insert(Document(**document.model_dump()))}


@app.get("/state")
async def state(device: DeviceDependency, search: Served) -> dict[str, Any]:
    """Tell how the device is."""
    info, statistics = device.info(), search.encoder.statistics()
    return {
        "device": info.name,
        "state": info.state.value,
        "generation": info.generation,
        "process": info.pid,
        "durable_bytes": info.memory.durable,
        "documents": search.index.count,
        "poisoned": statistics.poisoned,
        "isolated": statistics.isolated,
        "refused": statistics.refused,
    }


@app.post("/poison")
async def poison(search: Served, device: DeviceDependency) -> dict[str, Any]:
    """Send a request that kills the process in which the device's context is, and tell what became of it."""
    before, started = device.generation, time.perf_counter()
    try:
        await search.send_poison()
    except (accel.PoisonedInputError, accel.LibraryError) as error:
        outcome = {"error": type(error).__name__, "message": str(error), "cause": type(error.__cause__).__name__}
    else:
        raise HTTPException(500, "the poison was answered")
    return {"generation_before": before, "generation": device.generation, "seconds": round(time.perf_counter() - started, 3), **outcome}


@app.post("/kill")
async def kill(device: DeviceDependency) -> dict[str, int]:
    """Kill the process in which the device's context is, as an operator or the system would."""
    process = device.info().pid
    if process is None:
        raise HTTPException(503, "the device has no process now", {"retry-after": "1"})
    os.kill(process, signal.SIGKILL)
    return {"process": process}


def main() -> None:
    """Serve until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="of a transformers model, instead of the committed encoder")
    given = parser.parse_args()
    if given.model is not None:
        os.environ[FOLDER] = str(given.model.resolve())
    text = os.environ.get("PORT") or "8000"
    if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
        sys.exit(f"PORT is {text!r}: give a whole number from 0 to 65535")
    # On SIGTERM uvicorn answers what is in flight, closes the lifespan, and then raises the signal once more: that is the end, and a good one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    uvicorn.run(app, host="127.0.0.1", port=int(text), timeout_graceful_shutdown=10)


if __name__ == "__main__":
    main()
