"""Which threads are known to wait; each in a process of its own, which has no other threads than those."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Queue
from typing import TYPE_CHECKING, Any

import pytest

from accel.actors.workers import WorkerPool
from accel.cpu.backend import CpuBackend
from accel_cuda.bystanders import in_the_way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 20.0

Bystander = contextlib.AbstractContextManager[object]


@contextlib.contextmanager
def thread_in(function: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """Return a block beside which a thread is in ``function``, which ``end`` brings to an end."""
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield
    finally:
        end()
        thread.join(PATIENCE)


class Native:
    """A function of native code that gives the lock up, until it is ended: a read of a pipe."""

    def __init__(self) -> None:
        self.source, self.sink = os.pipe()

    def end(self) -> None:
        os.write(self.sink, b"x")


def native_code() -> Bystander:
    native = Native()
    return thread_in(lambda: os.read(native.source, 1), native.end)


def computing() -> Bystander:
    over: list[bool] = []

    def compute() -> None:
        number = 0
        while not over:
            number += 1

    return thread_in(compute, lambda: over.append(True))


def lock_of_somebody() -> Bystander:
    lock = threading.Lock()
    lock.acquire()
    return thread_in(lambda: lock.acquire(), lock.release)


def event() -> Bystander:
    over = threading.Event()
    return thread_in(over.wait, over.set)


def queue() -> Bystander:
    items: Queue[int] = Queue()
    return thread_in(items.get, lambda: items.put(1))


@contextlib.contextmanager
def executor(run: bool, initializer: bool = False) -> Iterator[None]:
    """Have an executor's thread be in a function that has no frame of its own, or through with one, or in its initializer."""
    native = Native()
    more: dict[str, Any] = {"initializer": os.read, "initargs": (native.source, 1)} if initializer else {}
    with ThreadPoolExecutor(1, **more) as pool:
        if run and not initializer:
            pool.submit(os.read, native.source, 1)
            while not pool._work_queue.empty():
                time.sleep(0)  # the thread takes it
        else:
            begun = pool.submit(int)
            if not initializer:
                begun.result(PATIENCE)
        yield
        native.end()


@contextlib.contextmanager
def worker() -> Iterator[None]:
    pool = WorkerPool(1)
    pool.submit(int).result(PATIENCE)
    yield
    pool.close()
    for thread in pool._threads:
        thread.join(PATIENCE)


@contextlib.contextmanager
def cpu_stream() -> Iterator[None]:
    device = CpuBackend().open(0)
    stream = device.create_stream()
    ran = threading.Event()
    stream.submit(ran.set, 1.0)  # so long that it goes to the stream's thread
    assert ran.wait(PATIENCE)
    yield
    stream.close()
    device.close()


def loop_of(begin: Callable[[Any], None]) -> Bystander:
    """Have a thread run a loop, in which nothing happens."""
    begun: Future[Callable[[], object]] = Future()

    async def idle() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        begun.set_result(lambda: loop.call_soon_threadsafe(over.set))
        await over.wait()

    return thread_in(lambda: begin(idle()), lambda: begun.result(PATIENCE)())


def asyncio_loop() -> Bystander:
    return loop_of(asyncio.run)


def uvloop_in_a_runner() -> Bystander:
    import uvloop

    def run(main: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)

    return loop_of(run)


def uvloop_by_itself() -> Bystander:
    import uvloop

    def run(main: Any) -> None:
        loop = uvloop.new_event_loop()
        loop.run_until_complete(main)
        loop.close()

    return loop_of(run)


WAITING: dict[str, Callable[[], Bystander]] = {
    "nobody": contextlib.nullcontext,
    "event": event,
    "queue": queue,
    "asyncio": asyncio_loop,
    "uvloop": uvloop_in_a_runner,
    "uvloop by itself": uvloop_by_itself,
    "idle executor": lambda: executor(False),
    "idle worker": worker,
    "idle stream of the CPU": cpu_stream,
}
CALLING: dict[str, Callable[[], Bystander]] = {
    "native code": native_code,
    "native code in an executor": lambda: executor(True),
    "native code as an initializer": lambda: executor(True, initializer=True),
    "a lock of somebody's": lock_of_somebody,
    "computing": computing,
}
LOOKS = 50
"""So many looks have to see somebody who may call, once his thread has settled."""


def look(name: str) -> None:
    """Exit with an error unless the bystander is seen as what it is; called in a process of its own."""
    with (WAITING | CALLING)[name]():
        if name in WAITING:  # whoever has just been started is on its way, and in the way
            end = time.monotonic() + PATIENCE
            while (where := in_the_way()) is not None:
                if time.monotonic() > end:
                    raise SystemExit(f"{name}: {where} is in the way")
                time.sleep(0.001)
        else:
            for _ in range(LOOKS):
                if in_the_way() is None:
                    raise SystemExit(f"{name}: nobody is in the way")
                time.sleep(0.001)
    assert in_the_way() is None


@pytest.mark.parametrize("name", [*WAITING, *CALLING])
def test_who_waits_is_told_from_who_may_call(name: str) -> None:
    program = f"from tests.core.test_cuda_bystanders import look; look({name!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=2.5 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr


def test_a_look_keeps_nobodys_operands() -> None:
    class Operand: ...

    def caller() -> list[weakref.ref[Operand]]:
        mine = Operand()
        begun, over = threading.Event(), threading.Event()

        def other() -> weakref.ref[Operand]:
            theirs = Operand()
            begun.set()
            over.wait(PATIENCE)
            return weakref.ref(theirs)

        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(other)
            begun.wait(PATIENCE)
            for _ in range(3):  # the first reads files
                in_the_way()
            over.set()
            return [weakref.ref(mine), found.result(PATIENCE)]

    gc.disable()
    try:
        assert [operand() for operand in caller()] == [None, None]
    finally:
        gc.enable()
