"""Messages are cut out of a stream, and what is malformed is a ProtocolError."""

from __future__ import annotations

import pytest

from accel.errors import InvalidArgumentError
from accel.process.protocol import (
    GREETING,
    HEADER_BYTES,
    MAX_DESCRIPTORS,
    VERSION,
    ProtocolError,
    check_greeting,
    encode_header,
    greeting,
)
from tests.host_support import frames, message, reading


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
def test_what_precedes_the_malformed_is_there_when_it_raises(data: bytes, word: str) -> None:
    with reading(100) as (incoming, other):
        other.sendall(message(1, b"good") + data)
        with pytest.raises(ProtocolError, match=word):
            incoming.read(1000)
        assert list(incoming.messages) == [(1, b"good", [])]


def test_an_announced_length_reserves_nothing() -> None:
    with reading(1 << 32) as (incoming, other):
        other.sendall(encode_header(1, 0xFFFFFFFF) + b"x")
        assert incoming.read(100) == HEADER_BYTES + 1


def test_the_greeting_carries_the_version() -> None:
    ((kind, payload),) = frames(greeting())
    assert kind == GREETING
    check_greeting(kind, payload)
    with pytest.raises(ProtocolError, match="speaks version") as caught:
        check_greeting(GREETING, (VERSION + 1).to_bytes(4, "little"))
    assert caught.value.code == VERSION + 1
    for kind, first in [(1, payload), (GREETING, b""), (GREETING, b"12345")]:
        with pytest.raises(ProtocolError, match="no greeting"):
            check_greeting(kind, first)
