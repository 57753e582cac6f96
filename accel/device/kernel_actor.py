"""The kernel actor: owns one library's kernels and one lane, and enqueues that library's ops in the device's order."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from accel._log import get_logger
from accel.actors import Actor, ActorContext
from accel.backend import Injection
from accel.device.lane import Mark, prediction_key
from accel.errors import AccelError, LibraryError

if TYPE_CHECKING:
    from accel.device.context import Context
    from accel.device.lane import Lane
    from accel.device.run import Launch, Run
    from accel.memory import Timeline

__all__ = ["KernelActor"]

logger = get_logger()


class KernelActor(Actor["Run", None]):
    """Enqueues runs into a lane, and marks their ends.

    What goes wrong with an op is its caller's business and is answered there; the actor goes on with the next run. A fault is the context's
    business and is reported there.

    Parameters
    ----------
    context
        The context that it belongs to; it ends with it.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, context: Context) -> None:
        self._context = context
        self._debug = context.core.options.debug

    async def receive(self, message: Run, context: ActorContext) -> None:
        """Enqueue one run."""
        lane = message.lane
        if message.after is not None:
            await self._after(*message.after)
        for launch in message.launches:
            if lane.enqueued != launch.seq - 1:
                await lane.reached(launch.seq - 1)
            try:
                # Also for an op that is dropped below: whoever comes after it on this lane relies on its place in line.
                for other, seq in launch.dependencies:
                    await self._depend(lane, other, seq)
                self._launch(launch, message)
                if self._debug:
                    await self._synchronize(launch, message)
            finally:
                lane.advance(launch.seq)
        if message.retires and self._context.fault is None:
            for other, seq in message.join:
                await self._depend(lane, other, seq)
            self._mark(message)

    def _launch(self, launch: Launch, run: Run) -> None:
        """Bring one op to the stream, unless nobody waits for it any more."""
        submission, lane = run.submission, run.lane
        if submission.is_dropped(launch.index) or self._context.fault is not None:
            submission.void(launch.index)
            return
        try:
            if launch.action is not None:
                self._act(launch.action, lane)
            launch.kernel(lane, launch.op, launch.inputs, launch.outputs)
            submission.launched += 1
        except AccelError as error:
            self._failed(error, launch, run)
        except Exception as error:  # a kernel's bug ends its op, not the device
            wrapped = LibraryError(f"the {launch.op.kind} kernel raised {type(error).__name__}: {error}", library=launch.op.library)
            wrapped.__cause__ = error
            self._failed(wrapped, launch, run)
        finally:
            # The traceback of a kernel's bug holds this frame, and the submission's future would hold the bug.
            del submission, run

    async def _synchronize(self, launch: Launch, run: Run) -> None:
        """Wait until an op has ended, so that its error bears its name."""
        try:
            await self._context.core.system.run_blocking(run.lane.stream.synchronize)
        except AccelError as error:
            self._failed(error, launch, run)

    def _failed(self, error: AccelError, launch: Launch, run: Run) -> None:
        submission, core = run.submission, self._context.core
        if error.is_fault:
            submission.launched += 1  # it may have reached the device
            self._context.report_fault(error.clone(op=error.op or launch.op.kind))
            return
        own = error.clone(
            op=error.op or launch.op.kind,
            device=core.name,
            generation=self._context.generation,
            op_index=launch.index if submission.is_batch else None,
        )
        submission.fail_from(launch.index, own)

    @staticmethod
    def _act(action: Injection | AccelError, lane: Lane) -> None:
        """Bring about what a fault plan asks for."""
        if isinstance(action, Injection):
            lane.device.inject(action, lane.stream)
        else:
            raise action.clone()

    @staticmethod
    async def _after(lane: Lane, seq: int) -> None:
        """Wait until a batch's earlier ops have been launched: only then is it known whether this one is to be."""
        if lane.enqueued < seq:
            await lane.reached(seq)

    async def _depend(self, lane: Lane, other: Timeline, seq: int) -> None:
        """Let the lane wait for what another one has to do first, once that is in its stream."""
        if other.enqueued < seq:
            await other.reached(seq)  # type: ignore[attr-defined]  # the timelines of a context are its lanes
        try:
            lane.wait_for(other, seq)
        except AccelError as error:
            self._context.report_fault(error)

    def _mark(self, run: Run) -> None:
        """Record the end of a run and have it watched; an end that is already there is taken at once."""
        submission, lane, context = run.submission, run.lane, self._context
        if not submission.launched:
            context.retire(submission, run.retires, is_last=run.is_last)
            return
        event = lane.events.take()
        try:
            passed = lane.stream.record(event)
        except AccelError as error:
            context.report_fault(error)
            return
        if passed:
            lane.complete(lane.enqueued)
            lane.events.give(event)
            context.retire(submission, run.retires, is_last=run.is_last)
            return
        mark = Mark(context, lane, event, submission, prediction_key(submission), run.retires, is_last=run.is_last)
        if run.is_last:
            submission.release_operands()
        context.watcher.watch(mark)
