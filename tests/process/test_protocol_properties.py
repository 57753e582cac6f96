"""However a stream is split, damaged or made up: the same messages, or a ProtocolError, and never more memory than arrived."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel import errors
from accel.errors import AccelError
from accel.process.protocol import HEADER_BYTES, ProtocolError, greeting
from accel.remote.error_codec import decode_error, encode_error
from tests.child_support import descriptors
from tests.host_support import End, message, reading

MAX = 4096
messages = st.lists(st.tuples(st.integers(1, 65_535), st.binary(max_size=200)), max_size=20)
cuts = st.lists(st.integers(0, 3000), max_size=30)


def split(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def outcome(parts: list[bytes]) -> tuple[list[tuple[int, bytes]], str | None]:
    """Return the messages of a stream and what is wrong with it, checking what must hold for every stream."""
    with reading(MAX) as (incoming, other):
        try:
            for part in filter(None, parts):
                other.sendall(part)
                assert incoming.read(1 << 20) == len(part)
            other.close()
            assert incoming.read(1) == 0
        except ProtocolError as error:
            problem: str | None = error.message
        else:
            problem = None
        return [(found.kind, found.payload) for found in incoming.messages], problem


@given(sent=messages, places=cuts, data=st.data())
def test_any_split_gives_the_same_messages(sent: list[tuple[int, bytes]], places: list[int], data: st.DataObject) -> None:
    stream = b"".join(message(*each) for each in sent)
    assert outcome(split(stream, places)) == (sent, None)
    end = data.draw(st.integers(0, len(stream)))
    complete, problem = outcome(split(stream[:end], places))
    assert complete == sent[: len(complete)]
    assert (problem is None) == (end == sum(HEADER_BYTES + len(payload) for _, payload in complete))


@given(sent=messages, places=cuts, flips=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=5))
def test_a_damaged_stream_gives_the_same_however_it_is_split(sent: list[tuple[int, bytes]], places: list[int], flips: list[int]) -> None:
    stream = bytearray(b"".join(message(*each) for each in sent) or b"x")
    for flip in flips:
        stream[flip // 8 % len(stream)] ^= 1 << flip % 8
    assert outcome(split(bytes(stream), places)) == outcome([bytes(stream)])


def test_time_grows_with_the_stream_only() -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    stream = message(1, rng.randbytes(8 << 20)) + message(2) * 20_000
    start = time.process_time()
    with reading(16 << 20) as (incoming, other):
        for i in range(0, len(stream), 1000):
            other.sendall(stream[i : i + 1000])
            incoming.read(1000)
        assert len(incoming.messages) == 20_001, f"seed {seed}"
    assert time.process_time() - start < 5.0, f"seed {seed}"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
names = sorted({name for cls in errors.__all__ if cls != "FaultScope" for name in getattr(errors, cls)().__dict__})


@given(st.binary(max_size=500) | json_values.map(lambda value: json.dumps(value).encode()))
def test_bytes_that_are_no_error_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_error(data)


@given(
    cls=st.sampled_from([*errors.__all__, "Nobody"]),
    fields=st.dictionaries(st.sampled_from(names) | st.text(max_size=10), json_values, max_size=6),
    causes=st.lists(st.text() | json_values, max_size=4),
)
def test_made_up_errors_are_errors_or_a_protocol_error(cls: str, fields: dict[str, object], causes: list[object]) -> None:
    data = json.dumps({"class": cls, "fields": fields, "causes": causes}).encode()
    try:
        error = decode_error(data)
    except ProtocolError:
        return
    assert isinstance(error, AccelError)
    assert str(error)
    again = decode_error(encode_error(error))
    assert type(again) is type(error)
    assert repr(again.__dict__) == repr(error.__dict__)


async def _survives(stream: bytes) -> None:
    one, other = socket.socketpair()
    end = End(one, max_message=MAX)
    other.setblocking(False)
    rng = random.Random(len(stream))
    fds = [os.open("/dev/null", os.O_RDONLY)]
    try:
        other.sendall(greeting())
        for i in range(0, len(stream), 300):
            if rng.random() < 0.2:
                socket.send_fds(other, [stream[i : i + 300]], fds * rng.randrange(1, 4))
            else:
                other.sendall(stream[i : i + 300])
            await asyncio.sleep(0)
    except OSError:
        pass  # the channel has had enough
    other.close()
    error = await end.lost()
    assert error is None or isinstance(error, AccelError)
    os.close(fds[0])


@settings(max_examples=60, deadline=None)
@given(sent=messages, flips=st.lists(st.integers(0, 1 << 17), max_size=2), garbage=st.binary(max_size=300))
def test_a_channel_survives_whatever_it_is_told(sent: list[tuple[int, bytes]], flips: list[int], garbage: bytes) -> None:
    stream = bytearray(b"".join(message(*each) for each in sent) + garbage)
    for flip in flips if stream else ():
        stream[flip // 8 % len(stream)] ^= 1 << flip % 8
    before = descriptors()
    with asyncio.Runner() as runner:
        problems: list[object] = []
        runner.get_loop().set_exception_handler(lambda _, context: problems.append(context))
        runner.run(_survives(bytes(stream)))
        assert problems == []
    assert descriptors() == before
