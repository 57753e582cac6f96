"""Actors that tests of actors use, and what they have in common."""

from __future__ import annotations

import asyncio
from typing import Any

from accel.actors import Actor, ActorContext, ActorRef, ActorSystem


class Echo(Actor[Any, Any]):
    """Answers with the message; raises it if it is an exception."""

    async def receive(self, message: Any, context: ActorContext) -> Any:
        if isinstance(message, BaseException):
            raise message
        return message


class Gate(Actor[Any, Any]):
    """Handles a message only when its gate is opened; records what it handled."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    async def receive(self, message: Any, context: ActorContext) -> Any:
        if isinstance(message, asyncio.Event):
            self.seen.append("waiting")
            try:
                await message.wait()
            except asyncio.CancelledError:
                self.seen.append("cancelled")
                raise
            return "opened"
        self.seen.append(message)
        return message


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def blocked(system: ActorSystem, **options: Any) -> tuple[ActorRef[Any, Any], asyncio.Event, list[Any], asyncio.Task[Any]]:
    """Return a Gate that has a message in hand, the gate, its record, and the task that asked."""
    gate, seen = asyncio.Event(), list[Any]()
    ref = await system.spawn(Gate, seen, **options)
    asking = asyncio.create_task(ref.ask(gate))
    await turns()
    assert seen == ["waiting"]
    return ref, gate, seen, asking


class Hooked(Actor[Any, Any]):
    def __init__(self, log: list[str], broken: str = "") -> None:
        self.log = log
        self.broken = broken

    def note(self, what: str) -> None:
        self.log.append(what)
        if what == self.broken:
            raise ValueError(what)

    async def receive(self, message: Any, context: ActorContext) -> Any:
        self.note("receive")
        if isinstance(message, BaseException):
            raise message

    async def started(self, context: ActorContext) -> None:
        self.note("started")

    async def stopped(self, context: ActorContext) -> None:
        self.note("stopped")

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        self.note("restarting")


class Stubborn(Actor[Any, str]):
    """Finishes its work although it is cancelled, also its start if it has to wait for that, and its end."""

    def __init__(self, log: list[str], *waits: str) -> None:
        self.log = log
        self.waits = waits

    async def persist(self, what: str) -> None:
        if what in self.waits:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.log.append(what)

    async def started(self, context: ActorContext) -> None:
        await self.persist("started")

    async def stopped(self, context: ActorContext) -> None:
        await self.persist("stopped")
        self.log.append("ended")

    async def receive(self, message: Any, context: ActorContext) -> str:
        await self.persist("receive")
        return "finished all the same"
