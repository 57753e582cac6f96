"""The controller's side: where a node is, what it has, and the children of a device there."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import math
import secrets
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np

from accel._log import get_logger
from accel.backend import DeviceDescription
from accel.dtype import DType
from accel.errors import AccelError, BackendUnavailableError, DeadlineExceededError, DeviceLostError, InvalidArgumentError
from accel.node.child import NodeChild
from accel.node.handshake import ClosedEarlyError, ask, check_token, connect, find_token
from accel.ops.base import as_shape
from accel.process.protocol import ProtocolError
from accel.remote.tokens import encode_request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.engine.core import DeviceCore
    from accel.node.handshake import Streams
    from accel.process.exit_status import ExitStatus
    from accel.ref import AccelToken

__all__ = ["Node", "NodeSession", "is_loopback", "split_address"]

logger = get_logger()

_CONNECT_TIMEOUT: Final = 10.0
"""Seconds within which an agent must accept a connection."""
_ANSWER_TIMEOUT: Final = 60.0
"""Seconds within which it must answer a request, for which it imports a backend or starts a child."""
_TOKEN_TIMEOUT: Final = 30.0
"""Seconds within which it must answer for a token, and within which more of the copy must come."""
_PIECE_BYTES: Final = 1 << 20
"""The most that is read at once."""
_MAX_TEXT: Final = 256
"""Characters of the longest text in the description of a device."""
_BUSY_PAUSES: Final = (0.05, 0.2, 0.5)
"""Pauses between attempts to connect to an agent that closes the connection at once."""
_PAUSES: Final = (0.05, 1.0)
"""The first and the longest pause between attempts to reach an agent again."""


@dataclass(frozen=True, slots=True)
class Node:
    """Another machine, on which ``python -m accel node`` runs.

    Parameters
    ----------
    address
        ``"host:port"``; an IPv6 address in brackets.
    token
        What the agent was started with; ``None``: that of ``ACCEL_TOKEN``, or of the file that
        ``ACCEL_TOKEN_FILE`` names.
    tls
        How the agent's certificate is verified, such as ``ssl.create_default_context(cafile=...)``;
        ``None``: the connection is not encrypted, and the address must be one of this machine;
        ``False``: not encrypted, to any address, for a network that is closed to others.

    Raises
    ------
    InvalidArgumentError
        If one is of another form, or an address of another machine comes without ``tls``.
    """

    address: str
    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | Literal[False] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        host, _ = split_address(self.address)
        if self.token is not None:
            check_token(self.token)
        if self.tls is not None and self.tls is not False and not isinstance(self.tls, ssl.SSLContext):
            raise InvalidArgumentError(f"tls is {self.tls!r:.80}", remedy="Give an ssl.SSLContext, False or None.")
        if self.tls is None and not is_loopback(host):
            raise InvalidArgumentError(
                f"node {self.address} is on another machine, and what is sent to it would not be encrypted",
                remedy="Give accel.Node(address, tls=ssl.create_default_context(cafile=...)); or tls=False, in a network that is closed to others: "
                "what is sent can be read and changed there.",
            )

    @classmethod
    def of(cls, value: object) -> Node:
        """Return the node of a ``node=``, which may be an address alone."""
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, cls):
            raise InvalidArgumentError(f"node is {value!r:.80}", remedy="Give 'host:port', or an accel.Node.")
        return value

    @classmethod
    def all_of(cls, values: object) -> list[Node]:
        """Return the nodes of a ``nodes=``, one at least."""
        if isinstance(values, (str, cls)) or not isinstance(values, Iterable):
            raise InvalidArgumentError(f"nodes is {values!r:.80}", remedy="Give a list of addresses, or of accel.Node.")
        nodes = [cls.of(value) for value in values]
        if not nodes:
            raise InvalidArgumentError("nodes has no address", remedy="Give one at least; leave it out to open devices here.")
        return nodes

    async def find_devices(
        self, run_blocking: Callable[..., Awaitable[Any]], specs: str | list[str], count: int | None, *, is_shared: bool
    ) -> list[DeviceDescription]:
        """Return the devices of the node that ``specs`` and ``count`` name; see :func:`accel.registry.find_specs`.

        Parameters
        ----------
        run_blocking
            :meth:`accel.System.run_blocking`.
        specs, count
            What to find.
        is_shared
            Whether two processes are to have a context on them: raises if they cannot.

        Raises
        ------
        AccelError
            What the node answers, or if it cannot be reached.
        """
        request = {"what": "devices", "specs": specs, "count": count, "is_shared": is_shared}
        streams, answer = await self.request(run_blocking, request)
        streams.writer.close()
        try:
            return _decode_descriptions(answer["devices"])
        except (ValueError, TypeError, KeyError) as error:
            raise BackendUnavailableError(f"node {self.address} has listed no devices: {error!r:.200}") from error

    async def fetch_copy(
        self, run_blocking: Callable[..., Awaitable[Any]], token: AccelToken, seconds: float | None
    ) -> np.ndarray[Any, Any]:
        """Return a copy of what a token names that a process of the node's machine has published.

        Parameters
        ----------
        run_blocking
            :meth:`accel.System.run_blocking`.
        token
            Of a published ref.
        seconds
            For all of it; ``None``: 30 for the answer, and as long as bytes come.

        Raises
        ------
        AccelError
            What the node answers, as :func:`accel.remote.tokens.fetch`, or if it cannot be reached.
        DeadlineExceededError
            If the copy is not here in time.
        """
        wanted = encode_request(token, _TOKEN_TIMEOUT if seconds is None else seconds, copy=True).decode()
        try:
            async with asyncio.timeout(seconds):
                streams, answer = await self.request(run_blocking, {"what": "token", "request": wanted})
                try:
                    return await _receive_array(streams, answer)
                finally:
                    streams.writer.transport.abort()
        except TimeoutError:
            raise DeadlineExceededError(f"{token!r} was not copied from node {self.address} within {seconds:g} s", op="put") from None
        except (OSError, EOFError) as error:
            raise _unreachable(self, error) from error

    async def request(self, run_blocking: Callable[..., Awaitable[Any]], request: dict[str, Any]) -> tuple[Streams, dict[str, Any]]:
        """Connect, and send a request; return the connection and the answer.

        Raises
        ------
        BackendUnavailableError
            If the node cannot be reached (retryable), or refuses.
        AccelError
            What it answers.
        """
        token = await run_blocking(find_token) if self.token is None else check_token(self.token)
        streams: Streams | None = None
        try:
            streams = await self._connect(token)
            async with asyncio.timeout(_ANSWER_TIMEOUT):
                return streams, await ask(streams, request)
        except BaseException as error:
            if streams is not None:
                streams.writer.transport.abort()
            if isinstance(error, ProtocolError):
                raise BackendUnavailableError(f"node {self.address}: {error.message}", remedy=error.remedy) from error
            if isinstance(error, AccelError):
                error.message = f"node {self.address}: {error.message}"
            if not isinstance(error, (OSError, EOFError)) or isinstance(error, AccelError):
                raise
            raise _unreachable(self, error) from error

    async def _connect(self, token: bytes) -> Streams:
        """Connect, and prove that both ends have the token.

        An agent to which many connect at once closes some of those that have proved nothing yet: it
        is tried again a few times.
        """
        host, port = split_address(self.address)
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            for pause in _BUSY_PAUSES:
                with contextlib.suppress(ClosedEarlyError):
                    return await connect(host, port, self.tls or None, token)
                await asyncio.sleep(pause)
            return await connect(host, port, self.tls or None, token)


async def _receive_array(streams: Streams, answer: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the array that an answer announces, and that follows it.

    Raises
    ------
    ProtocolError
        If it announces none, or more follows.
    OSError, EOFError
        If nothing more comes.
    """
    try:
        array = np.empty(as_shape(answer["shape"]), DType.of(answer["dtype"]).numpy)
    except (AccelError, KeyError, TypeError, ValueError, MemoryError) as error:
        raise ProtocolError(f"a node announces an array that is none: {error!r:.200}") from None
    memory, filled = array.reshape(-1).view(np.uint8), 0
    while filled < memory.size:
        try:
            async with asyncio.timeout(_TOKEN_TIMEOUT):
                data = await streams.reader.read(_PIECE_BYTES)
        except TimeoutError:
            raise EOFError(f"it has sent nothing for {_TOKEN_TIMEOUT:g} s") from None
        if not data:
            raise EOFError("it has closed the connection")
        if len(data) > memory.size - filled:
            raise ProtocolError("a node sends more than the array that it has announced")
        memory[filled : filled + len(data)] = np.frombuffer(data, np.uint8)
        filled += len(data)
    return array


class NodeSession:
    """The children of one device on a node, and its durable memory, which the agent keeps.

    Parameters
    ----------
    node
        Where.
    run_blocking
        Reads the token's file.

    Attributes
    ----------
    max_chunk : int
        Bytes of the largest chunk in which an array moves: the child copies one while the next is
        on its way.
    """

    max_chunk: ClassVar[int] = 8 << 20

    def __init__(self, node: Node, run_blocking: Callable[..., Awaitable[Any]]) -> None:
        self.address = node.address
        self._node = node
        self._run_blocking = run_blocking
        self._number = secrets.token_hex(16)
        self._requests = itertools.count(1)  # a child has the number of the request for it
        self._children: dict[NodeChild, int] = {}  # those that have not ended, or are started -> their numbers
        self._keep: float | None = None  # seconds for which the agent keeps durable memory; None before the first child

    async def start_child(
        self,
        device: DeviceCore,
        *,
        uvloop: bool,
        silence: float,
        on_message: Callable[[int, bytes, list[int]], None],
        on_lost: Callable[[AccelError | None], None],
        on_exit: Callable[[ExitStatus], None],
    ) -> NodeChild:
        """Start a child on the node; see :class:`NodeChild`.

        A node that has had a child, and cannot be reached now, is tried for as long as it keeps
        durable memory.

        Parameters
        ----------
        device
            Whose child it is.
        uvloop
            Whether it runs on uvloop's event loop.
        silence
            Seconds after which a machine that does not answer counts as lost.
        on_message, on_lost, on_exit
            As for :class:`NodeChild`.

        Raises
        ------
        BackendUnavailableError
            The node cannot be reached, or has no process for it.
        DeviceLostError
            The node was lost, and has not come back in time.
        """
        loop, pause = asyncio.get_running_loop(), _PAUSES[0]
        until: float | None = None

        def on_ended(status: ExitStatus) -> None:
            del self._children[child]
            on_exit(status)

        child = NodeChild(
            self.address,
            silence,
            on_message=on_message,
            on_lost=on_lost,
            on_exit=on_ended,
            on_closing=lambda: device.is_closing,
            known=self._known,
        )
        while True:
            try:
                await self._start(child, device, uvloop)
            except BackendUnavailableError as error:
                if self._keep is None or error.library != "node":
                    raise
                until = loop.time() + self._keep if until is None else until
                left = until - loop.time()
                if left <= 0:
                    raise DeviceLostError(
                        f"node {self.address} was lost, and is not back after {self._keep:g} s: {error.message}"
                    ) from error
            else:
                logger.info("node_child_started", node=self.address, pid=child.pid)
                return child
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, _PAUSES[1])

    def _known(self) -> tuple[int, list[int]]:
        """Return the number of a new request, and those of the children that may go on: the agent ends older ones that are none of these."""
        return next(self._requests), [number for child, number in self._children.items() if not child.is_killed]

    async def _start(self, child: NodeChild, device: DeviceCore, uvloop: bool) -> None:
        """Have the agent start a child, beside those that are known, and connect to it; one attempt."""
        number, known = self._known()
        # The agent ends children that this end has given up, and forgets slabs that it has dropped.
        request = {
            "what": "child",
            "session": self._number,
            "child": number,
            "known": known,
            "slabs": list({buffer.slab for buffer in device.durable.buffers.values()} - {None}),
            "uvloop": uvloop,
            "silence": child.silence,
        }
        self._children[child] = number
        with contextlib.ExitStack() as undo:
            undo.callback(self._children.pop, child)
            messages, answer = await self._node.request(self._run_blocking, request)
            undo.callback(messages.writer.transport.abort)
            arrays, _ = await self._node.request(self._run_blocking, {"what": "arrays", "session": self._number, "child": number})
            undo.callback(arrays.writer.transport.abort)
            pid, keep = answer.get("pid"), answer.get("keep")
            if type(pid) is not int or not 0 < pid < 1 << 31:
                raise BackendUnavailableError(f"node {self.address} answered pid={pid!r:.80}")
            if not isinstance(keep, (int, float)) or not 0 <= keep < math.inf:
                raise BackendUnavailableError(f"node {self.address} answered keep={keep!r:.80}")
            self._keep = keep
            try:
                await child.connect(pid, messages, arrays)
            except OSError as error:
                raise _unreachable(self._node, error) from error
            undo.pop_all()

    def renewed(self) -> NodeSession:
        """Return a session of its own on the same node, for another device."""
        return NodeSession(self._node, self._run_blocking)


def _unreachable(node: Node, error: BaseException) -> BackendUnavailableError:
    """Return the error for a connection that cannot be made, or has ended before it was of use."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return BackendUnavailableError(
            f"node {node.address} shows a certificate that is not trusted: {error.verify_message}",
            remedy="Give tls= a context that trusts it, such as ssl.create_default_context(cafile=...), and the address for which it was made.",
        )
    if isinstance(error, ssl.SSLError):
        return BackendUnavailableError(
            f"node {node.address} cannot be spoken to with TLS: {error}",
            remedy="Start its agent with --tls-cert; or leave tls= out, as in a network that is closed to others.",
        )
    remedy = f"Start `python -m accel node --listen {node.address}` there."
    if isinstance(error, ClosedEarlyError):
        remedy = "Try again, if its log says that too many connections prove nothing."
        if not node.tls:
            remedy = f"Give tls=, if its agent was started with --tls-cert. {remedy}"
    return BackendUnavailableError(
        f"node {node.address} cannot be reached: {str(error) or type(error).__name__}", library="node", retryable=True, remedy=remedy
    )


def split_address(address: object) -> tuple[str, int]:
    """Return the host and the port of ``"host:port"``.

    Raises
    ------
    InvalidArgumentError
        If it is of another form.
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal()):
        raise InvalidArgumentError(f"{address!r:.80} is no address of a node", remedy="Give 'host:port', such as '10.0.0.7:7420'.")
    if len(port) > len("65535") or int(port) > 65535:
        raise InvalidArgumentError(f"the port of {address!r:.80} is too large", remedy="Give 'host:port', with a port of 65535 at most.")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether an address is one that no other machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _decode_descriptions(listed: Any) -> list[DeviceDescription]:
    """Return the devices that a node has listed, one at least; raise what wrong values raise."""
    found = []
    for item in listed:
        texts, numbers = {key: item[key] for key in ("backend", "name", "uuid")}, {key: item[key] for key in ("index", "memory")}
        if any(type(text) is not str or len(text) > _MAX_TEXT for text in texts.values()):
            raise ValueError("a text is none, or too long")
        if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers.values()):
            raise ValueError("a number is none, or out of range")
        found.append(DeviceDescription(**texts, **numbers))
    if not found:
        raise ValueError("none")
    return found
