"""A child of a node, between its controller and itself: messages pass, and those with descriptors end here."""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from accel._log import get_logger
from accel.errors import AccelError, BackendUnavailableError
from accel.memory import MemfdSlab
from accel.node.arrays import ArrayConnection, Place, unpack_request
from accel.node.channel import NodeChannel, NodeKind, unpack_fence
from accel.node.handshake import RefusedError, Streams
from accel.process.channel import Channel
from accel.process.child import ChildProcess
from accel.process.protocol import MAX_MESSAGE, ProtocolError
from accel.remote.error_codec import encode_error
from accel.remote.link import MAX_ANSWER, TARGET
from accel.remote.messages import Failure, Kind

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from accel.actors import ActorSystem
    from accel.process.exit_status import ExitStatus
    from accel.storage.disposal import Disposal

__all__ = ["KeptSlabs", "Relay"]

logger = get_logger()

_CLOSE_TIMEOUT = 5.0
"""Seconds in which a child must end after it was asked to."""
_EXIT_TIMEOUT = 10.0
"""Seconds that a controller has to close the connection of a child that has ended."""
_MAX_UNSENT = 256 << 20
"""Bytes for a child that may wait for it, or for arrays; after that it is killed."""

_NUMBERS = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")


class Workplace(Protocol):
    """The members of an :class:`~accel.node.agent.Agent` that relays use."""

    system: ActorSystem
    loop: asyncio.AbstractEventLoop
    disposal: Disposal
    keep: float

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """See :meth:`.Agent.start_task`."""


class KeptSlabs:
    """The durable memory of one device, over all its children.

    Parameters
    ----------
    disposal
        Closes descriptors.

    Attributes
    ----------
    fds : dict of int to int
        The device's numbers of slabs -> descriptors.
    is_released : bool
        Whether the device was closed, so that nothing is kept.
    """

    def __init__(self, disposal: Disposal) -> None:
        self.fds: dict[int, int] = {}
        self.is_released = False
        self._disposal = disposal

    def close(self, numbers: Iterable[int]) -> None:
        """Close the descriptors of slabs, off the loop."""
        self._disposal.close_fds([self.fds.pop(number) for number in tuple(numbers) if number in self.fds])


class Relay:
    """One child: relays its messages from and to its controller, in order.

    Parameters
    ----------
    place
        Where it runs.
    slabs
        Durable memory of its device.
    silence
        Seconds after which a controller's machine that does not answer counts as lost.
    on_end
        Called once the child and its connection have ended.
    fence
        Ends children of the device; see :meth:`~accel.node.agent.Session.fence`.
    """

    def __init__(
        self,
        place: Workplace,
        slabs: KeptSlabs,
        silence: float,
        on_end: Callable[[], object],
        fence: Callable[[int, frozenset[int]], Awaitable[None]],
    ) -> None:
        self._place = place
        self._slabs = slabs
        self._silence = silence
        self._fence = fence
        self._child: ChildProcess | None = None
        self._to_child: Channel
        self._controller: NodeChannel | None = None
        self._arrays: ArrayConnection | None = None
        self._held: deque[tuple[int, bytes]] = deque()  # messages for the child that wait for arrays, in order
        self._held_bytes = 0
        self._blocks: dict[int, MemfdSlab | None] = {}  # host memory; None while it is made
        self._arrived: Counter[int] = Counter()  # request -> arrays for it that are there
        self._results: dict[int, list[Place]] = {}  # request -> what is to be sent before its answer
        self._is_closing = False  # the child was asked to end
        self._is_killed = False
        self._loss = ""  # why the child was killed, if a connection was lost
        self._kill_timer: asyncio.TimerHandle | None = None
        self._exit_timer: asyncio.TimerHandle | None = None
        self._on_end: Callable[[], object] | None = on_end

    async def start(self, streams: Streams, *, uvloop: bool) -> None:
        """Start the child, answer the controller, and relay from then on."""
        place = self._place
        self._child = child = await ChildProcess.start(place.system, TARGET, uvloop=uvloop, on_exit=self._on_exit)
        if self._is_killed:  # while it was started
            child.kill()
        self._to_child = Channel(
            child.sock,
            place.loop,
            on_message=self._on_child_message,
            on_lost=self._on_child_lost,
            max_received=MAX_ANSWER,
            close_fds=place.disposal.close_fds,
        )
        try:
            early = await streams.take_rest()
            streams.answer({"pid": child.pid, "keep": place.keep})
            self._controller = NodeChannel(
                streams,
                on_message=self._on_controller_message,
                on_lost=self._on_lost,
                max_received=MAX_MESSAGE,
                silence=self._silence,
                early=early,
            )
        except BaseException:  # the controller has gone meanwhile
            child.kill()
            raise
        logger.info("node_child_started", pid=child.pid)

    async def add_arrays(self, streams: Streams) -> None:
        """Take over the connection for arrays."""
        if self._controller is None or self._arrays is not None:
            raise RefusedError("the child is not running yet, or has a connection for its arrays")
        await streams.take_rest()
        streams.answer({})
        self._arrays = ArrayConnection(
            streams, locate=self._memory, on_received=self._on_array, on_lost=self._on_lost, silence=self._silence
        )

    def kill(self) -> None:
        """Kill the child, also if it is still being started."""
        self._is_killed = True
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
            self._slabs.is_released = True
        elif kind == NodeKind.FENCE:
            self._place.start_task(self._answer_fence(*unpack_fence(data)))
        elif self._to_child.is_closed:  # the child has ended
            return
        elif kind in (Kind.PING, Kind.END_HANGS):  # they take no place in the order
            self._to_child.send(kind, data)
            if self._arrays is not None:
                self._arrays.check(is_due=bool(self._held) and self._held[0][0] == NodeKind.ARRAYS)
        elif self._held or not self._forward(kind, data):
            self._held.append((kind, data))
            self._held_bytes += sys.getsizeof(data)
        if self._held_bytes + self._to_child.pending > _MAX_UNSENT:
            raise ProtocolError(f"more than {_MAX_UNSENT} bytes wait for the child")

    async def _answer_fence(self, number: int, known: frozenset[int]) -> None:
        """Have older children ended, and tell the controller."""
        answer = b""
        try:
            await self._fence(number, known)
        except AccelError as error:
            answer = encode_error(error)
        if self._controller is not None and not self._controller.is_closed:
            self._controller.send(NodeKind.FENCED, answer, now=True)

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
            self._place.start_task(self._make_block(number, nbytes))
        block = self._blocks[number]
        if block is None:
            return False
        self._to_child.send(Kind.BLOCK, data, fds=(block.fd,))
        return True

    async def _make_block(self, number: int, nbytes: int) -> None:
        """Make a block off the loop, for it may take memory from the system; then go on."""
        try:
            block = await self._place.system.run_blocking(partial(MemfdSlab, nbytes, name="accel-node"))
        except AccelError as error:
            logger.warning("node_has_no_memory", nbytes=nbytes, error=error)
            self.kill()
            return
        if number not in self._blocks:  # the child has ended
            block.close()
            return
        self._blocks[number] = block
        try:
            self._forward_held()
        except AccelError as error:
            self._on_lost(error)
            return
        if self._arrays is not None:
            self._arrays.resume()

    def _send_slab(self, data: bytes) -> None:
        """Send the child a slab that an earlier one has made; answer for it if that is not here."""
        question, number = _NUMBERS.unpack_from(data)
        fd = self._slabs.fds.get(number)
        if fd is not None:
            self._to_child.send(Kind.MAP_SLAB, data, fds=(fd,))
            return
        error = BackendUnavailableError("the node does not have the memory any more", remedy="Put the data on the device anew.")
        assert self._controller is not None, "it has asked"
        self._controller.send(Kind.FAILED, Failure.pack(question, -1), encode_error(error))

    def _forward_held(self) -> None:
        """Send what was held, as far as nothing of it must wait."""
        while self._held and not self._to_child.is_closed:
            kind, data = self._held[0]
            if not self._forward(kind, data):
                return
            self._held.popleft()
            self._held_bytes -= sys.getsizeof(data)

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
            self._loss = self._loss or error.message
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
                self._slabs.close(_NUMBER.unpack(data))
            elif kind == Kind.DONE and self._results:
                self._send_results(data)
            elif kind == Kind.FAILED:
                self._results.pop(Failure.unpack_from(data)[0], None)
        except struct.error as error:
            raise ProtocolError(f"a child sent a message of kind {kind} that means nothing: {error}") from None
        if self._controller is not None and not self._controller.is_closed:
            self._controller.send(kind, data, now=kind == Kind.DONE)

    def _keep_slab(self, data: bytes, fds: list[int]) -> None:
        """Keep the descriptor of a new slab."""
        number, _ = _NUMBERS.unpack(data)
        if len(fds) != 1 or number in self._slabs.fds:
            raise ProtocolError(f"slab {number} is there already, or comes with {len(fds)} descriptors")
        self._slabs.fds[number] = fds.pop()

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
            self._kill_timer = self._place.loop.call_later(_CLOSE_TIMEOUT, self.kill)
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
        if self._controller is None or self._controller.is_closed:
            self.end()
            return
        content = {"code": status.code, "signal": status.signal, "output": status.stderr[-MAX_ANSWER // 8 :], "loss": self._loss}
        self._controller.send(NodeKind.EXIT, json.dumps(content).encode(), now=True)
        self._exit_timer = self._place.loop.call_later(_EXIT_TIMEOUT, self.end)

    def end(self) -> None:
        """Close both connections, and report the end, once."""
        if self._exit_timer is not None:
            self._exit_timer.cancel()
        if self._controller is not None:
            self._controller.abort()
        if self._arrays is not None:
            self._arrays.abort()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
