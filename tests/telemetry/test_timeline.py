"""A profile of a device: a file that Perfetto shows, with what was in the queue, launched and on the device."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.patterns import DynamicBatcher
from accel.telemetry.probe import DeviceWork
from accel.telemetry.timeline import Timeline, trace_of
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, opened

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def spans(path: Path, category: str) -> list[dict[str, Any]]:
    return [each for each in json.loads(path.read_text())["traceEvents"] if each.get("cat") == category]


def rows(trace: dict[str, Any]) -> list[str]:
    return [each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "thread_name"]


def done(timeline: Timeline, queued: float, sent: float, ended: float, seconds: float | None, device: str = "cpu:0") -> None:
    """Tell a timeline of an op."""
    work = DeviceWork("gemm", (("blas", "gemm"),), None, is_timed=True)
    work.device, work.generation, work.device_seconds = device, 1, seconds
    work.queued_at, work.sent_at, work.ended_at = queued, sent, ended
    timeline.op_ended(work)


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_ops_batches_and_what_a_service_answers_are_in_the_file(host: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "trace.json"
    async with opened(host=host) as device:
        a = await device.put(rng.standard_normal((64, 64), np.float32))

        async def handler(items: Sequence[float]) -> list[float]:
            await device.elementwise.unary("relu", a)
            return [item + 1 for item in items]

        await device.blas.gemm(a, a)
        async with device.profile(path):
            await asyncio.gather(*[device.blas.gemm(a, a) for _ in range(4)])
            async with device.batch(name="step") as batch:
                batch.blas.gemm(a, a)
                batch.elementwise.unary("relu", a)
            async with DynamicBatcher(handler, device=device) as batcher:
                assert await asyncio.gather(*[batcher.submit(n) for n in range(3)]) == [1, 2, 3]
        await device.blas.gemm(a, a)
    on_device = spans(path, "device")
    assert [each["name"] for each in on_device].count("gemm") == 4, "only of the block"
    (step,) = [each for each in on_device if each["name"] == "step"]
    assert step["args"]["ops"] == ["blas.gemm", "elementwise.unary"]
    assert step["args"]["device_seconds"] > 0
    for each in on_device:
        assert each["ph"] == "X"
        assert each["dur"] > 0
        assert each["ts"] > 0
    (batch_span,) = spans(path, "batches")
    assert batch_span["args"]["items"] == 3
    assert batch_span["args"]["requests"] == [1, 2, 3]
    assert json.loads(path.read_text())["otherData"] == {"device": "cpu:0", "dropped": 0}


def test_the_spans_of_an_op_follow_each_other_and_the_device_has_what_was_measured() -> None:
    timeline = Timeline("cpu:0", 10)
    began = timeline.began_at
    done(timeline, began + 1, began + 2, began + 5, 1.5)
    done(timeline, began + 1, began + 2, began + 5, 0.5, device="cpu:1")
    timed = {each["cat"]: (each["ts"], each["dur"]) for each in trace_of([timeline])["traceEvents"] if "cat" in each}
    assert timed == {"queue": (1e6, 1e6), "launch": (2e6, 1.5e6), "device": (3.5e6, 1.5e6)}


def test_what_was_not_measured_is_on_the_device_since_it_was_sent() -> None:
    timeline = Timeline("cpu:0", 10)
    began = timeline.began_at
    done(timeline, began + 1, began + 2, began + 5, None)
    done(timeline, began + 6, began + 6, began + 7, 60.0)  # a clock that is wrong
    timed = [(each["cat"], each["ts"], each["dur"]) for each in trace_of([timeline])["traceEvents"] if "cat" in each]
    assert timed == [("queue", 1e6, 1e6), ("device", 2e6, 3e6), ("device", 6e6, 1e6)]


def test_spans_that_overlap_have_rows_of_their_own() -> None:
    timeline = Timeline("cpu:0", 10)
    began = timeline.began_at
    for start in (0, 1, 3):
        done(timeline, began + start, began + start, began + start + 2, 2.0)
    trace = trace_of([timeline])
    assert rows(trace) == ["device 1", "device 2"]
    assert [each["tid"] % 1000 for each in trace["traceEvents"] if each.get("cat") == "device"] == [0, 1, 0]


def test_the_newest_are_kept_and_the_others_counted() -> None:
    timeline = Timeline("cpu:0", 2)
    began = timeline.began_at
    for start in range(5):
        done(timeline, began + start, began + start, began + start + 1, 1.0)
    trace = trace_of([timeline])
    assert [each["ts"] for each in trace["traceEvents"] if "ts" in each] == [3e6, 4e6]
    assert trace["otherData"]["dropped"] == 3


async def test_a_fault_is_a_mark_and_the_file_is_written_whatever_the_block_raises(tmp_path: Path) -> None:
    path, plan = tmp_path / "trace.json", FaultPlan()
    async with opened(plan) as device:
        with pytest.raises(accel.ContextPoisonedError):
            async with device.profile(path):
                a = await device.zeros((4, 4))
                plan.poison_at(plan.count + 1)
                await bounded(device.blas.gemm(a, a))
        assert not device.probes.all
    (mark,) = spans(path, "faults")
    assert (mark["ph"], mark["args"]["generation"]) == ("i", 1)
    assert [each["name"] for each in spans(path, "device") if each["args"].get("error")] == ["gemm"]


@pytest.mark.parametrize("path", ["missing/trace.json", "."])
async def test_a_file_that_cannot_be_written_is_refused_before_the_block(path: str, tmp_path: Path) -> None:
    async with opened() as device:
        error = await failure(device.profile(tmp_path / path).__aenter__(), accel.InvalidArgumentError)
        assert "cannot be written" in error.message
        await failure(device.profile(3).__aenter__(), accel.InvalidArgumentError)  # type: ignore[arg-type]
        await failure(device.profile(tmp_path / "x", limit=0).__aenter__(), accel.InvalidArgumentError)
        assert not device.probes.all
