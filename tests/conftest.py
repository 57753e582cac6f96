"""Fixtures for all tests: reproducible randomness, what a test must not leave behind, and the event loops that are supported."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio
import uvloop

from tests.child_support import descriptors
from tests.device_support import opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    import accel

QUICK = tuple(
    f"tests/{path}"
    for path in [
        "actors/",
        "completion/",
        "cpu/",
        "memory/",
        "test_layout",
        "test_values",
        "device/test_arguments",
        "device/test_every_op",
        "device/test_options",
        "engine/test_backpressure",
        "engine/test_cancel",
        "engine/test_close",
        "engine/test_commands",
        "engine/test_deadlines",
        "engine/test_graph",
        "engine/test_lane.py",
        "engine/test_lane_pool",
        "engine/test_lost",
        "engine/test_op_walk",
        "engine/test_order",
        "engine/test_waits",
        "expressions/test_expressions",
        "models/test_buckets",
        "ops/test_decorator",
        "ops/test_elementwise",
        "ops/test_linalg",
        "ops/test_reduce",
        "ops/test_sort",
        "ops/test_view",
        "ops/test_vocabulary",
        "patterns/test_batcher",
        "patterns/test_quarantine.py",
        "remote/test_error_codec",
        "remote/test_op_codec",
        "storage/test_buffers",
    ]
)
"""What the paths of the modules begin with whose tests are ``quick``: pure logic, and devices of the CPU in this process."""
_PATIENCE = 30.0


def pytest_configure() -> None:
    """Heed the signals that a shell has its background commands ignore: children of tests inherit what is ignored."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that contributors run while they write."""
    for item in items:
        if item.nodeid.startswith(QUICK):
            item.add_marker(pytest.mark.quick)


def pytest_collection_finish() -> None:
    """Exempt the modules and the collected tests from later garbage collections, each of which took 0.16 s with them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def exempted() -> Iterator[None]:
    """Exempt what is left after a module's tests, such as what they imported: collecting it again and again took a fifth of all time."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random numbers; the seed is shown when the test fails."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def _described(fd: int, target: str) -> str:
    """Return what a descriptor is of: of a socket, also its ends, which tell whose it is."""
    if not target.startswith("socket:"):
        return target
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            return f"{target} {sock.family.name} {sock.getsockname()!r} to {sock.getpeername()!r}"
    except OSError as error:  # it has no peer, or is closed by now
        return f"{target} ({error})"


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    """A CPU device in this process."""
    async with opened() as device:
        yield device


@pytest.fixture(params=["inline", "process"])
async def hosted(request: pytest.FixtureRequest) -> AsyncIterator[accel.Device]:
    """A CPU device in this process, and one in a child."""
    async with opened(host=request.param) as device:
        yield device


def _opened_since(before: dict[int, str]) -> dict[int, str]:
    return {fd: _described(fd, target) for fd, target in descriptors().items() if before.get(fd) != target}


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("accel-")}


@pytest.fixture(scope="session")
def used_loops() -> None:
    """Use every kind of loop once: what it keeps open for the whole process is open from here on."""
    for factory in _LOOPS.values():
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.sleep(0))


@pytest.fixture
async def nothing_left(used_loops: None) -> AsyncIterator[None]:
    """Fail a test that leaves threads of ours, tasks or descriptors behind."""
    with _leaving_nothing():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_leaves_nothing(used_loops: None) -> AsyncIterator[None]:
    """Fail a module that leaves them behind, whose tests share devices; see :func:`nothing_left`."""
    with _leaving_nothing():
        yield


@contextlib.contextmanager
def _leaving_nothing() -> Iterator[None]:
    threads, before, tasks = _threads(), descriptors(), asyncio.all_tasks()
    yield
    left_tasks = {task.get_name() for task in asyncio.all_tasks() - tasks - {asyncio.current_task()}}
    assert not left_tasks, f"tasks left behind: {sorted(left_tasks)}"
    deadline = time.monotonic() + _PATIENCE
    for thread in _threads() - threads:
        # Abandoned threads end by themselves, once what they ran has ended.
        thread.join(max(0.0, deadline - time.monotonic()))
    left = sorted(thread.name for thread in _threads() - threads)
    assert not left, f"threads left behind: {left}"
    opened = _opened_since(before)
    assert not opened, f"descriptors left open: {opened}"


def _debug_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_debug(True)
    return loop


def _eager_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(getattr(asyncio, "eager_task_factory"))  # noqa: B009 - Python 3.12 has it
    return loop


_LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio-debug": _debug_loop, "uvloop": uvloop.new_event_loop}
if sys.version_info >= (3, 12):
    _LOOPS["eager"] = _eager_loop


@pytest.fixture(params=list(_LOOPS))
def run_on_loop(request: pytest.FixtureRequest) -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    """Run a coroutine function on each kind of event loop."""

    def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=_LOOPS[request.param]) as runner:
            runner.run(main())

    return run


@pytest.fixture
def run_checked(
    run_on_loop: Callable[[Callable[[], Coroutine[Any, Any, None]]], None], used_loops: None
) -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    """Run a coroutine function on each kind of event loop; fail if a descriptor is left, or something goes to the loop's exception handler."""

    def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def checked() -> None:
            unexpected: list[Any] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unexpected.append(context))
            await asyncio.sleep(0)
            before = descriptors()
            await main()
            assert unexpected == []
            assert _opened_since(before) == {}

        run_on_loop(checked)

    return run
