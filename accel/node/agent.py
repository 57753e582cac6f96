"""The agent of a node: starts children for controllers on other machines, and relays their messages.

The agent trusts what proves that it has the token, as a child trusts its parent; it unpickles
nothing. It ends three kinds of messages, those that carry descriptors, for these cannot leave the
machine: it makes the blocks of host memory that a controller has, and keeps the slabs of durable
memory that a child reports; see :mod:`accel.node.relay`.

The connection is the lease of a child: when it ends, the child is killed. What is durable is kept
for a while after the last child of a device, for its next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from accel._log import get_logger
from accel.dtype import DType
from accel.errors import AccelError, BackendUnavailableError, HostDiedError, InvalidArgumentError
from accel.node.handshake import RefusedError, Streams, receive_request, verify
from accel.node.relay import KeptSlabs, Relay
from accel.registry import find_device, find_specs
from accel.remote.tokens import decode_request, fetch_copy
from accel.storage.disposal import Disposal

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Coroutine

    from accel.actors import ActorSystem

__all__ = ["Agent"]

logger = get_logger()

_PROOF_TIMEOUT = 5.0
"""Seconds that a connection has to prove that it has the token."""
_MAX_UNPROVED = 64
"""Connections that may be about to prove it at once; for another one, one of these is closed."""
_MAX_DEVICES = 1024
"""Devices for which a controller may ask at once."""
_READ_AHEAD = 1 << 10
"""Bytes of a connection that may wait to be looked at; beyond, and what one read returns, the system holds them."""
_SHORTAGE_PAUSE = 1.0
"""Seconds without accepting after the process had no descriptor for a connection."""
_PIECE_BYTES = 1 << 20
"""The most of a copy that is written at once."""
_PIECE_TIMEOUT = 30.0
"""Seconds within which a controller must take one of these pieces."""
_QUIET = 60.0
"""Seconds between two lines of the log about refused connections."""


class Agent:
    """Serves controllers. Made and used on one loop.

    Parameters
    ----------
    system
        Has the threads for what blocks, and ends all children with it.
    token
        What controllers must have; see :func:`~accel.node.handshake.check_token`.
    keep
        Seconds for which durable memory is kept after the last child of a device.
    tls
        With the certificate of this machine; ``None``: connections are not encrypted.
    certificate
        The same certificate, DER.
    """

    def __init__(
        self, system: ActorSystem, token: bytes, *, keep: float = 30.0, tls: ssl.SSLContext | None = None, certificate: bytes = b""
    ) -> None:
        self.system = system
        self.keep = keep
        self.loop = asyncio.get_running_loop()
        self.disposal = Disposal(self.loop)
        self._token = token
        self._tls = tls
        self._certificate = certificate
        self._sessions: dict[str, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # one for each connection whose request is not answered
        self._unproved: dict[asyncio.Task[Any], str] = {}  # of these, those without a proof -> addresses; the oldest first
        self._refused = 0  # connections since the last line of the log
        self._quiet_until = 0.0

    # -- connections

    async def serve(self, listening: socket.socket) -> None:
        """Accept connections until this is cancelled; then end all children, and forget everything.

        Parameters
        ----------
        listening
            A non-blocking socket that listens. The caller closes it.
        """
        try:
            while True:
                try:
                    sock, (address, *_) = await self.loop.sock_accept(listening)
                except OSError as error:
                    logger.warning("node_accepts_nothing", seconds=_SHORTAGE_PAUSE, error=error)
                    await asyncio.sleep(_SHORTAGE_PAUSE)
                    continue
                if len(self._unproved) >= _MAX_UNPROVED:
                    self._drop_unproved()
                self.start_task(self._serve_connection(sock, address))
                await asyncio.sleep(0)  # until it has begun: it closes the socket
        finally:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*[session.aclose() for session in tuple(self._sessions.values())])
            await self.disposal.aclose()

    def _drop_unproved(self) -> None:
        """Close a connection that has proved nothing: the oldest one of the address that has the most.

        So what is silent makes room, and floods of one address are at the expense of that address.
        """
        (address, _), *_ = Counter(self._unproved.values()).most_common(1)
        task = next(task for task, other in self._unproved.items() if other == address)
        del self._unproved[task]
        task.cancel()
        self._log_refused(address, "too many connections prove nothing")

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task that ends with :meth:`serve`."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _log_refused(self, address: str, why: str) -> None:
        """Log a refused connection, or count it if another one was logged a short time ago."""
        self._refused += 1
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + _QUIET
            logger.warning("node_connection_refused", address=address, count=self._refused, reason=why)
            self._refused = 0

    async def _serve_connection(self, sock: socket.socket, address: str) -> None:
        """Have a new connection prove itself, and answer its request."""
        transport: asyncio.BaseTransport | None = None
        task = asyncio.current_task()
        assert task is not None, "it is one of start_task"
        self._unproved[task] = address
        try:
            async with asyncio.timeout(_PROOF_TIMEOUT):
                sock.setblocking(False)
                reader = asyncio.StreamReader(_READ_AHEAD)
                protocol = asyncio.StreamReaderProtocol(reader)
                transport, _ = await self.loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._tls)
                streams = Streams(reader, asyncio.StreamWriter(transport, protocol, reader, self.loop), sock)
                await verify(streams, self._token, self._certificate)
                del self._unproved[task]
                request = await receive_request(streams)
            await self._answer(streams, request, address)
        except (OSError, EOFError, AccelError) as error:
            self._log_refused(address, str(error) or type(error).__name__)
            _abort(transport, sock)
        except BaseException:
            _abort(transport, sock)
            raise
        finally:
            self._unproved.pop(task, None)

    async def _answer(self, streams: Streams, request: dict[str, Any], address: str) -> None:
        """Answer a request, also if it means nothing, or a backend fails."""
        try:
            await self._do(streams, request)
        except (OSError, EOFError):
            raise
        except AccelError as error:
            await streams.refuse(error)
            streams.writer.close()
        except Exception as error:
            self._log_refused(address, f"{type(error).__name__}: {error!s:.200}")
            await streams.refuse(BackendUnavailableError(f"the node cannot answer the request: {error!r:.200}"))
            streams.writer.close()

    async def _do(self, streams: Streams, request: dict[str, Any]) -> None:
        """Do what a request asks for: list devices, start a child, take a connection for its arrays, or send a copy of what a token names."""
        what = request.get("what")
        if what == "devices":
            streams.answer({"devices": await self.system.run_blocking(_find_devices, request)})
            await streams.writer.drain()
            streams.writer.close()
        elif what == "child":
            await self._start_child(streams, request)
        elif what == "arrays":
            session = self._sessions.get(str(request["session"]))
            if session is None:
                raise _child_ended()
            await session.add_arrays(streams, _whole(request["child"]))
        elif what == "token":
            await self._send_copy(streams, str(request["request"]))
        else:
            raise RefusedError(f"the node knows no request {what!r:.80}")

    async def _start_child(self, streams: Streams, request: dict[str, Any]) -> None:
        """Start a child in the session of its device, which begins with the first one."""
        number, session_number = _whole(request["child"]), str(request["session"])
        known, slabs = frozenset(map(_whole, request["known"])), frozenset(map(_whole, request["slabs"]))
        silence, uvloop = float(request["silence"]), request["uvloop"] is True
        session = self._sessions.get(session_number)
        if session is None:
            session = self._sessions[session_number] = Session(self, lambda: self._forget(session_number, session))
        relay = Relay(self, session.slabs, silence, lambda: session.on_relay_end(number), session.fence)
        session.add(number, relay)
        try:
            await session.fence(number, known)
            session.drop_slabs(number, known, slabs)
            await relay.start(streams, uvloop=uvloop)
        except BaseException:
            session.on_relay_end(number)
            raise

    def _forget(self, number: str, session: Session | None) -> None:
        """Remove a session that has ended, unless another one has its number meanwhile."""
        if self._sessions.get(number) is session:
            del self._sessions[number]

    async def _send_copy(self, streams: Streams, request: str) -> None:
        """Ask the process of this machine that has published a buffer for a copy, and send that.

        To that process the agent is one of its own user's as any other.
        """
        token, _, seconds = decode_request(request.encode())
        async with fetch_copy(token, seconds, self.system, self.disposal, None) as array:
            streams.answer({"shape": array.shape, "dtype": DType.of(array.dtype).value})
            content = array.reshape(-1).view(np.uint8)
            for start in range(0, content.size, _PIECE_BYTES):
                streams.writer.write(content[start : start + _PIECE_BYTES].tobytes())
                async with asyncio.timeout(_PIECE_TIMEOUT):
                    await streams.writer.drain()
        streams.writer.close()


class Session:
    """The children of one device, and its durable memory.

    Attributes
    ----------
    slabs : KeptSlabs
    """

    def __init__(self, agent: Agent, on_end: Callable[[], object]) -> None:
        self.slabs = KeptSlabs(agent.disposal)
        self._agent = agent
        self._on_end = on_end
        self._relays: dict[int, Relay] = {}  # the children that have not ended, by their numbers
        self._last_fence: tuple[int, frozenset[int]] = (0, frozenset())
        self._keep_timer: asyncio.TimerHandle | None = None

    def add(self, number: int, relay: Relay) -> None:
        """Add a child that is to be started.

        Raises
        ------
        RefusedError
            If another one has its number, or a request that came before has given it up.
        """
        last, known = self._last_fence
        if number in self._relays:
            raise RefusedError(f"child {number} is there already")
        if number < last and number not in known:
            raise RefusedError(f"child {number} was given up")
        self._cancel_keep_timer()
        self._relays[number] = relay

    async def fence(self, number: int, known: frozenset[int]) -> None:
        """End the children that the controller has given up, so that they write to no durable memory any more.

        The controller numbers its requests in their order, in which they need not come here: a child
        with a higher number is none that it could have given up then.

        Parameters
        ----------
        number
            Of the request.
        known
            Numbers of the children that the controller had not given up then.

        Raises
        ------
        HostDiedError
            If one does not end. It stays known here, so that the next request waits for it too.
        """
        if number > self._last_fence[0]:
            self._last_fence = number, known
        given_up = [relay for other, relay in self._relays.items() if other < number and other not in known]
        for relay in given_up:
            relay.kill()
        for relay in given_up:
            await relay.wait()
            relay.end()

    def drop_slabs(self, number: int, known: frozenset[int], slabs: frozenset[int]) -> None:
        """Close the slabs that the controller has dropped while it had no child here.

        Parameters
        ----------
        number, known
            Of the request for a child, and the children that the controller knew of then. If there is
            another one, then or now, it may have made slabs of which the controller did not know.
        slabs
            Those that the controller knew of.
        """
        if not known and self._relays.keys() == {number}:
            self.slabs.close(self.slabs.fds.keys() - slabs)

    async def add_arrays(self, streams: Streams, number: int) -> None:
        """Give a connection for arrays to its child."""
        relay = self._relays.get(number)
        if relay is None:
            raise _child_ended()
        await relay.add_arrays(streams)

    def on_relay_end(self, number: int) -> None:
        """Forget a child; after the last one, keep the slabs for a while, unless they are released."""
        self._relays.pop(number, None)
        if not self._relays:
            self._cancel_keep_timer()
            self._keep_timer = self._agent.loop.call_later(0.0 if self.slabs.is_released else self._agent.keep, self._close)

    def _cancel_keep_timer(self) -> None:
        """Keep the slabs: a child has them, or will."""
        if self._keep_timer is not None:
            self._keep_timer.cancel()
            self._keep_timer = None

    def _close(self) -> None:
        """Forget everything."""
        self._cancel_keep_timer()
        self.slabs.close(self.slabs.fds)
        self._on_end()

    async def aclose(self) -> None:
        """End all children, and forget everything."""
        relays = tuple(self._relays.values())
        for relay in relays:
            relay.kill()
        for relay in relays:
            with contextlib.suppress(HostDiedError):
                await relay.wait()
        self._close()


def _whole(value: object) -> int:
    """Return a number that may have come as anything."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r:.80} is no whole number")
    return value


def _child_ended() -> BackendUnavailableError:
    """Return the error for a connection to a child that has ended."""
    return BackendUnavailableError("the child has ended", retryable=True)


def _abort(transport: asyncio.BaseTransport | None, sock: socket.socket) -> None:
    """Close a connection at once."""
    if isinstance(transport, asyncio.WriteTransport):
        transport.abort()
    else:
        sock.close()


def _find_devices(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the devices of this machine that a request names. May block: it imports backends."""
    specs, count = request["specs"], request["count"]
    listed = [specs] if isinstance(specs, str) else specs
    if not isinstance(listed, list) or len(listed) > _MAX_DEVICES or not all(isinstance(spec, str) for spec in listed):
        raise InvalidArgumentError(f"specs is {specs!r:.80}")
    if count is not None and (type(count) is not int or not 0 < count <= _MAX_DEVICES):
        raise InvalidArgumentError(f"count is {count!r:.80}", remedy=f"Ask for {_MAX_DEVICES} devices of a node at most.")
    devices = []
    for spec in find_specs(specs, count):
        backend, device = find_device(spec)
        check: Any = getattr(backend, "check_shareable", None)
        if request["is_shared"] and check is not None:
            check(device.index)
        devices.append(
            {"backend": device.backend, "index": device.index, "name": device.name, "uuid": device.uuid, "memory": device.memory}
        )
    return devices
