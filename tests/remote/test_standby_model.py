"""Spare children of ``standby="model"``: registered libraries are open there, over the same memory, before a fault needs them."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.affine_support import Affine, Eager, Weights, pids, read
from tests.child_support import until_so, workers
from tests.device_support import bounded, child_pid, failure, generation, opened, until, used

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.usefixtures("nothing_left")

LOST = accel.DriverError("illegal address", code=700, scope=accel.FaultScope.PROCESS)


@asynccontextmanager
async def with_spare(faults: FaultPlan | None = None, **options: Any) -> AsyncIterator[accel.Device]:
    async with opened(faults, standby="model", **{"host": "process", **options}) as device:
        yield device


async def ready(device: accel.Device) -> None:
    assert await device.spare_ready()


def spare_of(device: accel.Device) -> int:
    """Return the process of the spare child."""
    (pid,) = workers() - {device.info().pid}
    return pid


def slabs_in(pid: int) -> int:
    """Return how many slabs a process has mapped."""
    return sum("memfd:accel" in line and "slab" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


@pytest.mark.parametrize("way", ["kill", "auto"])
async def test_the_first_good_answer_is_of_the_instance_that_the_spare_had_open(way: str, rng: np.random.Generator, tmp_path: Path) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    plan = FaultPlan() if way == "kill" else FaultPlan().poison_at(1, LOST, op="fill")
    async with with_spare(plan, host="auto" if way == "auto" else "process") as device:
        await device.register(Eager, str(journal), await weights.put(device), way="slow")
        await ready(device)
        spare = spare_of(device)
        serving = device.info().pid or os.getpid()
        assert set(pids(journal)) == {serving, spare}
        assert read(journal) == ["open", "open"]
        if way == "kill":
            os.kill(child_pid(device), signal.SIGKILL)
        else:
            await failure(device.zeros(1), accel.ContextPoisonedError)
        await generation(device, 2)
        assert device.info().pid == spare
        assert len(read(journal)) == 2, "nothing was opened twice"
        await weights.holds(device)
        await ready(device)
        assert read(journal) == ["open"] * 3, "the next spare has it too"


async def test_memory_that_changes_after_the_spare_has_mapped_it(rng: np.random.Generator, tmp_path: Path) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    async with with_spare(FaultPlan().poison_at(1, op="copy")) as device:
        before = await device.put(rng.standard_normal(50), durable=True)
        refs = await weights.put(device)
        await device.register(Eager, str(journal), refs)
        await ready(device)
        spare = spare_of(device)
        # The slab is shared: buffers of it come and go, and the spare must not cut anything from it meanwhile.
        del before
        array = rng.standard_normal((40, 3))
        after = await device.put(array, durable=True)
        ordinary = [await device.put(rng.standard_normal(30)) for _ in range(20)]
        weights.b = rng.standard_normal(6)
        await device.put(weights.b, out=refs["b"])
        await weights.holds(device)
        await failure(device.copy(await device.put(weights.w), refs["w"]), accel.ContextPoisonedError)
        await generation(device, 2)
        assert device.info().pid == spare
        assert all(ref.is_stale for ref in ordinary)
        torn = await failure(weights.holds(device), accel.StaleRefError)
        assert torn.reason == "torn"
        made = [(data, await device.put(data)) for data in (rng.standard_normal(int(n)) for n in rng.integers(1, 400, 20))]
        weights.w = rng.standard_normal((6, 6))
        await device.put(weights.w, out=refs["w"])
        await weights.holds(device)
        for data, ref in made:
            np.testing.assert_array_equal(await device.get(ref), data)
        np.testing.assert_array_equal(await device.get(after), array)
        assert pids(journal)[:2].count(spare) == 1


async def test_what_is_unregistered_leaves_the_spare_too(rng: np.random.Generator, tmp_path: Path) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    async with with_spare() as device:
        await ready(device)
        spare = spare_of(device)
        none = slabs_in(spare)
        await device.register(Affine, str(tmp_path / "lazy"), await weights.put(device))
        await ready(device)
        assert (pids(tmp_path / "lazy"), slabs_in(spare)) == ([child_pid(device)], none + 1)
        await bounded(device.unregister("affine"))
        await device.register(Eager, str(journal), await weights.put(device))
        await ready(device)
        assert (set(pids(journal)), slabs_in(spare)) == ({child_pid(device), spare}, none + 1)
        await bounded(device.unregister("affine"))
        await until_so(lambda: read(journal).count("close") == 2)
        await until_so(lambda: slabs_in(spare) == none)
        await until(lambda: used(device) == 0, "its memory is free")
        again = Weights(rng)
        await device.register(Eager, str(tmp_path / "again"), await again.put(device))
        await ready(device)
        os.kill(child_pid(device), signal.SIGKILL)
        await generation(device, 2)
        assert device.info().pid == spare == pids(tmp_path / "again")[1]
        await again.holds(device)
        assert read(journal).count("open") == 2


async def test_a_library_unregistered_while_the_spare_is_promoted_is_closed_there(rng: np.random.Generator, tmp_path: Path) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    async with with_spare() as device:
        await device.register(Eager, str(journal), await weights.put(device))
        await ready(device)
        spare = spare_of(device)
        os.kill(child_pid(device), signal.SIGKILL)
        await until(lambda: device.state is accel.DeviceState.REBUILDING)
        await bounded(device.unregister("affine"))
        assert device.info().pid == spare
        assert read(journal) == ["open", "open", "close"]
        assert pids(journal)[2] == spare
        await until(lambda: used(device) == 0, "its memory is free")


async def test_a_spare_that_cannot_open_a_library_is_a_spare_all_the_same(
    rng: np.random.Generator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    async with with_spare() as device:
        journal.touch()
        await device.register(Eager, str(journal), await weights.put(device), way=f"only {child_pid(device)}")
        await ready(device)
        assert caplog.text.count("standby_without_library") == 1
        spare = spare_of(device)
        os.kill(child_pid(device), signal.SIGKILL)
        await generation(device, 2)
        assert device.info().pid == spare
        assert caplog.text.count("library_not_opened") == 1
        assert "not in this process" in str(await failure(weights.holds(device), accel.LibraryError))
        journal.unlink()  # from now on it can be opened
        await weights.holds(device)
        assert pids(journal)[0] == spare


@pytest.mark.parametrize("by", ["itself", "fault of the device"])
async def test_a_fault_while_the_spare_opens_a_library(by: str, rng: np.random.Generator, tmp_path: Path) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    async with with_spare() as device:
        await ready(device)
        spare = spare_of(device)
        await device.register(Eager, str(journal), await weights.put(device), way="slow")
        await until(lambda: device.info().standby == "starting", "the spare opens it")
        os.kill(spare if by == "itself" else child_pid(device), signal.SIGKILL)
        if by != "itself":
            await generation(device, 2)
            assert device.info().pid == spare
            assert pids(journal)[1:] == [spare], "it has opened it once"
        await weights.holds(device)
        await ready(device)
        assert len(read(journal)) == 3 - (by == "itself")
