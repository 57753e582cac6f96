"""What the tests of nodes share: an agent in a process of its own, a proxy on the way to it, and an agent that lies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.node import handshake
from tests.child_support import children_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

TOKEN = secrets.token_hex(16)
PATIENCE = 30.0


class AgentProcess:
    """A running ``python -m accel node``.

    Parameters
    ----------
    host
        The address of the loopback network at which it listens; with a port: that one.
    *arguments
        Further arguments.

    Attributes
    ----------
    address : str
        ``host:port``.
    """

    def __init__(self, host: str = "127.0.0.2", *arguments: str, token: str = TOKEN) -> None:
        listen = host if ":" in host else f"{host}:0"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "accel", "node", "--listen", listen, "--log-format", "console", *arguments],
            env={**os.environ, "ACCEL_TOKEN": token, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "listens at" in line, self.close()
        self.address = line.split()[4].rstrip(",")

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return int(self.address.rpartition(":")[2])

    @property
    def node(self) -> accel.Node:
        """The node as ``open_device`` takes it."""
        return accel.Node(self.address, TOKEN)

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self.process.kill()
        self.process.wait()

    def close(self) -> str:
        """End it, and return what it has logged."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.communicate(timeout=PATIENCE)[1]
        finally:
            self.process.kill()

    def children(self) -> list[int]:
        """Return the process ids of its children."""
        return sorted(children_of(self.process.pid))


@contextlib.contextmanager
def running_agent(host: str = "127.0.0.2", *arguments: str) -> Iterator[AgentProcess]:
    """Run an agent while the block runs."""
    agent = AgentProcess(host, *arguments)
    try:
        yield agent
    finally:
        agent.close()


class Proxy:
    """Relays connections to an agent, and drops, delays, splits or stalls what it relays."""

    def __init__(self, target: str, tls: ssl.SSLContext | None) -> None:
        host, _, port = target.rpartition(":")
        self._tls = tls
        self._target = (host, int(port))
        self._flowing: list[asyncio.Event] = []  # of each connection, in their order
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.piece = 1 << 16
        self.delay = 0.0
        self.refuses = False
        self._stalls_new = False
        self.connections = 0
        self.address = ""
        self.recorded = bytearray()  # what came for the agent

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray, flowing: asyncio.Event) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(self.piece):
                    record += data
                    if self.delay:
                        await asyncio.sleep(self.delay)
                    await flowing.wait()
                    writer.write(data)
                    await writer.drain()
            await flowing.wait()  # a stalled connection does not tell its end
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.refuses:
            writer.transport.abort()
            return
        try:
            to_reader, to_writer = await asyncio.open_connection(*self._target, ssl=self._tls)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, to_writer}
        flowing = asyncio.Event()
        if not self._stalls_new:
            flowing.set()
        self._flowing.append(flowing)
        for way in ((reader, to_writer, self.recorded, flowing), (to_reader, writer, bytearray(), flowing)):
            task = asyncio.ensure_future(self._relay(*way))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def cut(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def stall(self, which: slice | None = None) -> None:
        """Relay nothing for now: of all connections, new ones too, or of some that are there, in the order in which they were made."""
        self._stalls_new = which is None
        for flowing in self._flowing[which or slice(None)]:
            flowing.clear()

    def flow(self) -> None:
        """Go on."""
        self._stalls_new = False
        for flowing in self._flowing:
            flowing.set()


@contextlib.asynccontextmanager
async def proxy_to(target: str, *, from_tls: ssl.SSLContext | None = None, to_tls: ssl.SSLContext | None = None) -> AsyncIterator[Proxy]:
    """Run a proxy while the block runs, which may be an end of TLS on one side or on both."""
    proxy = Proxy(target, to_tls)
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0, ssl=from_tls)
    proxy.address = "{}:{}".format(*server.sockets[0].getsockname()[:2])
    try:
        yield proxy
    finally:
        server.close()
        proxy.flow()
        proxy.cut()
        for task in tuple(proxy._tasks):
            task.cancel()
        await asyncio.gather(*proxy._tasks, return_exceptions=True)
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def lying_agent(lie: Callable[[handshake.Streams, dict[str, Any]], Awaitable[None]], token: str = TOKEN) -> AsyncIterator[accel.Node]:
    """Run an agent in this process that answers requests as ``lie`` does."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        streams = handshake.Streams(reader, writer, writer.get_extra_info("socket"))
        try:
            await handshake.verify(streams, token.encode())
            await lie(streams, await handshake.receive_request(streams))
        except (OSError, EOFError, accel.AccelError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield accel.Node("{}:{}".format(*server.sockets[0].getsockname()[:2]), TOKEN)
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)


def tls_files(folder: Path, host: str = "127.0.0.1") -> tuple[str, str, ssl.SSLContext]:
    """Return files of a certificate for an address, in which its key is too, and of the key alone, and what trusts it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    names = ["-subj", "/CN=node", "-addext", f"subjectAltName=IP:{host}"]
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", str(key), "-out", str(certificate), *names],
        check=True,
        capture_output=True,
    )
    certificate.write_text(certificate.read_text() + key.read_text())
    return str(certificate), str(key), ssl.create_default_context(cafile=str(certificate))
