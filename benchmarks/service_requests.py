"""Start the aiohttp example on a device, send it digits, and check the answers: ``python benchmarks/service_requests.py [--device cuda] [--requests 500]``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
_RIGHT = 0.93
_AT_ONCE = 64


async def _port(process: asyncio.subprocess.Process) -> int:
    """Return the port that the service says it listens on."""
    assert process.stdout is not None
    said = ""
    async for line in process.stdout:
        said += line.decode()
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", line.decode()):
            return int(found[1])
    raise RuntimeError(f"the service ended before it listened:\n{said}")


async def _send(base: str, requests: int) -> dict[str, Any]:
    """Send the requests, and return what came back."""
    times: list[float] = []
    async with aiohttp.ClientSession(base) as session:

        async def get(path: str, **options: Any) -> Any:
            async with session.request("POST" if options else "GET", path, **options) as answer:
                answer.raise_for_status()
                return await answer.json()

        async def classify(image: dict[str, Any]) -> bool:
            async with room:
                began = time.perf_counter()
                found = await get("/digits", json={"pixels": image["pixels"]})
                times.append(time.perf_counter() - began)
            return bool(found["digit"] == image["label"])

        room = asyncio.Semaphore(_AT_ONCE)
        images = [await get(f"/samples/{number}") for number in range(min(requests, 100))]
        began = time.perf_counter()
        right = sum(await asyncio.gather(*(classify(images[number % len(images)]) for number in range(requests))))
        seconds = time.perf_counter() - began
        ready = await get("/readyz")
    return {
        "requests": requests,
        "right": right,
        "p50_ms": round(statistics.median(times) * 1e3, 3),
        "requests_per_s": round(requests / seconds),
        "ready": ready,
    }


async def _serve(device: str, requests: int) -> dict[str, Any]:
    environment = os.environ | {"PORT": "0", "ACCEL_DEVICE": device, "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "examples/aiohttp_digits.py", cwd=ROOT, env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        found = await _send(f"http://127.0.0.1:{await _port(process)}", requests)
        process.terminate()
        await process.communicate()
        return {"device": device, **found, "exit": process.returncode}
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def main() -> int:
    """Run it; print what was found as JSON, and return 0 if the answers are right and the service ended well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto", help="what the service opens (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=500, help="how many (default: %(default)s)")
    options = parser.parse_args()
    found = asyncio.run(_serve(options.device, options.requests))
    print(json.dumps(found))
    return 0 if found["exit"] == 0 and found["right"] >= _RIGHT * found["requests"] else 1


if __name__ == "__main__":
    sys.exit(main())
