"""Timers below a millisecond, and the semaphore that host functions post."""

from __future__ import annotations

import asyncio
import ctypes
import select
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import uvloop

from accel.completion.timer import LoopTimer, TimerfdTimer, create_timer
from accel.errors import UnsupportedError
from accel.semaphore import Semaphore

if TYPE_CHECKING:
    from collections.abc import Callable


def on(loop: asyncio.AbstractEventLoop, main: Callable[[], Any]) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


async def check_timer(kind: type[LoopTimer | TimerfdTimer]) -> None:
    fired = asyncio.Event()
    calls: list[float] = []

    def callback() -> None:
        calls.append(time.perf_counter())
        fired.set()

    timer = kind(asyncio.get_running_loop(), callback)
    began = time.perf_counter()
    timer.arm(3600.0)
    timer.arm(2e-3)  # takes the place of the hour
    await fired.wait()
    # uvloop counts from the beginning of its turn, in milliseconds, and so may be early.
    assert calls[0] - began >= (1.9e-3 if kind is TimerfdTimer else 0.0)
    timer.arm(0.0)
    timer.disarm()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(calls) == 1
    fired.clear()
    timer.arm(0.0)
    await fired.wait()
    assert len(calls) == 2
    timer.close()
    timer.close()


@pytest.mark.parametrize("kind", [LoopTimer, TimerfdTimer])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_timer_fires_once_when_armed(kind: type[LoopTimer | TimerfdTimer], new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    on(new_loop(), lambda: check_timer(kind))


async def test_loop_that_watches_no_descriptors_gets_its_own_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    timer = create_timer(loop, lambda: None)
    assert isinstance(timer, TimerfdTimer)
    timer.close()

    def refuse(*_: object) -> NoReturn:
        raise NotImplementedError

    monkeypatch.setattr(loop, "add_reader", refuse)
    assert isinstance(create_timer(loop, lambda: None), LoopTimer)


@pytest.mark.parametrize("arms", [True, False])
async def test_an_expired_timer_is_not_readable_after_its_callback(arms: bool) -> None:
    """Else each loop iteration would call back."""
    called = asyncio.get_running_loop().create_future()

    def callback() -> None:
        if arms:
            timer.arm(3600.0)
        called.set_result(None)

    timer = TimerfdTimer(asyncio.get_running_loop(), callback)
    timer.arm(1e-6)
    await called
    assert not select.select([timer._fd], [], [], 0)[0]
    timer.close()


async def test_a_timer_may_be_closed_by_its_own_callback() -> None:
    loop = asyncio.get_running_loop()
    called, errors = loop.create_future(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: errors.append(context))

    def callback() -> None:
        timer.close()
        called.set_result(None)

    timer = TimerfdTimer(loop, callback)
    timer.arm(1e-6)
    await called
    await asyncio.sleep(0)
    assert errors == []


def test_semaphore_is_a_c_function_that_wakes_a_thread() -> None:
    semaphore = Semaphore()
    woken = threading.Event()

    def wait() -> None:
        semaphore.wait()
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(semaphore.address)(semaphore.argument)
    assert woken.wait(10.0)
    thread.join()
    assert not semaphore.try_acquire()
    for _ in range(3):
        semaphore()
    semaphore.wait()  # takes all three
    assert not semaphore.try_acquire()


def test_system_without_semaphores_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ctypes.PyDLL(None, use_errno=True)

    class Library:
        sem_post, sem_trywait = real.sem_post, real.sem_trywait

        @staticmethod
        def sem_init(*_: object) -> int:
            return -1

    monkeypatch.setattr(ctypes, "PyDLL", lambda *_, **__: Library)
    with pytest.raises(UnsupportedError):
        Semaphore()
