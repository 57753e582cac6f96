"""Host arrays that wait for shared memory, in order, and large ones, which move in pieces."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.dtype import DType
from accel.engine.op_error import op_error
from accel.engine.submission import BatchSubmission
from accel.errors import AccelError
from accel.ops import Empty, Get, Put
from accel.ref import RefView
from accel.remote.arrays import COPIED_HERE
from accel.remote.pending_request import array_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.engine.launches import OpSubmission
    from accel.engine.submission import Submission
    from accel.memory import Block
    from accel.ops import KernelOp, Plan
    from accel.remote.arrays import SharedArray, SharedArrays
    from accel.remote.requests import RequestContext

__all__ = ["MOST_OPS", "ArrayTransfers"]

MOST_OPS = 512
"""Ops of a batch in one message: more would occupy the loop for longer than a few milliseconds."""


class ArrayTransfers:
    """Sends ops with arrays, and long batches, to one child.

    Each message of a submission follows the answer to the one before: so the first op that fails is
    the last one that the child has seen. The arrays of the next message of a batch are copied
    meanwhile. An array that is larger than the largest piece of shared memory moves as several ops,
    one message each, under the index of its own op.

    A transfer holds shared memory only while it copies, or while the child does. It never waits for
    room while it holds some, so any number of transfers can share any limit.

    Parameters
    ----------
    context
        The context in the child.
    arrays
        The shared memory that the child has.
    """

    def __init__(self, context: RequestContext, arrays: SharedArrays) -> None:
        self._context = context
        self._arrays = arrays
        self._pinned = context.core.pinned
        self._run_blocking = context.core.system.run_blocking
        self._over: asyncio.Future[None] = context.core.loop.create_future()

    def end(self) -> None:
        """Wake what waits for room: the context is over."""
        if not self._over.done():
            self._over.set_result(None)

    async def send(self, submission: OpSubmission) -> None:
        """Send an op with an array once there is room; if it moves in pieces, wait for its end."""
        plan = submission.plan
        assert plan is not None, "an op that is not dispatched has its plan"
        outgoing = await self._place(submission, 0, submission.op, plan)
        if outgoing is None:
            return
        if submission.is_settled:
            outgoing.close()
        else:
            self._context.send_op(submission, plan, outgoing)

    async def send_batch(self, submission: BatchSubmission) -> None:
        """Send the rest of a batch."""
        context, ops = self._context, submission.ops
        limit = context.core.options.max_in_flight
        while (start := submission.sent) < len(ops):
            arrays: dict[int, SharedArray] = {}
            try:
                end = await self._gather(submission, ops, start, arrays)
                await context.wait_answered(submission)
                await context.wait_for_room(min(end - start, limit))
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

    async def _gather(self, submission: BatchSubmission, ops: Sequence[KernelOp], start: int, arrays: dict[int, SharedArray]) -> int:
        """Fill places for the arrays of the next message; return the index behind its last op."""
        copied, end = 0, min(start + MOST_OPS, len(ops))
        for index in range(start, end):
            array = array_of(ops[index])
            if array is None:
                continue
            if index > start and (copied >= self._pinned.part or not self._arrays.has_place(array)):
                return index
            outgoing = await self._place(submission, index, ops[index], submission.plans[index])
            if outgoing is None:
                return index
            copied += array.nbytes * outgoing.is_copied
            arrays[index] = outgoing
        return end

    async def _place(self, submission: Submission, index: int, op: KernelOp, plan: Plan) -> SharedArray | None:
        """Return a filled place for the array of op ``index``.

        ``None`` if its caller has gone, or the array has moved in pieces.
        """
        array = array_of(op)
        assert array is not None, "other ops need no room"
        outgoing = self._arrays.take(array)
        if outgoing is None:
            piece = await self._wait_room(array.nbytes, submission)
            if piece is None:
                return None
            if piece.nbytes < array.nbytes:
                await self._in_pieces(submission, index, op, plan, piece)
                return None
            outgoing = self._arrays.within(piece, array)
        await self._fill(op, outgoing)
        return outgoing

    async def _fill(self, op: KernelOp, outgoing: SharedArray) -> None:
        """Copy the array of a put into shared memory, off the loop. If this raises, free that."""
        if type(op) is not Put:
            return
        try:
            if not outgoing.is_copied or outgoing.array.nbytes <= COPIED_HERE:
                outgoing.fill()
            else:
                await self._run_blocking(outgoing.fill)
            self._context.check_alive()
        except Exception:  # not if this is cancelled: the copy goes on then
            outgoing.close()
            raise

    async def _wait_room(self, nbytes: int, submission: Submission, *, is_begun: bool = False) -> Block | None:
        """Wait for room for an array or a piece of it, in order, and return it.

        ``None`` if the caller has gone before the transfer has begun.
        """
        context, core = self._context, self._context.core
        waiting = core.loop.create_task(self._pinned.wait_part(nbytes, context.check_alive))
        core.workload.in_hand += not is_begun
        try:
            ends: list[asyncio.Future[Any]] = [waiting, self._over]
            await asyncio.wait(ends if is_begun else [*ends, submission.future], return_when=asyncio.FIRST_COMPLETED)
            if waiting.done() and context.fault is None:
                return waiting.result()
            if waiting.done() and waiting.exception() is None:  # with a fault in the same iteration
                self._pinned.arena.free(waiting.result())
            context.check_alive()
            return None
        finally:
            core.workload.in_hand -= not is_begun
            if not waiting.done():
                waiting.cancel()

    # -- pieces

    async def _in_pieces(self, submission: Submission, index: int, op: KernelOp, plan: Plan, piece: Block) -> None:
        """Move the array of op ``index`` in pieces, the first through ``piece``; settle the op."""
        context, array, is_put = self._context, array_of(op), type(op) is Put
        assert array is not None, "other ops have no pieces"
        flat: np.ndarray[Any, Any] = array.reshape(-1).view(np.uint8)
        try:
            await context.wait_answered(submission)
            made = () if submission.is_settled else context.make(submission, index, plan)
        except BaseException:
            self._pinned.arena.free(piece)
            raise
        if submission.is_settled:
            self._pinned.arena.free(piece)
            return
        if isinstance(submission, BatchSubmission):
            submission.sent += 1
        whole = (*plan.reads, *plan.writes, *made)[0]
        context.begin(submission)
        action, first = context.action(op.kind), [Empty(ref.shape, ref.dtype, ref.durable) for ref in made]
        failed: AccelError | None = None
        moved = 0
        try:
            # A put that has begun goes on without its caller: else the buffer would be torn.
            while failed is None and moved < flat.nbytes and (is_put or not submission.is_settled):
                if moved:
                    piece = await self._wait_next(flat.nbytes - moved, submission)
                outgoing = self._arrays.within(piece, flat[moved : moved + piece.nbytes])
                part = RefView(whole, whole.offset + moved, outgoing.place.shape, DType.UINT8)
                step = Put(outgoing.array, part) if is_put else Get(part, outgoing.array)
                await self._fill(step, outgoing)
                ids = [[ref.buffer] for ref in made if not moved]
                request = context.send_piece(submission, [*first, step], [*ids, []], outgoing, action)
                action, first = None, []
                await context.wait_over(request)
                failed = request.error
                moved += 0 if failed else outgoing.array.nbytes
        except Exception as error:  # such as a shortage of threads
            # Its frames hold the array.
            failed = op_error(error, f"sending {op.kind}", context.core.loop).with_traceback(None)
        if failed is not None:
            if moved and is_put:
                context.core.durable.tear((whole.buffer,), "a put of its contents in pieces failed halfway")
            failed = failed.clone(op=op.kind, device=context.core.name, generation=context.generation)
            failed.op_index = index if isinstance(submission, BatchSubmission) else None
            submission.reject_from(index, failed)
        context.over(submission, 1)
        self._pinned.trim()

    async def _wait_next(self, nbytes: int, submission: Submission) -> Block:
        piece = await self._wait_room(nbytes, submission, is_begun=True)
        assert piece is not None, "a transfer that has begun is not given up"
        return piece
