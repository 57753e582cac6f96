"""The system: the actors' root, with devices."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import time
from collections.abc import Iterable, Iterator
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NoReturn, ParamSpec, cast

from accel.actors import ActorContext, ActorSystem, RestartStrategy
from accel.device.device import Device
from accel.device.epochs import Epochs
from accel.device.hints import SYSTEM_HINTS
from accel.device.hosting import check_hosting, check_not_importing, check_ranks, check_shareable
from accel.device.info import info_as_json
from accel.device.pool import Link, Pool, all_or_nothing, links_between
from accel.device.quarantine import set_quarantine_options
from accel.device.world import World, check_world
from accel.engine.context_actor import ContextActor
from accel.engine.core import DeviceCore
from accel.engine.device_actor import DeviceActor
from accel.engine.host import Host
from accel.engine.kernel_actor import NEVER_ENDS
from accel.engine.lifecycle import DeviceState
from accel.engine.options import FaultSource, check_libraries, check_options
from accel.engine.sender import Sender
from accel.errors import AccelError, InvalidArgumentError
from accel.hints import hinted
from accel.node.client import Node, NodeSession
from accel.process.forkserver_client import ForkserverSlot
from accel.registry import find_device, find_specs, load_backend
from accel.remote.actor import RemoteContextActor
from accel.remote.children import Children
from accel.remote.forkserver import ForkserverActor
from accel.remote.model_standby import ModelStandbyActor
from accel.remote.standby import StandbyActor
from accel.sharing.sharing import Sharing
from accel.shortage import raise_shortage
from accel.telemetry import Probes
from accel.values import check_count

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from accel.completion import CompletionName, CompletionStrategy
    from accel.engine.options import HostOption, Library

__all__ = ["System", "open_device"]

P = ParamSpec("P")


@hinted(SYSTEM_HINTS)
class System(ActorSystem):
    """Root of supervision: ``async with accel.System() as system``.

    Devices opened here are closed when it ends, and nothing is left behind.

    Parameters
    ----------
    name
        Shown in trees and logs.
    close_timeout
        Seconds that closing waits for devices and actors to handle what is queued; after that they
        are cancelled.
    workers
        The most threads for work that blocks; ``None``: four more than there are processors, at
        most 32.
    clock, sleep, rng
        See :class:`accel.actors.ActorSystem`.

    Raises
    ------
    InvalidArgumentError
        ``close_timeout`` is not a number of seconds, or ``workers`` not a number of threads.

    Attributes
    ----------
    probes : Probes
        Observers of what its devices and their services do: see :class:`accel.Probe`.
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
        super().__init__(name, close_timeout=close_timeout, workers=workers, clock=clock, sleep=sleep, rng=rng)
        self.probes = Probes()
        self._devices: list[Device] = []
        # Open quarantines and worlds, and closed ones until the next is opened.
        self._quarantines: list[Device] = []
        self._worlds: list[World] = []
        self._opening: dict[DeviceCore, str] = {}  # without a first context yet -> where it is made
        self._opened = self._opened_worlds = 0  # devices and worlds so far: their numbers begin at 1
        # Shared by the devices of this system, such as the completion poller.
        self._shared: dict[Any, Any] = {}

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: it lives in one process; send refs, whose tokens device.resolve turns back, or data")

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices opened so far and not closed, in that order."""
        return tuple(device for device in self._devices if device.state is not DeviceState.CLOSED)

    def snapshot(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict of the devices and the actors.

        Never waits, and sends nothing to a device.

        Returns
        -------
        dict
            ``"name"`` and ``"state"`` of the system. ``"devices"``: the fields of
            :class:`DeviceInfo` for each, with ``"ready"`` and ``"stalled"`` of its health,
            and ``"hardware"``: the fields of :class:`HardwareInfo` and ``"stale"``, or ``None``.
            ``"actors"``: the fields of :meth:`tree`. No names of files, no addresses but those of
            nodes, and no texts of errors are in it.

        Raises
        ------
        ClosedError
            This is not the system's loop.
        """
        return {
            "name": self.name,
            "state": self.state,
            "devices": [info_as_json(device.info(), device.health(), device.hardware()) for device in self.devices],
            "actors": dataclasses.asdict(self.tree()),
        }

    async def open_device(
        self,
        spec: str = "auto",
        *,
        node: Node | str | None = None,
        host: HostOption = "auto",
        completion: CompletionName | CompletionStrategy = "adaptive",
        streams: int = 8,
        libraries: Library | Iterable[Library] = (),
        memory_limit: int | None = None,
        pinned_limit: int | None = None,
        pending_limit: int = 1024,
        max_in_flight: int = 512,
        overload: Literal["wait", "reject"] = "wait",
        restart: RestartStrategy | None = None,
        standby: Literal["none", "imports", "context", "model"] = "none",
        spares: int = 1,
        hang_timeout: float | None = None,
        faults: FaultSource | None = None,
        debug: bool = False,
    ) -> Device:
        """Open a device and return once its first context is ready.

        Each call makes a device of its own. Its name is ``"cpu:0"``, for example; while another open
        device of the system has that name, it is ``"cpu:0#2"``.

        Parameters
        ----------
        spec
            ``"auto"`` (the best there is), ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or a device's UUID.
        node
            The machine that it is on: ``"host:port"`` of its ``python -m accel node``, or an
            :class:`accel.Node`. Contexts are in child processes there, and what they import is
            imported there. The device is called ``"cuda:0@host:port"``. ``None``: this machine.
        host
            Where the context lives: ``"inline"`` is this process, ``"process"`` a child of its own,
            which a fault takes with it while the service goes on; another child, a forkserver, has
            made its imports. ``"auto"``: inline, until a fault has taken the device from this
            process; then a child. Of several GPUs, which one fault would take all together, the
            first is inline and the others are in children from the beginning. An
            :class:`accel.InlineHost` or an :class:`accel.ProcessHost` sets the finer limits of the
            place.
        completion
            How ends are waited for: ``"adaptive"``, ``"polled"``, ``"sync"``, ``"host_fn"``, or a
            strategy with options of its own.
        streams
            How many streams independent ops of the built-in libraries, and batches, are spread
            over; ``put`` and ``get`` have one each besides. With 1 everything runs in one stream.
        libraries
            Libraries to make ready before this returns, and in every generation: ``"blas"``,
            ``"linalg"``, ``"elementwise"``, ``"reduce"``, ``"arrays"``, ``"dnn"``, ``"fft"``,
            ``"rng"``, ``"sparse"``, ``"compiler"``.
        memory_limit
            Bytes that may be taken from the device, for buffers and for what libraries work in.
        pinned_limit
            Bytes of host memory that :meth:`Device.pinned` may lock, and in which arrays move to
            and from a child; ``None``: 4 GiB, or a quarter of the memory of the machine, or of this
            process's control group, where that is less.
        pending_limit
            Submissions that may wait in the device's queue.
        max_in_flight
            Ops that may be on the device at once. Where a backend's queues are bounded it counts
            the commands that ops enqueue, and CUDA stops at 900.
        overload
            With the queue full, ``"wait"`` for room in order, or ``"reject"`` with
            :class:`~accel.MailboxFullError` and its ``retry_after``.
        restart
            How often contexts are rebuilt, and how fast; ``None`` is ``RestartStrategy()``.
        standby
            A spare child, which takes over when a fault has taken the context: one that has done
            its ``"imports"``, or that has a ``"context"`` too and what ``libraries`` need, which
            costs the memory of an idle context (on a GPU about 525 MiB), or that for a ``"model"``
            has also mapped the memory that registered libraries hold, and opened those that are
            :attr:`~accel.KernelLibrary.eager`. It is started in the background once the device is
            ready, and replaced when it was used or has died; :meth:`Device.info` says how it is.
            Not for ``host="inline"``.
        spares
            How many such children there are, and how many a :meth:`Device.quarantine` has. Each
            costs as much. A second one is ready where the next fault comes before the first one is
            replaced.
        hang_timeout
            Seconds after which a device on which ops are, and none of them ends, counts as hung:
            its child is killed, and another one goes on. Loading and compiling do not count, up to
            :attr:`ProcessHost.busy_timeout`. ``None``: never. Honoured in a child only: by
            ``host="auto"`` once the device has moved, not by ``"inline"``.
        faults
            A :class:`accel.testing.FaultPlan` that brings faults about on purpose.
        debug
            Run all ops in one stream, and synchronize after each, off the loop, so that an error
            names the op that caused it. Slow.

        Raises
        ------
        InvalidArgumentError
            If an option is wrong.
        UnsupportedError
            If an option asks for what this release does not offer; or a module opens a device while
            accel imports it: its program has no main guard.
        BackendUnavailableError
            If there is no such device, no process for it can be started, or its node cannot be
            reached or refuses.
        OutOfMemoryError
            If this machine has no descriptor, thread or memory for it now.
        ClosedError
            If the system is closed, or this is not its loop.
        """
        if not isinstance(spec, str):
            raise InvalidArgumentError(f"spec is {spec!r}", remedy="Use 'auto', a backend's name, 'cuda:1', or a UUID.")
        machine = None if node is None else Node.of(node)
        self._check_open("opens no more devices")
        check_not_importing()
        # 1. The options, before anything is touched.
        host_kind, hosting = check_hosting(host, standby, spares, hang_timeout, is_here=machine is None)
        options = check_options(
            completion, streams, libraries, memory_limit, pinned_limit, pending_limit, max_in_flight, overload, restart, faults, debug=debug
        )
        options = dataclasses.replace(options, **hosting)
        # 2. The hardware, on worker threads: finding it imports the backend.
        is_shared = standby in ("context", "model")  # a spare child has a context beside that of the device
        try:
            if machine is None:
                backend, description = await self.run_blocking(find_device, spec)
                if is_shared:
                    await self.run_blocking(check_shareable, backend, description.index)
                name = self._free_name(description.spec)
            else:
                description = (await machine.find_devices(self.run_blocking, [spec], None, is_shared=is_shared))[0]
                backend = await self.run_blocking(load_backend, description.backend)
                name = self._free_name(f"{description.spec}@{machine.address}")
            core = DeviceCore(self, backend, description, options, self._shared, name=name, probes=self.probes)
            # 3. The host and the first context. Calls meanwhile see the device in `_opening`.
            self._opening[core] = host_kind = self._choose_host(host_kind, core)
            try:
                session = None if machine is None else NodeSession(machine, self.run_blocking)
                if session is not None:
                    core.pinned.max_chunk = min(core.pinned.max_chunk, session.max_chunk)
                device = await self._start_device(core, host_kind, node=session)
            finally:
                del self._opening[core]
        except Exception as error:
            if not isinstance(error, AccelError):
                raise_shortage(error, f"device {spec!r} cannot be opened")
            raise
        self._devices = [*self.devices, device]  # without those that were closed meanwhile
        return device

    async def open_pool(
        self, specs: str | Iterable[str] = "auto", *, count: int | None = None, nodes: Iterable[Node | str] | None = None, **options: Any
    ) -> Pool:
        """Open several devices at the same time, and return them as a pool.

        Parameters
        ----------
        specs
            ``"cuda"``: all GPUs that are visible; ``"auto"``: all devices of the best backend; or a
            list of what :meth:`open_device` takes, in which a device may be named twice.
        count
            How many: the first ones of those that ``specs`` names. Where it names a single piece of
            hardware, as ``"cpu"`` and ``"cuda:1"`` do, ``count`` devices share it, each with a context
            and memory of its own. ``None``: one for each piece.
        nodes
            Machines, one at least, as ``node=`` of :meth:`open_device` takes them: ``specs`` and
            ``count`` count on each of them. ``None``: they count here.
        **options
            Of :meth:`open_device`, for all of them.

        Raises
        ------
        InvalidArgumentError
            If an option is wrong, or ``specs`` names nothing.
        BackendUnavailableError
            If there are fewer devices than ``count``.
        AccelError
            As :meth:`open_device`; then none is open.

        Notes
        -----
        Cancelling closes what was opened.
        """
        self._check_open("opens no more devices")
        if count is not None:
            check_count("count", count)
        if isinstance(libraries := options.get("libraries"), Iterator):
            options["libraries"] = tuple(libraries)  # it is read once, and there are several devices
        if "node" in options:
            raise InvalidArgumentError("a pool has no node=", remedy="Give nodes=[...].")
        if nodes is not None:
            machines = Node.all_of(nodes)
            given = specs if isinstance(specs, str) else list(specs)
            listed = await asyncio.gather(*[machine.find_devices(self.run_blocking, given, count, is_shared=False) for machine in machines])
            places = [(device.spec, machine) for machine, devices in zip(machines, listed, strict=True) for device in devices]
            opening = [self.open_device(spec, node=machine, **options) for spec, machine in places]
        else:
            opening = [self.open_device(spec, **options) for spec in await self.run_blocking(find_specs, specs, count)]
        opened = await all_or_nothing(opening, lambda device: device.aclose(timeout=0.0))
        # Threads have found the hardware, in any order, so that "cpu:0#2" may be before "cpu:0". Each
        # place gets the next device, by the order of the names, of those on its piece of hardware.
        by_name = sorted(opened, key=lambda device: (len(device.name), device.name))
        bare = {device: device.name.partition("#")[0] for device in opened}
        ordered = {spec: iter([device for device in by_name if bare[device] == spec]) for spec in bare.values()}
        return Pool(self, [next(ordered[bare[device]]) for device in opened], options)

    async def open_world(
        self,
        spec: str | Iterable[str] | Sequence[Device] = "auto",
        *,
        ranks: int | None = None,
        on_loss: Literal["replace", "shrink"] = "replace",
        hang_timeout: float | None = None,
        join_timeout: float = 10.0,
        pending_limit: int = 256,
        overload: Literal["wait", "reject"] = "wait",
        extra: str | Device | Iterable[str | Device] | None = None,
        **options: Any,
    ) -> World:
        """Open several devices as the ranks of one world, and return it once they have joined.

        Parameters
        ----------
        spec
            As for :meth:`open_pool`; or devices of this system, or a pool, which stay open when the
            world is closed. Several worlds may have the same devices. They have
            ``overload="wait"``, so that none refuses its part of a collective.
        ranks
            How many, 1024 at most; as ``count`` of :meth:`open_pool`.
        on_loss
            What follows the loss of a rank: ``"replace"``, its device comes back and joins again;
            ``"shrink"``, the others go on without it, and are counted anew.
        hang_timeout
            Seconds that a collective may take, what it waits for included; after that the ranks that
            have not reached it are killed and replaced. ``None``: as long as it takes.
        join_timeout
            Seconds in which all ranks must join a communicator; both timeouts are above 0.
        pending_limit
            Collectives, and batches of them, that may be in flight.
        overload
            What happens to further ones: as for :meth:`open_device`.
        extra
            A device that stands by, or several, as ``spec`` has them: a spec, or an open device. The
            first that is not LOST or closed itself takes the rank of a device that is LOST, and loads
            its parts of models.
        **options
            Of :meth:`open_device`, for all devices. ``host`` is ``"process"`` where it is left out:
            each rank then dies alone. A ``standby=`` makes replacing a rank fast.

        Raises
        ------
        InvalidArgumentError
            If an option is wrong.
        UnsupportedError
            If the devices' backend has no collectives, or none between the machines of these.
        AccelError
            As :meth:`open_pool`; or the ranks do not come together. Then none is open.
        """
        self._check_open("opens no more worlds")
        given: Any = spec if isinstance(spec, str) or not isinstance(spec, Iterable) else tuple(spec)  # it is read once
        several = isinstance(extra, Iterable) and not isinstance(extra, str)
        extras: Sequence[Any] = tuple(cast("Any", extra)) if several else () if extra is None else (extra,)
        epochs_options = check_world(ranks, len(extras), on_loss, hang_timeout, join_timeout, pending_limit, overload)
        if isinstance(given, tuple) and given and all(isinstance(device, Device) for device in given):
            if options or ranks not in (None, len(given)):
                raise InvalidArgumentError(
                    f"{len(given)} open devices were given, and options to open devices with", remedy="Leave these out, and ranks= too."
                )
            named = (*given, *extras)
            if len(set(map(id, named))) < len(named) or not all(device in self.devices for device in named):
                raise InvalidArgumentError(
                    "a device was given twice, is closed, or is of another system", remedy="Give each open device of this system once."
                )
            return await self._form_world(epochs_options, given, extras, owns_devices=False)
        # The library by which ranks join is loaded now, and in each spare child.
        options = {"host": "process", **options, "libraries": (*check_libraries(options.get("libraries", ())), "collective")}
        opened: list[Device] = []
        try:
            opened += await self.open_pool(given, count=ranks, **options)
            size = len(opened)
            if extras:
                opened += await self.open_pool(extras, **options)
            return await self._form_world(epochs_options, opened[:size], opened[size:], owns_devices=True)
        except BaseException:
            await asyncio.gather(*(device.aclose(timeout=0.0) for device in opened))
            raise

    async def _form_world(
        self, options: dict[str, Any], devices: Sequence[Device], extras: Sequence[Device] = (), *, owns_devices: bool
    ) -> World:
        """Return a world of devices, once they have joined; ``options`` are those of :class:`Epochs`.

        If they do not join, the caller closes those that it has opened.
        """
        known = (*devices, *extras)
        check_ranks(known)
        by_rank = {device.as_rank(): device for device in known}
        ranks, size = tuple(by_rank), len(devices)
        self._opened_worlds += 1
        epochs = Epochs(self._opened_worlds, ranks[:size], self.probes, extras=ranks[size:], **options)
        # For World.quarantine(): all ranks stay, whichever a fault takes.
        form = partial(self._form_world, options | {"on_loss": "replace"}, owns_devices=True)
        world = World(epochs, by_rank, form, owns_devices=owns_devices)
        self._worlds = [*(other for other in self._worlds if other.state is not DeviceState.CLOSED), world]
        try:
            await epochs.open()
        except BaseException:
            await world.leave()
            raise
        return world

    async def links(self) -> tuple[Link, ...]:
        """Return how arrays get from each open device to each other one."""
        return links_between(self.devices)

    async def _start_device(
        self, core: DeviceCore, host_kind: str, *, forkserver: ForkserverSlot | None = None, node: NodeSession | None = None
    ) -> Device:
        """Spawn the actor of a device, and return the device once its first context is ready.

        Also sets ``core.refs.device``.

        Parameters
        ----------
        core
            State of the device that outlives its contexts.
        host_kind
            Where contexts are made: ``"inline"`` in this process, ``"process"`` in children,
            ``"auto"`` in this process until a fault, and in children after that.
        forkserver
            For a quarantine: the forkserver of its device, which it shares.
        node
            Starts its children on another machine; ``None``: they are started here.
        """
        self._opened += 1
        slot, standby = forkserver or ForkserverSlot(), core.options.standby
        children = Children(core.name, slot, node)

        async def start_forkserver(owner: ActorContext) -> None:
            """Start the forkserver of the device, unless it needs none or shares one.

            The host calls it before the first context is made; see :class:`Host`.
            """
            if (host_kind == "process" or standby != "none") and forkserver is None and node is None:
                await owner.spawn(ForkserverActor, core, slot, starts_before_ready=host_kind == "process", name="forkserver")

        async def start_spare(owner: ActorContext) -> None:
            """Start the actors of ``standby=``, each of which keeps one spare child.

            The host calls it once the first context is ready.
            """
            kind = ModelStandbyActor if standby == "model" else StandbyActor
            for number in range(core.options.spares if standby != "none" else 0):
                name = "standby" if not number else f"standby-{number + 1}"
                await owner.spawn(kind, core, children, standby, name=name)

        host = Host(
            core,
            inline=None if host_kind == "process" else partial(ContextActor, share=Sharing),
            remote=None if host_kind == "inline" else partial(RemoteContextActor, children=children),
            children=children,
            start_forkserver=start_forkserver,
            start_spare=start_spare,
        )
        name = f"device-{self._opened}({core.name})"  # one that is closed may still be there
        actor = await self.spawn(DeviceActor, core, host, name=name, mailbox_size=core.options.pending_limit, restart=NEVER_ENDS)
        core.refs.device = device = Device(core, Sender(core, actor), host, actor, partial(self._open_quarantine, core, slot, node))
        return device

    async def _open_quarantine(self, core: DeviceCore, forkserver: ForkserverSlot, node: NodeSession | None) -> Device:
        """Open a device like the one of ``core``, with its libraries, in a child of its own.

        Called at the beginning of a ``device.quarantine()`` block. :attr:`devices` does not show
        the device; the system keeps it, and closes it if its user has not.
        """
        name = f"{core.name} quarantine"  # in its errors and its lines of the log
        quarantine = DeviceCore(self, core.backend, core.description, core.options, self._shared, name=name, probes=self.probes)
        set_quarantine_options(quarantine)
        # Without the libraries that were registered with refs: this device's memory is not there.
        quarantine.registrations.update((library, given) for library, given in core.registrations.items() if not given.refs)
        renewed = None if node is None else node.renewed()
        device = await self._start_device(quarantine, "process", forkserver=forkserver, node=renewed)
        self._quarantines = [*(other for other in self._quarantines if other.state is not DeviceState.CLOSED), device]
        return device

    def _free_name(self, spec: str) -> str:
        """Return the name of a new device: ``"cpu:0"``, or ``"cpu:0#2"`` where another has that."""
        taken = {device.name for device in self.devices} | {core.name for core in self._opening}
        numbered = (f"{spec}#{number}" for number in itertools.count(2))
        return next(name for name in itertools.chain([spec], numbered) if name not in taken)

    def _choose_host(self, host_kind: str, core: DeviceCore) -> str:
        """Return where the contexts of a new device are made: what :meth:`_start_device` takes.

        ``"auto"`` becomes ``"process"`` where this process cannot have the device, or where a fault
        of the device would end another one that this process has.
        """
        if host_kind != "auto":
            return host_kind
        description = core.description
        # A backend whose `fault` is set works in children only: this process cannot recover from it.
        is_process_poisoned = getattr(core.backend, "fault", None) is not None
        # Devices of some backends share their fate within a process: so only the first one, open or
        # being opened, is inline.
        has_other_inline = False
        if getattr(core.backend, "shares_fate", False):
            inline = [(info.backend, info.index) for info in (device.info() for device in self.devices) if info.host == "inline"]
            inline += [(other.description.backend, other.description.index) for other, kind in self._opening.items() if kind != "process"]
            has_other_inline = any(backend == description.backend and index != description.index for backend, index in inline)
        return "process" if is_process_poisoned or has_other_inline else "auto"

    async def _close_resources(self, deadline: float) -> None:
        """Close all devices and quarantines at the same time.

        If one raises, or this is cancelled, the closes that have not ended are cancelled. See
        :meth:`ActorSystem._close_resources`.
        """
        await asyncio.gather(*(world.leave() for world in self._worlds))
        timeout = max(0.0, deadline - self.loop.time())
        # Not the whole time: what has not ended then must be released within the deadline too.
        close_tasks = [asyncio.ensure_future(device.aclose(timeout=timeout * 0.9)) for device in (*self.devices, *self._quarantines)]
        try:
            await asyncio.gather(*close_tasks)
        finally:
            for task in close_tasks:
                task.cancel()


def _with_own_system(
    method: Callable[Concatenate[System, P], Coroutine[Any, Any, Device]],
) -> Callable[P, Coroutine[Any, Any, Device]]:
    """Return :func:`open_device`: :meth:`System.open_device` on a system of its own."""

    @wraps(method)
    async def open_device(*args: P.args, **kwargs: P.kwargs) -> Device:
        # Its docstring is set below: it differs from that of the method.
        system = System("of one device")
        await system.__aenter__()
        try:
            device = await method(system, *args, **kwargs)
        except BaseException:
            await system.aclose()
            raise
        device.adopt_system(system)
        return device

    signature = inspect.signature(method)
    open_device.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
    open_device.__qualname__ = "open_device"
    open_device.__doc__ = """Open a device for a notebook or a script: ``device = await accel.open_device("auto")``.

    The device owns its system, and ``await device.aclose()`` ends both. A program that ends before warns in
    the log. Parameters and errors are those of :meth:`System.open_device`; a service opens its devices in
    ``async with accel.System() as system``, which closes them whatever happens.
    """
    return open_device


open_device = _with_own_system(System.open_device)
