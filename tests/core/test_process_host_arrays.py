"""The shared memory of arrays on their way to and from a child comes back, whatever becomes of who sent them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.remote import arrays
from accel.remote.transfers import ArrayTransfers, _ArrayTransfer
from accel.storage.pinned import PinnedMemory
from tests.device_support import cancelled, child_pid, failure, opened, task, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")

LARGE = arrays.COPIED_HERE * 4


class Gate:
    """Holds copies on their worker threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        before = getattr(arrays.SharedArray, method)

        def held(outgoing: arrays.SharedArray) -> None:
            self.reached.set()
            assert self.opened.wait(20)
            before(outgoing)

        monkeypatch.setattr(arrays.SharedArray, method, held)


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch, "fill")
    yield gate
    gate.opened.set()


@pytest.fixture
def landing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch, "land")
    yield gate
    gate.opened.set()


async def record(device: accel.Device, array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    async with device.batch() as batch:
        batch.put(array)
        batch.put(array)


@pytest.mark.parametrize("way", ["op", "batch"])
async def test_of_what_was_cancelled_while_it_was_copied(filling: Gate, way: str) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        array = np.zeros(LARGE, np.uint8)
        sending = task(device.put(array) if way == "op" else record(device, array))
        await until(filling.reached.is_set)
        await cancelled(sending)
        assert device.info().memory.used == 0  # what was dropped is accounted for
        filling.opened.set()
        await until(lambda: device.info().pinned.used == 0, "the memory coming back")
        assert device.info().memory.used == 0
        np.testing.assert_array_equal(await device.get(await device.put(array)), array)


@pytest.mark.parametrize("way", ["op", "batch"])
async def test_of_what_was_copied_while_the_child_died(filling: Gate, way: str) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        array = np.zeros(LARGE, np.uint8)
        sending = task(device.put(array) if way == "op" else record(device, array))
        await until(filling.reached.is_set)
        os.kill(child_pid(device), signal.SIGKILL)
        await until(lambda: device.state is accel.DeviceState.REBUILDING)
        filling.opened.set()
        await asyncio.wait({sending}, timeout=20)
        if sending.exception() is not None:  # a batch belongs to the generation in which it was recorded
            assert isinstance(sending.exception(), accel.StaleRefError)
        del sending
        await until(lambda: device.info().pinned.used == 0, "the memory coming back")


async def test_of_what_came_back_right_before_the_child_died(landing: Gate) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        ref = await device.put(np.zeros(LARGE, np.uint8))
        # The second is answered while the first is copied: it waits for its turn.
        reading = [task(device.get(ref)) for _ in range(2)]
        await until(landing.reached.is_set)
        os.kill(child_pid(device), signal.SIGKILL)
        for each in reading:
            await failure(each, accel.ContextPoisonedError)
        landing.opened.set()
        await until(lambda: device.info().pinned.used == 0, "the memory coming back")
        assert np.all(await device.get(await device.put(np.ones(LARGE, np.uint8))) == 1)


def test_a_landing_is_made_or_given_up_once() -> None:
    class Each:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def land(self) -> None:
            self.calls.append("land")

        def close(self) -> None:
            self.calls.append("close")

    for first, wanted in (("copy", ["land", "close"]), ("give_up", ["close"])):
        each = Each()
        made = arrays.CopyBack([each])  # type: ignore[list-item]
        getattr(made, first)()
        made.copy()
        made.give_up()
        assert each.calls == wanted


async def test_what_finds_room_in_the_turn_of_a_fault_is_not_sent_to_the_child_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is found, and before its owner goes on the context has faulted: the op goes to the next generation, and the memory comes back."""
    room = PinnedMemory.room

    async def then_faults(self: PinnedMemory, nbytes: int, check: Any) -> Any:
        piece = await room(self, nbytes, check)
        monkeypatch.undo()
        device._host.context.report_fault(accel.LibraryError("it faults now", scope=accel.FaultScope.CONTEXT))
        return piece

    async with accel.System() as system:
        device: Any = await system.open_device("cpu", host="process")
        x = await device.zeros(4)
        monkeypatch.setattr(PinnedMemory, "room", then_faults)
        error = await failure(device.get(x), accel.StaleRefError)
        assert error.reason == "generation"
        np.testing.assert_array_equal(await device.get(await device.put(np.arange(3.0))), np.arange(3.0))
        assert device.generation == 2
        assert device.info().pinned.used == 0


@pytest.mark.parametrize("has_come", [True, False])
async def test_a_part_is_given_back_where_the_next_one_cannot_be_sent(has_come: bool) -> None:
    """If it has come. The memory of one that has not is the child's until that is gone."""
    loop, made, array = asyncio.get_running_loop(), list[SimpleNamespace](), np.zeros(300, np.uint8)

    def within(piece: Any, part: Any) -> Any:
        shared = SimpleNamespace(array=part, place=SimpleNamespace(shape=part.shape), is_closed=False)
        shared.close = lambda: setattr(shared, "is_closed", True)
        made.append(shared)
        return shared

    def send_part(submission: Any, op: Any, buffers: Any, outgoing: Any, action: Any) -> Any:
        answer = loop.create_future()
        if len(made) > 1:
            outgoing.close()
            raise accel.ContextPoisonedError("the child is gone")
        if has_come:
            answer.set_result(None)
        return answer

    pinned = SimpleNamespace(part=100, take=lambda nbytes: SimpleNamespace(nbytes=100))
    core = SimpleNamespace(pinned=pinned, loop=loop, system=SimpleNamespace(run_blocking=None))
    context: Any = SimpleNamespace(core=core, send_part=send_part)
    places: Any = SimpleNamespace(within=within)
    async with opened() as device:
        ref = await device.put(array)
        submission: Any = SimpleNamespace(is_settled=False)
        transfer = _ArrayTransfer(context, submission, array, ref, None)
        with pytest.raises(accel.ContextPoisonedError):
            await ArrayTransfers(context, places)._get(transfer, pinned.take(100))
    assert [each.is_closed for each in made] == [has_come, True]
