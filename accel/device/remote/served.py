"""The child's half: the same context and kernel actors as inline, fed by messages instead of by a device actor."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import itertools
import json
import mmap
import os
import pickle
import struct
import threading
from collections import deque
from ctypes import addressof, c_char
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from accel.actors import Directive, RestartStrategy
from accel.backend import Injection
from accel.device.context_actor import ContextActor
from accel.device.core import DeviceCore
from accel.device.graph import GraphSubmission, Program, Replay
from accel.device.remote.durable import Announcer, kept_in
from accel.device.remote.messages import ArenaSlice, Failure, Kind, WireGet, WirePut, WireReplay, unpack
from accel.device.run import OpSubmission
from accel.device.submission import BatchSubmission
from accel.device.system import System
from accel.errors import AccelError, BackendUnavailableError, LibraryError
from accel.hosts.channel import Channel
from accel.hosts.error_codec import decode_error, encode_error
from accel.memory import HostRegistrar
from accel.ops import Get, Put, Spec
from accel.ref import AccelRef, RefView

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from accel.device.context import Context
    from accel.device.remote.messages import Config
    from accel.dtype import DType
    from accel.ops import KernelOp

__all__ = ["serve"]

_FAULTED = 3
"""Exit status after a fault, which was told before."""


class _Script:
    """What brings about what the parent's fault plan has decided: one entry for each op of the message in hand."""

    def __init__(self) -> None:
        self.queue: deque[Injection | AccelError | None] = deque()

    def begin(self, actions: Iterable[Injection | AccelError | None]) -> None:
        """Take the entries of the next message. What ops of the last one have left, which failed before their turn, is not for these."""
        self.queue.clear()
        self.queue.extend(actions)

    def take(self, kind: str) -> Injection | AccelError | None:
        return self.queue.popleft() if self.queue else None


class _Answered:
    """What the submissions below have in common: who waits for them is the parent, and is answered by a message."""

    __slots__ = ()

    number: int
    future: asyncio.Future[Any]
    _answer: Answers
    release_operands: Callable[[], None]

    def succeed(self) -> None:
        """Tell the parent."""
        if not self.future.done():
            self.future.cancel()
            self._answer.done(self.number)
        self.release_operands()

    def reject(self, error: AccelError) -> None:
        """Tell the parent."""
        if not self.future.done():
            self.future.cancel()
            self._answer.failed(self.number, error, -1 if error.op_index is None else error.op_index)
        self.release_operands()


class _Op(_Answered, OpSubmission):
    """An op of the parent's: who waits for it is there."""

    __slots__ = ("_answer", "number")

    def __init__(self, answer: Answers, number: int, op: KernelOp, generation: int) -> None:
        super().__init__(op, op.plan(), asyncio.get_running_loop().create_future(), generation)
        self._answer = answer
        self.number = number


class _Batch(_Answered, BatchSubmission):
    """A batch of the parent's."""

    __slots__ = ("_answer", "number")

    def __init__(self, answer: Answers, number: int, ops: tuple[KernelOp, ...], made: list[tuple[AccelRef, ...]], generation: int) -> None:
        super().__init__(ops, tuple(op.plan() for op in ops), made, asyncio.get_running_loop().create_future(), generation)
        self._answer = answer
        self.number = number


class _Graph(_Answered, GraphSubmission):
    """A capture of the parent's."""

    __slots__ = ("_answer", "number")

    def __init__(self, answer: Answers, number: int, program: Program, generation: int) -> None:
        super().__init__(program, asyncio.get_running_loop().create_future(), generation)
        self._answer = answer
        self.number = number


class Answers:
    """What goes back: ends are gathered over a turn of the loop."""

    def __init__(self, channel: Channel, memory: Callable[[], tuple[int, int]], is_over: Callable[[], bool]) -> None:
        self._channel = channel
        self._memory = memory
        self._is_over = is_over
        self._ended: list[int] = []
        self._told = (0, 0)

    def done(self, number: int) -> None:
        """Tell of a success, at the end of this turn."""
        if not self._ended:
            asyncio.get_running_loop().call_soon(self.flush)
        self._ended.append(number)

    def failed(self, number: int, error: AccelError, index: int) -> None:
        """Tell of a failure, after the successes before it. After a fault the parent tells everybody itself: it knows what comes next."""
        self.flush()
        if self._is_over():
            return
        self._channel.send(Kind.FAILED, Failure.pack(number, index), encode_error(error))

    def flush(self) -> None:
        """Tell what there is to tell."""
        memory = self._memory()
        if memory != self._told:
            self._told = memory
            self._channel.send(Kind.MEMORY, struct.pack("<QQ", *memory))
        if self._ended:
            ended, self._ended = self._ended, []
            self._channel.send(Kind.DONE, struct.pack(f"<{len(ended)}Q", *ended))


class _Server:
    """One context and the messages for it, in order."""

    def __init__(self, channel: Channel, config: Config) -> None:
        self._channel = channel
        self._config = config
        self._refs: dict[int, AccelRef] = {}
        self._unseen: set[int] = set()
        self._blocks: dict[int, tuple[mmap.mmap, int]] = {}
        self._programs: dict[int, Program] = {}
        self._script = _Script()
        self._release = threading.Event()
        self.context: Context
        self._core: DeviceCore
        self._answers = Answers(channel, self._memory, lambda: self.context.fault is not None)

    async def open(self, system: System) -> None:
        """Make the context and say what it offers."""
        config = self._config
        module, _, name = config.backend.partition(":")
        backend = getattr(importlib.import_module(module), name)()
        devices = await system.run_blocking(backend.devices)
        description = next((each for each in devices if each.uuid == config.uuid), None)
        if description is None:
            raise BackendUnavailableError(f"there is no device {config.uuid} any more", device=config.name)
        options = dataclasses.replace(config.options, faults=self._script)
        self._core = core = DeviceCore(system, backend, description, options, {})
        core.name = config.name
        # The parent numbers buffers; what is made here besides has numbers of its own.
        core.next_buffer = itertools.count(-1, -1).__next__
        core.lifecycle.generation = config.generation - 1
        core.keeper = Announcer(self._channel, config.generation)
        core.own.update((name, partial(_made, data)) for name, data in config.own.items())
        # Never restarted here: after a fault the parent makes another child.
        once = RestartStrategy(max_restarts=0, decide=lambda _: Directive.STOP)
        await system.spawn(ContextActor, core, self._published, name="context", restart=once)
        capabilities = {name: sorted(each.value for each in dtypes) for name, dtypes in core.capabilities.items()}
        offer = {"capabilities": capabilities, "durable": self.context.durables.is_offered}
        self.context.on_fault = self._fault
        self._channel.send(Kind.READY, json.dumps(offer).encode())

    def _published(self, context: Context | None) -> None:
        if context is not None:
            self.context = context

    def _memory(self) -> tuple[int, int]:
        _, reserved, workspace = self.context.memory()
        return reserved, workspace

    def _fault(self, error: AccelError) -> None:
        """Tell the parent, and end: a process that has lost its context has nothing more to give."""
        self._channel.send(Kind.FAULT, encode_error(error))
        self._channel.flush()
        os._exit(_FAULTED)

    async def handle(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Do what one message asks for."""
        if kind == Kind.OP:
            await self._op(data)
        elif kind == Kind.BATCH:
            await self._batch(data)
        elif kind == Kind.FREE:
            for (buffer,) in struct.iter_unpack("<Q", data):
                self._programs.pop(buffer, None)
                self._unseen.discard(buffer)
                ref = self._refs.pop(buffer, None)
                if ref is not None:
                    ref.is_freed = True
                self.context.buffers.free(buffer)  # also one that was bound, and not used since
            self._answers.flush()
        elif kind == Kind.GRAPH:
            await self._graph(data)
        elif kind == Kind.BLOCK:
            number, nbytes = struct.unpack("<QQ", data)
            await self._block(number, nbytes, fds[0])
        elif kind == Kind.HELD:
            await self._held(data, fds[0])
        elif kind == Kind.REGISTER:
            await self._register(data)
        elif kind == Kind.RELEASE:
            self._release.set()

    async def _op(self, data: bytes) -> None:
        number, _, (ids,), actions, (wired,) = unpack(data, self._ref)
        self._script.begin(self._action(action) for action in actions)
        op = self._unwired(wired)
        submission = _Op(self._answers, number, op, self.context.generation)
        submission.made = tuple(self._new(buffer, spec) for buffer, spec in zip(ids, submission.plan.creates, strict=True))  # type: ignore[union-attr]
        await self._dispatch(submission)

    async def _batch(self, data: bytes) -> None:
        number, _, ids, actions, wired = unpack(data, self._ref)
        ops = tuple(self._unwired(op) for op in wired)
        plans = [op.plan() for op in ops]
        made = [
            tuple(self._new(buffer, spec) for buffer, spec in zip(mine, plan.creates, strict=True))
            for mine, plan in zip(ids, plans, strict=True)
        ]
        self._script.begin(self._action(action) for action in actions)
        await self._dispatch(_Batch(self._answers, number, ops, made, self.context.generation))

    async def _graph(self, data: bytes) -> None:
        number, handle, ids, _, ops = unpack(data, self._ref)
        plans = [op.plan() for op in ops]
        made = [
            tuple(self._new(buffer, spec) for buffer, spec in zip(mine, plan.creates, strict=True))
            for mine, plan in zip(ids, plans, strict=True)
        ]
        program = self._programs[handle] = Program(self._core, ops, plans, made, self.context.generation)
        await self._dispatch(_Graph(self._answers, number, program, self.context.generation))

    def _new(self, buffer: int, spec: Any) -> AccelRef:
        ref = self._ref(buffer, spec.shape, spec.dtype)
        ref.durable = spec.durable
        return ref

    async def _dispatch(self, submission: Any) -> None:
        try:
            if not (type(submission) is _Op and self.context.dispatch_now(submission)):  # a graph has to be given memory first
                await self.context.dispatch(submission)
        except AccelError as error:
            submission.reject_from(error.op_index or 0, error.clone())
        except Exception as error:
            wrapped = LibraryError(f"sending {submission.name} failed: {error!r}", op=submission.name)
            wrapped.__cause__ = error
            submission.reject(wrapped)

    def _unwired(self, op: KernelOp) -> KernelOp:
        if isinstance(op, WirePut):
            return Put(self._array(op.source), op.out, op.durable)
        if isinstance(op, WireGet):
            return Get(op.source, self._array(op.destination))
        if isinstance(op, WireReplay):
            return Replay(self._programs[op.program])
        return op

    def _array(self, place: ArenaSlice) -> np.ndarray[Any, Any]:
        if not place.block:
            return np.empty(place.shape, place.dtype.numpy)
        mapping, _ = self._blocks[place.block]
        count = int(np.prod(place.shape, dtype=np.int64)) * place.dtype.itemsize
        flat = np.frombuffer(mapping, np.uint8, count, place.offset)
        return flat.view(place.dtype.numpy).reshape(place.shape)

    async def _register(self, data: bytes) -> None:
        (number,) = struct.unpack_from("<Q", data)
        name, made = pickle.loads(data[8:])
        self._core.own[name] = partial(_made, made)
        try:
            await self.context.port(name)
        except AccelError as error:
            del self._core.own[name]
            self._answers.failed(number, error, -1)
        else:
            self._answers.done(number)

    async def _held(self, data: bytes, fd: int) -> None:
        number, kept = kept_in(data, fd)
        try:
            await self.context.durables.bind(self.context.buffers, (kept,))
        except AccelError as error:
            self._answers.failed(number, error, -1)
        else:
            self._answers.done(number)
        finally:
            os.close(fd)

    async def _block(self, number: int, nbytes: int, fd: int) -> None:
        try:
            mapping = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        address = addressof(c_char.from_buffer(mapping))
        self._blocks[number] = mapping, address
        device = self.context.device
        if isinstance(device, HostRegistrar):
            await self._core.system.run_blocking(device.register_host, address, nbytes)

    def _action(self, action: bytes | str | None) -> Injection | AccelError | None:
        if action is None:
            return None
        if action == "hang":
            self._release.clear()
            return Injection("hang", release=lambda: cast("None", self._release.wait()))
        if action == "poison":
            return Injection("poison")
        assert isinstance(action, bytes), "an error, or what is to happen"
        error = decode_error(action)
        return Injection("poison", error) if error.is_fault else error

    def _ref(self, buffer: int, shape: tuple[int, ...], dtype: DType, generation: int = 0, offset: int | None = None) -> AccelRef:
        """Return the ref for a buffer; one that is not known yet is of the batch that is just read, or it is refused when it is used."""
        ref = self._refs.get(buffer)
        if ref is None:
            ref = self._refs[buffer] = AccelRef(self._core, buffer, shape, dtype, self.context.generation)
            if offset is not None:  # a view of one that was bound: what the whole of it is, is said where that is used
                self._unseen.add(buffer)
        elif self._unseen and offset is None and buffer in self._unseen:
            self._unseen.discard(buffer)
            ref.shape, ref.dtype, ref.nbytes = shape, dtype, Spec(shape, dtype).nbytes
        return ref if offset is None else RefView(ref, offset, shape, dtype)


def _made(data: bytes) -> Any:
    """Make an instance of a registered library: the class is imported here."""
    return pickle.loads(data)()


async def serve(sock: socket.socket) -> None:
    """Run a context for the process at the other end of ``sock``, until that closes it."""
    inbox: asyncio.Queue[tuple[int, bytes, list[int]] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def received(kind: int, data: bytes, fds: list[int]) -> None:
        if kind == Kind.PING:  # at once: it asks whether the loop turns, not how much there is to do
            channel.send(Kind.PONG)
        else:
            inbox.put_nowait((kind, data, fds.copy()))
            fds.clear()  # they are ours now

    channel = Channel(sock, loop, on_message=received, on_lost=lambda _: inbox.put_nowait(None))
    first = await inbox.get()
    if first is None:
        return
    server = _Server(channel, pickle.loads(first[1]))
    async with System("host") as system:
        try:
            await server.open(system)
        except AccelError as error:
            channel.send(Kind.REFUSED, encode_error(error))
            channel.flush()
            return
        while (message := await inbox.get()) is not None and message[0] != Kind.CLOSE:
            await server.handle(*message)
    channel.close()
