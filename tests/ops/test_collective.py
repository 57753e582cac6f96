"""Collectives as descriptions: what each rank reads, writes and makes, and what is refused."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from accel import AccelRef, DType, InvalidArgumentError, UnsupportedError
from accel.ops import collective

PLACE: dict[str, Any] = {"world": 1, "epoch": 1, "number": 5, "size": 4}


def ref(shape: tuple[int, ...], dtype: DType = DType.FLOAT32, number: int = 1) -> AccelRef:
    owner: Any = SimpleNamespace(dropped=deque())
    return AccelRef(owner, number, shape, dtype, 1)


def made(op: collective.Collective) -> tuple[int, ...] | None:
    creates = op.plan().creates
    return creates[0].shape if creates else None


def test_each_rank_makes_what_it_gets_and_the_group_is_told_of_one_part() -> None:
    x = ref((8, 3))
    cases: list[tuple[type[collective.Collective], dict[str, Any], tuple[int, ...] | None, tuple[int, ...] | None, int]] = [
        # class, fields, result of rank 1 (the root), result of rank 0, elements of the call
        (collective.AllReduce, {"source": x, "reduction": "max"}, (8, 3), (8, 3), 24),
        (collective.Reduce, {"source": x, "root": 1}, (8, 3), None, 24),
        (collective.ReduceScatter, {"source": x}, (2, 3), (2, 3), 6),
        (collective.AllGather, {"source": x}, (32, 3), (32, 3), 24),
        (collective.AllToAll, {"source": x}, (8, 3), (8, 3), 6),
        (collective.Gather, {"source": x, "root": 1}, (32, 3), None, 24),
        (collective.Send, {"source": x, "peer": 1}, None, None, 24),
        (collective.Receive, {"shape": (8, 3), "dtype": DType.FLOAT32, "peer": 1}, (8, 3), (8, 3), 24),
        (collective.Barrier, {}, None, None, 0),
    ]
    for kind, fields, of_root, of_other, elements in cases:
        ops = [kind(**PLACE, rank=rank, **fields) for rank in (1, 0)]
        assert [made(op) for op in ops] == [of_root, of_other], kind
        assert [op.call().elements for op in ops] == [elements, elements], kind
        assert ops[0].call().number == 5
    for kind, share in ((collective.Broadcast, (8, 3)), (collective.Scatter, (2, 3))):
        root = kind(**PLACE, rank=1, shape=(8, 3), dtype=DType.FLOAT32, source=x, root=1)
        other = kind(**PLACE, rank=0, shape=(8, 3), dtype=DType.FLOAT32, root=1)
        assert made(root) == made(other) == share
        assert (root.plan().reads, other.plan().reads) == ((x,), ())
        assert root.call() == other.call()
    assert made(collective.AllGather(**PLACE, rank=0, source=ref(()))) == (4,)


def test_results_may_be_in_place_only_where_every_group_can_do_that() -> None:
    x = ref((8, 3))
    assert collective.AllReduce(**PLACE, rank=0, source=x, out=x).plan().writes == (x,)
    with pytest.raises(InvalidArgumentError, match="out is source itself"):
        collective.AllToAll(**PLACE, rank=0, source=x, out=x).plan()
    with pytest.raises(InvalidArgumentError, match="the result is"):
        collective.AllGather(**PLACE, rank=0, source=x, out=ref((8, 3), number=2)).plan()


def test_wrong_operands_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be cut into 4 equal parts"):
        collective.ReduceScatter(**PLACE, rank=0, source=ref((6, 3))).plan()
    with pytest.raises(InvalidArgumentError, match="root is 4, and there are 4 ranks"):
        collective.Reduce(**PLACE, rank=0, source=ref((6, 3)), root=4).plan()
    with pytest.raises(InvalidArgumentError, match="op is 'mean'"):
        collective.AllReduce(**PLACE, rank=0, source=ref((6, 3)), reduction="mean").plan()  # type: ignore[arg-type]
    for dtype in (DType.BOOL, DType.INT16, DType.COMPLEX64):
        with pytest.raises(UnsupportedError, match="cannot be reduced over ranks"):
            collective.AllReduce(**PLACE, rank=0, source=ref((6, 3), dtype)).plan()
        assert made(collective.AllGather(**PLACE, rank=0, source=ref((6, 3), dtype))) == (24, 3)
