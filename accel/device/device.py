"""The device as its users see it: a stable address, valid over every rebuild of what is behind it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from accel import ops
from accel.device.batch import Batch
from accel.device.compiler import Compiler
from accel.device.graph import Graph
from accel.device.info import DeviceHealth, DeviceInfo, picture
from accel.device.kernel_library import KernelLibrary, kernels_of
from accel.device.kernels import LIBRARIES
from accel.device.libraries import Blas, Dnn, Elementwise, Libraries, Reduce
from accel.device.lifecycle import DeviceState
from accel.device.memory_exchange import MemoryExchange
from accel.device.run import OpSubmission
from accel.dtype import DType, DTypeLike, native
from accel.errors import DeadlineExceededError, InvalidArgumentError, UnsupportedError
from accel.ops.base import as_shape, operand, with_refs
from accel.ref import AccelRef, AccelToken

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from accel.device.core import DeviceCore
    from accel.device.libraries_signal import Fft, Rng
    from accel.device.sender import Sender
    from accel.hosts import Host
    from accel.ops import KernelOp

__all__ = ["Device"]

_CONVERT_OFF_LOOP = 1 << 18
"""Bytes above which a host array that must be rearranged is so on a worker thread."""


class Device(MemoryExchange):
    """One opened device. Made by :meth:`accel.System.open_device`; several may share one piece of hardware, each with its own context and memory.

    Every op is sent at the first step of its ``await``, and runs in the order of sending; buffers are kept consistent across streams. An ``await`` ends with
    the result or with an error. Cancelling it detaches the waiter at once: work that has not reached the device is dropped, the rest runs on
    with its memory kept. After a fault the device goes REBUILDING; ops wait for the next generation unless they use refs of the old one.

    Methods raise :class:`~accel.ClosedError` after close and on a wrong loop, thread or process, and :class:`~accel.DeviceLostError` once the device is lost.
    """

    def __init__(self, core: DeviceCore, sender: Sender, host: Host, actor: Any) -> None:
        self._core = core
        self._sender = sender
        self._host = host
        self._actor = actor
        self._libraries: Libraries[Coroutine[Any, Any, AccelRef]] = Libraries(sender.run)
        self._compiler = Compiler(core, sender, host)
        self._closed: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Device {self.name} {self.state.value} generation {self.generation}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: it lives in one process; send refs, whose tokens device.resolve turns back, or data")

    # -- libraries

    @property
    def blas(self) -> Blas[Coroutine[Any, Any, AccelRef]]:
        """Linear algebra; see :class:`~accel.device.Blas`."""
        return self._libraries.blas

    @property
    def elementwise(self) -> Elementwise[Coroutine[Any, Any, AccelRef]]:
        """Functions of elements; see :class:`~accel.device.Elementwise`."""
        return self._libraries.elementwise

    @property
    def reduce(self) -> Reduce[Coroutine[Any, Any, AccelRef]]:
        """Reductions; see :class:`~accel.device.Reduce`."""
        return self._libraries.reduce

    @property
    def dnn(self) -> Dnn[Coroutine[Any, Any, AccelRef]]:
        """Neural network ops; see :class:`~accel.device.Dnn`."""
        return self._libraries.dnn

    @property
    def compiler(self) -> Compiler:
        """Kernels of your own; see :class:`~accel.device.Compiler`."""
        return self._compiler

    @property
    def fft(self) -> Fft[Coroutine[Any, Any, AccelRef]]:
        """Fourier transforms; see :class:`~accel.device.Fft`."""
        return self._libraries.fft

    @property
    def rng(self) -> Rng[Coroutine[Any, Any, AccelRef]]:
        """Random numbers; see :class:`~accel.device.Rng`."""
        return self._libraries.rng

    async def run(self, op: KernelOp, *, timeout: float | None = None) -> Any:
        """Run any op and return what it gives.

        Parameters
        ----------
        op
            What to do. Tokens among its operands (it was pickled) are turned back into refs.
        timeout
            Seconds until waiting ends with :class:`~accel.DeadlineExceededError`; expired work is not launched.

        Raises
        ------
        InvalidArgumentError, UnsupportedError, StaleRefError
            Before anything is sent: it is no op, the operands do not fit, this device does not offer it, or an operand is gone.
        OutOfMemoryError
            There is no room for the result.
        ContextPoisonedError
            The context faulted while the op was in flight; ``.executed`` says whether it may have run.
        MailboxFullError
            The queue is full and the device was opened with ``overload="reject"``.
        """
        return await self._sender.run(with_refs(op, self._core.resolve), timeout)

    async def register(self, library: type[KernelLibrary], *args: Any, **kwargs: Any) -> None:
        """Let the device run ops of a library of the user's own; see :class:`accel.KernelLibrary`.

        Parameters
        ----------
        library
            The class. An instance is made, and opened on a worker thread, now and for every later context.
        *args, **kwargs
            What it is made with.

        Raises
        ------
        InvalidArgumentError
            If the class has no name or no kernels, or the device has a library of this name.
        LibraryError
            If it cannot be made or opened; the device goes on without it.
        """
        core = self._core
        core.guard()
        kernels_of(library)
        name = library.name
        if name in core.own or name in LIBRARIES:
            raise InvalidArgumentError(f"{core.name} has a library {name!r}", remedy="Give yours another name.", device=core.name)
        core.own[name] = partial(library, *args, **kwargs)
        try:
            await self._sender.until_ready(None)
            await self._host.context.port(name)
        except BaseException:
            del core.own[name]
            raise

    def batch(self, *, timeout: float | None = None) -> Batch:
        """Return a batch: ``async with device.batch() as batch`` records ops without awaiting and sends them when the block ends.

        Parameters
        ----------
        timeout
            Seconds from the end of the block until waiting ends with :class:`~accel.DeadlineExceededError`.
        """
        self._sender.check_timeout(timeout)
        return Batch(self._core, self._sender, timeout)

    def graph(self, *, timeout: float | None = None) -> Graph:
        """Return a graph: ``async with device.graph() as graph`` records ops without running them, and ``await graph.replay()`` runs them all at once.

        Parameters
        ----------
        timeout
            Seconds that making the graph, at the end of the block, may take before :class:`~accel.DeadlineExceededError`.
        """
        self._sender.check_timeout(timeout)
        return Graph(self._core, self._sender, timeout)

    # -- memory

    async def put(self, array: Any, *, out: AccelRef | None = None, durable: bool = False, timeout: float | None = None) -> AccelRef:
        """Copy a host array to the device.

        Parameters
        ----------
        array
            Anything ``np.asarray`` takes. Shape (0-d and empty too) and dtype are kept; other memory layouts and byte orders are converted.
        out
            Buffer to write instead of making one.
        durable
            Not offered by inline hosts: raises :class:`~accel.UnsupportedError`.
        timeout
            As in :meth:`run`.

        Notes
        -----
        The array is read until the op has ended, even if the ``await`` was cancelled: do not change it before. A large one that must be rearranged
        is so on a worker thread first; the op takes its place in the device's order after that.
        """
        if durable:
            raise UnsupportedError("durable buffers need a process host", remedy="Leave durable out.", device=self.name)
        if isinstance(array, AccelRef):
            raise InvalidArgumentError(f"{array!r} is on a device already", remedy="Use device.copy(source, destination).")
        source = array if isinstance(array, np.ndarray) else native(array)
        if source.nbytes > _CONVERT_OFF_LOOP and not (source.flags.c_contiguous and source.dtype.isnative):
            source, timeout = await self._converted(source, timeout)
        result: AccelRef = await self._sender.run(ops.Put(native(source), out), timeout)
        return result

    async def _converted(self, source: np.ndarray[Any, Any], timeout: float | None) -> tuple[np.ndarray[Any, Any], float | None]:
        """Rearrange a large host array off the loop, and return it with what is left of the timeout."""
        core = self._core
        core.guard()
        self._sender.check_timeout(timeout)
        deadline = None if timeout is None else core.loop.time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                source = await core.system.run_blocking(native, source)
        except TimeoutError:
            raise DeadlineExceededError(f"the array was not rearranged within {timeout:g} s", op="put", device=self.name) from None
        return source, None if deadline is None else max(deadline - core.loop.time(), 1e-9)

    async def get(self, ref: AccelRef, *, out: np.ndarray[Any, Any] | None = None, timeout: float | None = None) -> np.ndarray[Any, Any]:
        """Copy a buffer to the host and return the array.

        Parameters
        ----------
        ref
            The buffer.
        out
            Writable C-contiguous array of the same shape and dtype to fill and return. After a cancelled or failed ``await`` its contents are not set.
        timeout
            As in :meth:`run`.
        """
        if out is None:
            operand("ref", ref)
            out = np.empty(ref.shape, ref.dtype.numpy)
        elif not isinstance(out, np.ndarray):
            raise InvalidArgumentError(
                f"out is a {type(out).__name__}, not a numpy array", remedy="Give np.empty(ref.shape, ref.dtype.numpy)."
            )
        result: np.ndarray[Any, Any] = await self._sender.run(ops.Get(ref, out), timeout)
        return result

    async def pinned(self, shape: Any, dtype: DTypeLike = "float32", *, timeout: float | None = None) -> np.ndarray[Any, Any]:
        """Return a new numpy array, its contents not set, in page-locked host memory: :meth:`put` and ``get(out=)`` move it at the bus's full speed.

        It stays readable and writable after any fault, and after the device is closed. Its memory is given back when the last view of it has gone.

        Parameters
        ----------
        shape, dtype
            As in :meth:`empty`.
        timeout
            Seconds to wait for room once ``pinned_limit`` is used up, in the order of the calls; then :class:`~accel.DeadlineExceededError` is raised.

        Raises
        ------
        OutOfMemoryError
            If the array could never fit ``pinned_limit``, or the system locks no more memory.
        """
        self._core.guard()
        self._sender.check_timeout(timeout)
        return await self._core.pinned.array(as_shape(shape), DType.of(dtype), timeout, self._core.guard)

    async def empty(self, shape: Any, dtype: DTypeLike = "float32", *, durable: bool = False, timeout: float | None = None) -> AccelRef:
        """Make a buffer whose contents are not set."""
        return await self._make(ops.Empty(as_shape(shape), DType.of(dtype)), durable, timeout)

    async def zeros(self, shape: Any, dtype: DTypeLike = "float32", *, durable: bool = False, timeout: float | None = None) -> AccelRef:
        """Make a buffer of zeros."""
        return await self._make(ops.Fill(as_shape(shape), DType.of(dtype)), durable, timeout)

    async def full(
        self, shape: Any, value: Any, dtype: DTypeLike = "float32", *, durable: bool = False, timeout: float | None = None
    ) -> AccelRef:
        """Make a buffer whose elements are all ``value``, a number; see :class:`accel.ops.Fill` for how it is converted to ``dtype``."""
        return await self._make(ops.Fill(as_shape(shape), DType.of(dtype), value), durable, timeout)

    async def _make(self, op: KernelOp, durable: bool, timeout: float | None) -> AccelRef:
        if durable:
            raise UnsupportedError("durable buffers need a process host", remedy="Leave durable out.", device=self.name)
        result: AccelRef = await self._sender.run(op, timeout)
        return result

    async def copy(self, source: AccelRef, destination: AccelRef, *, timeout: float | None = None) -> AccelRef:
        """Copy one buffer into another of the same shape and dtype, and return the destination."""
        result: AccelRef = await self._sender.run(ops.Copy(source, destination), timeout)
        return result

    async def free(self, ref: AccelRef) -> None:
        """Give a buffer's memory back, after the ops that were sent before. Using the ref raises :class:`~accel.StaleRefError` from now on.

        Dropping the last reference to a ref does the same.
        """
        core = self._core
        core.guard()
        core.check_ref(operand("ref", ref))
        core.sharing.check_free(ref)
        ref.is_freed = True
        submission = OpSubmission(ops.Free(ref), ops.Plan((), (), ()), core.loop.create_future(), core.live_generation)
        try:
            await self._sender.run(None, None, submission)
        except BaseException:
            # It never took its place in the queue, and earlier ops may still need the memory: so it is freed when the ref is dropped.
            if not submission.future.done() or submission.future.cancelled():
                ref.is_freed = False
            raise
        finally:
            del submission

    def resolve(self, token: AccelToken) -> AccelRef:
        """Return the ref that a token (a pickled ref) was made from.

        Raises
        ------
        InvalidArgumentError
            If the token is of another device.
        StaleRefError
            If the buffer is gone.
        """
        self._core.guard()
        return self._core.resolve(token)

    # -- state

    @property
    def name(self) -> str:
        """Backend and index, such as ``"cpu:0"``."""
        return self._core.name

    @property
    def generation(self) -> int:
        """Number of the newest context that became ready, from 1."""
        return self._core.lifecycle.generation

    @property
    def state(self) -> DeviceState:
        """Where the device is in its life."""
        return self._core.lifecycle.state

    def generations(self) -> AsyncIterator[int]:
        """Iterate over generations: the present one now, then the newest after every rebuild.

        Ends when the device is closed; raises :class:`~accel.DeviceLostError` when it is lost.
        """
        self._core.check_home()
        return self._core.lifecycle.generations()

    def info(self) -> DeviceInfo:
        """Return a picture of the device. Never waits, and works in every state; on the device's own loop dropped refs are accounted for first.

        Other threads of the process may ask too: it changes nothing there.

        Raises
        ------
        ClosedError
            In a process forked from this one.
        """
        core, context = self._core, self._host.context
        core.check_process()
        if context is not None and core.is_home:
            context.buffers.apply_frees()
        return picture(core, self._host, self._actor.mailbox.statistics())

    def health(self) -> DeviceHealth:
        """Return whether the device serves. Never waits, sends nothing to the device; other threads of the process may ask too.

        Raises
        ------
        ClosedError
            In a process forked from this one.
        """
        self._core.check_process()
        lifecycle = self._core.lifecycle
        ready = lifecycle.state is DeviceState.READY and not self._core.is_closing
        reason = "" if ready else f"{lifecycle.state.value}: {lifecycle.cause}" if lifecycle.cause else lifecycle.state.value
        return DeviceHealth(not lifecycle.is_final, ready, lifecycle.state, lifecycle.generation, reason)

    # -- the end

    async def aclose(self, *, timeout: float | None = None) -> None:
        """Close the device: take no more work, wait for what was sent, give everything back. Idempotent; all callers wait for the end.

        Parameters
        ----------
        timeout
            Seconds to wait for work that was sent; ``None``: the system's ``close_timeout``. What has not ended then fails with
            :class:`~accel.ClosedError`.

        Notes
        -----
        Cancelling ends the patience, not the close.
        """
        core = self._core
        core.check_home()
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return
        self._closed = core.loop.create_future()
        core.is_closing = True
        try:
            async with asyncio.timeout(core.system.close_timeout if timeout is None else timeout):
                await core.drained(lambda: self._host.context)
        except TimeoutError:
            core.log_left_behind(self.info())
        finally:
            core.closed()
            try:
                await self._actor.stop(drain=False)
            finally:
                self._closed.set_result(None)
                await core.pinned.aclose()
