"""``accel node``: what it refuses to begin with, and TLS."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel.cli.main import main
from tests.node_support import TOKEN, AgentProcess, running_agent, tls_files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--listen", "0.0.0.0:0"], "--tls-cert"),
        (["--listen", "[::]:0"], "--tls-cert"),
        (["--listen", "nonsense"], "host:port"),
        (["--listen", "127.0.0.1:99999"], "too large"),
        (["--listen", "127.0.0.1:" + "9" * 5000], "too large"),
        (["--listen", "127.0.0.1:0", "--keep", "-1"], "--keep"),
        (["--listen", "127.0.0.1:0", "--keep", "nan"], "--keep"),
        (["--listen", "127.0.0.1:0", "--tls-key", "key.pem"], "--tls-cert"),
        (["--listen", "127.0.0.1:0", "--tls-cert", "/nowhere.pem"], "cannot be used: [Errno 2] No such file or directory: '/nowhere.pem'"),
        (["--listen", "192.0.2.1:0", "--no-tls"], "Give an address of this machine"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_a_node_is_not_started_with(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCEL_TOKEN", TOKEN)
    assert main(["node", *arguments]) == 1
    assert reason in capsys.readouterr().err


def test_a_node_needs_a_token(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("ACCEL_TOKEN", raising=False)
    monkeypatch.delenv("ACCEL_TOKEN_FILE", raising=False)
    assert main(["node", "--listen", "127.0.0.1:0"]) == 1
    assert "openssl rand" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ACCEL_TOKEN", TOKEN)
    with running_agent() as agent:
        assert main(["node", "--listen", agent.address]) == 1
    assert "cannot be listened at" in capsys.readouterr().err


async def test_tls_carries_ops_and_arrays(tmp_path: Path) -> None:
    certificate, _, trusted = tls_files(tmp_path, "127.0.0.2")
    with running_agent("127.0.0.2", "--tls-cert", certificate) as agent:
        async with accel.System() as system:
            device = await system.open_device("cpu", node=accel.Node(agent.address, TOKEN, trusted))
            array = np.arange(1 << 20, dtype=np.float64)
            np.testing.assert_array_equal(await device.get(await device.put(array)), array)
            with pytest.raises(accel.BackendUnavailableError, match="certificate"):
                await system.open_device("cpu", node=accel.Node(agent.address, TOKEN, ssl.create_default_context()))
            with pytest.raises(accel.BackendUnavailableError):
                await system.open_device("cpu", node=agent.node)


def test_the_line_says_where_and_how(tmp_path: Path) -> None:
    certificate, key, _ = tls_files(tmp_path)
    agent = AgentProcess("127.0.0.2", "--tls-cert", certificate, "--tls-key", key)
    assert agent.port > 0
    agent.close()
