"""NCCL in one context: this GPU as a rank of worlds.

Communicators are non-blocking: a call only hands the work to a thread of NCCL's, and the
communicator is "in progress" until that has enqueued it. No other call may be made until then, so
each is polled to its end on the thread that made it. That thread waits, and not NCCL, because a
call on a communicator whose other rank has died never ends by itself.

A communicator is revoked before it is aborted, which frees the stream. A graph that captured one of
its collectives points into it, and frees what it holds there when the graph is destroyed, so
``comm_abort`` waits for that: :class:`_CapturingGraphs`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from accel import BackendUnavailableError, DeadlineExceededError, DType, FaultScope, WorldChangedError
from accel.semaphore import Semaphore
from accel_cuda.core.family import FamilyState
from accel_cuda.core.libraries import VendorLibrary, version_of
from accel_cuda.errors import error_of

if TYPE_CHECKING:
    from accel import AccelError
    from accel.ops.collective import Call
    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["DTYPES", "NCCL", "REDUCTIONS", "Nccl", "NcclGroup", "NcclState"]

NCCL = VendorLibrary("nccl", "nvidia-nccl-cu13", "nccl.bindings.nccl", "NCCLError", "nccl4py", "nccl")

DTYPES = {
    DType.INT8: 0,
    DType.UINT8: 1,
    DType.INT32: 2,
    DType.UINT32: 3,
    DType.INT64: 4,
    DType.UINT64: 5,
    DType.FLOAT16: 6,
    DType.FLOAT32: 7,
    DType.FLOAT64: 8,
    DType.BFLOAT16: 9,
    DType.FLOAT8_E4M3FN: 10,
    DType.FLOAT8_E5M2: 11,
}
"""What NCCL reduces -> its ``ncclDataType_t``."""

REDUCTIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
"""Reduction -> its ``ncclRedOp_t``."""

_SUCCESS, _IN_PROGRESS = 0, 7

_OLDEST = 22809
"""Version 2.28.9: the first that revokes, and has every collective."""

_POLLS = 200
"""How often a call is polled without a pause: for about 0.2 ms, which most need less than."""
_PAUSE = 1e-4
_JOIN_PAUSE = 1e-3
_WORDS = mmap.PAGESIZE // ctypes.sizeof(ctypes.c_uint64)


class _CapturingGraphs:
    """The CUDA graphs that have captured work of one communicator, as far as they are alive.

    The driver posts a semaphore when it destroys what it was given to keep with a graph: one thing
    in front of the collective's own, and one behind it. All are destroyed one after the other on one
    thread of the driver's, so when both are gone, the collective's is too.
    """

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._destroyed = Semaphore()
        self._count = 0

    def keep(self, graph: Any) -> None:
        """Have the driver keep one thing with a graph that is being captured."""
        context = self._context
        driver = context.driver
        no_sync = int(driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
        move = int(driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE)
        destroy = driver.CUhostFn(self._destroyed.address)
        kept = context.call("cuUserObjectCreate", self._destroyed.argument, destroy, 1, no_sync)
        self._count += 1
        if self._count == 1:
            # Graphs of other libraries may outlive the context; the semaphore outlives them.
            weakref.finalize(driver, self._destroyed.try_acquire).atexit = False
        context.call("cuGraphRetainUserObject", graph, kept, 1, move)

    def are_alive(self) -> bool:
        """Return whether one of them may still be alive. Never blocks."""
        while self._count and self._destroyed.try_acquire():
            self._count -= 1
        return self._count > 0


class NcclGroup:
    """One end of a communicator; see :class:`accel.world.group.Group`. Made by :meth:`Nccl.join`.

    Parameters
    ----------
    library
        NCCL in the context.
    rank, size
        The number of this rank, and how many there are.
    """

    def __init__(self, library: Nccl, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._library = library
        self._context = library.context
        self._communicator: Any = None
        self._calls = threading.Lock()  # around each call of NCCL but the slow ones
        self._error: AccelError | None = None
        self._is_revoked = False
        self._is_aborted = False
        self._graphs = _CapturingGraphs(library.context)
        self._reached = library.next_word()

    @property
    def reached(self) -> int:
        """Number of the newest collective that a stream has come to, or 0."""
        return self._reached.value

    def launch(self, stream: CudaStream, call: Call, source: int, target: int) -> None:
        """Enqueue a collective; see :meth:`accel.world.group.Group.launch`."""
        context = stream.ready()
        with context.section:
            graph = _captured_by(context, stream)
            if graph is not None:
                self._graphs.keep(graph)
            elif call.number:
                context.call("cuStreamWriteValue64", stream.handle, ctypes.addressof(self._reached), call.number, 0)
            if call.elements or call.kind == "barrier":
                with self._calls:
                    self._check()
                    self._enqueue(stream, call, source, target)
                self._settle(stream, call.kind)
            if graph is not None:
                self._graphs.keep(graph)

    def revoke(self) -> None:
        """End what is in flight and what waits. Blocks until the stream goes on: for 0.5 s."""
        self._is_revoked = True
        if self._context.fault is not None:
            return
        nccl = self._library.bindings
        with self._context.section:
            with self._calls:
                if self._communicator is None:
                    return
                with contextlib.suppress(nccl.NCCLError):  # it answers the state, which may be the error that ends the epoch
                    nccl.comm_revoke(self._communicator, 0)
            while self._polled() == _IN_PROGRESS:
                time.sleep(_PAUSE)

    def abort(self) -> None:
        """Release everything, or leave it to the library while graphs are alive that captured a collective. May block."""
        self._is_revoked = True
        if not self._is_aborted and not self.release():
            self._library.defer(self)
        self._is_aborted = True

    # -- what the library calls

    def connect(self, unique_id: bytes, deadline: float, revoked: threading.Event) -> None:
        """Wait for all ranks; see :meth:`accel.world.group.FormsGroups.join`. After an error, :meth:`abort` releases what there is."""
        nccl, device = self._library.bindings, self._context.description.spec
        config = nccl.Config()
        config.blocking = 0
        with self._context.section:
            try:
                self._communicator = nccl.comm_init_rank_scalable(self.size, self.rank, 1, bytearray(unique_id), config.ptr)
            except nccl.NCCLError as error:
                raise self._library.failure(int(error.status), "comm_init_rank_scalable") from error
            while (state := self._polled()) == _IN_PROGRESS:
                if revoked.wait(_JOIN_PAUSE):
                    raise self._revoked()
                if time.monotonic() > deadline:
                    raise DeadlineExceededError(
                        f"rank {self.rank} of {self.size} has waited for others to join", library=NCCL.name, device=device
                    )
            if state != _SUCCESS:
                raise self._library.failure(state, "comm_init_rank_scalable")

    def release(self) -> bool:
        """Abort the communicator and return ``True``, unless a graph is alive that captured a collective of it. May block."""
        if self._context.fault is not None:
            return True
        if self._graphs.are_alive():
            return False
        with self._calls:
            communicator, self._communicator = self._communicator, None
        nccl = self._library.bindings
        if communicator is not None:
            with self._context.section, contextlib.suppress(nccl.NCCLError):  # as above
                nccl.comm_abort(communicator)
        return True

    def _state(self) -> int:
        """Return the communicator's state. The lock is held."""
        if self._communicator is None:
            return _SUCCESS
        return int(self._library.bindings.comm_get_async_error(self._communicator))

    def _polled(self) -> int:
        with self._calls:
            return self._state()

    def _check(self) -> None:
        """Raise if nothing can be enqueued. The lock is held."""
        if self._is_revoked:
            raise self._revoked()
        if self._error is not None:
            raise self._error.clone()

    def _revoked(self) -> AccelError:
        return WorldChangedError(
            f"the communicator of rank {self.rank} of {self.size} was revoked",
            library=NCCL.name,
            device=self._context.description.spec,
            scope=FaultScope.OP,
        )

    def _enqueue(self, stream: CudaStream, call: Call, source: int, target: int) -> None:
        nccl, communicator, handle, kind = self._library.bindings, self._communicator, stream.handle, call.kind
        # What is only moved is moved as bytes, so that every dtype can be.
        dtype, count = (DTYPES[call.dtype], call.elements) if call.reduction else (DTYPES[DType.UINT8], call.nbytes)
        # Of one rank every reduction is what it gave, and NCCL refuses averages of 8-bit floats there.
        reduction = REDUCTIONS.get(call.reduction, 0) if self.size > 1 else REDUCTIONS["sum"]
        try:
            match kind:
                case "all_reduce" | "reduce_scatter":
                    getattr(nccl, kind)(source, target, count, dtype, reduction, communicator, handle)
                case "reduce":
                    nccl.reduce(source, target, count, dtype, reduction, call.root, communicator, handle)
                case "broadcast" | "gather" | "scatter":
                    getattr(nccl, kind)(source, target, count, dtype, call.root, communicator, handle)
                case "all_gather":
                    nccl.all_gather(source, target, count, dtype, communicator, handle)
                case "all_to_all":
                    nccl.allto_all(source, target, count, dtype, communicator, handle)
                case "send":
                    nccl.send(source, count, dtype, call.root, communicator, handle)
                case "receive":
                    nccl.recv(target, count, dtype, call.root, communicator, handle)
                case "barrier":
                    word = self._library.word
                    nccl.all_reduce(word, word, 1, DTYPES[DType.INT32], REDUCTIONS["max"], communicator, handle)
                case _:
                    raise AssertionError(kind)
        except nccl.NCCLError as error:
            raise self._failed(stream, int(error.status), kind) from error

    def _settle(self, stream: CudaStream, kind: str) -> None:
        """Wait until NCCL has enqueued the call: before that, nothing else may be."""
        for poll in itertools.count():
            if self._is_revoked:
                raise self._revoked()
            if (state := self._polled()) == _SUCCESS:
                return
            if state != _IN_PROGRESS:
                raise self._failed(stream, state, kind)
            time.sleep(0.0 if poll < _POLLS else _PAUSE)

    def _failed(self, stream: CudaStream, status: int, kind: str) -> AccelError:
        """Return what a status stands for; nothing is enqueued in this communicator from now on."""
        self._error = self._error or stream.failure(status, kind, NCCL.name)
        return self._error.clone()


class Nccl:
    """NCCL in one context. To make it may block.

    Parameters
    ----------
    context
        The context.

    Attributes
    ----------
    context : CudaContext
        The context.
    bindings : module
        The raw bindings.
    word : int
        Address of 4 bytes that barriers reduce.

    Raises
    ------
    BackendUnavailableError
        If NCCL or its bindings are not installed, or NCCL is too old.
    """

    def __init__(self, context: CudaContext) -> None:
        self.context = context
        self.bindings: Any = NCCL.load()
        self._lock = threading.Lock()
        self._deferred: list[NcclGroup] = []
        # Where streams write what they have come to. A stream may do so when the group is long gone, so the page is the context's.
        self._words = (ctypes.c_uint64 * _WORDS).from_buffer(mmap.mmap(-1, mmap.PAGESIZE))
        self._places = itertools.cycle(range(_WORDS))
        if (version := int(self.bindings.get_version())) < _OLDEST:
            raise BackendUnavailableError(
                f"{NCCL.wheel} {version_of(NCCL.wheel) or version} cannot revoke a communicator: 2.28.9 is the oldest that can",
                library=NCCL.name,
                remedy="In a checkout, run: pip install '.[nccl]'",
            )
        self._registration = context.register_host(ctypes.addressof(self._words), mmap.PAGESIZE)
        with context.section:
            self.word = int(context.call("cuMemAlloc", 4))

    def next_word(self) -> ctypes.c_uint64:
        """Return a number, now 0, that a stream can write: each in turn. It stays mapped as long as it is held."""
        word = ctypes.c_uint64.from_buffer(self._words, ctypes.sizeof(ctypes.c_uint64) * next(self._places))
        word.value = 0
        return word

    def unique_id(self) -> bytes:
        """Return the id of a communicator. May block.

        A thread of NCCL's listens until all ranks have joined with it: to the process's end, if one never does.
        """
        try:
            with self.context.section:
                return bytes(self.bindings.get_unique_id())
        except self.bindings.NCCLError as error:
            raise self.failure(int(error.status), "get_unique_id") from error

    def join(self, unique_id: bytes, rank: int, size: int, deadline: float, revoked: threading.Event) -> NcclGroup:
        """Join a communicator; see :meth:`accel.world.group.FormsGroups.join`. Blocks: 0.4 s, and 1.3 s the first time in a process."""
        self._release_deferred()
        group = NcclGroup(self, rank, size)
        try:
            group.connect(unique_id, deadline, revoked)
        except BaseException:
            group.abort()
            raise
        return group

    def failure(self, status: int, call: str) -> AccelError:
        """Return what a status stands for, or the context's fault if there is one."""
        fault = self.context.fault
        return error_of(status, call, library=NCCL.name, device=self.context.description.spec) if fault is None else fault.clone()

    def defer(self, group: NcclGroup) -> None:
        """Release a group later, when a communicator is joined: a graph is alive that captured a collective of it."""
        with self._lock:
            self._deferred.append(group)

    def _release_deferred(self) -> None:
        with self._lock:
            groups, self._deferred = self._deferred, []
        for group in groups:
            if not group.release():
                self.defer(group)

    def close(self) -> None:
        """Give back what there is. May block; the streams have ended, and the context is healthy."""
        self._release_deferred()
        self._registration.close()
        with self.context.section:
            self.context.driver.ignore("cuMemFree", self.word)


class NcclState(FamilyState[Nccl]):
    """NCCL in one context, once it is loaded. The kernels are the world's, which call :meth:`NcclGroup.launch`."""

    def __init__(self, context: CudaContext) -> None:
        super().__init__(context, Nccl)
        self.kernels = {}


def _captured_by(context: CudaContext, stream: CudaStream) -> Any:
    """Return the graph that a stream is captured into, or ``None``: other libraries capture it too."""
    status, _, graph, *_ = context.call("cuStreamGetCaptureInfo", stream.handle)
    return graph if int(status) == int(context.driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE) else None
