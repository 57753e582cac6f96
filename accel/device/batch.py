"""A batch: many ops recorded without awaiting, sent as one message, waited for by one mark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from accel import ops
from accel.device.libraries import Blas, Dnn, Elementwise, Libraries, Reduce
from accel.device.submission import BatchSubmission
from accel.dtype import DType, DTypeLike, native
from accel.errors import AccelError, ClosedError, InvalidArgumentError, NotInitializedError
from accel.ops.base import as_shape, with_refs
from accel.ref import AccelRef

if TYPE_CHECKING:
    from types import TracebackType

    from accel.device.core import DeviceCore
    from accel.device.sender import Sender
    from accel.ops import KernelOp, Plan

__all__ = ["Batch"]


class Batch:
    """Records ops inside ``async with device.batch() as batch:`` and sends them when the block ends.

    Methods return refs at once; inside the block they can be used by later ops of the same batch only, after it everywhere.
    If the body raises or is cancelled, nothing is sent. If an op fails, later ones are not launched, the block's end raises the error with
    ``.op_index``, and the refs of earlier ops are usable. If the context is rebuilt while recording, the end raises :class:`~accel.StaleRefError`.
    """

    def __init__(self, core: DeviceCore, sender: Sender, timeout: float | None) -> None:
        self._core = core
        self._sender = sender
        self._timeout = timeout
        self._ops: list[KernelOp] = []
        self._plans: list[Plan] = []
        self._outputs: list[tuple[AccelRef, ...]] = []
        self._generation = 0
        self._state = "new"
        self._libraries: Libraries[AccelRef] = Libraries(self._record)

    @property
    def blas(self) -> Blas[AccelRef]:
        """Linear algebra; see :class:`~accel.device.Blas`."""
        return self._libraries.blas

    @property
    def elementwise(self) -> Elementwise[AccelRef]:
        """Functions of elements; see :class:`~accel.device.Elementwise`."""
        return self._libraries.elementwise

    @property
    def reduce(self) -> Reduce[AccelRef]:
        """Reductions; see :class:`~accel.device.Reduce`."""
        return self._libraries.reduce

    @property
    def dnn(self) -> Dnn[AccelRef]:
        """Neural network ops; see :class:`~accel.device.Dnn`."""
        return self._libraries.dnn

    def __len__(self) -> int:
        return len(self._ops)

    # -- recording

    def run(self, op: KernelOp) -> AccelRef:
        """Record any op that makes or writes a buffer, and return its ref.

        Raises
        ------
        InvalidArgumentError
            If the op's operands do not fit, or it has no ref to return (``Get`` and ``Free`` come after the block).
        NotInitializedError, ClosedError
            Before and after the block.
        StaleRefError
            If an operand is not there any more.
        """
        return self._record(with_refs(op, self._core.resolve), None)

    def put(self, array: Any, *, out: AccelRef | None = None) -> AccelRef:
        """Record a copy of a host array to the device. The array must not change before the block has ended."""
        return self.run(ops.Put(native(array), out))

    def empty(self, shape: Any, dtype: DTypeLike = "float32") -> AccelRef:
        """Record the making of a buffer with no set contents."""
        return self.run(ops.Empty(as_shape(shape), DType.of(dtype)))

    def zeros(self, shape: Any, dtype: DTypeLike = "float32") -> AccelRef:
        """Record the making of a buffer of zeros."""
        return self.full(shape, 0, dtype)

    def full(self, shape: Any, value: Any, dtype: DTypeLike = "float32") -> AccelRef:
        """Record the making of a buffer whose elements are all ``value``."""
        return self.run(ops.Fill(as_shape(shape), DType.of(dtype), value))

    def copy(self, source: AccelRef, destination: AccelRef) -> AccelRef:
        """Record a copy from buffer to buffer, and return the destination."""
        return self.run(ops.Copy(source, destination))

    def _record(self, op: KernelOp, timeout: float | None) -> AccelRef:
        if self._state != "recording":
            if self._state == "new":
                raise NotInitializedError("the batch records inside its block only", remedy="Use `async with device.batch() as batch:`.")
            raise ClosedError("the batch has ended", remedy="Open another one.")
        if timeout is not None:
            raise InvalidArgumentError("an op of a batch has no timeout of its own", remedy="Use device.batch(timeout=...).")
        plan = self._sender.check(op, self)
        if not plan.writes and not plan.creates:
            raise InvalidArgumentError(f"{op.kind} makes no buffer to return from a batch", remedy="Await it after the block.", op=op.kind)
        core = self._core
        made = tuple(AccelRef(core, core.next_buffer(), spec.shape, spec.dtype, self._generation) for spec in plan.creates)
        for ref in made:
            core.recording[ref.buffer] = self
        self._ops.append(op)
        self._plans.append(plan)
        self._outputs.append(made)
        return (plan.writes + made)[0]

    # -- the block

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise ClosedError("a batch is used once", remedy="Call device.batch() for each block.")
        self._sender.guard()
        await self._sender.until_ready(self._timeout)
        self._generation = self._core.live_generation
        self._state = "recording"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._state = "ended"
        for refs in self._outputs:
            for ref in refs:
                self._core.recording.pop(ref.buffer, None)
        core = self._core
        submission = BatchSubmission(tuple(self._ops), tuple(self._plans), self._outputs, core.loop.create_future(), self._generation)
        if error is not None:
            submission.void(0)
            return
        if not self._ops:
            return
        try:
            self._sender.guard()
            await self._sender.run(None, self._timeout, submission)
        except AccelError:
            if not submission.launched:
                submission.void_unsound()
            raise
        finally:
            self._ops, self._plans, self._outputs = [], [], []
            # An error's traceback holds this frame, and the submission's future holds the error.
            del submission
