"""The first messages of a connection between machines: both ends prove that they have the token.

Neither end sends the token. Each answers a challenge of the other one with an HMAC over both
challenges, so what was recorded of one connection is of no use in another. The HMAC is also over the
certificate that the agent shows and the controller sees, or over that there is none: what stands
between them cannot take TLS away, or show a certificate of its own. Before the proof neither end
looks at messages of more than 256 bytes, nor believes what the other one says; of each connection
the loop holds what one read of the system has returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import hmac
import json
import os
import platform
import secrets
import socket
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accel._version import installed_version
from accel.errors import AccelError, BackendUnavailableError, InvalidArgumentError
from accel.process.protocol import GREETING, HEADER_BYTES, ProtocolError, check_greeting, decode_header, encode_header, greeting
from accel.remote.error_codec import decode_error, encode_error

if TYPE_CHECKING:
    import ssl

__all__ = [
    "TOKEN_VARIABLE",
    "ClosedEarlyError",
    "RefusedError",
    "Streams",
    "ask",
    "check_token",
    "connect",
    "find_token",
    "open_streams",
    "prove",
    "receive_request",
    "verify",
]

TOKEN_VARIABLE, _FILE_VARIABLE = "ACCEL_TOKEN", "ACCEL_TOKEN_FILE"
_TOKEN_REMEDY = f"Set {TOKEN_VARIABLE}, or {_FILE_VARIABLE} to the name of a file with it, to the same on both machines: `openssl rand -hex 32` makes one."
_OTHER_TOKEN = "the other end has another token, or the connection's TLS ends between the two"
_MIN_TOKEN = 16
"""Characters of the shortest token: a shorter one can be guessed from a recorded proof."""

_CHALLENGE_BYTES = 32
_MAX_UNPROVED = 256
"""Bytes of a message that is read before the other end has proved that it has the token."""
_MAX_PROVED = 1 << 20


class _Step(enum.IntEnum):
    """Kinds of the messages; each end sends its greeting first."""

    CHALLENGE = 1
    """Of the agent: random bytes."""
    PROOF = 2
    """Of the controller: random bytes of its own, and its HMAC."""
    COUNTERPROOF = 3
    """Of the agent: its HMAC."""
    REQUEST = 4
    """Of the controller: what the connection is for, as JSON."""
    ANSWER = 5
    """Of the agent: JSON."""
    REFUSED = 6
    """Of the agent: it then closes the connection. Empty: the proof is wrong; else why, as an error."""


class RefusedError(BackendUnavailableError):
    """The other end of a connection has refused it, or is none of accel's."""


class ClosedEarlyError(ConnectionResetError):
    """The agent has closed the connection before both ends have proved that they have the token."""


class Streams(NamedTuple):
    """A connection before its first request was answered."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    sock: socket.socket

    def send(self, kind: int, payload: bytes) -> None:
        """Send a message."""
        self.writer.write(encode_header(kind, len(payload)) + payload)

    async def _read(self, max_message: int) -> tuple[int, bytes]:
        """Return kind and payload of the next message."""
        kind, _, length = decode_header(await self.reader.readexactly(HEADER_BYTES), 0, max_message)
        return kind, await self.reader.readexactly(length)

    async def receive(self, expected: int) -> bytes:
        """Return the payload of the next message, of an end that has proved nothing yet.

        Raises
        ------
        ProtocolError
            If it is another one, or longer.
        RefusedError
            If it says that the other end has refused the proof.
        """
        kind, payload = await self._read(_MAX_UNPROVED)
        if kind == _Step.REFUSED:
            raise RefusedError(_OTHER_TOKEN, remedy=_TOKEN_REMEDY)
        _check_kind(kind, expected)
        return payload

    async def receive_json(self, expected: int) -> dict[str, Any]:
        """Return the next message, which is an object in JSON, of an end that has the token.

        Raises
        ------
        ProtocolError
            If it is another one, or longer.
        AccelError
            If it says that the other end has refused: why.
        """
        kind, payload = await self._read(_MAX_PROVED)
        if kind == _Step.REFUSED:
            raise decode_error(payload)
        _check_kind(kind, expected)
        try:
            content = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message of kind {expected} is no JSON: {error}") from None
        if not isinstance(content, dict):
            raise ProtocolError(f"a message of kind {expected} is {content!r:.80}")
        return content

    async def take_rest(self) -> bytes:
        """Return what has come behind the last message, without waiting. The last call: a protocol follows.

        Raises
        ------
        OSError
            If the connection has ended.
        """
        if self.reader.at_eof() or self.writer.is_closing():
            raise ConnectionResetError("the other end has closed the connection")
        self.reader.feed_eof()
        return await self.reader.read()

    def answer(self, content: dict[str, Any]) -> None:
        """Send the answer to the request."""
        self.send(_Step.ANSWER, json.dumps(content).encode())

    async def refuse(self, error: AccelError) -> None:
        """Send why the request is refused, and wait until the system has it."""
        self.send(_Step.REFUSED, encode_error(error))
        await self.writer.drain()


def _check_kind(kind: int, expected: int) -> None:
    """Raise unless a message is of the kind that must come."""
    if kind != expected:
        raise ProtocolError(f"a message of kind {kind} came where one of kind {expected} must")


def check_token(token: object) -> bytes:
    """Return a token as bytes.

    Raises
    ------
    InvalidArgumentError
        If it is no text, or too short.
    """
    if not isinstance(token, str) or len(token.strip()) < _MIN_TOKEN:
        raise InvalidArgumentError(f"the token is no text of {_MIN_TOKEN} characters or more", remedy=_TOKEN_REMEDY)
    return token.strip().encode()


def find_token() -> bytes:
    """Return the token that the environment, or the file that it names, has. Reads a file.

    Raises
    ------
    InvalidArgumentError
        If there is none, or it is too short.
    """
    token, path = os.environ.get(TOKEN_VARIABLE), os.environ.get(_FILE_VARIABLE)
    if token is None and path is not None:
        try:
            token = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(f"the token cannot be read: {error}", remedy=_TOKEN_REMEDY) from error
    if token is None:
        raise InvalidArgumentError("there is no token for connections between machines", remedy=_TOKEN_REMEDY)
    return check_token(token)


def _hmac(token: bytes, role: bytes, certificate: bytes, agents: bytes, controllers: bytes) -> bytes:
    """Return what only an end with the token can compute from both challenges, and the agent's certificate."""
    return hmac.digest(token, role + hashlib.sha256(certificate).digest() + agents + controllers, "sha256")


# -- the agent's side


async def verify(streams: Streams, token: bytes, certificate: bytes = b"") -> None:
    """Verify that the controller has the token, and prove that this end has it.

    Parameters
    ----------
    streams, token
        The connection, and what both ends must have.
    certificate
        What this end shows of itself on the connection, DER; empty: it is not encrypted.

    Raises
    ------
    RefusedError
        If it has not; it was told so.
    ProtocolError, OSError, EOFError
        If the connection violates the protocol, or ends.
    """
    agents = secrets.token_bytes(_CHALLENGE_BYTES)
    streams.writer.write(greeting())
    streams.send(_Step.CHALLENGE, agents)
    check_greeting(GREETING, await streams.receive(GREETING))
    proof = await streams.receive(_Step.PROOF)
    controllers = proof[:_CHALLENGE_BYTES]
    if not hmac.compare_digest(proof[_CHALLENGE_BYTES:], _hmac(token, b"controller", certificate, agents, controllers)):
        streams.send(_Step.REFUSED, b"")
        await streams.writer.drain()
        raise RefusedError(_OTHER_TOKEN, remedy=_TOKEN_REMEDY)
    streams.send(_Step.COUNTERPROOF, _hmac(token, b"agent", certificate, agents, controllers))


async def receive_request(streams: Streams) -> dict[str, Any]:
    """Return the request of a controller that has the token.

    Raises
    ------
    RefusedError
        If it is of another version; it was told so.
    ProtocolError, OSError, EOFError
        If the connection violates the protocol, or ends.
    """
    request = await streams.receive_json(_Step.REQUEST)
    if request.get("versions") != _versions():
        refusal = RefusedError(
            f"the node runs {_spoken(_versions())}, and this process {_spoken(request.get('versions'))}",
            remedy="Install the same versions on both machines.",
        )
        await streams.refuse(refusal)
        raise refusal
    return request


@cache
def _versions() -> list[str]:
    """Return what must be the same at both ends: ops and options are sent in formats of these."""
    return [installed_version(), ".".join(platform.python_version_tuple()[:2])]


def _spoken(versions: object) -> str:
    """Return the versions of one end, which may have sent anything, in words."""
    if not isinstance(versions, list) or len(versions) != 2:
        return "an unknown version"
    return f"accel {versions[0]!s:.40} on Python {versions[1]!s:.20}"


# -- the controller's side


async def connect(host: str, port: int, tls: ssl.SSLContext | None, token: bytes) -> Streams:
    """Connect to an agent, and have both ends prove that they have the token.

    Raises
    ------
    ClosedEarlyError
        If the agent closes the connection before.
    AccelError, OSError, EOFError
        As :func:`open_streams` and :func:`prove`.
    """
    streams: Streams | None = None
    try:
        streams = await open_streams(host, port, tls)
        await prove(streams, token)
    except BaseException as error:
        if streams is not None:
            streams.writer.transport.abort()
        if isinstance(error, (EOFError, ConnectionResetError, BrokenPipeError, ConnectionAbortedError)):
            raise ClosedEarlyError("it has closed the connection at once") from error
        raise
    return streams


async def open_streams(host: str, port: int, tls: ssl.SSLContext | None) -> Streams:
    """Connect to an agent. Raises ``OSError`` if that cannot be reached."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(*found[0][:3]))
        sock.setblocking(False)
        await loop.sock_connect(sock, found[0][4])
        streams = await asyncio.open_connection(sock=sock, ssl=tls, server_hostname=None if tls is None else host)
        undo.pop_all()
    return Streams(*streams, sock)


async def prove(streams: Streams, token: bytes) -> None:
    """Prove that this end has the token, and verify that the agent has it.

    Raises
    ------
    AccelError
        If one of the two has not.
    OSError, EOFError
        If the connection ends.
    """
    tls = streams.writer.get_extra_info("ssl_object")
    certificate = b"" if tls is None else tls.getpeercert(binary_form=True) or b""
    streams.writer.write(greeting())
    check_greeting(GREETING, await streams.receive(GREETING))
    agents = await streams.receive(_Step.CHALLENGE)
    if len(agents) != _CHALLENGE_BYTES:
        raise ProtocolError(f"a challenge has {len(agents)} bytes")
    controllers = secrets.token_bytes(_CHALLENGE_BYTES)
    streams.send(_Step.PROOF, controllers + _hmac(token, b"controller", certificate, agents, controllers))
    counterproof = await streams.receive(_Step.COUNTERPROOF)
    if not hmac.compare_digest(counterproof, _hmac(token, b"agent", certificate, agents, controllers)):
        raise RefusedError(_OTHER_TOKEN, remedy=_TOKEN_REMEDY)


async def ask(streams: Streams, request: dict[str, Any]) -> dict[str, Any]:
    """Send the request, and return the answer.

    Raises
    ------
    AccelError
        If it is refused.
    OSError, EOFError
        If the connection ends.
    """
    streams.send(_Step.REQUEST, json.dumps({**request, "versions": _versions()}).encode())
    return await streams.receive_json(_Step.ANSWER)
