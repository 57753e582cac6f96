"""Arguments of launches: every number that a parameter can hold arrives bit for bit, and every other is refused."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel import DType, InvalidArgumentError
from accel.ops import CompiledKernel, KernelLayout, Launch

INTEGERS = [dtype for dtype in DType if dtype.is_integer]
WITHOUT_INFINITY = (DType.FLOAT8_E4M3FN, DType.FLOAT4_E2M1FN)
FLOATS = [dtype for dtype in DType if dtype.is_floating]
OPEN = (2**31 - 1, 65535, 65535)
anything = st.one_of(
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.complex_numbers(),
    st.lists(st.integers()),
)


def kernel(*parameters: str, sizes: tuple[int, ...] = (), max_threads: int = 1024) -> CompiledKernel:
    layout = KernelLayout(sizes, max_threads, (1024, 1024, 64), OPEN, 0) if sizes else None
    return CompiledKernel("source", "name", parameters=parameters or None, layout=layout)


def words(made: CompiledKernel, value: object) -> bytes:
    op = Launch(made, 1, 1, (value,))
    op.plan()
    return b"".join(struct.pack("<Q", word) for word in op.slots if word is not None)


@given(st.sampled_from(INTEGERS), st.integers(-(1 << 65), 1 << 65))
def test_integers_arrive_as_they_are_or_are_refused(dtype: DType, value: int) -> None:
    limits = np.iinfo(dtype.numpy)
    if limits.min <= value <= limits.max:
        data = words(kernel(dtype.value), value)
        assert len(data) == 8
        assert np.frombuffer(data[: dtype.itemsize], dtype.numpy)[0] == value
    else:
        with pytest.raises(InvalidArgumentError, match="cannot hold"):
            words(kernel(dtype.value), value)


@given(st.sampled_from(FLOATS), st.one_of(st.floats(), st.integers(-(1 << 60), 1 << 60)))
def test_floats_are_rounded_or_refused(dtype: DType, value: float) -> None:
    with np.errstate(all="ignore"):
        expected = np.asarray(float(value)).astype(dtype.numpy)
        overflows = np.isfinite(float(value)) and not np.isfinite(expected.astype(np.float64))
    has_no_such = dtype in WITHOUT_INFINITY and (np.isinf(float(value)) or (dtype is DType.FLOAT4_E2M1FN and not abs(value) <= 6))
    if overflows or has_no_such:
        with pytest.raises(InvalidArgumentError, match="cannot hold"):
            words(kernel(dtype.value), value)
        return
    got = np.frombuffer(words(kernel(dtype.value), value)[: dtype.itemsize], dtype.numpy)[0]
    assert got == expected or (np.isnan(got.astype(np.float64)) and np.isnan(expected.astype(np.float64)))


@given(st.complex_numbers(max_magnitude=1e30))
def test_complex_numbers_take_as_many_words_as_they_need(value: complex) -> None:
    assert np.frombuffer(words(kernel("complex128"), value), np.complex128)[0] == value
    assert np.frombuffer(words(kernel("complex64"), value), np.complex64)[0] == np.complex64(value)


@given(st.sampled_from([1, 2, 4, 8, 16]), anything)
def test_untyped_numbers_have_the_parameters_size_or_are_refused(size: int, value: object) -> None:
    made = kernel(sizes=(size,))
    own = {bool: 1, int: 8, float: 8}.get(type(value))
    fits = own == size and not (type(value) is int and not -(1 << 63) <= value < 1 << 64)
    if not fits:
        with pytest.raises(InvalidArgumentError):
            words(made, value)
        return
    data = words(made, value)
    if isinstance(value, float):
        assert data == struct.pack("<d", value)
    else:
        assert isinstance(value, int)
        assert int.from_bytes(data, "little") == value % (1 << 64)


@pytest.mark.parametrize(
    "scalar", [np.float32(1.5), np.int8(-3), np.complex128(1 - 2j), ml_dtypes.bfloat16(2.5), np.bool_(True), np.uint64(2**64 - 1)]
)
def test_untyped_numpy_scalars_arrive_bit_for_bit(scalar: np.generic) -> None:
    data = words(kernel(sizes=(scalar.dtype.itemsize,)), scalar)
    assert data[: scalar.dtype.itemsize] == scalar.tobytes()
    assert not any(data[scalar.dtype.itemsize :])
    with pytest.raises(InvalidArgumentError):
        words(kernel(sizes=(scalar.dtype.itemsize + 1,)), scalar)


def test_the_remedy_names_the_scalar_that_fits() -> None:
    for size, value, words_of in (
        (4, 0.5, "np.float32"),
        (2, 0.5, "np.float16"),
        (4, 3, "np.int32"),
        (1, 3, "np.int8"),
        (8, np.float32(1), "np.float64"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            words(kernel(sizes=(size,)), value)
        assert words_of in caught.value.remedy


dimension = st.one_of(
    st.integers(-2, 2000),
    st.lists(st.integers(-1, 1100), max_size=4).map(tuple),
    st.floats(allow_nan=False),
    st.none(),
    st.text(max_size=2),
)


@given(dimension, dimension)
def test_grids_and_blocks_are_what_the_device_takes_or_are_refused(grid: object, block: object) -> None:
    def good(value: object, limits: tuple[int, int, int]) -> bool:
        numbers = (value,) if isinstance(value, int) else value
        return (
            isinstance(numbers, tuple)
            and 1 <= len(numbers) <= 3
            and all(isinstance(each, int) and 1 <= each <= limit for each, limit in zip(numbers, limits, strict=False))
        )

    fits = good(grid, OPEN) and good(block, (1024, 1024, 64)) and int(np.prod(block)) <= 512  # type: ignore[call-overload]
    op = Launch(kernel(sizes=(8,), max_threads=512), grid, block, (1,))  # type: ignore[arg-type]
    if not fits:
        with pytest.raises(InvalidArgumentError):
            op.plan()
        return
    op.plan()
    assert op.shape[:3] == (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3]
    assert op.shape[3:6] == (*(block if isinstance(block, tuple) else (block,)), 1, 1)[:3]
