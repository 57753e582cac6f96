"""What the parent does of a planned fault of a child."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from accel.backend import Injection
from accel.remote.injected_faults import encode_action
from accel.remote.messages import Kind
from tests.device_support import until

pytestmark = pytest.mark.usefixtures("nothing_left")


class _Link:
    def __init__(self, told: list[Kind]) -> None:
        self._told = told

    def tell(self, kind: Kind) -> None:
        self._told.append(kind)


async def test_a_planned_hang_keeps_nothing_of_a_child_that_is_gone() -> None:
    told: list[Kind] = []
    for is_gone in (False, True):
        ended = threading.Event()

        def release(ended: threading.Event = ended) -> None:
            ended.wait()

        link: Any = _Link(told)
        assert encode_action(Injection("hang", release=release), link, asyncio.get_running_loop()) == "hang"
        kept = weakref.ref(link)
        if is_gone:
            del link
            gc.collect()
            assert kept() is None
        ended.set()
        await until(lambda: not any(thread.name == "accel-hang" for thread in threading.enumerate()))
        await asyncio.sleep(0)
        assert told == [Kind.END_HANGS]
