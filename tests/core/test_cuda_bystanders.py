"""Which threads are known to wait; each in a process of its own, which has no other threads than those."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Queue

import pytest

from accel.actors.workers import WorkerPool
from accel_cuda.bystanders import all_wait

PATIENCE = 30.0

Bystander = Callable[[], contextlib.AbstractContextManager[object]]


def thread_in(function: Callable[[], object], end: Callable[[], object] = lambda: None) -> Bystander:
    """Return a block beside which a thread is in ``function``, which ``end`` brings to an end."""

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        thread = threading.Thread(target=function)
        thread.start()
        try:
            yield
        finally:
            end()
            thread.join(PATIENCE)

    return block


def computes() -> Bystander:
    over: list[bool] = []

    def compute() -> None:
        number = 0
        while not over:
            number += 1

    return thread_in(compute, lambda: over.append(True))


def waits_for_an_event() -> Bystander:
    event = threading.Event()
    return thread_in(event.wait, event.set)


def waits_at_a_queue() -> Bystander:
    queue: Queue[int] = Queue()
    return thread_in(queue.get, lambda: queue.put(1))


def runs_a_loop(factory: Callable[[], asyncio.AbstractEventLoop] | None) -> Bystander:
    begun: Future[Callable[[], object]] = Future()

    async def idle() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        begun.set_result(lambda: loop.call_soon_threadsafe(over.set))
        await over.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(idle())

    return thread_in(run, lambda: begun.result(PATIENCE)())


def runs_a_uvloop() -> Bystander:
    import uvloop

    return runs_a_loop(uvloop.new_event_loop)


def executor(function: Callable[..., object], *arguments: object) -> Bystander:
    """Return a block beside which an executor's thread is in a function without a frame of its own, or through with it."""

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(function, *arguments)
            yield

    return block


@contextlib.contextmanager
def idle_worker() -> Iterator[None]:
    pool = WorkerPool(1)
    pool.submit(int).result(PATIENCE)
    try:
        yield
    finally:
        pool.close()


def holds_a_lock() -> Bystander:
    lock = threading.Lock()
    lock.acquire()
    return thread_in(lambda: lock.acquire(), lock.release)


WAITING: dict[str, Callable[[], Bystander]] = {
    "nobody": lambda: contextlib.nullcontext,
    "event": waits_for_an_event,
    "queue": waits_at_a_queue,
    "asyncio": lambda: runs_a_loop(None),
    "uvloop": runs_a_uvloop,
    "idle executor": lambda: executor(int),
    "idle worker": lambda: idle_worker,
}
CALLING: dict[str, Callable[[], Bystander]] = {
    "native code": lambda: thread_in(lambda: time.sleep(1.0)),
    "native code in an executor": lambda: executor(time.sleep, 1.0),
    "a lock of somebody's": holds_a_lock,
    "computing": computes,
}


def look(name: str) -> None:
    """Exit with 0 if the bystander is seen as what it is; called in a process of its own."""
    expected = name in WAITING
    with (WAITING | CALLING)[name]()():
        # Whoever has just been started is on its way, and whoever is on its way may be about to call.
        end = time.monotonic() + (PATIENCE if expected else 0.5)
        while (seen := all_wait()) is not True and time.monotonic() < end:
            time.sleep(0.001)
        if seen is not expected:
            raise SystemExit(f"{name}: all_wait() is {seen}")
    assert all_wait() is True


@pytest.mark.parametrize("name", [*WAITING, *CALLING])
def test_who_waits_is_told_from_who_may_call(name: str) -> None:
    program = f"from tests.core.test_cuda_bystanders import look; look({name!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
