"""Ops and libraries of the user's own in a child, and what cannot be sent there: that costs the op, and nothing stays behind."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pytest

import accel
from accel.ops import Plan, Spec
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, task, turns, until
from tests.own_library_support import Scale, Scaling, Stall, Where

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_a_library_runs_in_the_child_and_in_its_successor() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", faults=FaultPlan().kill_host_at(4))
        await device.register(Scaling, 3.0)
        x = await device.put(np.arange(4.0))
        np.testing.assert_array_equal(await device.get(await device.run(Scale(x))), 6 * np.arange(4.0))
        with pytest.raises(accel.ContextPoisonedError):
            await device.run(Where(x))
        x = await asyncio.wait_for(device.put(np.zeros(1, np.int64)), 20)
        where = await device.get(await device.run(Where(x)))
        assert where[0] == device.info().pid != os.getpid()
        y = await device.put(np.ones(4))
        async with device.batch() as batch:
            h = batch.run(Scale(batch.elementwise.unary("neg", y)))
        np.testing.assert_array_equal(await device.get(h), np.full(4, -6.0))


async def test_a_library_goes_with_the_device_to_a_child() -> None:
    async with accel.System() as system:
        gone = accel.DriverError("gone", code=700, scope=accel.FaultScope.PROCESS)
        device = await system.open_device("cpu", faults=FaultPlan().poison_at(2, gone))
        await device.register(Scaling)
        x = await device.put(np.zeros(1, np.int64))
        with pytest.raises(accel.ContextPoisonedError):
            await device.run(Where(x))
        x = await asyncio.wait_for(device.put(np.zeros(1, np.int64)), 20)
        assert (await device.get(await device.run(Where(x))))[0] == device.info().pid != os.getpid()


async def works_again(device: accel.Device, generation: int) -> None:
    x = await asyncio.wait_for(device.put(np.ones(4)), 20)
    np.testing.assert_array_equal(await device.get(await device.run(Scale(x))), np.full(4, 2.0))
    assert device.generation == generation


async def test_a_call_that_keeps_the_interpreter_is_found_out_although_it_may_be_loading() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host=accel.ProcessHost(heartbeat_interval=0.05, heartbeat_timeout=0.2))
        await device.register(Scaling)
        x = await device.put(np.ones(4))
        with pytest.raises(accel.ContextPoisonedError, match="not answered"):
            await asyncio.wait_for(device.run(Stall(x, way="locked")), 20)
        await works_again(device, 2)


async def test_only_the_first_call_of_a_kernel_is_taken_for_one_that_loads_something() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", hang_timeout=1.0)
        await device.register(Scaling)
        x = await device.put(np.ones(4))
        await device.run(Stall(x))
        with pytest.raises(accel.ContextPoisonedError, match="hung"):
            await asyncio.wait_for(device.run(Stall(x, way="waits")), 20)
        await works_again(device, 2)


@pytest.mark.parametrize("way", ["answers", "looks"])
async def test_a_child_that_loses_answers_by_an_error_of_its_own_is_given_up(way: str) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        await device.register(Scaling)
        x = await device.put(np.ones((400, 400)))
        with pytest.raises(accel.ContextPoisonedError, match="this is broken") as caught:
            async with asyncio.timeout(20):
                await device.run(Stall(x, way=way))
                await device.blas.gemm(x, x)
        assert (caught.value.scope, caught.value.retryable) == (accel.FaultScope.CONTEXT, True)
        await works_again(device, 2)


async def test_what_cannot_be_opened_or_sent_is_refused_and_the_device_goes_on() -> None:
    class Local(Scaling):
        pass

    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        with pytest.raises(accel.LibraryError, match="no such library"):
            await device.register(Scaling, fails=True)
        with pytest.raises(accel.UnsupportedError, match="cannot be sent"):
            await device.register(Local)
        x = await device.put(np.ones(4))
        with pytest.raises(accel.UnsupportedError, match="no library 'sent'"):
            await device.run(Scale(x))
        await device.register(Scaling)
        np.testing.assert_array_equal(await device.get(await device.run(Scale(x))), np.full(4, 2.0))
        assert device.generation == 1


async def test_ops_sent_after_an_unregistration_that_waits_are_refused() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", pinned_limit=1 << 20)
        await device.register(Scaling)
        x = await device.put(np.ones(4))
        async with device.graph() as graph:
            graph.run(Scale(x))
        await graph.replay()
        held = [await device.pinned((1 << 20,), "uint8")]
        putting = task(device.put(np.ones(1 << 18, np.float32)))
        await turns()
        leaving = task(device.unregister("sent"))
        await turns()
        later: list[asyncio.Future[Any]] = [task(device.run(Scale(x))), task(graph.replay()), task(batched(device, x))]
        await bounded(device.elementwise.unary("neg", x))  # ops of other libraries overtake
        assert not putting.done()
        assert not leaving.done()
        assert not any(waiting.done() for waiting in later)
        held.clear()
        for waiting in later:
            await failure(waiting, accel.UnsupportedError)
        await bounded(leaving)
        await bounded(putting)


async def batched(device: accel.Device, x: accel.AccelRef) -> None:
    """Run an op of the library in a batch."""
    async with device.batch() as batch:
        batch.run(Scale(x))


@dataclass(frozen=True, eq=False, slots=True)
class Note(accel.KernelOp):
    """An op with something beside its operand."""

    library: ClassVar[str] = "sent"
    kind: ClassVar[str] = "note"

    x: accel.AccelRef
    text: Any = None

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


async def test_a_message_that_is_too_large_is_not_in_flight() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", hang_timeout=0.5)
        x = await device.put(np.ones(4))
        error = await failure(bounded(device.run(Note(x, b"x" * (17 << 20)))), accel.InvalidArgumentError)
        assert "note is 178" in str(error)
        assert "give it the ref" in str(error)
        assert device.info().in_flight == 0
        np.testing.assert_array_equal(await bounded(device.get(x)), np.ones(4))
        assert device.generation == 1


async def test_a_ref_that_a_refused_op_named_first_is_described_again() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", faults=FaultPlan().kill_host_at(1, op="unary"))
        await device.register(Scaling)
        x = await device.put(np.ones(4), durable=True)
        await failure(bounded(device.elementwise.unary("neg", x)), accel.ContextPoisonedError)
        await failure(bounded(device.run(Note(x, np.ones(2)))), accel.UnsupportedError)
        np.testing.assert_array_equal(await bounded(device.get(await device.run(Scale(x)))), np.full(4, 2.0))
        assert device.generation == 2


async def test_refused_batches_give_their_shared_memory_back() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", pinned_limit=8 << 20)
        x = await device.put(np.ones(4))
        for _ in range(6):
            with pytest.raises(accel.UnsupportedError):
                async with device.batch() as batch:
                    batch.put(np.zeros(2 << 20, np.uint8))
                    batch.run(Note(x, np.ones(2)))
        await bounded(device.put(np.zeros(2 << 20, np.uint8)))
        await until(lambda: device.info().pinned.used == 0, "no pinned memory in use")  # the puts before the refused op were sent, and end


async def test_what_an_unfinished_batch_makes_durable_is_torn() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", faults=FaultPlan().poison_at(2))
        made: list[accel.AccelRef] = []
        with pytest.raises(accel.ContextPoisonedError):
            async with device.batch() as batch:
                made.append(batch.run(accel.ops.Fill((1 << 20,), accel.DType.FLOAT32, 7.0, None, True)))
                batch.elementwise.unary("relu", made[0])
        await bounded(device.put(np.ones(4)))
        assert (await failure(device.get(made[0]), accel.StaleRefError)).reason in ("torn", "generation")


@pytest.mark.parametrize("host", ["inline", "process", "auto"])
async def test_a_context_that_has_faulted_is_not_resumed(host: Literal["inline", "process", "auto"]) -> None:
    restart = accel.RestartStrategy(decide=lambda error: accel.Directive.RESUME)
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host, faults=FaultPlan().poison_at(1, op="unary"), restart=restart)
        x = await device.put(np.ones(4))
        await failure(bounded(device.elementwise.unary("neg", x)), accel.ContextPoisonedError)
        await bounded(device.put(np.ones(4)))
        assert device.generation == 2


async def test_more_large_gets_than_a_mailbox_holds_come_back_together() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", max_in_flight=2048, pending_limit=2048, pinned_limit=512 << 20)
        values = np.arange(40 << 10, dtype=np.float32)
        x = await device.put(values)
        found = await bounded(asyncio.gather(*(device.get(x) for _ in range(1500))))
        assert all(np.array_equal(each, values) for each in found)
        assert device.generation == 1


async def test_closing_a_device_leaves_the_next_ones_connection_alone() -> None:
    async with accel.System() as system:
        for _ in range(3):
            first = await system.open_device("cpu", host="process")
            closing = asyncio.ensure_future(first.aclose())
            second = await bounded(system.open_device("cpu", host="process"))
            await closing
            np.testing.assert_array_equal(await bounded(second.get(await second.put(np.ones(3)))), np.ones(3))
            await second.aclose()


@pytest.fixture
def parents_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[accel.KernelOp]]:
    """An op of a module that this process can import, and no other one."""
    (tmp_path / "of_the_parent.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    raise ImportError('not in this process')\n"
        "from dataclasses import dataclass\nfrom tests.own_library_support import Scale\n"
        "@dataclass(frozen=True, eq=False, slots=True)\nclass Foreign(Scale):\n    kind = 'foreign'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("of_the_parent").Foreign
    del sys.modules["of_the_parent"]


async def test_ops_before_one_that_the_child_cannot_import_run(parents_op: Any) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        await device.register(Scaling)
        x = await device.put(np.ones(4))
        older = await device.put(np.full(4, 7.0))
        made: list[accel.AccelRef] = []

        async def run(*ops: type[Any]) -> None:
            made.clear()
            async with device.batch() as batch:
                made.extend([batch.run(op(x)) for op in ops])
                batch.copy(x, older)

        for ops, index in (((Scale, Scale, parents_op, Scale), 2), ((parents_op, Scale), 0)):
            error = await failure(bounded(run(*ops)), accel.UnsupportedError)
            assert (error.op_index, error.op) == (index, "foreign")
            for ref in made[:index]:
                np.testing.assert_array_equal(await bounded(device.get(ref)), np.full(4, 2.0))
            for ref in made[index:]:
                assert (await failure(device.get(ref), accel.StaleRefError)).reason == "freed"
            np.testing.assert_array_equal(await bounded(device.get(older)), np.full(4, 7.0))
        error = await failure(bounded(device.run(parents_op(x))), accel.UnsupportedError)
        assert (error.op_index, error.op) == (None, "foreign")
        with pytest.raises(accel.UnsupportedError) as caught:
            async with device.graph() as graph:
                graph.run(Scale(x))
                graph.run(parents_op(x))
        assert caught.value.op_index == 1
        assert (await failure(bounded(run(Scale, parents_op)), accel.UnsupportedError)).op_index == 1
        made.clear()
        await bounded(device.free(older))
        await until(lambda: device.info().in_flight == 0, "nothing in flight")
        assert (device.generation, device.info().memory.used) == (1, x.nbytes)


async def test_an_op_that_fails_before_one_that_the_child_cannot_import_is_the_first(parents_op: Any) -> None:
    plan = FaultPlan().fail_at(1, accel.LibraryError("planned"), op="scale")
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", faults=plan)
        await device.register(Scaling)
        x = await device.put(np.ones(4))
        with pytest.raises(accel.LibraryError, match="planned") as caught:
            async with device.batch() as batch:
                batch.run(Scale(x))
                batch.run(Scale(x))
                batch.run(parents_op(x))
        assert (caught.value.op_index, caught.value.op) == (0, "scale")
        np.testing.assert_array_equal(await bounded(device.get(await device.run(Scale(x)))), np.full(4, 2.0))
