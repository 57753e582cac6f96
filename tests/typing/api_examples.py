"""Typed examples of the public interface: read by mypy, never run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, assert_type

import numpy as np

import accel
from accel.ops import Plan, Spec


@dataclass(frozen=True, eq=False, slots=True)
class Negate(accel.KernelOp):
    """An op with one result."""

    x: accel.AccelRef

    def plan(self) -> Plan:
        """One."""
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


@dataclass(frozen=True, eq=False, slots=True)
class Halves(accel.KernelOp[tuple[accel.AccelRef, accel.AccelRef]]):
    """An op with two results."""

    x: accel.AccelRef

    def plan(self) -> Plan:
        """Two."""
        half = Spec((self.x.shape[0] // 2,), self.x.dtype)
        return Plan((self.x,), (), (half, half))


class Adder(accel.Actor[int, str]):
    """An actor of ints that answers with text."""

    def __init__(self, start: int) -> None:
        self.total = start

    async def receive(self, message: int, context: accel.ActorContext) -> str:
        """Add."""
        self.total += message
        return str(self.total)


async def use_a_device(system: accel.System) -> None:
    """What a device's methods give."""
    device = await system.open_device("cpu", libraries=["blas"], streams=2, overload="reject", faults=accel.testing.FaultPlan())
    assert_type(device, accel.Device)
    a = await device.put([1.0, 2.0], timeout=1.0)
    assert_type(a, accel.AccelRef)
    call: Coroutine[Any, Any, accel.AccelRef] = device.blas.gemm(a, a)
    assert_type(await call, accel.AccelRef)
    assert_type(await asyncio.create_task(device.blas.gemm(a, a)), accel.AccelRef)
    async with asyncio.TaskGroup() as group:
        assert_type(group.create_task(device.reduce("sum", a)), asyncio.Task[accel.AccelRef])
    assert_type(await device.blas.gemm(a, a, alpha=2.0, transpose_a=True), accel.AccelRef)
    assert_type(await device.linalg.matmul(a, a, bias=a, activation="gelu", aux=a, out_dtype="float32"), accel.AccelRef)
    assert_type(await device.elementwise.unary(accel.UnaryOp.RELU, a), accel.AccelRef)
    assert_type(await device.reduce("sum", a, axis=0, keepdims=True), accel.AccelRef)
    assert_type(await device.sort.topk(a, 2), tuple[accel.AccelRef, accel.AccelRef])
    assert_type(await device.sort.unique(a), accel.AccelRef)
    assert_type(await device.sort.nonzero(a, size=9), tuple[accel.AccelRef, ...])
    assert_type(await device.dnn.conv2d(a, a, stride=(1, 2)), accel.AccelRef)
    assert_type(await device.get(a), np.ndarray[Any, Any])
    assert_type(await device.zeros((2, 3), "float16"), accel.AccelRef)
    assert_type(await device.free(a), None)
    assert_type(device.generations(), AsyncIterator[int])
    async for generation in device.generations():
        assert_type(generation, int)
    assert_type(device.info().memory.limit, int | None)
    assert_type(device.health().is_ready, bool)
    assert_type(device.state, accel.DeviceState)
    assert_type(a.dtype, accel.DType)
    assert_type(a.shape, tuple[int, ...])
    assert_type(device.resolve(a.token()), accel.AccelRef)


async def use_own_ops(device: accel.Device, a: accel.AccelRef) -> None:
    """What an op gives is in its type."""
    assert_type(await device.run(Negate(a)), accel.AccelRef)
    first, second = await device.run(Halves(a), timeout=1.0)
    assert_type(first, accel.AccelRef)
    async with device.batch() as batch:
        assert_type(batch.run(Negate(second)), accel.AccelRef)
        first, second = batch.run(Halves(a))
        assert_type(batch.blas.gemm(first, second), accel.AccelRef)
    async with device.graph() as graph:
        assert_type(graph.run(Halves(a)), tuple[accel.AccelRef, accel.AccelRef])


async def use_a_batch(device: accel.Device, a: accel.AccelRef) -> None:
    """In a batch the same methods give refs at once."""
    async with device.batch(timeout=1.0) as batch:
        assert_type(batch, accel.Batch)
        h = batch.blas.gemm(a, a)
        assert_type(h, accel.AccelRef)
        assert_type(batch.elementwise.binary("add", h, h), accel.AccelRef)
        assert_type(batch.reduce("max", h), accel.AccelRef)
        assert_type(batch.sort.unique(h, size=9), tuple[accel.AccelRef, accel.AccelRef])
        assert_type(batch.put(np.zeros(3)), accel.AccelRef)
        assert_type(len(batch), int)


async def use_actors(system: accel.System) -> None:
    """A ref knows what its actor takes and gives."""
    ref = await system.spawn(Adder, 3, name="adder", mailbox_size=8)
    assert_type(ref, accel.ActorRef[int, str])
    assert_type(await ref.ask(4, timeout=1.0), str)
    assert_type(await ref.send(4), None)
    assert_type(ref.tell(4), None)
