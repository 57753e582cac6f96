"""Two ends of a channel, on every kind of loop: messages, descriptors, backpressure, and every way in which it ends."""

from __future__ import annotations

import array
import asyncio
import gc
import os
import socket
import weakref
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from accel.errors import ClosedError, HostDiedError, InvalidArgumentError
from accel.process.channel import Channel
from accel.process.protocol import MAX_DESCRIPTORS, ProtocolError, encode_header
from tests.host_support import PATIENCE, End, message, raw_end, take_all, two_ends, write_end

if TYPE_CHECKING:
    from tests.host_support import Run


MIB = 1 << 20


def test_messages_go_both_ways_in_order(run_checked: Run) -> None:
    async def main() -> None:
        with two_ends() as (one, other):
            expected = [(kind, bytes([kind % 256]) * kind) for kind in range(1, 700)]
            for kind, payload in expected:
                one.channel.send(kind, payload[: kind // 2], bytearray(payload[kind // 2 :]))
                other.channel.send(kind, memoryview(payload))
            assert await one.received(len(expected)) == expected
            assert await other.received(len(expected)) == expected

    run_checked(main)


def test_a_full_socket_takes_the_rest_later(run_checked: Run) -> None:
    async def main() -> None:
        with two_ends() as (one, other):
            payload = os.urandom(5 * MIB)
            one.channel.send(1, payload)
            one.channel.send(2, b"after")
            assert one.channel.pending > 4 * MIB
            async with asyncio.timeout(PATIENCE):
                assert await other.received(2) == [(1, payload), (2, b"after")]
            assert one.channel.pending == 0

    run_checked(main)


def test_a_talkative_peer_starves_nobody(run_checked: Run) -> None:
    async def main() -> None:
        with raw_end() as (end, raw):
            raw.sendall(message(1) * 4000)
            counts = [0]
            while counts[-1] < 4000:
                await asyncio.sleep(0)
                counts.append(len(end.messages))
            most = max(after - before for before, after in pairwise(counts))
            assert 0 < most <= 512

    run_checked(main)


def test_descriptors_travel_with_their_message_only(run_checked: Run) -> None:
    async def main() -> None:
        with two_ends() as (one, other):
            took: list[tuple[int, list[int]]] = []

            def react(end: End, kind: int, payload: bytes, descriptors: list[int]) -> None:
                took.append((kind, list(descriptors)))
                descriptors.clear()

            other.react = react
            mine = [write_end() for _ in range(MAX_DESCRIPTORS)]
            one.channel.send(1, b"none")
            one.channel.send(2, b"two", fds=mine[:2])
            one.channel.send(3, b"x" * 300_000, fds=mine)
            one.channel.send(4)
            one.channel.send(5, fds=[mine[2]])
            files = [os.fstat(fd).st_ino for fd in mine]
            for fd in mine:
                os.close(fd)  # the channel has its own
            await other.received(5)
            assert [(kind, len(fds)) for kind, fds in took] == [(1, 0), (2, 2), (3, MAX_DESCRIPTORS), (4, 0), (5, 1)]
            assert [[os.fstat(fd).st_ino for fd in fds] for _, fds in took] == [[], files[:2], files, [], [files[2]]]
            for _, fds in took:
                for fd in fds:
                    assert not os.get_inheritable(fd)
                    os.close(fd)

    run_checked(main)


def test_descriptors_that_nobody_takes_are_closed(run_checked: Run) -> None:
    async def main() -> None:
        fd = write_end()
        with two_ends() as (one, other):
            one.channel.send(1, fds=[fd, fd])
            await other.received(1)
            one.channel.send(2, fds=[fd])  # not sent any more, or not read any more
            one.channel.close()
            other.channel.close()
        with two_ends() as (one, other):
            other.react = lambda end, *_: end.channel.close()
            for _ in range(3):
                one.channel.send(1, fds=[fd])
            await one.lost()
            assert len(other.messages) == 1
        os.close(fd)

    run_checked(main)


def test_descriptors_of_a_message_that_never_completes_are_closed(run_checked: Run) -> None:
    async def main() -> None:
        fd = write_end()
        with raw_end() as (end, raw):
            send_raw(raw, encode_header(1, 10, 1) + b"half", [fd])
            raw.shutdown(socket.SHUT_WR)
            assert isinstance(await end.lost(), ProtocolError)
        os.close(fd)

    run_checked(main)


def send_raw(raw: socket.socket, data: bytes, fds: list[int]) -> None:
    raw.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


@pytest.mark.parametrize(
    ("data", "count", "word"),
    [
        (message(1, b"x", 2), 1, "announces 2 descriptors, and 1 came"),
        (message(1, b"x", 1), 0, "announces 1 descriptors, and 0 came"),
        (message(1, b"x", 1), 2, "1 descriptors came where 0"),
        (message(1, b"x"), 1, "1 descriptors came where 0"),
        (message(1, b"xy", 1)[:-1], 2, "2 descriptors came where 1"),
        (message(1, b"x", 64)[:5], MAX_DESCRIPTORS + 1, "65 descriptors came where 64"),
        (message(1, b"x", 64), MAX_DESCRIPTORS + 30, "30 descriptors came where 0"),
    ],
)
def test_other_descriptors_than_announced_are_an_error(run_checked: Run, data: bytes, count: int, word: str) -> None:
    async def main() -> None:
        fd = write_end()
        with raw_end() as (end, raw):
            send_raw(raw, data, [fd] * count) if count else raw.sendall(data)
            error = await end.lost()
            assert isinstance(error, ProtocolError)
            assert word in str(error)
        os.close(fd)

    run_checked(main)


def test_a_handler_may_answer_take_and_close(run_checked: Run) -> None:
    async def main() -> None:
        fd = write_end()
        with two_ends() as (one, other):
            other.react = lambda end, kind, payload, descriptors: end.channel.send(kind + 1, payload, fds=descriptors)
            one.react = take_all
            one.channel.send(1, b"hello", fds=[fd])
            assert await one.received(1) == [(2, b"hello")]
            assert len(one.descriptors) == 1
            os.close(one.descriptors.pop())
            other.react = lambda end, *_: end.channel.close()
            one.channel.send(1)
            one.channel.send(1)
            assert await one.lost() is None
            assert len(other.messages) == 2
            assert other.losses == []
        os.close(fd)

    run_checked(main)


def test_what_cannot_be_sent_is_refused_and_leaves_nothing(run_checked: Run) -> None:
    async def main() -> None:
        fd = write_end()
        with two_ends(max_message=100) as (one, other):
            for arguments, fds in [
                ((1, b"x" * 101), []),
                ((1,), [fd] * (MAX_DESCRIPTORS + 1)),
                ((0,), []),
                ((1 << 16,), []),
                ((1,), [fd, 1 << 20]),
            ]:
                with pytest.raises(InvalidArgumentError):
                    one.channel.send(*arguments, fds=fds)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                one.channel.send(1, b"half", "text")  # type: ignore[arg-type]
            one.channel.send(1, b"x" * 100)
            assert await other.received(1) == [(1, b"x" * 100)]
        os.close(fd)

    run_checked(main)


def test_the_end_comes_after_the_last_message(run_checked: Run) -> None:
    async def main() -> None:
        with two_ends() as (one, other):
            await one.greeted()
            for kind in range(1, 2000):
                one.channel.send(kind, b"last words")
            one.channel.close()
            one.channel.close()
            assert await other.lost() is None
            assert [kind for kind, _ in other.messages] == list(range(1, 2000))
            assert one.losses == []

    run_checked(main)


def test_a_peer_that_went_while_we_wrote_is_heard_to_its_end(run_checked: Run) -> None:
    async def main() -> None:
        with raw_end() as (end, raw):
            await end.greeted()
            end.channel.send(1, b"x" * MIB)
            await asyncio.sleep(0)
            assert end.channel.pending > 0
            raw.sendall(b"".join([message(kind, b"last words") for kind in range(1, 1500)]))
            raw.close()
            end.channel.send(2)  # whatever happens first, reading or writing
            error = await end.lost()
            assert isinstance(error, HostDiedError)
            assert error.code in {"EPIPE", "ECONNRESET"}
            assert len(end.messages) == 1499
            with pytest.raises(ClosedError):
                end.channel.send(3)

    run_checked(main)


def test_reading_on_after_a_broken_write_is_scheduled_once(run_checked: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called once more after the loss, it would read, and unregister, a descriptor that may be another's by then."""
    was_closed: list[bool] = []
    read_and_deliver = Channel._read_and_deliver

    def watched(channel: Channel) -> None:
        was_closed.append(channel.is_closed)
        read_and_deliver(channel)

    monkeypatch.setattr(Channel, "_read_and_deliver", watched)

    async def main() -> None:
        with raw_end() as (end, raw):
            await end.greeted()
            end.react = lambda end, *_: end.channel.send(1, now=True)
            raw.sendall(message(1))
            raw.close()
            assert isinstance(await end.lost(), HostDiedError)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not any(was_closed)

    run_checked(main)


def test_a_broken_channel_keeps_nothing_of_what_was_sending(run_checked: Run) -> None:
    """The error's traceback has the frame that wrote, and that one all its callers'."""

    class Held:
        pass

    async def main() -> None:
        with raw_end() as (end, raw):
            await end.greeted()
            raw.close()

            def send() -> weakref.ref[Held]:
                held = Held()
                end.channel.send(1, b"into nothing")
                end.channel.flush()
                return weakref.ref(held)

            kept = send()
            error = await end.lost()
            assert isinstance(error, HostDiedError)
            assert isinstance(error.__cause__, OSError)
            gc.collect()
            assert kept() is None

    run_checked(main)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"garbage, and more of it", "begins"),
        (encode_header(1, 2 * MIB), "allowed"),
        (message(0, b"1234"), "second time"),
        (message(1)[:-1], ""),
    ],
)
def test_nonsense_ends_it_after_what_made_sense(run_checked: Run, data: bytes, word: str) -> None:
    async def main() -> None:
        with raw_end(max_message=MIB) as (end, raw):
            raw.sendall(message(5, b"sense") + data)
            if not word:
                raw.shutdown(socket.SHUT_WR)
            error = await end.lost()
            assert isinstance(error, ProtocolError)
            assert word in error.message
            assert end.messages == [(5, b"sense")]

    run_checked(main)


@pytest.mark.parametrize("first", [message(1), message(0, (99).to_bytes(4, "little")), message(0)])
def test_who_does_not_greet_is_not_heard(run_checked: Run, first: bytes) -> None:
    async def main() -> None:
        one, raw = socket.socketpair()
        end = End(one)
        with raw:
            raw.sendall(first + message(7))
            assert isinstance(await end.lost(), ProtocolError)
            assert end.messages == []

    run_checked(main)


def test_what_the_handler_raises_ends_the_channel_and_is_reported(run_checked: Run) -> None:
    async def main() -> None:
        reported: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
        fd = write_end()
        problem = ValueError("bad handler")

        def react(end: End, kind: int, payload: bytes, descriptors: list[int]) -> None:
            raise problem

        with two_ends() as (one, other):
            other.react = react
            one.channel.send(1, fds=[fd])
            one.channel.send(2)
            error = await other.lost()
            assert isinstance(error, HostDiedError)
            assert error.__cause__ is problem
            assert reported == [problem]
            assert len(other.messages) == 1
            assert await one.lost() is None
        os.close(fd)

    run_checked(main)
