"""The agent of a node: starts children for controllers on other machines, and relays their messages.

The agent trusts what proves that it has the token, as a child trusts its parent; it unpickles
nothing. It ends three kinds of messages, those that carry descriptors, for these cannot leave the
machine: it makes the blocks of host memory that a controller has, and keeps the slabs of durable
memory that a child reports.

The connection is the lease of a child: when it ends, the child is killed. What is durable is kept
for a while after the last child of a device, for its next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import time
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any

from accel._log import get_logger
from accel.errors import AccelError, BackendUnavailableError, HostDiedError, InvalidArgumentError
from accel.memory import MemfdSlab
from accel.node.arrays import ArrayConnection, Place, unpack_request
from accel.node.channel import NodeChannel, NodeKind
from accel.node.handshake import RefusedError, Streams, verify
from accel.process.channel import Channel
from accel.process.child import ChildProcess
from accel.process.protocol import MAX_MESSAGE, ProtocolError
from accel.registry import find_device, find_specs
from accel.remote.error_codec import encode_error
from accel.remote.link import MAX_ANSWER, TARGET
from accel.remote.messages import Failure, Kind
from accel.storage.disposal import Disposal

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Coroutine, Iterable

    from accel.actors import ActorSystem
    from accel.process.exit_status import ExitStatus

__all__ = ["Agent"]

logger = get_logger()

_PROOF_TIMEOUT = 5.0
"""Seconds that a connection has to prove that it has the token."""
_MAX_UNPROVED = 64
"""Connections that may be about to prove it at once; others are closed."""
_SHORTAGE_PAUSE = 1.0
"""Seconds without accepting after the process had no descriptor for a connection."""
_QUIET = 60.0
"""Seconds between two lines of the log about refused connections."""
_CLOSE_TIMEOUT = 5.0
"""Seconds in which a child must end after it was asked to."""
_EXIT_TIMEOUT = 10.0
"""Seconds that a controller has to close the connection of a child that has ended."""
_MAX_UNSENT = 256 << 20
"""Bytes for a child that may wait for it, or for arrays; after that it is killed."""

_NUMBERS = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")


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
    """

    def __init__(self, system: ActorSystem, token: bytes, *, keep: float = 30.0, tls: ssl.SSLContext | None = None) -> None:
        self.system = system
        self.keep = keep
        self.loop = asyncio.get_running_loop()
        self.disposal = Disposal(self.loop)
        self._token = token
        self._tls = tls
        self._sessions: dict[str, _Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # one for each connection whose request is not answered
        self._unproved = 0
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
                    sock, address = await self.loop.sock_accept(listening)
                except OSError as error:
                    logger.warning("node_accepts_nothing", seconds=_SHORTAGE_PAUSE, error=error)
                    await asyncio.sleep(_SHORTAGE_PAUSE)
                    continue
                if self._unproved >= _MAX_UNPROVED:
                    sock.close()
                    self._log_refused(address, "too many connections prove nothing")
                    continue
                self._unproved += 1
                self.start_task(self._serve_connection(sock, address))
        finally:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*[session.aclose() for session in tuple(self._sessions.values())])
            await self.disposal.aclose()

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task that ends with :meth:`serve`."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _log_refused(self, address: Any, why: str) -> None:
        """Log a refused connection, or count it if another one was logged a short time ago."""
        self._refused += 1
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + _QUIET
            logger.warning("node_connection_refused", address=str(address[0]), count=self._refused, reason=why)
            self._refused = 0

    async def _serve_connection(self, sock: socket.socket, address: Any) -> None:
        """Have a new connection prove itself, and answer its request."""
        transport: asyncio.BaseTransport | None = None
        is_unproved = True
        try:
            async with asyncio.timeout(_PROOF_TIMEOUT):
                sock.setblocking(False)
                reader = asyncio.StreamReader()
                protocol = asyncio.StreamReaderProtocol(reader)
                transport, _ = await self.loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._tls)
                streams = Streams(reader, asyncio.StreamWriter(transport, protocol, reader, self.loop), sock)
                request = await verify(streams, self._token)
            self._unproved -= 1
            is_unproved = False
            await self._answer(streams, request)
        except (OSError, EOFError, AccelError) as error:
            self._log_refused(address, str(error) or type(error).__name__)
            _abort(transport, sock)
        except BaseException:
            _abort(transport, sock)
            raise
        finally:
            self._unproved -= is_unproved

    async def _answer(self, streams: Streams, request: dict[str, Any]) -> None:
        """Answer a request: devices, a child, or a connection for the arrays of a child."""
        try:
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
                session.add_arrays(streams, str(request["child"]))
            else:
                raise RefusedError(f"the node knows no request {what!r:.80}")
        except AccelError as error:
            await streams.refuse(error)
            streams.writer.close()
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"a request means nothing: {error!r:.200}") from None

    async def _start_child(self, streams: Streams, request: dict[str, Any]) -> None:
        """Start a child in the session of its device, which begins with the first one."""
        number, session_number = str(request["child"]), str(request["session"])
        others, slabs = frozenset(request["others"]), frozenset(request["slabs"])
        silence, uvloop = float(request["silence"]), request["uvloop"] is True
        session = self._sessions.get(session_number)
        if session is None:
            session = self._sessions[session_number] = _Session(self, lambda: self._sessions.pop(session_number, None))
        relay = _Relay(session, silence, lambda: session.on_relay_end(number))
        await session.begin(number, relay, others, slabs)
        try:
            await relay.start(streams, uvloop=uvloop)
        except BaseException:
            session.on_relay_end(number)
            raise


class _Session:
    """The children of one device, and its durable memory.

    Attributes
    ----------
    slabs : dict of int to int
        The device's numbers of slabs of durable memory -> descriptors.
    is_released : bool
        Whether the device was closed, so that nothing is kept.
    """

    def __init__(self, agent: Agent, on_end: Callable[[], object]) -> None:
        self.agent = agent
        self.slabs: dict[int, int] = {}
        self.is_released = False
        self._on_end = on_end
        self._relays: dict[str, _Relay] = {}
        self._keep_timer: asyncio.TimerHandle | None = None

    async def begin(self, number: str, relay: _Relay, others: frozenset[str], slabs: frozenset[int]) -> None:
        """Add a child that is to be started, once those that the controller has given up have ended.

        Parameters
        ----------
        number, relay
            The child.
        others, slabs
            Children and slabs that the controller still knows of. The slabs count if it knows of no
            child, which could make others.
        """
        self._cancel_keep_timer()
        given_up = [self._relays.pop(other) for other in self._relays.keys() - others]
        self._relays[number] = relay
        for other in given_up:
            other.kill()
        try:
            for other in given_up:
                await other.wait()
                other.end()
        except BaseException:
            self.on_relay_end(number)
            raise
        if not others:
            self.close_slabs(self.slabs.keys() - slabs)

    def add_arrays(self, streams: Streams, number: str) -> None:
        """Give a connection for arrays to its child."""
        relay = self._relays.get(number)
        if relay is None:
            raise _child_ended()
        relay.add_arrays(streams)

    def on_relay_end(self, number: str) -> None:
        """Forget a child; after the last one, keep the slabs for a while, unless they are released."""
        self._relays.pop(number, None)
        if not self._relays:
            self._cancel_keep_timer()
            self._keep_timer = self.agent.loop.call_later(0.0 if self.is_released else self.agent.keep, self._close)

    def _cancel_keep_timer(self) -> None:
        """Keep the slabs: a child has them, or will."""
        if self._keep_timer is not None:
            self._keep_timer.cancel()
            self._keep_timer = None

    def close_slabs(self, numbers: Iterable[int]) -> None:
        """Close the descriptors of slabs, off the loop."""
        self.agent.disposal.close_fds([self.slabs.pop(number) for number in tuple(numbers) if number in self.slabs])

    def _close(self) -> None:
        """Forget everything."""
        self._cancel_keep_timer()
        self.close_slabs(self.slabs)
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


class _Relay:
    """One child: relays its messages from and to its controller, in order.

    Parameters
    ----------
    session
        Of its device.
    silence
        Seconds after which a controller's machine that does not answer counts as lost.
    on_end
        Called once the child and its connection have ended.
    """

    def __init__(self, session: _Session, silence: float, on_end: Callable[[], object]) -> None:
        self._session = session
        self._silence = silence
        self._agent = session.agent
        self._child: ChildProcess | None = None
        self._to_child: Channel
        self._controller: NodeChannel
        self._arrays: ArrayConnection | None = None
        self._held: deque[tuple[int, bytes]] = deque()  # messages for the child that wait for arrays, in order
        self._held_bytes = 0
        self._blocks: dict[int, MemfdSlab | None] = {}  # host memory; None while it is made
        self._arrived: Counter[int] = Counter()  # request -> arrays for it that are there
        self._results: dict[int, list[Place]] = {}  # request -> what is to be sent before its answer
        self._is_closing = False  # the child was asked to end
        self._kill_timer: asyncio.TimerHandle | None = None
        self._exit_timer: asyncio.TimerHandle | None = None
        self._on_end: Callable[[], object] | None = on_end

    async def start(self, streams: Streams, *, uvloop: bool) -> None:
        """Start the child, answer the controller, and relay from then on."""
        agent = self._agent
        self._child = child = await ChildProcess.start(agent.system, TARGET, uvloop=uvloop, on_exit=self._on_exit)
        self._to_child = Channel(
            child.sock,
            agent.loop,
            on_message=self._on_child_message,
            on_lost=self._on_child_lost,
            max_received=MAX_ANSWER,
            close_fds=agent.disposal.close_fds,
        )
        streams.answer({"pid": child.pid, "keep": agent.keep})
        self._controller = NodeChannel(
            streams, on_message=self._on_controller_message, on_lost=self._on_lost, max_received=MAX_MESSAGE, silence=self._silence
        )
        logger.info("node_child_started", pid=child.pid)

    def add_arrays(self, streams: Streams) -> None:
        """Take over the connection for arrays."""
        if self._arrays is not None:
            raise RefusedError("the child has a connection for its arrays")
        streams.answer({})
        self._arrays = ArrayConnection(
            streams, locate=self._memory, on_received=self._on_array, on_lost=self._on_lost, silence=self._silence
        )

    def kill(self) -> None:
        """Kill the child."""
        if self._child is not None:
            self._child.kill()

    async def wait(self) -> None:
        """Wait until the child has ended.

        Raises
        ------
        HostDiedError
            If it does not: it is in a system call that does not return.
        """
        if self._child is not None:
            await self._child.aclose(0.0)

    # -- from the controller

    def _on_controller_message(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Handle what is for the agent, and send the child the rest, in order."""
        if kind == NodeKind.KILL:
            self.kill()
        elif kind == NodeKind.RELEASE:
            self._session.is_released = True
        elif self._to_child.is_closed:  # the child has ended
            return
        elif kind in (Kind.PING, Kind.END_HANGS):  # they take no place in the order
            self._to_child.send(kind, data)
        elif self._held or not self._forward(kind, data):
            self._held.append((kind, data))
            self._held_bytes += len(data)
            if self._held_bytes + self._to_child.pending > _MAX_UNSENT:
                raise ProtocolError(f"more than {_MAX_UNSENT} bytes wait for the child")

    def _forward(self, kind: int, data: bytes) -> bool:
        """Send the child a message, or do what it asks for; ``False`` if it must wait."""
        try:
            if kind == NodeKind.ARRAYS:
                return self._begin_request(data)
            if kind == Kind.BLOCK:
                return self._send_block(data)
            if kind == Kind.MAP_SLAB:
                self._send_slab(data)
                return True
            if kind == Kind.CLOSE:
                self._is_closing = True
            elif kind == Kind.UNMAP_BLOCK:
                block = self._blocks.pop(_NUMBER.unpack(data)[0], None)
                if block is not None:
                    block.close()
        except struct.error as error:
            raise ProtocolError(f"a message of kind {kind} means nothing: {error}") from None
        self._to_child.send(kind, data, now=True)
        return True

    def _begin_request(self, data: bytes) -> bool:
        """Note the results of a request, once the arrays that it reads are there."""
        request, sources, results = unpack_request(data)
        if self._arrived[request] < sources:
            return False
        del self._arrived[request]
        if results:
            self._results[request] = results
        return True

    def _send_block(self, data: bytes) -> bool:
        """Send the child a block of host memory, once it is made."""
        number, nbytes = _NUMBERS.unpack(data)
        if number not in self._blocks:
            self._blocks[number] = None
            self._agent.start_task(self._make_block(number, nbytes))
        block = self._blocks[number]
        if block is None:
            return False
        self._to_child.send(Kind.BLOCK, data, fds=(block.fd,))
        return True

    async def _make_block(self, number: int, nbytes: int) -> None:
        """Make a block off the loop, for it may take memory from the system; then go on."""
        try:
            block = await self._agent.system.run_blocking(partial(MemfdSlab, nbytes, name="accel-node"))
        except AccelError as error:
            logger.warning("node_has_no_memory", nbytes=nbytes, error=error)
            self.kill()
            return
        if number not in self._blocks:  # the child has ended
            block.close()
            return
        self._blocks[number] = block
        self._forward_held()
        if self._arrays is not None:
            self._arrays.resume()

    def _send_slab(self, data: bytes) -> None:
        """Send the child a slab that an earlier one has made; answer for it if that is not here."""
        question, number = _NUMBERS.unpack_from(data)
        fd = self._session.slabs.get(number)
        if fd is not None:
            self._to_child.send(Kind.MAP_SLAB, data, fds=(fd,))
            return
        error = BackendUnavailableError("the node does not have the memory any more", remedy="Put the data on the device anew.")
        self._controller.send(Kind.FAILED, Failure.pack(question, -1), encode_error(error))

    def _forward_held(self) -> None:
        """Send what was held, as far as nothing of it must wait."""
        while self._held and not self._to_child.is_closed:
            kind, data = self._held[0]
            if not self._forward(kind, data):
                return
            self._held.popleft()
            self._held_bytes -= len(data)

    def _memory(self, place: Place) -> memoryview | None:
        """Return the memory of a place; ``None`` if its block is not made yet.

        Raises
        ------
        ProtocolError
            If it is not within the block.
        """
        block = self._blocks.get(place.block)
        if block is None:
            return None
        if not 0 < place.nbytes <= block.nbytes or place.offset > block.nbytes - place.nbytes:
            raise ProtocolError(f"an array of {place.nbytes} bytes at {place.offset} is not in a block of {block.nbytes}")
        return block.view()[place.offset : place.offset + place.nbytes]

    def _on_array(self, place: Place) -> None:
        """Count an array that is there, and go on."""
        self._arrived[place.request] += 1
        self._forward_held()

    def _on_lost(self, error: AccelError | None) -> None:
        """Kill the child: its controller, or the way to it, is gone."""
        if error is not None:
            logger.warning("node_connection_lost", pid=self._child and self._child.pid, error=error)
        self.kill()
        if self._child is not None and self._child.exit is not None:
            self.end()

    # -- from the child

    def _on_child_message(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Keep what has a descriptor, send arrays that are asked for, and give the message on."""
        if fds and kind != Kind.NEW_SLAB:
            raise ProtocolError(f"a child sent {len(fds)} descriptors with a message of kind {kind}")
        try:
            if kind == Kind.NEW_SLAB:
                self._keep_slab(data, fds)
            elif kind == Kind.FREED_SLAB:
                self._session.close_slabs(_NUMBER.unpack(data))
            elif kind == Kind.DONE and self._results:
                self._send_results(data)
            elif kind == Kind.FAILED:
                self._results.pop(Failure.unpack_from(data)[0], None)
        except struct.error as error:
            raise ProtocolError(f"a child sent a message of kind {kind} that means nothing: {error}") from None
        if not self._controller.is_closed:
            self._controller.send(kind, data, now=kind == Kind.DONE)

    def _keep_slab(self, data: bytes, fds: list[int]) -> None:
        """Keep the descriptor of a new slab."""
        number, _ = _NUMBERS.unpack(data)
        if len(fds) != 1 or number in self._session.slabs:
            raise ProtocolError(f"slab {number} is there already, or comes with {len(fds)} descriptors")
        self._session.slabs[number] = fds.pop()

    def _send_results(self, data: bytes) -> None:
        """Send the arrays of the requests that a DONE message names."""
        for (number,) in _NUMBER.iter_unpack(data):
            for place in self._results.pop(number, ()):
                memory = self._memory(place)
                if memory is None or self._arrays is None:
                    raise ProtocolError(f"request {number} is to fill memory that is not there")
                self._arrays.send(place, memory)

    def _on_child_lost(self, error: AccelError | None) -> None:
        """Kill the child; one that was asked to end, and has closed its connection, has some time."""
        if self._is_closing and error is None:
            self._kill_timer = self._agent.loop.call_later(_CLOSE_TIMEOUT, self.kill)
        else:
            self.kill()

    def _on_exit(self, status: ExitStatus) -> None:
        """Tell the controller how the child has ended, and wait for it to close the connection."""
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._held.clear()
        self._to_child.close()
        for block in self._blocks.values():
            if block is not None:
                block.close()
        self._blocks.clear()
        logger.info("node_child_ended", pid=self._child and self._child.pid, end=status.describe())
        if self._controller.is_closed:
            self.end()
            return
        content = {"code": status.code, "signal": status.signal, "output": status.stderr[-MAX_ANSWER // 8 :]}
        self._controller.send(NodeKind.EXIT, json.dumps(content).encode(), now=True)
        self._exit_timer = self._agent.loop.call_later(_EXIT_TIMEOUT, self.end)

    def end(self) -> None:
        """Close both connections, and report the end, once."""
        if self._exit_timer is not None:
            self._exit_timer.cancel()
        self._controller.abort()
        if self._arrays is not None:
            self._arrays.abort()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


def _child_ended() -> BackendUnavailableError:
    """Return the error for a connection to a child that has ended."""
    return BackendUnavailableError("the child has ended", library="node", retryable=True)


def _abort(transport: asyncio.BaseTransport | None, sock: socket.socket) -> None:
    """Close a connection at once."""
    if isinstance(transport, asyncio.WriteTransport):
        transport.abort()
    else:
        sock.close()


def _find_devices(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the devices of this machine that a request names. May block: it imports backends."""
    specs, count = request["specs"], request["count"]
    if not isinstance(specs, (str, list)) or not (count is None or isinstance(count, int)):
        raise InvalidArgumentError(f"specs is {specs!r:.80} and count {count!r:.80}")
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
