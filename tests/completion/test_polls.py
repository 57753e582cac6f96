"""A mark that is passed answers for the marks before it, so that of many short ops few are queried."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import registry
from accel.cpu.stream import CpuStream
from tests.late_backend import LateDevice, LateEvent, LateStream

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[LateEvent]:
    """Count the queries of marks of the device "late", whose own work ends at once.

    It runs on the loop's thread: on another one it would take as many polls as the loop makes until the system runs that thread.
    """
    queries: list[LateEvent] = []
    query = LateEvent.query

    def counting(event: LateEvent) -> bool:
        queries.append(event)
        return query(event)

    def at_once(stream: LateStream, work: Callable[[], object], cost: float = 0.0, keep: object = None) -> None:
        CpuStream.submit(stream, work, 0.0, keep)

    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")
    monkeypatch.setattr(LateDevice, "delay", 0.0)
    monkeypatch.setattr(LateStream, "submit", at_once)
    monkeypatch.setattr(LateEvent, "query", counting)
    return queries


async def test_of_many_tasks_marks_few_are_queried(queries: list[LateEvent]) -> None:
    rng = np.random.default_rng()
    values = rng.standard_normal((64, 8)).astype(np.float32)
    async with accel.System() as system:
        device = await system.open_device("late", streams=8)
        refs = [await device.put(row) for row in values]
        queries.clear()

        async def client(ref: accel.AccelRef) -> None:
            for _ in range(20):
                await device.elementwise.unary("relu", ref, out=ref)

        await asyncio.gather(*map(client, refs))
        found = len(queries)
        for ref, row in zip(refs, values, strict=True):
            np.testing.assert_array_equal(await device.get(ref), np.maximum(row, 0))
    assert found < 64 * 20 / 2, "not even one query for two ops"


async def test_ops_and_batches_from_many_tasks_end_when_they_are_over(queries: list[LateEvent]) -> None:
    """A batch is over with its last op: no earlier."""
    rng = np.random.default_rng()
    values = rng.standard_normal((32, 8)).astype(np.float32)
    async with accel.System() as system:
        device = await system.open_device("late", streams=1)
        refs = [await device.put(row) for row in values]
        queries.clear()

        async def client(ref: accel.AccelRef, row: np.ndarray[Any, Any], at: int) -> None:
            for _ in range(10):
                if at % 2:
                    await device.elementwise.unary("neg", ref, out=ref)
                else:
                    async with device.batch() as batch:
                        for _ in range(3):
                            batch.elementwise.unary("neg", ref, out=ref)
                row *= -1
                np.testing.assert_array_equal(await device.get(ref), row)

        await asyncio.gather(*[client(ref, row, at) for at, (ref, row) in enumerate(zip(refs, values, strict=True))])
    assert len(queries) < 32 * 10 * 2, "fewer queries than ops and batches"
