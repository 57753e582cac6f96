"""A clock under the test's hand, and an actor that fails on request."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from accel.actors import Actor, ActorContext, ActorRef, ActorSystem


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


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def system_on(time: Time, **options: Any) -> ActorSystem:
    return ActorSystem(clock=time, sleep=time.sleep, rng=random.Random(7), **options)


async def fail(ref: ActorRef[Any, Any], error: Exception | None = None) -> None:
    error = ValueError("boom") if error is None else error
    with pytest.raises(type(error)):
        await ref.ask(error)
