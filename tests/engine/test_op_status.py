"""Statuses of ops on a device whose streams report nothing of their work: what the engine keeps while they are pending, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import accel
from accel import registry
from accel.cpu.views import array
from accel.dtype import DType
from accel.engine.failures import Failures
from accel.engine.stream_clock import EventPool
from accel.ops import Plan, Spec, Status
from accel.testing import FaultPlan
from accel.testing.conformance import Check, checks
from accel.testing.conformance.device_harness import DeviceHarness
from accel.testing.conformance.device_status import ConformanceOps
from tests.device_support import bounded, cancelled, failure, in_flight, task, until
from tests.late_backend import LateBackend, LateDevice, LateStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.usefixtures("nothing_left")

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams report no failures of their work, as those of hardware."""
    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")
    monkeypatch.setattr(LateDevice, "delay", 50e-6)
    monkeypatch.setattr(LateDevice, "every", 3)
    monkeypatch.setattr(Failures, "listen", lambda self, lane: None)


class Watched:
    """The failures and event pools of all contexts of a test."""

    def __init__(self) -> None:
        self.failures: list[Failures] = []
        self.pools: list[EventPool] = []
        self.tracked = 0

    def is_quiet(self) -> bool:
        """Return whether nothing is kept of any op."""
        idle = not any(each.tracked or each.is_tracking or each._statuses or each._dropped for each in self.failures)
        return idle and all(len(pool._free) == len(set(map(id, pool._all))) == len(pool._all) for pool in self.pools)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched()

    def seeing(cls: type, made: list[Any]) -> None:
        original: Callable[..., None] = cls.__init__  # type: ignore[misc]

        def init(self: Any, *arguments: Any) -> None:
            original(self, *arguments)
            made.append(self)

        monkeypatch.setattr(cls, "__init__", init)

    seeing(Failures, found.failures)
    seeing(EventPool, found.pools)
    track = Failures.track

    def counted(*arguments: Any) -> None:
        found.tracked += 1
        track(*arguments)

    monkeypatch.setattr(Failures, "track", counted)
    return found


async def put_info(device: accel.Device, value: int) -> accel.AccelRef:
    return await device.put(np.array((value, -1), np.int32))


@pytest.mark.parametrize("check", [check for check in checks("device") if "status" in check.name], ids=lambda check: check.name)
@pytest.mark.parametrize("completion", ["adaptive", "polled", "sync", "host_fn"])
async def test_conformance(check: Check, completion: str) -> None:
    await check.run(DeviceHarness(LateBackend(), options={"completion": completion}))


async def test_what_ops_do_to_memory_is_tracked_only_while_a_status_is_pending(watched: Watched) -> None:
    async with accel.System() as system:
        device = await system.open_device("late")
        x = await device.zeros(100)

        async def several() -> None:
            await bounded(asyncio.gather(*(device.elementwise.unary("neg", x, out=x) for _ in range(20))))

        await several()
        assert watched.tracked == 0
        family = device.family(ConformanceOps)
        good, bad = await put_info(device, 0), await put_info(device, 5)
        out = await device.zeros(100)
        pair = asyncio.gather(family.guarded(x, good), family.guarded(x, bad, out=out), return_exceptions=True)
        await several()
        assert isinstance((await bounded(pair))[1], accel.LinAlgError)
        assert watched.tracked > 0
        await device.zeros(100, "float32")
        assert [each.is_tracking for each in watched.failures] == [True], "out is unsound"
        await device.copy(x, out)
        await until(watched.is_quiet, "quiet")
        before = watched.tracked
        await several()
        assert watched.tracked == before


async def test_dropped_and_refused_ops_give_back_what_their_status_needs(watched: Watched) -> None:
    plan = FaultPlan().hang_at(1, op="unary").fail_at(3, accel.LibraryError("planned"), op="guarded")
    async with accel.System() as system:
        device = await system.open_device("late", faults=plan, streams=1)
        family = device.family(ConformanceOps)
        x, good = await device.zeros(100), await put_info(device, 0)
        await family.guarded(x, good)
        hung = task(device.elementwise.unary("neg", x))
        await in_flight(device, 1)
        waiting = [task(family.guarded(x, good)) for _ in range(4)]
        await in_flight(device, 5)
        await cancelled(waiting[0])
        plan.release()
        ended: list[Any] = await bounded(asyncio.gather(hung, *waiting[1:], return_exceptions=True))
        assert [isinstance(each, accel.LibraryError) for each in ended].count(True) == 1
        await family.guarded(x, good)
        await until(watched.is_quiet, "quiet")


@pytest.mark.parametrize("blocks", [False, True])
async def test_an_op_whose_status_may_block_is_enqueued_beside_the_loop(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateDevice, "may_block", lambda self, lane, op: blocks and (op.kind, op.destination.nbytes) == ("get", 8))
    threads: list[threading.Thread] = []
    fill = LateStream.fill

    def seen(self: LateStream, destination: int, pattern: bytes, count: int) -> None:
        threads.append(threading.current_thread())
        fill(self, destination, pattern, count)

    async with accel.System() as system:
        device = await system.open_device("late")
        x, good = await device.zeros(10), await put_info(device, 0)
        monkeypatch.setattr(LateStream, "fill", seen)
        for _ in range(2):
            await device.family(ConformanceOps).guarded(x, good)
        assert [thread is threading.main_thread() for thread in threads] == [not blocks] * 2


@dataclass(frozen=True, eq=False, slots=True)
class Checked(accel.KernelOp):
    """``x``, with a status of the op's own."""

    library: ClassVar[str] = "checked"
    kind: ClassVar[str] = "checked"

    x: accel.AccelRef
    value: int
    way: str = ""

    def plan(self) -> Plan:
        spec: Any = Spec((), DType.INT32) if self.way != "no spec" else ((), DType.INT32)
        status: Any = Status(spec, self.check) if self.way != "no status" else (spec, self.check)
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),), status=status)

    def check(self, status: Array) -> Any:
        if self.way == "raise":
            raise ZeroDivisionError("by the check")
        if self.way == "text":
            return "an error"
        return accel.LinAlgError("bad", info=int(status)) if status else None


class CheckedLibrary(accel.KernelLibrary):
    """Writes the status by numpy."""

    name = "checked"

    @accel.kernel(Checked)
    def run(self, op: Checked, stream: Any, inputs: Sequence[accel.Operand], outputs: Sequence[accel.Operand]) -> None:
        out, status = outputs
        if op.way == "refuse":
            raise accel.InvalidArgumentError("refused")
        if op.way == "break":
            raise ValueError("broken")

        def work() -> None:
            copied, written = (array(each.address, each.shape, each.dtype.numpy) for each in (out, status))
            copied[...] = array(inputs[0].address, out.shape, out.dtype.numpy)
            written[...] = op.value

        stream.submit(work)


async def test_a_users_op_has_a_status_too_and_may_get_it_wrong(watched: Watched) -> None:
    async with accel.System() as system:
        device = await system.open_device("late")
        await device.register(CheckedLibrary)
        x = await device.put(np.arange(5.0))
        np.testing.assert_array_equal(await device.get(await device.run(Checked(x, 0))), np.arange(5.0))
        error = await failure(device.run(Checked(x, -3)), accel.LinAlgError)
        assert (error.info, error.op, error.library) == (-3, "checked", "checked")
        for way, text in (
            ("raise", "ZeroDivisionError: by the check"),
            ("text", "'an error', which is no AccelError"),
            ("break", "ValueError: broken"),
        ):
            wrong = await failure(device.run(Checked(x, 0, way)), accel.LibraryError)
            assert text in wrong.message
        await failure(device.run(Checked(x, 0, "refuse")), accel.InvalidArgumentError)
        for way in ("no spec", "no status"):
            refused = await failure(device.run(Checked(x, 0, way)), accel.InvalidArgumentError)
            assert "names a status that is no Status" in refused.message
        assert device.generation == 1
        await device.zeros(3)
        await until(watched.is_quiet, "quiet")


async def test_ops_in_later_parts_of_a_batch_count_as_failed_if_they_were_launched() -> None:
    plan = FaultPlan().hang_at(2, op="guarded")
    async with accel.System() as system:
        device = await system.open_device("late", faults=plan, max_in_flight=8, libraries=("elementwise",))
        good, bad = await put_info(device, 0), await put_info(device, 9)
        x, older = await device.zeros(10), await device.zeros(10)
        await device.family(ConformanceOps).guarded(x, good)

        async def run() -> None:
            async with device.batch() as batch:
                batch.family(ConformanceOps).guarded(x, bad)
                for _ in range(5):
                    batch.elementwise.unary("neg", x)
                batch.copy(x, older)

        running = task(run())
        await in_flight(device, 7)
        plan.release()
        error = await failure(running, accel.LinAlgError)
        assert error.op_index == 0
        await failure(device.get(older), accel.LinAlgError)
        assert (await device.get(x)).sum() == 0


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_durable_buffer_that_a_failed_op_was_to_write_is_torn(host: Any) -> None:
    x = np.arange(10.0)
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host)
        family = device.family(ConformanceOps)
        a, good, bad = await device.put(x), await put_info(device, 0), await put_info(device, 1)
        out = await device.put(np.zeros(10), durable=True)
        await failure(bounded(family.guarded(a, bad, out=out)), accel.LinAlgError)
        assert (await failure(device.get(out), accel.StaleRefError)).reason == "torn"
        await bounded(family.guarded(a, good, out=out))
        np.testing.assert_array_equal(await device.get(out), x)
        assert device.generation == 1
