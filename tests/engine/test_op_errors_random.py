"""Random programs with failing ops, rewrites, views, batches and cancellations: an op that ends well has read nothing that a failed op was to write."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

import accel
from tests.cpu_ops_support import PATIENCE, Ways, Work

BUFFERS, OPS = 4, 60

Held = set[tuple[float, ...] | None]
"""What a buffer may hold; ``None``: what a failed op was to write."""


class Program:
    """Sends ops at random, all at once, and knows what each buffer may hold after them."""

    def __init__(self, device: accel.Device, refs: list[accel.AccelRef], rng: random.Random) -> None:
        self.device, self.refs, self.rng = device, refs, rng
        self.may_hold: list[Held] = [{tuple(np.full(4, float(at)))} for at in range(len(refs))]
        self.sent: list[tuple[asyncio.Task[Any], bool, bool, Held | None]] = []

    def send(self, call: Any, *, may_fail: bool, may_succeed: bool = True, gives: Held | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(call)
        self.sent.append((task, may_fail, may_succeed, gives))
        return task

    def negate(self, source: int, target: int, *, fails: bool = False) -> None:
        """Take note of ``target = -source``, which fails if that must not be read."""
        held, before = self.may_hold[source], self.may_hold[target]
        after: Held = {None} if fails else {None if each is None else tuple(-value for value in each) for each in held}
        # An op that was refused before it was enqueued has left its output as it was.
        self.may_hold[target] = after | before if None in held else after

    async def batch(self, steps: list[tuple[int, int]]) -> None:
        async with self.device.batch() as batch:
            for source, target in steps:
                batch.elementwise.unary("neg", self.refs[source], out=self.refs[target])

    def step(self, number: int) -> None:
        device, refs, rng = self.device, self.refs, self.rng
        source, target = rng.sample(range(BUFFERS), 2)
        held = self.may_hold[source]
        unsound = None in held
        kind = rng.choice(["work", "fail", "unary", "put", "part", "get", "get", "batch", "cancel"])
        if kind in ("work", "fail"):
            work = Work(refs[source], "raise" if kind == "fail" else "", refs[target], gated=rng.random() < 0.5)
            self.send(device.run(work), may_fail=unsound or kind == "fail", may_succeed=kind == "work" and held != {None})
            self.negate(source, target, fails=kind == "fail")
        elif kind == "unary":
            self.send(device.elementwise.unary("neg", refs[source], out=refs[target]), may_fail=unsound, may_succeed=held != {None})
            self.negate(source, target)
        elif kind == "put":
            self.send(device.put(np.full(4, float(number)), out=refs[target]), may_fail=False)
            self.may_hold[target] = {tuple(np.full(4, float(number)))}
        elif kind == "part":
            part, before = (float(number), float(number)), self.may_hold[target]
            put = device.put(np.full(2, float(number)), out=refs[target][:2])
            self.send(put, may_fail=None in before, may_succeed=before != {None})  # it keeps the rest
            after: Held = {None if each is None else (*part, *each[2:]) for each in before}
            self.may_hold[target] = after | before if None in before else after
        elif kind == "get":
            self.send(device.get(refs[source]), may_fail=unsound, may_succeed=held != {None}, gives=set(held))
        elif kind == "batch":
            steps = [(source, target), (target, rng.choice([each for each in range(BUFFERS) if each != target]))]
            self.send(self.batch(steps), may_fail=unsound, may_succeed=held != {None})
            before = set(self.may_hold[steps[1][1]])
            for each in steps:
                self.negate(*each)
            if unsound:
                self.may_hold[steps[1][1]] |= before
        else:
            before = set(self.may_hold[target])
            task = self.send(device.run(Work(refs[source], "", refs[target])), may_fail=True)
            self.negate(source, target)
            self.may_hold[target] |= before
            asyncio.get_running_loop().call_soon(task.cancel)

    async def ended(self) -> None:
        """Wait for all, and see that each has ended as it may."""
        answers = await asyncio.wait_for(asyncio.gather(*[task for task, *_ in self.sent], return_exceptions=True), PATIENCE)
        for answer, (_, may_fail, may_succeed, gives) in zip(answers, self.sent, strict=True):
            if isinstance(answer, BaseException):
                assert may_fail, answer
                assert isinstance(answer, asyncio.CancelledError) or "ValueError: a bad request" in str(answer), answer
            else:
                assert may_succeed, "an op has read what a failed one was to write"
                assert gives is None or tuple(answer) in gives


@pytest.mark.parametrize("round_", range(6))
async def test_no_op_ends_well_that_read_what_a_failed_one_was_to_write(round_: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    async with accel.System() as system:
        device = await system.open_device("cpu", streams=rng.choice([8, 2]))
        await device.register(Ways)
        refs = [await device.put(np.full(4, float(at))) for at in range(BUFFERS)]
        for _ in range(4):
            program = Program(device, refs, rng)
            Ways.gate.clear()
            opens = rng.randrange(OPS)
            for number in range(OPS):
                program.step(number)
                if number == opens:
                    Ways.gate.set()
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
            Ways.gate.set()
            await program.ended()
            for at, ref in enumerate(refs):
                await device.put(np.full(4, float(at)), out=ref)
                np.testing.assert_array_equal(await device.get(ref), np.full(4, float(at)))
        assert (device.state, device.generation, device.info().in_flight) == (accel.DeviceState.READY, 1, 0)
