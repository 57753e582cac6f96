"""Host arrays for which no shared memory is free at once: they wait for room in order, and large ones go in parts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.dtype import DType
from accel.engine.op_error import op_error
from accel.engine.submission import BatchSubmission
from accel.errors import AccelError
from accel.ops import Empty, Get, Put
from accel.ref import RefView
from accel.remote.arrays import COPIED_HERE, CopyBack
from accel.remote.pending_request import array_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.engine.launches import OpSubmission
    from accel.engine.submission import Submission
    from accel.memory import Block
    from accel.ops import KernelOp, Plan
    from accel.ref import AccelRef
    from accel.remote.arrays import SharedArray, SharedArrays
    from accel.remote.requests import RequestContext

__all__ = ["MOST_OPS", "ArrayTransfers"]

MOST_OPS = 512
"""Ops of a batch that go in one message: more would keep the loop, here and there, for longer than a few milliseconds."""

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Answer = asyncio.Future["AccelError | None"]


class ArrayTransfers:
    """Sends ops with arrays, and long batches, to one child.

    A transfer holds shared memory only while it copies, or while the child does: it never waits for room with a part that only it can give back. So any
    number of them share any limit, and each gets on when its turn comes.

    Parameters
    ----------
    context
        Of the child.
    arrays
        What shared memory it knows.
    """

    def __init__(self, context: RequestContext, arrays: SharedArrays) -> None:
        self._context = context
        self._arrays = arrays
        self._pinned = context.core.pinned
        self._run_blocking = context.core.system.run_blocking
        self._over: asyncio.Future[None] = context.core.loop.create_future()

    def end(self) -> None:
        """Let go of what waits: the context is over."""
        if not self._over.done():
            self._over.set_result(None)

    async def send(self, submission: OpSubmission) -> None:
        """Send an op that has an array: as a whole, once there is room for it, else part by part. Returns when it is sent, and its last part answered."""
        context, op, plan = self._context, submission.op, submission.plan
        array = array_of(op)
        assert plan is not None, "an op that is not dispatched has its plan"
        assert array is not None, "other ops need no room"
        outgoing = self._arrays.take(array)
        if outgoing is None:
            piece = await self._room(array.nbytes, submission)
            if piece is None:
                return
            if piece.nbytes < array.nbytes:
                await self._in_parts(submission, 0, op, plan, piece)
                return
            outgoing = self._arrays.within(piece, array)
        if type(op) is Put:
            await self._fill(outgoing)
        if submission.is_settled:
            outgoing.close()  # the child has never heard of it
        else:
            context.send_op(submission, plan, outgoing)

    def placed(self, ops: Sequence[KernelOp]) -> dict[int, SharedArray] | None:
        """Return places for the arrays of a batch, filled, by the index of the op; ``None`` if one has to wait for room, or they are large."""
        with contextlib.ExitStack() as undo:
            arrays: dict[int, SharedArray] = {}
            nbytes = 0
            for index, op in enumerate(ops):
                array = array_of(op)
                if array is None:
                    continue
                outgoing = self._arrays.take(array)
                if outgoing is None:
                    return None
                undo.callback(outgoing.close)
                arrays[index] = outgoing
                nbytes += array.nbytes if outgoing.is_copied and type(op) is Put else 0
                if nbytes > COPIED_HERE:
                    return None
            for index, outgoing in arrays.items():
                if type(ops[index]) is Put:
                    outgoing.fill()
            undo.pop_all()
        return arrays

    async def send_batch(self, submission: BatchSubmission) -> None:
        """Send a batch, a part of it after the other has ended: then the first op that fails is the last one that the child has seen."""
        context, ops = self._context, submission.ops
        limit = context.core.options.max_in_flight
        while (start := submission.sent) < len(ops):
            end = min(start + MOST_OPS, len(ops))
            if start:
                await context.until(lambda: not submission.outstanding)
            await context.wait_for_room(min(end - start, limit))
            arrays: dict[int, SharedArray] = {}
            try:
                end = await self._place(submission, ops, start, end, arrays)
                if submission.is_settled:
                    submission.void(max(start, submission.sound))
                    break
                if end > start:
                    context.send_batch(submission, ops[start:end], arrays)
            except AccelError as error:
                if error.op_index is None:
                    error.op_index = start
                raise
            finally:
                for index, outgoing in arrays.items():
                    if index >= submission.sent:
                        outgoing.close()

    async def _place(
        self, submission: BatchSubmission, ops: Sequence[KernelOp], start: int, end: int, arrays: dict[int, SharedArray]
    ) -> int:
        """Find places for the arrays of a batch, and fill them; return before which op there is no room until what is before it has ended."""
        for index in range(start, end):
            array = array_of(ops[index])
            if array is None:
                continue
            outgoing = self._arrays.take(array)
            if outgoing is None:
                if index > start:
                    return index
                piece = await self._room(array.nbytes, submission)
                if piece is None:
                    return index
                if piece.nbytes < array.nbytes:
                    submission.sent += 1
                    await self._in_parts(submission, index, ops[index], submission.plans[index], piece)
                    return index
                outgoing = self._arrays.within(piece, array)
            if type(ops[index]) is Put:
                await self._fill(outgoing)
            arrays[index] = outgoing
        return end

    async def _fill(self, outgoing: SharedArray) -> None:
        """Copy an array into shared memory, off the loop. If the context is over then, give the memory back and raise that."""
        try:
            await self._run_blocking(outgoing.fill)
            self._context.check_alive()
        except Exception:  # not where this is cancelled: then it is still being written
            outgoing.close()
            raise

    async def _room(self, nbytes: int, submission: Submission) -> Block | None:
        """Return room for an array, or for a part of it, in this call's turn; ``None`` if its caller has gone before it was begun."""
        context, is_begun = self._context, submission.outstanding > 0  # else an op of a batch before this one may have ended
        core = context.core
        waiting = core.loop.create_task(self._pinned.room(nbytes, context.check_alive))
        core.workload.in_hand += not is_begun
        try:
            ends: list[asyncio.Future[Any]] = [waiting, self._over]
            await asyncio.wait(ends if is_begun else [*ends, submission.future], return_when=asyncio.FIRST_COMPLETED)
            if waiting.done() and context.fault is None:
                return waiting.result()
            if waiting.done() and waiting.exception() is None:  # the fault came in the same turn of the loop
                self._pinned.arena.free(waiting.result())
            context.check_alive()
            return None
        finally:
            core.workload.in_hand -= not is_begun
            if not waiting.done():
                waiting.cancel()

    # -- parts

    async def _in_parts(self, submission: Submission, index: int, op: KernelOp, plan: Plan, piece: Block) -> None:
        """Move the array of op ``index`` part by part, beginning with the room there is, and answer for the op."""
        context, array = self._context, array_of(op)
        assert array is not None, "other ops have no parts"
        if submission.is_settled:
            self._pinned.arena.free(piece)
            return
        made = context.make(submission, index, op, plan)
        whole = (*plan.reads, *plan.writes, *made)[0]
        number = context.begin(submission, plan, made)
        transfer = _ArrayTransfer(context, submission, array, whole, context.action(op.kind))
        failed: AccelError | None = None
        try:
            if made:
                transfer.send(Empty(made[0].shape, made[0].dtype, made[0].durable), [whole.buffer])
            failed = await (self._put(transfer, piece) if type(op) is Put else self._get(transfer, piece))
            is_torn = transfer.sent > 1  # the child looks after a first part that fails there
        except Exception as error:  # also a shortage of threads: what was begun is to be ended here
            failed = op_error(error, f"sending {op.kind}", context.core.loop).with_traceback(None)  # its frames hold the transfer
            await transfer.answered()
            is_torn = transfer.sent > 0
        finally:
            context.end_parts(number)
        context.check_alive()  # after a fault every submission is told of that
        if failed is not None:
            if is_torn and type(op) is Put:
                context.core.durable.torn((whole.buffer,), "a put of its contents in parts failed halfway")
            failed = failed.clone(op=op.kind, device=context.core.name, generation=context.generation)
            failed.op_index = index if isinstance(submission, BatchSubmission) else None
            submission.reject_from(index, failed)
        context.over(submission, 1, is_last=index + 1 == len(submission.kinds))
        self._pinned.trim()

    async def _put(self, transfer: _ArrayTransfer, piece: Block) -> AccelError | None:
        """Send all parts of an array: the next is copied here while the child copies the last. Return what went wrong there."""
        while True:
            outgoing = self._arrays.within(piece, transfer.part(piece))
            await self._fill(outgoing)
            if (error := await transfer.answered()) is not None:
                outgoing.close()
                return error
            transfer.send(Put(outgoing.array, transfer.view(outgoing)), [], outgoing)
            if not transfer.left:
                return await transfer.answered()
            piece = await self._next(transfer)

    async def _get(self, transfer: _ArrayTransfer, first: Block) -> AccelError | None:
        """Fetch all parts of an array: the next is on its way while the last is copied here, if there is room for both. Return what went wrong there."""
        piece: Block | None = first
        landing: tuple[_Answer, SharedArray] | None = None
        error: AccelError | None = None
        try:
            while transfer.left and error is None and not transfer.submission.is_settled:
                piece = piece or self._pinned.take(min(transfer.left, self._pinned.part))
                if piece is None:  # with the last part in hand it would wait for itself
                    landed, landing = landing, None
                    error = await self._land(landed)
                    if error is not None:
                        break
                    piece = await self._next(transfer)
                outgoing, piece = self._arrays.within(piece, transfer.part(piece)), None
                sent = transfer.send(Get(transfer.view(outgoing), outgoing.array), [], outgoing), outgoing
                landed, landing = landing, sent
                error = await self._land(landed)
        except BaseException:
            if landing is not None and landing[0].done() and landing[0].result() is None:
                landing[1].close()  # it has come; of one that has not, the child may still write the memory
            raise
        return await self._land(landing) or error

    async def _land(self, sent: tuple[_Answer, SharedArray] | None) -> AccelError | None:
        """Copy a part out of shared memory when it has come, off the loop, and give that back; return what went wrong."""
        if sent is None:
            return None
        error = await sent[0]
        if error is None:
            landing = CopyBack(sent[1:])
            try:
                await self._run_blocking(landing.copy)
            except BaseException:
                landing.give_up()
                raise
        return error

    async def _next(self, transfer: _ArrayTransfer) -> Block:
        piece = await self._room(transfer.left, transfer.submission)
        assert piece is not None, "what was begun is not given up"
        return piece


class _ArrayTransfer:
    """An array that moves part by part.

    Attributes
    ----------
    submission
        Whose it is.
    left
        Bytes that were not sent yet.
    sent
        How many parts were.
    """

    def __init__(
        self, context: RequestContext, submission: Submission, array: np.ndarray[Any, Any], ref: AccelRef, action: bytes | str | None
    ) -> None:
        self.submission = submission
        self.left = array.nbytes
        self.sent = 0
        self._context = context
        self._bytes: _Bytes = array.reshape(-1).view(np.uint8)
        self._ref = ref
        self._action = action
        self._answer: _Answer | None = None

    def part(self, piece: Block) -> _Bytes:
        """Return what comes next of the array, as far as there is room for it."""
        start = len(self._bytes) - self.left
        return self._bytes[start : start + piece.nbytes]

    def view(self, outgoing: SharedArray) -> RefView:
        """Return the same part of the buffer."""
        return RefView(self._ref, self._ref.offset + len(self._bytes) - self.left, outgoing.place.shape, DType.UINT8)

    def send(self, op: KernelOp, made: list[int], outgoing: SharedArray | None = None) -> _Answer:
        """Send a step; the fault plan's action comes with the first."""
        action, self._action = self._action, None
        self._answer = self._context.send_part(self.submission, op, made, outgoing, action)
        if outgoing is not None:
            self.left -= outgoing.array.nbytes
            self.sent += 1
        return self._answer

    async def answered(self) -> AccelError | None:
        """Wait for the end of the last step; return what went wrong with it."""
        answer, self._answer = self._answer, None
        return None if answer is None else await answer
