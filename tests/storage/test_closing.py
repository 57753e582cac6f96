"""Resources that are closed off the loop: waiting for that may be cancelled."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import accel
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


class Refusing(Resource):
    """Raises what the system raises where it has no thread."""

    def __init__(self, error: accel.AccelError) -> None:
        super().__init__()
        self.error = error

    def close(self) -> None:
        super().close()
        raise self.error


async def test_what_there_was_no_thread_for_is_closed_with_what_is_added_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    first, second = Resource(), Resource()
    async with accel.System() as system:
        closing: Closing[Resource] = Closing(system)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            closing.add([first])
            await closing.wait_closed()
        assert (first.is_closed, closing.left) == (False, [first])
        closing.add([second])
        await closing.wait_closed()
    assert (first.is_closed, second.is_closed, closing.left) == (True, True, [])


@pytest.mark.parametrize("error", [accel.ClosedError("it is closed"), accel.OutOfMemoryError("it has no room")])
async def test_an_error_of_a_resource_is_not_taken_for_a_lack_of_threads(error: accel.AccelError) -> None:
    async with accel.System() as system:
        closing: Closing[Resource] = Closing(system)
        resources = [Refusing(error), Resource()]
        closing.add(resources)
        await closing.wait_closed()
    assert ([resource.is_closed for resource in resources], closing.left) == ([True, True], [])
