"""Fingerprints of items: equal for equal content, different for any other, and none for what cannot be told."""

from __future__ import annotations

import collections
import gc
import subprocess
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import accel
from accel.patterns.poison_memory import PoisonMemory, content_fingerprint

MIB = 1 << 20

DIFFERENT: list[Any] = [
    None,
    0,
    1,
    -1,
    256,
    True,
    False,
    0.0,
    -0.0,
    1.0,
    1j,
    "",
    "1",
    b"",
    b"1",
    "b'1'",
    (),
    [],
    {},
    [[]],
    ((),),
    (1, 2),
    [1, 2],
    [2, 1],
    [12],
    ["1", "2"],
    ["12"],
    ["1", "2", ""],
    [["1"], "2"],
    {"a": 1},
    {"a": 2},
    {"b": 1},
    {"a": 1, "b": 2},
    {"a": {"b": 2}},
    ["a", 1],
    [("a", 1)],
    float("nan"),
    float("inf"),
    1 << 200,
    np.float32(1.0),
    np.float64(1.0),
    np.int64(1),
    np.array(1),
    np.array([1]),
    np.array([[1]]),
    np.array([1], np.int32),
    np.array([1], ">i8"),
    np.array([1], np.uint64),
    np.array([1.0]),
    np.array([1.0], ml_dtypes.bfloat16),
    np.array([1.0], np.float16),
    np.array([16256], np.uint16),  # the bits of 1 in bfloat16
    np.array([True]),
    np.array(["1"]),
    np.array([b"1"]),
    np.zeros((2, 3)),
    np.zeros((3, 2)),
    np.zeros((0, 3)),
    np.zeros(0),
    np.array([1], "M8[s]"),
    np.array([1], "M8[ms]"),
    np.array([(1, 2)], "i4,i4"),
    np.array([(1, 2)], [("x", "i4"), ("y", "i4")]),
]


def test_different_items_have_different_fingerprints() -> None:
    found = {content_fingerprint(item) for item in DIFFERENT}
    assert None not in found
    assert len(found) == len(DIFFERENT)
    assert {len(each) for each in found if each} == {16}


def test_equal_items_have_one(rng: np.random.Generator) -> None:
    array = rng.standard_normal((4, 6))
    wide = np.zeros((8, 12))
    wide[::2, ::2] = array
    for same in (array.copy(), np.asfortranarray(array), wide[::2, ::2], array[::-1, ::-1].copy()[::-1, ::-1]):
        assert content_fingerprint(same) == content_fingerprint(array)
    changed = array.copy()
    changed[3, 5] = np.nextafter(changed[3, 5], np.inf)
    assert content_fingerprint(changed) != content_fingerprint(array)
    first, second = {"a": array, "b": [1, "x"]}, {"b": [1, "x"], "a": array.copy()}
    assert content_fingerprint(first) == content_fingerprint(second), "whatever the order of the keys"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.binary(max_size=3),
    lambda children: (
        st.lists(children, max_size=3) | st.tuples(children, children) | st.dictionaries(st.text(max_size=2), children, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(VALUES, VALUES)
def test_they_are_equal_exactly_for_equal_content(first: Any, second: Any) -> None:
    assert (content_fingerprint(first) == content_fingerprint(second)) == (canonical(first) == canonical(second))


def canonical(value: Any) -> str:
    """Return what a value is, with types and signs."""
    if isinstance(value, dict):
        return repr({key: canonical(value[key]) for key in sorted(value)})
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}{[canonical(each) for each in value]}"
    return repr(value)


def test_they_do_not_depend_on_the_process() -> None:
    item = {"b": ("text", 2.5, b"x"), "a": [None, True]}
    code = f"from accel.patterns.poison_memory import content_fingerprint as f; print(f({item!r}).hex())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    found = content_fingerprint(item)
    assert found is not None
    assert done.stdout.strip() == found.hex()


def circle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


Point = collections.namedtuple("Point", "x y")  # noqa: PYI024 - a class of a user's


@pytest.mark.parametrize(
    "item",
    [
        object(),
        [1, object()],
        {"a": {1, 2}},
        {1: 2},
        {1, 2},
        Point(1, 2),
        collections.OrderedDict(a=1),
        np.array([object()]),
        np.ma.masked_array([1, 2], [True, False]),
        circle(),
        np.zeros(MIB + 1, np.uint8),
        bytes(MIB + 1),
        [0] * MIB,
        {str(n): 0 for n in range(1 << 13)},
        [np.zeros(MIB // 2), np.zeros(MIB // 2)],
        memoryview(b"x"),
        np.zeros(2, "V0"),
    ],
    ids=lambda item: type(item).__name__,
)
def test_what_is_too_large_or_unknown_has_none(item: Any) -> None:
    assert content_fingerprint(item) is None


def test_what_is_just_small_enough_has_one() -> None:
    assert content_fingerprint(np.zeros(MIB - 1024, np.uint8)) is not None
    assert content_fingerprint([0] * 4096) is not None


class Thing:
    """An item of a user's class."""


def test_what_is_remembered_keeps_neither_the_item_nor_its_batch() -> None:
    memory = PoisonMemory(4, lambda item: 7)
    item, batch = Thing(), Thing()
    gone = [weakref.ref(item), weakref.ref(batch)]
    error = accel.PoisonedInputError("poison", item=item, code=700)
    error.__cause__ = accel.ContextPoisonedError("of a batch", suspects=("gemm",))
    error.__cause__.batch = batch  # type: ignore[attr-defined]
    memory.remember(error)
    del item, batch, error
    gc.collect()
    assert [each() for each in gone] == [None, None]
    other = Thing()
    found = memory.recall_by(memory.key(other), other)
    assert found is not None
    assert (found.item, found.code, found.remembered) == (other, 700, True)
    assert found is not memory.recall_by(memory.key(other), other)


def test_a_memory_for_nothing_makes_no_fingerprints() -> None:
    asked: list[object] = []
    nothing = PoisonMemory(0, asked.append)
    nothing.remember(accel.PoisonedInputError("poison", item="item"))
    assert (len(nothing.errors), asked) == (0, [])
