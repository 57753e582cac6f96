"""What the driver layer does to the thread that calls it, on a driver that only keeps books: the current context and the capture mode come back."""

from __future__ import annotations

import types
from typing import Any

import pytest

from accel.errors import DriverError
from accel_cuda.core.driver import Driver, Handle

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


class Books:
    """A driver of one thread: its stack of contexts, its capture mode, and under which of both each call was made."""

    def __init__(self) -> None:
        self.stack: list[int] = []
        self.mode = GLOBAL
        self.seen: list[tuple[str, int, int]] = []
        self.refuse = 0

    def note(self, name: str) -> int:
        self.seen.append((name, self.stack[-1] if self.stack else 0, self.mode))
        return 0

    def cuCtxPushCurrent_v2(self, context: Handle) -> int:  # noqa: N802 - the driver's name
        if not self.refuse:
            self.stack.append(context.value or 0)
        return self.refuse

    def cuCtxPopCurrent_v2(self, popped: Any) -> int:  # noqa: N802 - the driver's name
        popped._obj.value = self.stack.pop()
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802 - the driver's name
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuEventQuery(self, event: Handle) -> int:  # noqa: N802 - the driver's name
        return self.note("query")

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0


@pytest.fixture(params=[GLOBAL, THREAD_LOCAL, RELAXED])
def books(request: pytest.FixtureRequest) -> Books:
    found = Books()
    found.mode = request.param
    found.stack = [77]
    return found


@pytest.fixture
def driver(books: Books) -> Driver:
    return Driver(types.SimpleNamespace(cuThing=lambda *arguments: (books.note("call"), 5)), books, 13000)  # type: ignore[arg-type]


def test_a_query_is_made_in_relaxed_mode_and_in_no_context_of_ours(driver: Driver, books: Books) -> None:
    mode = books.mode
    for _ in range(3):
        driver.query(Handle(1))
    assert books.seen == [("query", 77, RELAXED)] * 3
    assert (books.mode, books.stack) == (mode, [77])


def test_a_call_that_may_block_is_made_in_relaxed_mode(driver: Driver, books: Books) -> None:
    mode = books.mode
    assert driver.call("cuThing", 1) == 5
    assert driver.status("cuThing", 1) == 0
    driver.ignore("cuThing")
    assert books.seen == [("call", 77, RELAXED)] * 3
    assert books.mode == mode


def test_sections_nest_and_leave_the_thread_as_it_was(driver: Driver, books: Books) -> None:
    mode, first, second = books.mode, driver.section(10), driver.section(20)
    for _ in range(2):
        with first:
            driver.call("cuThing")
            with second, first:
                driver.query(Handle(1))
            driver.query(Handle(1))
            driver.call("cuThing")
    inside = [("call", 10, RELAXED), ("query", 10, RELAXED), ("query", 10, RELAXED), ("call", 10, RELAXED)]
    assert books.seen == inside * 2
    assert (books.mode, books.stack) == (mode, [77])


def test_a_section_in_one_of_the_same_context_does_not_ask_the_driver(driver: Driver, books: Books) -> None:
    section, other = driver.section(10), driver.section(20)
    with section:
        with section, driver.query_section:
            assert books.stack == [77, 10]
            driver.query(Handle(1))
        with other, section:
            assert books.stack == [77, 10, 20, 10]
        with pytest.raises(RuntimeError), section:
            raise RuntimeError("oh")
        assert (books.stack, books.mode) == ([77, 10], RELAXED)
    assert books.stack == [77]


def test_an_error_inside_leaves_the_thread_as_it_was_too(driver: Driver, books: Books) -> None:
    mode = books.mode
    with pytest.raises(RuntimeError), driver.section(10):
        raise RuntimeError("oh")
    assert (books.mode, books.stack) == (mode, [77])


def test_a_context_that_cannot_be_made_current_is_an_error_and_changes_nothing(driver: Driver, books: Books) -> None:
    mode, books.refuse = books.mode, 201
    with pytest.raises(DriverError, match="cuCtxPushCurrent"), driver.section(10):
        raise AssertionError("entered")
    assert (books.mode, books.stack) == (mode, [77])
    books.refuse = 0
    with driver.section(10):
        driver.query(Handle(1))
    assert books.seen == [("query", 10, RELAXED)]
    assert (books.mode, books.stack) == (mode, [77])
