"""The messages between a service and its child processes: a header, and a payload.

A header has 12 bytes, little-endian: a magic number, the kind of the message, the number of file
descriptors that come with it, and the length of the payload. The first message of each side is the
greeting, which carries :data:`VERSION`. A malformed message raises :class:`ProtocolError` and ends
the connection, because the start of the next message is unknown.
"""

from __future__ import annotations

import struct

from accel.errors import HostDiedError, InvalidArgumentError

__all__ = [
    "GREETING",
    "HEADER_BYTES",
    "MAX_DESCRIPTORS",
    "MAX_MESSAGE",
    "VERSION",
    "ProtocolError",
    "check_greeting",
    "decode_header",
    "encode_header",
    "greeting",
]

VERSION = 2
"""Version of the protocol. It differs where accel was upgraded under a running service."""
GREETING = 0
"""The kind of the first message of each side; others may use 1 to 65,535."""
MAX_MESSAGE = 16 << 20
"""Bytes of the largest payload by default. Arrays do not travel in messages."""
MAX_DESCRIPTORS = 64
"""File descriptors that may come with one message."""

_MAGIC = 0x4C434341  # b"ACCL"
_HEADER = struct.Struct("<IHHI")
_VERSION = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
"""Bytes before each payload."""


class ProtocolError(HostDiedError):
    """The process at the other end violates the protocol. Nothing more is read from it."""

    default_remedy = "The process is replaced. If that happens again, check that both run one version of accel, and report it."


def encode_header(kind: int, length: int, descriptors: int = 0) -> bytes:
    """Return the header of a payload of ``length`` bytes.

    Raises
    ------
    InvalidArgumentError
        If a number does not fit into its field; the limits that :func:`decode_header` enforces are
        the sender's to check.
    """
    try:
        return _HEADER.pack(_MAGIC, kind, descriptors, length)
    except struct.error as error:
        raise InvalidArgumentError(f"no message has kind {kind}, {length} bytes and {descriptors} descriptors: {error}") from None


def greeting() -> bytes:
    """Return the first message of each side, header and payload."""
    return encode_header(GREETING, _VERSION.size) + _VERSION.pack(VERSION)


def check_greeting(kind: int, payload: bytes) -> None:
    """Raise unless this is the greeting of a process with this version of the protocol.

    Raises
    ------
    ProtocolError
        If it is not.
    """
    if kind != GREETING or len(payload) != _VERSION.size:
        raise ProtocolError(f"the first message is of kind {kind} and has {len(payload)} bytes; it is no greeting")
    (version,) = _VERSION.unpack(payload)
    if version != VERSION:
        raise ProtocolError(
            f"the other process speaks version {version} of the protocol, this one version {VERSION}",
            code=version,
            remedy="Let both run the same installation of accel.",
        )


def decode_header(data: bytes | bytearray, start: int, max_message: int) -> tuple[int, int, int]:
    """Return kind, number of descriptors and length in the header that begins at ``start``.

    Raises
    ------
    ProtocolError
        If no header begins there, or it announces more than is allowed.
    """
    magic, kind, descriptors, length = _HEADER.unpack_from(data, start)
    if magic != _MAGIC:
        raise ProtocolError(f"no message begins here: {magic:#010x} stands where {_MAGIC:#010x} must")
    if length > max_message:
        raise ProtocolError(f"a message of kind {kind} announces {length} bytes; {max_message} are allowed")
    if descriptors > MAX_DESCRIPTORS:
        raise ProtocolError(f"a message of kind {kind} announces {descriptors} descriptors; {MAX_DESCRIPTORS} are allowed")
    return kind, descriptors, length
