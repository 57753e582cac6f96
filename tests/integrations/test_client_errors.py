"""Requests that are the client's fault: `accel serve` and the examples answer with 4xx on both frameworks, and read no more than their limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import test_utils, web

from accel.integrations import aiohttp as with_aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 20.0
JSON = {"Content-Type": "application/json"}
GOOD = json.dumps({"pixels": [0.5] * 64}).encode()
LONG = 16 << 20

PROGRAMS = {
    "serve": ["-m", "accel", "serve", "--device", "cpu", "--port", "0"],
    "aiohttp example": ["examples/aiohttp_digits.py"],
}

WRONG: dict[str, tuple[bytes, str]] = {
    "an integer of 401 digits": (GOOD.replace(b"0.5", b"1" + b"0" * 400, 1), ""),
    "an integer of 5,000 digits": (GOOD.replace(b"0.5", b"9" * 5000, 1), ""),
    "deep nesting": (b"[" * 100_000 + b"]" * 100_000, ""),
    "nesting that is parsed": (b'{"pixels": ' + b"[" * 900 + b"]" * 900 + b"}", ""),
    "bad UTF-8": (b'{"pixels": "\xff"}', ""),
    "half a surrogate pair": (b'{"pixels": ["\\ud800"]}', ""),
    "NaN": (GOOD.replace(b"0.5", b"NaN"), ""),
    "beyond a double": (GOOD.replace(b"0.5", b"1e999"), ""),
    "an unknown charset": (GOOD, "; charset=nope"),
    "a charset that is none": (GOOD, "; charset=base64"),
    "a charset beyond ASCII": (GOOD, "; charset=\xff"),
}


async def ask(port: int, path: str, body: bytes | None = None, charset: str = "", *, chunked: bool = False) -> int:
    """Send a request over a connection of its own, all of it before anything is read, and return the status."""
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json{charset}\r\n"
        head += "Transfer-Encoding: chunked\r\n" if chunked else f"Content-Length: {len(body)}\r\n"
    sent = body or b""
    if chunked:
        sent = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (sent[at : at + 65536] for at in range(0, len(sent), 65536)))
        sent += b"0\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode("latin-1") + b"\r\n" + sent)
        await writer.drain()
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


def peak_mib(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


@contextlib.asynccontextmanager
async def serving(program: str) -> AsyncIterator[tuple[int, int]]:
    """Run a service in a process of its own; give its port and its pid."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PORT": str(port), "ACCEL_DEVICE": "cpu"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *PROGRAMS[program], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    try:
        said = b""
        while (found := re.search(rb"http://127\.0\.0\.1:(\d+)", said)) is None:
            line = await asyncio.wait_for(process.stdout.readline(), PATIENCE)
            assert line, said
            said += line
        yield int(found[1]), process.pid
    finally:
        process.kill()
        await process.communicate()


@pytest.mark.parametrize("program", PROGRAMS)
async def test_what_a_client_did_wrong_is_4xx_and_the_next_request_is_served(program: str) -> None:
    async with asyncio.timeout(2 * PATIENCE), serving(program) as (port, pid):
        statuses = {name: await ask(port, "/digits", body, charset) for name, (body, charset) in WRONG.items()}
        statuses["5,000 digits in a path"] = await ask(port, "/samples/" + "9" * 5000)
        assert {name: status for name, status in statuses.items() if not 400 <= status < 500} == {}
        assert statuses["an unknown charset"] == 415

        before = peak_mib(pid)
        body = b"[" + b"0.1," * (LONG // 4) + b"1]"
        assert [await ask(port, "/digits", body, chunked=chunked) for chunked in (False, True)] == [413, 413]
        assert peak_mib(pid) - before < 2 * LONG >> 20, "a body that is refused is not kept"

        assert await ask(port, "/digits", GOOD + b" " * 1000, "; charset=UTF-8") == 200
        assert await ask(port, "/readyz") == 200


async def test_json_is_read_on_aiohttp_with_a_word_for_the_client() -> None:
    app = web.Application()
    with_aiohttp.install(app, "cpu")

    async def echo(request: web.Request) -> web.Response:
        return web.json_response(await with_aiohttp.read_json(request))

    app.router.add_post("/", echo)
    async with asyncio.timeout(PATIENCE), test_utils.TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as session:
        for body in (b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5000):
            async with session.post("/", data=body, headers=JSON) as answer:
                assert (answer.status, (await answer.json())["error"]) == (422, "InvalidArgumentError"), body[:10]
        async with session.post("/", data=b"this is no gzip", headers=JSON | {"Content-Encoding": "gzip"}) as answer:
            assert answer.status == 400
        async with session.post("/", data='[1, "\u20ac"]'.encode(), headers=JSON) as answer:
            assert await answer.json() == [1, "\u20ac"]
