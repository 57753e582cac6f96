"""Actors that tests of systems use, and what they look for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

from accel.actors import Actor, ActorContext

if TYPE_CHECKING:
    from collections.abc import Callable


class Echo(Actor[Any, Any]):
    async def receive(self, message: Any, context: ActorContext) -> Any:
        if isinstance(message, BaseException):
            raise message
        return message


class Waits(Actor[asyncio.Event, str]):
    async def receive(self, message: asyncio.Event, context: ActorContext) -> str:
        await message.wait()
        return "opened"


class Never(Actor[Any, None]):
    """Ignores all cancellation, until its gate is opened."""

    async def receive(self, message: asyncio.Event, context: ActorContext) -> None:
        while not message.is_set():
            try:
                await message.wait()
            except asyncio.CancelledError:
                continue


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def accel_tasks() -> list[str]:
    return sorted(task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("accel-"))


def accel_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("accel-"))


class Starts(Echo):
    def __init__(self, error: Exception | None = None, gate: asyncio.Event | None = None) -> None:
        self.error = error
        self.gate = gate

    async def started(self, context: ActorContext) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error


def in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a fresh thread; return what it returned, or the exception."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(function)
        return future.exception() or future.result()
