from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from aiohttp import web
from fastapi import FastAPI

import accel
from accel.integrations import _page
from accel.integrations import aiohttp as with_aiohttp
from accel.integrations import fastapi as with_fastapi
from accel.integrations._answers import Answer
from accel.patterns import DynamicBatcher
from accel.testing import FaultPlan
from tests.page_support import SERVERS, TOKEN, Serve, messages

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = "/srv/secret/weights.bin at 0xdeadbeef"


@pytest.fixture(params=["fastapi", "aiohttp"])
def serve(request: pytest.FixtureRequest) -> Serve:
    return SERVERS[request.param]


async def test_the_page_is_one_file_for_this_machine(serve: Serve) -> None:
    async with serve(FaultPlan()) as session:
        async with session.get("/accel") as answer:
            html = await answer.text()
            assert (answer.status, answer.content_type) == (200, "text/html")
            policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert policy.count("'sha256-") == 2
        assert not re.findall(r"(?:src|href)=\"(?!data:)|https?://(?!www\.w3\.org/2000/svg)|@import|url\(", html), "it needs nothing else"
        for path in ("/accel", "/accel/events"):
            async with session.get(path, headers={"Host": "accel.example"}) as answer:
                assert answer.status == 403
                assert "admin_token" in await answer.text()
            async with session.post(path) as answer:
                assert answer.status == 405


async def test_a_stream_tells_of_devices_services_actors_and_faults(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_page, "_PERIOD", 0.05)
    faults = FaultPlan()
    async with serve(faults) as session:
        async with session.post("/double", json={"x": [1, 2, 3]}) as answer:
            assert await answer.json() == {"y": [2, 4, 6]}
        async with session.get("/accel/events") as answer:
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            ((number, first),) = await messages(answer, 1)
        assert first["all"]
        assert [device["state"] for device in first["devices"]] == ["ready"]
        (service,) = first["services"]
        assert (service["name"], service["device"], service["answered"], service["latency"]["count"]) == ("double", "cpu:0", 1, 1)
        assert first["actors"]["children"]
        assert [(event["kind"], event["state"], event["generation"]) for event in first["events"]] == [("state", "ready", 1)]

        faults.poison_at(faults.count + 1, accel.DriverError(SECRET, code=700, scope=accel.FaultScope.CONTEXT))
        async with session.post("/double", json={"x": [31337, 2, 3]}) as answer:
            assert answer.status == 200
        async with session.get("/accel/events", headers={"Last-Event-ID": number}) as answer:
            later = await answer.text()
        said = [json.loads(line[6:]) for line in later.splitlines() if line.startswith("data: ")]
        assert len(said) == 5, "a stream ends, so that a server that ends need not wait"
        events = [event for message in said for event in message["events"] if event["device"] == "cpu:0"]
        assert [event.get("state", event.get("error")) for event in events] == ["DriverError", "rebuilding", "ready"]
        assert not any(message["all"] for message in said)
        assert (events[0]["code"], events[0]["scope"], events[2]["generation"]) == ("700", "context", 2)
        assert 0 < events[2]["seconds"] < 10
        assert said[-1]["services"][0]["answered"] == 2
        for unsaid in ("secret", "deadbeef", "31337", "page_support", ".py"):
            assert unsaid not in later


@pytest.mark.parametrize("last", ["", "nonsense", "0.1", "x." + "9" * 5000, ".", "²"])
async def test_a_viewer_from_elsewhere_gets_all_events(last: str) -> None:
    page = _page.Page(lambda: ())
    assert isinstance(page.stream(last), Answer)
    async with accel.System() as system:
        page.open(system)
        await system.open_device("cpu")
        stream = page.stream(last)
        assert not isinstance(stream, Answer)
        assert await anext(stream) == b"retry: 250\n\n"
        message = (await anext(stream)).decode().partition("data: ")[2]
        await stream.aclose()
    assert json.loads(message)["all"]
    assert [event["state"] for event in json.loads(message)["events"]] == ["ready"]


async def test_batchers_that_no_route_names_are_shown_while_they_live() -> None:
    page = _page.Page(lambda: ())

    async def shown() -> list[dict[str, Any]]:
        stream = page.stream("")
        assert not isinstance(stream, Answer)
        await anext(stream)
        message = (await anext(stream)).decode().partition("data: ")[2]
        await stream.aclose()
        services: list[dict[str, Any]] = json.loads(message)["services"]
        return services

    async def negate(items: list[int]) -> list[int]:
        return [-item for item in items]

    async with accel.System() as system:
        device = await system.open_device("cpu")
        page.open(system)
        async with DynamicBatcher(negate, device=device) as batcher:
            assert await batcher.submit(3) == -3
            (service,) = await shown()
        assert (service["name"].rpartition(".")[2], service["answered"], service["latency"]["count"]) == ("negate", 1, 1)
        del batcher
        gc.collect()
        assert await shown() == []


async def test_tenants_are_shown_with_their_parts_and_no_more_than_can_be_looked_at() -> None:
    async def negate(items: list[int]) -> list[int]:
        return [-item for item in items]

    shares = {"gold": 3.0, "free": 1.0} | {str(number): 4 / 98 for number in range(98)}
    async with DynamicBatcher(negate, shares=shares) as batcher:
        page = _page.Page(lambda: [("negate", batcher)])
        async with accel.System() as system:
            page.open(system)
            await batcher.submit(1, tenant="gold")
            stream = page.stream("")
            assert not isinstance(stream, Answer)
            await anext(stream)
            (service,) = json.loads((await anext(stream)).decode().partition("data: ")[2])["services"]
            await stream.aclose()
    first, *others = service["tenants"]
    assert (first["tenant"], first["part"], first["share"], first["answered"]) == ("gold", 1.0, 0.375, 1)
    assert len(others) == 19
    assert "free" in {tenant["tenant"] for tenant in others}


async def test_viewers_are_bounded_and_leave(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_page, "_VIEWERS", 2)
    async with serve(FaultPlan()) as session:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                await messages(await stack.enter_async_context(session.get("/accel/events")), 1)
            async with session.get("/accel/events") as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "10")
        while True:  # those who have left are seen to
            async with session.get("/accel/events") as answer:
                if answer.status == 200:
                    break
            await asyncio.sleep(0.01)


async def test_a_token_guards_page_and_metrics(serve: Serve) -> None:
    async with serve(FaultPlan(), metrics="/metrics", admin_token=TOKEN) as session:
        for path in ("/accel", "/accel/events", "/metrics"):
            async with session.get(path) as answer:
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, 'Basic realm="accel", charset="UTF-8"')
            async with session.get(path, headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
                assert answer.status == 200


async def test_a_profile_is_a_trace_of_the_next_seconds(serve: Serve) -> None:
    async with serve(FaultPlan()) as session:
        profiling = asyncio.create_task(session.post("/accel/profile?seconds=1"))
        async with session.post("/double", json={"x": [31337, 2, 3]}) as answer:
            assert answer.status == 200
        async with session.post("/accel/profile") as answer:
            assert answer.status == 503, "one at a time"
        async with session.post("/double", json={"x": [31337, 2, 3]}) as answer:
            assert answer.status == 200
        async with await profiling as answer:
            assert (answer.status, answer.headers["Content-Disposition"]) == (200, 'attachment; filename="trace.json"')
            text = await answer.text()
        events = json.loads(text)["traceEvents"]
        assert {"batches", "queue", "device"} <= {event.get("cat") for event in events}
        assert "31337" not in text
        for query in ("seconds=0", "seconds=31", "seconds=nan", "seconds=soon", "device=cpu:1"):
            async with session.post(f"/accel/profile?{query}") as answer:
                assert answer.status == 422, query
        async with session.post("/accel/profile", headers={"Host": "accel.example"}) as answer:
            assert answer.status == 403
        async with session.post("/accel/profile?seconds=0.01&device=cpu:0") as answer:
            assert answer.status == 200


async def test_a_profile_is_of_all_devices_unless_one_is_named() -> None:
    async with accel.System() as system:
        pool = await system.open_pool("cpu", count=2)
        page = _page.Page(lambda: ())
        page.open(system)
        for asked, expected in ((None, ["cpu:0", "cpu:0#2"]), ("cpu:0#2", ["cpu:0#2"])):
            profiling = asyncio.create_task(page.profile("0.2", asked))
            await asyncio.sleep(0)
            for device in pool:
                await device.zeros(3)
            found = await profiling
            assert isinstance(found, bytes)
            trace = json.loads(found)
            processes = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
            assert sorted(processes.values()) == expected
            assert {event["pid"] for event in trace["traceEvents"] if event.get("cat") == "device"} == set(processes)
            assert sorted(trace["otherData"]["device"].split(", ")) == expected


async def test_metrics_without_a_token_are_for_this_machine(serve: Serve) -> None:
    async with serve(FaultPlan(), metrics="/metrics") as session:
        async with session.get("/metrics") as answer:
            assert answer.status == 200
        async with session.get("/metrics", headers={"X-Forwarded-For": "127.0.0.1"}) as answer:
            assert answer.status == 403


async def test_a_server_that_ends_does_not_wait_for_viewers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_page, "_MESSAGES", 3)
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(8):
        session = await stack.enter_async_context(serve(FaultPlan()))
        answer = await session.get("/accel/events")
        await messages(answer, 1)


@pytest.mark.parametrize("install", [with_fastapi.install, with_aiohttp.install])
def test_a_token_for_nothing_is_refused(install: Callable[..., None]) -> None:
    app = FastAPI() if install is with_fastapi.install else web.Application()
    with pytest.raises(accel.InvalidArgumentError, match="admin_token is given, and page is None"):
        install(app, admin_token=TOKEN)
    with pytest.raises(accel.InvalidArgumentError, match="admin_token is not text"):
        install(app, page="/accel", admin_token="short")


async def test_without_its_lifespan_an_application_says_so() -> None:
    app = FastAPI()
    with_fastapi.install(app, page="/accel")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.get("/accel/events")
    assert answer.status_code == 503
    assert "lifespan" in answer.json()["hint"]
