"""The ``streams=`` option: a number, and what is prepared in which stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.cpu import backend
from accel.cpu.backend import CpuDevice
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, in_flight, opened, task

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("former", ["balanced", "balanced(4)", "per_actor", "single", "pooled(2)"])
async def test_the_former_names_are_refused_with_what_to_write(former: Any) -> None:
    async with accel.System() as system:
        error = await failure(system.open_device("cpu", streams=former), accel.InvalidArgumentError)
        assert error.remedy is not None
        assert "number of streams" in error.remedy


@pytest.mark.parametrize("streams", [8, 2, 1])
async def test_each_named_library_is_prepared_in_the_streams_that_it_runs_in(monkeypatch: pytest.MonkeyPatch, streams: int) -> None:
    prepared: list[tuple[str, Any]] = []

    class Preparing(CpuDevice):  # a class of its own: what a class offers is remembered
        def prepare(self, library: str, stream: Any) -> None:
            prepared.append((library, stream))

    monkeypatch.setattr(backend, "CpuDevice", Preparing)
    libraries = ("blas", "elementwise", "reduce", "fft")
    async with opened(streams=streams, libraries=libraries) as device:
        pool = device._host.context.lanes.pool
        assert len(pool) == streams
        assert prepared == [(library, lane.stream) for library in libraries for lane in pool]
        prepared.clear()
        await device.rng.normal(3)
        assert not prepared, "others are made at their first use"


@pytest.mark.parametrize("kind", ["put", "get", "gemm"])
async def test_a_put_a_get_and_compute_overlap(kind: str) -> None:
    """Each in turn hangs in its stream, and the other two go on."""
    plan = FaultPlan().hang_at(2, op=kind)
    async with opened(plan) as device:
        x = np.eye(4)
        a = await device.put(x)
        np.testing.assert_array_equal(await device.get(await device.blas.gemm(a, a)), x)
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "put": lambda: device.put(x),
            "get": lambda: device.get(a),
            "gemm": lambda: device.blas.gemm(a, a),
        }
        hanging = task(calls[kind]())
        await in_flight(device, 1)
        for other in calls.keys() - {kind}:
            await bounded(calls[other]())
        assert not hanging.done()
        plan.release()
        await hanging


async def test_with_one_stream_everything_waits_for_what_was_sent_before() -> None:
    plan = FaultPlan().hang_at(1, op="get")
    async with opened(plan, streams=1) as device:
        a = await device.put(np.eye(4))
        hanging = task(device.get(a))
        await in_flight(device, 1)
        sent = [task(device.put(np.eye(4))), task(device.blas.gemm(a, a))]
        await in_flight(device, 3)
        assert not any(each.done() for each in sent)
        plan.release()
        await asyncio.gather(hanging, *sent)
