"""P22c: a CPU device on a node of this machine beside one in a child: ops, arrays beside a bare socket, and how soon a death is seen.

``python benchmarks/nodes.py [--ops 3000] [--passes 3] [--uvloop] [--json FILE]``. The twin of arrays is a process that sends 64 MiB through a TCP socket of the
loopback network, read by ``loop.sock_recv_into``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import accel
from benchmarks.measures import hold_medians

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NBYTES = 64 << 20
TOKEN = secrets.token_hex(16)
ROOT = Path(__file__).resolve().parents[1]

_SENDER = """
import socket, sys
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
data = bytes(int(sys.argv[2]))
while sock.recv(1):
    sock.sendall(data)
"""


class Agent:
    """``python -m accel node`` in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "accel", "node", "--listen", "127.0.0.2:0", "--log-level", "error"]
        self.process = subprocess.Popen(
            command, env={**os.environ, "ACCEL_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.node = accel.Node(self.process.stdout.readline().split()[4].rstrip(","), TOKEN)

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()


async def op_seconds(device: accel.Device, ops: int) -> float:
    """Return the median of an awaited 8 x 8 product."""
    a = await device.put(np.ones((8, 8)))
    took = []
    for _ in range(ops):
        began = time.perf_counter()
        await device.blas.gemm(a, a)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


class Raw:
    """The twin of arrays: 64 MiB come through a socket, as often as they are asked for."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self._sender = subprocess.Popen([sys.executable, "-c", _SENDER, str(listening.getsockname()[1]), str(NBYTES)])
            self._sock, _ = listening.accept()
        self._sock.setblocking(False)
        self._target = memoryview(bytearray(NBYTES))

    async def receive(self) -> None:
        """Receive 64 MiB by bare ``sock_recv_into``."""
        loop, filled = asyncio.get_running_loop(), 0
        await loop.sock_sendall(self._sock, b"x")
        while filled < NBYTES:
            filled += await loop.sock_recv_into(self._sock, self._target[filled:])

    def close(self) -> None:
        """End it."""
        self._sock.close()
        self._sender.wait()


async def array_seconds(device: accel.Device, rounds: int = 9) -> tuple[float, float, float]:
    """Return the median seconds of 64 MiB raw, put and got, measured in turn."""
    array, out = np.random.default_rng(0).random(NBYTES // 8), np.empty(NBYTES // 8)
    ref, raw = await device.put(array), Raw()
    ways: list[Callable[[], Awaitable[Any]]] = [raw.receive, lambda: device.put(array, out=ref), lambda: device.get(ref, out=out)]
    took: list[list[float]] = [[], [], []]
    try:
        for _ in range(rounds):
            for way, seconds in zip(ways, took, strict=True):
                began = time.perf_counter()
                await way()
                seconds.append(time.perf_counter() - began)
    finally:
        raw.close()
    assert np.array_equal(out, array)
    return statistics.median(took[0][2:]), statistics.median(took[1][2:]), statistics.median(took[2][2:])


async def death_seconds(system: accel.System, agent: Agent, *, of_agent: bool) -> float:
    """Return the seconds from a SIGKILL to the error of an op in flight."""
    plan = accel.testing.FaultPlan().hang_at(1, op="fill")
    device = await system.open_device("cpu", node=agent.node, faults=plan)
    waiter = asyncio.ensure_future(device.zeros(4))
    while not device.info().in_flight:  # noqa: ASYNC110 - no event tells of it
        await asyncio.sleep(0)
    pid = agent.process.pid if of_agent else device.info().pid
    assert pid is not None
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    try:
        await waiter
    except accel.ContextPoisonedError:
        seconds = time.perf_counter() - began
    plan.release()
    await device.aclose(timeout=0.0)
    return seconds


async def measure(ops: int) -> dict[str, float]:
    """Return one pass."""
    agent = Agent()
    try:
        async with accel.System() as system:
            near = await system.open_device("cpu", host="process")
            far = await system.open_device("cpu", node=agent.node)
            seconds = {name: [await op_seconds(device, ops // 4) for device in (near, far)] for name in "abcd"}
            raw, put, get = await array_seconds(far)
            child_death = statistics.median([await death_seconds(system, agent, of_agent=False) for _ in range(3)])
            await far.aclose()
            agent_death = await death_seconds(system, agent, of_agent=True)
    finally:
        agent.close()
    in_child, on_node = [statistics.median([pair[place] for pair in seconds.values()]) for place in (0, 1)]
    return {
        "op in a child, us": in_child * 1e6,
        "op on a node, us": on_node * 1e6,
        "op, node over child": on_node / in_child,
        "raw, GB/s": NBYTES / raw / 1e9,
        "put, GB/s": NBYTES / put / 1e9,
        "get, GB/s": NBYTES / get / 1e9,
        "put over raw": raw / put,
        "get over raw": raw / get,
        "death of a child seen, ms": child_death * 1e3,
        "death of an agent seen, ms": agent_death * 1e3,
    }


MUST = {
    "op, node over child": (2.5, "<="),
    "put over raw": (0.6, ">="),
    "get over raw": (0.6, ">="),
    "death of a child seen, ms": (50.0, "<="),
    "death of an agent seen, ms": (50.0, "<="),
}


def main() -> int:
    """Measure, print the median of all passes, and return 1 if a budget is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ops", type=int, default=3000)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    factory = None
    if given.uvloop:
        import uvloop

        factory = uvloop.new_event_loop
    passes = []
    for _ in range(given.passes):
        with asyncio.Runner(loop_factory=factory) as runner:
            passes.append(runner.run(measure(given.ops)))
    return hold_medians(passes, MUST, given.json)


if __name__ == "__main__":
    sys.exit(main())
