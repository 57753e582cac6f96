"""Which calls of kernels in a child count as loading."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np

import accel
from accel.remote.busy import BusyCalls
from accel.remote.requests import RequestContext
from tests.own_library_support import Scale, Where

NOW: Any = SimpleNamespace(call_soon_threadsafe=lambda function, *arguments: function(*arguments))
"""A loop that calls at once."""


class Counting:
    """Counts the sections that begin."""

    count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None: ...


class Library(SimpleNamespace):
    """As much of a registered library as calls need."""


async def test_the_first_call_of_each_op_of_a_registered_library_counts() -> None:
    busy: Any = Counting()
    registered: dict[str, Any] = {"sent": Library(loaded=set())}
    calls = BusyCalls(NOW, busy, registered)
    async with accel.System() as system:
        x = await (await system.open_device("cpu")).put(np.ones(4))
        for counted in (1, 1, 1):
            calls.call_kernel(lambda *_: None, None, Scale(x), None)  # a kernel of its own, as those of ops with a status have
            assert busy.count == counted
        calls.call_kernel(lambda *_: None, None, Where(x), None)
        assert busy.count == 2
        library = weakref.ref(registered.pop("sent"))
        gc.collect()
        assert library() is None, "what was unregistered is kept"
        registered["sent"] = Library(loaded=set())
        for counted in (3, 3):
            calls.call_kernel(lambda *_: None, None, Scale(x), None)
            assert busy.count == counted
        for counted in (4, 5):  # of the backend's own kernels those come here that load
            calls.call_kernel(lambda *_: None, None, accel.ops.Copy(x), None)
            assert busy.count == counted


def test_a_child_that_was_asked_something_stays_busy_when_its_last_op_ends() -> None:
    """It opens a library, say: it does not say again that it is busy."""
    ended = list[str]()
    link = SimpleNamespace(is_busy=True, end_busy=lambda: ended.append("busy"))
    context: Any = SimpleNamespace(in_flight=1, _questions={1: None}, _link=link, fault=accel.ContextPoisonedError("planted"))
    RequestContext.retire_ops(context, None, 1)  # type: ignore[arg-type]
    assert not ended
    context._questions.clear()
    RequestContext.retire_ops(context, None, 1)  # type: ignore[arg-type]
    assert ended == ["busy"]
