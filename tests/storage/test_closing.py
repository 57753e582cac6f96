"""Resources that are closed off the loop: waiting for that may be cancelled."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from accel.storage.closing import Closing

if TYPE_CHECKING:
    from collections.abc import Callable


class Resource:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


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
