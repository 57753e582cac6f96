"""The plans of one stream, without a GPU: how many are kept, when those that go are destroyed, and what a graph keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from accel.memory import HostArena
from accel_cuda.core.plan_cache import PlanCache
from accel_cuda.core.stream import CudaStream
from accel_cuda.errors import NOT_READY
from tests.cuda_support import Context

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def context() -> Iterator[Any]:
    arena = HostArena(1 << 20, block_bytes=1 << 20)
    yield Context(arena)
    arena.close()


@pytest.fixture
def stream(context: Any) -> CudaStream:
    return CudaStream(context, {}, 0)


class Plans:
    """A cache of plans that are their keys in capitals."""

    def __init__(self, stream: CudaStream, kept: int) -> None:
        self.destroyed: list[str] = []
        self.cache: PlanCache[str, str] = PlanCache(stream, str.upper, self.destroyed.append, kept)

    def get(self, keys: str) -> list[str]:
        return [self.cache.get(key) for key in keys]


def test_a_plan_is_made_once_and_the_least_recently_used_one_goes(stream: CudaStream) -> None:
    plans = Plans(stream, 3)
    assert plans.get("abca") == ["A", "B", "C", "A"]
    assert plans.cache.made == 3
    plans.get("d")
    assert ("a" in plans.cache, "b" in plans.cache, len(plans.cache)) == (True, False, 3)
    assert (plans.cache.made, plans.cache.evicted) == (4, 1)


def test_a_plan_is_destroyed_when_the_stream_has_passed_its_last_use(stream: CudaStream, context: Any) -> None:
    plans = Plans(stream, 1)
    context.driver.fails["query"] = NOT_READY
    plans.get("abc")
    assert plans.destroyed == []
    del context.driver.fails["query"]
    plans.get("d")
    assert plans.destroyed == ["A", "B"]
    assert "cuStreamSynchronize" not in context.driver.names()


def test_few_plans_wait_for_a_stream_that_is_behind(stream: CudaStream, context: Any) -> None:
    plans = Plans(stream, 1)
    context.driver.fails["query"] = NOT_READY
    plans.get("abcdefghi")
    assert (plans.cache.evicted, plans.destroyed) == (8, [])
    plans.get("j")
    assert "cuStreamSynchronize" in context.driver.names()
    assert plans.destroyed == list("ABCDEFGHI")


def test_a_plan_that_a_graph_uses_stays(stream: CudaStream) -> None:
    plans = Plans(stream, 1)
    plans.get("a")
    stream.is_capturing = True
    assert plans.get("abc") == ["A", "B", "C"]
    stream.is_capturing = False
    plans.get("defa")
    assert plans.cache.made == 6
    assert not {"A", "B", "C"} & set(plans.destroyed)


def test_the_end_of_the_stream_destroys_all_each_once(stream: CudaStream, context: Any) -> None:
    plans = Plans(stream, 1)
    stream.is_capturing = True
    plans.get("a")
    stream.is_capturing = False
    context.driver.fails["query"] = NOT_READY
    plans.get("bc")
    stream.close()
    assert sorted(plans.destroyed) == ["A", "B", "C"]
    assert not plans.cache
