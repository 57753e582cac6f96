"""The cancellation of a handler whose client has gone. Imported by :mod:`accel.integrations.fastapi` and what belongs to it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import Request

__all__ = ["cancel_on_disconnect"]


@contextlib.asynccontextmanager
async def cancel_on_disconnect(request: Request) -> AsyncIterator[None]:
    """Cancel the block when the client goes away: ``async with cancel_on_disconnect(request): ...``.

    Starlette lets a handler run on after its client has disconnected. Within the block, the disconnect cancels the handler: work that has not
    reached the device is dropped.

    Parameters
    ----------
    request
        The handler's request. Its body is read (and kept) before the block begins.

    Raises
    ------
    starlette.requests.ClientDisconnect
        The client went away; :func:`install` answers it.
    """
    # RuntimeError: a form, or the handler's own reading, has used the stream up, and nothing is left to read.
    with contextlib.suppress(RuntimeError):
        await request.body()
    task = asyncio.current_task()
    assert task is not None, "a handler runs in a task"
    before = task.cancelling()
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    failed: Exception | None = None
    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch(), name="accel-disconnect-watch")
        try:
            yield
        except Exception as error:  # raised again below, outside the group, which would wrap it
            failed = error
        except asyncio.CancelledError:
            # The watcher's cancellation becomes an error below; one from outside is raised.
            if not gone or task.cancelling() > before + 1:
                raise
        finally:
            watcher.cancel()
            if gone:
                task.uncancel()
    if gone:
        raise ClientDisconnect from failed
    if failed is not None:
        try:
            raise failed
        finally:
            del failed  # its traceback holds this frame
