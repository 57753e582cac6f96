"""Every way in which a channel ends, on every kind of loop."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from accel.errors import ClosedError, HostDiedError
from accel.process.protocol import ProtocolError, encode_header
from tests.host_support import End, frames, message, raw_end, two_ends, write_end

if TYPE_CHECKING:
    from tests.host_support import Run

MIB = 1 << 20


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


def test_a_handler_may_call_a_payload_malformed(run_checked: Run) -> None:
    async def main() -> None:
        def react(end: End, kind: int, payload: bytes, descriptors: list[int]) -> None:
            raise ProtocolError("no such kind")

        with two_ends() as (one, other):
            other.react = react
            one.channel.send(1)
            error = await other.lost()
            assert isinstance(error, ProtocolError)
            assert error.message == "no such kind"

    run_checked(main)


def test_close_sends_what_the_socket_takes(run_checked: Run) -> None:
    async def main() -> None:
        with raw_end() as (end, raw):
            await end.greeted()
            end.channel.send(1, b"bye")
            end.channel.close()
            with pytest.raises(ClosedError):
                end.channel.send(2)
            received = b""
            while part := raw.recv(MIB):
                received += part
            assert frames(received)[1:] == [(1, b"bye")]

    run_checked(main)
