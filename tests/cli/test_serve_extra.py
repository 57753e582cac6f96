"""`accel serve` runs with what the extra `web` brings alone, and `--fault-at` counts from when it serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 20.0

WEB_ALONE = """
import sys
for name in ("rich", "sklearn", "scipy", "joblib", "matplotlib", "uvloop", "prometheus_client", "torch", "onnxruntime"):
    sys.modules[name] = None
from accel.cli import main
sys.exit(main(sys.argv[1:]))
"""


@contextlib.asynccontextmanager
async def serving(*words: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Run `accel serve` in a process that has only the extra `web`, and end it by SIGTERM, with status 0. It logs what it does not serve."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", WEB_ALONE, "serve", "--port", "0", "--device", "cpu", *words]
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    said = b""
    try:
        while (found := re.search(rb"http://[\d.]+:\d+", said)) is None:
            line = await asyncio.wait_for(process.stdout.readline(), PATIENCE)
            assert line, said.decode()
            said += line
        async with aiohttp.ClientSession(found[0].decode()) as session:
            yield session
        process.terminate()
        said += await asyncio.wait_for(process.stdout.read(), PATIENCE)
        assert await process.wait() == 0, said.decode()
        assert b"metrics_not_served" in said
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def generation(session: aiohttp.ClientSession) -> int:
    async with session.get("/readyz") as answer:
        return int((await answer.json())["generation"])


async def test_it_serves_with_the_extra_web_alone_and_faults_at_the_op_that_was_asked_for() -> None:
    async with asyncio.timeout(2 * PATIENCE), serving("--fault-at", "2") as session:
        assert await generation(session) == 1, "no op that was before it served is counted"
        async with session.post("/samples", json=7) as answer:
            sample = await answer.json()
        for _ in range(2):
            async with session.post("/digits", data=json.dumps(sample), headers={"Content-Type": "application/json"}) as answer:
                assert (answer.status, await answer.json()) == (200, {"digit": sample["label"]})
        assert await generation(session) == 2, "the first request met the fault, and was answered"
