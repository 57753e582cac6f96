"""Host arrays that wait for shared memory, in order, and large ones, which move in chunks."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.dtype import DType
from accel.engine.op_error import op_error
from accel.engine.submission import BatchSubmission
from accel.errors import AccelError
from accel.ops import Empty, Get, Put
from accel.ref import RefView
from accel.remote.arrays import MAX_INLINE_COPY, host_array_of, release_all, release_from

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.engine.launches import OpSubmission
    from accel.engine.submission import Submission
    from accel.memory import Block
    from accel.ops import KernelOp, Plan
    from accel.remote.arrays import SharedArray, SharedArrays
    from accel.remote.pending_request import PendingRequest
    from accel.remote.requests import RequestContext

__all__ = ["MAX_MESSAGE_OPS", "ArrayTransfers"]

MAX_MESSAGE_OPS = 512
"""Ops of a batch in one message: more would occupy the loop for longer than a few milliseconds."""


class ArrayTransfers:
    """Sends submissions that cannot be sent at once to a child: ops with arrays, and long batches.

    Each message of a submission follows the answer to the one before: so the first op that fails is
    the last one that the child has seen. The arrays of the next message of a batch are copied
    meanwhile. An array that is larger than the largest chunk of shared memory moves as several ops,
    one message each, under the index of its own op.

    A transfer holds shared memory only while it copies, or while the child does. It never waits for
    room while it holds some, so any number of transfers can share any limit.

    Parameters
    ----------
    context
        The context in the child.
    arrays
        Places for arrays in memory that the child maps.
    """

    def __init__(self, context: RequestContext, arrays: SharedArrays) -> None:
        self._context = context
        self._arrays = arrays
        self._pinned = context.core.pinned
        self._run_blocking = context.core.system.run_blocking
        self._context_over: asyncio.Future[None] = context.core.loop.create_future()

    def on_context_over(self) -> None:
        """Wake the transfers that wait for shared memory: the context has faulted or was closed."""
        if not self._context_over.done():
            self._context_over.set_result(None)

    async def send(self, submission: OpSubmission) -> None:
        """Send an op with an array once there is room; wait for its end if it moves in chunks.

        If the submission's future ends meanwhile, nothing is sent.
        """
        plan = submission.plan
        assert plan is not None, "an op that is not dispatched has its plan"
        array = host_array_of(submission.op)
        assert array is not None, "other ops need no room"
        shared = await self._place_array(submission, 0, submission.op, plan, self._arrays.allocate(array))
        if shared is None:  # nothing is left to send
            return
        if submission.future.done():
            shared.close()
        else:
            self._context.send_op(submission, plan, shared)

    async def send_batch(self, submission: BatchSubmission) -> None:
        """Send the ops of a batch that are not sent yet, one message after the other.

        If its future ends, free the results of those that are left. An error that is raised has the
        index of its op.
        """
        context, ops = self._context, submission.ops
        limit = context.core.options.max_in_flight
        while (start := submission.dispatched) < len(ops):
            arrays: dict[int, SharedArray] = {}
            try:
                # Copy the next arrays while the child still runs the message before.
                end = await self._fill_next_message(submission, ops, start, arrays)
                await context.wait_answered(submission)
                commands = min(end - start, limit)
                if not context.has_room(commands):
                    # Ops in chunks may have that room, and wait for the memory that this holds.
                    release_all(arrays.values())
                    await context.wait_for_room(commands)
                    continue
                if submission.future.done():
                    submission.free_results_from(max(start, submission.committed))
                    break
                if end > start:
                    context.send_batch(submission, ops[start:end], arrays)
            except AccelError as error:
                if error.op_index is None:  # no op of this message was sent
                    error.op_index = start
                raise
            finally:
                release_from(arrays, submission.dispatched)  # copied and not sent, because of an error or a full message

    async def _fill_next_message(
        self, submission: BatchSubmission, ops: Sequence[KernelOp], start: int, arrays: dict[int, SharedArray]
    ) -> int:
        """Choose the ops of the next message of a batch; return the index after the last of them.

        Adds the shared memory of each array to ``arrays`` at once, by the op's index, so that
        :meth:`send_batch` can free it if this raises. The array of a put is copied there. If the
        array of the first op moves in chunks here, or the submission's future ends, this returns
        ``start``: there is no message to send. If that op has moved, ``submission.dispatched`` was
        raised by one, so the next message begins behind it.
        """
        held, end = 0, min(start + MAX_MESSAGE_OPS, len(ops))  # held: bytes of the arena
        for index in range(start, end):
            array = host_array_of(ops[index])
            if array is None:
                continue
            # A message takes about one chunk: the child runs it while the next one's arrays are
            # copied. Only the first op waits for room, because a transfer that waits holds none.
            shared = self._arrays.allocate(array) if index == start or held < self._pinned.max_chunk else None
            if shared is None and index > start:
                return index
            try:
                shared = await self._place_array(submission, index, ops[index], submission.plans[index], shared)
            except AccelError:
                if index > start:  # the ops before it still run; the next message begins with it, and tries again
                    return index
                raise
            if shared is None:
                return index
            if shared.holds_piece:  # a pinned array takes no more of the arena
                held += array.nbytes
            arrays[index] = shared
        return end

    async def _place_array(
        self, submission: Submission, index: int, op: KernelOp, plan: Plan, shared: SharedArray | None
    ) -> SharedArray | None:
        """Return the place of the array of op ``index``, to which a put's array is copied.

        The place is ``shared``, or without that a new one, for which this waits. ``None`` if
        nothing is left to send: the submission's future has ended; or the array is larger than a
        chunk, and has moved in chunks here, which ends the op.
        """
        array = host_array_of(op)
        assert array is not None, "other ops need no room"
        if shared is None:
            workload = self._context.core.workload
            workload.in_hand += 1  # a transfer counts as queued until it has memory
            try:
                piece = await self._wait_piece(array.nbytes, submission.future)
            finally:
                workload.in_hand -= 1
            if piece is None:
                return None
            if piece.nbytes < array.nbytes:
                await self._move_in_chunks(submission, index, op, plan, piece)
                return None
            shared = self._arrays.in_piece(piece, array)
        await self._copy_source(op, shared)
        return shared

    async def _copy_source(self, op: KernelOp, shared: SharedArray) -> None:
        """Copy the array of a put into its place, a large one off the loop; do nothing for a get.

        If that fails, or the context has faulted meanwhile, free the place and raise.
        """
        if type(op) is not Put:
            return
        try:
            if not shared.is_copied or shared.array.nbytes <= MAX_INLINE_COPY:
                shared.copy_in()
            else:
                await self._run_blocking(shared.copy_in)
            self._context.check_alive()
        except Exception:  # not if this is cancelled: the copy goes on then
            shared.close()
            raise

    async def _wait_piece(self, nbytes: int, *given_up: asyncio.Future[Any]) -> Block | None:
        """Wait in turn for a piece of shared memory for an array, or for a chunk of it.

        The caller frees the piece, which may be smaller than ``nbytes``. ``None`` if a future of
        ``given_up`` ends before. Raises the fault of the context.
        """
        context = self._context
        waiting = context.core.loop.create_task(self._pinned.wait_chunk(nbytes, context.check_alive))
        ends: list[asyncio.Future[Any]] = [waiting, self._context_over, *given_up]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done() and context.fault is None:
                return waiting.result()
            if waiting.done() and waiting.exception() is None:  # with a fault in the same iteration
                self._pinned.arena.free(waiting.result())
            context.check_alive()
            return None
        finally:
            if not waiting.done():
                waiting.cancel()

    # -- chunks

    async def _move_in_chunks(self, submission: Submission, index: int, op: KernelOp, plan: Plan, piece: Block) -> None:
        """Move the array of op ``index`` in chunks, the first through ``piece``, and end the op.

        Each chunk is a put to a view of the whole buffer, or a get of one. Two are on their way at
        most, so the array takes the shared memory of two chunks. An error after the first chunk was
        begun ends the op, and is not raised. If the submission's future ends before that, only
        ``piece`` is freed.
        """
        context, array, is_put = self._context, host_array_of(op), type(op) is Put
        assert array is not None, "other ops have no chunks"
        flat: np.ndarray[Any, Any] = array.reshape(-1).view(np.uint8)
        # Begin only when the messages before are answered, unless the future has ended by then.
        try:
            await context.wait_answered(submission)
            if submission.future.done():
                self._pinned.arena.free(piece)
                return
            result_refs = context.make_results(submission, index, plan)
            fault_action = context.take_fault_action(op.kind)
        except BaseException:
            self._pinned.arena.free(piece)
            raise
        if isinstance(submission, BatchSubmission):
            submission.dispatched += 1
        whole = (*plan.reads, *plan.writes, *result_refs)[0]
        context.begin_chunked(submission)
        # The first message makes the whole buffer, too, and carries the fault plan's action.
        making = [Empty(ref.shape, ref.dtype, ref.durable) for ref in result_refs]
        sent: deque[PendingRequest] = deque()  # chunks that were not answered yet
        errors: list[AccelError | None] = []  # of those that were; None: it has moved
        begun = 0  # bytes of the array for which a chunk was sent
        try:
            # A put that has begun goes on without its caller: else the buffer would be torn.
            while not any(errors) and begun < flat.nbytes and (is_put or not submission.future.done()):
                if begun:
                    next_piece = await self._wait_piece(flat.nbytes - begun)
                    assert next_piece is not None, "a transfer that has begun is not given up"
                    piece = next_piece
                shared = self._arrays.in_piece(piece, flat[begun : begun + piece.nbytes])
                view = RefView(whole, whole.offset + begun, shared.place.shape, DType.UINT8)
                step = Put(shared.array, view) if is_put else Get(view, shared.array)
                await self._copy_source(step, shared)
                result_ids = [[ref.buffer] for ref in result_refs if not begun]
                sent.append(context.send_chunk(submission, [*making, step], [*result_ids, []], shared, fault_action))
                fault_action, making = None, []
                begun += shared.array.nbytes
                # Two chunks may be in flight; but if the first one makes the buffer, it is answered
                # before the second is sent.
                errors += await self._wait_chunks(sent, most=1 if errors or not result_refs else 0)
            errors += await self._wait_chunks(sent, most=0)
        except Exception as error:  # such as a shortage of threads
            # Its frames hold the array.
            errors.append(op_error(error, f"sending {op.kind}", context.core.loop).with_traceback(None))
            with contextlib.suppress(AccelError):  # of the context: nothing uses the array any more
                await self._wait_chunks(sent, most=0)
        failed = next(filter(None, errors), None)
        if failed is not None:
            if None in errors and is_put:
                context.core.durable.tear((whole.buffer,), "a put of its contents in chunks failed halfway")
            failed = failed.clone(op=op.kind, device=context.core.name, generation=context.generation)
            failed.op_index = index if isinstance(submission, BatchSubmission) else None
            submission.reject_from(index, failed)
        context.retire_ops(submission, 1)
        self._pinned.trim()

    async def _wait_chunks(self, sent: deque[PendingRequest], *, most: int) -> list[AccelError | None]:
        """Wait until at most ``most`` chunks have no answer, and remove the others from ``sent``.

        Return their errors, the oldest first; ``None`` for a chunk that has moved.
        """
        errors = []
        while len(sent) > most:
            await self._context.wait_done(sent[0])
            errors.append(sent.popleft().error)
        return errors
