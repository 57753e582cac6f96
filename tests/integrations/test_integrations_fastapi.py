from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import numpy as np
import pytest
from fastapi import Depends, FastAPI, Request
from starlette.requests import ClientDisconnect

import accel
from accel.integrations.fastapi import (
    AccelState,
    DeviceDependency,
    SystemDependency,
    cancel_on_disconnect,
    get_state,
    install,
    lifespan,
)
from accel.patterns import DynamicBatcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SEED = random.randrange(2**32)


class Channel:
    """The receiving side of a connection, fed by the test."""

    def __init__(self, body: bytes = b"{}") -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": False})

    def request(self) -> Request:
        return Request({"type": "http", "method": "POST", "headers": []}, self.messages.get)

    def disconnect(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})


@contextlib.asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        yield client


async def test_setup_lives_as_long_as_the_application_and_handlers_get_what_it_yields() -> None:
    log: list[str] = []

    @contextlib.asynccontextmanager
    async def setup(device: accel.Device) -> AsyncIterator[accel.AccelRef]:
        log.append(f"in {device.state.value}")
        yield await device.put(np.arange(3.0))
        log.append(f"out {device.state.value}")

    app = FastAPI(lifespan=lifespan(setup, device="cpu"))

    @app.get("/sum")
    async def total(device: DeviceDependency, weights: Annotated[accel.AccelRef, Depends(get_state)]) -> float:
        return float(await device.get(await device.reduce("sum", weights)))

    async with client_of(app) as client:
        assert (await client.get("/sum")).json() == 3.0
    assert log == ["in ready", "out ready"]


async def test_health_of_an_application_without_the_lifespan_is_503_with_a_hint() -> None:
    app = FastAPI()
    install(app)
    async with client_of(app) as client:
        for path in ("/healthz", "/readyz"):
            answer = await client.get(path)
            body = answer.json()
            assert (answer.status_code, body["ok"], body["state"]) == (503, False, "not opened"), path
            assert "lifespan" in body["hint"]


@pytest.mark.parametrize("wrong", ["cpu", 3, {}])
def test_a_setup_that_is_no_function_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(accel.InvalidArgumentError, match=r"not a function that takes the device.*lifespan\(device='cpu'\)"):
        lifespan(wrong)


async def test_a_setup_that_fails_closes_the_device_and_is_told() -> None:
    opened: list[accel.Device] = []

    @contextlib.asynccontextmanager
    async def setup(device: accel.Device) -> AsyncIterator[None]:
        opened.append(device)
        if device.generation == 1:
            raise LookupError("no weights")
        yield

    app = FastAPI(lifespan=lifespan(setup, device="cpu"))
    with pytest.raises(LookupError, match="no weights"):
        async with client_of(app):
            raise AssertionError("unreachable")
    assert opened[0].state is accel.DeviceState.CLOSED


async def test_a_handler_that_is_not_async_uses_the_portal() -> None:
    app = FastAPI(lifespan=lifespan(device="cpu"))
    install(app)

    @app.get("/double/{value}")
    def double(value: float, system: SystemDependency, device: DeviceDependency) -> float:
        async def work() -> float:
            x = await device.put(np.array(value))
            return float(await device.get(await device.elementwise.binary("add", x, x)))

        return system.portal.run(work)

    async with client_of(app) as client:
        values = np.random.default_rng(SEED).standard_normal(20).tolist()
        answers = await asyncio.gather(*(client.get(f"/double/{value}") for value in values))
    assert [answer.json() for answer in answers] == [2 * value for value in values], SEED


async def test_without_the_lifespan_the_error_says_what_to_do() -> None:
    app = FastAPI()
    install(app)

    @app.get("/name")
    async def name(device: DeviceDependency) -> str:
        return device.name

    async with client_of(app) as client:
        answer = await client.get("/name")
    assert (answer.status_code, answer.json()["error"]) == (500, "NotInitializedError")


async def test_health_routes_have_the_paths_that_were_asked_for_and_no_place_in_the_schema() -> None:
    app = FastAPI(lifespan=lifespan(device="cpu"))
    install(app, live=None, ready="/up")
    async with client_of(app) as client:
        assert (await client.get("/up")).status_code == 200
        assert (await client.head("/up")).status_code == 200
        assert (await client.get("/healthz")).status_code == 404
        assert isinstance(app.state.accel, AccelState)
    assert app.openapi()["paths"] == {}


async def test_a_disconnect_cancels_the_block() -> None:
    channel, entered, left = Channel(), asyncio.Event(), asyncio.Event()

    async def handler() -> None:
        async with cancel_on_disconnect(channel.request()):
            entered.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                left.set()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(_raises(ClientDisconnect, handler))
        await entered.wait()
        assert not left.is_set()
        channel.disconnect()
    assert task.result() is True
    assert left.is_set()


async def test_a_client_that_is_gone_already_does_not_get_the_block_begun() -> None:
    channel = Channel()
    channel.messages.get_nowait()
    channel.disconnect()
    with pytest.raises(ClientDisconnect):
        async with cancel_on_disconnect(channel.request()):
            raise AssertionError("unreachable")


async def test_the_body_can_be_read_before_the_block() -> None:
    request = Channel(b'{"a": 1}').request()
    await request.json()
    async with cancel_on_disconnect(request):
        assert await request.body() == b'{"a": 1}'


async def test_a_body_that_was_streamed_is_not_asked_for_again() -> None:
    request = Channel(b"abc").request()
    assert b"".join([chunk async for chunk in request.stream()]) == b"abc"
    entered = False
    async with cancel_on_disconnect(request):
        entered = True
    assert entered


async def test_the_body_can_be_read_inside_the_block() -> None:
    request = Channel(b'{"a": 1}').request()
    async with cancel_on_disconnect(request):
        assert await request.json() == {"a": 1}


async def test_errors_of_the_block_come_out_as_they_are() -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with cancel_on_disconnect(Channel().request()):
            raise error
    assert caught.value is error


async def test_a_cancellation_from_outside_stays_one() -> None:
    entered = asyncio.Event()

    async def handler() -> None:
        async with cancel_on_disconnect(Channel().request()):
            entered.set()
            await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(handler())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [other.get_name() for other in asyncio.all_tasks() if "accel-disconnect" in other.get_name()]


async def test_a_disconnect_and_a_cancellation_from_outside_at_once_end_as_cancelled() -> None:
    channel, entered = Channel(), asyncio.Event()

    async def handler() -> None:
        async with cancel_on_disconnect(channel.request()):
            entered.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                task.cancel()
                assert task.cancelling() == 2

    task = asyncio.ensure_future(handler())
    await entered.wait()
    channel.disconnect()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nothing_of_a_disconnect_is_left_in_the_task() -> None:
    channel = Channel()

    async def handler() -> str:
        with contextlib.suppress(ClientDisconnect):
            async with cancel_on_disconnect(channel.request()):
                channel.disconnect()
                await asyncio.get_running_loop().create_future()
        async with asyncio.timeout(30):
            await asyncio.get_running_loop().run_in_executor(None, int)
        task = asyncio.current_task()
        return f"goes on, {task.cancelling() if task else None} cancellations"

    assert await asyncio.ensure_future(handler()) == "goes on, 0 cancellations"


async def test_a_block_that_survives_its_cancellation_is_told_all_the_same() -> None:
    channel = Channel()

    async def handler() -> None:
        async with cancel_on_disconnect(channel.request()):
            channel.disconnect()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()

    assert await _raises(ClientDisconnect, handler)


async def test_a_disconnect_takes_an_item_out_of_the_batcher() -> None:
    launched: list[int] = []
    release, running = asyncio.Event(), asyncio.Event()

    async def handler(items: list[int]) -> list[int]:
        launched.extend(items)
        running.set()
        await release.wait()
        return [2 * item for item in items]

    async with DynamicBatcher(handler, max_items=4, max_in_flight=1) as batcher, asyncio.TaskGroup() as group:

        async def ask(item: int, channel: Channel) -> int:
            async with cancel_on_disconnect(channel.request()):
                return await batcher.submit(item)

        gone = Channel()
        first = group.create_task(ask(1, Channel()))
        await running.wait()
        second = group.create_task(_raises(ClientDisconnect, lambda: ask(2, gone)))
        third = group.create_task(ask(3, Channel()))
        gone.disconnect()
        assert await second
        release.set()
    assert (first.result(), third.result(), launched) == (2, 6, [1, 3])
    assert batcher.statistics().dropped == 1


async def _raises(kind: type[Exception], function: Callable[[], Any]) -> bool:
    with pytest.raises(kind):
        await function()
    return True
