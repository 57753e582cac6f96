"""No descriptor, no thread: the op that wanted one fails with a retryable error, and when the shortage is over it is over.

Each test runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0

BEGIN = """
import asyncio, os, resource, sys, threading
import numpy as np
import accel

def holding(spare):
    hold = []
    try:
        while True:
            hold.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for _ in range(spare):
        os.close(hold.pop())
    return hold

def give_back(hold):
    while hold:
        os.close(hold.pop())

async def answer(work):
    try:
        return await asyncio.wait_for(work, 10)
    except accel.AccelError as error:
        assert error.scope is accel.FaultScope.OP and error.retryable, (type(error), error.scope, error.retryable)
        return error

start = threading.Thread.start
def no_thread(self):
    raise RuntimeError("can't start new thread")

def shortage(on):
    threading.Thread.start = no_thread if on else start
"""


def run(program: str) -> str:
    """Run a program, which must end well and in time, and return what it printed."""
    source = BEGIN + textwrap.dedent(program) + "\nasyncio.run(asyncio.wait_for(main(), 50))\n"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, f"it ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_a_put_without_descriptors_costs_that_put_at_most() -> None:
    # It moves through memory that both processes have, in pieces.
    run("""
    async def main():
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        async with accel.System(close_timeout=5) as system:
            device = await system.open_device("cpu", host="process")
            keep = await device.put(np.arange(4.0))
            durable = await device.put(np.arange(4.0), durable=True)
            failed = 0
            for spare in (0, 1, 2, 3):
                hold = holding(spare)
                array = np.full(6_000_000 + 1_000_000 * failed, 2.0)
                try:
                    result = await answer(device.put(array))
                finally:
                    give_back(hold)
                failed += isinstance(result, accel.AccelError)
                again = await asyncio.wait_for(device.put(array), 10)
                assert (await asyncio.wait_for(device.get(again[:2]), 10)).tolist() == [2.0, 2.0]
                assert (await device.get(durable)).tolist() == [0, 1, 2, 3]
                assert not keep.is_stale and device.health().is_ready
                assert (device.state, device.generation) == (accel.DeviceState.READY, 1)
    """)


def test_a_buffer_without_descriptors_costs_that_op() -> None:
    run("""
    async def main():
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        async with accel.System(close_timeout=5) as system:
            device = await system.open_device("cpu", host="inline")
            keep = await device.put(np.arange(4.0))
            hold = holding(0)
            try:
                error = await answer(device.zeros(50_000_000))
                second = await answer(device.zeros(4, durable=True))
            finally:
                give_back(hold)
            assert isinstance(error, accel.AccelError), error
            assert isinstance(second, accel.AccelError), second
            await asyncio.wait_for(device.zeros(50_000_000), 10)
            assert not keep.is_stale and device.generation == 1 and device.state is accel.DeviceState.READY
    """)


def test_a_device_is_not_opened_without_descriptors_or_threads() -> None:
    run("""
    async def main():
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for host in ("inline", "process"):
            async with accel.System(close_timeout=5) as system:
                shortage(True)
                try:
                    first = await answer(system.open_device("cpu", host=host))
                finally:
                    shortage(False)
                hold = holding(0)
                try:
                    second = await answer(system.open_device("cpu", host=host))
                finally:
                    give_back(hold)
                assert isinstance(first, accel.AccelError), first
                assert isinstance(second, accel.AccelError) or host == "inline", second
                device = await system.open_device("cpu", host=host)
                await asyncio.wait_for(device.put(np.ones(4)), 10)
                assert device.state is accel.DeviceState.READY
    """)


def test_an_op_without_threads_is_answered_and_closing_needs_none() -> None:
    run("""
    async def main():
        for host in ("inline", "process"):
            system = await accel.System(close_timeout=3, workers=1).__aenter__()
            device = await system.open_device("cpu", host=host, completion="adaptive")
            keep = await device.put(np.arange(4.0))
            shortage(True)
            try:
                results = [await answer(device.put(np.ones(n))) for n in (4, 300_000, 3_000_000, 3_000_000)]
            finally:
                shortage(False)
            assert all(isinstance(each, (accel.AccelRef, accel.AccelError)) for each in results)
            again = await asyncio.wait_for(device.put(np.full(3_000_000, 2.0)), 10)
            assert (await asyncio.wait_for(device.get(again[:2]), 10)).tolist() == [2.0, 2.0]
            assert not keep.is_stale
            assert (device.state, device.generation) == (accel.DeviceState.READY, 1)
            shortage(True)
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                await asyncio.wait_for(system.aclose(), 20)
            finally:
                shortage(False)
            assert loop.time() - began < 8, loop.time() - began
            assert device.state is accel.DeviceState.CLOSED
    """)


def test_the_end_of_a_program_leaves_through_the_loop_once_the_op_is_answered() -> None:
    for kind, code, blocking in (("exit", 3, "Bugs"), ("interrupt", -2, "BugsOnTheLoop")):
        program = f"""
import asyncio, signal
import accel, numpy as np
from tests import op_bugs_support
from tests.op_bugs_support import Bug, {blocking}

async def main():
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host="inline")
        await device.register({blocking})
        x = await device.put(np.arange(4.0))
        try:
            await asyncio.wait_for(device.run(Bug(x, "kernel:{kind}")), 5)
        except accel.LibraryError as error:
            print("answered", type(error.__cause__).__name__, flush=True)
        await asyncio.sleep(5)
        print("goes on", flush=True)

op_bugs_support.KINDS["exit"] = lambda text: SystemExit(3)
asyncio.run(main())
"""
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.stdout.split() == ["answered", "SystemExit" if kind == "exit" else "KeyboardInterrupt"], (
            done.stdout + done.stderr[-2000:]
        )
        assert done.returncode in (code, 130 if code < 0 else code), (done.returncode, done.stderr[-2000:])
