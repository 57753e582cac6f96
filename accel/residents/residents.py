"""Values that a device keeps by name: loaded once for all callers, and again after a rebuild."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accel.errors import AccelError, ClosedError, ContextPoisonedError, InvalidArgumentError, StaleRefError
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.engine.core import DeviceCore

__all__ = ["Residents", "refs_in"]

_MOST = 4096
"""Names that one device keeps values for."""

_ROUNDS = 3
"""How often one load begins anew because a rebuild came between."""

_current: contextvars.ContextVar[_Loading | None] = contextvars.ContextVar("accel_current", default=None)
"""The load whose loader runs here, in any task."""


class _Loading:
    """One call of a loader, of any device: its waiters, and the loads that it waits for."""

    __slots__ = ("device", "name", "waiters", "waits_for")

    def __init__(self, device: str, name: str) -> None:
        self.device = device
        self.name = name
        self.waiters: list[asyncio.Future[Any]] = []
        self.waits_for: list[_Loading] = []

    def path_to(self, other: _Loading) -> list[_Loading]:
        """Return the loads from this one to ``other``, each of which waits for the next.

        Empty if there is no such path.
        """
        paths = {self: [self]}
        pending = [self]
        while pending:
            load = pending.pop()
            if load is other:
                return paths[load]
            for awaited in load.waits_for:
                if awaited not in paths:
                    paths[awaited] = [*paths[load], awaited]
                    pending.append(awaited)
        return []

    def tell(self, value: Any, error: Exception | None = None) -> None:
        """Answer the waiters."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                if error is None:
                    waiter.set_result(value)
                else:
                    waiter.set_exception(error.clone() if isinstance(error, AccelError) else error)


class _Resident:
    """One name.

    Attributes
    ----------
    durable : bool
        As it was asked for.
    value : object
        What the loader returned, once ``refs`` is not ``None``.
    refs : tuple of AccelRef or None
        All in the value.
    generation : int
        In which it was loaded.
    load : _Loading or None
        The load that goes on.
    """

    __slots__ = ("durable", "generation", "load", "refs", "value")

    def __init__(self, *, durable: bool) -> None:
        self.durable = durable
        self.value: Any = None
        self.refs: tuple[AccelRef, ...] | None = None
        self.generation = 0
        self.load: _Loading | None = None

    def tell(self, value: Any, error: Exception | None = None) -> None:
        """End the load."""
        load, self.load = self.load, None
        if load is not None:
            load.tell(value, error)


class Residents:
    """The residents of one device. Used on the loop's thread only.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    device
        Its public face, for loaders.
    """

    def __init__(self, core: DeviceCore, device: object) -> None:
        self._core = core
        self._device = device
        self._named: dict[str, _Resident] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, name: str, loader: Callable[[Any], Awaitable[Any]], *, durable: bool) -> Any:
        """See :meth:`accel.Device.resident`."""
        self._core.guard()
        entry = self._entry(name, loader, durable=durable)
        asking = _current.get()
        waiter = self._core.loop.create_future()
        load = entry.load
        if load is None and self._is_there(entry):
            return entry.value
        is_first = load is None
        if load is None:
            load = entry.load = _Loading(self._core.name, name)
        elif asking is not None:
            self._check_circle(load.path_to(asking))
        # Before it begins: a loader may run, and end, when its task is made.
        load.waiters.append(waiter)
        if asking is not None:
            asking.waits_for.append(load)
        try:
            if is_first:
                self._begin(name, entry, load, loader)
            del entry
            return await waiter
        finally:
            if asking is not None:
                asking.waits_for.remove(load)
            del waiter  # a traceback holds this frame, and the waiter holds the error

    def _check_circle(self, path: list[_Loading]) -> None:
        """Refuse to let the last load of ``path`` wait for the first."""
        if path:
            device = self._core.name
            loads = (path[-1], *path)
            names = [repr(load.name) if load.device == device else f"{load.name!r} of {load.device}" for load in loads]
            raise InvalidArgumentError(
                f"the loaders of residents wait for each other in a circle: {' waits for '.join(names)}",
                device=device,
                remedy="Let loaders not wait in a circle: load what both need as a resident of its own.",
            )

    def evict(self, name: str) -> bool:
        """See :meth:`accel.Device.evict`."""
        self._core.guard()
        if not isinstance(name, str):
            raise InvalidArgumentError(f"name is {name!r}", remedy="Give the name that it was loaded by.", device=self._core.name)
        return self._named.pop(name, None) is not None

    def _entry(self, name: str, loader: object, *, durable: bool) -> _Resident:
        if not isinstance(name, str) or not callable(loader) or not isinstance(durable, bool):
            raise InvalidArgumentError(
                f"resident {name!r} with loader {loader!r} and durable={durable!r}",
                device=self._core.name,
                remedy="Give a name, an async function of the device, and True or False.",
            )
        entry = self._named.get(name)
        if entry is None:
            if durable:
                self._core.durable.check_offered()
            if len(self._named) >= _MOST:
                raise InvalidArgumentError(f"{self._core.name} has {_MOST} residents", device=self._core.name, remedy="Evict some.")
            entry = self._named[name] = _Resident(durable=durable)
        elif entry.durable is not durable:
            raise InvalidArgumentError(
                f"resident {name!r} was asked for with durable={entry.durable}",
                device=self._core.name,
                remedy="Ask for it so, or evict it.",
            )
        return entry

    def _is_there(self, entry: _Resident) -> bool:
        if entry.refs is None or not (entry.durable or entry.generation == self._core.refs.live_generation):
            return False
        return not any(ref.is_stale for ref in entry.refs)

    def _begin(self, name: str, entry: _Resident, load: _Loading, loader: Callable[[Any], Awaitable[Any]]) -> None:
        entry.value, entry.refs = None, None  # its memory is free for what comes
        context = contextvars.copy_context()
        context.run(_current.set, load)
        task = self._core.loop.create_task(self._load(name, entry, loader), name=f"accel-resident-{name}", context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step has answered no waiter.
        task.add_done_callback(lambda _: load.tell(None, ClosedError(f"device {self._core.name} was closed", device=self._core.name)))

    async def _load(self, name: str, entry: _Resident, loader: Callable[[Any], Awaitable[Any]]) -> None:
        """Load, and answer all waiters, also with an error; the next call tries again."""
        try:
            entry.value, entry.refs, entry.generation = await self._loaded(name, entry, loader)
        except Exception as error:
            entry.tell(None, error)
        except BaseException as error:  # the device is closed, or the program ends
            text = f"the load of resident {name!r} on {self._core.name} ended with {type(error).__name__}"
            entry.tell(None, ClosedError(text, device=self._core.name))
            raise
        else:
            entry.tell(entry.value)

    async def _loaded(self, name: str, entry: _Resident, loader: Callable[[Any], Awaitable[Any]]) -> tuple[Any, tuple[AccelRef, ...], int]:
        core = self._core
        for left in reversed(range(_ROUNDS)):
            await core.lifecycle.wait_ready()
            generation = core.refs.live_generation
            try:
                loading = loader(self._device)
                if not inspect.isawaitable(loading):
                    raise InvalidArgumentError(
                        f"the loader of resident {name!r} returned a {type(loading).__name__}, and nothing to await",
                        device=core.name,
                        remedy="Define it: `async def loader(device)`.",
                    )
                value = await loading
            except (ContextPoisonedError, StaleRefError) as error:
                # What was on the device when it faulted may be why: that is not tried again
                # unasked.
                is_innocent = isinstance(error, StaleRefError) or error.executed == "no"
                if left and is_innocent and generation != core.refs.live_generation and not core.lifecycle.is_final:
                    continue
                raise
            found = list(refs_in(value, f"the value of resident {name!r}"))
            if entry.durable:
                self._check_durable(found)
            refs = tuple([ref for _, ref in found])
            if not left or generation == core.refs.live_generation or (entry.durable and not any(ref.is_stale for ref in refs)):
                return value, refs, generation
        raise AssertionError("the last round returns, or raises")

    def _check_durable(self, found: list[tuple[str, AccelRef]]) -> None:
        for place, ref in found:
            if not ref.durable:
                raise InvalidArgumentError(
                    f"{place} is not durable: {ref!r}",
                    device=self._core.name,
                    remedy="Make it with durable=True, or load the resident without.",
                )

    async def aclose(self) -> None:
        """End the loads, and release everything."""
        self._named.clear()
        tasks = self._tasks - {asyncio.current_task()}  # a loader may close the device
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def refs_in(value: Any, place: str) -> Iterator[tuple[str, AccelRef]]:
    """Yield each ref in mappings, lists, tuples, sets and dataclasses, with its place there."""
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [(place, value)]
    while pending:
        where, part = pending.pop()
        if isinstance(part, AccelRef):
            yield where, part
            continue
        if id(part) in seen:
            continue
        seen.add(id(part))
        inside: list[tuple[str, Any]] = []
        if isinstance(part, Mapping):
            inside = [(f"{where}[{key!r}]", item) for key, item in part.items()]
        elif isinstance(part, (list, tuple, set, frozenset)):
            inside = [(f"{where}[{index}]", item) for index, item in enumerate(part)]
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            inside = [(f"{where}.{field.name}", getattr(part, field.name)) for field in dataclasses.fields(part)]
        pending.extend(reversed(inside))
