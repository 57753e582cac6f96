"""What an exception does to the state of a user's actor is an option with a name, whose default is that of OTP and Akka: a fresh instance."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import accel


class Counter(accel.Actor[int, int]):
    """Adds, and refuses what is negative."""

    def __init__(self) -> None:
        self.total = 0

    async def receive(self, message: int, context: accel.ActorContext) -> int:
        if message < 0:
            raise ValueError(f"{message} is negative")
        self.total += message
        return self.total


async def total_after(failures: int, **options: Any) -> int:
    """Return what the counter has after it was given 3, and then messages that fail."""
    async with asyncio.timeout(45), accel.System(close_timeout=5) as system:
        restart = accel.RestartStrategy(backoff=(0.0, 0.0), **options)
        counter = await system.spawn(Counter, restart=restart)
        assert await counter.ask(3) == 3
        for _ in range(failures):
            with pytest.raises(ValueError, match="negative"):
                await counter.ask(-1)
        return await counter.ask(0)


async def test_by_default_it_goes_on_as_a_fresh_instance_and_the_strategy_says_so() -> None:
    assert accel.RestartStrategy().on_exception is accel.Directive.RESTART
    assert await total_after(1) == 0


async def test_it_keeps_its_state_where_that_is_chosen_and_spends_no_budget() -> None:
    assert await total_after(1, on_exception=accel.Directive.RESUME) == 3
    assert await total_after(20, on_exception=accel.Directive.RESUME) == 3


async def test_it_stops_where_that_is_chosen() -> None:
    with pytest.raises(accel.ActorStoppedError):
        await total_after(1, on_exception=accel.Directive.STOP)


async def test_a_function_of_the_users_own_goes_before_it() -> None:
    chosen = accel.RestartStrategy(decide=lambda _: accel.Directive.RESUME, on_exception=accel.Directive.STOP)
    assert await total_after(1, decide=chosen.decide, on_exception=chosen.on_exception) == 3


async def test_what_is_no_directive_is_refused_and_a_device_has_no_state_to_keep() -> None:
    with pytest.raises(accel.InvalidArgumentError, match="on_exception"):
        accel.RestartStrategy(on_exception="resume")  # type: ignore[arg-type]
    async with accel.System(close_timeout=5) as system:
        with pytest.raises(accel.InvalidArgumentError, match="on_exception"):
            await system.open_device("cpu", restart=accel.RestartStrategy(on_exception=accel.Directive.RESUME))
