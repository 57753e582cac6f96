"""Handing a message over to an idle actor, and telling an actor what it will never handle."""

from __future__ import annotations

import asyncio

import pytest

import accel
from accel.actors import Actor, ActorContext, ActorSystem, RestartStrategy


class Recorder(Actor[str, None]):
    """Handles short messages at once; those that begin with "slow" take a turn, and wait for the gate."""

    def __init__(self, seen: list[str], gate: asyncio.Event) -> None:
        self.seen = seen
        self.gate = gate

    def receive_now(self, message: str, context: ActorContext) -> bool:
        if message == "boom":
            raise ValueError(message)
        if message.startswith("slow"):
            return False
        self.seen.append(f"now {message}")
        return True

    async def receive(self, message: str, context: ActorContext) -> None:
        if message.startswith("slow"):
            await self.gate.wait()
        self.seen.append(message)

    def refused(self, message: str) -> None:
        self.seen.append(f"refused {message}")


async def until_idle(ref: accel.ActorRef[str, None]) -> None:
    while not ref.mailbox.is_awaited:
        await asyncio.sleep(0)


async def test_an_idle_actor_handles_it_in_the_senders_turn() -> None:
    seen: list[str] = []
    async with ActorSystem() as system:
        ref = await system.spawn(Recorder, seen, asyncio.Event())
        await until_idle(ref)
        assert ref.hand_over("a")
        assert seen == ["now a"]
        assert not ref.hand_over("slow"), "what takes time is left to the sender to queue"
        assert seen == ["now a"]


async def test_a_busy_actor_is_not_disturbed_and_order_is_kept() -> None:
    seen: list[str] = []
    gate = asyncio.Event()
    async with ActorSystem() as system:
        ref = await system.spawn(Recorder, seen, gate)
        ref.tell("slow 1")
        assert not ref.hand_over("a"), "a message is queued before it"
        while len(ref.mailbox):
            await asyncio.sleep(0)
        assert not ref.hand_over("b"), "a message is in hand"
        gate.set()
        await until_idle(ref)
        assert ref.hand_over("c")
    assert seen == ["slow 1", "now c"]


async def test_raising_is_a_failure_of_the_actor() -> None:
    seen: list[str] = []
    async with ActorSystem() as system:
        ref = await system.spawn(Recorder, seen, asyncio.Event(), restart=RestartStrategy(max_restarts=0))
        await until_idle(ref)
        assert ref.hand_over("boom")
        error = await ref.wait_stopped()
        assert isinstance(error, ValueError)
        assert not ref.hand_over("a"), "a stopped actor takes nothing"


async def test_other_loops_are_refused() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Recorder, [], asyncio.Event())

        async def elsewhere() -> None:
            with pytest.raises(accel.ClosedError):
                ref.hand_over("a")

        await asyncio.to_thread(asyncio.run, elsewhere())


async def test_messages_that_were_only_told_are_refused_when_the_actor_stops() -> None:
    seen: list[str] = []
    async with ActorSystem() as system:
        ref = await system.spawn(Recorder, seen, asyncio.Event())
        ref.tell("slow 1")
        while len(ref.mailbox):
            await asyncio.sleep(0)
        ref.tell("a")
        asked = asyncio.ensure_future(ref.ask("b"))
        while len(ref.mailbox) < 2:
            await asyncio.sleep(0)
        await ref.stop(drain=False)
        with pytest.raises(accel.ActorStoppedError):
            await asked
    assert "refused a" in seen
    assert "refused b" not in seen, "who asks is answered, and needs nobody else to be told"


async def test_messages_are_refused_between_two_instances_too() -> None:
    seen: list[str] = []
    asleep = asyncio.Event()

    async def sleep(_: float) -> None:
        asleep.set()
        await asyncio.Event().wait()

    async with ActorSystem(sleep=sleep) as system:
        ref = await system.spawn(Recorder, seen, asyncio.Event())
        for _ in range(2):  # the second restart of a window is delayed
            await until_idle(ref)
            ref.hand_over("boom")
        await asleep.wait()
        ref.tell("a")
        await ref.stop(drain=False)
    assert seen == ["refused a"]
