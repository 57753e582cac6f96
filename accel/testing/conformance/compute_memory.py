"""Memory and copies of a compute interface, and the order of its calls."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from accel.dtype import DType
from accel.enums import BinaryOp, UnaryOp
from accel.errors import InvalidArgumentError
from accel.testing.conformance.harness import poison

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.testing.conformance.harness import Harness

__all__ = [
    "check_allocations_are_aligned_and_apart",
    "check_calls_run_in_order",
    "check_copies_keep_their_memory_alive",
    "check_copies_refuse_other_memory",
    "check_copies_round_trip",
    "check_memory_freed_with_work_in_flight_is_used_to_its_end",
    "check_starts_initialized",
]

_F32 = DType.FLOAT32


async def check_starts_initialized(harness: Harness) -> None:
    """Check that a device's compute interface is ready, and that ``init`` may be called again."""
    with harness.open_compute() as compute:
        assert compute.is_initialized, "init() left the interface unready"
        compute.init()
        assert compute.is_initialized, "init() called again made the interface unready"
        assert compute.name == harness.backend.name, f"the interface is called {compute.name!r}, its backend {harness.backend.name!r}"


async def check_allocations_are_aligned_and_apart(harness: Harness) -> None:
    """Check that addresses are multiples of 256, and that live allocations do not overlap."""
    with harness.open_compute() as compute:
        sizes = [0, 1, 255, 256, 257, 4097, 1 << 20]
        ranges = sorted((compute.alloc(size), size) for size in sizes)
        assert all(pointer > 0 and pointer % 256 == 0 for pointer, _ in ranges), f"not aligned: {ranges}"
        for (pointer, size), (following, _) in itertools.pairwise(ranges):
            assert pointer + size <= following, f"overlap: {ranges}"
        for pointer, _ in ranges:
            compute.free(pointer)
        compute.free(0)
        compute.synchronize()


async def check_copies_round_trip(harness: Harness) -> None:
    """Check that what is copied to the device comes back, for every dtype and many sizes."""
    with harness.open_compute() as compute:
        for dtype in DType:
            for n in (0, 1, 7, 1000, 300_001):
                with harness.case(compute, f"copy of {n} {dtype.value}") as case:
                    data = harness.rng.bytes(n * dtype.itemsize)
                    pointer = case.put(np.frombuffer(data, np.uint8))
                    back = case.get(pointer, n * dtype.itemsize, DType.UINT8)
                    case.require(back.tobytes() == data, "other bytes came back")


async def check_copies_keep_their_memory_alive(harness: Harness) -> None:
    """Check that the caller may drop the source of a copy at once."""
    with harness.open_compute() as compute:
        n = 1 << 18
        with harness.case(compute, "copy from dropped memory") as case:
            pointers, expected = [], []
            for _ in range(8):
                expected.append(harness.rng.bytes(n))
                pointers.append(case.poisoned(n, DType.UINT8))
                compute.copy_htod(pointers[-1], memoryview(bytearray(expected[-1])))
            for pointer, data in zip(pointers, expected, strict=True):
                case.require(case.get(pointer, n, DType.UINT8).tobytes() == data, "other bytes arrived")


async def check_copies_refuse_other_memory(harness: Harness) -> None:
    """Check that host memory that is not contiguous, or cannot be written, is refused."""
    with harness.open_compute() as compute, harness.case(compute, "copy of unfit memory") as case:
        pointer = case.poisoned(8, DType.UINT8)
        scattered = memoryview(bytearray(16))[::2]
        refused: list[tuple[str, Callable[[], None]]] = [
            ("a scattered source", lambda: compute.copy_htod(pointer, scattered)),
            ("a scattered destination", lambda: compute.copy_dtoh(scattered, pointer)),
            ("a read-only destination", lambda: compute.copy_dtoh(memoryview(bytes(8)), pointer)),
        ]
        for name, call in refused:
            try:
                call()
            except InvalidArgumentError:
                continue
            case.require(False, f"{name} was not refused")
        case.same(case.get(pointer, 8, DType.UINT8), poison(8, DType.UINT8))


async def check_calls_run_in_order(harness: Harness) -> None:
    """Check that calls see the results of those before them without a synchronization in between, small and large ones mixed."""
    with harness.open_compute() as compute:
        n = 1 << 18
        with harness.case(compute, "a chain of calls") as case:
            start = harness.random(n, DType.INT32).astype(np.int64)
            x, one = case.put(start), case.put(np.ones(n, np.int64))
            y = case.poisoned(n, DType.INT64)
            for _ in range(10):
                compute.binary(BinaryOp.ADD, x, one, y, n, dtype=DType.INT64)
                compute.binary(BinaryOp.ADD, y, one, x, 5, dtype=DType.INT64)
                compute.unary(UnaryOp.NEG, y, y, n, dtype=DType.INT64)
                compute.unary(UnaryOp.NEG, y, y, 5, dtype=DType.INT64)
                compute.unary(UnaryOp.NEG, y, x, n, dtype=DType.INT64)
            expected = start.copy()
            for _ in range(10):
                y_values = expected + 1
                y_values = -y_values
                y_values[:5] = -y_values[:5]
                expected = -y_values
            case.same(case.get(x, n, DType.INT64), expected)


async def check_memory_freed_with_work_in_flight_is_used_to_its_end(harness: Harness) -> None:
    """Check that ``free`` takes effect in stream order: calls enqueued before it still have their memory."""
    with harness.open_compute() as compute:
        n = 1 << 18
        with harness.case(compute, "free behind a call") as case:
            values = harness.random(n, _F32)
            out = case.poisoned(n, _F32)
            temporary = compute.alloc(n * 4)
            compute.copy_htod(temporary, values.view(np.uint8).data)
            for _ in range(4):
                compute.unary(UnaryOp.NEG, temporary, temporary, n)
            compute.unary(UnaryOp.ABS, temporary, out, n)
            compute.free(temporary)
            again = compute.alloc(n * 4)
            compute.copy_htod(again, np.full(n, np.nan, np.float32).view(np.uint8).data)
            compute.free(again)
            case.same(case.get(out, n, _F32), np.abs(values))
