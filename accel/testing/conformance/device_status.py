"""Ops whose success only the device knows: awaited, in batches, replayed by graphs, and what reads their results."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from accel.dtype import DType
from accel.errors import AccelError, LinAlgError
from accel.ops import Family, FamilyOp, OpNamespace, Plan, Spec, Status, method
from accel.ops.base import operand, result_in
from accel.ref import AccelRef
from accel.testing.conformance.device_harness import bounded, failure, in_flight, opened, task, until
from accel.testing.faults import FaultPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.device import Device
    from accel.ops.family import KernelLane
    from accel.testing.conformance.harness import Array, Harness

__all__ = [
    "check_status_fails_an_op",
    "check_status_fails_the_rest_of_a_batch",
    "check_status_is_read_after_each_replay",
    "check_status_reaches_what_reads_the_result",
]

M = TypeVar("M")


def _error_of(info: Array) -> AccelError | None:
    return LinAlgError(f"the device says {info.tolist()}", info=tuple(info.tolist())) if info.any() else None


@dataclass(frozen=True, eq=False, slots=True)
class Guarded(FamilyOp):
    """Copy ``x``; the status is what ``info`` holds when the op runs. Unless ``whole``, the kernel leaves the last value of the status as it is."""

    library: ClassVar[str] = "conformance"
    kind: ClassVar[str] = "guarded"

    x: AccelRef
    info: AccelRef
    out: AccelRef | None = None
    whole: bool = False

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x, info = operand("x", self.x), operand("info", self.info, ndim=1)
        return Plan((x, info), *result_in(self.out, x.shape, x.dtype), status=Status(Spec(info.shape, DType.INT32), _error_of))


class ConformanceOps(OpNamespace[M]):
    """What the backend is checked by."""

    __slots__ = ()
    library: ClassVar[str] = "conformance"

    guarded = method(Guarded)


def _guarded(lane: KernelLane, op: Guarded, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    lane.stream.copy(outputs[0], inputs[0], op.x.nbytes)
    lane.stream.copy(outputs[-1], inputs[1], op.info.nbytes - (0 if op.whole else op.info.dtype.itemsize))


FAMILY = Family(ConformanceOps, {"guarded": _guarded})


async def _put_info(device: Device, *values: int) -> AccelRef:
    return await device.put(np.array((*values, -1), np.int32))


async def check_status_fails_an_op(harness: Harness) -> None:
    """Check that a status fails its op and no other, that its bytes are 0 before each op, and that nothing is left of it."""
    x = harness.random((5, 7), DType.FLOAT32)
    async with opened(harness) as device:
        family = device.family(ConformanceOps)
        a, good, bad = await device.put(x), await _put_info(device, 0, 0), await _put_info(device, 0, 3)
        await family.guarded(a, good)
        used = device.info().memory.used
        for _ in range(3):
            assert np.array_equal(await device.get(await bounded(family.guarded(a, good))), x)
            assert (await failure(family.guarded(a, good, whole=True), LinAlgError)).info == (0, 0, -1)
            error = await failure(family.guarded(a, bad), LinAlgError)
            assert isinstance(error, np.linalg.LinAlgError)
            assert (error.info, error.op, error.library, error.op_index, error.is_fault) == (
                (0, 3, 0),
                "guarded",
                "conformance",
                None,
                False,
            )
        several: list[Any] = await asyncio.gather(*(family.guarded(a, each) for each in (good, bad) * 40), return_exceptions=True)
        assert [isinstance(each, LinAlgError) for each in several] == [False, True] * 40
        assert np.array_equal(await device.get(several[-2]), x)
        del several
        await until("the memory of statuses is given back", lambda: device.info().memory.used <= used)
        assert device.generation == 1, "a status is no fault"


async def check_status_reaches_what_reads_the_result(harness: Harness) -> None:
    """Check that ops behind a failed one that read what it was to write fail too, until that is written anew."""
    x = harness.random(64, DType.FLOAT32)
    plan = FaultPlan().hang_at(1, op="guarded")
    async with opened(harness, plan, libraries=("elementwise", "blas")) as device:
        family = device.family(ConformanceOps)
        a, out, other, bad = await device.put(x), await device.zeros(64), await device.zeros(64), await _put_info(device, 1)
        sent: list[Any] = []
        for awaitable in (
            family.guarded(a, bad, out=out),
            device.elementwise.unary("neg", out),
            device.blas.axpy(out, other),
            device.get(other),
            device.get(a),
        ):
            sent.append(task(awaitable))
            await asyncio.sleep(0)
        await in_flight(device, len(sent))
        plan.release()
        ended: list[Any] = await bounded(asyncio.gather(*sent, return_exceptions=True))
        *failed, sound = ended
        assert [isinstance(each, LinAlgError) for each in failed] == [True] * 4, f"what was read is of a failed op: {failed!r}"
        assert np.array_equal(sound, x)
        await failure(device.get(out), LinAlgError)
        await device.copy(a, out)
        assert np.array_equal(await device.get(out), x), "a buffer that was written anew is sound again"


async def check_status_fails_the_rest_of_a_batch(harness: Harness) -> None:
    """Check that a batch ends with the error and index of its first failed op: what was before is as good as ever, what comes after is not."""
    x = harness.random(16, DType.FLOAT32)
    async with opened(harness) as device:
        a, older, good, bad = await device.put(x), await device.zeros(16), await _put_info(device, 0), await _put_info(device, 7)

        first = second = last = a

        async def run(info: AccelRef) -> None:
            nonlocal first, second, last
            async with device.batch() as batch:
                family = batch.family(ConformanceOps)
                first = batch.elementwise.unary("neg", a)
                second = family.guarded(first, good)
                family.guarded(a, info)
                last = batch.elementwise.unary("neg", a)
                batch.copy(a, older)

        await run(good)  # the first use of a library divides a batch, and what was not launched is not torn
        error = await failure(run(bad), LinAlgError)
        assert (error.op_index, error.op, error.info) == (2, "guarded", (7, 0))
        assert np.array_equal(await device.get(first), -x)
        assert np.array_equal(await device.get(second), -x)
        await failure(device.get(last), AccelError)
        await failure(device.get(older), AccelError)
        assert np.array_equal(await device.get(a), x)
        await device.copy(a, older)
        assert np.array_equal(await device.get(older), x)
        assert device.generation == 1


async def check_status_is_read_after_each_replay(harness: Harness) -> None:
    """Check that each replay of a graph ends by the statuses of its own run, also if another one follows at once."""
    x = harness.random(16, DType.FLOAT32)
    async with opened(harness) as device:
        a, info, other = await device.put(x), await _put_info(device, 0), await _put_info(device, 0, 0, 0)
        older = await device.zeros(16)
        used = [await device.full(16, -1, "int32") for _ in range(64)]  # the graph's statuses will lie in such memory
        used.clear()
        await device.get(a)
        async with device.graph() as graph:
            first = graph.family(ConformanceOps).guarded(a, other)
            second = graph.elementwise.unary("neg", first)
            made = graph.family(ConformanceOps).guarded(second, info)
            graph.copy(a, older)
        for values in ((0,), (4,), (0,), (9,)):
            await device.put(np.array((*values, -1), np.int32), out=info)
            if any(values):
                error = await failure(graph.replay(), LinAlgError)
                assert (error.op_index, error.op, error.library, error.info) == (2, "guarded", "conformance", (*values, 0))
                for ref in (first, second, made, older):  # a replay fails as a whole
                    await failure(device.get(ref), LinAlgError)
            else:
                await bounded(graph.replay())
                assert np.array_equal(await device.get(first), x)
                assert np.array_equal(await device.get(second), -x)
                assert np.array_equal(await device.get(made), -x)
                assert np.array_equal(await device.get(older), x)
        sent: list[Any] = []
        for value in range(8):  # a later replay must not answer for an earlier one
            sent += [task(device.put(np.array((value % 2, -1), np.int32), out=info)), task(graph.replay())]
            await asyncio.sleep(0)
        ended = await bounded(asyncio.gather(*sent, return_exceptions=True))
        assert [isinstance(each, LinAlgError) for each in ended[1::2]] == [False, True] * 4
        assert device.generation == 1
