"""Several devices as one: which of them gets work, what happens when one is lost, and how they come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, overload

from accel._log import get_logger
from accel.device.device import Device
from accel.device.info import DeviceHealth
from accel.device.peers import peers_of
from accel.engine.lifecycle import DeviceState
from accel.errors import (
    AccelError,
    ClosedError,
    ContextPoisonedError,
    DeadlineExceededError,
    DeviceLostError,
    InvalidArgumentError,
    StaleRefError,
)
from accel.hints import NotEntered
from accel.rendezvous import rendezvous
from accel.values import check_choice, check_count, check_flag, check_timeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator

    from accel.models import Model
    from accel.node.client import Node
    from accel.rendezvous import Key

__all__ = ["Link", "Pool", "PoolHealth", "all_or_nothing", "links_between", "summed"]

logger = get_logger()

P = ParamSpec("P")
T = TypeVar("T")

_MOST_FAULTS = 2
"""Devices on which one work may fault: most likely it faults the others too."""


@dataclass(frozen=True, slots=True)
class PoolHealth:
    """Whether a pool serves. It is read from the states of its devices; nothing is sent.

    Parameters
    ----------
    is_live
        Whether enough devices serve, or will without intervention.
    is_ready
        Whether enough devices serve now.
    ready
        How many do.
    devices
        Name -> health, of all devices; those that are being drained do not count as ready.
    """

    is_live: bool
    is_ready: bool
    ready: int
    devices: Mapping[str, DeviceHealth]


@dataclass(frozen=True, slots=True)
class Link:
    """How arrays get from one device of a pool to another.

    Parameters
    ----------
    source, target
        The names of the devices.
    way
        How ``target.put(ref)`` copies. ``"mapped"``: from the source's memory, which the target's
        context maps; small buffers go as with ``"host"``: ``target.put(await source.get(ref))``.
    peer
        Whether the hardware of ``target`` can reach the memory of the source's; ``None`` where the
        backend does not tell, or both are on one piece of hardware.
    """

    source: str
    target: str
    way: Literal["mapped", "host"]
    peer: bool | None


class DeviceSystem(Protocol):
    """What a pool needs of an :class:`accel.System`."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """See :attr:`accel.System.devices`."""

    @property
    def open_device(self) -> Callable[..., Awaitable[Device]]:
        """See :meth:`accel.System.open_device`."""

    async def run_blocking(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """See :meth:`accel.System.run_blocking`."""


@dataclass(slots=True, eq=False)
class _Member:
    """A device of a pool. ``with member`` counts a work of :meth:`Pool.run` that is on it."""

    device: Device
    runs: int = 0  # works that are on it
    chosen: int = 0  # the number of the last choice that took it; 0 before the first
    is_draining: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while no work is on it

    def __post_init__(self) -> None:
        self.idle.set()

    def __enter__(self) -> None:
        self.runs += 1
        self.idle.clear()

    def __exit__(self, *_: object) -> None:
        self.runs -= 1
        if not self.runs:
            self.idle.set()


class Pool(Sequence[Device], NotEntered):
    """Several opened devices; made by :meth:`accel.System.open_pool`.

    A sequence of devices, also by name: ``pool[0]`` and ``pool["cuda:1"]``. Its system closes the
    devices, or :meth:`aclose`. It brings no lost device back: see :meth:`accel.Device.reopen`.
    """

    def __init__(self, system: DeviceSystem, devices: Iterable[Device], options: Mapping[str, Any]) -> None:
        self._system = system
        self._members = [_Member(device) for device in devices]
        self._options = options  # of open_device(), for devices that are added
        self._choices = 0  # so far; see _Member.chosen

    def __repr__(self) -> str:
        return f"<Pool {', '.join(f'{device.name} {device.state.value}' for device in self) or 'of no devices'}>"

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Device]:
        return iter(self[:])

    @overload
    def __getitem__(self, place: int | str) -> Device: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Device, ...]: ...
    def __getitem__(self, place: int | str | slice) -> Device | tuple[Device, ...]:
        """Return a device, by its place or its name; or those of a slice."""
        if isinstance(place, str):
            return self._member(place).device
        if isinstance(place, slice):
            return tuple(member.device for member in self._members[place])
        return self._members[place].device

    # -- work

    def pick(self, key: Key | None = None) -> Device:
        """Return a device that serves now. Never waits.

        Parameters
        ----------
        key
            What the work is for. Work of one key gets the same device as long as that serves, in
            every process: when one of n devices goes, one of n keys gets another one. ``None``: the
            device with the fewest calls that are awaited, in turn where these are equal.

        Raises
        ------
        DeviceLostError
            All devices are lost, or none is left.
        ContextPoisonedError
            None serves now; it says in which states they are. One will, without intervention.
        ClosedError
            All devices are closed.
        """
        member = self._choose(key, self._ready())
        if member is None:
            raise self._no_device_error()
        return member.device

    async def run(
        self,
        work: Callable[[Device], Awaitable[T]],
        *,
        key: Key | None = None,
        idempotent: bool = False,
        timeout: float | None = None,
    ) -> T:
        """Run work on a device, and on the next one if it is lost. Return what it returns.

        Parameters
        ----------
        work
            ``async def work(device)``. Arrays that it needs it puts on the device itself: refs
            belong to one device.
        key
            As for :meth:`pick`.
        idempotent
            Whether the work may be done twice. Then it is run on the next device too if this one
            faulted meanwhile, but not once two devices did, because it most likely faults them all.
            Work that raises :class:`~accel.DeviceLostError` moves whatever this says.
        timeout
            Seconds for all attempts together, after which the work is cancelled.

        Raises
        ------
        DeadlineExceededError
            The timeout ran out.
        DeviceLostError, ClosedError
            As :meth:`pick`.
        Exception
            What the last attempt raised. There is one attempt on a device at most.

        Notes
        -----
        Where no device serves now, it takes one that is being rebuilt; ops wait for that.
        """
        check_flag("idempotent", idempotent)
        check_timeout(timeout)
        if timeout is not None and timeout <= 0:
            raise DeadlineExceededError("the work had no time to run")
        try:
            async with asyncio.timeout(timeout) as limit:
                return await self._run(work, key, idempotent)
        except TimeoutError as error:
            if isinstance(error, AccelError) or not limit.expired():  # the work's own
                raise
            raise DeadlineExceededError(f"the work did not end in {timeout} s") from error

    async def _run(self, work: Callable[[Device], Awaitable[T]], key: Key | None, idempotent: bool) -> T:
        """Run a work on one device after the other, until it moves no more: see :meth:`run`.

        No device gets it twice. A fault of the context moves it only if it is ``idempotent``, for
        it may have had effects.
        """
        tried: set[_Member] = set()
        faults = 0
        member = self._next(key, tried)
        if member is None:
            raise self._no_device_error()
        while True:
            tried.add(member)
            device, generation = member.device, member.device.generation
            try:
                with member:
                    return await work(device)
            except AccelError as error:
                if not isinstance(error, DeviceLostError):
                    # A fault within the work has made a ref of it stale: that counts as a fault.
                    is_stale = isinstance(error, StaleRefError) and (
                        device.generation != generation or device.state is not DeviceState.READY
                    )
                    faults += 1
                    if not (idempotent and (error.is_fault or is_stale) and faults < _MOST_FAULTS):
                        raise
                following = self._next(key, tried)
                if following is None:
                    raise
                logger.warning("pool_work_moved", device=device.name, generation=generation, to=following.device.name, error=error)
                member = following

    async def load_model(self, target: Any, *, on_progress: Callable[[str, int, int], object] | None = None, **options: Any) -> list[Model]:
        """Load a model on all devices at the same time, and return the models in the devices' order.

        Parameters
        ----------
        target, **options
            As for :meth:`accel.Device.load_model`.
        on_progress
            As for :meth:`accel.Device.load_model`; called with the sums over all devices.

        Raises
        ------
        DeviceLostError
            There is no device.
        AccelError
            What the first load that failed raised. The model is on no device then.
        """
        members = self._taking()
        if not members:
            raise self._no_device_error()
        told: dict[tuple[str, str], tuple[int, int]] = {}
        loads = []
        for member in members:
            # What cannot be called is refused by the device.
            progress = summed(on_progress, told, member.device.name) if callable(on_progress) else on_progress
            loads.append(member.device.load_model(target, on_progress=progress, **options))
        return await all_or_nothing(loads, lambda model: model.aclose())

    # -- devices that come and go

    async def add(self, device: Device | str, *, node: Node | str | None = None) -> Device:
        """Let another device take work, and return it.

        A closed device leaves the pool when another one with its name comes.

        Parameters
        ----------
        device
            One of the pool's system, which may have been drained here before; or what
            :meth:`accel.System.open_device` takes, to open one with the pool's options.
        node
            The machine on which to open it.

        Raises
        ------
        InvalidArgumentError
            It is a device of another system, or in the pool; or it is open, and has a ``node=``.
        AccelError
            As :meth:`accel.System.open_device`.
        """
        if isinstance(device, str):
            device = await self._system.open_device(device, node=node, **self._options)
        elif node is not None:
            raise InvalidArgumentError(f"{device!r:.80} is open, and stays where it is", remedy="Give node= with a name.")
        elif not isinstance(device, Device) or device not in self._system.devices:
            raise InvalidArgumentError(f"{device!r:.80} is no open device of the pool's system", remedy="Open it there, or give its name.")
        elif device in self:
            raise InvalidArgumentError(f"{device.name} is in the pool", remedy="Each device is there once.", device=device.name)
        # A closed device leaves its name to the next one, and must not be found by it any more.
        self._members = [member for member in self._members if member.device.name != device.name]
        self._members.append(_Member(device))
        logger.info("pool_device_added", device=device.name, generation=device.generation, devices=len(self))
        return device

    async def drain(self, device: Device | str | int, *, timeout: float | None = None) -> Device:
        """Give no more work to a device, wait until it is idle, and let it leave the pool.

        It stays open, and :meth:`add` takes it back.

        Parameters
        ----------
        device
            The device, its name or its place.
        timeout
            Seconds of waiting; ``None`` waits as long as it takes.

        Raises
        ------
        InvalidArgumentError
            It is not in the pool, or is being drained.
        DeadlineExceededError
            It is not idle in time. It takes work as before, and so it does if this is cancelled.

        Notes
        -----
        A device is idle when all work that :meth:`run` has given to it has ended, and nothing is
        awaited or in flight on it. Callers that got it from :meth:`pick` may still use it. A service
        that has a model on it has a drain of its own.
        """
        member = self._member(device)
        check_timeout(timeout)
        if member.is_draining:
            raise InvalidArgumentError(f"{member.device.name} is being drained", remedy="Wait for that.", device=member.device.name)
        member.is_draining = True
        try:
            async with asyncio.timeout(timeout):
                await member.idle.wait()
                await member.device.wait_idle()
        except TimeoutError as error:
            raise DeadlineExceededError(f"{member.device.name} was not idle in {timeout} s", device=member.device.name) from error
        else:
            if member in self._members:  # else it was closed, and another one has its name
                self._members.remove(member)
        finally:
            member.is_draining = False
        logger.info("pool_device_drained", device=member.device.name, generation=member.device.generation, devices=len(self))
        return member.device

    async def aclose(self, *, timeout: float | None = None) -> None:
        """Close all devices at the same time; see :meth:`accel.Device.aclose`."""
        await asyncio.gather(*(device.aclose(timeout=timeout) for device in self))

    # -- state

    def health(self, ready: Literal["any", "all"] | int = "any") -> PoolHealth:
        """Return whether enough devices serve. Never waits, and sends nothing to them.

        Called on the loop's thread.

        Parameters
        ----------
        ready
            How many are enough: ``"any"`` one, ``"all"`` that are not being drained, or a number. A
            number counts devices that are being drained as missing, so that a liveness probe should
            ask for ``"any"``.

        Raises
        ------
        InvalidArgumentError
            ``ready`` is none of these.
        """
        taking = {member.device for member in self._taking()}
        devices = {device.name: device.health() for device in self}
        if isinstance(ready, str):
            check_choice("ready", ready, "any", "all")
            needed = len(taking) if ready == "all" else 1
        else:
            needed = check_count("ready", ready, remedy="Use 'any', 'all' or a number of devices.")
        needed = max(needed, 1)  # a pool whose devices are all being drained is not ready
        found = [devices[device.name] for device in taking]
        serving = sum(health.is_ready for health in found)
        live = sum(health.is_live for health in found)
        return PoolHealth(live >= needed, serving >= needed, serving, devices)

    async def links(self) -> tuple[Link, ...]:
        """Return how arrays get from each device to each other one."""
        return links_between(self)

    # -- the choice

    def _taking(self) -> list[_Member]:
        """Return the members that are not being drained, whether they serve or not."""
        return [member for member in self._members if not member.is_draining]

    def _ready(self) -> list[_Member]:
        """Return the members that serve now, and are not being drained."""
        return [member for member in self._taking() if member.device.health().is_ready]

    def _next(self, key: Key | None, tried: set[_Member]) -> _Member | None:
        """Return a member for a work that was not ``tried``: one that serves, else one that will.

        ``None`` if there is neither.
        """
        left = [member for member in self._ready() if member not in tried]
        left = left or [member for member in self._taking() if member not in tried and member.device.health().is_live]
        return self._choose(key, left)

    def _choose(self, key: Key | None, members: Sequence[_Member]) -> _Member | None:
        """Return the one of ``members`` that gets work of this key; ``None`` if there are none.

        With a key the member that it hashes to, the same as long as that is among them. Without one
        the least busy member, and of several the one that was chosen the longest time ago.
        """
        if key is not None:
            named = {member.device.name: member for member in members}
            name = rendezvous(key, named)
            return None if name is None else named[name]
        chosen = min(members, key=lambda member: (member.device.pending + member.runs, member.chosen), default=None)
        if chosen is not None:
            self._choices += 1
            chosen.chosen = self._choices
        return chosen

    def _member(self, device: Device | str | int) -> _Member:
        """Return the member of a device, which its name or its place may stand for.

        A negative place counts from the end.
        """
        for place, member in enumerate(self._members):
            if type(device) is not bool and device in (place, place - len(self), member.device, member.device.name):
                return member
        names = ", ".join(known.name for known in self)
        raise InvalidArgumentError(f"{device!r:.80} is not in the pool", remedy=f"It has {names or 'no devices'}.")

    def _no_device_error(self) -> AccelError:
        """Return an error that says why no device takes work."""
        states = [member.device.state for member in self._members]
        if states and all(state is DeviceState.CLOSED for state in states):
            return ClosedError("all devices of the pool are closed")
        said = [f"{member.device.name} {'draining' if member.is_draining else member.device.health().reason}" for member in self._members]
        what = f"no device of the pool serves: {', '.join(said) or 'there is none'}"
        if any(member.device.health().is_live for member in self._members):
            return ContextPoisonedError(what, executed="no", remedy="Send it again once one is ready.")
        return DeviceLostError(what, remedy="Call `await device.reopen()` on one, or `await pool.add(...)` another.")


async def all_or_nothing(calls: Iterable[Coroutine[Any, Any, T]], undo: Callable[[T], Awaitable[object]]) -> list[T]:
    """Await calls at the same time. If one raises, or this is cancelled, undo those that succeeded.

    The first error is raised once all others have ended and are undone. Cancelling does not stop
    that: it is raised afterwards, instead of the error.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        ending = asyncio.create_task(_end(tasks, undo))
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.wait({ending})
            except asyncio.CancelledError as error:
                cancelled = error
        ending.result()
        if cancelled is not None:
            raise cancelled from None
        raise
    finally:
        del tasks  # the error's traceback keeps this frame, and the tasks what they have loaded


async def _end(tasks: Sequence[asyncio.Task[T]], undo: Callable[[T], Awaitable[object]]) -> None:
    """Cancel tasks, and undo those that succeeded."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await asyncio.gather(*(undo(task.result()) for task in tasks if not task.cancelled() and task.exception() is None))


def summed(
    on_progress: Callable[[str, int, int], object], told: dict[tuple[str, str], tuple[int, int]], device: str
) -> Callable[[str, int, int], object]:
    """Return the ``on_progress`` of one device, which calls that of the pool with sums.

    ``told`` has the numbers of all devices: (stage, device) -> (done, total).
    """

    def progress(stage: str, done: int, total: int) -> object:
        told[stage, device] = done, total
        done, total = map(sum, zip(*(counts for (of, _), counts in told.items() if of == stage), strict=True))
        return on_progress(stage, done, total)

    return progress


def links_between(devices: Iterable[Device]) -> tuple[Link, ...]:
    """Return the link from each device to each other one."""
    peers = [peers_of(device) for device in devices]
    return tuple(
        Link(
            source.core.name,
            target.core.name,
            target.way_from(source),
            target.can_access(source.core.description.index) if target.is_beside(source) else None,
        )
        for source in peers
        for target in peers
        if source is not target
    )
