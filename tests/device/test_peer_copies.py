"""Copies from one device to another: their values, their place in the order of both devices, and what becomes of them when a device ends."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio

import accel
from accel.device import peers
from accel.device.peers import peers_of
from accel.testing import FaultPlan
from tests import lying_child
from tests.child_support import children, links_of
from tests.device_support import (
    PATIENCE,
    SharedFaults,
    bounded,
    cancelled,
    child_pid,
    failure,
    generation,
    some_view,
    task,
    turns,
    until,
    used,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("places")]

HOSTS = [("inline", "inline"), ("inline", "process"), ("process", "inline"), ("process", "process")]
LARGE = peers._LEND_FROM
"""Bytes of a buffer that is lent."""


class Places:
    """Two CPU devices in this process, and two in children: opening one takes longer than most tests.

    What a test kills is rebuilt. So generations count on from test to test.
    """

    def __init__(self, system: accel.System) -> None:
        self.system = system
        self._devices: dict[tuple[str, int], accel.Device] = {}
        self._faults: dict[tuple[str, int], SharedFaults] = {}

    async def open(self) -> None:
        """Open the devices."""
        for place in [(host, index) for host in ("inline", "process") for index in range(2)]:
            faults = self._faults[place] = SharedFaults()
            self._devices[place] = await self.system.open_device(
                "cpu", host=place[0], faults=faults, restart=accel.RestartStrategy(max_restarts=100, backoff=(0.01, 0.01))
            )

    @contextmanager
    def two(
        self, first: str = "process", second: str = "process", *, first_faults: FaultPlan | None = None, faults: FaultPlan | None = None
    ) -> Iterator[tuple[accel.Device, accel.Device]]:
        """Lend a test two devices that have mapped nothing; ``faults`` are the second's."""
        places = (first, 0), (second, 1)
        for place in places:
            device = self._devices[place]
            peers_of(device)._slabs.clear()
            device._host.context.apply_frees()
        with self._faults[places[0]].planned(first_faults), self._faults[places[1]].planned(faults):
            yield self._devices[places[0]], self._devices[places[1]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def places(module_leaves_nothing: None) -> AsyncIterator[Places]:
    before = children()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "_IDLE_SECONDS", 0.25)
        async with accel.System() as system:
            places = Places(system)
            await places.open()
            yield places
    assert children() == before


def killed(device: accel.Device) -> int:
    """Kill the child of a device; return the number of the generation that follows."""
    os.kill(child_pid(device), signal.SIGKILL)
    return device.generation + 1


def numbers(count: int = LARGE // 8, start: float = 0.0) -> np.ndarray[Any, Any]:
    return np.arange(start, start + count)


def mappings(device: accel.Device) -> int:
    """Return how many slabs of other devices a device has mapped."""
    return sum(slab.ref is not None and not slab.ref.is_stale for slab in peers_of(device)._slabs.values())


def lent(device: accel.Device) -> int:
    """Return how many buffers a device lends."""
    return device._core.loans.count


def slab_maps(pid: int | None) -> set[str]:
    """Return the mappings of slabs and host blocks that a process has."""
    lines = Path(f"/proc/{pid or 'self'}/maps").read_text().splitlines()
    return {line for line in lines if "memfd:accel-" in line}


def mapped(pid: int | None) -> int:
    """Return how many mappings of slabs and host blocks a process has."""
    return len(slab_maps(pid))


# -- values


@pytest.mark.parametrize(("first", "second"), HOSTS)
async def test_a_copy_has_the_values_of_its_source(places: Places, first: str, second: str) -> None:
    rng = np.random.default_rng(0)
    with places.two(first, second) as (one, other):
        for dtype in accel.DType:
            for shape in ((), (0, 3), (7,), (5, LARGE // dtype.itemsize // 4)):
                bits = rng.integers(0, 2, size=shape) if dtype is accel.DType.BOOL else rng.integers(0, 100, size=shape)
                array = np.asarray(bits).astype(dtype.numpy)
                source = await one.put(array)
                copy = await other.put(source)
                assert (copy.shape, copy.dtype) == (source.shape, dtype)
                got = await other.get(copy)
                assert got.tobytes() == array.tobytes(), (dtype, shape)
        assert not lent(one)


@pytest.mark.parametrize(("first", "second"), HOSTS)
async def test_views_are_copied_as_arrays_of_their_own(places: Places, first: str, second: str) -> None:
    rng = np.random.default_rng(1)
    with places.two(first, second) as (one, other):
        array = rng.standard_normal((48, 64, 96))
        source = await one.put(array)
        for _ in range(8):
            expected, view = some_view(rng, array, source)
            np.testing.assert_array_equal(await other.get(await other.put(view)), expected)


async def test_a_copy_goes_into_a_buffer_that_is_given_and_into_durable_memory(places: Places) -> None:
    with places.two() as (one, other):
        source = await one.put(numbers())
        out = await other.zeros(source.shape, "float64")
        assert await other.put(source, out=out) is out
        np.testing.assert_array_equal(await other.get(out), numbers())
        again = await one.zeros(source.shape, "float64")
        assert await one.copy(out, again) is again
        np.testing.assert_array_equal(await one.get(again), numbers())
        kept = await other.put(source, durable=True, checksum=True)
        await generation(other, killed(other))
        np.testing.assert_array_equal(await other.get(kept), numbers())
        columns = await one.zeros((source.size, 2), "float64")
        await one.put(kept, out=columns[:, 1])
        np.testing.assert_array_equal((await one.get(columns))[:, 1], numbers())


async def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    async with accel.System() as system:
        one, other = await system.open_device("cpu", host="inline"), await system.open_device("cpu", host="inline")
        source = await one.put(numbers())
        before = used(one)
        assert "already" in (await failure(one.put(source), accel.InvalidArgumentError)).message
        await failure(other.put(source, out=await other.zeros(3)), accel.InvalidArgumentError)
        await failure(other.put(source, out=source), accel.InvalidArgumentError)
        await failure(other.put(source, checksum=True), accel.InvalidArgumentError)
        await failure(other.put(source, timeout=0), accel.DeadlineExceededError)
        assert used(one) == before
        await one.free(source)
        await failure(other.put(source), accel.StaleRefError)
        await one.aclose()
        await failure(other.put(source), accel.ClosedError)


async def test_what_cannot_be_mapped_goes_through_the_host(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    with places.two("inline", "process") as (one, other):
        array = numbers()
        ref = await one.wrap(array)
        np.testing.assert_array_equal(await other.get(await other.put(ref)), array)
        source = await one.put(array)
        monkeypatch.setattr(peers, "_MOST_MAPPED", 0)
        np.testing.assert_array_equal(await other.get(await other.put(source)), array)
        monkeypatch.undo()
        monkeypatch.setattr(one._core.durable, "is_offered", False)
        np.testing.assert_array_equal(await other.get(await other.put(source)), array)
        assert not mappings(other)


# -- order


@pytest.mark.parametrize(("first", "second"), HOSTS)
async def test_a_copy_has_what_was_written_before_and_nothing_of_later_writes(places: Places, first: str, second: str) -> None:
    rng = random.Random(7)
    with places.two(first, second) as devices:
        count = LARGE // 8
        refs = [await device.zeros((count,), "float64") for device in devices for _ in range(2)]
        values = [0.0] * len(refs)
        running: list[asyncio.Future[Any]] = []
        copies: list[tuple[asyncio.Future[accel.AccelRef], float, accel.Device]] = []
        for step in range(1, 61):
            at = rng.randrange(len(refs))
            own, peer = devices[at // 2], devices[1 - at // 2]
            if rng.random() < 0.5:
                running.append(task(own.run(accel.ops.Fill((count,), accel.DType.FLOAT64, float(step), refs[at]))))
                values[at] = float(step)
            else:
                copies.append((task(peer.put(refs[at])), values[at], peer))
            if rng.random() < 0.7:
                await asyncio.sleep(0)  # the tasks send their ops in the order in which they were made
        await bounded(asyncio.gather(*running))
        for copying, value, device in copies:
            got = await device.get(await bounded(copying))
            assert (got == value).all(), (value, got[[0, -1]])


@pytest.mark.parametrize(("first", "second"), HOSTS)
async def test_devices_that_copy_from_each_other_do_not_wait_in_a_circle(places: Places, first: str, second: str) -> None:
    with places.two(first, second) as (one, other):
        x, y = await one.put(numbers()), await other.put(numbers(start=1e6))
        for _ in range(5):  # a swap, sent at once, and writes that wait for it
            swap = [task(one.put(y, out=x)), task(other.put(x, out=y))]
            await asyncio.sleep(0)
            unary = [task(device.elementwise.unary("neg", ref, out=ref)) for device, ref in ((one, x), (other, y)) for _ in range(2)]
            await bounded(asyncio.gather(*swap, *unary))
        np.testing.assert_array_equal(await one.get(x), numbers(start=1e6))
        np.testing.assert_array_equal(await other.get(y), numbers())


@pytest.mark.parametrize("first", ["inline", "process"])
async def test_a_write_of_a_lent_buffer_waits_for_the_copy_and_other_ops_do_not(places: Places, first: str) -> None:
    plan = FaultPlan().hang_at(1, op="copy")
    with places.two(first, "process", faults=plan) as (one, other):
        source, bystander = await one.put(numbers()), await one.zeros(8)
        copying = task(other.put(source))
        await until(lambda: lent(one) and other.info().in_flight, "the copy")
        writing = task(one.run(accel.ops.Fill(source.shape, source.dtype, 0.0, source)))
        batched = task(_fill_twice(one, source))
        await bounded(one.elementwise.unary("neg", bystander))
        np.testing.assert_array_equal(await bounded(one.get(await bounded(one.put(numbers(8))))), numbers(8))
        await turns()
        assert not writing.done()
        assert not batched.done()
        plan.release()
        np.testing.assert_array_equal(await other.get(await bounded(copying)), numbers())
        await bounded(asyncio.gather(writing, batched))
        assert (await one.get(source) == 2.0).all()


async def _fill_twice(device: accel.Device, ref: accel.AccelRef) -> None:
    async with device.batch() as batch:
        for value in (1.0, 2.0):
            batch.run(accel.ops.Fill(ref.shape, ref.dtype, value, ref))


async def test_a_write_that_waits_for_a_copy_is_no_hang_of_its_device(places: Places) -> None:
    plan = FaultPlan().hang_at(1, op="copy")
    with places.two(faults=plan) as (_, other):
        one = await places.system.open_device("cpu", host=accel.ProcessHost(stall_after=0.5), hang_timeout=1.0)
        source = await one.put(numbers())
        await bounded(one.run(accel.ops.Fill(source.shape, source.dtype, 1.0, source)))  # so that the kind is known
        copying = task(other.put(source))
        await until(lambda: lent(one) and other.info().in_flight, "the copy")
        writing = task(one.run(accel.ops.Fill(source.shape, source.dtype, 0.0, source)))
        await asyncio.sleep(1.6)
        await until(lambda: one.health().is_ready, "its child answers, and the write is no hang")
        plan.release()
        assert (await other.get(await bounded(copying)) == 1.0).all()
        await bounded(writing)
        assert one.generation == 1
        await one.aclose()


@pytest.mark.parametrize("first", ["inline", "process"])
async def test_a_source_that_is_freed_while_it_is_lent_is_not_reused_before_the_end(places: Places, first: str) -> None:
    plan = FaultPlan().hang_at(1, op="copy")
    with places.two(first, "process", faults=plan) as (one, other):
        source = await one.put(numbers())
        copying = task(other.put(source))
        await until(lambda: lent(one) and other.info().in_flight, "the copy")
        await bounded(one.free(source))
        fills = [task(one.full(source.shape, float(n), "float64")) for n in range(4)]  # one of them has the memory next
        await turns(100)
        plan.release()
        np.testing.assert_array_equal(await other.get(await bounded(copying)), numbers())
        for n, filled in enumerate(await bounded(asyncio.gather(*fills))):
            assert (await one.get(filled) == n).all()


# -- ends


@pytest.mark.parametrize("second", ["inline", "process"])
async def test_the_death_of_the_source_harms_no_copy(places: Places, second: str) -> None:
    plan = FaultPlan().hang_at(1, op="copy")
    with places.two("process", second, faults=plan) as (one, other):
        source = await one.put(numbers(LARGE))
        copying = task(other.put(source))
        await until(lambda: lent(one) and other.info().in_flight, "the copy")
        await generation(one, killed(one))  # it does not wait for the copy
        assert not copying.done()
        plan.release()
        np.testing.assert_array_equal(await other.get(await bounded(copying)), numbers(LARGE))
        await failure(other.put(source), accel.StaleRefError)
        copy = await other.put(await one.put(numbers()))
        np.testing.assert_array_equal(await other.get(copy), numbers())


async def test_a_source_that_dies_at_any_moment_ends_the_copy_well_or_with_its_fault(places: Places) -> None:
    rng = random.Random(3)
    with places.two() as (one, other):
        others_generation = other.generation
        for is_known in (False, True) * 3:
            source = await one.put(numbers(1 << 20))
            if is_known:  # it is copied before its loan is answered
                await other.put(source)
            copying = task(other.put(source))
            await asyncio.sleep(rng.random() * 0.03)
            following = killed(one)
            (copy,) = await bounded(asyncio.gather(copying, return_exceptions=True))
            if isinstance(copy, BaseException):
                assert isinstance(copy, (accel.ContextPoisonedError, accel.StaleRefError))
                assert copy.device == one.name
            else:
                np.testing.assert_array_equal(await other.get(copy), numbers(1 << 20))
            del copying
            await generation(one, following)
        assert other.generation == others_generation
        gc.collect()
        assert not lent(one)


async def test_the_death_of_the_target_fails_the_copy(places: Places) -> None:
    plan = FaultPlan().hang_at(1, op="copy")
    with places.two("process", "process", faults=plan) as (one, other):
        source = await one.put(numbers(LARGE))
        copying = task(other.put(source))
        await until(lambda: lent(one) and other.info().in_flight, "the copy")
        writing = task(one.run(accel.ops.Fill(source.shape, source.dtype, 0.0, source)))
        generations = one.generation, killed(other)
        error = await failure(copying, accel.ContextPoisonedError)
        assert (error.device, error.executed) == (other.name, "unknown")
        await bounded(writing)
        assert not lent(one)
        np.testing.assert_array_equal(await bounded(other.get(await other.put(source))), numbers(LARGE) * 0)
        assert (one.generation, other.generation) == generations


async def test_a_copy_to_a_device_that_is_rebuilt_waits_for_it(places: Places) -> None:
    with places.two() as (one, other):
        source = await one.put(numbers())
        out = await other.zeros(source.shape, "float64", durable=True)
        await other.put(source)
        following = killed(other)
        await until(lambda: other.state is accel.DeviceState.REBUILDING, "the end of the child")
        copies = await bounded(asyncio.gather(other.put(source), other.put(source, out=out)))
        assert other.generation == following
        for copy in copies:
            np.testing.assert_array_equal(await other.get(copy), numbers())


async def test_a_durable_source_that_was_rebuilt_while_it_was_copied_is_refused(places: Places) -> None:
    plan = FaultPlan().hang_at(1, op="copy")
    with places.two("process", "process", faults=plan) as (one, other):
        source = await one.put(numbers(), durable=True)
        copying = task(other.put(source))
        await until(lambda: lent(one) and other.info().in_flight, "the copy")
        await generation(one, killed(one))
        await bounded(one.run(accel.ops.Fill(source.shape, source.dtype, 0.0, source)))
        plan.release()
        error = await failure(copying, accel.StaleRefError)
        assert (error.device, error.retryable) == (one.name, True)
        assert (await other.get(await bounded(other.put(source))) == 0.0).all()


@pytest.mark.parametrize(("first", "second"), HOSTS)
async def test_a_cancelled_copy_ends_and_its_source_can_be_written(places: Places, first: str, second: str) -> None:
    plan = FaultPlan().hang_at(1, op="copy")
    with places.two(first, second, faults=plan) as (one, other):
        before = used(one), used(other)
        source = await one.put(numbers())
        copying = task(other.put(source))
        await until(lambda: lent(one) and other.info().in_flight, "the copy")
        await cancelled(copying)
        assert not lent(one)
        await bounded(one.run(accel.ops.Fill(source.shape, source.dtype, 0.0, source)))
        plan.release()
        await bounded(other.wait_idle())
        await asyncio.gather(one.zeros(1), other.zeros(1))
        assert used(one) < before[0] + 2 * source.nbytes
        assert used(other) < before[1] + source.nbytes


async def test_copies_that_are_cancelled_at_any_moment_leave_nothing(places: Places) -> None:
    rng = random.Random(5)
    with places.two() as (one, other):
        source = await one.put(numbers())
        before = used(one), used(other)
        for _ in range(60):
            copying = task(other.put(source))
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(rng.choice((0, 0, 0.001)))
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
        del copying
        await bounded(one.run(accel.ops.Fill(source.shape, source.dtype, 1.0, source)))  # it waits for all loans
        await asyncio.gather(one.zeros(1), other.zeros(1))
        await until(lambda: used(one) <= before[0] + 256 and used(other) <= before[1] + 256)
        assert (await other.get(await other.put(source)) == 1.0).all()
        assert (lent(one), mappings(other)) == (0, 1)


@pytest.mark.parametrize("is_written", [False, True])
async def test_a_known_buffer_is_copied_before_the_answer_unless_a_write_of_it_is_in_flight(places: Places, is_written: bool) -> None:
    plan, copy_plan = FaultPlan().hang_at(1, op="fill").hang_at(2, op="lend"), FaultPlan().hang_at(2, op="copy")
    with places.two("process", "process", faults=copy_plan, first_faults=plan) as (one, other):
        source, bystander = await one.put(numbers()), await one.put(numbers())
        await other.put(source)  # from now on it is known where it is
        filling = task(one.run(accel.ops.Fill(source.shape, source.dtype, 1.0, source if is_written else bystander)))
        copying = task(other.put(source))
        await until(lambda: one.info().in_flight == 2, "the loan")
        if is_written:
            await turns()
            assert not other.info().in_flight
        else:
            await until(lambda: other.info().in_flight, "the copy")
        plan.release()
        copy_plan.release()
        expected = np.ones(LARGE // 8) if is_written else numbers()
        np.testing.assert_array_equal(await other.get(await bounded(copying)), expected)
        await bounded(filling)


async def test_a_deadline_is_for_all_of_a_copy(places: Places) -> None:
    plan = FaultPlan().hang_at(1, op="lend")
    with places.two(first_faults=plan) as (one, other):
        source = await one.put(numbers())
        await failure(other.put(source, timeout=0.05), accel.DeadlineExceededError)
        plan.release()
        np.testing.assert_array_equal(await other.get(await other.put(source, timeout=PATIENCE)), numbers())


# -- mappings


@pytest.mark.parametrize(("first", "second"), HOSTS)
async def test_a_slab_is_mapped_once_and_unmapped_when_it_is_idle(places: Places, first: str, second: str) -> None:
    with places.two(first, second) as (one, other):
        source = await one.put(numbers())
        await other.put(numbers())
        pid = other.info().pid
        await until(lambda: not mappings(other), "the end of mappings of before")
        before = slab_maps(pid)  # some of which, of other tests, may be about to end
        for _ in range(5):
            await asyncio.gather(*[other.put(source) for _ in range(3)])
        assert (len(slab_maps(pid) - before), mappings(other)) == (1, 1)
        await until(lambda: not mappings(other), "the end of the mapping")
        await until(lambda: slab_maps(pid) <= before, "the end of the mapping")
        np.testing.assert_array_equal(await other.get(await other.put(source)), numbers())


async def test_many_slabs_are_copied_at_once_and_at_most_so_many_are_mapped(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_LEND_FROM", 1)
    monkeypatch.setattr(peers, "_MOST_MAPPED", 8)
    plan = FaultPlan().hang_at(1, op="copy")
    with places.two(faults=plan) as (_, other):
        sources = [await places.system.open_device("cpu", host="inline", streams=1) for _ in range(12)]
        refs = [await device.put(numbers(100, at)) for at, device in enumerate(sources)]
        copying = [task(other.put(ref)) for ref in refs]
        await until(lambda: mappings(other) == 8, "8 mappings")
        await turns(200)
        assert mappings(other) == 8
        plan.release()
        for at, copy in enumerate(await bounded(asyncio.gather(*copying))):
            np.testing.assert_array_equal(await other.get(copy), numbers(100, at))
        for at, ref in enumerate(refs):
            np.testing.assert_array_equal(await other.get(await other.put(ref)), numbers(100, at))
        assert mappings(other) == 8
        await asyncio.gather(*[device.aclose() for device in sources])


async def test_the_memory_of_a_device_that_was_closed_is_unmapped(places: Places) -> None:
    with places.two() as (_, other):
        one = await places.system.open_device("cpu", host="inline")
        await other.put(await one.put(numbers()))
        await one.aclose()
        await until(lambda: not mappings(other), "the end of the mapping")


async def test_a_fork_has_nothing_of_what_is_lent(places: Places) -> None:
    plan = FaultPlan().hang_at(1, op="copy")
    with places.two("process", "process", faults=plan) as (one, other):
        copying = task(other.put(await one.put(numbers())))
        await until(lambda: lent(one) and other.info().in_flight, "the copy")
        pid = os.fork()
        if not pid:
            os._exit(mapped(None) + sum("memfd:accel-" in link for link in links_of().values()))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        plan.release()
        np.testing.assert_array_equal(await other.get(await bounded(copying)), numbers())


@pytest.mark.parametrize("lie", [lie for lie in lying_child.LIES if "lent" in lie])
async def test_a_child_that_lends_what_it_has_not_is_replaced(lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = lying_child.install(monkeypatch, tmp_path)
    lying_child.lie(monkeypatch, lie, once=tmp_path / "told")
    async with accel.System(close_timeout=1.0) as system:
        liar = await system.open_device(name, host="process")
        other = await system.open_device(name, host="inline")
        with pytest.raises(accel.ContextPoisonedError) as caught:
            await bounded(other.put(await bounded(liar.zeros((LARGE // 8,), "float64"))))
        assert caught.value.device == liar.name
        await generation(liar, 2)
        assert other.generation == 1
        np.testing.assert_array_equal(await other.get(await bounded(other.put(await liar.put(numbers())))), numbers())
