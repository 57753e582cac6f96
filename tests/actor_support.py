"""Actors that tests of actors and systems use, a clock under the test's hand, and what the tests look for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest

from accel.actors import Actor, ActorContext, ActorRef, ActorSystem

if TYPE_CHECKING:
    from collections.abc import Callable


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


async def turns(count: int = 10) -> None:
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


class Time:
    """A clock and a sleep under the test's hand: a sleep lasts until ``advance`` passes its end, or ends at once with ``auto``."""

    def __init__(self, *, auto: bool = True) -> None:
        self.now = 1000.0
        self.auto = auto
        self.delays: list[float] = []
        self._sleeping: list[tuple[float, asyncio.Event]] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.delays.append(seconds)
        if self.auto:
            self.now += seconds
            await asyncio.sleep(0)
            return
        event = asyncio.Event()
        self._sleeping.append((self.now + seconds, event))
        await event.wait()

    async def advance(self, seconds: float) -> None:
        self.now += seconds
        for end, event in self._sleeping:
            if end <= self.now:
                event.set()
        await turns()


class Counter(Actor[Any, int]):
    """Counts what it is told to add; raises exceptions; fails to start while ``broken`` says so."""

    def __init__(self, broken: list[BaseException] | None = None) -> None:
        self.total = 0
        self.broken = [] if broken is None else broken

    async def started(self, context: ActorContext) -> None:
        if self.broken:
            raise self.broken.pop(0)

    async def receive(self, message: Any, context: ActorContext) -> int:
        if isinstance(message, BaseException):
            raise message
        self.total += message
        return self.total


def system_on(time: Time, **options: Any) -> ActorSystem:
    return ActorSystem(clock=time, sleep=time.sleep, rng=random.Random(7), **options)


async def fail(ref: ActorRef[Any, Any], error: Exception | None = None) -> None:
    error = ValueError("boom") if error is None else error
    with pytest.raises(type(error)):
        await ref.ask(error)
