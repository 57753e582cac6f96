"""Messages are cut out of a stream, and what is malformed is a ProtocolError."""

from __future__ import annotations

import pytest

from accel.errors import FaultScope, HostDiedError, InvalidArgumentError
from accel.process.protocol import (
    GREETING,
    HEADER_BYTES,
    MAX_DESCRIPTORS,
    VERSION,
    Frame,
    FrameDecoder,
    ProtocolError,
    check_greeting,
    encode_header,
    greeting,
)
from tests.host_support import message


def test_messages_come_out_as_they_went_in() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(message(1, b"one") + message(2) + message(65_535, b"x" * 100_000, 3)) == [
        Frame(1, b"one", 0),
        Frame(2, b"", 0),
        Frame(65_535, b"x" * 100_000, 3),
    ]
    decoder.end()


def test_a_message_may_come_byte_by_byte() -> None:
    decoder, found = FrameDecoder(), []
    for byte in message(7, b"seven") + message(8):
        found += decoder.feed(bytes([byte]))
    assert found == [Frame(7, b"seven", 0), Frame(8, b"", 0)]
    decoder.end()


def test_the_fields_of_a_header_are_where_they_are_said_to_be() -> None:
    assert encode_header(0x0102, 0x03040506, 7) == b"ACCL" + bytes([2, 1, 7, 0, 6, 5, 4, 3])
    assert len(encode_header(1, 0)) == HEADER_BYTES == 12


@pytest.mark.parametrize(("kind", "length", "descriptors"), [(-1, 0, 0), (1 << 16, 0, 0), (1, 1 << 32, 0), (1, 0, 1 << 16)])
def test_a_number_that_does_not_fit_is_refused(kind: int, length: int, descriptors: int) -> None:
    with pytest.raises(InvalidArgumentError):
        encode_header(kind, length, descriptors)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"GET / HTTP/1.1\r\n", "begins"),
        (encode_header(1, 101), "101 bytes"),
        (encode_header(1, 0xFFFFFFFF), "100 are allowed"),
        (encode_header(1, 0, MAX_DESCRIPTORS + 1), "65 descriptors"),
    ],
)
def test_what_precedes_the_malformed_is_returned_and_then_it_raises(data: bytes, word: str) -> None:
    with pytest.raises(ProtocolError, match=word):
        FrameDecoder(100).feed(data)
    decoder = FrameDecoder(100)
    assert decoder.feed(message(1, b"good") + data) == [Frame(1, b"good", 0)]
    assert decoder.error is not None
    for _ in range(2):
        with pytest.raises(ProtocolError, match=word):
            decoder.feed(message(2))
    with pytest.raises(ProtocolError, match=word):
        decoder.end()


@pytest.mark.parametrize("size", [1, 11, 12, 15])
def test_an_end_within_a_message_is_an_error(size: int) -> None:
    decoder = FrameDecoder()
    assert decoder.feed(message(1, b"four")[:size]) == []
    assert decoder.buffered == size
    with pytest.raises(ProtocolError, match=f"{size} of"):
        decoder.end()


def test_an_announced_length_reserves_nothing() -> None:
    decoder = FrameDecoder(1 << 32)
    assert decoder.feed(encode_header(1, 0xFFFFFFFF) + b"x") == []
    assert decoder.buffered == HEADER_BYTES + 1


def test_it_says_how_many_descriptors_the_unfinished_message_comes_with() -> None:
    decoder, awaited = FrameDecoder(), []
    for part in (b"", encode_header(1, 5, 2)[:-1], encode_header(1, 5, 2)[-1:], b"abcd", b"e"):
        decoder.feed(part)
        awaited.append(decoder.awaited)
    assert awaited == [None, None, 2, 2, None]


def test_the_greeting_carries_the_version() -> None:
    (frame,) = FrameDecoder().feed(greeting())
    assert frame.kind == GREETING
    check_greeting(frame.kind, frame.payload)
    with pytest.raises(ProtocolError, match="speaks version") as caught:
        check_greeting(GREETING, (VERSION + 1).to_bytes(4, "little"))
    assert caught.value.code == VERSION + 1
    for kind, payload in [(1, frame.payload), (GREETING, b""), (GREETING, b"12345")]:
        with pytest.raises(ProtocolError, match="no greeting"):
            check_greeting(kind, payload)


def test_a_protocol_error_is_a_dead_host() -> None:
    error = ProtocolError("garbage")
    assert isinstance(error, HostDiedError)
    assert error.scope is FaultScope.PROCESS
