"""Resources that are closed off the loop: waiting for that may be cancelled."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from accel.storage.closing import Closing, close_all

if TYPE_CHECKING:
    from collections.abc import Callable


class Resource:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Broken(Resource):
    def close(self) -> None:
        super().close()
        raise RuntimeError("it does not close")


async def test_cancelling_a_wait_does_not_keep_resources_from_being_closed() -> None:
    go_on = asyncio.Event()

    async def run_blocking(call: Callable[..., None], *arguments: object) -> None:
        await go_on.wait()
        call(*arguments)

    system: Any = SimpleNamespace(loop=asyncio.get_running_loop(), run_blocking=run_blocking)
    closing: Closing[Resource] = Closing(system)
    resource = Resource()
    closing.add([resource])
    waiting = asyncio.create_task(closing.wait_closed())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert waiting.cancelled()
    go_on.set()
    await closing.wait_closed()
    assert (resource.is_closed, closing.left) == (True, [])


def test_an_error_of_one_resource_does_not_keep_those_after_it_from_being_closed() -> None:
    resources = [Resource(), Broken(), Resource(), Broken()]
    with pytest.raises(RuntimeError, match="it does not close"):
        close_all(resources)
    assert [resource.is_closed for resource in resources] == [True] * 4


async def test_an_error_of_one_resource_is_logged_and_the_task_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def run_blocking(call: Callable[..., None], *arguments: object) -> None:
        call(*arguments)

    system: Any = SimpleNamespace(loop=asyncio.get_running_loop(), run_blocking=run_blocking)
    closing: Closing[Resource] = Closing(system)
    resources = [Broken(), Resource()]
    closing.add(resources)
    later = Resource()
    await asyncio.sleep(0)
    closing.add([later])
    await closing.wait_closed()
    assert [resource.is_closed for resource in (*resources, later)] == [True] * 3
    assert closing.left == []
    assert "resources_not_closed" in caplog.text
