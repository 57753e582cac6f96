"""The child's half of a context: it runs as an inline one, on ops from the parent's messages."""

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
from accel.actors.turns import CHECK_EVERY, Turn
from accel.backend import Injection, PreloadsLibraries
from accel.engine.context_actor import ContextActor
from accel.engine.core import DeviceCore
from accel.engine.kernels import LIBRARIES
from accel.engine.op_error import op_error
from accel.engine.program import Program
from accel.errors import AccelError, BackendUnavailableError, ClosedError, FaultScope, HostDiedError
from accel.fork import DeviceFiles, close_after_fork
from accel.ops import KernelOp, Plan
from accel.ops.memory import Lend
from accel.ops.user_plans import with_dtypes
from accel.ref import AccelRef
from accel.remote.answers import Answers, RemoteBatch, RemoteGraph, RemoteLoan, RemoteOp, RemoteUnregistration, reject
from accel.remote.blocks import MappedBlocks
from accel.remote.busy import Busy, BusyCalls
from accel.remote.durable import DurableReporter, decode_slab
from accel.remote.error_codec import decode_error, encode_error
from accel.remote.injected_faults import InjectedFaults
from accel.remote.messages import Attach, Kind, packed_layout, unpack
from accel.remote.op_codec import OpReader
from accel.sharing.sharing import Sharing

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from accel.actors import ActorSystem
    from accel.dtype import DType
    from accel.engine.context import Context
    from accel.engine.registration import Registration
    from accel.process.channel import Channel
    from accel.remote.messages import Begin, Config, WireOp

__all__ = ["Server"]

_FAULT_EXIT_CODE = 3
"""The exit code after a fault, which was reported before."""

_REPORT = "This is an error in accel or in the backend: report it, with the child's standard error."


@dataclass(slots=True)
class _DecodedOps:
    """The ops of a message, up to the first that cannot be decoded in this process.

    Attributes
    ----------
    ops, plans, result_refs
        The ops, their plans, and refs of their results.
    refused
        The error of the op after them, with its ``op_index``; ``None`` if all were decoded.
    """

    ops: list[KernelOp]
    plans: list[Plan]
    result_refs: list[tuple[AccelRef, ...]]
    refused: AccelError | None = None


class Server:
    """Owns the context of a child, and handles the messages for it, in order.

    :mod:`accel.remote.service` calls :meth:`handle_now` for each message, and :meth:`handle` for
    those that have to wait. After a fault the process ends: see :meth:`on_fault`.

    Parameters
    ----------
    channel
        The connection to the parent.
    config
        The first message.
    system
        Has the context's actor and the worker threads.
    """

    def __init__(self, channel: Channel, config: Config, system: ActorSystem) -> None:
        self._channel = channel
        self._config = config
        self._system = system
        self._refs: dict[int, AccelRef] = {}  # of live buffers, by the parent's numbers
        self._programs: dict[int, Program] = {}  # graphs, by the buffers that stand for them
        self._answering: set[asyncio.Task[None]] = set()  # keeps the tasks alive
        self._injected_faults = InjectedFaults()
        self._durable_reporter = DurableReporter(channel)
        self._ended_hangs = threading.Semaphore(0)  # one for each injected hang that is to end
        self._has_begun = False  # whether BEGIN has come
        self._busy = Busy(channel)
        self._blocks = MappedBlocks(system, self._busy)
        self._op_reader = OpReader(self._ref, self._blocks.array, self._programs)
        self.context: Context
        self._core: DeviceCore
        self._answers = Answers(
            channel, self._memory_in_use, lambda: self.context.fault is not None, lambda: not self.context.in_flight, self.on_broken
        )
        close_after_fork(self)

    def close_inherited(self) -> None:
        """Unmap the parent's blocks in a fork; see :class:`accel.fork.Inherited`."""
        self._blocks.close_inherited()

    async def prepare(self) -> None:
        """Prepare for a generation, as far as the config asks for it, and then send WARM.

        Finds the device, makes the core, imports libraries; with ``readiness="context"``, makes the
        context too.

        Raises
        ------
        BackendUnavailableError
            The device is not there any more.
        """
        config, system = self._config, self._system
        # Find the device, whose index may be another one in this process.
        module, _, name = config.backend.partition(":")
        backend = (await system.run_blocking(partial(getattr, importlib.import_module(module), name)))()
        self._files = DeviceFiles(getattr(backend, "device_files", ()))  # kept: forks close them
        devices = await system.run_blocking(backend.devices)
        description = next((device for device in devices if device.uuid == config.uuid), None)
        if description is None:
            raise BackendUnavailableError(f"there is no device {config.uuid} any more", device=config.name)
        options = dataclasses.replace(config.options, faults=self._injected_faults)
        # The parent numbers buffers; those that only this process makes have negative numbers.
        numbers = itertools.count(-1, -1)
        self._core = DeviceCore(system, backend, description, options, {}, name=config.name, numbers=numbers, keeper=self._durable_reporter)
        if isinstance(backend, PreloadsLibraries):
            await system.run_blocking(backend.preload, options.libraries)
        gc.freeze()  # modules live as long as the process: its last collections take 70 ms less
        if config.readiness == "context":
            await self._open()
        self._channel.send(Kind.WARM)

    async def _begin(self, begin: Begin) -> None:
        """Handle a BEGIN message: make the context, unless it is there, and report READY."""
        core, self._has_begun = self._core, True
        core.oom_retry.deadline = time.monotonic() + begin.oom_patience
        self._durable_reporter.begin_generation(begin.generation, begin.most_slabs)
        core.registrations.update((name, pickle.loads(data)) for name, data in begin.libraries.items())
        if core.lifecycle.generation:  # the context was made ahead, in a spare
            self._answers.begin_generation()
        else:
            await self._open()
        capabilities = {name: sorted(dtype.value for dtype in dtypes) for name, dtypes in core.capabilities.items()}
        offer = {"capabilities": capabilities, "durable": self.context.durables.is_offered, "graphs": core.has_graphs}
        self._channel.send(Kind.READY, json.dumps(offer).encode())

    async def _open(self) -> None:
        """Make the context. Its generation is 1 here: only the parent counts generations."""
        # It is never restarted: after a fault the parent replaces this process.
        restart = RestartStrategy(max_restarts=0, decide=lambda _: Directive.STOP)
        # The actor calls on_published, which sets self.context, before it counts as started.
        await self._system.spawn(ContextActor, self._core, self, Sharing, name="context", restart=restart)
        self.context.opening = self._busy
        self.context.offloaded = BusyCalls(self._core.loop, self._busy, self.context.registered)

    def on_published(self, context: Context | None) -> None:
        """Keep the context, once it is made; called by the context's actor."""
        if context is not None:
            self.context = context

    def on_fault(self, error: AccelError) -> NoReturn:
        """Report the fault to the parent, and end the process: another child follows."""
        with contextlib.suppress(ClosedError):  # the parent has ended
            self._channel.send(Kind.FAULT, encode_error(error), now=True)
        os._exit(_FAULT_EXIT_CODE)

    def _memory_in_use(self) -> tuple[int, int]:
        """Return the bytes that are reserved on the device, and those that libraries hold."""
        _, reserved, workspace = self.context.memory()
        return reserved, workspace

    def on_broken(self, error: BaseException) -> NoReturn:
        """End the process because of an error of accel itself.

        An answer may be lost, and the parent would wait for it for ever. Called by
        :class:`Answers`, and by the loop's exception handler.
        """
        name, shown = self._config.name, type(error).__name__
        with contextlib.suppress(Exception):  # of the error's own repr, or of a stderr that is gone
            shown = repr(error)
            traceback.print_exception(error)  # the parent shows a dead child's last lines
        self.on_fault(HostDiedError(f"the child of {name} failed: {shown}", device=name, scope=FaultScope.CONTEXT, remedy=_REPORT))

    async def handle(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Handle one message, and wait until it is handled: messages after it wait meanwhile.

        Its descriptors, ``fds``, are this method's to close.
        """
        outcome = self.handle_now(kind, data)
        if isinstance(outcome, (RemoteOp, RemoteBatch)):
            await self.dispatch(outcome)
        elif outcome:
            return
        elif kind == Kind.BEGIN:
            await self._begin(pickle.loads(data))
        elif kind == Kind.GRAPH:
            await self._capture_graph(data)
        elif kind == Kind.BLOCK:
            await self._blocks.add(data, fds[0], self.context.device)
        elif kind == Kind.UNMAP_BLOCK:
            await self._blocks.unmap(data)
        elif kind == Kind.MAP_SLAB:
            await self._map_slab(data, fds[0])
        elif kind == Kind.ATTACH:
            await self._attach(data, fds)
        elif kind == Kind.REGISTER:
            await self._open_library(data)
        elif kind == Kind.UNREGISTER:
            unregistration = RemoteUnregistration(data[8:].decode(), self._core.loop.create_future(), self.context.generation)
            await self.dispatch(unregistration.report_to(self._answers, _number_of(data)))
        elif kind == Kind.UNMAP_SLABS:
            for (number,) in struct.iter_unpack("<Q", data):
                await self.context.durables.unmap(number)

    def handle_now(self, kind: int, data: bytes) -> bool | RemoteOp | RemoteBatch:
        """Handle a message at once if it need not wait, and return ``True``.

        Else return its decoded ops, for :meth:`dispatch`; or ``False`` if nothing was done. Ops
        that cannot be decoded, or whose dispatch raises, are reported as failed here.
        """
        if kind == Kind.BATCH:
            submission = self._take_batch(data)
            if submission is not None:
                context = self.context
                try:
                    if isinstance(submission, RemoteOp):
                        return context.dispatch_now(submission) or submission
                    return context.dispatch_batch_now(submission) or submission
                except BaseException as error:
                    reject(submission, error, self._core.loop)
        elif kind == Kind.FREE:
            self._free([buffer for (buffer,) in struct.iter_unpack("<Q", data)])
        elif kind == Kind.DEFINE:
            self._define(data)
        elif kind == Kind.COMPILE:
            self._answer_in_task(self._run_compile(data))
        elif kind == Kind.WORLD:
            self.serve_world(data)
        elif kind == Kind.END_HANGS:
            self._ended_hangs.release()
        else:
            return False
        return True

    def _take_batch(self, data: bytes) -> RemoteOp | RemoteBatch | None:
        """Decode a BATCH message, of one op or more, to a submission.

        The submission reports its own end to the parent. Also frees the buffers that the message
        drops, and sets the faults to be injected into its ops. If the first op cannot be decoded,
        report that to the parent, and return ``None``. If a later one cannot, the ops before it
        run, and the submission carries the error in ``refused``.
        """
        number, _handle, result_ids, fault_actions, wire_ops, freed, is_timed = unpack(data)  # the handle is a graph's
        if freed:
            self._free(freed)
        decoded, generation = self._decode_ops(result_ids, wire_ops), self.context.generation
        if decoded.refused is not None and not decoded.ops:
            # The error of an op by itself has no index.
            self._refuse(number, decoded.refused if len(wire_ops) > 1 else decoded.refused.clone(op_index=None))
            return None
        if fault_actions:
            self._injected_faults.set_actions(self._decode_action(action) for action in fault_actions[: len(decoded.ops)])
        future = self._core.loop.create_future()
        submission: RemoteOp | RemoteBatch
        if len(wire_ops) == 1:
            submission_class = RemoteLoan if type(decoded.ops[0]) is Lend else RemoteOp
            submission = submission_class(decoded.ops[0], decoded.plans[0], future, generation)
            submission.result_refs = decoded.result_refs[0]
        else:
            submission = RemoteBatch(tuple(decoded.ops), tuple(decoded.plans), decoded.result_refs, future, generation)
            submission.refused = decoded.refused
        if is_timed or self._core.probes.all:
            submission.observe(None, is_timed=is_timed)  # None: only the parent charges device time
        return submission.report_to(self._answers, number)

    def _decode_ops(self, result_ids: list[list[int]], wire_ops: Sequence[WireOp]) -> _DecodedOps:
        """Decode ops of a message, and make refs of their results, numbered by ``result_ids``.

        Stop at the first op that cannot be decoded; its error is in ``refused``.
        """
        decoded = _DecodedOps([], [], [])
        for index, (wire_op, buffers) in enumerate(zip(wire_ops, result_ids, strict=True)):
            try:
                op = self._op_reader.read(wire_op)
                # The plan of a user's op may name dtypes by strings.
                plan = op.plan() if op.library in LIBRARIES else with_dtypes(op.plan())
                result_refs = tuple(self._new_ref(buffer, spec) for buffer, spec in zip(buffers, plan.creates, strict=True))
            except BaseException as raised:  # a class of a user's raises anything
                decoded.refused = op_error(raised, "taking an op", self._core.loop).clone(op_index=index)
                break
            decoded.ops.append(op)
            decoded.plans.append(plan)
            decoded.result_refs.append(result_refs)
        return decoded

    def _refuse(self, number: int, raised: BaseException) -> None:
        """Report that a request failed before it became a submission."""
        error = op_error(raised, "taking an op", self._core.loop)
        self._answers.report_failure(number, error, -1 if error.op_index is None else error.op_index)

    async def _capture_graph(self, data: bytes) -> None:
        """Handle a GRAPH message: decode its ops in turns with other work, and capture them.

        If one cannot be decoded, report that, and capture nothing.
        """
        number, handle, result_ids, _, wire_ops, _, _ = unpack(data)
        decoded, turn = _DecodedOps([], [], []), Turn()
        for start in range(0, len(wire_ops), CHECK_EVERY):
            if turn.is_over:
                await turn.next()
            next_ops = self._decode_ops(result_ids[start : start + CHECK_EVERY], wire_ops[start : start + CHECK_EVERY])
            if next_ops.refused is not None:
                self._refuse(number, next_ops.refused.clone(op_index=start + (next_ops.refused.op_index or 0)))
                return
            decoded.ops += next_ops.ops
            decoded.plans += next_ops.plans
            decoded.result_refs += next_ops.result_refs
        program = await Program.of(self._core, decoded.ops, decoded.plans, decoded.result_refs, self.context.generation)
        self._programs[handle] = program
        graph = RemoteGraph(program, self._core.loop.create_future(), self.context.generation)
        await self.dispatch(graph.report_to(self._answers, number))

    def _define(self, data: bytes) -> None:
        """Handle a DEFINE message: load the object, which may import a module, and store it.

        The parent sends it before the first op that has the object among its fields.
        """
        named: object = None
        # An import raises anything. Ops that name the object are refused then.
        with self._busy, contextlib.suppress(BaseException):
            named = pickle.loads(data[8:])
        self._op_reader.define(_number_of(data), named)

    def _new_ref(self, buffer: int, spec: Any) -> AccelRef:
        """Return a ref for a result that an op makes, under the parent's number."""
        ref = self._ref(buffer, spec.shape, spec.dtype)
        ref.durable = spec.durable
        return ref

    def _free(self, buffers: Sequence[int]) -> None:
        """Free buffers and graphs that the parent has dropped.

        Then send the pending answers, and how much memory is in use now.
        """
        for buffer in buffers:
            self._programs.pop(buffer, None)
            ref = self._refs.pop(buffer, None)
            if ref is not None:
                ref.is_freed = True
        self._core.refs.dropped.extend(buffers)  # also bound ones, of which no ref was made
        self.context.buffers.apply_frees()
        self._answers.flush()

    async def dispatch(self, submission: Any) -> None:
        """Dispatch a submission, once it can be; if that raises, report it as its failure."""
        try:
            if not (isinstance(submission, RemoteOp) and self.context.dispatch_now(submission)):
                await self.context.dispatch(submission)
        except (asyncio.CancelledError, GeneratorExit):  # the child ends
            raise
        except BaseException as error:
            reject(submission, error, self._core.loop)

    async def _open_library(self, data: bytes) -> None:
        """Handle a REGISTER message: open the library, and answer.

        If that fails, a library that came with BEGIN stays registered: its first op tries again.
        """
        number = _number_of(data)
        registration: Registration = pickle.loads(data[8:])  # imports nothing of the user's: that is done by open()
        name = registration.name
        is_new = name not in self._core.registrations
        self._core.registrations[name] = registration
        with self._reporting(number):
            try:
                await self.context.libraries.open(name)
            except Exception:
                if is_new:
                    self._core.registrations.pop(name, None)
                raise

    async def _map_slab(self, data: bytes, fd: int) -> None:
        """Handle a MAP_SLAB message: map the slab, bind its buffers to a generation, and answer.

        Closes ``fd``, whatever happens.
        """
        number, slab, durables = _number_of(data), decode_slab(data[8:], fd), self.context.durables
        with self._reporting(number, (fd,)):
            await durables.map_ahead(slab)
            if self._has_begun:  # else this is a spare, for which mapping is enough
                durables.bind(self.context.buffers, slab)

    async def _attach(self, data: bytes, fds: list[int]) -> None:
        """Handle an ATTACH message: map the memory, or make some, and answer. Closes ``fds``."""
        number, (buffer, nbytes) = _number_of(data), Attach.unpack(data[8:])
        with self._reporting(number, fds):
            await cast("Sharing", self.context.sharing).attach(buffer, fds[0] if fds else None, nbytes)

    @contextlib.contextmanager
    def _reporting(self, number: int, fds: Sequence[int] = ()) -> Iterator[None]:
        """Report the success of a block, or its error, as the end of a request.

        Closes ``fds`` in any case.
        """
        try:
            yield
        except Exception as error:
            self._refuse(number, error)
        else:
            self._answers.report_success(number)
        finally:
            for fd in fds:
                os.close(fd)

    def end_loan(self, data: bytes) -> None:
        """Handle an END_LOAN message, before those that are queued: these may wait for it."""
        self._answers.end_loan(_number_of(data))

    def _answer_in_task(self, answering: Coroutine[Any, Any, None]) -> None:
        """Answer a question in a task of its own: it takes no place in the order of ops."""
        task = asyncio.ensure_future(answering)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def serve_world(self, data: bytes) -> None:
        """Handle a WORLD message: have a rank of this process execute the parent's command."""
        self._answer_in_task(self._run_member(data))

    async def _run_member(self, data: bytes) -> None:
        """Call a method of the context's ``Members``, and answer with its result.

        In a task: joining waits for the other ranks, and is ended by a later message.
        """
        method, *arguments = json.loads(data[8:])
        try:
            answer = await getattr(self.context.members, method)(*arguments)
        except Exception as error:
            self._answers.report_failure(_number_of(data), op_error(error, f"{method} of a world", self._core.loop), -1)
        else:
            self._channel.send(Kind.WORLD_DONE, data[:8], json.dumps(answer).encode())

    async def _run_compile(self, data: bytes) -> None:
        """Compile a kernel off the loop, and answer with its layout.

        In a task: ops that are sent meanwhile are not held up.
        """
        number = _number_of(data)
        try:
            with self._busy:
                layout = await self._system.run_blocking(packed_layout, self.context.device, self._core.name, data[8:])
        except AccelError as error:
            if error.is_fault:
                self.context.report_fault(error)
            self._answers.report_failure(number, error, -1)
        except Exception as error:  # a bug of the compiler does not end the child
            self._answers.report_failure(number, op_error(error, "compiling", self._core.loop, op="compile"), -1)
        else:
            self._channel.send(Kind.COMPILED, data[:8], layout)

    def _decode_action(self, action: bytes | str | None) -> Injection | AccelError | None:
        """Return the fault to be injected into an op, as the parent's fault plan has decided.

        A hang lasts until its END_HANGS, which may overtake the op that hangs: on a node it does.
        """
        if action is None:
            return None
        if action == "poison":
            return Injection("poison")
        if action == "hang":
            return Injection("hang", release=lambda: cast("None", self._ended_hangs.acquire()))
        error = decode_error(cast("bytes", action))
        return Injection("poison", error) if error.is_fault else error

    def _ref(self, buffer: int, shape: tuple[int, ...], dtype: DType) -> AccelRef:
        """Return this process's ref of the parent's buffer.

        The first time, make it, of this shape and dtype.
        """
        ref = self._refs.get(buffer)
        if ref is None:
            ref = self._refs[buffer] = AccelRef(self._core.refs, buffer, shape, dtype, self.context.generation)
        return ref


def _number_of(data: bytes) -> int:
    """Return the number that a message begins with, which its answer repeats."""
    (number,) = struct.unpack_from("<Q", data)
    return int(number)
