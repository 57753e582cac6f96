"""Copies from one GPU to another, whose memory is mapped: values, order, and what becomes of them when a process ends."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.device import peers
from accel.device.peers import peers_of
from accel.testing import FaultPlan
from accel_cuda import CudaBackend
from tests.child_support import until_so
from tests.device_support import child_pid, failure, generation, some_view, task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.gpu

GIBIBYTE = 1 << 30

ATTACHING = """
import asyncio, json, os, socket, sys
import accel

async def main():
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        data, fds, _, _ = socket.recv_fds(sock, 4096, 1)
        async with accel.System() as system:
            device = await system.open_device(sys.argv[2], host=sys.argv[3])
            ref = await device.attach(accel.SharedMemory(fds[0], *json.loads(data)))
            os.close(fds[0])
            await device.elementwise.binary("add", ref, ref, out=ref)
            sock.sendall(b"doubled")

asyncio.run(main())
"""


BY_TOKEN = """
import asyncio, pickle, sys
import accel

async def main():
    async with accel.System() as system:
        device = await system.open_device(sys.argv[1], host=sys.argv[2])
        shared, plain = [pickle.loads(bytes.fromhex(data)) for data in sys.argv[3:]]
        ref = await device.attach(shared)
        await device.elementwise.binary("add", ref, ref, out=ref)
        print((await device.get(await device.put(plain))).sum())

asyncio.run(main())
"""


def gpus() -> int:
    return len(CudaBackend().devices())


@pytest.fixture
def two_gpus() -> None:
    if gpus() < 2:
        pytest.skip(f"it takes two GPUs, and this process may use {gpus()}")
    if not CudaBackend().can_access_peer(1, 0):
        pytest.skip("GPU 1 does not reach the memory of GPU 0")


@asynccontextmanager
async def pair(first: str = "cuda:0", second: str = "cuda:1", hosts: tuple[Any, Any] = ("process", "process")) -> AsyncIterator[Any]:
    async with accel.System() as system:
        yield await asyncio.gather(system.open_device(first, host=hosts[0]), system.open_device(second, host=hosts[1]))


def numbers(count: int = 1 << 20, start: float = 0.0) -> np.ndarray[Any, Any]:
    return np.arange(start, start + count, dtype="float64")


async def check_copies(one: accel.Device, other: accel.Device) -> None:
    """Copy arrays, views and buffers of all kinds, both ways."""
    rng = np.random.default_rng(0)
    for array in (numbers(), rng.integers(0, 255, (3, 1 << 18)).astype("uint8"), np.zeros((0, 4)), np.float32(7), numbers(64 << 17)):
        copy = await one.put(await other.put(await one.put(array)))
        got = await one.get(copy)
        assert (got.dtype, got.shape, got.tobytes()) == (np.asarray(array).dtype, np.shape(array), np.asarray(array).tobytes())
    array = rng.standard_normal((96, 64, 128))
    source = await one.put(array)
    for _ in range(6):
        expected, view = some_view(rng, array, source)
        np.testing.assert_array_equal(await other.get(await other.put(view)), expected)
    out = await other.zeros(array.shape, "float64")
    assert await other.copy(source, out) is out
    np.testing.assert_array_equal(await other.get(out), array)


@pytest.mark.parametrize("hosts", [("process", "process"), ("inline", "process"), ("process", "inline")])
@pytest.mark.usefixtures("two_gpus")
async def test_copies_have_the_values_of_their_sources(hosts: tuple[str, str]) -> None:
    async with pair(hosts=hosts) as (one, other):
        assert [link.way for link in await accel_links(one)] == ["mapped"] * 2
        await check_copies(one, other)
        assert (one.generation, other.generation) == (1, 1)


async def accel_links(device: accel.Device) -> Any:
    """Return the links of the device's system."""
    return await device._core.system.links()  # type: ignore[attr-defined]


async def test_copies_between_two_processes_of_one_gpu() -> None:
    async with pair("cuda:0", "cuda:0") as (one, other):
        assert {(link.way, link.peer) for link in await accel_links(one)} == {("mapped", None)}
        await check_copies(one, other)


@pytest.mark.usefixtures("two_gpus")
async def test_without_peer_access_arrays_go_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "can_access_peer", lambda *_: False)
    async with pair() as (one, other):
        assert {(link.way, link.peer) for link in await accel_links(one)} == {("host", False)}
        np.testing.assert_array_equal(await other.get(await other.put(await one.put(numbers()))), numbers())
        assert not peers_of(other)._slabs


@pytest.mark.usefixtures("two_gpus")
async def test_a_copy_has_what_was_written_before_and_nothing_of_later_writes() -> None:
    async with pair() as (one, other):
        source = await one.zeros(64 << 17, "float64")
        for step in range(1, 31):
            writing = task(one.run(accel.ops.Fill(source.shape, source.dtype, float(step), source)))
            await asyncio.sleep(0)
            copying = task(other.put(source))
            await asyncio.sleep(0)
            later = task(one.run(accel.ops.Fill(source.shape, source.dtype, -1.0, source)))
            copy, _, _ = await asyncio.gather(copying, writing, later)
            got = await other.get(copy)
            assert (got == step).all(), (step, got.min(), got.max())


@pytest.mark.usefixtures("two_gpus")
async def test_both_gpus_copy_from_each_other_at_once() -> None:
    async with pair() as (one, other):
        x, y = await one.put(numbers()), await other.put(numbers(start=1e7))
        for _ in range(21):
            async with asyncio.timeout(20):
                await asyncio.gather(one.put(y, out=x), other.put(x, out=y))
        np.testing.assert_array_equal(await one.get(x), numbers(start=1e7))
        np.testing.assert_array_equal(await other.get(y), numbers())


@pytest.mark.usefixtures("two_gpus")
async def test_the_death_of_the_owner_in_the_middle_harms_no_copy() -> None:
    async with pair() as (one, other):
        array = np.random.default_rng(1).integers(0, 255, GIBIBYTE, np.uint8)
        source = await one.put(array)
        await other.put(source)  # from here on it is mapped
        copying = [task(other.put(source)) for _ in range(8)]
        await until_so(lambda: other.info().in_flight > 3)
        os.kill(child_pid(one), signal.SIGKILL)
        copies = await asyncio.gather(*copying, return_exceptions=True)
        ended = [copy for copy in copies if isinstance(copy, accel.AccelRef)]
        assert len(ended) > 3
        assert {type(copy) for copy in copies} <= {type(ended[0]), accel.ContextPoisonedError, accel.StaleRefError}
        for copy in ended:
            np.testing.assert_array_equal(await other.get(copy), array)
        await generation(one, 2)
        assert other.generation == 1
        np.testing.assert_array_equal(await other.get(await other.put(await one.put(numbers()))), numbers())


@pytest.mark.usefixtures("two_gpus")
async def test_the_death_of_the_target_ends_the_loan() -> None:
    async with pair() as (one, other):
        source = await one.zeros(GIBIBYTE, "uint8")
        copying = [task(other.put(source)) for _ in range(8)]
        await until_so(lambda: other.info().in_flight > 3)
        writing = task(one.run(accel.ops.Fill(source.shape, source.dtype, 3, source)))
        os.kill(child_pid(other), signal.SIGKILL)
        errors = await asyncio.gather(*copying, return_exceptions=True)
        assert any(isinstance(error, accel.ContextPoisonedError) for error in errors)
        async with asyncio.timeout(20):
            await writing
        assert one.generation == 1
        copy = await other.put(source)
        assert (await other.get(copy) == 3).all()
        assert other.generation == 2


@pytest.mark.usefixtures("two_gpus")
async def test_a_fault_of_the_owner_harms_no_copy() -> None:
    plan = FaultPlan()
    async with accel.System() as system:
        one = await system.open_device("cuda:0", host="process", faults=plan.poison_at(1, op="unary"))
        other = await system.open_device("cuda:1", host="process")
        source = await one.put(numbers(128 << 17))
        copying = [task(other.put(source)) for _ in range(4)]
        await until_so(lambda: other.info().in_flight > 0)
        await failure(one.elementwise.unary("neg", await one.zeros(8)), accel.ContextPoisonedError)
        for copy in await asyncio.gather(*copying, return_exceptions=True):
            if isinstance(copy, accel.AccelRef):
                np.testing.assert_array_equal(await other.get(copy), numbers(128 << 17))
            else:
                assert isinstance(copy, (accel.ContextPoisonedError, accel.StaleRefError))
        assert other.generation == 1


@pytest.mark.usefixtures("two_gpus")
async def test_memory_of_the_other_gpu_comes_back_once_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_IDLE_SECONDS", 0.1)
    async with pair() as (one, other):
        for _ in range(3):  # more than the GPU has, if it does not come back
            source = await one.zeros(60 * GIBIBYTE, "uint8")
            await other.put(source[: GIBIBYTE // 2])
            await one.free(source)
            await one.aclose()
            await until_so(lambda: not peers_of(other)._slabs)
            one = await other._core.system.open_device("cuda:0", host="process")


@pytest.mark.parametrize(("spec", "host"), [("cuda:0", "inline"), ("cuda:0", "process"), ("cuda:1", "process")])
async def test_another_process_computes_in_the_memory(spec: str, host: str) -> None:
    if spec == "cuda:1" and gpus() < 2:
        pytest.skip(f"it takes two GPUs, and this process may use {gpus()}")
    async with accel.System() as system:
        device = await system.open_device("cuda:0", host="process")
        ref = await device.zeros(1000, shareable=True)
        await device.put(np.arange(1000, dtype="float32"), out=ref)
        memory = await device.share(ref)
        mine, theirs = socket.socketpair()
        with mine, theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", ATTACHING, str(theirs.fileno()), spec, host, pass_fds=(theirs.fileno(),)
            )
            socket.send_fds(mine, [json.dumps(memory[1:]).encode()], [memory.fd])
            os.close(memory.fd)
            mine.settimeout(120)
            assert await asyncio.to_thread(mine.recv, 100) == b"doubled"
            assert await asyncio.wait_for(process.wait(), 60) == 0
        np.testing.assert_array_equal(await device.get(ref), 2 * np.arange(1000, dtype="float32"))


async def test_what_is_no_memory_of_a_gpu_is_refused() -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda:0", host="process")
        memory = await device.share(await device.zeros(8, shareable=True))
        reading, writing = os.pipe()
        memfd = os.memfd_create("memory")
        os.ftruncate(memfd, memory.nbytes)
        for wrong in ({"fd": reading}, {"fd": memfd}, {"nbytes": 0}, {"uuid": "GPU-0"}):
            with pytest.raises((accel.InvalidArgumentError, accel.DriverError)):
                await device.attach(memory._replace(**wrong))
        for fd in (memory.fd, reading, writing, memfd):
            os.close(fd)
        assert device.generation == 1
        assert (await device.get(await device.zeros(3)) == 0).all()


@pytest.mark.usefixtures("two_gpus")
async def test_cancelled_copies_leave_nothing() -> None:
    rng = np.random.default_rng(3)
    async with pair() as (one, other):
        source = await one.put(numbers(16 << 17))
        for _ in range(50):
            copying = task(other.put(source))
            await asyncio.sleep(float(rng.random()) * 0.001)
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
        async with asyncio.timeout(20):
            await one.run(accel.ops.Fill(source.shape, source.dtype, 1.0, source))
        assert (await other.get(await other.put(source)) == 1.0).all()
        assert (one._core.loans.count, len(peers_of(other)._slabs)) == (0, 1)


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_another_process_finds_memory_of_a_gpu_by_its_token(host: str) -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda:0", host="process")
        ref, plain = await device.zeros(1000, shareable=True), await device.full(8, 3.0)
        await device.put(np.arange(1000, dtype="float32"), out=ref)
        by_token = [pickle.dumps(device.publish(ref)).hex(), pickle.dumps(device.publish(plain)).hex()]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", BY_TOKEN, "cuda:0", host, *by_token, stdout=pipe)
        output, _ = await asyncio.wait_for(process.communicate(), 120)
        assert (output.split(), process.returncode) == ([b"24.0"], 0)
        np.testing.assert_array_equal(await device.get(ref), 2 * np.arange(1000, dtype="float32"))
