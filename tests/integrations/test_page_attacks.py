"""What clients try on the page, its streams, the metrics and profiles: each test is an attack, on every server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest

import accel
from accel.integrations import _page
from accel.integrations import aiohttp as with_aiohttp
from accel.integrations import fastapi as with_fastapi
from accel.testing import FaultPlan
from tests.device_support import bounded
from tests.page_support import SERVERS, TOKEN, Serve, connected, messages

if TYPE_CHECKING:
    import socket

    import aiohttp

GUARDED = ("/accel", "/accel/events", "/metrics")
FORWARDED = {"X-Forwarded-Proto": "https"}
OF_A_SITE = {"Origin": "https://site.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}


@pytest.fixture(params=SERVERS)
def serve(request: pytest.FixtureRequest) -> Serve:
    return SERVERS[request.param]


async def status(session: aiohttp.ClientSession, path: str, method: str = "GET", **headers: str) -> int:
    async with session.request(method, path, headers=headers) as answer:
        return answer.status


async def answered(connection: socket.socket) -> bytes:
    return await bounded(asyncio.get_running_loop().sock_recv(connection, 1 << 16))


async def has_room(session: aiohttp.ClientSession) -> None:
    """Wait until a viewer gets a stream."""
    async with asyncio.timeout(30):
        while await status(session, "/accel/events") == 503:
            await asyncio.sleep(0.02)


async def test_a_page_of_another_site_and_a_proxy_are_refused(serve: Serve) -> None:
    async with serve(FaultPlan(), metrics="/metrics") as session:
        for path, method in (*((path, "GET") for path in GUARDED), ("/accel/profile?seconds=0.01", "POST")):
            for headers in (FORWARDED, OF_A_SITE, {"Host": "rebound.example"}, {"Host": "localhost@rebound.example"}):
                assert await status(session, path, method, **headers) == 403, (path, headers)
        assert await status(session, "/accel", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}) == 200, "a link"
        assert await status(session, "/accel/events", **{"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}) == 200


async def test_a_token_is_no_part_of_an_address_and_guards_every_method(serve: Serve) -> None:
    async with serve(FaultPlan(), metrics="/metrics", admin_token=TOKEN) as session:
        for path in GUARDED:
            for name in ("token", "access_token", "admin_token"):
                assert await status(session, f"{path}?{name}={TOKEN}") == 401
            for method in ("HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH"):
                async with session.request(method, path) as answer:
                    assert answer.status in (401, 405), (method, path)
                    assert not [name for name in answer.headers if name.lower().startswith("access-control")]
                    assert TOKEN not in await answer.text()
            assert await status(session, path, Authorization=f"Bearer {TOKEN}", **OF_A_SITE) == 403, "a browser that knows the token"
        assert await status(session, "/accel/profile?seconds=0.01", "POST") == 401


async def test_a_head_of_a_stream_is_answered_at_once(serve: Serve) -> None:
    async with serve(FaultPlan(), metrics="/metrics") as session:
        for path in GUARDED:
            began = time.perf_counter()
            found = await status(session, path, "HEAD")
            assert found in (200, 405)
            assert time.perf_counter() - began < 5


async def test_streams_that_begin_together_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_page, "_VIEWERS", 4)
    async with serve(FaultPlan()) as session:
        found = await asyncio.gather(*[status(session, "/accel/events") for _ in range(60)])
        assert sorted(set(found)) == [200, 503]
        assert found.count(200) <= 4


async def test_viewers_that_vanish_at_once_leave_their_room(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_page, "_VIEWERS", 4)
    async with serve(FaultPlan()) as session:
        for method in ("GET", "HEAD"):
            for _ in range(40):
                async with connected(session, f"{method} /accel/events HTTP/1.1\nHost: localhost\n\n"):
                    pass
        await has_room(session)


async def test_viewers_that_never_read_leave_their_room(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message is larger than what the kernel takes of it."""
    monkeypatch.setattr(_page, "_VIEWERS", 2)
    monkeypatch.setattr(_page, "_PERIOD", 0.02)
    for framework in (with_fastapi, with_aiohttp):
        monkeypatch.setattr(framework, "PATIENCE", 0.5)
    account = _page.Page._account
    monkeypatch.setattr(_page.Page, "_account", lambda self: {**account(self), "much": "x" * (8 << 20)})
    async with serve(FaultPlan()) as session, contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            request = "GET /accel/events HTTP/1.1\nHost: localhost\n\n"
            await stack.enter_async_context(connected(session, request, receive_buffer=4096))
        async with asyncio.timeout(30):
            while await status(session, "/accel/events") == 200:  # until both are seen
                await asyncio.sleep(0.02)
        await has_room(session)


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=abc",
        "text/plain;version=1.x",
        "application/openmetrics-text;version=9.\xe4;escaping=\xe4",
        "application/openmetrics-text;version=1.0.0;escaping=\xff\xfe",
        "," * 4000,
        "application/openmetrics-text" + ";version=1" * 500,
    ],
)
async def test_a_scraper_may_accept_what_it_likes(serve: Serve, accept: str) -> None:
    scrape = f"GET /metrics HTTP/1.1\nHost: localhost\nConnection: close\nAccept: {accept}\n\n"
    async with serve(FaultPlan(), metrics="/metrics") as session, connected(session, scrape) as connection:
        assert (await answered(connection)).startswith(b"HTTP/1.1 200 ")


async def test_profiles_of_any_length_are_bounded(serve: Serve) -> None:
    async with serve(FaultPlan()) as session:
        for seconds in ("-1", "-0", "nan", "-inf", "inf", "1e999", "30.001", "9" * 5000, "", "%00", "0x1"):
            assert await status(session, f"/accel/profile?seconds={seconds}", "POST") in (422, 400), seconds
        for device in ("%00", "'", "cpu:0%0d%0aX: y", "../cpu:0", "x" * 5000):
            assert await status(session, f"/accel/profile?seconds=0.01&device={device}", "POST") == 422, device
        found = await asyncio.gather(*[status(session, "/accel/profile?seconds=2", "POST") for _ in range(40)])
        assert sorted(found) == [200, *[503] * 39]
        assert await status(session, "/accel/profile?seconds=0.01", "POST") == 200


async def test_a_profile_ends_when_its_client_leaves(serve: Serve) -> None:
    async with serve(FaultPlan()) as session:
        async with connected(session, "POST /accel/profile?seconds=30 HTTP/1.1\nHost: localhost\nContent-Length: 0\n\n"):
            await asyncio.sleep(0.2)
            assert await status(session, "/accel/profile?seconds=0.001", "POST") == 503
        async with asyncio.timeout(30):
            while await status(session, "/accel/profile?seconds=0.001", "POST") == 503:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("server", ["aiohttp", "accel-serve"])  # uvicorn tells an application nothing
async def test_a_server_ends_while_a_profile_is_made(server: str) -> None:
    async with SERVERS[server](FaultPlan()) as session:
        profiling = asyncio.create_task(status(session, "/accel/profile?seconds=30", "POST"))
        await asyncio.wait([profiling], timeout=0.2)
        assert await status(session, "/accel/profile?seconds=0.001", "POST") == 503
        began = time.perf_counter()
    assert await profiling == 200
    assert time.perf_counter() - began < 5


async def test_a_code_that_is_a_text_is_not_told(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_page, "_PERIOD", 0.02)
    code, faults = '/srv/weights.bin <img src=x onerror=alert(1)>"\n0xdead', FaultPlan()
    async with serve(faults, metrics="/metrics") as session:
        faults.poison_at(faults.count + 1, accel.DriverError("x", code=code, scope=accel.FaultScope.CONTEXT))
        async with session.post("/double", json={"x": [1, 2, 3]}) as answer:
            assert answer.status == 200
        async with session.get("/accel/events") as answer:
            ((_, message),) = await messages(answer, 1)
        async with session.get("/metrics") as answer:
            metrics = await answer.text()
        async with session.get("/readyz") as answer:
            ready = await answer.text()
    (fault,) = [event for event in message["events"] if event["kind"] == "fault"]
    assert fault["code"] == "other"
    assert 'accel_device_faults_total{code="other",device="cpu:0",scope="context"} 1.0' in metrics
    for unsaid in ("srv", "onerror", "dead"):
        assert unsaid not in json.dumps(message) + metrics + ready
