"""Probes: what each method is told, in which order, and that a probe disturbs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

import accel
from accel.patterns import DynamicBatcher
from accel.telemetry import fault_code
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, opened, task, turns, until
from tests.quarantine_support import FINE, KILLED, Serving, answers, serving
from tests.telemetry_support import Nap, Napping, Recorder

if TYPE_CHECKING:
    from accel.errors import AccelError
    from accel.telemetry import DeviceWork, ServedBatch, ServedRequest

HOSTS = pytest.mark.parametrize("host", ["inline", "process"])
Host = Literal["inline", "process"]


@HOSTS
async def test_an_op_is_told_when_it_is_sent_and_when_it_has_ended(host: Host) -> None:
    probe = Recorder()
    async with opened(host=host) as device:
        a = await device.put(np.ones((4, 4)))
        device.probes.add(probe)
        await device.blas.gemm(a, a)
        device.probes.remove(probe)
        await device.blas.gemm(a, a)
    assert probe.names == ["op_sent", "op_ended"]
    (sent, ended) = probe.of("op_sent", "op_ended")
    assert sent is ended
    assert (ended.name, ended.ops, ended.device, ended.generation, ended.error) == ("gemm", (("blas", "gemm"),), "cpu:0", 1, "")
    assert 0 < ended.queued_at <= ended.sent_at <= ended.ended_at
    assert ended.device_seconds is None, "it was not asked for"


@HOSTS
async def test_a_batch_is_told_once_however_many_ops_it_has(host: Host) -> None:
    probe = Recorder()
    async with opened(host=host) as device:
        a = await device.put(np.ones(4))
        device.probes.add(probe)
        async with device.batch(name="mine") as batch:
            for _ in range(700):
                batch.elementwise.unary("relu", a)
            batch.reduce("sum", a)
        device.probes.remove(probe)
    assert probe.names == ["op_sent", "op_ended"]
    work = probe.of("op_ended")[0]
    assert (work.name, len(work.ops), work.ops[-1]) == ("mine", 701, ("reduce", "reduce"))


@HOSTS
async def test_an_op_that_fails_has_the_name_of_its_error(host: Host) -> None:
    probe, plan = Recorder(), FaultPlan().out_of_memory_at(1, op="gemm")
    async with opened(plan, host=host) as device:
        device.probes.add(probe)
        a = await device.put(np.ones((4, 4)))
        await failure(device.blas.gemm(a, a), accel.OutOfMemoryError)
        assert [work.error for work in probe.of("op_ended")] == ["", "OutOfMemoryError"]


@HOSTS
async def test_a_fault_comes_before_the_states_and_ends_what_is_in_flight(host: Host) -> None:
    probe, plan = Recorder(), FaultPlan().poison_at(1, op="gemm")
    async with opened(plan, host=host) as device:
        device.probes.add(probe)
        a = await device.put(np.ones((4, 4)))
        await failure(device.blas.gemm(a, a), accel.ContextPoisonedError)
        await until(lambda: "state_changed" in probe.names[-1:])
        await bounded(device.put(np.ones(4)))
    assert probe.names[2:] == [*("op_sent", "fault", "state_changed"), "op_ended", "state_changed", "op_sent", "op_ended", "state_changed"]
    name, generation, error = dict(probe.told)["fault"]
    assert (name, generation, error.scope >= accel.FaultScope.CONTEXT) == ("cpu:0", 1, True)
    states = [arguments for told, arguments in probe.told if told == "state_changed"]
    assert states == [("cpu:0", "rebuilding", 1), ("cpu:0", "ready", 2), ("cpu:0", "closed", 2)]
    assert [work.error for work in probe.of("op_ended")] == ["", "ContextPoisonedError", ""]


async def test_the_first_states_are_told_to_a_probe_that_is_there_before_the_device() -> None:
    probe = Recorder()
    async with accel.System() as system:
        system.probes.add(probe)
        await system.open_device("cpu")
    assert probe.told == [("state_changed", ("cpu:0", "ready", 1)), ("state_changed", ("cpu:0", "closed", 1))]


async def test_an_op_that_its_caller_has_left_ends_when_the_device_has_done_it() -> None:
    probe = Recorder()
    async with opened() as device:
        await device.register(Napping)
        x = await device.put(np.ones(4))
        device.probes.add(probe)
        running = task(device.run(Nap("napping", x, 0.3)))
        await until(lambda: probe.names == ["op_sent"])
        running.cancel()
        await turns()
        assert probe.names == ["op_sent"]
        await until(lambda: device.info().in_flight == 0)
        assert probe.names == ["op_sent", "op_ended"]
        assert probe.of("op_ended")[0].error == "CancelledError"
        device.probes.remove(probe)


@HOSTS
async def test_every_op_that_is_sent_ends_once_whatever_becomes_of_it(host: Host) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng, probe = random.Random(seed), Recorder()
    plan = FaultPlan()
    async with opened(plan, host=host, pending_limit=8, max_in_flight=8, restart=accel.RestartStrategy(max_restarts=99)) as device:
        await device.register(Napping)
        x = await device.put(np.ones(4), durable=True)
        device.probes.add(probe)
        for n in (9, 40, 90):
            plan.poison_at(plan.count + n)

        async def one() -> None:
            kind = rng.randrange(4)
            timeout = rng.choice([None, None, 0.002])
            with contextlib.suppress(accel.AccelError):
                if kind == 0:
                    await device.run(Nap("napping", x, rng.choice([0.0, 0.003])), timeout=timeout)
                elif kind == 1:
                    await device.put(np.ones(rng.choice([4, 1 << 18])), timeout=timeout)
                else:
                    async with device.batch(timeout=timeout) as batch:
                        for _ in range(rng.choice([1, 3, 20])):
                            batch.run(Nap("napping", x, 0.0))

        tasks = [task(one()) for _ in range(150)]
        for running in rng.sample(tasks, 40):
            await turns(rng.randrange(12))
            running.cancel()
        await bounded(asyncio.wait(tasks))
        await until(lambda: device.info().in_flight == 0)
        sent, ended = probe.of("op_sent"), probe.of("op_ended")
    assert len(sent) > 5
    assert len(ended) == len(set(ended))
    assert set(sent) == set(ended)


async def test_requests_and_batches_of_a_service() -> None:
    caller: ContextVar[str] = ContextVar("caller", default="nobody")

    class Callers(Recorder):
        seen: tuple[str, ...] = ()

        def request_begun(self, request: ServedRequest) -> None:
            self.seen += (caller.get(),)
            super().request_begun(request)
            request.on_end(self.ended)

        def batch_launched(self, batch: ServedBatch) -> None:
            self.seen += (caller.get(),)
            super().batch_launched(batch)

        def ended(self, error: BaseException | None) -> None:
            self.seen += (caller.get(),)
            errors.append(type(error))

    async def handler(items: list[int]) -> list[int | Exception]:
        return [ValueError(item) if item < 0 else 2 * item for item in items]

    errors: list[type] = []
    probe, batcher = Callers(), DynamicBatcher(handler, max_items=4)
    batcher.service.probes.add(probe)
    async with batcher:
        caller.set("me")
        await asyncio.gather(batcher.submit(1), batcher.submit(-1), batcher.submit(3), return_exceptions=True)
    assert probe.names == [*["request_begun"] * 3, "batch_launched", "batch_ended"]
    assert probe.seen == ("me", "me", "me", "nobody", "me", "me", "me")
    requests: list[ServedRequest] = probe.of("request_begun")
    assert [(request.number, request.size, request.launches, request.is_suspect) for request in requests] == [
        (n, 1, 1, False) for n in (1, 2, 3)
    ]
    batch = probe.of("batch_launched")[0]
    assert (batch.requests, batch.items, batch.error, batch.service) == (requests, 3, "", batcher.service)
    assert requests[0].begun_at <= batch.launched_at <= batch.ended_at
    assert batch.answered == [requests[0], requests[2]]
    assert batch.device_seconds is None, "there is no device"
    assert errors == [type(None), ValueError, type(None)]


async def test_a_batch_that_raises_and_one_that_is_cut_short_have_the_name_of_the_error() -> None:
    async def handler(items: list[float]) -> list[float]:
        if items[0] < 0:
            raise ValueError
        await asyncio.sleep(items[0])
        return items

    probe, batcher = Recorder(), DynamicBatcher(handler, max_items=1, close_timeout=0.01)
    batcher.service.probes.add(probe)
    async with batcher:
        await failure(batcher.submit(-1.0), ValueError)
        waiting = task(batcher.submit(60.0))
        await turns()
    await failure(waiting, accel.ClosedError)
    assert [batch.error for batch in probe.of("batch_ended")] == ["ValueError", "CancelledError"]


async def test_a_request_that_is_tried_again_is_in_two_batches() -> None:
    plan, probe = FaultPlan().poison_at(3), Recorder()
    async with opened(plan) as device:

        async def handler(items: list[Any]) -> list[Any]:
            return [await device.get(await device.put(item)) for item in items]

        async with DynamicBatcher(handler, device=device, idempotent=True) as batcher:
            assert batcher.service.probes is device.probes
            assert batcher.service.device == "cpu:0"
            device.probes.add(probe)
            await bounded(asyncio.gather(batcher.submit(np.ones(2)), batcher.submit(np.ones(2))))
    assert [batch.error for batch in probe.of("batch_ended")] == ["ContextPoisonedError", ""]
    assert [request.launches for request in probe.of("request_begun")] == [2, 2]


async def test_a_suspect_is_told_when_it_goes_to_quarantine() -> None:
    probe, device = Recorder(), Serving()
    async with serving(device) as batcher:
        batcher.service.probes.add(probe)
        await answers(batcher, [FINE, KILLED])
    assert [request.number for request in probe.of("request_quarantined")] == [1, 2]
    batches = probe.of("batch_ended")
    assert batches == probe.of("batch_launched")
    assert [request.number for request in batches[0].requests] == [1, 2]
    assert {request.number for batch in batches[1:] for request in batch.requests} == {1, 2}, "they are tried"
    assert [request.number for batch in batches for request in batch.answered] == [1], "the other one is poison"


class Broken(accel.Probe):
    """Raises."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    def op_sent(self, work: DeviceWork) -> None:
        self.calls += 1
        raise self.error


@pytest.mark.parametrize("error", [ValueError("mine"), asyncio.CancelledError(), accel.DeviceLostError("not so")])
async def test_a_probe_that_raises_is_logged_once_and_removed(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    broken, other = Broken(error), Recorder()
    async with opened() as device:
        device.probes.add(broken)
        device.probes.add(other)
        for _ in range(3):
            await device.put(np.ones(4))
        assert device.probes.all == (other,)
        assert other.names == ["op_sent", "op_ended"] * 3
    assert broken.calls == 1
    logged = [record for record in caplog.records if "probe_removed" in record.getMessage()]
    assert len(logged) == 1
    assert "op_sent" in logged[0].getMessage()


async def test_what_is_no_probe_is_refused() -> None:
    class Late(accel.Probe):
        async def fault(self, device: str, generation: int, error: AccelError) -> None:  # type: ignore[override]
            pass

    async with accel.System() as system:
        for wrong in (accel.Probe, object(), None, Late()):
            with pytest.raises(accel.InvalidArgumentError):
                system.probes.add(wrong)  # type: ignore[arg-type]
        probe = accel.Probe()
        system.probes.add(probe)
        system.probes.add(probe)
        assert system.probes.all == (probe,)
        system.probes.remove(probe)
        system.probes.remove(probe)
        assert not system.probes.all


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (accel.DriverError("x", code=700), "700"),
        (accel.DriverError("x"), ""),
        (accel.HostDiedError("x", signal=9), "SIGKILL"),
        (accel.HostDiedError("x", signal=47), "signal 47"),
        (accel.HostDiedError("x", exit_code=3), "exit code 3"),
        (accel.HostDiedError("x", signal=9, hung=True), "hung"),
        (accel.HostDiedError("x", code="EMFILE"), "EMFILE"),
        (accel.LibraryError("x", code="no file /srv/weights.bin"), "other"),
        (accel.LibraryError("x", code="x" * 65), "other"),
        (accel.HostDiedError("x"), ""),
    ],
)
def test_a_fault_has_a_code_that_says_how_it_came(error: accel.AccelError, code: str) -> None:
    assert fault_code(error) == code
