"""Buffers by their tokens, for other processes of this machine and of the same user.

Processes on other machines ask through an agent of this one: see :mod:`accel.node.agent`.

A device listens on an abstract Unix socket from the first token on that it has published. A
connection is for one request: for the memory of a buffer, or for a copy. The answer is a descriptor
of that memory, with its size, shape, dtype and hardware. The kernel tells each end of a connection
the user of the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import json
import os
import socket
import struct
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from accel._log import get_logger
from accel.actors.acquire import acquire
from accel.dtype import DType
from accel.errors import (
    AccelError,
    BackendUnavailableError,
    ClosedError,
    DeadlineExceededError,
    HostDiedError,
    InvalidArgumentError,
    StaleRefError,
    UnsupportedError,
)
from accel.fork import close_after_fork
from accel.memory import MemfdSlab
from accel.ops.base import Spec, as_shape
from accel.process.channel import Channel
from accel.process.protocol import ProtocolError
from accel.ref import AccelRef, AccelToken, RefView, ViewToken
from accel.remote.error_codec import decode_error, encode_error
from accel.shortage import raise_shortage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from accel.actors import ActorSystem
    from accel.engine.core import DeviceCore
    from accel.storage.disposal import Disposal

__all__ = ["PublishedRefs", "decode_request", "encode_request", "fetch", "fetch_copy"]

logger = get_logger()

_ANSWER_SECONDS: Final = 30.0
"""Seconds within which a request is answered, unless the caller gives others."""
_REQUEST_SECONDS: Final = 5.0
"""Seconds within which a new connection has to send its request."""
_PAUSE: Final = 1.0
"""Seconds without new connections after one could not be accepted."""
_MOST: Final = 16
"""Requests that are answered at once; others wait to be accepted."""
_BACKLOG: Final = 4096
"""Connections that wait to be accepted; the system may allow fewer."""
_MOST_ACCEPTED: Final = 256
"""Connections that one loop iteration accepts: other users can make them without end."""
_RETRY_PAUSE: Final = 0.01
"""Seconds between attempts to connect while there is no room for one to wait."""
_MAX_REQUEST: Final = 1 << 13
"""Bytes of the longest request."""
_MAX_ANSWER: Final = 1 << 17
"""Bytes of the longest answer: the texts of an error are bounded to less."""
_CREDENTIALS: Final = struct.Struct("iII")
"""The kernel's struct ucred: process id, user id, group id."""
_OWN_TOKENS: Final = "Give what device.publish() returned."
_ONE_ACCEL: Final = "Use the same accel in both processes."


class _Kind(enum.IntEnum):
    """Kinds of the messages, one of each end."""

    REQUEST = 1
    """A token, whether a copy is asked for, and the seconds for it, as JSON."""
    ANSWER = 2
    """Size, shape, dtype and hardware of the memory, as JSON, and its descriptor."""
    REFUSED = 3
    """The error that prevents an answer."""


class _Source(Protocol):
    """The methods of a :class:`~accel.Device` that answer requests."""

    async def share(self, ref: AccelRef, *, timeout: float | None = None) -> tuple[Any, ...]: ...

    async def get(self, ref: AccelRef, *, out: np.ndarray[Any, Any] | None = None, timeout: float | None = None) -> Any: ...


class PublishedRefs:
    """The refs of a device that other processes may ask for by their tokens.

    Parameters
    ----------
    core, source
        The device.
    """

    def __init__(self, core: DeviceCore, source: _Source) -> None:
        self._core = core
        self._source = source
        self._refs: weakref.WeakValueDictionary[int, AccelRef] = weakref.WeakValueDictionary()
        self._listener: socket.socket | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None  # until connections are accepted again
        self._has_warned = False

    def publish(self, ref: AccelRef) -> AccelToken:
        """Return the token of a ref, by which others find it while it lives."""
        token = ref.token()
        if self._listener is None:
            self._listener = _listen(self._core.refs.identity)
            close_after_fork(self)
            self._accept_more()
        self._refs[ref.buffer] = ref.base if isinstance(ref, RefView) else ref
        return dataclasses.replace(token, node=socket.gethostname())

    async def aclose(self) -> None:
        """Stop listening, and cancel the requests that are being answered. Idempotent."""
        if self._listener is not None:
            self._core.loop.remove_reader(self._listener)
            if self._pause is not None:
                self._pause.cancel()
            self.close_inherited()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    def close_inherited(self) -> None:
        """Close the socket; see :class:`accel.fork.Inherited`."""
        listener, self._listener = self._listener, None
        if listener is not None:
            os.close(listener.detach())

    # -- accepting

    def _accept_more(self) -> None:
        """Accept connections as long as there is room for them."""
        self._pause = None
        if self._listener is not None and len(self._answering) < _MOST:
            self._core.loop.add_reader(self._listener, self._on_connection)

    def _on_connection(self) -> None:
        """Accept the connections that wait, as long as there is room for them. The loop's reader."""
        assert self._listener is not None, "the reader is removed before"
        loop = self._core.loop
        for _ in range(_MOST_ACCEPTED):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor now
                logger.warning("published_refs_paused", device=self._core.name, error=str(error))
                loop.remove_reader(self._listener)
                self._pause = loop.call_later(_PAUSE, self._accept_more)
                return
            self._begin(sock)
            if len(self._answering) == _MOST:
                loop.remove_reader(self._listener)
                return

    def _begin(self, sock: socket.socket) -> None:
        """Answer a new connection in a task of its own, or close it if it is another user's."""
        user = _user_of(sock)
        if user != os.geteuid():
            sock.close()
            if not self._has_warned:
                self._has_warned = True
                logger.warning("published_refs_refused", device=self._core.name, user=user)
            return
        end = _End(sock, _MAX_REQUEST, self._core.disposal.close_fds)
        task = self._core.loop.create_task(self._serve(end))
        self._answering.add(task)
        task.add_done_callback(partial(self._on_served, end))

    def _on_served(self, end: _End, task: asyncio.Task[None]) -> None:
        """Close a connection, whose task may have been cancelled before it began."""
        end.close()
        self._answering.discard(task)
        if self._pause is None:
            self._accept_more()

    # -- answering

    async def _serve(self, end: _End) -> None:
        """Answer the request of a connection."""
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                kind, payload = await end.message
            try:
                async with self._answer(kind, payload) as (fd, *content):
                    end.channel.send(_Kind.ANSWER, json.dumps(content).encode(), fds=(fd,), now=True)
            except (AccelError, OSError) as error:
                refusal = BackendUnavailableError(f"{self._core.name} cannot share a buffer now: {error}", retryable=True)
                end.channel.send(_Kind.REFUSED, encode_error(error if isinstance(error, AccelError) else refusal))
        except (TimeoutError, HostDiedError, ClosedError):
            pass  # the other end is slow, gone, or none of accel's

    @contextlib.asynccontextmanager
    async def _answer(self, kind: int, payload: bytes) -> AsyncIterator[tuple[Any, ...]]:
        """Yield the fields of the :class:`~accel.SharedMemory` that a request asks for.

        Raises
        ------
        AccelError
            If the request is none, or the buffer was not published, or cannot be shared.
        """
        if kind != _Kind.REQUEST:
            raise ProtocolError(f"a message of kind {kind} is no request for a token", remedy=_ONE_ACCEL)
        token, is_copy, seconds = decode_request(payload)
        base = self._core.refs.resolve(AccelToken(token.device, token.buffer, token.generation, node=token.node))
        if token.buffer not in self._refs:
            raise InvalidArgumentError(f"{token!r} was not published", remedy="Publish it there: token = device.publish(ref).")
        if not is_copy:
            memory = await self._source.share(base, timeout=seconds)
            try:
                yield memory
            finally:
                os.close(memory[0])
            return
        ref = token.of(base)
        if ref.nbytes > base.nbytes:  # steps of 0 were written by hand
            raise InvalidArgumentError(f"{token!r} names no view of {base!r}", remedy=_OWN_TOKENS)
        slab = await acquire(self._core.system, partial(MemfdSlab, max(1, ref.nbytes), name="accel-copy"), MemfdSlab.close)
        try:
            await self._source.get(ref, out=_array_in(slab, ref.shape, ref.dtype), timeout=seconds)
            yield slab.fd, slab.nbytes, ref.shape, ref.dtype.value, self._core.description.uuid
        finally:
            await self._core.system.run_blocking(slab.close)


@contextlib.asynccontextmanager
async def fetch(
    token: AccelToken, seconds: float | None, disposal: Disposal, device: str | None, *, copy: bool = False
) -> AsyncIterator[Any]:
    """Yield the answer of a token's device: the fields of a :class:`~accel.SharedMemory`.

    Only their number is checked. The descriptor is closed at the end of the block.

    Parameters
    ----------
    token
        Of a published ref.
    seconds
        To wait for the answer; ``None``: 30.
    disposal
        Closes descriptors.
    device
        Name of the device that asks, for errors.
    copy
        Ask for a copy in memory of its own, and not for the buffer's.

    Raises
    ------
    InvalidArgumentError
        If the token is none that was published.
    StaleRefError
        If the buffer, or its process, is gone.
    UnsupportedError
        If the buffer is of a process of another user.
    OutOfMemoryError
        If this process has no descriptor left.
    BackendUnavailableError
        If the other process cannot share the buffer now.
    DeadlineExceededError
        If there is no answer in time.
    ProtocolError
        If the answer is malformed.
    """
    seconds = _ANSWER_SECONDS if seconds is None else seconds
    request = encode_request(token, seconds, copy)
    with contextlib.ExitStack() as stack:
        try:
            async with asyncio.timeout(seconds):
                end = _End(await _connect(token), _MAX_ANSWER, disposal.close_fds)
                stack.callback(end.close)
                end.channel.send(_Kind.REQUEST, request)
                kind, payload = await end.message
        except TimeoutError:
            raise DeadlineExceededError(f"{token!r} was not answered within {seconds:g} s", op="attach", device=device) from None
        except ProtocolError:
            raise
        except HostDiedError as error:
            raise _gone(token) from error
        if kind == _Kind.REFUSED:
            raise decode_error(payload)
        content = _decode_answer(kind, payload, len(end.fds))
        yield end.fds[0], *content


@contextlib.asynccontextmanager
async def fetch_copy(
    token: AccelToken, seconds: float | None, system: ActorSystem, disposal: Disposal, device: str | None
) -> AsyncIterator[np.ndarray[Any, Any]]:
    """Yield a copy of a token's array, in memory that the array's process has made for it.

    Parameters and errors are those of :func:`fetch`; ``system`` has threads for calls that block.
    """
    async with fetch(token, seconds, disposal, device, copy=True) as (fd, nbytes, shape, dtype, _):
        spec = Spec(as_shape(shape), DType.of(dtype))
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or spec.nbytes > nbytes:
            raise InvalidArgumentError(f"{token!r} was answered with {nbytes!r} bytes for {spec.nbytes}")
        slab = await acquire(system, partial(MemfdSlab, nbytes, fd=fd), MemfdSlab.close)
        try:
            yield _array_in(slab, spec.shape, spec.dtype)
        finally:
            await system.run_blocking(slab.close)


def _array_in(slab: MemfdSlab, shape: tuple[int, ...], dtype: DType) -> np.ndarray[Any, Any]:
    """Return the array at the beginning of a slab, whose memory stays mapped while the array lives.

    Raises
    ------
    InvalidArgumentError
        If numpy has no such array.
    """
    try:
        return np.ndarray(shape, dtype.numpy, slab.view())
    except (ValueError, OverflowError) as error:
        raise InvalidArgumentError(f"no array has shape {shape!r:.80}: {error}", remedy=_OWN_TOKENS) from error


class _End:
    """One end of a connection, and the message of the other end.

    Parameters
    ----------
    sock
        The connected socket, which this object owns from here on.
    max_received
        Bytes of the longest message that is received.
    close_fds
        Closes descriptors.

    Attributes
    ----------
    channel : Channel
        Sends this end's message.
    message : Future
        Kind and payload of the other end's message, or the error that prevents it.
    fds : list of int
        Descriptors that came with the message; closed by :meth:`close`.
    """

    def __init__(self, sock: socket.socket, max_received: int, close_fds: Callable[[Iterable[int]], object]) -> None:
        loop = asyncio.get_running_loop()
        self.message: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        self.fds: list[int] = []
        self._close_fds = close_fds
        self.channel = Channel(
            sock, loop, on_message=self._on_message, on_lost=self._on_lost, max_received=max_received, close_fds=close_fds
        )

    def _on_message(self, kind: int, payload: bytes, fds: list[int]) -> None:
        """Keep the message and its descriptors; a second one violates the protocol."""
        if self.message.done():
            raise ProtocolError("a connection is for one request")
        self.fds += fds
        fds.clear()
        self.message.set_result((kind, payload))

    def _on_lost(self, error: AccelError | None) -> None:
        """Fail the wait for the message, if it has not come."""
        if not self.message.done():
            self.message.set_exception(error or HostDiedError("the other process has closed the connection"))

    def close(self) -> None:
        """Close the connection, and the descriptors that came with the message."""
        self.channel.close()
        self._close_fds(self.fds)


# -- sockets


def _address(identity: str) -> bytes:
    """Return the name of a device's socket. All users can read it in ``/proc/net/unix``."""
    return b"\0accel-token-" + identity.rpartition("/")[2].encode()


def _new_socket(shortage: str) -> socket.socket:
    """Return a socket that never blocks; ``shortage`` is what a lack of descriptors prevents.

    Raises
    ------
    UnsupportedError
        This system does not tell the user at the other end of a connection.
    OutOfMemoryError
        There is no descriptor left.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        raise UnsupportedError("this system does not tell the user of another process", remedy="Send the data: await device.get(ref).")
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise_shortage(error, shortage)
        raise
    sock.setblocking(False)
    return sock


def _listen(identity: str) -> socket.socket:
    """Return the socket on which a device listens.

    Raises
    ------
    BackendUnavailableError
        Another process has a socket of this name.
    """
    listener = _new_socket("a token cannot be published")
    try:
        listener.bind(_address(identity))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise BackendUnavailableError(
            f"a token cannot be published: another process listens in place of {identity}",
            library="os",
            remedy="Open another device: its socket has another name. Keep tokens from other users.",
        ) from error
    return listener


async def _connect(token: AccelToken) -> socket.socket:
    """Return a connection to the device of a token, once there is room for it.

    Raises
    ------
    UnsupportedError
        The device is of a process of another user.
    StaleRefError
        Nothing listens there.
    """
    sock = _new_socket(f"{token!r} cannot be asked for")
    try:
        while True:
            try:
                sock.connect(_address(token.device))
                break
            except BlockingIOError:  # the system does not say when there is room
                await asyncio.sleep(_RETRY_PAUSE)
        if (user := _user_of(sock)) != os.geteuid():
            raise UnsupportedError(  # noqa: TRY301
                f"{token!r} is of user {user}, and this process of user {os.geteuid()}", remedy="Run both as one user."
            )
    except BaseException as error:
        sock.close()
        if isinstance(error, ConnectionError):
            raise _gone(token) from error
        raise
    return sock


def _user_of(sock: socket.socket) -> int:
    """Return the user of the process at the other end."""
    _pid, user, _group = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _gone(token: AccelToken) -> StaleRefError:
    """Return the error for a token whose device does not listen, or has closed the connection."""
    where = "" if token.node in ("", socket.gethostname()) else f" It is of machine {token.node}, and this is {socket.gethostname()}."
    return StaleRefError(
        f"no process of this machine has {token!r}: its device is closed, or has published nothing.{where}",
        remedy="Keep the device open. On another machine: await device.put(token, node=...), with the address of an agent of the buffer's machine.",
    )


# -- messages


def encode_request(token: AccelToken, seconds: float, copy: bool) -> bytes:
    """Return a request as bytes; raise if the token is none that was published."""
    number = token.device.rpartition("/")[2] if isinstance(token.device, str) else ""
    try:
        if len(number) != 32 or not all(digit in "0123456789abcdef" for digit in number):
            raise ValueError(number)  # noqa: TRY301
        data = json.dumps({"token": dataclasses.asdict(token), "copy": copy, "seconds": seconds}).encode()
        if len(data) > _MAX_REQUEST:
            raise ValueError(len(data))  # noqa: TRY301
    except (ValueError, TypeError, RecursionError):
        raise InvalidArgumentError(f"{token!r:.200} is no published token", remedy=_OWN_TOKENS) from None
    return data


def decode_request(payload: bytes) -> tuple[AccelToken, bool, float]:
    """Return a request's token, whether a copy is asked for, and the seconds for the answer.

    The values of the token's fields are checked later.

    Raises
    ------
    ProtocolError
        If the bytes are no request.
    """
    try:
        request = json.loads(payload)
        fields, seconds = request["token"], request["seconds"]
        for name in ("shape", "strides"):
            if isinstance(fields.get(name), list):
                fields[name] = tuple(fields[name])
        token = (ViewToken if "offset" in fields else AccelToken)(**fields)
        if not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
            raise ValueError(seconds)  # noqa: TRY301
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"a request for a token is none: {error!r:.200}", remedy=_ONE_ACCEL) from None
    return token, request.get("copy") is True, seconds


def _decode_answer(kind: int, payload: bytes, descriptors: int) -> tuple[int, tuple[int, ...], str, str]:
    """Return size in bytes, shape, dtype and hardware of the memory that was answered.

    Their values are checked later.

    Raises
    ------
    ProtocolError
        If the message is no answer with one descriptor.
    """
    try:
        nbytes, shape, dtype, uuid = json.loads(payload)
        if kind != _Kind.ANSWER or descriptors != 1:
            raise ValueError(kind, descriptors)  # noqa: TRY301
        return nbytes, tuple(shape), dtype, uuid
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"the answer for a token is none: {error!r:.200}", remedy=_ONE_ACCEL) from None
