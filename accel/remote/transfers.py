"""Host arrays for which no shared memory is free at once: they wait for room in order, and large ones move in pieces."""

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
from accel.remote.arrays import COPIED_HERE
from accel.remote.pending_request import array_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.engine.launches import OpSubmission
    from accel.engine.submission import Submission
    from accel.memory import Block
    from accel.ops import KernelOp, Plan
    from accel.remote.arrays import SharedArray, SharedArrays
    from accel.remote.pending_request import PendingRequest
    from accel.remote.requests import RequestContext

__all__ = ["MOST_OPS", "ArrayTransfers"]

MOST_OPS = 512
"""Ops of a batch that go in one message: more would keep the loop, here and there, for longer than a few milliseconds."""


class ArrayTransfers:
    """Sends ops with arrays, and long batches, to one child.

    Each message of a submission follows the answer to the one before: so the first op that fails is the last one that the child
    has seen. The arrays of the next message are copied meanwhile. An array that is larger than the largest piece of shared
    memory moves as several ops, one message each, under the index of its own op.

    A transfer holds shared memory only while it copies, or while the child does: it never waits for room with a piece that only
    it can give back. So any number of them share any limit, and each gets on when its turn comes.

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
        """Send an op that has an array, once there is room for it. Returns when it is sent; one in pieces, when it has ended."""
        plan = submission.plan
        assert plan is not None, "an op that is not dispatched has its plan"
        outgoing = await self._place(submission, 0, submission.op, plan)
        if outgoing is None:
            return
        if submission.is_settled:
            outgoing.close()  # the child has never heard of it
        else:
            self._context.send_op(submission, plan, outgoing)

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
        """Send what was not sent yet of a batch."""
        context, ops = self._context, submission.ops
        limit = context.core.options.max_in_flight
        while (start := submission.sent) < len(ops):
            arrays: dict[int, SharedArray] = {}
            try:
                end = await self._gather(submission, ops, start, arrays)
                await context.until_answered(submission)
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
        """Find places for the arrays of the next message, and fill them; return before which op it ends."""
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
        """Return a place for the array of op ``index``, filled. ``None`` if its caller has gone, or it has moved in pieces."""
        array = array_of(op)
        assert array is not None, "other ops need no room"
        outgoing = self._arrays.take(array)
        if outgoing is None:
            piece = await self._room(array.nbytes, submission)
            if piece is None:
                return None
            if piece.nbytes < array.nbytes:
                await self._in_pieces(submission, index, op, plan, piece)
                return None
            outgoing = self._arrays.within(piece, array)
        await self._fill(op, outgoing)
        return outgoing

    async def _fill(self, op: KernelOp, outgoing: SharedArray) -> None:
        """Copy the array of a put into shared memory, off the loop. If the context is over then, give that back and raise."""
        if type(op) is not Put:
            return
        try:
            await self._run_blocking(outgoing.fill)
            self._context.check_alive()
        except Exception:  # not where this is cancelled: then it is still being written
            outgoing.close()
            raise

    async def _room(self, nbytes: int, submission: Submission, *, is_begun: bool = False) -> Block | None:
        """Return room for an array, or for a piece of it, in this call's turn; ``None`` if its caller has gone before it was begun."""
        context, core = self._context, self._context.core
        waiting = core.loop.create_task(self._pinned.wait_part(nbytes, context.check_alive))
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

    # -- pieces

    async def _in_pieces(self, submission: Submission, index: int, op: KernelOp, plan: Plan, piece: Block) -> None:
        """Move the array of op ``index`` in pieces, beginning with the room there is, and answer for the op."""
        context, array, is_put = self._context, array_of(op), type(op) is Put
        assert array is not None, "other ops have no pieces"
        flat: np.ndarray[Any, Any] = array.reshape(-1).view(np.uint8)
        try:
            await context.until_answered(submission)
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
        last: PendingRequest | None = None
        failed: AccelError | None = None
        start = count = 0
        try:
            while start < flat.nbytes:
                if start:
                    piece = await self._next(flat.nbytes - start, submission)
                outgoing = self._arrays.within(piece, flat[start : start + piece.nbytes])
                part = RefView(whole, whole.offset + start, outgoing.place.shape, DType.UINT8)
                step = Put(outgoing.array, part) if is_put else Get(part, outgoing.array)
                await self._fill(step, outgoing)
                if not await self._may_go_on(submission, last, outgoing, is_put=is_put):
                    break
                ids = [[ref.buffer] for ref in made if not start]
                last = context.send_piece(submission, [*first, step], [*ids, []], outgoing, action)
                action, first, start, count = None, [], start + outgoing.array.nbytes, count + 1
            await context.until_over(last)
            failed = None if last is None else last.error
            is_torn = count > 1  # the child looks after a first piece that fails there
        except Exception as error:  # also a shortage of threads: what was begun is to be ended here
            failed = op_error(error, f"sending {op.kind}", context.core.loop).with_traceback(None)  # its frames hold the array
            await context.until_over(last)  # after a fault every submission is told of that
            is_torn = count > 0
        if failed is not None:
            if is_torn and is_put:
                context.core.durable.tear((whole.buffer,), "a put of its contents in pieces failed halfway")
            failed = failed.clone(op=op.kind, device=context.core.name, generation=context.generation)
            failed.op_index = index if isinstance(submission, BatchSubmission) else None
            submission.reject_from(index, failed)
        context.over(submission, 1)
        self._pinned.trim()

    async def _next(self, nbytes: int, submission: Submission) -> Block:
        piece = await self._room(nbytes, submission, is_begun=True)
        assert piece is not None, "what was begun is not given up"
        return piece

    async def _may_go_on(self, submission: Submission, last: PendingRequest | None, outgoing: SharedArray, *, is_put: bool) -> bool:
        """Wait for the answer to the last piece, and return whether the next one is sent: a put that was begun ends, a get need not."""
        goes_on = False
        try:
            if last is not None:
                await self._context.until(lambda: last.is_answered)
            goes_on = (last is None or last.error is None) and (is_put or not submission.is_settled)
        finally:
            if not goes_on:
                outgoing.close()
        return goes_on
