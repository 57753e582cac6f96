"""A device on a node under load, while its agent is killed and the link to it is cut."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from benchmarks.chaos_parts.clients import ask
from benchmarks.chaos_parts.requests import check

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.chaos_parts.oracle import Ledger
    from benchmarks.chaos_parts.subject import Subject

__all__ = ["NODE_FAULTS", "Noded"]

NODE_FAULTS = frozenset(("agent_kill", "link_cut"))
_ROOT = Path(__file__).resolve().parents[2]
_TORN = frozenset(("torn",))
_PAUSE = 0.02


class Noded:
    """A node on the loopback network with one device, its clients, and durable data that a cut link leaves as it is.

    Parameters
    ----------
    ledger
        Where requests are entered.
    seed
        Of the run.

    Attributes
    ----------
    subject : Subject
        The device, once :meth:`open` has returned.
    is_up : bool
        Whether the agent runs.
    """

    subject: Subject

    def __init__(self, ledger: Ledger, seed: int) -> None:
        self._ledger = ledger
        self._seed = seed
        self._token = secrets.token_hex(16)
        self.is_up = False
        self._agent: asyncio.subprocess.Process | None = None
        self._port = 0
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self._kept = np.random.default_rng(seed).random(1 << 14)
        self._durable: accel.AccelRef | None = None

    async def open(self, opening: Callable[[accel.Node], Awaitable[Subject]]) -> None:
        """Start the agent, and open the device with what is given: through a relay, whose connections can be cut."""
        await self._start_agent()
        self._server = await asyncio.start_server(self._link, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.subject = await opening(accel.Node(f"{host}:{port}", self._token))

    async def _start_agent(self) -> None:
        """Start the agent, at the port that it had."""
        command = [sys.executable, "-m", "accel", "node", "--listen", f"127.0.0.2:{self._port}", "--log-level", "error"]
        environment = {**os.environ, "ACCEL_TOKEN": self._token, "PYTHONPATH": str(_ROOT)}
        self._agent = agent = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
        assert agent.stdout is not None
        line = (await agent.stdout.readline()).decode()
        self._port, self.is_up = int(line.split()[4].rstrip(",").rpartition(":")[2]), True

    # -- the relay

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.2", self._port)
        except OSError:  # the agent is being started
            writer.transport.abort()
            return
        self._links |= {writer, to_writer}
        for way in ((reader, to_writer), (to_reader, writer)):
            task = asyncio.ensure_future(self._relay(*way))
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()
            self._links.discard(writer)

    # -- the faults

    async def link_cut(self) -> None:
        """Cut all connections between the device and its node."""
        self.subject.faulted()
        for writer in self._links:
            writer.transport.abort()

    async def agent_kill(self) -> None:
        """Kill the agent, and start another one: the durable memory is gone."""
        assert self._agent is not None, "it was started"
        self.is_up = False
        self.subject.faulted()
        self._agent.kill()
        await self._agent.wait()
        await self._start_agent()

    # -- the load

    def forget(self) -> None:
        """Drop the durable data."""
        self._durable = None

    async def run(self, number: int, stop: asyncio.Event) -> None:
        """Be one client, until told to stop: the first one reads durable data, and puts it anew once it is torn."""
        rng, device = np.random.default_rng([self._seed, 1 << 26, number]), self.subject.device
        while not stop.is_set():
            asking = self._read(device) if not number else self._square(device, rng.standard_normal((16, 16)))
            await ask(self._ledger, self._ledger.begin("node", self.subject, allows=_TORN), asking)
            await asyncio.sleep(_PAUSE)

    async def _square(self, device: accel.Device, a: Any) -> None:
        x = await device.put(a)
        check(await device.get(await device.blas.gemm(x, x)), a @ a, "node")

    async def _read(self, device: accel.Device) -> None:
        if self._durable is None:
            self._durable = await device.put(self._kept, durable=True)
        try:
            found = await device.get(self._durable)
        except accel.StaleRefError:
            self._durable = None
            raise
        check(found, self._kept, "durable on a node")

    async def close(self) -> None:
        """End the agent and the relay; the device is closed by now."""
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._links):
            writer.transport.abort()
        await asyncio.gather(*self._relays, return_exceptions=True)
        if self._agent is not None:
            if self._agent.returncode is None:
                self._agent.terminate()
            await self._agent.wait()
