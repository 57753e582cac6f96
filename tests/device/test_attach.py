"""Memory that a device shares with other processes, and attaches from them."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.engine.loans import Loan
from accel.engine.sender import Sender
from tests.child_support import no_child_left
from tests.device_support import bounded, failure, until, used

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["no_child_left"]  # a fixture

pytestmark = pytest.mark.usefixtures("nothing_left", "no_child_left")

OTHER_PROGRAM = """
import asyncio, json, os, socket, sys
import accel

async def main():
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        data, fds, _, _ = socket.recv_fds(sock, 4096, 1)
        async with accel.System() as system:
            device = await system.open_device("cpu", host=sys.argv[2])
            ref = await device.attach(accel.SharedMemory(fds[0], *json.loads(data)))
            os.close(fds[0])
            await device.elementwise.binary("add", ref, ref, out=ref)
            sock.sendall(b"doubled")

asyncio.run(main())
"""


@pytest.fixture(params=["inline", "process"])
async def device(request: pytest.FixtureRequest) -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cpu", host=request.param)


async def shared(device: accel.Device, count: int = 1000) -> tuple[accel.AccelRef, accel.SharedMemory]:
    """Return a buffer of numbers, and what others attach it by."""
    ref = await device.zeros(count, shareable=True)
    await device.put(np.arange(count, dtype="float32"), out=ref)
    return ref, await device.share(ref)


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_another_process_computes_in_the_memory(device: accel.Device, host: str) -> None:
    import json

    ref, memory = await shared(device)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", OTHER_PROGRAM, str(theirs.fileno()), host, pass_fds=(theirs.fileno(),)
        )
        socket.send_fds(mine, [json.dumps(memory[1:]).encode()], [memory.fd])
        os.close(memory.fd)
        mine.settimeout(50)
        assert await asyncio.to_thread(mine.recv, 100) == b"doubled"
        assert await asyncio.wait_for(process.wait(), 60) == 0
    np.testing.assert_array_equal(await device.get(ref), 2 * np.arange(1000, dtype="float32"))


async def test_both_refs_are_of_one_memory_which_lives_as_long_as_one_of_them(device: accel.Device) -> None:
    ref, memory = await shared(device)
    attached = await device.attach(memory)
    again = await device.share(attached)
    third = await device.attach(again)
    for fd in (memory.fd, again.fd):
        os.close(fd)
    await device.run(accel.ops.Fill(ref.shape, ref.dtype, 7.0, attached))
    assert (await device.get(ref) == 7.0).all()
    await device.free(ref)
    del attached
    await device.zeros(1)
    assert (await device.get(third[10:20]) == 7.0).all()
    assert used(device) <= 256, "it does not count"


async def test_shared_memory_is_copied_by_other_devices() -> None:
    async with accel.System() as system:
        one, other = await system.open_device("cpu", host="inline"), await system.open_device("cpu", host="process")
        ref, memory = await shared(one, 1 << 20)
        copy = await bounded(other.put(ref))
        attached = await other.attach(memory)
        os.close(memory.fd)
        assert (await other.get(copy) == await other.get(attached)).all()


async def test_the_memory_ends_with_its_refs(device: accel.Device) -> None:
    ref, memory = await shared(device)
    attached = await device.attach(memory)
    inode = os.fstat(memory.fd).st_ino
    os.close(memory.fd)
    pid = device.info().pid or os.getpid()

    def is_mapped() -> bool:
        with open(f"/proc/{pid}/maps", encoding="utf-8") as lines:
            return any(f" {inode} " in line and "memfd:accel" in line for line in lines)

    assert is_mapped()
    del ref, attached
    await device.zeros(1)
    await until(lambda: not is_mapped(), "the end of the memory")


async def test_what_others_give_is_checked_by_its_value(device: accel.Device) -> None:
    ref, memory = await shared(device)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 4096)
    reading, writing = os.pipe()
    with open(__file__, encoding="utf-8") as file:
        for wrong in (
            {"fd": -1},
            {"fd": True},
            {"fd": "3"},
            {"fd": 1 << 40},
            {"fd": unsealed},
            {"fd": reading},
            {"fd": file.fileno()},
            {"nbytes": 1 << 40},
            {"nbytes": 0},
            {"nbytes": 4096.0},
            {"shape": (2000,)},
            {"shape": (-1,)},
            {"shape": "x"},
            {"shape": (1,) * 65},
            {"dtype": "float99"},
            {"uuid": "CPU-0"},
        ):
            with pytest.raises((accel.InvalidArgumentError, accel.DriverError)):
                await bounded(device.attach(memory._replace(**wrong)))
    not_memory: Any = ("x", 1)
    await failure(device.attach(not_memory), accel.InvalidArgumentError)
    for fd in (memory.fd, unsealed, reading, writing):
        os.close(fd)
    assert device.generation == 1
    np.testing.assert_array_equal(await device.get(ref), np.arange(1000, dtype="float32"))


async def test_a_closed_descriptor_is_refused(device: accel.Device) -> None:
    _, memory = await shared(device)
    os.close(memory.fd)
    with pytest.raises((accel.InvalidArgumentError, accel.AccelError)):
        await bounded(device.attach(memory))
    assert device.generation == 1
    if device.info().pid is not None:
        assert not device._host.context._link.questions, "it was not asked"


@pytest.mark.parametrize("device", ["process"], indirect=True)
async def test_a_child_that_shares_a_buffer_and_does_not_say_where_it_is_is_replaced(
    device: accel.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await device.zeros(1000, shareable=True)
    loan = Loan(asyncio.get_running_loop(), 1, ref.nbytes)

    async def lend(sender: Sender, op: Any, timeout: float | None) -> Loan:
        return loan

    with monkeypatch.context() as patched:
        patched.setattr(Sender, "run", lend)
        await failure(device.share(ref), accel.ContextPoisonedError)
    await until(lambda: device.generation == 2)


async def test_only_memory_of_its_own_is_shared(device: accel.Device) -> None:
    error = await failure(device.share(await device.zeros(3)), accel.InvalidArgumentError)
    assert "shareable=True" in (error.remedy or "")
    ref = await device.zeros(3, shareable=True)
    await failure(device.share(ref[1:]), accel.InvalidArgumentError)
    await failure(device.zeros(3, shareable=True, durable=True), accel.InvalidArgumentError)
    await failure(device.zeros(3, shareable=1), accel.InvalidArgumentError)  # type: ignore[arg-type]
    for size in (1 << 62, (1 << 40, 1 << 40)):
        await failure(device.zeros(size, shareable=True), accel.OutOfMemoryError)
    assert (await device.get(ref) == 0).all()
    empty = await device.zeros((0, 4), shareable=True)
    memory = await device.share(empty)
    assert (await device.attach(memory)).shape == (0, 4)
    os.close(memory.fd)
