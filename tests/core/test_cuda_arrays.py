"""Arrays in page-locked memory on their way into a stream, without a GPU: what was found of one is used for that one, once."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from accel.memory import HostArena
from accel_cuda.core import arrays
from accel_cuda.core.arrays import address_of
from accel_cuda.core.blocking import Blocking
from accel_cuda.core.transfers import STAGED, Transfers


@pytest.fixture
def transfers() -> Any:
    arena = HostArena(1 << 20, block_bytes=1 << 20)
    made = Transfers(arena)
    yield made
    made.close()
    arena.close()


class Compute:
    """Writes down what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


@pytest.fixture
def lane(transfers: Transfers) -> Any:
    return SimpleNamespace(compute=Compute(), stream=SimpleNamespace(transfers=transfers), device=None)


class Ranges:
    """Everything is page-locked, or nothing."""

    def __init__(self, *, covers: bool) -> None:
        self.asked: list[tuple[int, int]] = []
        self._covers = covers

    def covers(self, address: int, nbytes: int) -> bool:
        self.asked.append((address, nbytes))
        return self._covers


def locked() -> Any:
    return Blocking({}, {}, pinned=Ranges(covers=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.complex128, ml_dtypes.bfloat16, np.bool_])
@pytest.mark.parametrize("writable", [True, False])
def test_the_address_is_numpys(dtype: Any, writable: bool) -> None:
    for array in (np.zeros((3, 5), dtype), np.zeros(17, dtype)[3:9], np.zeros((), dtype), np.zeros((2, 3, 4), dtype)[1]):
        array.flags.writeable = writable
        assert address_of(array) == array.ctypes.data


def test_a_page_locked_array_is_copied_from_where_it_was_found(lane: Any) -> None:
    source, target = np.zeros(STAGED, np.uint16), np.zeros(STAGED, np.uint16)
    blocking = locked()
    put = SimpleNamespace(kind="put", source=source)
    assert not blocking.may_block(lane, put)
    arrays.put(lane, put, (), (0x1000,))
    get = SimpleNamespace(kind="get", destination=target)
    assert not blocking.may_block(lane, get)
    arrays.get(lane, get, (0x1000,), ())
    assert lane.compute.calls[0][:3] == ("copy_from_pinned", 0x1000, source.ctypes.data)
    assert lane.compute.calls[0][3] is source
    assert lane.compute.calls[1][:3] == ("copy_to_pinned", target.ctypes.data, 0x1000)
    assert lane.compute.calls[1][3] is target


@pytest.mark.parametrize("turn", [lambda a: a.T, lambda a: a[:, : STAGED // 2], lambda a: a[::2]])
def test_an_array_that_lies_in_pieces_is_not_copied_as_one(lane: Any, turn: Any) -> None:
    """The memory between its elements is page-locked too, and is not its own."""
    op = SimpleNamespace(kind="put", source=turn(np.zeros((4, STAGED), np.uint16)))
    assert not locked().may_block(lane, op)
    arrays.put(lane, op, (), (0x1000,))
    assert [name for name, *_ in lane.compute.calls] == ["copy_htod"]


def test_what_is_not_page_locked_any_more_is_not_copied_as_if_it_were(lane: Any) -> None:
    lane.device = SimpleNamespace(copiers=SimpleNamespace(rouse=lambda nbytes: None))
    op = SimpleNamespace(kind="put", source=np.zeros(STAGED, np.uint16))
    assert not locked().may_block(lane, op)  # and then the op was dropped
    assert Blocking({}, {}, pinned=Ranges(covers=False)).may_block(lane, op)  # type: ignore[arg-type]
    arrays.put(lane, op, (), (0x1000,))
    assert [name for name, *_ in lane.compute.calls] == ["copy_htod"]


def test_what_was_found_serves_that_array_alone_and_once(lane: Any) -> None:
    first, second = np.zeros(STAGED, np.uint16), np.zeros(STAGED, np.uint16)
    blocking = locked()
    ops = [SimpleNamespace(kind="put", source=array) for array in (first, second)]
    for op in ops:
        assert not blocking.may_block(lane, op)
    for op in (*ops, ops[1]):
        arrays.put(lane, op, (), (0x1000,))
    assert [name for name, *_ in lane.compute.calls] == ["copy_htod", "copy_htod", "copy_htod"], "the first copy has used up what was found"
    assert not blocking.may_block(lane, ops[1])
    for _ in range(2):
        arrays.put(lane, ops[1], (), (0x1000,))
    assert [name for name, *_ in lane.compute.calls[3:]] == ["copy_from_pinned", "copy_htod"]


def test_what_was_found_keeps_no_array_alive(lane: Any) -> None:
    blocking = locked()
    op = SimpleNamespace(kind="put", source=np.zeros(STAGED, np.uint16))
    assert not blocking.may_block(lane, op)
    is_there = weakref.ref(op.source)
    op.source = None  # the op was dropped
    assert is_there() is None
    other = np.zeros(STAGED, np.uint16)
    assert lane.stream.transfers.taken_address(other) == 0


def test_an_ordinary_array_is_found_nowhere(lane: Any) -> None:
    woken: list[int] = []
    lane.device = SimpleNamespace(copiers=SimpleNamespace(rouse=woken.append))
    source = np.zeros(STAGED, np.uint16)
    op = SimpleNamespace(kind="put", source=source)
    assert Blocking({}, {}, pinned=Ranges(covers=False)).may_block(lane, op)  # type: ignore[arg-type]
    assert woken == [source.nbytes]
    arrays.put(lane, op, (), (0x1000,))
    assert [name for name, *_ in lane.compute.calls] == ["copy_htod"]
