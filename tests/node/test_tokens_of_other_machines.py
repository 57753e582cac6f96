"""Tokens of buffers on other machines: an agent there asks the process that has published them, and sends a copy."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.node.handshake import RefusedError
from accel.process.protocol import ProtocolError
from accel.remote import tokens
from tests.child_support import links_of
from tests.device_support import failure, task, until
from tests.node_support import TOKEN, AgentProcess, lying_agent, proxy_to, running_agent, tls_files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from accel.node.handshake import Streams

pytestmark = pytest.mark.usefixtures("nothing_left")

PATIENCE = 30.0


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with running_agent() as agent:
        yield agent


@pytest.fixture(params=["inline", "process"])
async def owner(request: pytest.FixtureRequest) -> AsyncIterator[accel.Device]:
    """The device that publishes."""
    async with accel.System() as system:
        yield await system.open_device("cpu", host=request.param)


@pytest.fixture
async def device(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[accel.Device]:
    """A device that finds no socket of the owner's, as on another machine. The agent finds them."""
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        monkeypatch.setattr(tokens, "_connect", nothing_here)
        yield device


async def nothing_here(token: accel.AccelToken) -> Any:
    raise tokens._gone(token)


def memfds(agent: AgentProcess) -> int:
    """Return how many descriptors of memory the agent has."""
    return sum("memfd" in link for link in links_of(agent.process.pid).values())


async def test_a_token_is_copied_through_an_agent_of_its_machine(owner: accel.Device, device: accel.Device, agent: AgentProcess) -> None:
    ref = await owner.put(np.arange(12.0).reshape(3, 4))
    token = owner.publish(ref)
    error = await failure(device.put(token), accel.StaleRefError)
    assert "node=" in str(error.remedy)
    for named, expected in ((token, np.arange(12.0).reshape(3, 4)), (owner.publish(ref.T[1]), [1.0, 5.0, 9.0])):
        copy = await device.put(named, node=agent.node)
        assert copy.device is device
        np.testing.assert_array_equal(await device.get(copy), expected)
    out = await device.zeros((3, 4), "float64")
    assert await device.put(token, node=agent.node, out=out, timeout=PATIENCE) is out
    assert (await device.put(token, node=agent.node, durable=True)).durable
    await failure(device.put(token, node=agent.node, out=await device.zeros(5)), accel.InvalidArgumentError)
    await until(lambda: not memfds(agent), "the agent has closed the copies")


@pytest.mark.parametrize("dtype", ["bfloat16", "complex128", "bool"])
@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5), ((9 << 20) + 1,)], ids=str)
async def test_all_shapes_and_dtypes_are_copied(shape: tuple[int, ...], dtype: str, device: accel.Device, agent: AgentProcess) -> None:
    async with accel.System() as system:
        owner = await system.open_device("cpu", host="inline")
        ref = await owner.full(shape, 1, dtype)
        copy = await device.put(owner.publish(ref), node=agent.node)
        assert (copy.shape, copy.dtype) == (shape, accel.DType.of(dtype))
        assert (await device.get(copy)).tobytes() == (await owner.get(ref)).tobytes()


async def test_a_buffer_on_a_third_machine_is_asked_for_where_it_was_published(device: accel.Device, agent: AgentProcess) -> None:
    with running_agent("127.0.0.3") as third:
        async with accel.System() as system:
            there = await system.open_device("cpu", node=third.node)
            token = there.publish(ref := await there.put(np.arange(1 << 17)))
            np.testing.assert_array_equal(await device.get(await device.put(token, node=agent.node)), await there.get(ref))


async def test_what_is_not_there_is_told(owner: accel.Device, device: accel.Device, agent: AgentProcess) -> None:
    ref, secret = await owner.zeros(4, shareable=True), await owner.zeros(4)
    token = owner.publish(ref)

    def put(token: Any) -> Any:
        return device.put(token, node=agent.node)

    assert "publish" in str((await failure(put(secret.token()), accel.InvalidArgumentError)).remedy)
    assert (await failure(put(replace(token, generation=7)), accel.StaleRefError)).reason == "generation"
    await failure(put(replace(token, device="cpu:0/x")), accel.InvalidArgumentError)
    assert "no process" in (await failure(put(replace(token, device="cpu:0/" + "0" * 32)), accel.StaleRefError)).message
    del ref
    assert (await failure(put(token), accel.StaleRefError)).reason == "freed"
    await owner.aclose()
    await failure(put(token), accel.StaleRefError)
    await until(lambda: not memfds(agent), "the agent has closed what it was given")


async def test_node_is_for_tokens_and_copies_alone(owner: accel.Device, device: accel.Device, agent: AgentProcess) -> None:
    token = owner.publish(ref := await owner.zeros(4, shareable=True))
    with pytest.raises(accel.InvalidArgumentError, match="node= is for tokens"):
        await device.put(np.zeros(3), node=agent.node)
    with pytest.raises(accel.InvalidArgumentError, match="host:port"):
        await device.put(token, node="here")
    assert "device.put(token, node=" in str((await failure(device.attach(token), accel.StaleRefError)).remedy)
    await owner.free(ref)


async def test_a_node_that_is_not_there_is_told(owner: accel.Device, device: accel.Device, agent: AgentProcess) -> None:
    token = owner.publish(ref := await owner.zeros(4))
    error = await failure(device.put(token, node=accel.Node("127.0.0.2:1", TOKEN)), accel.BackendUnavailableError)
    assert error.retryable
    error = await failure(device.put(token, node=accel.Node(agent.address, "y" * 32)), RefusedError)
    assert "another token" in error.message
    await owner.free(ref)


async def test_a_stalled_and_a_cut_connection_end_the_wait(device: accel.Device, agent: AgentProcess) -> None:
    async with accel.System() as system, proxy_to(agent.address) as proxy:
        owner = await system.open_device("cpu", host="inline")
        token = owner.publish(ref := await owner.zeros(4 << 20, "float64"))
        node = accel.Node(proxy.address, TOKEN)
        proxy.stall()
        error = await failure(device.put(token, node=node, timeout=0.2), accel.DeadlineExceededError)
        assert "0.2 s" in error.message
        proxy.flow()
        proxy.recorded.clear()
        proxy.delay = 0.01
        putting = task(device.put(token, node=node))
        await until(lambda: b"seconds" in proxy.recorded, "the request has been sent")
        await asyncio.sleep(0.1)
        proxy.cut()
        assert (await failure(putting, accel.BackendUnavailableError)).retryable
        proxy.delay = 0.0
        assert (await device.get(await device.put(token, node=node))).shape == ref.shape
    await until(lambda: not memfds(agent), "the agent has closed the copies")


async def test_a_copy_is_encrypted_where_the_agent_is(device: accel.Device, tmp_path: Path) -> None:
    certificate, key, context = tls_files(tmp_path)
    with running_agent("127.0.0.1", "--tls-cert", certificate, "--tls-key", key) as agent:
        async with accel.System() as system, proxy_to(agent.address) as proxy:
            owner = await system.open_device("cpu", host="inline")
            token = owner.publish(ref := await owner.put(np.arange(1 << 18)))
            copy = await device.put(token, node=accel.Node(proxy.address, TOKEN, context))
            np.testing.assert_array_equal(await device.get(copy), await owner.get(ref))
            assert token.device.encode() not in proxy.recorded


@pytest.mark.parametrize(
    ("answer", "sent"),
    [
        ({}, b""),
        ({"shape": [4]}, b""),
        ({"shape": [4], "dtype": "float99"}, b""),
        ({"shape": [4], "dtype": []}, b""),
        ({"shape": 5, "dtype": "int8"}, b""),
        ({"shape": ["x"], "dtype": "int8"}, b""),
        ({"shape": [-1], "dtype": "int8"}, b""),
        ({"shape": [1 << 62], "dtype": "int64"}, b""),
        ({"shape": [1] * 1000, "dtype": "int8"}, b""),
        ({"shape": [4], "dtype": "int8"}, b"abc"),
        ({"shape": [4], "dtype": "int8"}, b"abcde"),
    ],
    ids=str,
)
async def test_an_agent_that_lies_is_told(answer: dict[str, Any], sent: bytes, device: accel.Device) -> None:
    async def lie(streams: Streams, request: dict[str, Any]) -> None:
        assert json.loads(request["request"])["copy"] is True
        streams.answer(answer)
        streams.writer.write(sent)
        streams.writer.close()

    token = accel.AccelToken("cpu:0/" + "0" * 32, 1, 1)
    async with lying_agent(lie) as node:
        with pytest.raises((accel.BackendUnavailableError, ProtocolError)) as caught:
            await asyncio.wait_for(device.put(token, node=node), PATIENCE)
        assert caught.value.remedy


@pytest.mark.parametrize("wanted", ["", "{}", "[" * 5000, '{"token": 5, "seconds": 1}', 5, None])
async def test_a_request_that_means_nothing_is_refused(wanted: Any, agent: AgentProcess) -> None:
    with pytest.raises(accel.AccelError):
        await agent.node.request(asyncio.to_thread, {"what": "token", "request": wanted})
    with contextlib.suppress(accel.AccelError):
        await agent.node.request(asyncio.to_thread, {"what": "token"})
    await agent.node.find_devices(asyncio.to_thread, "cpu", None, is_shared=False)
