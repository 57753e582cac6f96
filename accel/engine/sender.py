"""Sends ops from their callers to the device's queue: checks, queues and awaits them."""

from __future__ import annotations

import asyncio
import functools
import types
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from accel.engine.copies import OpList, PlanOnCopies, plan_for_strided
from accel.engine.kernels import LIBRARIES
from accel.engine.launches import OpSubmission
from accel.engine.op_error import op_error
from accel.engine.submission import BatchSubmission
from accel.errors import AccelError, ActorStoppedError, DeadlineExceededError, InvalidArgumentError, MailboxFullError, UnsupportedError
from accel.ops.base import FamilyOp, Plan, with_refs
from accel.ops.composed import ComposedPlan
from accel.ops.memory import Checksum, Get
from accel.ops.user_plans import check_plan
from accel.telemetry.probe import CHARGED
from accel.values import check_timeout

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

    from accel.actors import ActorRef
    from accel.engine.core import DeviceCore
    from accel.engine.submission import Submission
    from accel.ops import KernelOp
    from accel.ops.base import SizedOp
    from accel.ref import AccelRef
    from accel.storage.refs import Recording

__all__ = ["Sender"]

_WAITERS = 16
"""Limit of the callers that wait for room in the queue, in lengths of the queue."""

_OVERLOADED = "Try again after .retry_after seconds, let fewer tasks wait at once, or open the device with a larger pending_limit."


@types.coroutine
def _next_iteration() -> Generator[None, None, None]:
    """Wait for the next loop iteration: ``asyncio.sleep(0)`` without its checks."""
    yield


class Sender:
    """Sends submissions to the device's actor and waits for their ends.

    Parameters
    ----------
    core
        The device.
    actor
        The device's actor.

    Attributes
    ----------
    guard : callable
        See :meth:`DeviceCore.guard`.
    """

    __slots__ = ("_core", "_hand_over", "_mailbox", "_waits_for_room", "guard")

    def __init__(self, core: DeviceCore, actor: ActorRef[Submission, None]) -> None:
        self._core = core
        self._hand_over = actor.hand_over_here
        self._mailbox = actor.mailbox
        self._waits_for_room = core.options.overload == "wait"
        self.guard = core.guard

    def check(self, op: KernelOp, recording: Recording | None = None) -> Plan:
        """Return the plan of an op, if this device can run it with these operands.

        ``recording`` is the batch or graph that records the op. An op whose plan is an
        :class:`PlanOnCopies` or a :class:`ComposedPlan` must be sent as several.

        Raises
        ------
        InvalidArgumentError, StaleRefError, UnsupportedError
        """
        core, refs = self._core, self._core.refs
        plan: Plan | None = None
        try:
            plan = op.plan()
            if op.library not in LIBRARIES:
                plan = self._check_user_op(op, plan)
            live, recorded, durable = refs.live_generation, refs.recording, core.durable
            for ref in plan.reads + plan.writes:
                if (
                    ref.owner is not refs
                    or ref.generation != live
                    or ref.is_freed
                    or recorded.get(ref.buffer, recording) is not recording
                    or (ref.durable and durable.any_torn)
                ):
                    refs.check(ref, recording, plan)
                if ref.is_strided:
                    plan = plan_for_strided(op, plan)
            if plan.writes and durable.sealed:
                durable.check_writes(plan)
            if plan.capability:
                is_offered = plan.dtype in core.capabilities.get(plan.capability, ())
                if type(plan) is ComposedPlan:  # sent as one op if the backend has a kernel for it
                    plan = Plan(*plan) if is_offered else plan
                elif not is_offered:
                    raise self._unsupported_error(op, plan)  # noqa: TRY301
        except AccelError as error:
            # Checks of operands raise without knowing the op.
            error.op = error.op or op.kind
            error.device = error.device or core.name
            raise
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            if not isinstance(error, Exception):  # an op's CancelledError is not the caller's
                raise op_error(error, f"plan() of {op.kind}", core.loop, library=op.library, op=op.kind, device=core.name) from error
            if plan is None and not type(op).__module__.startswith("accel."):
                raise  # an error in a user's own op is best seen as it is
            raise InvalidArgumentError(
                f"{op.kind} was made with what it does not take: {type(error).__name__}: {error}", op=op.kind, device=core.name
            ) from error
        return plan

    def _check_user_op(self, op: KernelOp, plan: Plan) -> Plan:
        """Return the plan of a user's op, checked, and record its family as known to the device.

        Raises if the family has the name of another one, or of a registered library; or if durable
        memory that the op's library was registered with is torn.
        """
        if not type(op).__module__.startswith("accel."):
            plan = check_plan(op, plan)
        core, family = self._core, getattr(op, "family", None)
        if core.durable.any_torn and op.library in core.registrations:
            core.registrations[op.library].check()
        if family is None or not isinstance(op, FamilyOp):  # in this order: the second is slow
            return plan
        if op.library in core.registrations or core.families.setdefault(op.library, family) != family:
            raise InvalidArgumentError(f"there is another library {op.library!r}", op=op.kind, remedy="Give one of the two another name.")
        return plan

    def _unsupported_error(self, op: KernelOp, plan: Plan) -> UnsupportedError:
        """Return the error of an op whose dtype this device does not offer, with those it does."""
        # "unary.relu" says more than "unary". A capability with another name says how it is done.
        what = plan.capability if plan.capability.startswith(f"{op.kind}.") else op.kind
        known = ", ".join(sorted(dtype.value for dtype in self._core.capabilities.get(plan.capability, ()))) or "no dtype"
        return UnsupportedError(f"{what} is not offered for {plan.dtype.value} on {self._core.name}", remedy=f"It takes {known}.")

    def submit(self, op: FamilyOp[Any]) -> Coroutine[Any, Any, Any]:
        """Return the coroutine that runs an op of a family; see :meth:`run`.

        The coroutine has the name of the method, for Python's warning of a forgotten ``await``.
        """
        running = self._run_sized(cast("SizedOp[Any, Any]", op)) if op.is_sized else self.run(op, op.timeout)
        running.__qualname__ = _method_name(type(op))  # type: ignore[attr-defined]
        return running

    async def _run_sized(self, op: SizedOp[Any, Any]) -> Any:
        """Run an op whose kernel counts its results, fetch the count, and cut the results to it.

        The last ref of the op's result holds the count.
        """
        deadline = self.deadline_after(op.timeout)
        kind, size, running = type(op), op.size, self.run(op, op.timeout)
        del op  # as in run()
        results = await running
        count = int(await self.run(Get(results[-1], np.empty((), np.int64)), self.seconds_left(deadline)))
        if size is not None and count > size:
            raise InvalidArgumentError(
                f"{kind.kind} found {count} elements, and size is {size}",
                op=kind.kind,
                device=self._core.name,
                remedy="Give a larger size.",
            )
        return kind.trimmed(results, count)

    async def refuse(self, error: AccelError) -> NoReturn:
        """Raise the error of a family method's arguments, when its result is awaited."""
        error.device = error.device or self._core.name
        raise error

    async def run(self, op: Any, timeout: float | None, submission: Submission | None = None, *, takes_tokens: bool = False) -> Any:
        """Check and queue an op, or queue a given submission; wait for its end, return its result.

        When this is cancelled, or the deadline passes, a submission that was not launched is
        dropped. With ``takes_tokens`` the op may be anything: what is no op is refused, and tokens
        among its operands become refs.
        """
        core = self._core
        if submission is None:
            if takes_tokens:
                op = with_refs(op, core.refs.resolve)
                timeout = _timeout_of(op, timeout)
            core.guard()
            plan = self.check(op)
            if type(plan) is PlanOnCopies or type(plan) is ComposedPlan:
                return await self._run_as_several(op, plan, timeout)
            submission = OpSubmission(op, plan, asyncio.Future(loop=core.loop), core.refs.live_generation)
            del op, plan  # this frame must not keep refs that the caller drops while it waits
        if core.durable.any_torn:
            submission.tears = core.durable.tears
        charged = CHARGED.get()
        if charged is not None or core.probes.all:
            submission.observe(charged, is_timed=charged is not None or core.probes.times_work)
        future = submission.future
        if timeout is not None:
            self._arm_deadline(submission, timeout)
        core.workload.pending += 1
        try:
            if not self._hand_over(submission) and not self._mailbox.offer(submission):
                await self._put_in_mailbox(submission)
            # Other tasks run between two ops of this one, also if the op has ended already. The
            # poller runs before this task goes on, and may have ended a short op by then.
            await _next_iteration()
            return await future
        except asyncio.CancelledError:
            self._cancel(submission)
            raise
        finally:
            if submission.timer is not None:
                submission.timer.cancel()
            core.workload.pending -= 1
            if core.workload.changed is not None:
                core.workload.wake()
            if (work := submission.observed) is not None and not (work.ended_at or submission.outstanding):
                submission.end_observed(core.probes)  # else retiring its last op does so
            # The error's traceback holds this frame, and the future holds the error: a cycle.
            del future, submission

    async def _run_as_several(self, op: KernelOp[Any], plan: Plan, timeout: float | None) -> Any:
        """Send an op and copies of operands, or the parts of a composed op, as one submission.

        As one, so that they end together, and no op of another task comes between them.
        """
        core = self._core
        if not core.is_ready:  # their results are of one generation
            deadline = self.deadline_after(timeout)
            await self.wait_ready(timeout)
            timeout = self.seconds_left(deadline)
        generation = core.refs.live_generation
        ops = OpList(core, self.check, generation)
        result = ops.add(op, plan)
        submission = BatchSubmission(tuple(ops.ops), tuple(ops.plans), ops.outputs, core.loop.create_future(), generation)
        submission.name = op.kind
        del op, plan, ops
        try:
            await self.run(None, timeout, submission)
        except AccelError as error:
            error.op_index = None  # the caller sent one op
            raise
        finally:
            del submission
        return result

    async def keep_checksum(self, ref: AccelRef, deadline: float | None) -> int:
        """Seal a durable buffer, so that no op writes it; keep the checksum of its contents, and return it.

        If the checksum cannot be fetched, the buffer is not sealed.
        """
        book = self._core.durable
        seal = book.seal(ref)
        if seal.checksum is not None:  # it was sealed before
            return seal.checksum
        try:
            # Without a call where there is no deadline: each durable put comes here.
            checksums = await self.run(Checksum(ref), None if deadline is None else self.seconds_left(deadline))
        except BaseException:
            book.unseal(ref, seal)
            raise
        seal.checksum = int(checksums[0])
        return seal.checksum

    async def verify_checksum(self, ref: AccelRef, deadline: float | None) -> bool:
        """Return whether a buffer still has the checksum of its seal; if not, make it torn.

        ``True`` also where no checksum is known.
        """
        book = self._core.durable
        seal = book.sealed.get(ref.buffer)
        known = None if seal is None else seal.checksum
        if known is None:
            return True
        checksums = await self.run(Checksum(ref), self.seconds_left(deadline))
        if int(checksums[0]) == known:
            return True
        if book.sealed.get(ref.buffer) is seal:  # else it was unsealed or sealed anew meanwhile
            book.on_mismatch(ref)
        return False

    def deadline_after(self, timeout: float | None) -> float | None:
        """Return the loop's time ``timeout`` seconds from now; ``None`` without a timeout.

        Raises as :func:`~accel.values.check_timeout` does.
        """
        check_timeout(timeout)
        return None if timeout is None else self._core.loop.time() + timeout

    def seconds_left(self, deadline: float | None) -> float | None:
        """Return the seconds until ``deadline``, a time of the loop; ``None`` without one."""
        return None if deadline is None else deadline - self._core.loop.time()

    def _arm_deadline(self, submission: Submission, timeout: float) -> None:
        """Start the timer that ends the submission's future when its timeout is over.

        Raises :class:`DeadlineExceededError` at once for a timeout of 0 or less.
        """
        check_timeout(timeout)
        core = self._core
        if timeout <= 0:
            raise DeadlineExceededError(f"{submission.name} had no time to run", op=submission.name, device=core.name)
        submission.timer = core.loop.call_later(timeout, self._on_deadline, submission, timeout)

    def _on_deadline(self, submission: Submission, timeout: float) -> None:
        """End the future of a submission, and take it out of the queue if it is still there."""
        submission.expire(timeout, self._core.name)
        self._mailbox.discard(submission)

    def _cancel(self, submission: Submission) -> None:
        """Drop a submission whose caller was cancelled; what was launched runs on.

        If nothing was launched, the refs of its results are freed.
        """
        self._mailbox.discard(submission)
        future = submission.future
        if not future.cancel() and not future.cancelled():
            future.exception()  # it ended in the same iteration: the error counts as retrieved
        if not submission.launched:
            submission.free_unlaunched_results()

    async def _put_in_mailbox(self, submission: Submission) -> None:
        """Put a submission into the actor's full mailbox: wait for room, or raise.

        Returns also where the deadline passes during the wait: the submission is not queued then,
        and its own timer ends its future.

        Raises
        ------
        MailboxFullError
            With ``overload="reject"``, or if too many callers wait already.
        ClosedError, DeviceLostError
            If the device has ended.
        """
        if self._mailbox.is_closed:
            raise self._core.lifecycle.final_error()
        if not self._waits_for_room:
            try:
                self._mailbox.put_nowait(submission)
            except MailboxFullError as error:
                raise MailboxFullError(
                    f"device {self._core.name} has {self._mailbox.capacity} submissions pending",
                    device=self._core.name,
                    op=submission.name,
                    retry_after=self.retry_after(),
                    remedy="Try again after .retry_after seconds, or open the device with overload='wait'.",
                ) from error
            return
        # Those that wait for room are bounded too.
        if self._mailbox.statistics().waiting_putters >= _WAITERS * self._mailbox.capacity:
            raise MailboxFullError(
                f"more than {_WAITERS * self._mailbox.capacity} submissions wait for room on device {self._core.name}",
                device=self._core.name,
                op=submission.name,
                retry_after=self.retry_after(),
                remedy=_OVERLOADED,
            )
        try:
            async with asyncio.timeout_at(None if submission.timer is None else submission.timer.when()):
                await self._mailbox.put(submission)
        except TimeoutError:
            return
        except ActorStoppedError:
            raise self._core.lifecycle.final_error() from None

    def retry_after(self) -> float:
        """Return the seconds until there may be room, for ``MailboxFullError.retry_after``."""
        core = self._core
        if core.is_ready:
            # A new message waits as long as the oldest has; half of that empties half the queue.
            return max(0.001, self._mailbox.oldest_age() / 2)
        return max(0.05, core.rebuild_seconds)

    async def wait_ready(self, timeout: float | None) -> None:
        """Wait until the device is READY, ``timeout`` seconds at most.

        The caller counts in ``workload.in_hand`` meanwhile.

        Raises
        ------
        DeadlineExceededError, DeviceLostError, ClosedError
        MailboxFullError
            If as many wait already as may be queued.
        """
        core = self._core
        if core.is_ready:
            return
        if core.workload.in_hand >= self._mailbox.capacity:
            raise MailboxFullError(
                f"{core.workload.in_hand} callers wait for device {core.name} to be ready",
                device=core.name,
                retry_after=self.retry_after(),
                remedy=_OVERLOADED,
            )
        core.workload.in_hand += 1
        try:
            async with asyncio.timeout(timeout):
                await core.lifecycle.wait_ready()
        except TimeoutError:
            raise DeadlineExceededError(f"device {core.name} was not ready within {timeout:g} s", device=core.name) from None
        finally:
            core.workload.in_hand -= 1


@functools.lru_cache(maxsize=1024)
def _method_name(kind: type[KernelOp]) -> str:
    """Return the name of the method that makes an op, such as ``"Device.blas.gemm"``."""
    # `device.reduce` is a library of one op, and is called itself.
    return f"Device.{kind.library}" if kind.library == kind.kind else f"Device.{kind.library}.{kind.kind}"


def _timeout_of(op: KernelOp, timeout: float | None) -> float | None:
    """Return the timeout of an op that is given to ``device.run``: its own, or that of the call."""
    op_timeout = op.timeout if isinstance(op, FamilyOp) else None
    if op_timeout is None or timeout is None:
        return timeout if op_timeout is None else op_timeout
    raise InvalidArgumentError(f"{op.kind} has a timeout of its own, and the call has another", op=op.kind, remedy="Leave one of them out.")
