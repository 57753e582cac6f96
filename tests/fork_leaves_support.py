"""Programs that fork while devices are open, and what tells what the forks hold. Each program runs in a process of its own: see :func:`run`."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

import accel
from accel.ops import Plan, Spec
from accel.patterns import DynamicBatcher
from tests.child_support import links_of
from tests.device_support import child_pid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 45.0
"""Seconds that a program gets; each takes one or two."""

DATA = np.arange(1 << 16, dtype=np.float64)

Host = Literal["inline", "process"]


def run(program: str, *arguments: str) -> None:
    """Run a function of this module in a process of its own, which must end well, and without a traceback on stderr."""
    call = f"{program}({', '.join(map(repr, arguments))})"
    command = [sys.executable, "-W", "error", "-c", f"from tests.fork_leaves_support import *; {call}"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=PATIENCE, check=False, start_new_session=True
    )
    said = f"{call} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, said
    assert "Traceback" not in done.stderr, said
    assert "Exception ignored" not in done.stderr, said


def expect(condition: bool, what: object) -> None:
    """Like ``assert``, in a program."""
    if not condition:
        raise AssertionError(what)


def held(pid: int) -> dict[int, list[str]]:
    """Return the files of shared memory that a process holds, by their inodes: how it does."""
    found: dict[int, list[str]] = defaultdict(list)
    for fd, link in links_of(pid).items():
        with contextlib.suppress(FileNotFoundError):
            if link.startswith("/memfd:"):
                found[os.stat(f"/proc/{pid}/fd/{fd}").st_ino].append(f"descriptor {fd}")
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
        if "/memfd:" in line:
            found[int(line.split()[4])].append(f"mapping {line}")
    return dict(found)


@contextlib.contextmanager
def fork(body: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Fork a child that runs ``body`` and then lives until the block ends; it must end well."""
    told, tell = os.pipe()
    wait, end = os.pipe()
    with warnings.catch_warnings():  # of threads, from Python 3.12 on
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(end)
            body()
            os.write(tell, b"1")
            os.read(wait, 1)
            code = 0
        finally:
            os._exit(code)
    os.close(tell)
    os.close(wait)
    try:
        expect(os.read(told, 1) == b"1", "the forked child failed")
        yield pid
    finally:
        os.close(end)
        os.close(told)
        expect(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the forked child did not end well")


@contextlib.contextmanager
def multiprocessing_fork(body: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Do the same by ``multiprocessing``, as data loaders do."""
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()

    def work() -> None:
        body()
        ready.set()
        end.wait(PATIENCE)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = context.Process(target=work)
        process.start()
    expect(ready.wait(PATIENCE), "the forked child failed")
    expect(process.pid is not None, process)
    try:
        yield process.pid or 0
    finally:
        end.set()
        process.join(PATIENCE)
    expect(process.exitcode == 0, process.exitcode)


def works_by_itself() -> None:
    """Open a device in this process, and compute there."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cpu")
            x = await device.put(DATA)
            expect(np.array_equal(await device.get(await device.elementwise.unary("neg", x)), -DATA), "wrong")

    asyncio.run(main())


# -- programs of line 3


def closing_frees_memory(host: Host, way: str) -> None:
    """Close a device while a forked child lives: the child must hold nothing of its memory. One that ended before has changed nothing."""
    fork_by = multiprocessing_fork if way == "multiprocessing" else fork

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cpu", host=host)
            kept, x = await device.put(DATA, durable=True), await device.put(DATA)
            await device.pinned(DATA.shape, "float64")  # dropped at once: its block of host memory stays
            with fork_by():
                pass
            expect(np.array_equal(await device.get(kept), DATA), "the fork's end changed durable memory")
            expect(np.array_equal(await device.get(await device.elementwise.unary("neg", x)), -DATA), "the fork's end changed memory")
            expect(bool(held(os.getpid())), "the parent holds memory")
            with fork_by(works_by_itself) as child:
                await system.aclose()
                expect(held(child) == {}, held(child))

    asyncio.run(main())


def arrays_stay_readable(host: Host) -> None:
    """Fork while the user has an array in host memory of the device: the child reads it, and holds nothing else."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cpu", host=host)
            ref = await device.put(DATA, durable=True)
            array = await device.pinned(DATA.shape, "float64")
            await device.get(ref, out=array)
            view = array[100:].reshape(-1, 4)

            def read() -> None:
                expect(float(view.sum()) == float(DATA[100:].sum()), "the view is readable")

            with fork(read) as child:
                await system.aclose()
                expect(len(held(child)) == 1, held(child))
                expect(np.array_equal(array, DATA), "the parent's array is readable")

    asyncio.run(main())


@dataclass(frozen=True, eq=False, slots=True)
class ForkOp(accel.KernelOp):
    """Forks a process that sleeps, and writes its number to a file."""

    library: ClassVar[str] = "forks"
    kind: ClassVar[str] = "fork"

    x: accel.AccelRef
    path: str

    def plan(self) -> Plan:
        return Plan((self.x,), (), ())


class Forks(accel.KernelLibrary):
    """Has a worker process, as some libraries do."""

    name = "forks"

    @accel.kernel(ForkOp)
    def fork(self, op: ForkOp, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(tell, b"1")  # it runs
            time.sleep(PATIENCE)
            os._exit(0)
        os.read(told, 1)
        os.close(told)
        os.close(tell)
        Path(op.path).write_text(str(pid), encoding="ascii")


async def _fork_in_child(device: accel.Device, x: accel.AccelRef) -> int:
    with tempfile.NamedTemporaryFile() as file:
        await device.run(ForkOp(x, file.name))
        await device.get(x)  # the op has run
        return int(Path(file.name).read_text(encoding="ascii"))


async def _killed(device: accel.Device) -> None:
    """Kill the device's process, and wait for the next one."""
    os.kill(child_pid(device), signal.SIGKILL)
    async with asyncio.timeout(20):
        async for generation in device.generations():
            if generation == 2:
                return


def grandchild_holds_nothing() -> None:
    """Kill the device's process while a grandchild lives that a library forked there; then close the device."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cpu", host="process")
            await device.register(Forks)
            kept, x = await device.put(DATA, durable=True), await device.put(DATA)
            await device.get(x)
            grandchild = await _fork_in_child(device, x)
            try:
                expect(held(grandchild) == {}, held(grandchild))
                await _killed(device)
                expect(np.array_equal(await device.get(kept), DATA), "durable memory is intact")
                await system.aclose()
                expect(held(grandchild) == {}, held(grandchild))
            finally:
                os.kill(grandchild, signal.SIGKILL)

    asyncio.run(main())


# -- programs of line 11


class _LeftError(Exception):
    """What a fork raises to leave."""


def _leave(way: str) -> None:
    if way == "exit":
        sys.exit(7)
    if way == "exception":
        raise _LeftError


def _wait_for(pid: int) -> int:
    """Wait for the end of a fork, without a turn of the loop: what happens meanwhile is the fork's doing. Return its exit status."""
    end = time.monotonic() + PATIENCE / 3
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the fork did not end")


@dataclass(frozen=True, eq=False, slots=True)
class SleepOp(accel.KernelOp):
    """Takes a while, and then is ``x``."""

    library: ClassVar[str] = "sleeps"
    kind: ClassVar[str] = "sleep"

    x: accel.AccelRef
    seconds: float

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Sleeps(accel.KernelLibrary):
    """Keeps its stream busy for as many seconds as an op says."""

    name = "sleeps"
    blocking = False  # else a thread wakes the loop, by asyncio's own pipe, which the parent loses

    @accel.kernel(SleepOp)
    def sleep(self, op: SleepOp, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        source, target = np.asarray(inputs[0]), np.asarray(outputs[0])

        def work() -> None:
            time.sleep(op.seconds)
            target[...] = source

        stream.submit(work, op.seconds)


SMALL = np.arange(64.0)


async def _use(device: accel.Device) -> None:
    """Run a short op and one that takes a while: the loop is woken by the device's process, or by a timer."""
    async with asyncio.timeout(PATIENCE / 3):
        x = await device.put(SMALL)
        for _ in range(3):
            expect(np.array_equal(await device.get(await device.run(SleepOp(x, 0.02))), SMALL), "wrong")


async def _batch(items: list[int]) -> list[int]:
    return [2 * item for item in items]


async def _fork_in_flight(way: str) -> int:
    """Fork while ops are in flight on devices of three kinds, and use them while the child leaves, and after. Return 0 in the fork."""
    async with accel.System(close_timeout=1.0) as system, DynamicBatcher(_batch) as batcher:  # a wake-up that is lost costs all of it
        devices = [
            await system.open_device("cpu", host="process"),
            await system.open_device("cpu", host="inline", completion=accel.PolledCompletion(0.005)),
            await system.open_device("cpu", host="inline"),
        ]
        for device in devices:
            await device.register(Sleeps)
            await _use(device)
        kept = await devices[0].put(SMALL, durable=True)
        child = devices[0].info().pid
        x = [await device.put(SMALL) for device in devices]
        flying = [asyncio.ensure_future(device.run(SleepOp(ref, 0.3))) for device, ref in zip(devices, x, strict=True)]
        await asyncio.sleep(0.02)
        forked = os.fork()
        if forked == 0:
            _leave(way)
            return 0
        code = _wait_for(forked)
        expect(code == {"return": 0, "exit": 7, "exception": 9}[way], f"the fork ended with {code}")
        async with asyncio.timeout(PATIENCE / 3):
            for device, op in zip(devices, flying, strict=True):
                expect(np.array_equal(await device.get(await op), SMALL), "wrong")
        for device in devices:
            await _use(device)
            expect((device.state, device.generation) == (accel.DeviceState.READY, 1), device.info())
        expect(devices[0].info().pid == child, "another child")
        expect(await batcher.submit(1) == 2, "wrong")
        expect(np.array_equal(await devices[0].get(kept), SMALL), "wrong")
        if isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
            os._exit(
                0
            )  # asyncio's own wake-ups are lost, by what the fork did to the loop that both share: closing would take until its timeout
    return forked


def fork_leaves(loop: str, way: str) -> None:
    """Have a fork leave through ``asyncio.run()``; then all goes on in the parent."""
    parent = os.getpid()
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            forked = runner.run(_fork_in_flight(way))
    except _LeftError:
        sys.exit(9)
    expect((os.getpid() == parent) is (forked != 0), "the fork is a fork")


def ops_are_refused(host: Host) -> None:
    """Use a device in a fork that leaves, where asyncio runs the copy of the loop again, until the tasks have ended: all is refused."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cpu", host=host)
            x = await device.put(SMALL)

            async def use_at_the_end() -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    calls = (
                        lambda: device.put(SMALL),
                        lambda: device.get(x),
                        lambda: device.blas.dot(x, x),
                        lambda: system.open_device("cpu"),
                    )
                    refused = 0
                    for call in calls:
                        try:
                            await call()
                        except accel.ClosedError as error:
                            refused += "fork" in str(error)
                    await device.aclose()
                    os._exit(refused)

            used = asyncio.ensure_future(use_at_the_end())
            await asyncio.sleep(0)
            forked = os.fork()
            if forked == 0:
                sys.exit(7)
            code = _wait_for(forked)
            expect(code == 4, f"the fork ended with {code}")
            await _use_simply(device, x)
            expect(not used.done(), "the parent's task goes on")
            os._exit(0)

    asyncio.run(main())


async def _use_simply(device: accel.Device, x: accel.AccelRef) -> None:
    async with asyncio.timeout(PATIENCE / 3):
        expect(float((await device.get(await device.blas.dot(x, x)))[()]) == float(SMALL @ SMALL), "wrong")


def worker_thread_forks() -> None:
    """Fork on a worker thread of the system, in a function that returns in the fork too: that ends, and does nothing else."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cpu", host="process")
            x = await device.put(SMALL)
            forked = await system.run_blocking(os.fork)
            code = _wait_for(forked)
            expect(code == 0, f"the fork ended with {code}")
            await _use_simply(device, x)

    asyncio.run(main())


# -- the same on a GPU

GIB = 1 << 30
_MEASURE = """
from cuda.bindings import driver
driver.cuInit(0)
_, context = driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)[1])
driver.cuCtxSetCurrent(context)
print(driver.cuMemGetInfo()[1])
"""


def free_on_gpu() -> int:
    """Return how many bytes are free on the GPU, as another process sees it."""
    done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, timeout=PATIENCE, check=True)
    return int(done.stdout)


def gpu_closing_frees_memory() -> None:
    """Close an inline device with 4 GiB while a forked child lives."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="inline")
            x = await device.put(SMALL)
            large = await device.empty((4 * GIB,), "uint8", durable=True)
            with fork():
                pass
            expect(np.array_equal(await device.get(await device.elementwise.unary("neg", x)), -SMALL), "the fork's end changed the device")
            expect(large.nbytes == 4 * GIB, large)
            before = free_on_gpu()
            with fork():
                await system.aclose()
                after = free_on_gpu()
            expect(after - before > 3.9 * GIB, f"{(after - before) / GIB:.2f} GiB came back while the fork lives")

    asyncio.run(main())


def gpu_grandchild_holds_nothing() -> None:
    """Kill the process of a device with 4 GiB while a process lives that a library forked there."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="process")
            await device.register(Forks)
            x = await device.put(SMALL)
            large = await device.empty((4 * GIB,), "uint8")
            grandchild = await _fork_in_child(device, x)
            try:
                before = free_on_gpu()
                await _killed(device)
                expect(large.is_stale, large)
                after = free_on_gpu()
                expect(after - before > 3.9 * GIB, f"{(after - before) / GIB:.2f} GiB came back while the grandchild lives")
            finally:
                os.kill(grandchild, signal.SIGKILL)

    asyncio.run(main())


def gpu_fork_leaves() -> None:
    """Fork while ops are in flight on the GPU, and have the child leave through ``asyncio.run()``: it must end, and the device goes on."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="inline")
            x = await device.put(np.ones((4096, 4096), np.float32))
            await device.get(await device.reduce("sum", await device.blas.gemm(x, x)))

            async def work() -> float:
                return float(await device.get(await device.reduce("sum", await device.blas.gemm(x, x))))

            flying = [asyncio.ensure_future(work()) for _ in range(20)]
            await asyncio.sleep(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Python 3.12 and later, about forks of processes with threads
                forked = os.fork()
            if forked == 0:
                sys.exit(7)
            code = _wait_for(forked)
            expect(code == 7, f"the fork ended with {code}")

            async def tick() -> None:  # what asyncio lost is the pipe by which other threads wake its loop
                while True:
                    await asyncio.sleep(0.01)

            ticking = asyncio.ensure_future(tick())
            async with asyncio.timeout(PATIENCE / 3):
                for total in flying:
                    expect(await total == 4096.0**3, "wrong")
                expect((await device.get(x)).sum() == 4096.0**2, "wrong")
                expect((device.state, device.generation) == (accel.DeviceState.READY, 1), device.info())
            ticking.cancel()
            os._exit(0)

    asyncio.run(main())


def _connections(pid: int) -> int:
    """Return how many connections between machines a process holds."""
    inodes = {line.split()[9] for line in Path(f"/proc/{pid}/net/tcp").read_text(encoding="utf-8").splitlines()[1:]}
    return sum(link.startswith("socket:") and link[len("socket:[") : -1] in inodes for link in links_of(pid).values())


def leaves_the_connections_of_a_node() -> None:
    """Fork while a device is on a node: the child must hold no connection, and its end must change nothing."""
    from tests.node_support import running_agent

    async def main(node: accel.Node) -> None:
        async with accel.System() as system:
            device = await system.open_device("cpu", node=node)
            kept = await device.put(DATA)
            expect(_connections(os.getpid()) == 2, "the device does not have two connections")
            with fork() as child:
                expect(_connections(child) == 0, "the fork holds connections")
            expect(np.array_equal(await device.get(kept), DATA), "the fork's end broke the connection")

    with running_agent() as agent:
        asyncio.run(main(agent.node))
