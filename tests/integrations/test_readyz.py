"""``/readyz`` sees a device that is READY and makes no progress: an op that does not end, a child that does not answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

import accel
from accel.integrations.fastapi import install, lifespan
from accel.ops import Plan
from accel.testing import FaultPlan
from tests.device_support import opened

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

HOSTS: dict[str, Any] = {"inline": accel.InlineHost, "process": accel.ProcessHost}


async def until(condition: Callable[[], object]) -> None:
    """Wait for what takes time, and leave the processor to what it is waited for; the test's own limit bounds it."""
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("host", HOSTS)
async def test_an_op_that_does_not_end_is_a_stall_until_it_ends(host: str) -> None:
    plan = FaultPlan().hang_at(2, op="unary")
    async with opened(plan, host=HOSTS[host](stall_after=0.3)) as device:
        x = await device.put(np.ones(4))
        await device.elementwise.unary("neg", x)
        assert device.health().is_ready
        hanging = asyncio.ensure_future(device.elementwise.unary("neg", x))
        await asyncio.sleep(0)
        began = asyncio.get_running_loop().time()
        await until(lambda: not device.health().is_ready)
        assert asyncio.get_running_loop().time() - began >= 0.25
        health = device.health()
        assert (health.state, health.is_live) == (accel.DeviceState.READY, True)
        assert "unary" in health.reason
        plan.release()
        await hanging
        await until(lambda: device.health().is_ready)
        assert device.generation == 1


@pytest.mark.parametrize("host", HOSTS)
async def test_a_caller_that_has_gone_does_not_hide_it(host: str) -> None:
    plan = FaultPlan().hang_at(2, op="unary")
    async with opened(plan, host=HOSTS[host](stall_after=0.3)) as device:
        x = await device.put(np.ones(4))
        await device.elementwise.unary("neg", x)
        with pytest.raises(accel.DeadlineExceededError):
            await device.elementwise.unary("neg", x, timeout=0.1)
        await until(lambda: not device.health().is_ready)


@pytest.mark.parametrize("host", HOSTS)
async def test_an_op_that_is_sent_as_several_is_known_besides_the_op_of_its_name(host: str) -> None:
    plan = FaultPlan().hang_at(3, op="gemm")
    async with opened(plan, host=HOSTS[host](stall_after=0.3)) as device:
        x = await device.put(np.ones((4, 4)))
        await device.blas.gemm(x, x)
        strided = (await device.put(np.ones((4, 8))))[:, ::2]
        await device.blas.gemm(strided, x)  # with a copy of the view
        hanging = asyncio.ensure_future(device.blas.gemm(strided, x))
        await until(lambda: not device.health().is_ready)
        assert "gemm" in device.health().reason
        plan.release()
        await hanging


async def test_the_first_op_of_a_kind_and_ops_that_go_on_are_no_stall() -> None:
    plan = FaultPlan().hang_at(1, op="unary")
    async with opened(plan, host=accel.InlineHost(stall_after=0.1)) as device:
        x = await device.put(np.ones(4))
        first = asyncio.ensure_future(device.elementwise.unary("neg", x))
        loop = asyncio.get_running_loop()
        end = loop.time() + 0.5
        while loop.time() < end:
            assert device.health().is_ready, device.health().reason
            await asyncio.sleep(0.01)
        plan.release()
        await first
        end = loop.time() + 0.5
        while loop.time() < end:  # each of them is short
            await asyncio.gather(*(device.elementwise.unary("neg", x) for _ in range(8)))
            assert device.health().is_ready, device.health().reason


async def test_an_array_that_moves_in_many_parts_is_no_stall() -> None:
    async with opened(host=accel.ProcessHost(stall_after=0.1), pinned_limit=256 << 10) as device:
        array = np.zeros(96 << 20, np.uint8)
        await device.get(await device.put(array[:8]))  # puts and gets are known, and short
        loop = asyncio.get_running_loop()

        async def watched(op: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
            began, task = loop.time(), loop.create_task(op)
            while not task.done():
                assert device.health().is_ready, device.health().reason
                await asyncio.sleep(0.01)
            return await task, loop.time() - began

        ref, put = await watched(device.put(array))
        _, get = await watched(device.get(ref))
        assert max(put, get) > 0.15, "it takes longer than what is a stall"


@dataclass(frozen=True, eq=False, slots=True)
class Sleep(accel.KernelOp):
    """Takes a given number of seconds."""

    library: ClassVar[str] = "sleeper"
    kind: ClassVar[str] = "sleep"

    seconds: float

    def plan(self) -> Plan:
        return Plan((), (), ())


class Sleeper(accel.KernelLibrary):
    name = "sleeper"

    @accel.kernel(Sleep)
    def sleep(self, op: Sleep, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        stream.submit(lambda: time.sleep(op.seconds), op.seconds)


async def test_what_usually_takes_long_is_allowed_more() -> None:
    async with opened(host=accel.InlineHost(stall_after=0.15)) as device:
        await device.register(Sleeper)
        await device.run(Sleep(0.0))
        unready: list[float] = []
        for seconds in (0.3, 0.3, 0.3, 0.75):
            slow = asyncio.ensure_future(device.run(Sleep(seconds)))
            while not slow.done():
                await asyncio.sleep(0.01)
                if not device.health().is_ready:
                    unready.append(seconds)
                    break
            await slow
        assert unready[0] == 0.3, "they were short until then"
        assert unready[-1] == 0.75
        assert unready.count(0.3) < 3, "they usually take this long"


async def test_a_child_that_does_not_answer_is_seen_after_one_interval() -> None:
    async with opened(host=accel.ProcessHost(heartbeat_interval=0.1, heartbeat_timeout=15.0)) as device:
        await device.put(np.ones(4))
        pid = device.info().pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: not device.health().is_ready)
            assert device.state is accel.DeviceState.READY
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: device.health().is_ready)
        assert device.generation == 1


async def test_patience_is_an_option() -> None:
    async with opened(host=accel.ProcessHost(heartbeat_interval=0.05, heartbeat_timeout=0.2)) as device:
        pid = device.info().pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: device.generation == 2)
        assert device.info().pid != pid


async def test_readyz_says_so_and_healthz_does_not() -> None:
    plan = FaultPlan().hang_at(2, op="unary")
    app = FastAPI(lifespan=lifespan(device="cpu", host=accel.InlineHost(stall_after=0.2), faults=plan, close_timeout=5))
    install(app)
    async with asyncio.timeout(45), app.router.lifespan_context(app):
        device = app.state.accel.device
        x = await device.put(np.ones(4))
        await device.elementwise.unary("neg", x)
        hanging = asyncio.ensure_future(device.elementwise.unary("neg", x))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            while (answer := await client.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.01)
            assert answer.status_code == 503
            assert json.loads(answer.content)["state"] == "ready"
            assert (await client.get("/healthz")).status_code == 200
            plan.release()
            await hanging
            while (await client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "options", [{"stall_after": 0}, {"heartbeat_interval": -1.0}, {"heartbeat_interval": 2.0, "heartbeat_timeout": 1.0}]
)
def test_an_option_out_of_its_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(accel.InvalidArgumentError, match=next(iter(options))):
        accel.ProcessHost(**options)
