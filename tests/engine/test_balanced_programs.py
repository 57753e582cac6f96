"""Random programs give on ``streams=8`` what they give in one stream, where work ends late, and in a child process too."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import registry
from tests.device_support import Array, bounded, task
from tests.late_backend import LateDevice

if TYPE_CHECKING:
    from collections.abc import Awaitable

pytestmark = pytest.mark.usefixtures("nothing_left")

COUNT, STEPS = 5, 150
KINDS = ("gemm", "binary", "unary", "scal", "rows", "put", "get", "sum", "renew", "free", "batch")


async def play(device: accel.Device, seed: int) -> None:
    """Send a program, each step from a task of its own, and compare all that is read with what numpy has."""
    rng = np.random.default_rng(seed)
    values: list[Array] = [rng.uniform(-1, 1, (6, 6)) for _ in range(COUNT)]
    refs = [await device.put(value) for value in values]
    calls: list[asyncio.Future[Any]] = []
    reads: list[tuple[asyncio.Future[Any], Array]] = []

    def send(awaitable: Awaitable[Any]) -> None:
        calls.append(task(awaitable))

    async def batch(a: accel.AccelRef, b: accel.AccelRef, out: accel.AccelRef) -> None:
        async with device.batch() as batch:
            batch.elementwise.unary("neg", batch.elementwise.binary("max", a, b), out=out)
            batch.blas.scal(out, 0.5)

    for _ in range(STEPS):
        kind = KINDS[rng.integers(len(KINDS))]
        i, j, k = (int(each) for each in rng.permutation(COUNT)[:3])
        if kind == "gemm":
            send(device.blas.gemm(refs[i], refs[j], alpha=0.1, out=refs[k]))
            values[k] = 0.1 * (values[i] @ values[j])
        elif kind == "binary":
            send(device.elementwise.binary("max", refs[i], refs[j], out=refs[k]))
            values[k] = np.maximum(values[i], values[j])
        elif kind == "unary":
            send(device.elementwise.unary("tanh", refs[i], out=refs[j]))
            values[j] = np.tanh(values[i])
        elif kind == "scal":
            send(device.blas.scal(refs[i], -0.75))
            values[i] = -0.75 * values[i]
        elif kind == "rows":  # views of one buffer, written and read
            send(device.elementwise.unary("abs", refs[i][:3], out=refs[i][3:]))
            values[i] = np.concatenate([values[i][:3], abs(values[i][:3])])
        elif kind == "put":
            values[i] = rng.uniform(-1, 1, (6, 6))
            send(device.put(values[i], out=refs[i]))
        elif kind == "get":
            reads.append((task(device.get(refs[i])), values[i]))
        elif kind == "sum":
            reads.append((task(total(device, refs[i])), values[i].sum()))
        elif kind == "renew":  # memory of a dropped ref is used again while ops still read it
            await asyncio.sleep(0)  # ops are sent at the first steps of their tasks
            values[i] = -values[j]
            refs[i] = await device.elementwise.unary("neg", refs[j])
        elif kind == "free":
            send(device.free(refs[i]))
            refs[i] = await device.put(values[i])
        else:
            send(batch(refs[i], refs[j], refs[k]))
            values[k] = -0.5 * np.maximum(values[i], values[j])
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    await bounded(asyncio.gather(*calls))
    for future, expected in reads:
        np.testing.assert_allclose(await bounded(future), expected, rtol=1e-9, atol=1e-12)
    for ref, value in zip(refs, values, strict=True):
        np.testing.assert_allclose(await device.get(ref), value, rtol=1e-9, atol=1e-12)


async def total(device: accel.Device, ref: accel.AccelRef) -> Any:
    return float(await device.get(await device.reduce("sum", ref)))


@pytest.mark.parametrize(("place", "streams"), [("inline", 8), ("inline", 2), ("inline", 1), ("late", 8), ("late", 2), ("process", 8)])
async def test_random_programs_agree_with_numpy(monkeypatch: pytest.MonkeyPatch, place: str, streams: int) -> None:
    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")
    monkeypatch.setattr(LateDevice, "delay", 2e-4)
    async with accel.System() as system:
        if place == "late":
            device = await system.open_device("late", streams=streams)
        else:
            device = await system.open_device("cpu", host="process" if place == "process" else "inline", streams=streams)
        for seed in range(4):
            await play(device, seed)
        if place == "late":
            assert all(lane.issued for lane in device._host.context.lanes.pool[:2]), "several streams were used"
