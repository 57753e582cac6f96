"""What a message to another process costs: a round trip, messages by the second, and an op's way into bytes and back.

    python benchmarks/host_channel.py [--uvloop]

Two processes, each with an event loop, over one pair of sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import marshal
import socket
import statistics
import subprocess
import sys
import timeit
from collections import deque
from time import perf_counter
from typing import Any

import numpy as np
import uvloop

from accel import ops
from accel.dtype import DType
from accel.process.channel import Channel
from accel.ref import AccelRef
from accel.remote.op_codec import OpReader, OpWriter

ROUND_TRIPS = 10_000
WINDOW = 256
MESSAGES = 200_000
PAYLOAD = bytes(200)


class _Owner:
    """As much of a device as its refs ask for."""

    name, identity, is_closing, live_generation, device, sharing = "cpu:0", "x", False, 1, None, None

    def __init__(self) -> None:
        self.dropped: deque[int] = deque()

    def check_process(self) -> None: ...

    def register_token(self, ref: AccelRef) -> None: ...


async def echo(descriptor: int) -> None:
    """Send back what comes, until the other end closes."""
    ended = asyncio.Event()
    channel = Channel(
        socket.socket(fileno=descriptor),
        asyncio.get_running_loop(),
        on_message=lambda kind, payload, _: channel.send(kind, payload),
        on_lost=lambda _: ended.set(),
    )
    await ended.wait()


async def measure(sock: socket.socket) -> None:
    """Print round trips one at a time, and messages in a window."""
    loop = asyncio.get_running_loop()
    answers: deque[asyncio.Future[None]] = deque()
    channel = Channel(sock, loop, on_message=lambda *_: answers.popleft().set_result(None), on_lost=lambda error: print("lost:", error))

    def ask() -> asyncio.Future[None]:
        future = loop.create_future()
        answers.append(future)
        channel.send(1, PAYLOAD)
        return future

    times = []
    for _ in range(ROUND_TRIPS):
        start = perf_counter()
        await ask()
        times.append((perf_counter() - start) * 1e6)
    print(f"round trip of {len(PAYLOAD)} bytes: p50 {statistics.median(times):.1f} us, p99 {statistics.quantiles(times, n=100)[-1]:.1f} us")

    async def client(count: int) -> None:
        for _ in range(count):
            await ask()

    start = perf_counter()
    await asyncio.gather(*[client(MESSAGES // WINDOW) for _ in range(WINDOW)])
    print(f"round trips with {WINDOW} in flight: {MESSAGES / (perf_counter() - start):,.0f} /s")
    channel.close()


def measure_ops() -> None:
    """Print what an op costs on its way into bytes and back."""
    owner: Any = _Owner()
    a, b = (AccelRef(owner, number, (8, 8), DType.FLOAT32, 1) for number in (1, 2))
    refs = {1: a, 2: b}
    op = ops.Gemm(a, b)
    reader = OpReader(lambda buffer, *_: refs[buffer], lambda place: np.empty(place.shape), {})
    writer = OpWriter(reader.define)
    data = marshal.dumps(writer.write(op))
    dump = min(timeit.repeat(lambda: marshal.dumps(writer.write(op)), number=10_000, repeat=5)) * 100
    load = min(timeit.repeat(lambda: reader.read(marshal.loads(data)), number=10_000, repeat=5)) * 100
    print(f"gemm op of {len(data)} bytes: dump {dump:.1f} us, load {load:.1f} us")


def main() -> None:
    """Run as the one end, or, told a descriptor, as the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uvloop", action="store_true", help="use uvloop in both processes")
    parser.add_argument("--echo", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if options.uvloop else None) as runner:
        if options.echo is not None:
            runner.run(echo(options.echo))
            return
        measure_ops()
        one, other = socket.socketpair()
        arguments = [sys.executable, __file__, "--echo", str(other.fileno()), *(["--uvloop"] if options.uvloop else [])]
        with subprocess.Popen(arguments, pass_fds=[other.fileno()]) as child:
            other.close()
            runner.run(measure(one))
            child.wait(10)


if __name__ == "__main__":
    main()
