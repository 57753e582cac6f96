"""The form of what a service and its child say to each other: messages of a kind, with a length that is checked before anything is kept.

A message is a header of 12 bytes (magic, kind, number of descriptors that come with it, length of the payload; little-endian) and the payload. The
first one of each side is the greeting, which carries :data:`VERSION`. What is malformed is a :class:`ProtocolError` and ends the conversation:
after it the start of the next message is unknown.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from accel.errors import HostDiedError, InvalidArgumentError

__all__ = [
    "GREETING",
    "HEADER_BYTES",
    "MAX_DESCRIPTORS",
    "MAX_MESSAGE",
    "VERSION",
    "Frame",
    "FrameDecoder",
    "ProtocolError",
    "check_greeting",
    "encode_header",
    "greeting",
]

VERSION = 1
"""Of the protocol. Both sides must have the same."""
GREETING = 0
"""The kind of the first message of each side; others may use 1 to 65,535."""
MAX_MESSAGE = 16 << 20
"""Bytes of the largest payload, unless a channel is told otherwise. Arrays do not travel in messages."""
MAX_DESCRIPTORS = 64
"""File descriptors that may come with one message."""

_MAGIC = 0x4C434341  # b"ACCL"
_HEADER = struct.Struct("<IHHI")
_VERSION = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
"""Bytes before each payload."""


class ProtocolError(HostDiedError):
    """The process at the other end does not speak the protocol. Nothing more is read from it: to its peer it is as good as dead."""

    default_remedy = "The process is replaced. If that happens again, check that both run one version of accel, and report it."


class Frame(NamedTuple):
    """One message, as it was read.

    Attributes
    ----------
    kind
        What it is about.
    payload
        Its content.
    descriptors
        How many file descriptors came with it, or are still to come.
    """

    kind: int
    payload: bytes
    descriptors: int


def encode_header(kind: int, length: int, descriptors: int = 0) -> bytes:
    """Return what goes before a payload of ``length`` bytes.

    Raises
    ------
    InvalidArgumentError
        If a number does not fit into its field.
    """
    try:
        return _HEADER.pack(_MAGIC, kind, descriptors, length)
    except struct.error as error:
        raise InvalidArgumentError(f"no message has kind {kind}, {length} bytes and {descriptors} descriptors: {error}") from None


def greeting() -> bytes:
    """Return the first message of each side, whole."""
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


class FrameDecoder:
    """Cuts a stream of bytes into messages, however it was split on its way.

    It keeps at most the bytes of one unfinished message, and never more than arrived: an announced length reserves nothing.

    Parameters
    ----------
    max_message
        Bytes of the largest payload that is accepted.

    Attributes
    ----------
    error : ProtocolError or None
        What was wrong with the stream. Messages before that place were returned.
    """

    def __init__(self, max_message: int = MAX_MESSAGE) -> None:
        self.error: ProtocolError | None = None
        self._max_message = max_message
        self._rest = bytearray()
        self._needed = HEADER_BYTES

    @property
    def buffered(self) -> int:
        """Bytes of the message that is not complete yet."""
        return len(self._rest)

    @property
    def awaited(self) -> int | None:
        """How many descriptors the message that is not complete yet comes with; ``None`` while its header is not complete."""
        if len(self._rest) < HEADER_BYTES:
            return None
        descriptors: int = _HEADER.unpack_from(self._rest)[2]
        return descriptors

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Return the messages that ``data`` completes, in order.

        Raises
        ------
        ProtocolError
            If the stream is malformed and no message precedes that place. Otherwise those are returned, :attr:`error` is set, and the next call raises.
        """
        if self.error is not None:
            raise self.error.clone()
        rest = self._rest
        if not rest and type(data) is bytes and (frame := self._only(data)) is not None:
            return [frame]
        if rest:
            rest += data
            if len(rest) < self._needed:
                return []
            frames, used, error = self._cut(rest)
            del rest[:used]
        else:
            frames, used, error = self._cut(data)
            rest += memoryview(data)[used:]
        if error is not None:
            self.error = error
            rest.clear()
            if not frames:
                raise error.clone()
        return frames

    def end(self) -> None:
        """Say that nothing follows.

        Raises
        ------
        ProtocolError
            If the stream was malformed, or ends within a message.
        """
        if self.error is not None:
            raise self.error.clone()
        if self._rest:
            raise ProtocolError(f"the stream ends within a message: {len(self._rest)} of {self._needed} bytes are there")

    def _only(self, data: bytes) -> Frame | None:
        """Return the message that ``data`` is, if it is one, whole and well-formed; that is what comes most."""
        size = len(data)
        if size >= HEADER_BYTES:
            magic, kind, descriptors, length = _HEADER.unpack_from(data)
            if length == size - HEADER_BYTES and magic == _MAGIC and length <= self._max_message and descriptors <= MAX_DESCRIPTORS:
                self._needed = HEADER_BYTES
                return Frame(kind, data[HEADER_BYTES:], descriptors)
        return None

    def _cut(self, data: bytes | bytearray | memoryview) -> tuple[list[Frame], int, ProtocolError | None]:
        """Return the complete messages in ``data``, how many bytes they take, and what is wrong after them."""
        frames: list[Frame] = []
        error: ProtocolError | None = None
        start, size = 0, len(data)
        self._needed = HEADER_BYTES
        with memoryview(data) as view:
            while size - start >= HEADER_BYTES:
                magic, kind, descriptors, length = _HEADER.unpack_from(view, start)
                if magic != _MAGIC or length > self._max_message or descriptors > MAX_DESCRIPTORS:
                    error = self._malformed(magic, kind, descriptors, length)
                    break
                end = start + HEADER_BYTES + length
                if end > size:
                    self._needed = end - start
                    break
                frames.append(Frame(kind, bytes(view[start + HEADER_BYTES : end]), descriptors))
                start = end
        return frames, start, error

    def _malformed(self, magic: int, kind: int, descriptors: int, length: int) -> ProtocolError:
        if magic != _MAGIC:
            return ProtocolError(f"no message begins here: {magic:#010x} stands where {_MAGIC:#010x} must")
        if length > self._max_message:
            return ProtocolError(f"a message of kind {kind} announces {length} bytes; {self._max_message} are allowed")
        return ProtocolError(f"a message of kind {kind} announces {descriptors} descriptors; {MAX_DESCRIPTORS} are allowed")
