"""The child's half: a context as inline, which gets its ops from messages of the parent."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib
import itertools
import json
import os
import pickle
import struct
import threading
import time
import traceback
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

from accel.actors import Directive, RestartStrategy
from accel.actors.turns import EVERY, Turn
from accel.backend import Injection, PreloadsLibraries
from accel.engine.context_actor import ContextActor
from accel.engine.core import DeviceCore
from accel.engine.kernels import LIBRARIES
from accel.engine.op_error import op_error
from accel.engine.program import Program
from accel.errors import AccelError, BackendUnavailableError, ClosedError, FaultScope, HostDiedError
from accel.fork import DeviceFiles, close_after_fork
from accel.ops import KernelOp, Plan
from accel.ops.user_plans import with_dtypes
from accel.ref import AccelRef
from accel.remote.answers import Answers, RemoteBatch, RemoteGraph, RemoteOp, RemoteUnregistration, reject
from accel.remote.blocks import MappedBlocks
from accel.remote.busy import AnnouncedCalls, Busy
from accel.remote.compiling import packed_layout
from accel.remote.durable import Announcer, kept_in
from accel.remote.error_codec import decode_error, encode_error
from accel.remote.injected_faults import InjectedFaults
from accel.remote.messages import Kind, unpack
from accel.remote.op_codec import OpReader
from accel.sharing.sharing import Sharing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.actors import ActorSystem
    from accel.dtype import DType
    from accel.engine.context import Context
    from accel.process.channel import Channel
    from accel.remote.messages import Begin, Config, WireOp

__all__ = ["Server"]


_FAULTED = 3
"""The exit code after a fault, which was reported before."""


_REPORT = "This is an error in accel or in the backend: report it, with what the child has written to its standard error."


@dataclass(slots=True)
class _Taken:
    """The ops of a message, up to the first that cannot be made in this process.

    Attributes
    ----------
    ops, plans, made
        The ops, their plans, and refs of their results.
    refused
        The error of the op behind them, with its ``op_index``.
    """

    ops: list[KernelOp]
    plans: list[Plan]
    made: list[tuple[AccelRef, ...]]
    refused: AccelError | None = None


class Server:
    """One context and the messages for it, in order."""

    def __init__(self, channel: Channel, config: Config, system: ActorSystem) -> None:
        self._channel = channel
        self._config = config
        self._system = system
        self._refs: dict[int, AccelRef] = {}
        self._programs: dict[int, Program] = {}
        self._compiling: set[asyncio.Task[None]] = set()
        self._script = InjectedFaults()
        self._announcer = Announcer(channel)
        self._release = threading.Event()
        self._has_begun = False
        self._busy = Busy(channel)
        self._blocks = MappedBlocks(system, self._busy)
        self._reader = OpReader(self._ref, self._blocks.array, self._programs)
        self.context: Context
        self._core: DeviceCore
        self._answers = Answers(
            channel, self._memory, lambda: self.context.fault is not None, lambda: not self.context.in_flight, self.on_broken
        )
        close_after_fork(self)

    def close_inherited(self) -> None:
        """Unmap the parent's blocks in a fork; see :class:`accel.fork.Inherited`."""
        self._blocks.close_inherited()

    async def prepare(self) -> None:
        """Make ready what is possible before a generation begins, and report that."""
        config, system = self._config, self._system
        module, _, name = config.backend.partition(":")
        backend = (await system.run_blocking(partial(getattr, importlib.import_module(module), name)))()
        self._files = DeviceFiles(getattr(backend, "device_files", ()))
        devices = await system.run_blocking(backend.devices)
        description = next((device for device in devices if device.uuid == config.uuid), None)
        if description is None:
            raise BackendUnavailableError(f"there is no device {config.uuid} any more", device=config.name)
        options = dataclasses.replace(config.options, faults=self._script)
        # The parent numbers buffers; those that only this process makes have negative numbers.
        numbers = itertools.count(-1, -1)
        self._core = DeviceCore(system, backend, description, options, {}, name=config.name, numbers=numbers, keeper=self._announcer)
        if isinstance(backend, PreloadsLibraries):
            await system.run_blocking(backend.preload, options.libraries)
        gc.freeze()  # modules live as long as the process: its last collections take 70 ms less
        if config.ahead == "context":
            await self._open()
        self._channel.send(Kind.WARM)

    async def _begin(self, begin: Begin) -> None:
        """Begin the generation, and report what its context offers."""
        core, self._has_begun = self._core, True
        core.memory_back.until = time.monotonic() + begin.patience
        self._announcer.begin(begin.generation, begin.most_slabs)
        core.own.update((name, pickle.loads(data)) for name, data in begin.own.items())
        if core.lifecycle.generation:
            self._answers.begin()
        else:
            await self._open()
        capabilities = {name: sorted(dtype.value for dtype in dtypes) for name, dtypes in core.capabilities.items()}
        offer = {"capabilities": capabilities, "durable": self.context.durables.is_offered, "graphs": core.has_graphs}
        self._channel.send(Kind.READY, json.dumps(offer).encode())

    async def _open(self) -> None:
        """Make the context. Its generation is 1: only the parent counts them."""
        # After a fault the parent starts another child.
        once = RestartStrategy(max_restarts=0, decide=lambda _: Directive.STOP)
        await self._system.spawn(ContextActor, self._core, self, Sharing, name="context", restart=once)
        self.context.opening = self._busy
        self.context.offloaded = AnnouncedCalls(self._core.loop, self._busy, self.context.own)

    def on_published(self, context: Context | None) -> None:
        """See :class:`accel.engine.in_flight.ContextOwner`."""
        if context is not None:
            self.context = context

    def on_fault(self, error: AccelError) -> NoReturn:
        """Report the fault to the parent, and end the process."""
        with contextlib.suppress(ClosedError):  # the parent has ended
            self._channel.send(Kind.FAULT, encode_error(error), now=True)
        os._exit(_FAULTED)

    def _memory(self) -> tuple[int, int]:
        _, reserved, workspace = self.context.memory()
        return reserved, workspace

    def on_broken(self, error: BaseException) -> None:
        """End the generation after an error of accel itself, by which an answer may be lost."""
        name = self._config.name
        traceback.print_exception(error)  # the parent shows a dead child's last lines
        self.on_fault(HostDiedError(f"the child of {name} failed: {error!r}", device=name, scope=FaultScope.CONTEXT, remedy=_REPORT))

    async def handle(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Handle one message."""
        rest = self.take_now(kind, data)
        if isinstance(rest, (RemoteOp, RemoteBatch)):
            await self.dispatch(rest)
        elif rest:
            return
        elif kind == Kind.BEGIN:
            await self._begin(pickle.loads(data))
        elif kind == Kind.GRAPH:
            await self._graph(data)
        elif kind == Kind.BLOCK:
            await self._blocks.add(data, fds[0], self.context.device)
        elif kind == Kind.BLOCK_GONE:
            await self._blocks.drop(data)
        elif kind == Kind.HELD:
            await self._held(data, fds[0])
        elif kind == Kind.REGISTER:
            await self._register(data)
        elif kind == Kind.UNREGISTER:
            ended = RemoteUnregistration(data[8:].decode(), self._core.loop.create_future(), self.context.generation)
            await self.dispatch(ended.answered_by(self._answers, _number(data)))
        elif kind == Kind.HELD_GONE:
            for (number,) in struct.iter_unpack("<Q", data):
                await self.context.durables.unmap(number)

    def take_now(self, kind: int, data: bytes) -> bool | RemoteOp | RemoteBatch:
        """Handle a message at once if it need not wait.

        Else return the ops that have to wait, or ``False``, with nothing done.
        """
        if kind == Kind.BATCH:
            submission = self._submission(data)
            if submission is not None:
                try:
                    return self._send_now(submission) or submission
                except BaseException as error:
                    reject(submission, error, self._core.loop)
        elif kind == Kind.FREE:
            self._free([buffer for (buffer,) in struct.iter_unpack("<Q", data)])
        elif kind == Kind.NAMED:
            self._learn(data)
        elif kind == Kind.COMPILE:
            self._compile(data)
        elif kind == Kind.RELEASE:
            self._release.set()
        else:
            return False
        return True

    def _send_now(self, submission: RemoteOp | RemoteBatch) -> bool:
        """Dispatch ops if they need not wait."""
        context = self.context
        return context.dispatch_now(submission) if isinstance(submission, RemoteOp) else context.batch_now(submission)

    def _submission(self, data: bytes) -> RemoteOp | RemoteBatch | None:
        """Return the submission of a message; refuse it if the first op cannot be made here."""
        number, _, ids, actions, wires, freed, is_timed = unpack(data)
        if freed:
            self._free(freed)
        taken, generation = self._take(ids, wires), self.context.generation
        if taken.refused is not None and not taken.ops:
            self._refuse(number, taken.refused if len(wires) > 1 else taken.refused.clone(op_index=None))
            return None
        if actions:
            self._script.begin(self._action(action) for action in actions[: len(taken.ops)])
        future = self._core.loop.create_future()
        submission: RemoteOp | RemoteBatch
        if len(wires) == 1:
            submission = RemoteOp(taken.ops[0], taken.plans[0], future, generation)
            submission.made = taken.made[0]
        else:
            submission = RemoteBatch(tuple(taken.ops), tuple(taken.plans), taken.made, future, generation)
            submission.refused = taken.refused
        if is_timed or self._core.probes.all:
            submission.observe(None, is_timed=is_timed)
        return submission.answered_by(self._answers, number)

    def _take(self, ids: list[list[int]], wires: Sequence[WireOp]) -> _Taken:
        """Return the ops of a message, with refs of their results under the parent's numbers."""
        taken = _Taken([], [], [])
        for index, (wire, mine) in enumerate(zip(wires, ids, strict=True)):
            try:
                op = self._reader.read(wire)
                plan = op.plan() if op.library in LIBRARIES else with_dtypes(op.plan())
                made = tuple(self._new(buffer, spec) for buffer, spec in zip(mine, plan.creates, strict=True))
            except BaseException as raised:  # a class of a user's raises anything
                taken.refused = op_error(raised, "taking an op", self._core.loop).clone(op_index=index)
                break
            taken.ops.append(op)
            taken.plans.append(plan)
            taken.made.append(made)
        return taken

    def _refuse(self, number: int, raised: BaseException) -> None:
        """Fail a request that cannot be made a submission here."""
        error = op_error(raised, "taking an op", self._core.loop)
        self._answers.failed(number, error, -1 if error.op_index is None else error.op_index)

    async def _graph(self, data: bytes) -> None:
        number, handle, ids, _, wires, _, _ = unpack(data)
        taken, turn = _Taken([], [], []), Turn()
        for start in range(0, len(wires), EVERY):
            if turn.is_over:
                await turn.next()
            some = self._take(ids[start : start + EVERY], wires[start : start + EVERY])
            if some.refused is not None:
                self._refuse(number, some.refused.clone(op_index=start + (some.refused.op_index or 0)))
                return
            taken.ops += some.ops
            taken.plans += some.plans
            taken.made += some.made
        program = await Program.of(self._core, taken.ops, taken.plans, taken.made, self.context.generation)
        self._programs[handle] = program
        graph = RemoteGraph(program, self._core.loop.create_future(), self.context.generation)
        await self.dispatch(graph.answered_by(self._answers, number))

    def _learn(self, data: bytes) -> None:
        """Handle a NAMED message. Loading its object may import a module."""
        (number,) = struct.unpack_from("<Q", data)
        named: object = None
        # An import raises anything. Ops that name the object are refused then.
        with self._busy, contextlib.suppress(BaseException):
            named = pickle.loads(data[8:])
        self._reader.learn(number, named)

    def _new(self, buffer: int, spec: Any) -> AccelRef:
        ref = self._ref(buffer, spec.shape, spec.dtype)
        ref.durable = spec.durable
        return ref

    def _free(self, buffers: Sequence[int]) -> None:
        for buffer in buffers:
            self._programs.pop(buffer, None)
            ref = self._refs.pop(buffer, None)
            if ref is not None:
                ref.is_freed = True
        self._core.refs.dropped.extend(buffers)  # also those that were bound, and not used since
        self.context.buffers.apply_frees()
        self._answers.flush()

    async def dispatch(self, submission: Any) -> None:
        """Dispatch a submission, or fail it."""
        try:
            if not (isinstance(submission, RemoteOp) and self.context.dispatch_now(submission)):
                await self.context.dispatch(submission)
        except (asyncio.CancelledError, GeneratorExit):  # the child ends
            raise
        except BaseException as error:
            reject(submission, error, self._core.loop)

    async def _register(self, data: bytes) -> None:
        """Open a library, and answer. One of the begin of the generation stays registered."""
        number, registration = _number(data), pickle.loads(data[8:])
        name = registration.name
        is_new = name not in self._core.own
        self._core.own[name] = registration
        try:
            await self.context.libraries.open(name)
        except Exception as error:
            if is_new:
                self._core.own.pop(name, None)
            self._refuse(number, error)
        else:
            self._answers.done(number)

    async def _held(self, data: bytes, fd: int) -> None:
        number, kept, durables = _number(data), kept_in(data[8:], fd), self.context.durables
        try:
            await durables.map_ahead(kept)
            if self._has_begun:
                durables.bind(self.context.buffers, kept)
        except Exception as error:
            self._refuse(number, error)
        else:
            self._answers.done(number)
        finally:
            os.close(fd)

    def _compile(self, data: bytes) -> None:
        """Compile in a task, because a compilation takes no place in the order of ops."""
        task = asyncio.ensure_future(self._compiled(data))
        self._compiling.add(task)
        task.add_done_callback(self._compiling.discard)

    async def _compiled(self, data: bytes) -> None:
        (number,) = struct.unpack_from("<Q", data)
        try:
            with self._busy:
                layout = await self._system.run_blocking(packed_layout, self.context.device, self._core.name, data[8:])
        except AccelError as error:
            if error.is_fault:
                self.context.report_fault(error)
            self._answers.failed(number, error, -1)
        except Exception as error:  # a bug of the compiler does not end the child
            self._answers.failed(number, op_error(error, "compiling", self._core.loop, op="compile"), -1)
        else:
            self._channel.send(Kind.COMPILED, data[:8], layout)

    def _action(self, action: bytes | str | None) -> Injection | AccelError | None:
        if action is None or action == "poison":
            return None if action is None else Injection("poison")
        if action == "hang":
            self._release.clear()
            return Injection("hang", release=lambda: cast("None", self._release.wait()))
        error = decode_error(cast("bytes", action))
        return Injection("poison", error) if error.is_fault else error

    def _ref(self, buffer: int, shape: tuple[int, ...], dtype: DType) -> AccelRef:
        """Return the ref of a buffer, a new one if it is made by the message that is being read."""
        ref = self._refs.get(buffer)
        if ref is None:
            ref = self._refs[buffer] = AccelRef(self._core.refs, buffer, shape, dtype, self.context.generation)
        return ref


def _number(data: bytes) -> int:
    """Return the number at the begin of a message, which its answer has."""
    (number,) = struct.unpack_from("<Q", data)
    return int(number)
