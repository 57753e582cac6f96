from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import pytest
import uvicorn
from aiohttp import web
from fastapi import FastAPI, Request

import accel
from accel.cpu.backend import CpuBackend
from accel.integrations import aiohttp as with_aiohttp
from accel.integrations import fastapi as with_fastapi
from accel.testing import FaultPlan

CLIENTS = 200
SEED = random.randrange(2**32)

Work = Callable[[accel.Device, list[float]], Awaitable[list[float]]]


@dataclass
class Service:
    """A running service and a client of it."""

    session: aiohttp.ClientSession
    device: accel.Device

    async def post(self, values: list[float]) -> tuple[int, Any, dict[str, str]]:
        async with self.session.post("/work", json=values) as answer:
            return answer.status, await answer.json(), dict(answer.headers)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(path) as answer:
            return answer.status, await answer.json()

    async def reached(self, generation: int) -> None:
        async for now in self.device.generations():
            if now >= generation:
                return


Serve = Callable[..., AbstractAsyncContextManager[Service]]


async def double(device: accel.Device, values: list[float]) -> list[float]:
    x = await device.put(np.asarray(values))
    y = await device.elementwise.binary("add", x, x)
    return list(map(float, await device.get(y)))


def fastapi_app(work: Work, options: dict[str, Any]) -> FastAPI:
    app = FastAPI(lifespan=with_fastapi.lifespan(device="cpu", **options))
    with_fastapi.install(app)

    @app.post("/work")
    async def handle(request: Request, device: with_fastapi.DeviceDependency) -> list[float]:
        async with with_fastapi.cancel_on_disconnect(request):
            return await work(device, await request.json())

    return app


def aiohttp_app(work: Work, options: dict[str, Any]) -> web.Application:
    app = web.Application()
    with_aiohttp.install(app, "cpu", **options)

    async def handle(request: web.Request) -> web.Response:
        return web.json_response(await work(request.app[with_aiohttp.DEVICE], await request.json()))

    app.router.add_post("/work", handle)
    return app


@contextlib.asynccontextmanager
async def connect(bound: socket.socket) -> AsyncIterator[aiohttp.ClientSession]:
    host, port = bound.getsockname()
    async with aiohttp.ClientSession(f"http://{host}:{port}", connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get("/healthz") as answer:  # it waits in the listening socket until the service has started
            assert answer.status == 200
        yield session


@contextlib.asynccontextmanager
async def serve_fastapi(work: Work = double, **options: Any) -> AsyncIterator[Service]:
    app = fastapi_app(work, options)
    bound = socket.create_server(("127.0.0.1", 0), backlog=512)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", ws="none"))
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve([bound]))
        try:
            async with connect(bound) as session:
                yield Service(session, app.state.accel.device)
        finally:
            server.should_exit = True


@contextlib.asynccontextmanager
async def serve_aiohttp(work: Work = double, **options: Any) -> AsyncIterator[Service]:
    app = aiohttp_app(work, options)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    bound = socket.create_server(("127.0.0.1", 0), backlog=512)
    try:
        await web.SockSite(runner, bound, backlog=512).start()
        async with connect(bound) as session:
            yield Service(session, app[with_aiohttp.DEVICE])
    finally:
        await runner.cleanup()


@pytest.fixture(params=[serve_fastapi, serve_aiohttp], ids=["fastapi", "aiohttp"])
def serve(request: pytest.FixtureRequest) -> Serve:
    found: Serve = request.param
    return found


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold every rebuild until this is set; the first context is not held."""
    gate, opened, plain = threading.Event(), 0, CpuBackend.open

    def held(self: CpuBackend, index: int) -> Any:
        nonlocal opened
        opened += 1
        assert opened == 1 or gate.wait(10)
        return plain(self, index)

    monkeypatch.setattr(CpuBackend, "open", held)
    return gate


def inputs(count: int) -> list[list[float]]:
    rng = np.random.default_rng(SEED)
    return [rng.standard_normal(4).tolist() for _ in range(count)]


def is_right(values: list[float], body: Any) -> bool:
    return bool(np.array_equal(body, 2 * np.asarray(values)))


async def test_concurrent_clients_get_their_own_right_answers(serve: Serve) -> None:
    sent = inputs(CLIENTS)
    async with serve() as service:
        answers = await asyncio.gather(*map(service.post, sent))
    assert {status for status, _, _ in answers} == {200}
    assert all(is_right(values, body) for values, (_, body, _) in zip(sent, answers, strict=True)), SEED


async def test_a_fault_costs_503_and_the_next_requests_are_answered(serve: Serve) -> None:
    sent = inputs(CLIENTS)
    async with serve(faults=FaultPlan().poison_at(4 * CLIENTS)) as service:  # each request has three ops

        async def client(values: list[float]) -> list[tuple[int, Any, dict[str, str]]]:
            return [await service.post(values) for _ in range(3)]

        answers = [answer for own in await asyncio.gather(*map(client, sent)) for answer in own]
        await service.reached(2)
        later = await asyncio.gather(*map(service.post, sent))
    failed = [(body, headers) for status, body, headers in answers if status == 503]
    thrice = [values for values in sent for _ in range(3)]
    assert {status for status, _, _ in answers} == {200, 503}
    assert all(is_right(values, body) for values, (status, body, _) in zip(thrice, answers, strict=True) if status == 200), SEED
    assert {body["error"] for body, _ in failed} <= {"ContextPoisonedError", "StaleRefError"}
    assert all(body["retryable"] and headers["Retry-After"] == "1" for body, headers in failed)
    assert {status for status, _, _ in later} == {200}
    assert all(is_right(values, body) for values, (_, body, _) in zip(sent, later, strict=True)), SEED


async def test_more_than_the_queue_holds_is_refused_with_429(serve: Serve) -> None:
    plan, sent = FaultPlan().hang_at(1), inputs(12)
    async with serve(faults=plan, pending_limit=1, max_in_flight=1) as service, asyncio.TaskGroup() as group:
        tasks = [group.create_task(service.post(values)) for values in sent]
        # The device stands still and holds three at most, so who comes back first was refused.
        status, body, headers = await next(asyncio.as_completed(tasks))
        assert (status, body["error"], body["retryable"]) == (429, "MailboxFullError", True)
        assert int(headers["Retry-After"]) >= 1
        plan.release()
    answers = [task.result() for task in tasks]
    assert {status for status, _, _ in answers} <= {200, 429}
    assert sum(status == 200 for status, _, _ in answers) >= 1
    assert all(is_right(values, body) for values, (status, body, _) in zip(sent, answers, strict=True) if status == 200), SEED


async def test_a_full_queue_during_a_rebuild_is_refused_with_503(serve: Serve, gate: threading.Event) -> None:
    async with serve(faults=FaultPlan().poison_at(1), pending_limit=1) as service, asyncio.TaskGroup() as group:
        assert (await service.post([1.0]))[0] == 503
        tasks = [group.create_task(service.post([2.0])) for _ in range(3)]
        status, body, headers = await next(asyncio.as_completed(tasks))
        assert (status, body["error"]) == (503, "MailboxFullError")
        assert int(headers["Retry-After"]) >= 1
        gate.set()
    answers = [task.result() for task in tasks]
    assert [body for status, body, _ in answers if status == 200] in ([[4.0]], [[4.0], [4.0]])


async def test_readiness_goes_within_the_fault_and_comes_back_with_the_rebuild(serve: Serve, gate: threading.Event) -> None:
    async with serve(faults=FaultPlan().poison_at(2)) as service:
        assert await service.get("/readyz") == (200, {"ok": True, "state": "ready", "generation": 1})
        status, body, _ = await service.post([1.0])
        assert (status, body["error"], body["generation"]) == (503, "ContextPoisonedError", 1)
        assert await service.get("/readyz") == (
            503,
            {"ok": False, "state": "rebuilding", "generation": 1, "reason": "DriverError INJECTED_FAULT"},
        )
        assert await service.get("/healthz") == (
            200,
            {"ok": True, "state": "rebuilding", "generation": 1, "reason": "DriverError INJECTED_FAULT"},
        )
        gate.set()
        await service.reached(2)
        assert await service.get("/readyz") == (200, {"ok": True, "state": "ready", "generation": 2})
        assert (await service.post([1.0]))[:2] == (200, [2.0])


async def test_a_lost_device_is_neither_live_nor_ready(serve: Serve) -> None:
    restart = accel.RestartStrategy(max_restarts=0)
    async with serve(faults=FaultPlan().poison_at(1), restart=restart) as service:
        assert (await service.post([1.0]))[0] == 503
        with pytest.raises(accel.DeviceLostError):
            await service.reached(2)
        for path in ("/healthz", "/readyz"):
            assert await service.get(path) == (503, {"ok": False, "state": "lost", "generation": 1, "reason": "DriverError INJECTED_FAULT"})
        status, body, headers = await service.post([1.0])
    assert (status, body["error"], body["retryable"]) == (503, "DeviceLostError", False)
    assert "Retry-After" not in headers


async def test_a_deadline_is_504(serve: Serve) -> None:
    async def late(device: accel.Device, values: list[float]) -> list[float]:
        await device.put(np.asarray(values), timeout=0.02)
        raise AssertionError("it hangs")

    plan = FaultPlan().hang_at(1)
    async with serve(late, faults=plan) as service:
        status, body, _ = await service.post([1.0])
        plan.release()
    assert (status, body["error"], body["retryable"]) == (504, "DeadlineExceededError", True)


async def test_what_does_not_fit_is_422_and_a_failing_library_500(serve: Serve) -> None:
    async def dot(device: accel.Device, values: list[float]) -> list[float]:
        x = await device.put(np.asarray(values))
        return [float(await device.get(await device.blas.dot(x, await device.zeros(2, "float64"))))]

    async with serve(dot, faults=FaultPlan().fail_at(3, accel.LibraryError("handle 0xbeef is bad"), op="dot")) as service:
        status, body, _ = await service.post([1.0, 2.0, 3.0])
        assert (status, body["error"]) == (422, "InvalidArgumentError")
        assert body["detail"]
        assert (await service.post([1.0, 2.0]))[:2] == (200, [0.0])
        assert (await service.post([1.0, 2.0]))[:2] == (200, [0.0])
        status, body, _ = await service.post([1.0, 2.0])
    assert (status, body["error"]) == (500, "LibraryError")
    assert "0xbeef" not in str(body)


async def test_a_disconnect_cancels_work_that_was_not_launched(serve: Serve) -> None:
    entered, left = asyncio.Queue[float](), asyncio.Queue[tuple[float, bool]]()

    async def watched(device: accel.Device, values: list[float]) -> list[float]:
        entered.put_nowait(values[0])
        try:
            result = await double(device, values)
        except asyncio.CancelledError:
            left.put_nowait((values[0], True))
            raise
        left.put_nowait((values[0], False))
        return result

    plan = FaultPlan().hang_at(1)
    async with serve(watched, faults=plan, max_in_flight=1) as service, asyncio.TaskGroup() as group:
        first = group.create_task(service.post([1.0]))
        assert await entered.get() == 1.0
        second = group.create_task(service.post([2.0]))
        assert await entered.get() == 2.0
        second.cancel()  # the client closes its connection
        assert await left.get() == (2.0, True)
        plan.release()
        assert (await first)[:2] == (200, [2.0])
        assert (await service.post([3.0]))[:2] == (200, [6.0])
    assert plan.count == 6, "three ops each for the first and the third; none for the second"
