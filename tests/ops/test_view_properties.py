"""Chains of views against numpy's: the same bytes, or a refusal where numpy has no contiguous view either."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from accel import InvalidArgumentError
from accel.dtype import DType
from accel.ref import AccelRef, overlap

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)
DTYPES = st.sampled_from(["int8", "int16", "float32", "float64", "complex128", "bool"])
BOUND = st.none() | st.integers(-6, 6)
ENTRIES = st.integers(-4, 4) | st.builds(slice, BOUND, BOUND, st.sampled_from([None, 1, 1, 2, -1])) | st.just(Ellipsis)
INDICES = ENTRIES | st.lists(ENTRIES, max_size=4).map(tuple)
STEPS = st.lists(
    st.tuples(st.just("index"), INDICES)
    | st.tuples(st.just("reshape"), st.lists(st.integers(-1, 8), max_size=3).map(tuple))
    | st.tuples(st.just("ravel"), st.none())
    | st.tuples(st.just("view"), DTYPES),
    max_size=6,
)


class Owner:
    """A device, as far as refs need one."""

    name = "none"
    is_closing = False
    live_generation = 1

    def __init__(self) -> None:
        self.dropped: list[int] = []


def stepped(array: np.ndarray[Any, Any], kind: str, value: Any) -> np.ndarray[Any, Any] | None:
    """Return what numpy makes of a step; ``None`` where it cannot, or copies."""
    try:
        if kind == "index":
            entries = value if isinstance(value, tuple) else (value,)
            # With an ellipsis numpy gives a 0-d view, and not a scalar.
            found = array[entries if Ellipsis in entries else (*entries, Ellipsis)]
        elif kind == "view":
            found = array.view(DType.of(value).numpy)
        else:
            found = array.reshape(-1 if kind == "ravel" else value)
    except (IndexError, ValueError, TypeError):
        return None
    return found if np.shares_memory(found, array) or not found.size else None


def place(array: np.ndarray[Any, Any], base: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0] - base.__array_interface__["data"][0])


def aligned(nbytes: int) -> np.ndarray[Any, Any]:
    """Return bytes that start at a multiple of 256, as buffers do."""
    room = np.zeros(nbytes + 256, np.uint8)
    start = -room.__array_interface__["data"][0] % 256
    return room[start : start + nbytes]


def step(ref: AccelRef, kind: str, value: Any) -> AccelRef:
    if kind == "index":
        return ref[value]
    if kind == "reshape":
        return ref.reshape(value)
    return ref.ravel() if kind == "ravel" else ref.view(value)


@example((2,), "int8", [("index", np.s_[1:]), ("index", np.s_[:0])])  # nothing, in the middle
@example((2,), "int8", [("index", np.s_[::-1])])
@given(SHAPES, DTYPES, STEPS)
def test_chains_of_views_are_numpys(shape: tuple[int, ...], dtype: str, steps: list[tuple[str, Any]]) -> None:
    owner: Any = Owner()
    ref: AccelRef = AccelRef(owner, 1, shape, DType.of(dtype), 1)
    nbytes = ref.nbytes
    base = aligned(nbytes).view(ref.dtype.numpy).reshape(shape)
    array = base
    root = found = ref
    for kind, value in steps:
        expected = stepped(array, kind, value)
        try:
            found = step(ref, kind, value)
        except InvalidArgumentError:
            # A new element type may need an alignment that numpy does not ask for, and elements that are one run.
            misaligned = kind == "view" and (ref.offset % DType.of(value).itemsize != 0 or ref.is_strided)
            assert expected is None or misaligned or expected.size == 0, (kind, value, array.shape)
            continue
        assert expected is not None, (kind, value, array.shape, found)
        assert (found.shape, found.dtype.numpy, found.nbytes) == (expected.shape, expected.dtype, expected.nbytes)
        if expected.size:
            assert found.offset == place(expected, base)
            steps_there = [stride for length, stride in zip(expected.shape, expected.strides, strict=True) if length > 1]
            assert [n * found.dtype.itemsize for length, n in zip(found.shape, found.strides, strict=True) if length > 1] == steps_there
        assert found.is_strided or 0 <= found.offset <= nbytes - found.nbytes
        ref, array = found, expected
    assert overlap(ref, root) == bool(ref.nbytes) or ref is root
    ref, found = root, root
    del ref, found
    assert owner.dropped == []
    del root
    assert owner.dropped == [1]


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_overlap_is_having_elements_in_common(a: int, b: int, c: int, d: int) -> None:
    owner: Any = Owner()
    ref = AccelRef(owner, 1, (12,), DType.FLOAT32, 1)
    first, second = ref[a:b], ref[c:d]
    assert overlap(first, second) == bool(set(range(a, b)) & set(range(c, d)))
    assert not overlap(first, AccelRef(owner, 2, (12,), DType.FLOAT32, 1))
