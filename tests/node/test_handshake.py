"""The first messages between machines: tokens, versions, and TLS with what stands between."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.node import handshake
from accel.node.client import Node
from accel.process.protocol import encode_header, greeting
from accel.remote.error_codec import encode_error
from tests.node_support import PATIENCE, TOKEN, AgentProcess, proxy_to, running_agent, tls_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with running_agent() as agent:
        yield agent


@pytest.mark.parametrize("shown", ["no TLS", "a certificate of its own"])
async def test_a_relay_between_the_ends_of_tls_gets_no_proof(shown: str, tmp_path: Path) -> None:
    """It relays all messages between a service and an agent with TLS, whose certificate it cannot show."""
    for folder in ("agent", "relay"):
        (tmp_path / folder).mkdir()
    certificate, _, _ = tls_files(tmp_path / "agent", "127.0.0.9")
    own, _, trusts_relay = tls_files(tmp_path / "relay")
    takes_all = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    takes_all.check_hostname, takes_all.verify_mode = False, ssl.CERT_NONE
    shows = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shows.load_cert_chain(own)
    with running_agent("127.0.0.9", "--tls-cert", certificate) as agent:
        async with proxy_to(agent.address, from_tls=shows if shown != "no TLS" else None, to_tls=takes_all) as proxy:
            node = Node(proxy.address, TOKEN, trusts_relay if shown != "no TLS" else None)
            with pytest.raises(accel.BackendUnavailableError, match="TLS ends between"):
                await asyncio.wait_for(node.find_devices(asyncio.to_thread, "cpu", None, is_shared=False), PATIENCE)
            assert b"devices" not in proxy.recorded
        assert "TLS ends between" in agent.close()


@pytest.mark.parametrize("refusal", [encode_error(accel.OutOfMemoryError("x" * 100)), bytes(1 << 16)], ids=["an error", "long"])
async def test_what_an_agent_says_before_its_proof_is_not_told_as_true(refusal: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting() + encode_header(6, len(refusal)) + refusal)
        with contextlib.suppress(OSError):
            await reader.read(1 << 10)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        with pytest.raises(accel.BackendUnavailableError) as caught:
            await Node(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", TOKEN).find_devices(
                asyncio.to_thread, "cpu", None, is_shared=False
            )
    assert "xxx" not in caught.value.message
    await asyncio.sleep(0)


async def test_tls_at_one_end_alone_is_told(agent: AgentProcess, tmp_path: Path) -> None:
    certificate, _, trusted = tls_files(tmp_path, "127.0.0.9")
    with running_agent("127.0.0.9", "--tls-cert", certificate) as encrypted:
        for node, told in (
            (Node(agent.address, TOKEN, trusted), "cannot be spoken to with TLS"),
            (Node(encrypted.address, TOKEN), "Give tls="),
            (Node(encrypted.address, TOKEN, ssl.create_default_context()), "certificate that is not trusted"),
        ):
            with pytest.raises(accel.BackendUnavailableError) as caught:
                await node.find_devices(asyncio.to_thread, "cpu", None, is_shared=False)
            assert told in f"{caught.value.message} {caught.value.remedy}"


@pytest.mark.parametrize("address", ["10.0.0.7:7420", "gpu-1:7420", "[2001:db8::1]:7420", "0.0.0.0:7420"])
def test_another_machine_is_not_spoken_to_without_tls_unless_told(address: str) -> None:
    with pytest.raises(accel.InvalidArgumentError, match="not be encrypted") as caught:
        Node(address)
    assert "tls=False" in str(caught.value.remedy)
    assert Node(address, tls=False).tls is False
    assert Node(address, tls=ssl.create_default_context()).tls
    with pytest.raises(accel.InvalidArgumentError, match="tls is"):
        Node(address, tls=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", ["", "short", " " * 40, None, 3])
def test_tokens_that_are_none_are_refused(token: Any) -> None:
    with pytest.raises(accel.InvalidArgumentError):
        handshake.check_token(token)


def test_the_token_is_found_in_the_environment_and_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("ACCEL_TOKEN", raising=False)
    monkeypatch.delenv("ACCEL_TOKEN_FILE", raising=False)
    with pytest.raises(accel.InvalidArgumentError, match="there is no token"):
        handshake.find_token()
    monkeypatch.setenv("ACCEL_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(accel.InvalidArgumentError, match="cannot be read"):
        handshake.find_token()
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert handshake.find_token() == TOKEN.encode()
    monkeypatch.setenv("ACCEL_TOKEN", "z" * 20)
    assert handshake.find_token() == b"z" * 20


async def test_another_version_is_refused_and_says_which(agent: AgentProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_versions", lambda: ["0.0.1", "3.99"])
    with pytest.raises(accel.BackendUnavailableError, match=r"this process accel 0\.0\.1 on Python 3\.99"):
        await agent.node.find_devices(asyncio.to_thread, "cpu", None, is_shared=False)


def test_a_token_is_in_no_repr() -> None:
    assert TOKEN not in repr(Node("here:1", TOKEN, tls=False))
