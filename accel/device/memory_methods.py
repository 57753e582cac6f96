"""The methods of :class:`~accel.Device` that make, fill, copy, read and free buffers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np

from accel import ops
from accel.device.memory_exchange import MemoryExchange
from accel.dtype import DType, DTypeLike, native
from accel.engine.launches import OpSubmission
from accel.errors import AccelError, DeadlineExceededError, InvalidArgumentError
from accel.node.client import Node
from accel.ops.base import as_shape, operand
from accel.ref import AccelRef, AccelToken, RefView
from accel.remote.tokens import fetch_copy
from accel.values import check_flag, check_timeout

__all__ = ["MemoryMethods"]

_EMPTY_PLAN = ops.Plan((), (), ())

_CONVERT_OFF_LOOP = 1 << 18
"""Bytes above which a worker thread rearranges a host array."""


class MemoryMethods(MemoryExchange):
    """The methods of :class:`~accel.Device` for buffers; a base class of it."""

    async def put(
        self,
        array: Any,
        *,
        out: AccelRef | None = None,
        durable: bool = False,
        checksum: bool = False,
        timeout: float | None = None,
        node: Node | str | None = None,
    ) -> AccelRef:
        """Copy a host array, or a buffer of another device or process, to the device.

        Parameters
        ----------
        array
            Anything ``np.asarray`` takes. Shape (0-d and empty too) and dtype are kept; other
            memory layouts and byte orders are converted. Or a ref of another device:
            ``system.links()`` tells how it gets here. Or a token of :meth:`publish`, of another
            process too.
        out
            Buffer to write instead of making one.
        durable
            Let the buffer outlive a fault: the ref stays valid, and the data is there, in the
            generations that follow. See :meth:`empty`.
        checksum
            Seal the durable buffer once it is written, as :meth:`keep_checksum` does.
        timeout
            As in :meth:`run`.
        node
            With a token of another machine: an agent there, ``"host:port"`` or an
            :class:`accel.Node`, which asks the process that has published it and sends the copy.

        Notes
        -----
        The array is read until the op has ended, even if the ``await`` was cancelled: do not change
        it before. A worker thread first rearranges a large one that needs it; the op takes
        its place in the device's order after that.

        A ref of another device is read in that device's order: the copy has what the ops that were
        sent there before leave in the buffer, and nothing of later ones, which wait for the copy
        if they write the buffer. The end of the other device during the copy changes nothing.
        """
        if durable is not False or checksum is not False:  # most calls need no check
            self._check_durable(durable, checksum)
        # The timeout is for the copy and the checksum together.
        deadline = None if timeout is None or not checksum else self._sender.deadline_after(timeout)
        if isinstance(array, AccelToken):
            result = await self._put_token(array, out, durable, timeout, None if node is None else Node.of(node))
        elif node is not None:
            raise InvalidArgumentError("node= is for tokens of another machine", remedy="Open a device there: open_device(..., node=...).")
        elif isinstance(array, AccelRef):
            result = await self._peers.copy(array, out, durable, timeout)
        else:
            if type(array) is not np.ndarray or not (array.flags.c_contiguous and array.dtype.isnative):
                array, timeout = await self._to_contiguous(array, timeout)
            result = await self._sender.run(ops.Put(array, out, durable), timeout)
        if checksum:
            await self._sender.keep_checksum(result, deadline)
        return result

    async def _put_token(
        self, token: AccelToken, out: AccelRef | None, durable: bool, timeout: float | None, node: Node | None
    ) -> AccelRef:
        """Put a copy of the buffer that a token names; its process, or a node, sends the contents."""
        core, deadline = self._core, self._sender.deadline_after(timeout)
        core.guard()
        copy: contextlib.AbstractAsyncContextManager[np.ndarray[Any, Any]]
        if node is None:
            copy = fetch_copy(token, timeout, core.system, core.disposal, core.name)
        else:
            copy = contextlib.nullcontext(await node.fetch_copy(core.system.run_blocking, token, timeout))
        async with copy as array:
            result: AccelRef = await self._sender.run(ops.Put(array, out, durable), self._sender.seconds_left(deadline))
            return result

    async def _to_contiguous(self, array: Any, timeout: float | None) -> tuple[np.ndarray[Any, Any], float | None]:
        """Return a host array in C order and native byte order, and what is left of the timeout.

        Another layout is copied, a large array on a worker thread. Raises
        :class:`DeadlineExceededError` if that takes longer than the timeout.
        """
        source = array if isinstance(array, np.ndarray) else native(array)
        if source.nbytes <= _CONVERT_OFF_LOOP or (source.flags.c_contiguous and source.dtype.isnative):
            return native(source), timeout
        core = self._core
        core.guard()
        deadline = self._sender.deadline_after(timeout)
        try:
            async with asyncio.timeout_at(deadline):
                source = await core.system.run_blocking(native, source)
        except TimeoutError:
            raise DeadlineExceededError(f"the array was not rearranged within {timeout:g} s", op="put", device=core.name) from None
        return source, self._sender.seconds_left(deadline)

    async def get(self, ref: AccelRef, *, out: np.ndarray[Any, Any] | None = None, timeout: float | None = None) -> np.ndarray[Any, Any]:
        """Copy a buffer to the host and return the array.

        Parameters
        ----------
        ref
            The buffer.
        out
            Writable C-contiguous array of the same shape and dtype to fill and return. After a
            cancelled or failed ``await`` its contents are not set.
        timeout
            As in :meth:`run`.
        """
        op = ops.Get.into(operand("ref", ref), out)
        if ref.is_strided:  # copy it to a contiguous buffer on the device first
            deadline = self._sender.deadline_after(timeout)
            op = ops.Get(await self._sender.run(ops.Part(ref, ...), timeout), op.destination)
            timeout = self._sender.seconds_left(deadline)
        result: np.ndarray[Any, Any] = await self._sender.run(op, timeout)
        return result

    async def pinned(self, shape: Any, dtype: DTypeLike = "float32", *, timeout: float | None = None) -> np.ndarray[Any, Any]:
        """Return a new numpy array in page-locked host memory, its contents not set.

        :meth:`put` and ``get(out=)`` move it at the bus's full speed.

        It stays readable and writable after any fault, and after the device is closed. Its memory
        is released with the last view of it.

        Parameters
        ----------
        shape, dtype
            As in :meth:`empty`.
        timeout
            Seconds to wait for room once ``pinned_limit`` is used up, in the order of the calls;
            then :class:`~accel.DeadlineExceededError` is raised.

        Raises
        ------
        OutOfMemoryError
            If the array could never fit ``pinned_limit``, or the system locks no more memory.
        """
        self._core.guard()
        check_timeout(timeout)
        return await self._core.pinned.array(as_shape(shape), DType.of(dtype), timeout, self._core.guard)

    async def empty(self, shape: Any, dtype: DTypeLike = "float32", *, durable: bool = False, timeout: float | None = None) -> AccelRef:
        """Make a buffer whose contents are not set.

        Parameters
        ----------
        shape
            An int, or a sequence of them.
        dtype
            Of its elements.
        durable
            Let the buffer outlive a fault. The ``await`` ends once this process holds a descriptor
            of the memory. The ref then stays valid over rebuilds, as does its token, and ops on it
            that are sent while the device is REBUILDING wait and run. A buffer that was being
            written when the context faulted is *torn*: using what is in it raises
            :class:`~accel.StaleRefError` with the reason ``"torn"`` until all of it was written
            anew.
        timeout
            As in :meth:`run`.

        Raises
        ------
        UnsupportedError
            If this device's memory cannot outlive its context.
        """
        self._check_durable(durable)
        result: AccelRef = await self._sender.run(ops.Empty(as_shape(shape), DType.of(dtype), durable), timeout)
        return result

    async def zeros(
        self, shape: Any, dtype: DTypeLike = "float32", *, durable: bool = False, shareable: bool = False, timeout: float | None = None
    ) -> AccelRef:
        """Make a buffer of zeros.

        Parameters
        ----------
        shape, dtype, durable, timeout
            As in :meth:`empty`.
        shareable
            Let :meth:`share` give the buffer to other processes. It has a slab of its own, because
            a descriptor shows the whole slab, and does not count against ``memory_limit``.
        """
        check_flag("shareable", shareable)
        if not shareable:
            return await self.full(shape, 0, dtype, durable=durable, timeout=timeout)
        if durable is not False:
            raise InvalidArgumentError("a buffer is durable or shareable, and not both", remedy="Leave one of them out.")
        deadline = self._sender.deadline_after(timeout)
        spec = ops.Spec(as_shape(shape), DType.of(dtype))
        ref = await self._attach(None, max(1, spec.nbytes), spec, timeout)
        result: AccelRef = await self._sender.run(ops.Fill(spec.shape, spec.dtype, 0, ref), self._sender.seconds_left(deadline))
        return result

    async def full(
        self,
        shape: Any,
        value: Any,
        dtype: DTypeLike = "float32",
        *,
        durable: bool = False,
        timeout: float | None = None,
    ) -> AccelRef:
        """Make a buffer whose elements are all ``value``, a number.

        See :class:`accel.ops.Fill` for how it is converted to ``dtype``.

        The other parameters are as in :meth:`empty`.
        """
        self._check_durable(durable)
        result: AccelRef = await self._sender.run(ops.Fill(as_shape(shape), DType.of(dtype), value, None, durable), timeout)
        return result

    def _check_durable(self, durable: bool, checksum: bool = False) -> None:
        """Raise if the device has no durable buffers, or the two flags do not go together."""
        check_flag("durable", durable)
        check_flag("checksum", checksum)
        if durable:
            self._core.durable.check_offered()
        elif checksum:
            raise InvalidArgumentError(
                "checksum=True without durable=True",
                remedy="Give both: a checksum is compared after a rebuild, which others do not outlive.",
            )

    async def keep_checksum(self, ref: AccelRef, *, timeout: float | None = None) -> int:
        """Seal a durable buffer: ops may only read it from now on, and its checksum is kept, and returned.

        The checksum is of what the ops that were sent before leave in the buffer. A rebuild
        compares it before its generation begins, and a buffer that differs is torn: something wrote
        to it that was no op, such as a stray kernel. An op that writes a sealed buffer is refused
        with :class:`~accel.InvalidArgumentError`.

        Parameters
        ----------
        ref
            The buffer.
        timeout
            As in :meth:`run`.

        Raises
        ------
        InvalidArgumentError
            It is not durable.
        StaleRefError
            It was freed, or is torn.
        UnsupportedError
            The backend makes no checksums.
        AccelError
            What else keeps the checksum from being made, such as a fault or the deadline. The
            buffer is not sealed then.
        """
        return await self._sender.keep_checksum(self._base_for_checksum(ref), self._sender.deadline_after(timeout))

    async def verify_checksum(self, ref: AccelRef, *, timeout: float | None = None) -> bool:
        """Return whether a sealed buffer still holds what its checksum was made of.

        One that does not is torn from now on. ``True`` for a buffer that is not sealed: there is
        nothing to compare.

        Parameters
        ----------
        ref, timeout
            As in :meth:`keep_checksum`.

        Raises
        ------
        InvalidArgumentError, StaleRefError
            As in :meth:`keep_checksum`.
        """
        return await self._sender.verify_checksum(self._base_for_checksum(ref), self._sender.deadline_after(timeout))

    def _base_for_checksum(self, ref: AccelRef) -> AccelRef:
        """Return the ref of the whole durable buffer; raise if it cannot have a checksum.

        Only checks an op, as if it was to be sent, and sends nothing.
        """
        if not operand("ref", ref).durable:
            raise InvalidArgumentError(f"{ref!r} is not durable", remedy="Make the buffer with durable=True.")
        self._core.guard()
        self._sender.check(ops.Checksum(ref))
        return ref.base if isinstance(ref, RefView) else ref

    async def copy(self, source: AccelRef, destination: AccelRef, *, timeout: float | None = None) -> AccelRef:
        """Copy one buffer into another of the same shape and dtype, and return the destination.

        The source may be on another device; see :meth:`put`.
        """
        if isinstance(source, AccelRef) and source.owner is not self._core.refs:
            return await self._peers.copy(source, operand("destination", destination), False, timeout)
        result: AccelRef = await self._sender.run(ops.Copy(source, destination), timeout)
        return result

    async def free(self, ref: AccelRef) -> None:
        """Free a buffer's memory, after the ops that were sent before.

        Using the ref raises :class:`~accel.StaleRefError` from now on.

        Dropping the last reference to a ref does the same.
        """
        core = self._core
        core.guard()
        if operand("ref", ref).is_freed:
            raise _already_freed_error(ref)
        core.refs.check(ref, None, _EMPTY_PLAN)  # a plan without reads: a torn buffer may be freed
        if isinstance(ref, RefView):
            raise InvalidArgumentError(
                f"{ref!r} owns no memory", remedy="Free ref.base, the ref of the whole buffer; or just drop the view.", device=core.name
            )
        core.refs.sharing.check_free(ref)
        library = next((name for name, registration in core.registrations.items() if registration.holds(ref)), None)
        if library is not None:
            raise InvalidArgumentError(
                f"{ref!r} cannot be freed: library {library!r} was registered with it",
                remedy=f"First: await device.unregister({library!r}).",
                device=core.name,
            )
        ref.is_freed = True
        submission = OpSubmission(ops.Free(ref), _EMPTY_PLAN, core.loop.create_future(), core.refs.live_generation)
        try:
            await self._sender.run(None, None, submission)
        except BaseException:
            # The free was not dispatched: the ref stays valid, and is freed when it is dropped.
            if not submission.future.done() or submission.future.cancelled():
                ref.is_freed = False
            raise
        finally:
            del submission  # an error's traceback keeps this frame, and the submission the ref

    def resolve(self, token: AccelToken) -> AccelRef:
        """Return the ref that a token (a pickled ref) was made from.

        Raises
        ------
        InvalidArgumentError
            If it is no token, or one of another device, or of a view that runs past its buffer.
        StaleRefError
            If the buffer is gone.
        ClosedError, DeviceLostError
            If the device is closed, or lost.
        """
        self._core.guard()
        return self._core.refs.resolve(token)


def _already_freed_error(ref: AccelRef) -> AccelError:
    """Return the error of a second ``free`` of a ref."""
    # Not within free(): a frame that raises an error and has a name for it forms a cycle with the
    # error, which would keep the ref alive.
    error = ref.stale_error()
    error.remedy = "Free a ref once: this one's memory was given back before."
    return error
