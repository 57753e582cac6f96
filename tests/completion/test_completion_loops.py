from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from accel.backend import Injection
from accel.completion import resolve_strategy
from accel.cpu.backend import CpuBackend
from accel.errors import FaultScope
from tests.completion_support import PATIENCE, Mark

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


async def on_a_cpu_stream(strategy: str) -> None:
    device = CpuBackend().open(0)
    if strategy == "poller":
        # As if it were a device of its own: the default strategy polls then.
        device.shares_processor, strategy = False, "adaptive"
    watcher = resolve_strategy(strategy).open(device, asyncio.get_running_loop(), {})
    streams = [device.create_stream(), device.create_stream()]
    gates = [threading.Event() for _ in range(8)]
    marks: list[Mark] = []
    for number, gate in enumerate(gates):
        stream = streams[number % 2]
        stream.submit(lambda gate=gate: gate.wait(PATIENCE), 1.0)  # type: ignore[misc]
        marks.append(Mark(device.create_event(), stream, stream=stream))
        stream.record(marks[-1].event)
        watcher.watch(marks[-1])
    for gate, mark in list(zip(gates, marks, strict=True))[:6]:
        gate.set()
        await mark.ended
    device.inject(Injection("poison"), device.create_stream())
    await marks[6].ended
    await marks[7].ended
    assert [mark.ends for mark in marks[:6]] == [[None]] * 6
    assert [error.scope for mark in marks[6:] for error in mark.ends if error] == [FaultScope.CONTEXT] * 2
    for gate in gates:
        gate.set()
    await watcher.aclose()
    await asyncio.to_thread(device.close)
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("accel-")]
    assert left == []


def on_asyncio_debug(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(debug=True) as runner:
        runner.run(main)


def on_uvloop(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


@pytest.mark.parametrize("strategy", ["adaptive", "poller", "polled", "sync", "host_fn"])
@pytest.mark.parametrize("run", [on_asyncio_debug, on_uvloop])
def test_real_streams_on_other_loops(run: Callable[[Coroutine[Any, Any, None]], None], strategy: str) -> None:
    run(on_a_cpu_stream(strategy))
