"""A child on another machine, as its device sees it: its process and its channel, in one."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import TYPE_CHECKING, Any

from accel.errors import AccelError, ClosedError, FaultScope, HostDiedError
from accel.node.arrays import ArrayConnection, Place, pack_request
from accel.node.channel import NodeChannel, NodeKind, pack_fence
from accel.process.exit_status import ExitStatus
from accel.process.protocol import ProtocolError
from accel.remote.error_codec import decode_error
from accel.remote.link import MAX_ANSWER
from accel.remote.messages import Failure, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel.node.handshake import Streams
    from accel.remote.arrays import SharedArray

__all__ = ["NodeChild"]

_KILL_TIMEOUT = 2.0
"""Seconds within which the agent says that a killed child has ended; else the connection is cut."""

_FENCE_TIMEOUT = 30.0
"""Seconds within which it says that other children have ended, or why not: it waits ten for each."""

_NUMBER = struct.Struct("<Q")


class NodeChild:
    """A child that an agent has started; :class:`~accel.remote.link.Link` uses it as both.

    Ends when the child does, or the connection to its agent: that kills the child as soon as it
    sees the loss.

    Parameters
    ----------
    node
        Where it is, for errors.
    silence
        Seconds after which a machine that does not answer counts as lost.
    on_message, on_lost, on_exit
        As for :class:`~accel.process.channel.Channel` and
        :class:`~accel.process.child.ChildProcess`.
    on_closing
        Returns whether the device is being closed: then nothing is kept of its memory.
    known
        Returns the number of a request now, and those of the children that may go on.

    Attributes
    ----------
    pid : int
        Its process id, on its machine.
    silence : float
    exit : ExitStatus or None
        How the child ended; ``None`` while it runs.
    """

    def __init__(
        self,
        node: str,
        silence: float,
        *,
        on_message: Callable[[int, bytes, list[int]], None],
        on_lost: Callable[[AccelError | None], None],
        on_exit: Callable[[ExitStatus], None],
        on_closing: Callable[[], bool],
        known: Callable[[], tuple[int, list[int]]],
    ) -> None:
        self.pid = 0  # until it is connected
        self.silence = silence
        self.exit: ExitStatus | None = None
        self._node = node
        self._deliver = on_message
        self._on_lost = on_lost
        self._on_exit = on_exit
        self._on_closing = on_closing
        self._known = known
        self._fenced: asyncio.Future[None] | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._kill_timer: asyncio.TimerHandle | None = None
        self._is_closed = False  # nothing more is delivered
        self._channel: NodeChannel
        self._arrays: ArrayConnection
        # Request -> the memory of its results that are still to come, by their places.
        self._expected: dict[int, dict[Place, memoryview]] = {}
        self._done: set[int] = set()  # of these requests, those that the child has answered

    async def connect(self, pid: int, messages: Streams, arrays: Streams) -> None:
        """Take over both connections to the agent, which has started the child, without waiting.

        Raises
        ------
        OSError
            If one of them has ended.
        """
        early = await messages.take_rest()
        await arrays.take_rest()
        self.pid = pid
        self._channel = NodeChannel(
            messages,
            on_message=self._on_message,
            on_lost=self._on_connection_lost,
            max_received=MAX_ANSWER,
            silence=self.silence,
            early=early,
        )
        self._arrays = ArrayConnection(
            arrays, locate=self._locate, on_received=self._on_received, on_lost=self._on_connection_lost, silence=self.silence
        )

    # -- its channel

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, which only its own machine can tell."""
        return False

    def send(self, kind: int, *parts: bytes | bytearray | memoryview, fds: Sequence[int] = (), now: bool = False) -> None:
        """Send one message; see :meth:`accel.process.channel.Channel.send`."""
        if self._is_closed:
            raise ClosedError("the connection to the child is closed")
        if kind == Kind.PING:
            self._arrays.check(is_due=bool(self._done))
        self._channel.send(kind, *parts, now=now)

    def close(self) -> None:
        """Deliver nothing more. The connection stays, for the exit status. Idempotent."""
        if not self._is_closed and self._on_closing() and not self._channel.is_closed:
            self._channel.send(NodeKind.RELEASE, now=True)
        self._is_closed = True

    def announce(self, request: int, sources: Sequence[SharedArray], results: Sequence[SharedArray]) -> None:
        """Send the arrays that a request reads, and expect those that it fills, before it is sent."""
        sent = [(Place(request, *shared.extent), shared.memory()) for shared in sources if shared.array.nbytes]
        expected = {Place(request, *shared.extent): shared.memory() for shared in results if shared.array.nbytes}
        if self._is_closed or not (sent or expected):
            return
        self._channel.send(NodeKind.ARRAYS, pack_request(request, len(sent), expected))
        for place, memory in sent:
            self._arrays.send(place, memory)
        if expected:
            self._expected[request] = expected

    # -- its process

    @property
    def is_killed(self) -> bool:
        """Whether :meth:`kill` was called: the agent must not let it go on beside another one."""
        return self._kill_timer is not None

    def kill(self) -> None:
        """Have the agent kill the child; do nothing once it has ended.

        Without an answer the connection is cut, after which the agent kills it too.
        """
        if self._channel.is_closed or self._kill_timer is not None:
            return
        self._arrays.abort()  # what comes now may be for memory that is used again
        self._channel.send(NodeKind.KILL, now=True)
        self._kill_timer = self._loop.call_later(_KILL_TIMEOUT, self._on_connection_lost, HostDiedError("it did not answer"))

    async def wait(self) -> ExitStatus:
        """Wait until the child has ended, and ``on_exit`` was called."""
        await self._ended.wait()
        assert self.exit is not None, "it has ended"
        return self.exit

    async def aclose(self, grace: float = 1.0) -> ExitStatus:
        """Wait for the end of the child, which is killed after ``grace`` seconds. Idempotent."""
        try:
            async with asyncio.timeout(grace):
                return await self.wait()
        except TimeoutError:
            self.kill()
            return await self.wait()
        except asyncio.CancelledError:
            self.kill()
            raise

    async def end_others(self) -> None:
        """Have the agent end the device's children that this end has given up, and wait until they have ended.

        A connection that is cut says nothing of the child at its other end.

        Raises
        ------
        AccelError
            If one of them does not end, or this child has.
        """
        if self.exit is not None:
            raise self.exit.error(device=None, scope=FaultScope.CONTEXT)
        self._fenced = self._loop.create_future()
        self._channel.send(NodeKind.FENCE, pack_fence(*self._known()), now=True)
        try:
            async with asyncio.timeout(_FENCE_TIMEOUT):
                await self._fenced
        except TimeoutError:
            raise HostDiedError(
                f"node {self._node} has not said within {_FENCE_TIMEOUT:g} s that earlier children have ended", scope=FaultScope.CONTEXT
            ) from None

    def _on_fenced(self, data: bytes) -> None:
        """End the wait of :meth:`end_others`."""
        if self._fenced is None:
            raise ProtocolError(f"node {self._node} answered what it was not asked")
        if not self._fenced.done():
            if data:
                self._fenced.set_exception(decode_error(data))
            else:
                self._fenced.set_result(None)

    # -- called by the connections

    def _on_message(self, kind: int, data: bytes, descriptors: list[int]) -> None:
        """Handle the end of the child, and give its messages on; DONE after the request's arrays."""
        if kind == NodeKind.EXIT:
            self._end(_decode_status(data))
            return
        if kind == NodeKind.FENCED:
            self._on_fenced(data)
            return
        if self._is_closed:
            return
        try:
            if kind == Kind.DONE and self._expected:
                data = self._answered(data)
            elif kind == Kind.FAILED:
                self._expected.pop(Failure.unpack_from(data)[0], None)
        except struct.error as error:
            raise ProtocolError(f"node {self._node} sent a message of kind {kind} that means nothing: {error}") from None
        if data or kind != Kind.DONE:
            self._deliver(kind, data, [-1] if kind == Kind.NEW_SLAB else [])  # -1: the agent has it

    def _answered(self, data: bytes) -> bytes:
        """Return the numbers of a DONE message without those whose arrays are still to come."""
        numbers = [number for (number,) in _NUMBER.iter_unpack(data)]
        later = [number for number in numbers if self._expected.get(number)]
        self._done.update(later)
        for number in numbers:
            if number not in later:
                self._expected.pop(number, None)
        return b"".join([_NUMBER.pack(number) for number in numbers if number not in later])

    def _locate(self, place: Place) -> memoryview:
        """Return the memory of a result that was asked for."""
        memory = self._expected.get(place.request, {}).get(place)
        if memory is None:
            raise ProtocolError(f"node {self._node} sent an array that it was not asked for")
        return memory

    def _on_received(self, place: Place) -> None:
        """Give a request's answer on that came before the last of its arrays."""
        expected = self._expected[place.request]
        del expected[place]
        if not expected and place.request in self._done:
            self._done.discard(place.request)
            del self._expected[place.request]
            if not self._is_closed:
                self._deliver(Kind.DONE, _NUMBER.pack(place.request), [])

    def _on_connection_lost(self, error: AccelError | None) -> None:
        """End, because one of the connections has: the agent kills the child then."""
        if self.exit is not None:
            return
        self._channel.abort()
        self._arrays.abort()
        if not self._is_closed:
            self._on_lost(error)
        self._end(
            ExitStatus(
                None, None, lost=f"was given up: the connection to node {self._node} was lost{f' ({error.message})' if error else ''}"
            )
        )

    def _end(self, status: ExitStatus) -> None:
        """Cut both connections, and report the end of the child, once."""
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._is_closed = True
        self._channel.abort()
        self._arrays.abort()
        self._expected.clear()
        if self.exit is None:
            self.exit = status
            if self._fenced is not None and not self._fenced.done():
                self._fenced.set_exception(status.error(device=None, scope=FaultScope.CONTEXT))
            try:
                self._on_exit(status)
            finally:
                self._ended.set()


def _decode_status(data: bytes) -> ExitStatus:
    """Return the exit status that an agent has sent, checked.

    Raises
    ------
    ProtocolError
        If it is none.
    """
    try:
        content: Any = json.loads(data)
        code, signal, output, loss = content["code"], content["signal"], content["output"], content["loss"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"a message that should be an exit status is none: {error!r}") from None
    if not (isinstance(output, str) and isinstance(loss, str)) or any(
        type(number) is not int and number is not None for number in (code, signal)
    ):
        raise ProtocolError("a message that should be an exit status has other values")
    if loss:
        return ExitStatus(None, None, output, f"was killed by its agent: {loss}")
    return ExitStatus(code, signal, output)
