"""Buffers that other processes find by their tokens: same memory, or a copy; and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import json
import os
import pickle
import socket
import struct
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.remote import tokens
from accel.remote.error_codec import decode_error
from tests.child_support import no_child_left
from tests.device_support import PATIENCE, bounded, failure, generation, turns, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator

__all__ = ["no_child_left"]  # a fixture

pytestmark = pytest.mark.usefixtures("nothing_left", "no_child_left")

USING = """
import asyncio, pickle, sys
import accel

async def main():
    async with accel.System() as system:
        device = await system.open_device("cpu", host=sys.argv[1])
        for line in sys.stdin:
            word, data = line.split()
            try:
                ref = await getattr(device, word)(pickle.loads(bytes.fromhex(data)))
                if word == "attach":
                    await device.elementwise.binary("add", ref, ref, out=ref)
                print((await device.get(ref)).tolist(), flush=True)
            except accel.AccelError as error:
                print(type(error).__name__, error, flush=True)

asyncio.run(main())
"""

OWNING = """
import asyncio, pickle, sys
import accel

async def main():
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        ref = await device.full(8, 5.0)
        print(pickle.dumps(device.publish(ref)).hex(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


class Other:
    """Another process, which is told by lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin, self.stdout = process.stdin, process.stdout

    async def line(self) -> str:
        async with asyncio.timeout(60):
            return (await self.stdout.readline()).decode().strip()

    async def use(self, word: str, token: accel.AccelToken) -> str:
        self.stdin.write(f"{word} {pickle.dumps(token).hex()}\n".encode())
        return await self.line()


@contextlib.asynccontextmanager
async def running(program: str, *arguments: str) -> AsyncIterator[Other]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *arguments, stdin=pipe, stdout=pipe)
    other = Other(process)
    try:
        yield other
    finally:
        other.stdin.close()
        if not other.stdout.at_eof():
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]


@pytest.fixture(params=["inline", "process"])
async def device(request: pytest.FixtureRequest) -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cpu", host=request.param)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[accel.Device, accel.Device]]:
    """Two devices, of which the first has what the second asks for."""
    async with accel.System() as system:
        yield await system.open_device("cpu", host="inline"), await system.open_device("cpu", host="inline")


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_another_process_reaches_memory_and_copies_by_tokens(device: accel.Device, host: str) -> None:
    shared, plain = await device.zeros(8, shareable=True), await device.put(np.arange(12.0).reshape(3, 4))
    await device.run(accel.ops.Fill(shared.shape, shared.dtype, 1.0, shared))
    async with running(USING, host) as other:
        assert await other.use("attach", device.publish(shared)) == str([2.0] * 8)
        assert await other.use("attach", device.publish(shared[2:4])) == str([4.0] * 2)
        assert (await device.get(shared)).tolist() == [2.0, 2.0, 4.0, 4.0, 2.0, 2.0, 2.0, 2.0]
        assert await other.use("put", device.publish(plain)) == str(np.arange(12.0).reshape(3, 4).tolist())
        assert await other.use("put", device.publish(plain.T[1])) == str([1.0, 5.0, 9.0])
        assert await other.use("put", device.publish(shared)) == str([2.0, 2.0, 4.0, 4.0, 2.0, 2.0, 2.0, 2.0])
        refused = await other.use("attach", device.publish(plain))
        assert refused.startswith("InvalidArgumentError")
        assert "shareable=True" in refused
        token = device.publish(plain)
        await device.free(plain)
        assert (await other.use("put", token)).startswith("StaleRefError")
        dropped = device.publish(await device.zeros(3))
        refused = await other.use("put", dropped)
        assert refused.startswith("StaleRefError")
        assert repr(dropped) in refused
        await device.aclose()
        assert (await other.use("put", token)).startswith("StaleRefError")


@pytest.mark.parametrize("dtype", ["bfloat16", "complex128", "bool", "int8"])
@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5)])
async def test_copies_have_all_shapes_and_dtypes(pair: tuple[accel.Device, accel.Device], shape: tuple[int, ...], dtype: str) -> None:
    one, other = pair
    ref = await one.full(shape, 1, dtype)
    result = await bounded(other.put(one.publish(ref)))
    assert (result.shape, result.dtype, result.device) == (shape, accel.DType.of(dtype), other)
    assert (await other.get(result)).tobytes() == (await one.get(ref)).tobytes()


async def test_a_copy_goes_where_it_is_told_and_may_be_durable(pair: tuple[accel.Device, accel.Device]) -> None:
    one, other = pair
    token = one.publish(ref := await one.full(4, 3.0))
    out = await other.zeros(4)
    assert await other.put(token, out=out) is out
    assert (await other.get(out)).tolist() == [3.0] * 4
    assert (await other.put(token, durable=True)).durable
    await failure(other.put(token, out=await other.zeros(5)), accel.InvalidArgumentError)
    await one.free(ref)


async def test_where_the_buffer_is_a_token_gives_the_ref_itself(device: accel.Device) -> None:
    ref = await device.zeros(4)
    token = device.publish(ref)
    assert await device.attach(token) is ref
    assert device.resolve(token) is ref
    part = await device.attach(device.publish(ref[1:3]))
    assert isinstance(part, accel.RefView)
    assert part.base is ref


async def test_a_token_is_small_printable_and_owns_nothing(device: accel.Device) -> None:
    ref = await device.zeros((2, 3))
    token = device.publish(ref[:, 1:])
    assert pickle.loads(pickle.dumps(token)) == copy.deepcopy(token) == token
    assert len(pickle.dumps(token)) < 400
    assert len(repr(token)) < 300
    assert token.node == socket.gethostname()
    assert isinstance(token, accel.ViewToken)
    assert ref.token() == replace(device.publish(ref), node="")


async def test_only_what_was_published_is_given(pair: tuple[accel.Device, accel.Device]) -> None:
    one, other = pair
    ref, secret = await one.zeros(4), await one.zeros(4)
    token = one.publish(ref)
    error = await failure(other.put(secret.token()), accel.InvalidArgumentError)
    assert "publish" in str(error.remedy)
    assert (await other.get(await other.put(token))).tolist() == [0.0] * 4


async def test_a_stale_generation_and_a_dropped_ref_are_told(pair: tuple[accel.Device, accel.Device]) -> None:
    one, other = pair
    ref = await one.zeros(4, shareable=True)
    token = one.publish(ref)
    stale = replace(token, generation=7)
    for use in (other.attach, other.put):
        assert (await failure(use(stale), accel.StaleRefError)).reason == "generation"
    del ref
    for use in (other.attach, other.put):
        error = await failure(use(token), accel.StaleRefError)
        assert error.reason == "freed"
        assert error.remedy


async def test_a_rebuilt_device_gives_what_is_durable() -> None:
    plan = accel.testing.FaultPlan()
    async with accel.System() as system:
        one = await system.open_device("cpu", host="process", faults=plan.poison_at(1, op="unary"))
        other = await system.open_device("cpu", host="inline")
        kept, lost = await one.put(np.ones(4), durable=True), await one.zeros(4, shareable=True)
        kept_token, lost_token = one.publish(kept), one.publish(lost)
        await failure(one.elementwise.unary("neg", await one.zeros(4)), accel.ContextPoisonedError)
        await generation(one, 2)
        assert (await failure(other.attach(lost_token), accel.StaleRefError)).reason == "generation"
        assert (await other.get(await bounded(other.put(kept_token)))).tolist() == [1.0] * 4


async def test_the_end_of_the_owner_is_told() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        async with running(OWNING) as owner:
            token = pickle.loads(bytes.fromhex(await owner.line()))
            assert (await device.get(await bounded(device.put(token)))).tolist() == [5.0] * 8
            owner.process.kill()
            await owner.process.wait()
            error = await failure(device.put(token), accel.StaleRefError)
            assert error.remedy
        error = await failure(device.put(replace(token, node="elsewhere")), accel.StaleRefError)
        assert "elsewhere" in str(error)


async def test_a_stopped_owner_is_waited_for_no_longer_than_asked() -> None:
    import signal

    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        async with running(OWNING) as owner:
            token = pickle.loads(bytes.fromhex(await owner.line()))
            owner.process.send_signal(signal.SIGSTOP)
            waiting = asyncio.ensure_future(device.put(token, timeout=0.3))
            assert (await device.get(await device.zeros(1))).tolist() == [0.0], "the loop is free meanwhile"
            await failure(waiting, accel.DeadlineExceededError)
            cancelled = asyncio.ensure_future(device.attach(token))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "cpu:0"},
        {"device": "cpu:0/" + "x" * 32},
        {"device": "cpu:0/" + "0" * 33},
        {"device": 5},
        {"buffer": object()},
        {"buffer": "x" * 10_000},
    ],
)
async def test_what_is_no_token_is_refused_before_it_is_sent(pair: tuple[accel.Device, accel.Device], wrong: dict[str, Any]) -> None:
    one, other = pair
    ref = await one.zeros(4)
    error = await failure(other.attach(replace(one.publish(ref), **wrong)), accel.InvalidArgumentError)
    assert error.remedy


async def test_an_unknown_device_is_told(device: accel.Device) -> None:
    await failure(device.attach(accel.AccelToken("cpu:0/" + "0" * 32, 1, 1)), accel.StaleRefError)


def test_tokens_work_on_each_kind_of_loop(run_on_loop: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]) -> None:
    async def main() -> None:
        async with accel.System() as system:
            one, other = await system.open_device("cpu", host="inline"), await system.open_device("cpu", host="inline")
            ref = await one.full(4, 1.0)
            shared = await one.zeros(4, shareable=True)
            copied, attached = await asyncio.gather(other.put(one.publish(ref)), other.attach(one.publish(shared)))
            assert (await other.get(copied) - await other.get(attached)).tolist() == [1.0] * 4

    run_on_loop(main)


async def test_a_fork_does_not_listen(device: accel.Device) -> None:
    ref = await device.zeros(4)
    token = device.publish(ref)
    reading, writing = os.pipe()
    begun, begins = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.write(begins, b"x")  # what a fork must not have is closed by now
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        await asyncio.to_thread(os.read, begun, 1)
        await device.aclose()
        with pytest.raises(ConnectionRefusedError), connection(token):
            pass
    finally:
        for fd in (writing, begun, begins):
            os.close(fd)
        os.waitpid(pid, 0)


async def test_without_a_descriptor_connections_wait(pair: tuple[accel.Device, accel.Device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_PAUSE", 0.05)
    one, other = pair
    ref = await one.zeros(4)
    token = one.publish(ref)
    listener: Any = one._published._listener
    attempts: list[float] = []

    class Short:
        """A listener in a process that may open no more files, twice."""

        def accept(self) -> Any:
            attempts.append(asyncio.get_running_loop().time())
            if len(attempts) < 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return listener.accept()

        def fileno(self) -> int:
            return int(listener.fileno())

        def detach(self) -> int:
            return int(listener.detach())

    one._published._listener = Short()  # type: ignore[assignment]
    assert (await other.get(await bounded(other.put(token)))).tolist() == [0.0] * 4
    assert attempts[1] - attempts[0] > 0.04, "it does not spin"


# -- other users


async def test_processes_of_another_user_are_refused_at_both_ends(
    pair: tuple[accel.Device, accel.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    ref = await one.zeros(4, shareable=True)
    token = one.publish(ref)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_user_of", lambda _: os.geteuid() + 1)
        assert "user" in str(await failure(other.attach(token), accel.UnsupportedError))
    asking = iter([os.geteuid()])  # this end of the connection, and then the other one
    monkeypatch.setattr(tokens, "_user_of", lambda _: next(asking, os.geteuid() + 1))
    await failure(other.attach(token), accel.StaleRefError)
    monkeypatch.undo()
    await bounded(other.attach(token))


def test_the_number_of_a_user_may_need_all_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        credentials = struct.pack("iII", 1, (1 << 32) - 2, 0)  # of pid, user and group
        monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: credentials)
        assert tokens._user_of(sock) == (1 << 32) - 2


async def test_connections_of_another_user_are_closed_at_once(
    pair: tuple[accel.Device, accel.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    ref = await one.zeros(4)
    token = one.publish(ref)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connection(token)) for _ in range(100)]
        with monkeypatch.context() as patch:
            patch.setattr(tokens, "_user_of", lambda _: os.geteuid() + 1)
            await turns(3)
        assert [sock.recv(1) for sock in strangers] == [b""] * 100
    await bounded(other.put(token))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_a_process_of_another_user_gets_nothing(pair: tuple[accel.Device, accel.Device]) -> None:
    one, other = pair
    ref = await one.zeros(4, shareable=True)
    token = one.publish(ref)
    program = (
        "import socket, sys\n"
        "with socket.socket(socket.AF_UNIX) as sock:\n"
        "    sock.connect(bytes.fromhex(sys.argv[1]))\n"
        "    print(sock.recv(100), flush=True)\n"
    )
    process = await asyncio.create_subprocess_exec(
        "/usr/bin/env", "python3", "-c", program, tokens._address(token.device).hex(), stdout=asyncio.subprocess.PIPE, user=65534
    )
    answer, _ = await asyncio.wait_for(process.communicate(), 30)
    assert answer in (b"b''\n", b""), "nothing, or it cannot run python"
    assert process.returncode == 0
    await bounded(other.attach(token))


# -- connections that are none


@contextlib.contextmanager
def connection(token: accel.AccelToken) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        sock.connect(tokens._address(token.device))
        yield sock


async def closed(sock: socket.socket) -> bytes:
    """Return what comes until the other end has closed the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE):
            while more := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
                data += more
    return data


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


async def answer_of(token: accel.AccelToken, kind: int, payload: bytes, fds: tuple[int, ...] = ()) -> accel.AccelError | None:
    """Send a request as it is, and return the error that comes back; ``None`` if nothing does."""
    with connection(token) as sock:
        end = tokens._End(sock.dup(), 1 << 20, close_all)
        try:
            end.channel.send(kind, payload, fds=fds)
            kind, payload = await bounded(end.message)
            assert (kind, end.fds) == (tokens._Kind.REFUSED, [])
            return decode_error(payload)
        except accel.HostDiedError:
            return None
        finally:
            end.close()


async def test_garbage_is_answered_by_an_error_or_the_end(pair: tuple[accel.Device, accel.Device]) -> None:
    one, other = pair
    ref = await one.zeros((4, 4), shareable=True)
    token = one.publish(ref)
    good = json.loads(tokens.encode_request(one.publish(ref[1:]), 1.0, copy=True))
    wrong: list[Any] = [
        None,
        [],
        5,
        {},
        {"token": 5, "seconds": 1},
        good | {"seconds": -1},
        good | {"seconds": "x"},
        good | {"seconds": None},
    ]
    fields: dict[str, tuple[Any, ...]] = {
        "device": ("cpu:0/x", 5, None, []),
        "buffer": (5, -1, "x", None, [], {}, 1 << 100),
        "generation": (5, "x", None, []),
        "offset": (-4, 1 << 100, 3, "x", None, 1.5, [], True),
        "shape": (5, "x", [-1], [1 << 80], ["x"], [1.5], [[]], None, [1] * 1000),
        "strides": (5, "x", [-9, 1], [1], ["x", 1], [1 << 80, 1]),
        "dtype": (5, "float99", None, [], {}, "float64x"),
        "more": (5,),
    }
    for name, values in fields.items():
        wrong += [good | {"token": good["token"] | {name: value}} for value in values]
    wrong += [good | {"token": good["token"] | {"shape": [1 << 20], "strides": [0]}}]
    for request in wrong:
        error = await answer_of(token, tokens._Kind.REQUEST, json.dumps(request).encode())
        assert error is not None, request
        assert error.remedy, request
    for kind, payload in ((1, b""), (1, b"\xff"), (1, b"[" * 5000), (1, b"9" * 5000), (2, b"[]"), (3, b"x"), (9, b"{}")):
        assert isinstance(await answer_of(token, kind, payload), accel.AccelError)
    assert await answer_of(token, 1, b"x" * 10_000) is None, "longer than any request"
    assert (await other.get(await bounded(other.attach(token)))).tolist() == [[0.0] * 4] * 4


async def test_frames_and_descriptors_that_are_none_end_the_connection(pair: tuple[accel.Device, accel.Device]) -> None:
    one, other = pair
    token = one.publish(ref := await one.zeros(4))
    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\0" * 64):
        with connection(token) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, data)
            assert len(await closed(sock)) < 100
    with connection(token) as sock:
        socket.send_fds(sock, [b"x" * 12], [0, 1, 2])
        await closed(sock)
    assert isinstance(await answer_of(token, 1, b"{}", fds=(0, 1)), accel.AccelError)
    assert (await other.get(await bounded(other.put(token)))).tolist() == [0.0] * 4
    await one.free(ref)


async def test_slow_ends_are_closed_and_hold_up_no_other(pair: tuple[accel.Device, accel.Device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_REQUEST_SECONDS", 1.0)
    one, other = pair
    ref = await one.zeros(4)
    token = one.publish(ref)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connection(token)) for _ in range(tokens._MOST)]
        await until(lambda: len(one._published._answering) == tokens._MOST)
        await bounded(other.put(token))
        for sock in slow:
            await closed(sock)
    await until(lambda: not one._published._answering)


async def test_one_that_asks_waits_while_too_many_do(pair: tuple[accel.Device, accel.Device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_BACKLOG", 8)
    monkeypatch.setattr(tokens, "_REQUEST_SECONDS", 0.3)
    one, other = pair
    ref = await one.zeros(4)
    token = one.publish(ref)
    with contextlib.ExitStack() as stack:
        with pytest.raises(BlockingIOError):
            for _ in range(100):  # no turn of the loop accepts one
                stack.enter_context(connection(token))
        assert (await other.get(await bounded(other.put(token)))).tolist() == [0.0] * 4
    await until(lambda: not one._published._answering)


async def test_one_that_asks_waits_no_longer_than_asked(device: accel.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_BACKLOG", 8)
    token = accel.AccelToken("cpu:0/" + os.urandom(16).hex(), 1, 1)
    with tokens._listen(token.device), contextlib.ExitStack() as stack:
        with pytest.raises(BlockingIOError):
            for _ in range(100):
                stack.enter_context(connection(token))
        await failure(device.put(token, timeout=0.05), accel.DeadlineExceededError)


async def test_a_socket_whose_name_is_taken_is_told(device: accel.Device) -> None:
    ref = await device.zeros(4)
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(tokens._address(ref.token().device))
        with pytest.raises(accel.BackendUnavailableError, match="another process listens in place of") as caught:
            device.publish(ref)
        assert caught.value.remedy
    assert device.publish(ref).node == socket.gethostname()


async def test_a_device_is_closed_while_others_ask(pair: tuple[accel.Device, accel.Device]) -> None:
    one, other = pair
    ref = await one.zeros(1 << 20)
    token = one.publish(ref)
    with connection(token) as silent:
        asking = [asyncio.ensure_future(other.put(token)) for _ in range(8)]
        await until(lambda: len(one._published._answering) > 4)
        await bounded(one.aclose())
        await closed(silent)
        for result in await bounded(asyncio.gather(*asking, return_exceptions=True)):
            assert isinstance(result, (accel.AccelRef, accel.StaleRefError, accel.ClosedError)), result
    await failure(other.put(token), accel.StaleRefError)
    with pytest.raises(accel.ClosedError):
        one.publish(ref)
