"""The task of an actor: start, handle messages, fail, restart, stop.

Everything here runs in the actor's one task. Suspended frames hold no message, no result and no
exception: an error's traceback keeps frames alive, and the objects that they name would live as
long as the error.
"""

from __future__ import annotations

import asyncio
import types
from asyncio import current_task
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final

from accel._log import get_logger
from accel.actors.actor import Actor
from accel.actors.cell import ActorCell
from accel.actors.envelope import FAILED, HANDLED, Envelope, Failure, Stop, own_instance, relay
from accel.actors.mailbox import ENDED, NOTHING
from accel.actors.ref import ActorState
from accel.actors.supervision import Directive, default_decision
from accel.errors import AccelError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Generator

    from accel.actors.supervision import RestartStrategy

__all__ = ["ActorLife"]

logger = get_logger()

_BURST: Final = 64
"""Messages that the task handles at most before it yields to the event loop."""

_NO: Final = Stop.NO  # looking a member up in its enum is slow, and these are set for every message
_NOW: Final = Stop.NOW


class ActorLife(ActorCell):
    """One actor, with the code that its task runs."""

    __slots__ = ()

    # -- the task

    async def run(self) -> None:
        """Run the actor: the body of its task."""
        self.task = current_task()
        assert self.task is not None, "an actor runs in a task"
        self._place.running[self.task] = self
        outcome: BaseException | None = None
        try:
            outcome = await self._live()
            await self._shut_down(outcome)
        except asyncio.CancelledError:
            # Not by a stop or a failure: other code cancelled the task, such as asyncio.run at its
            # end.
            if not self.home.is_inherited:
                self.request_stop(Stop.NOW)
                await self._shut_down(outcome)
            raise
        except (KeyboardInterrupt, SystemExit) as fatal:
            outcome = fatal
            raise
        finally:
            self._finish(outcome)

    async def _live(self) -> BaseException | None:
        """Start and serve until the end; return the error to stop with, or ``None``."""
        error = await self._start()
        if error is not None or self._actor is None:
            return error
        if not self.started.done():
            self.started.set_result(None)
        while await self._serve():
            error = await self._recover()
            if error is not None:
                return error
        return None

    async def _start(self) -> BaseException | None:
        """Make an instance and start it; return the error of that.

        Without an error and an instance, the actor was stopped meanwhile.
        """
        self.state = ActorState.STARTING
        if self._stop >= Stop.NOW:
            return None
        self._incarnation += 1
        error: BaseException | None = None
        try:
            self._actor = self._make(*self._args, **self._kwargs)
            if not isinstance(self._actor, Actor):
                raise InvalidArgumentError(  # noqa: TRY301
                    f"{self._make!r} made {self._actor!r:.200}", remedy="Return an instance of a subclass of Actor."
                )
            self.refuse = None if type(self._actor).refused is Actor.refused else self._actor.refused
            self.carries_context = self._actor.carries_context
            self.interruptible = _NOW
            await self._actor.started(self._context)
        except BaseException as caught:
            error = self._classify(caught)
            self._actor = None
        finally:
            self.interruptible = _NO
        if self._interrupts and (error := self._consume_interrupts()) is not None:
            self._actor = None
        if self._actor is None:
            self.failures += error is not None
            await self._stop_children(Stop.NOW)
            return error
        self.state = ActorState.DRAINING if self._stop else ActorState.RUNNING
        return None

    async def _serve(self) -> bool:
        """Handle messages; return whether one failed, with the error in ``_failure``.

        Otherwise the mailbox is closed and empty.
        """
        mailbox, carries_context = self.mailbox, self.carries_context
        take, waiter = mailbox.take, mailbox.waiter
        handler = self._handle()
        handle = handler.send
        handle(None)  # advance the generator to its first yield
        burst = 0
        while True:
            # Handle the next message, in the context variables of its sender if it carries them.
            item = take()
            if item is ENDED:
                return False
            if item is not NOTHING:
                context = item[2] if type(item) is Envelope else Context() if carries_context else None
                outcome = handle(item) if context is None else context.run(handle, item)
                if outcome is not HANDLED and (outcome is FAILED or await relay(context, handler, outcome) is FAILED):
                    return True
                context = None
                burst += 1
                if burst < _BURST:
                    continue
            # Nothing is queued: wait for a message. After a burst: let the loop run once.
            pause = waiter() if burst < _BURST else None
            burst = 0
            try:
                await (asyncio.sleep(0) if pause is None else pause)
            except asyncio.CancelledError:
                if self.task is None or self.task.cancelling():
                    raise

    @types.coroutine
    def _handle(self) -> Generator[Any, Any, None]:
        """Handle each message that is sent in, and yield its outcome; relay ``receive``'s awaits.

        One generator for all messages is the cheapest way to run each in a context of its own: it
        saves a coroutine and a StopIteration a message.
        """
        outcome = HANDLED
        while True:
            item = yield outcome
            outcome, reply = HANDLED, None
            try:
                if type(item) is Envelope:
                    item, reply, _, self.deadline = item
                    if reply is not None and (reply.done() or (self.deadline is not None and self.loop.time() >= self.deadline)):
                        continue
                elif type(item) is Failure:
                    if item.incarnation == self._incarnation and self._on_failure(item.error, None):
                        outcome = FAILED
                    continue
                else:
                    self.deadline = None
                self.interruptible = _NOW
                result = yield from self._actor.receive(item, self._context)  # type: ignore[misc, union-attr]
                if reply is not None and not reply.done():
                    reply.set_result(result)
                if self._interrupts and self._on_failure(asyncio.CancelledError(), None):
                    outcome = FAILED
            except BaseException as caught:
                if self._on_failure(caught, reply):
                    outcome = FAILED
            finally:
                self.interruptible = _NO
                # The traceback of an error keeps this frame, and the error outlives the message.
                item = reply = result = _ = None

    # -- failures

    def _on_failure(self, caught: BaseException, reply: asyncio.Future[Any] | None) -> bool:
        """Fail the sender's ``ask``, and store the error for :meth:`_recover`.

        Return whether the actor has failed; not if it was stopped.
        """
        try:
            error = self._classify(caught)
        except BaseException:
            self._fail_reply(reply, None)
            raise
        self._fail_reply(reply, error)
        self._failure = error
        self.failures += error is not None
        return error is not None

    def _fail_reply(self, reply: asyncio.Future[Any] | None, error: BaseException | None) -> None:
        """Fail the sender's ``ask`` with an instance of its own; without an error, as stopped."""
        if reply is not None and not reply.done():
            reply.set_exception(self._stopped_error(None) if error is None else own_instance(error))

    def _classify(self, caught: BaseException) -> BaseException | None:
        """Return the actor's failure for what its code raised; ``None`` if that was a stop.

        Raise it again if it must end the task: the end of the program, or of the loop.
        """
        if isinstance(caught, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            raise caught
        if self.home.is_inherited:  # in a forked child there is nothing to recover
            raise asyncio.CancelledError from caught
        if self._interrupts:
            return self._consume_interrupts()
        if isinstance(caught, StopIteration):  # a future cannot carry it
            error: BaseException = RuntimeError(f"actor {self.path!r} raised StopIteration")
            error.__cause__ = caught
            return error
        if not isinstance(caught, asyncio.CancelledError):
            return caught
        if self.task is None or self.task.cancelling():
            raise caught
        error = AccelError(f"something that actor {self.path!r} awaited was cancelled", remedy="Catch CancelledError where it is awaited.")
        error.__cause__ = caught
        return error

    def _consume_interrupts(self) -> BaseException | None:
        """Undo the cancellations of the task by ``_interrupt``, which have been delivered.

        Return the failure that they stand for, or ``None`` for a stop. Raise if other code has
        cancelled the task too.
        """
        reason, self._reason = self._reason, None
        task = self.task
        while self._interrupts and task is not None:
            self._interrupts -= 1
            task.uncancel()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        return None if self._stop >= Stop.NOW else reason

    def _strategy_directive(self, strategy: RestartStrategy, error: BaseException) -> Directive:
        """Return what the restart strategy decides about a failure."""
        directive = default_decision(error, strategy.on_exception)
        if strategy.decide is None:
            return directive
        try:
            return Directive(strategy.decide(error))
        except Exception as broken:
            logger.exception("actor_decision_failed", actor=self.path, directive=directive.value, error=broken)
            return directive

    def _decide(self, error: BaseException) -> Directive:
        """Return what to do about a failure: as was decided when it was reported, or by strategy."""
        directive, self._verdict = self._verdict, None
        if directive is None:
            directive = self._strategy_directive(self.budget.strategy, error)
        log = logger.debug if directive is Directive.RESUME and isinstance(error, AccelError) else logger.warning
        log("actor_failed", actor=self.path, directive=directive.value, error=error)
        self._escalates = directive is Directive.ESCALATE
        return directive

    async def _recover(self) -> BaseException | None:
        """Apply the strategy to ``_failure``, and to each start of a fresh instance that fails.

        Returns
        -------
        BaseException or None
            ``None`` if the actor goes on, or was stopped meanwhile; else the error to stop with.
        """
        error, self._failure = self._failure, None
        starts = 0
        while error is not None and self._stop < Stop.NOW:
            # Decide: stop, go on with the same instance, or replace it within the budget.
            directive = self._decide(error)
            if directive in (Directive.STOP, Directive.ESCALATE):
                return error
            if directive is Directive.RESUME and not starts:
                return None
            delay = self.budget.renew(starts) if directive is Directive.RENEW else self.budget.request()
            if delay is None:
                logger.error("actor_circuit_open", actor=self.path, restarts=self.budget.restarts)
                return error
            # End the failed instance once, wait, and start a fresh one, which may fail too.
            self.state = ActorState.RESTARTING
            if not starts:
                await self._run_hook("restarting", error)
                await self._stop_children(Stop.NOW)
            del error  # not to be kept over the delay
            if delay > 0:
                await self._wait_before_restart(delay)
            starts += 1
            error = await self._start()
        return None

    async def _wait_before_restart(self, delay: float) -> None:
        """Wait for the delay before a restart; a stop ends the wait."""
        if self._stop >= Stop.NOW:
            return
        self.interruptible = _NOW
        try:
            await self.system.sleep(delay)
        except asyncio.CancelledError as caught:
            self._classify(caught)
        finally:
            self.interruptible = _NO
        if self._interrupts:
            self._consume_interrupts()

    async def _run_hook(self, name: str, *args: Any) -> None:
        """Run the last hook of the instance, ``restarting`` or ``stopped``, and drop the instance.

        An error of the hook is only logged.
        """
        actor, self._actor = self._actor, None
        if actor is None:
            return
        self.interruptible = Stop.KILL
        error: BaseException | None = None
        try:
            await getattr(actor, name)(*args, self._context)
        except BaseException as caught:
            error = self._classify(caught)
        finally:
            self.interruptible = _NO
        if self._interrupts:
            self._consume_interrupts()
        if error is not None:
            logger.warning("actor_hook_failed", actor=self.path, hook=name, error=error)

    # -- the end

    async def _stop_children(self, level: Stop) -> None:
        """Stop all children, one after the other, and wait for their end."""
        # Newest first: a later one may have been given the ref of an earlier one.
        for child in reversed(tuple(self.children.values())):
            child.request_stop(level)
            await child.stopped.wait()

    async def _shut_down(self, outcome: BaseException | None) -> None:
        """Refuse messages, stop the children, and run ``stopped``: the end, as far as it waits."""
        self.state = ActorState.STOPPING
        if self._stop < Stop.NOW:  # else the request has refused them
            self._refuse_messages(outcome)
        await self._stop_children(Stop.DRAIN if outcome is None and self._stop <= Stop.DRAIN else max(self._stop, Stop.NOW))
        await self._run_hook("stopped")
