"""A lane, where the driver refuses to mark the end of work, or to wait for that of another stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel.cpu.stream import CpuStream
from accel.testing import FaultPlan
from tests.device_support import failure, in_flight, opened, task, turns

if TYPE_CHECKING:
    from accel.cpu.stream import CpuEvent

pytestmark = pytest.mark.usefixtures("nothing_left")


def refusing(monkeypatch: pytest.MonkeyPatch, method: str) -> list[Exception]:
    """Return a list: what is appended to it is raised by the next call of a method of a stream."""
    errors: list[Exception] = []
    call = getattr(CpuStream, method)

    def called(stream: CpuStream, event: CpuEvent) -> bool | None:
        if errors:
            raise errors.pop()
        done: bool | None = call(stream, event)
        return done

    monkeypatch.setattr(CpuStream, method, called)
    return errors


@pytest.mark.parametrize("count", [1, 3])
async def test_a_batch_whose_end_cannot_be_marked_is_answered_and_all_of_it_is_torn(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(libraries=["elementwise"]) as device:
        x = await device.put(np.ones(4))
        kept = [await device.put(np.zeros(4), durable=True) for _ in range(count)]
        refusing(monkeypatch, "record").append(ValueError("no mark"))
        with pytest.raises(accel.LibraryError, match="no mark"):
            async with device.batch() as batch:
                for ref in kept:
                    batch.elementwise.unary("neg", x, out=ref)
        for ref in kept:
            assert (await failure(device.get(ref), accel.StaleRefError)).reason == "torn"
            await device.put(np.ones(4), out=ref)
            np.testing.assert_array_equal(await device.get(ref), np.ones(4))
        assert (device.generation, device.info().in_flight) == (1, 0)


async def test_a_wait_that_could_not_be_made_is_owed_to_the_next_op_of_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan) as device:
        x = await device.put(np.eye(4))
        reading = task(device.blas.gemm(x, x))
        await in_flight(device, 1)
        refusing(monkeypatch, "wait").append(ValueError("no wait"))
        await failure(device.put(np.zeros((4, 4)), out=x), accel.LibraryError)
        writing = task(device.put(np.full((4, 4), 2.0), out=x))  # comes after the put that failed, which knows of the read
        await turns()
        assert not writing.done()
        plan.release()
        np.testing.assert_array_equal(await device.get(await reading), np.eye(4))
        await writing
        np.testing.assert_array_equal(await device.get(x), np.full((4, 4), 2.0))
