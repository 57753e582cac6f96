"""The plans of one context, without a GPU: threads and streams that share them, how many are kept, when those that go are destroyed, and what a graph keeps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from accel_cuda.core.plan_cache import PlanCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_cuda.core.stream import CudaStream

PATIENCE = 30.0


class Plans:
    """A cache of plans that are their keys in capitals."""

    def __init__(self, kept: int, make: Callable[[str], str] = str.upper) -> None:
        self.destroyed: list[str] = []
        self.cache: PlanCache[str, str] = PlanCache(make, self.destroyed.append, kept)

    def use(self, keys: str, stream: CudaStream, *, passes: bool = True) -> list[str]:
        """Use plans; unless the stream ``passes``, it is still busy with that."""
        used = []
        for key in keys:
            with self.cache.use(key, stream) as plan:
                used.append(plan)
            if passes:
                stream.transfers.finish(stream.transfers.issued)
        return used


def test_a_plan_is_made_once_for_all_streams_and_the_least_recently_used_one_goes(streams: list[CudaStream]) -> None:
    plans = Plans(3)
    assert plans.use("abc", streams[0]) == ["A", "B", "C"]
    assert plans.use("a", streams[1]) == ["A"]
    assert (plans.cache.made, plans.destroyed) == (3, [])
    plans.use("d", streams[1])
    assert (plans.cache.made, len(plans.cache), plans.destroyed) == (4, 3, ["B"])


def test_a_plan_is_ready_after_its_first_use(streams: list[CudaStream]) -> None:
    plans = Plans(3)
    assert not plans.cache.is_ready("a")
    assert plans.cache.prepare("a") == "A"
    assert not plans.cache.is_ready("a")
    with pytest.raises(ZeroDivisionError), plans.cache.use("a", streams[0]):
        raise ZeroDivisionError
    assert not plans.cache.is_ready("a"), "what it lacked for its first use may be lacking still"
    plans.use("a", streams[0])
    assert plans.cache.is_ready("a")
    assert plans.cache.made == 1


def test_a_plan_that_was_asked_for_is_not_the_next_to_go(streams: list[CudaStream]) -> None:
    plans = Plans(2)
    plans.use("ab", streams[0])
    assert plans.cache.is_ready("a")
    plans.use("c", streams[0])
    assert plans.destroyed == ["B"]


def test_a_plan_is_destroyed_once_every_stream_has_passed_its_last_use(streams: list[CudaStream], context: Any) -> None:
    plans = Plans(1)
    plans.use("a", streams[0], passes=False)
    plans.use("a", streams[1])
    plans.use("b", streams[1])
    assert (plans.destroyed, len(plans.cache)) == ([], 2)
    plans.use("c", streams[1])
    assert plans.destroyed == ["B"], "the plan that one stream still uses stays, the other goes"
    streams[0].transfers.finish(streams[0].transfers.issued)
    plans.use("d", streams[1])
    assert plans.destroyed == ["B", "A", "C"]
    assert not {"cuStreamSynchronize", "cuEventSynchronize"} & set(context.driver.names())


def test_a_plan_that_was_only_prepared_goes_as_well(streams: list[CudaStream]) -> None:
    plans = Plans(1)
    plans.cache.prepare("a")
    plans.use("b", streams[0])
    assert plans.destroyed == ["A"]


def test_a_plan_in_a_threads_hands_is_not_destroyed(streams: list[CudaStream]) -> None:
    plans = Plans(1)
    with plans.cache.use("a", streams[0]):
        plans.use("bc", streams[1])
        assert plans.destroyed == ["B"]
    streams[0].transfers.finish(streams[0].transfers.issued)
    plans.use("d", streams[1])
    assert sorted(plans.destroyed) == ["A", "B", "C"]


def test_one_thread_at_a_time_uses_a_plan(streams: list[CudaStream]) -> None:
    plans = Plans(3)
    entered = threading.Event()

    def use() -> None:
        with plans.cache.use("a", streams[1]):
            entered.set()

    with plans.cache.use("a", streams[0]):
        thread = threading.Thread(target=use)
        thread.start()
        assert not entered.wait(0.05)
        plans.use("b", streams[0])
    thread.join(PATIENCE)
    assert entered.is_set()
    assert plans.cache.made == 2


def test_a_thread_that_waited_for_a_plan_that_went_has_a_new_one(streams: list[CudaStream]) -> None:
    plans = Plans(3)
    entry = plans.cache.acquire("a")
    with ThreadPoolExecutor(1) as pool:
        use = pool.submit(plans.use, "a", streams[1])
        with pytest.raises(TimeoutError):
            use.result(0.05)
        entry.is_gone = True
        plans.cache._plans.clear()
        entry.lock.release()
        assert use.result(PATIENCE) == ["A"]
    assert plans.cache.made == 2


def test_a_plan_that_many_threads_want_is_made_by_one_and_none_waits_that_wants_another(streams: list[CudaStream]) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def make(key: str) -> str:
        if key == "n":
            begun.set()
            assert may_end.wait(PATIENCE)
        return key.upper()

    plans = Plans(3, make)
    plans.use("a", streams[0])
    with ThreadPoolExecutor(3) as pool:
        uses = [pool.submit(plans.use, "n", stream) for stream in (*streams, streams[0])]
        assert begun.wait(PATIENCE)
        assert plans.cache.is_ready("a")
        assert not plans.cache.is_ready("n")
        assert plans.use("a", streams[0]) == ["A"]
        may_end.set()
        assert [each.result(PATIENCE) for each in uses] == [["N"]] * 3
    assert plans.cache.made == 2


def test_a_plan_that_could_not_be_made_is_made_when_it_is_wanted_again(streams: list[CudaStream]) -> None:
    tries: list[str] = []

    def make(key: str) -> str:
        tries.append(key)
        if len(tries) == 1:
            raise MemoryError
        return key.upper()

    plans = Plans(3, make)
    with pytest.raises(MemoryError):
        plans.use("a", streams[0])
    assert plans.use("a", streams[0]) == ["A"]
    assert plans.cache.made == 1


def test_a_plan_that_a_graph_uses_stays(streams: list[CudaStream]) -> None:
    plans = Plans(1)
    plans.use("a", streams[0])
    streams[0].is_capturing = True
    assert plans.use("abc", streams[0]) == ["A", "B", "C"]
    streams[0].is_capturing = False
    plans.use("defa", streams[1])
    assert plans.cache.made == 6
    assert plans.destroyed == ["D", "E"]


def test_the_end_destroys_all_each_once(streams: list[CudaStream]) -> None:
    plans = Plans(2)
    streams[0].is_capturing = True
    plans.use("a", streams[0])
    streams[0].is_capturing = False
    plans.use("bc", streams[1])
    plans.cache.close()
    assert sorted(plans.destroyed) == ["A", "B", "C"]
    assert not plans.cache
