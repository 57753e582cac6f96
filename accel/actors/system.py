"""The root of all actors: owns their task group and their worker threads, and closes them.

A root task holds the task group open. So a system may be entered in one task and left in another,
as fixtures and lifespans do, and an actor's failure cannot cancel the code inside ``async with``.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import random
import sys
import time
from asyncio import _get_running_loop
from contextvars import Context
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Self, TypeVar

import anyio

from accel._log import get_logger
from accel.actors.actor import Actor
from accel.actors.cell import ActorPlace
from accel.actors.envelope import Stop
from accel.actors.home import Home
from accel.actors.life import ActorLife
from accel.actors.portal import Portal
from accel.actors.supervision import RestartStrategy
from accel.actors.tree import ActorTree
from accel.actors.workers import WorkerPool
from accel.errors import ClosedError, InvalidArgumentError, NotInitializedError, UnsupportedError
from accel.hints import AsyncOnly
from accel.values import check_seconds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection
    from types import TracebackType

    from accel.actors.cell import ActorCell
    from accel.actors.ref import ActorRef

__all__ = ["ActorSystem"]

M = TypeVar("M")
R = TypeVar("R")
P = ParamSpec("P")
T = TypeVar("T")

logger = get_logger()

_NEW = "Make a new one: `async with accel.System() as system:`."

_GRACE = 1.0
"""Seconds that a cancelled actor has to end before the system leaves it behind."""


class ActorSystem(AsyncOnly):
    """A tree of actors on one event loop. Use it as ``async with ActorSystem() as system``.

    Parameters
    ----------
    name
        Shown in trees and logs.
    close_timeout
        Seconds that closing waits for actors to handle their queued messages; after that they are
        cancelled.
    workers
        The most threads for blocking functions; ``None``: four more than there are processors, at
        most 32.
    clock
        Seconds, monotonic: measures restart windows and the age of messages. A test can pass its
        own.
    sleep
        ``await sleep(seconds)``: waits before restarts. A test can pass its own.
    rng
        Source of the restarts' jitter; ``None``: seeded by the operating system.

    Raises
    ------
    InvalidArgumentError
        ``close_timeout`` is negative or not a number, or ``workers`` is not a positive int.

    Notes
    -----
    Everything but :attr:`portal` is for the loop, thread and process in which the system was
    entered; elsewhere it raises :class:`~accel.errors.ClosedError`. ``KeyboardInterrupt`` and
    ``SystemExit`` raised by an actor leave through the loop, as asyncio has it.
    """

    def __init__(
        self,
        name: str = "accel",
        *,
        close_timeout: float = 10.0,
        workers: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        _check_gil()
        check_seconds("close_timeout", close_timeout, or_endless=True)
        if not isinstance(name, str):
            raise InvalidArgumentError(f"name is {name!r}", remedy="Give a string; close_timeout= and workers= are given by name.")
        if not callable(clock) or not callable(sleep) or not isinstance(rng, (random.Random, type(None))):
            raise InvalidArgumentError(
                f"clock is {clock!r}, sleep is {sleep!r}, rng is {rng!r}", remedy="Give two functions, and a random.Random or None."
            )
        self.name = name
        self.close_timeout = close_timeout
        self.clock = clock
        self.sleep = sleep
        self.random = random.Random() if rng is None else rng
        self._children: dict[str, ActorCell] = {}
        self._cells: dict[asyncio.Task[Any], ActorCell] = {}
        self._numbers = itertools.count(1)
        self._pool = WorkerPool(min(32, (os.cpu_count() or 1) + 4) if workers is None else workers)
        self._spawner = WorkerPool(1, "accel-spawner")
        self._state = "new"
        self._home: Home | None = None
        self._root: asyncio.Task[None] | None = None
        self._group: asyncio.TaskGroup | None = None
        self._portal: Portal | None = None
        self._ready: asyncio.Event = asyncio.Event()
        self._closing: asyncio.Event = asyncio.Event()
        self._close_timer: asyncio.Timeout | None = None
        self._is_closed_by_owner = self._is_drain_ended = False
        self._deadline: float | None = None
        self._give_up_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self._state} actors={len(self._cells)}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: it lives in one process; make another there, and send data")

    # -- entering and leaving

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise ClosedError(f"system {self.name!r} is {self._state}: a system is entered once", remedy="Make a new one.")
        self._home = home = Home(f"system {self.name!r}")
        self._abandoned: asyncio.Future[None] = self.loop.create_future()
        self._state = "open"
        self._root = self.loop.create_task(self._live(home), name=f"accel-system-{self.name}", context=Context())
        try:
            await self._ready.wait()
            await self._open_resources()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the system: accept no more work, drain, stop all actors, end all threads.

        Idempotent; all callers wait for the end.

        Actors stop newest first, each after its queued messages, so that they can still ask the
        actors that they depend on. After ``close_timeout`` the others are cancelled. Actors that do
        not end even then are left behind, and logged.

        Raises
        ------
        ClosedError
            Called outside the system's loop.

        Notes
        -----
        Failures while closing are logged, never raised, so they cannot mask the error of the body.
        Cancelling does not stop the close: actors are cancelled at once, and the cancellation is
        raised when they have ended. In a forked child this does nothing.
        """
        if self._root is None or self.is_inherited:
            self._state = "closed"
            return
        self._check_home()
        self._is_closed_by_owner = True
        self._closing.set()
        cancelled: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while not (self._root.done() or self._abandoned.done()):
                try:
                    await asyncio.wait({self._root, self._abandoned}, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError as error:
                    cancelled = error
                    self._end_drain()
        if cancelled is not None:
            raise cancelled

    def _end_drain(self) -> None:
        """Give queued messages no more time: actors that still drain are cancelled now."""
        self._is_drain_ended = True
        self._deadline = self.loop.time()
        if self._close_timer is not None:
            self._close_timer.reschedule(self._deadline)

    async def _live(self, home: Home) -> None:
        """Hold the task group open until the system closes: the body of the root task."""
        try:
            async with asyncio.TaskGroup() as self._group:
                self._portal = Portal(home, self._group)
                self._ready.set()
                try:
                    await self._closing.wait()
                finally:
                    if not self.is_inherited:
                        await self._close()
        except BaseExceptionGroup as errors:
            logger.exception("system_failed", system=self.name, error=errors)
        except (KeyboardInterrupt, SystemExit):
            pass  # the actor's own task has raised it through the loop
        finally:
            self._state = "closed"
            self._ready.set()
            self._pool.close()
            self._spawner.close()
            if self._give_up_timer is not None:
                self._give_up_timer.cancel()

    async def _close(self) -> None:
        """Close the system in the root task, and warn if its owner has not asked for it."""
        left = self._running_paths()
        if not self._closing.is_set():  # cancelled: the loop ends, or an actor ends the program
            self._closing.set()
            self._end_drain()
        await self._shut_down()
        if not self._is_closed_by_owner:  # when a loop ends, this task may be cancelled before the owner's, which then closes the system
            logger.warning("system_not_closed", system=self.name, actors=left)

    async def _shut_down(self) -> None:
        """Drain until the deadline, then cancel what is left, and end the threads."""
        self._state = "closing"
        if self._deadline is None:
            self._deadline = self.loop.time() + self.close_timeout
        try:
            async with asyncio.timeout_at(self._deadline) as self._close_timer:
                await self._close_gracefully(self._deadline)
        except TimeoutError:
            if not self._is_drain_ended:
                logger.warning("close_timeout", system=self.name, actors=self._running_paths())
        finally:
            self._close_timer = None
            if self._portal is not None:
                self._portal.close()
            for cell in tuple(self._children.values()):
                cell.request_stop(Stop.KILL)
            self._give_up_timer = self.loop.call_later(3 * _GRACE, self._leave_behind)  # after what is waited for below
        if self._cells:
            await asyncio.wait(set(self._cells), timeout=_GRACE)
        deadline = max(self._deadline, self.loop.time() + _GRACE)
        if left := [*await self._pool.aclose(deadline), *await self._spawner.aclose(deadline)]:
            logger.error("threads_left_behind", system=self.name, threads=tuple(left))

    async def _close_gracefully(self, deadline: float) -> None:
        """Close the subclass's resources, and stop the actors after their queued messages."""
        try:
            await self._close_resources(deadline)
        except Exception as error:
            logger.exception("close_failed", system=self.name, error=error)
        # Newest first: a later actor may hold the ref of an earlier one.
        for cell in reversed(tuple(self._children.values())):
            cell.request_stop(Stop.DRAIN)
            await cell.stopped.wait()

    def _leave_behind(self) -> None:
        """End the wait of :meth:`aclose`, and log the actors that have not ended. A timer's callback."""
        left = self._running_paths()
        if left:
            logger.error("actors_left_behind", system=self.name, actors=left)
        if not self._abandoned.done():
            self._abandoned.set_result(None)

    def _running_paths(self) -> list[str]:
        """Return the paths of the actors that have not ended."""
        return sorted(cell.path for cell in self._cells.values())

    # -- for subclasses

    async def _open_resources(self) -> None:
        """Open what the subclass owns: called once the system can spawn, in the entering task.

        If it raises, the system closes.
        """

    async def _close_resources(self, deadline: float) -> None:
        """Close what the subclass owns: called in the root task, before the actors stop.

        Cancelled when ``deadline`` (loop time) has passed.
        """

    # -- actors and threads

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the system."""
        if self._home is None:
            raise self._wrong_place_error()
        return self._home.loop

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the system's.

        In a fork the tasks of actors end without running their hooks.
        """
        return self._home is not None and self._home.is_inherited

    @property
    def state(self) -> str:
        """``"new"``, ``"open"``, ``"closing"`` or ``"closed"``."""
        return self._state

    @property
    def portal(self) -> Portal:
        """Runs calls from other threads; the only part of a system that they may use."""
        if self._portal is None:
            raise self._wrong_place_error()
        return self._portal

    async def spawn(
        self,
        actor: Callable[..., Actor[M, R]],
        *args: Any,
        name: str | None = None,
        mailbox_size: int = 1024,
        restart: RestartStrategy | None = None,
        **kwargs: Any,
    ) -> ActorRef[M, R]:
        """Start an actor, and return its address once its ``started`` has run.

        Parameters
        ----------
        actor, *args, **kwargs
            The class and its constructor's arguments, or a function that returns an instance, and
            its arguments; called again for each restart.
        name
            Unique among the running actors at this level, without ``/``; ``None`` makes one from
            the class's name.
        mailbox_size
            The most messages that may be queued.
        restart
            What happens when it fails; ``None``: ``RestartStrategy()``, with which an exception
            from ``receive`` replaces the actor by a fresh instance, at most three times a minute.
            ``RestartStrategy(on_exception=Directive.RESUME)`` keeps its state instead.

        Raises
        ------
        Exception
            What the constructor or ``started`` raised; a first start is not tried again.
        InvalidArgumentError
            The class is no actor, or the name or the size is not allowed.
        ClosedError
            The system is closing or closed, or this is not its loop.

        Notes
        -----
        Cancelling stops the actor that was being started.
        """
        return await self._spawn_under(None, actor, args, kwargs, name=name, mailbox_size=mailbox_size, restart=restart)

    async def run_blocking(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function on a worker thread, in a copy of the caller's context variables.

        Raises
        ------
        Exception
            What the function raised.
        ClosedError
            The system is closed, or this is not its loop.

        Notes
        -----
        Cancelling detaches the waiter at once; a function that has started runs to its end, and its
        outcome is discarded.
        """
        self._check_home()
        if self._state == "closed":
            raise self._closed_error("runs nothing more")
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise InvalidArgumentError(
                f"{function!r} is not a function that blocks",
                remedy="Give a plain function and its arguments; await a coroutine function directly.",
            )
        return await self._pool.run(function, *args, **kwargs)

    def tree(self) -> ActorTree:
        """Return a snapshot of all living actors; print it."""
        self._check_home()
        return ActorTree(self.name, self._state, children=tuple(cell.snapshot() for cell in self._children.values()))

    @property
    def spawner(self) -> WorkerPool:
        """One thread that runs as long as the system.

        Child processes are started from it, because the kernel ends them with their thread.
        """
        self._check_home()
        return self._spawner

    async def _spawn_under(
        self,
        parent: ActorCell | None,
        actor: Callable[..., Actor[Any, Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str | None,
        mailbox_size: int,
        restart: RestartStrategy | None,
    ) -> ActorRef[Any, Any]:
        """Start an actor at the top, or below ``parent``."""
        if parent is None:
            self._check_open("starts no more actors")
        home = self._check_home()
        group = self._group
        if group is None or self._state == "closed":
            raise self._closed_error("starts no more actors")
        _check_factory(actor)
        if not isinstance(restart, (RestartStrategy, type(None))):
            raise InvalidArgumentError(f"restart is {restart!r}", remedy="Give an accel.RestartStrategy, or None.")
        siblings = self._children if parent is None else parent.children
        if name is None:
            name = f"{getattr(actor, '__name__', 'actor')}-{next(self._numbers)}"
        _check_name(name, siblings)
        place = ActorPlace(self, home, parent, siblings, self._cells, self._spawn_under)
        strategy = RestartStrategy() if restart is None else restart
        cell = ActorLife(place, (actor, args, kwargs), name, mailbox_size, strategy)
        # An eager task runs before create_task returns, and may look up its own name.
        siblings[name] = cell
        task = group.create_task(cell.run(), name=f"accel-actor-{cell.path}", context=Context())
        task.add_done_callback(cell.on_task_done, context=Context())
        return await cell.wait_started()

    def _wrong_place_error(self) -> ClosedError | NotInitializedError:
        """Return the error for a call before the system was entered, or from another place.

        That is another loop, thread or process.
        """
        if self._home is None:
            return NotInitializedError(f"system {self.name!r} was not entered", remedy="Enter it: `async with accel.System() as system:`.")
        return self._home.wrong_place_error()

    def _check_open(self, refusal: str) -> None:
        """Raise unless the system is open and this is its loop."""
        self._check_home()
        if self._state != "open":
            raise self._closed_error(refusal)

    def _closed_error(self, refusal: str) -> ClosedError:
        """Return the error for a call to a system that is not open."""
        return ClosedError(f"system {self.name!r} is {self._state} and {refusal}", remedy=_NEW)

    def _check_home(self) -> Home:
        """Return the system's loop, thread and process; raise if this is another."""
        if self._home is None or self._home.is_inherited or _get_running_loop() is not self._home.loop:
            raise self._wrong_place_error()
        return self._home


def _check_gil() -> None:
    """Raise on a Python without the GIL."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise UnsupportedError(
            "this Python runs without the GIL, on which the queues of accel rely",
            remedy="Run it with PYTHON_GIL=1 (or -X gil=1), or an ordinary build of Python.",
        )


def _check_factory(actor: object) -> None:
    """Raise unless ``actor`` is an actor class or a function, whose result is checked later."""
    if isinstance(actor, Actor):
        name = type(actor).__name__
        raise InvalidArgumentError(
            f"spawn takes a class, not an instance of {name}: each restart makes a new one",
            remedy=f"Give the class, and what to make it with: spawn({name}, ...).",
        )
    if not isinstance(actor, type) and callable(actor):
        return
    if not (isinstance(actor, type) and issubclass(actor, Actor)):
        raise InvalidArgumentError(f"spawn takes a subclass of Actor, not {actor!r}", remedy="Subclass accel.Actor, and give the class.")
    if not inspect.iscoroutinefunction(actor.receive):
        raise InvalidArgumentError(
            f"{actor.__name__}.receive is not a coroutine function", remedy="Define it: `async def receive(self, message, context)`."
        )
    try:
        inspect.signature(actor.receive).bind(None, None, None)
    except TypeError as error:
        raise InvalidArgumentError(
            f"{actor.__name__}.receive does not take a message and a context: {error}",
            remedy="Define it: `async def receive(self, message, context)`.",
        ) from None


def _check_name(name: object, siblings: Collection[str]) -> None:
    """Raise unless ``name`` is valid, and free among ``siblings``."""
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(
            f"an actor's name is a string that is not empty, not {name!r}", remedy="Leave name out to have one made."
        )
    if "/" in name:
        raise InvalidArgumentError(f"{name!r} has a '/', which separates the names in an actor's path", remedy="Use another character.")
    if name in siblings:
        raise InvalidArgumentError(f"an actor named {name!r} is alive here", remedy="Stop it first, or use another name.")
