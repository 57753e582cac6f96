"""What reaches an agent's port, and what an agent sends: refused, logged once, bounded, and of no harm to others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import socket
import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

import accel
from accel.errors import AccelError
from accel.node import handshake
from accel.node.arrays import _HEAD, _MAGIC, pack_request
from accel.node.channel import NodeKind
from accel.node.client import Node
from accel.node.relay import Relay
from accel.process.protocol import MAX_MESSAGE, encode_header, greeting
from accel.remote.messages import Kind
from tests.device_support import generation, until
from tests.node_support import TOKEN, AgentProcess, lying_agent, proxy_to, running_agent

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")

PATIENCE = 30.0


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with running_agent() as agent:
        yield agent


@pytest.fixture(scope="module")
def seed() -> int:
    found = secrets.randbits(32)
    print(f"seed {found}")
    return found


def connected(agent: AgentProcess) -> socket.socket:
    """Return a plain socket that is connected to the agent."""
    host, _, port = agent.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def is_closed(sock: socket.socket) -> bool:
    """Return whether the agent closes the connection; reads what it still sends."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


async def asked(node: Node, request: dict[str, Any]) -> handshake.Streams:
    """Return a connection whose request the agent has answered."""
    streams, _ = await node.request(asyncio.to_thread, request)
    return streams


def child_request(**changes: Any) -> dict[str, Any]:
    """Return the request for a child."""
    request = {"what": "child", "session": secrets.token_hex(8), "child": 1, "known": [], "slabs": [], "uvloop": False, "silence": 10.0}
    return {**request, **changes}


async def serves(agent: AgentProcess) -> None:
    """Check that an agent still serves."""
    async with asyncio.timeout(PATIENCE):
        (device,) = await agent.node.find_devices(asyncio.to_thread, ["cpu"], None, is_shared=False)
    assert device.spec == "cpu:0"


# -- before the proof


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        bytes(1 << 16),
        greeting() + greeting(),
        greeting() + encode_header(2, 64) + bytes(64),
        greeting() + encode_header(2, 0),
        greeting() + encode_header(2, 1 << 31),
        greeting() + encode_header(4, 2) + b"{}",
        greeting()[:-4] + b"\xff\xff\xff\xff",
    ],
    ids=["nothing", "http", "tls", "zeros", "greetings", "wrong proof", "empty proof", "oversized", "no proof", "another version"],
)
async def test_what_proves_nothing_is_closed(sent: bytes, agent: AgentProcess) -> None:
    with connected(agent) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
        assert await asyncio.to_thread(is_closed, sock)
    await serves(agent)


async def test_a_slow_sender_has_five_seconds(agent: AgentProcess) -> None:
    def send_slowly() -> float:
        began = time.monotonic()
        with connected(agent) as sock:
            sock.settimeout(0.5)
            for byte in greeting() + encode_header(2, 64) + bytes(64):
                try:
                    sock.sendall(bytes([byte]))
                    if not sock.recv(1 << 16):
                        break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
        return time.monotonic() - began

    assert 4.0 < await asyncio.to_thread(send_slowly) < 15.0
    await serves(agent)


async def test_another_token_is_told_to_both(agent: AgentProcess) -> None:
    with pytest.raises(accel.BackendUnavailableError, match="another token") as caught:
        await Node(agent.address, "y" * 32).find_devices(asyncio.to_thread, "cpu", None, is_shared=False)
    assert "ACCEL_TOKEN" in str(caught.value.remedy)
    assert TOKEN not in str(caught.value)


async def test_a_recorded_proof_is_of_no_use(agent: AgentProcess) -> None:
    """Send an agent what a controller has sent in a connection that was recorded."""
    async with proxy_to(agent.address) as proxy:
        await Node(proxy.address, TOKEN).find_devices(asyncio.to_thread, "cpu", None, is_shared=False)
        recorded = bytes(proxy.recorded)
    assert b"devices" in recorded
    with connected(agent) as sock:
        sock.sendall(recorded)
        answer = await asyncio.to_thread(sock.recv, 1 << 16)
        refused = encode_header(6, 0)
        while refused not in answer:
            piece = await asyncio.to_thread(sock.recv, 1 << 16)
            assert piece, answer
            answer += piece
        assert b"devices" not in answer


async def test_many_connections_that_prove_nothing_keep_no_others_out_and_are_logged_once() -> None:
    with running_agent("127.0.0.5") as agent:
        socks = [connected(agent) for _ in range(150)]
        try:
            limit = time.monotonic() + PATIENCE
            while len(os.listdir(f"/proc/{agent.process.pid}/fd")) > 100:
                assert time.monotonic() < limit, "more than 64 connections are open"
                await asyncio.sleep(0.01)
            socks += [connected(agent) for _ in range(150)]  # as many as there may be, again
            await serves(agent)
        finally:
            for sock in socks:
                sock.close()
        await asyncio.gather(*[serves(agent) for _ in range(100)])
        log = agent.close()
    assert log.count("node_connection_refused") == 1, log


# -- controllers that have the token, and break the protocol


@pytest.mark.parametrize(
    "request_fields",
    [
        {"what": "shell"},
        {},
        {"what": "child"},
        child_request(known=3),
        child_request(child="1"),
        child_request(child=-1),
        child_request(slabs=[[]]),
        child_request(silence="long"),
        {"what": "arrays", "session": "none", "child": 1},
        {"what": "devices", "specs": 3, "count": None, "is_shared": False},
        {"what": "devices", "specs": [3], "count": None, "is_shared": False},
        {"what": "devices", "specs": ["cpu"] * 2000, "count": None, "is_shared": False},
        {"what": "devices", "specs": ["cpu"], "count": 2, "is_shared": False},
        {"what": "devices", "specs": "cpu", "count": 10**8, "is_shared": False},
        {"what": "devices", "specs": "cpu", "count": True, "is_shared": False},
        {"what": "devices"},
    ],
    ids=[
        "a shell",
        "nothing",
        "a child without fields",
        "known ones that are no list",
        "a child that is no number",
        "a child below 0",
        "a slab that is none",
        "a silence that is no number",
        "arrays of no session",
        "specs that are no list",
        "specs that are no texts",
        "too many specs",
        "a count beside specs",
        "a large count",
        "a count that is no number",
        "devices without fields",
    ],
)
async def test_requests_that_mean_nothing_are_refused_with_an_answer(request_fields: dict[str, Any], agent: AgentProcess) -> None:
    with pytest.raises(AccelError) as caught:
        await asyncio.wait_for(agent.node.request(asyncio.to_thread, request_fields), PATIENCE)
    assert "cannot be reached" not in caught.value.message
    await serves(agent)


def frame(kind: int, payload: bytes = b"") -> bytes:
    return encode_header(kind, len(payload)) + payload


@pytest.mark.parametrize(
    "sent",
    [
        bytes(64),
        encode_header(Kind.CONFIG, MAX_MESSAGE + 1),
        encode_header(Kind.BLOCK, 0, 3),
        frame(Kind.BLOCK, b"short"),
        frame(Kind.BLOCK, bytes(8) + b"\xff" * 8),
        frame(Kind.MAP_SLAB, b"short"),
        frame(Kind.UNMAP_BLOCK, b"short"),
        frame(NodeKind.ARRAYS, b"short"),
        frame(Kind.BLOCK, (1).to_bytes(8, "little") + (1 << 16).to_bytes(8, "little")) + frame(NodeKind.ARRAYS, b"short"),
        frame(NodeKind.FENCE),
        frame(NodeKind.FENCE, b"short"),
        frame(Kind.CONFIG, b"no pickle"),
        frame(Kind.BATCH, b"no op"),
    ],
    ids=[
        "zeros",
        "oversized",
        "descriptors",
        "block",
        "huge block",
        "slab",
        "unmap",
        "arrays",
        "arrays behind a block",
        "no fence",
        "fence",
        "config",
        "batch",
    ],
)
async def test_a_controller_that_breaks_the_protocol_loses_its_child_alone(sent: bytes, agent: AgentProcess) -> None:
    streams = await asked(agent.node, child_request())
    streams.writer.write(sent)
    if sent[:12] == encode_header(Kind.MAP_SLAB, 5)[:12]:
        streams.writer.write(frame(NodeKind.KILL))
    async with asyncio.timeout(PATIENCE):
        while await streams.reader.read(1 << 16):
            if not agent.children():
                break
    streams.writer.transport.abort()
    async with asyncio.timeout(PATIENCE):
        while agent.children():
            await asyncio.sleep(0.01)
    await serves(agent)


async def test_a_controller_that_leaves_before_its_child_is_there_leaves_no_child(agent: AgentProcess) -> None:
    request = {**child_request(), "versions": handshake._versions()}
    host, _, port = agent.address.rpartition(":")
    for resets, rest in ((False, b""), (True, b""), (False, b"A")):
        streams = await handshake.open_streams(host, int(port), None)
        await handshake.prove(streams, TOKEN.encode())
        streams.send(4, json.dumps(request).encode())
        streams.writer.write(rest)
        await streams.writer.drain()
        if resets:
            streams.writer.transport.abort()
        else:
            streams.writer.close()
    await serves(agent)
    async with asyncio.timeout(PATIENCE):
        while agent.children():
            await asyncio.sleep(0.01)


async def test_what_waits_for_a_child_that_reads_nothing_is_bounded(agent: AgentProcess) -> None:
    streams = await asked(agent.node, child_request())
    (pid,) = agent.children()
    os.kill(pid, signal.SIGSTOP)
    message = frame(Kind.BATCH, bytes(16 << 20))
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(PATIENCE):
            for _ in range(40):
                streams.writer.write(message)
                await streams.writer.drain()
    streams.writer.transport.abort()
    async with asyncio.timeout(PATIENCE):
        while agent.children():
            await asyncio.sleep(0.01)
    await serves(agent)


async def test_any_heartbeat_timeout_is_taken(agent: AgentProcess) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", node=agent.node, host=accel.ProcessHost(heartbeat_timeout=3e6))
        np.testing.assert_array_equal(await device.get(await device.put(np.arange(9.0))), np.arange(9.0))


async def test_arrays_of_a_child_that_does_not_run_yet_are_refused() -> None:
    async with accel.System():
        relay = Relay(cast("Any", None), cast("Any", None), 1.0, lambda: None, cast("Any", None))
        with pytest.raises(AccelError, match="not running yet"):
            await relay.add_arrays(cast("Any", None))


async def test_a_child_that_is_given_up_while_it_is_started_does_not_stay(agent: AgentProcess) -> None:
    host, _, port = agent.address.rpartition(":")
    connections = [await handshake.connect(host, int(port), None, TOKEN.encode()) for _ in range(2)]
    requests = [child_request(session="given up", child=number) for number in (1, 2)]  # neither knows of the other
    asking = [handshake.ask(streams, request) for streams, request in zip(connections, requests, strict=True)]
    _, answer = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(answer, dict)
    await until(lambda: agent.children() == [answer["pid"]], "the second child alone is there")
    for streams in connections:
        streams.writer.transport.abort()
    await until(lambda: not agent.children(), "it has ended too")


@pytest.mark.parametrize("place", [(9, 1, 1 << 20, 1), (9, 1, (1 << 64) - 1, 2), (9, 1, 0, 1 << 40), (9, 1, 0, 0)], ids=str)
async def test_an_array_that_is_not_within_its_block_ends_the_child(place: tuple[int, int, int, int], agent: AgentProcess) -> None:
    request = child_request()
    messages = await asked(agent.node, request)
    arrays = await asked(agent.node, {"what": "arrays", "session": request["session"], "child": 1})
    messages.writer.write(frame(Kind.BLOCK, (1).to_bytes(8, "little") + (1 << 16).to_bytes(8, "little")))
    messages.writer.write(frame(NodeKind.ARRAYS, pack_request(9, 1, [])))
    arrays.writer.write(_HEAD.pack(_MAGIC, *place) + bytes(4096))
    async with asyncio.timeout(PATIENCE):
        while agent.children():
            await asyncio.sleep(0.01)
    for streams in (messages, arrays):
        streams.writer.transport.abort()
    await serves(agent)


async def test_random_frames_harm_no_other_device(agent: AgentProcess, seed: int) -> None:
    chance = random.Random(seed)
    async with accel.System() as system:
        device = await system.open_device("cpu", node=agent.node)
        for _ in range(6):
            request = child_request()
            messages = await asked(agent.node, request)
            arrays = await asked(agent.node, {"what": "arrays", "session": request["session"], "child": 1})
            for streams in (messages, arrays):
                for _ in range(chance.randrange(1, 6)):
                    kind = chance.choice([*Kind, *NodeKind, chance.randrange(1, 1 << 16)])
                    data = chance.randbytes(chance.choice([0, 1, 8, 16, 24, 36, 300]))
                    streams.writer.write(frame(kind, data) if chance.random() < 0.8 else data)
            await asyncio.sleep(0.05)
            for streams in (messages, arrays):
                streams.writer.transport.abort()
        np.testing.assert_array_equal(await device.get(await device.put(np.arange(9.0))), np.arange(9.0))
        async with asyncio.timeout(PATIENCE):
            while agent.children() != [device.info().pid]:
                await asyncio.sleep(0.01)


# -- agents that lie


DEVICE = {"backend": "cpu", "index": 0, "name": "x", "uuid": "x", "memory": 1}


@pytest.mark.parametrize(
    "devices",
    [
        {"devices": [{}]},
        {"devices": [{**DEVICE, "index": "x"}]},
        {"devices": [{**DEVICE, "index": float("inf")}]},
        {"devices": [{**DEVICE, "index": -1}]},
        {"devices": [{**DEVICE, "memory": 1.5}]},
        {"devices": [{**DEVICE, "uuid": "x" * 1000}]},
        {"devices": 3},
        {"devices": []},
        {},
        {"devices": [{**DEVICE, "backend": "no"}]},
    ],
    ids=str,
)
async def test_devices_that_are_none_are_refused(devices: dict[str, Any]) -> None:
    async def lie(streams: handshake.Streams, request: dict[str, Any]) -> None:
        streams.answer(devices)
        await streams.reader.read()

    async with accel.System() as system, lying_agent(lie) as node:
        with pytest.raises(AccelError):
            await asyncio.wait_for(system.open_device("cpu", node=node), PATIENCE)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        bytes(64),
        encode_header(Kind.DONE, 1 << 30),
        frame(Kind.DONE, b"short"),
        frame(Kind.FAILED, b"x"),
        frame(Kind.WARM) + frame(Kind.DONE, bytes(8)),
        frame(Kind.NEW_SLAB, bytes(16)),
        frame(NodeKind.EXIT, b"{}"),
        frame(NodeKind.FENCED),
        frame(NodeKind.EXIT, b'{"code": 1, "signal": null, "output": "why"}'),
        frame(NodeKind.EXIT, b'{"code": 1, "signal": null, "output": "why", "loss": ""}'),
        frame(40_000, b"?"),
    ],
    ids=["nothing", "zeros", "oversized", "done", "failed", "unasked", "slab", "bad exit", "fenced", "no loss", "exit", "unknown"],
)
async def test_a_device_on_a_node_that_lies_is_not_opened(said: bytes) -> None:
    async def lie(streams: handshake.Streams, request: dict[str, Any]) -> None:
        if request["what"] == "devices":
            streams.answer({"devices": [DEVICE]})
        else:
            streams.answer({"pid": 1, "keep": 0})
            if request["what"] == "child":
                streams.writer.write(said)
                await asyncio.sleep(0.3)
                return
        await streams.reader.read()

    async with accel.System() as system, lying_agent(lie) as node:
        with pytest.raises(AccelError):
            await asyncio.wait_for(system.open_device("cpu", node=node, restart=accel.RestartStrategy(max_restarts=0)), PATIENCE)


async def test_an_end_of_the_connection_behind_the_first_message_is_seen() -> None:
    async def lie(streams: handshake.Streams, request: dict[str, Any]) -> None:
        if request["what"] == "child":
            streams.answer({"pid": 1, "keep": 0})
            streams.writer.write(frame(Kind.WARM))
            streams.writer.write_eof()
        else:
            await asyncio.sleep(0.1)  # what came with the answer of before has arrived
            streams.answer({"devices": [DEVICE]})
        await asyncio.sleep(PATIENCE)  # it holds the connection

    async with accel.System() as system, lying_agent(lie) as node:
        with pytest.raises(AccelError, match=r"the connection to node .* was lost"):
            await asyncio.wait_for(system.open_device("cpu", node=node, restart=accel.RestartStrategy(max_restarts=0)), PATIENCE / 2)


@pytest.mark.parametrize(
    "answer", [{"pid": float("inf")}, {"pid": 0}, {"pid": True}, {"keep": float("nan")}, {"keep": float("inf")}, {"keep": -1}], ids=str
)
async def test_a_child_that_an_agent_describes_wrongly_is_not_taken(answer: dict[str, Any]) -> None:
    async def lie(streams: handshake.Streams, request: dict[str, Any]) -> None:
        streams.answer({"devices": [DEVICE]} if request["what"] == "devices" else {"pid": 1, "keep": 0.0, **answer})
        with contextlib.suppress(OSError):
            await streams.reader.read()
        ended.append(request["what"])

    ended: list[str] = []
    async with accel.System() as system, lying_agent(lie) as node:
        with pytest.raises(AccelError, match=f"answered {next(iter(answer))}="):
            await asyncio.wait_for(system.open_device("cpu", node=node, restart=accel.RestartStrategy(max_restarts=0)), PATIENCE)
        await until(lambda: sorted(ended) == ["arrays", "child", "devices"], "both connections are closed")


async def test_an_agent_without_the_token_is_not_believed() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams = handshake.Streams(reader, writer, writer.get_extra_info("socket"))
        writer.write(greeting())
        streams.send(1, bytes(32))
        await streams.receive(0)
        await streams.receive(2)
        streams.send(3, bytes(32))
        await reader.read()
        writer.close()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        with pytest.raises(accel.BackendUnavailableError, match="another token"):
            await Node(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", TOKEN).find_devices(
                asyncio.to_thread, "cpu", None, is_shared=False
            )
    await asyncio.wait_for(ended.wait(), PATIENCE)
    await asyncio.sleep(0)


async def test_a_connection_that_is_split_into_bytes_works(agent: AgentProcess) -> None:
    async with accel.System() as system, proxy_to(agent.address) as proxy:
        proxy.piece = 7
        device = await system.open_device("cpu", node=Node(proxy.address, TOKEN))
        array = np.arange(500.0)
        np.testing.assert_array_equal(await device.get(await device.put(array)), array)
        proxy.cut()
        await generation(device, 2)
