"""Machines of a Ray cluster as nodes: Ray places an agent on each of them, and starts another where one is lost.

::

    async with nodes(count=4, gpus=1) as machines, accel.System() as system:
        pool = await system.open_pool("cuda", nodes=machines)
        machines.follow(pool)

Ray carries no calls and no arrays: the system is connected to the agents themselves.

Needs Ray: ``pip install '.[ray]'``, in a checkout. It is imported by :func:`nodes`, on a thread of its own, because that takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from accel._log import get_logger
from accel.device import Device, Node, Pool
from accel.errors import AccelError, BackendUnavailableError, InvalidArgumentError
from accel.values import check_choice, check_count, check_seconds

if TYPE_CHECKING:
    import concurrent.futures
    import ssl
    from collections.abc import AsyncIterator, Iterator

__all__ = ["RayNodes", "nodes"]

logger = get_logger()

T = TypeVar("T")

_PLACEMENTS = ("spread", "pack", "strict_spread", "strict_pack")
_PAUSE = 0.5
"""Seconds between two attempts to reach an actor, and before the second one to open a device."""
_LONGEST_PAUSE = 30.0
"""Seconds of the longest pause between attempts to open a device."""
_ASKED = "asked"
"""The concurrency group in which an actor says where its agent listens: its other thread waits for the agent's end."""
_AGENT = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv.pop(1)):
    runpy.run_module("accel", run_name="__main__")
"""
"""``python -m accel``, which ends when its parent does: Ray kills actors with SIGKILL."""


@contextlib.asynccontextmanager
async def nodes(
    *,
    count: int,
    cpus: float = 1,
    gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    placement: Literal["spread", "pack", "strict_spread", "strict_pack"] = "spread",
    address: str | None = None,
    timeout: float = 60.0,
    keep: float = 5.0,
    tls: ssl.SSLContext | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
) -> AsyncIterator[RayNodes]:
    """Reserve parts of a Ray cluster while the block runs, with an agent in each. They are released however it is left.

    Parameters
    ----------
    count
        How many parts; several may be on one machine, as ``placement`` says.
    cpus, gpus, resources
        What Ray reserves for each: processors, GPUs, and resources of the cluster's own. An agent
        offers the GPUs that Ray gave to it, and no others.
    placement
        Of all parts: ``"spread"`` over the machines if there are enough, ``"pack"`` on few of them;
        the strict ones each on another machine, or all on one, or not at all.
    address
        Of the cluster, as ``ray.init`` takes it. ``None``: the one that this process is connected
        to, as it is in a Ray job; else that of ``RAY_ADDRESS``, or of this machine.
    timeout
        Seconds within which all agents must have started. What Ray is still about then, such as
        the connection to its cluster, is undone as soon as it has ended.
    keep
        Seconds for which a node that is not reached may come back, with its durable memory.
    tls
        How the agents' certificates are verified, as that of an :class:`accel.Node`. ``None``:
        connections are not encrypted, as Ray's own are not unless it is told to.
    tls_cert, tls_key
        The files of certificate and key, on each machine, each with its own; see ``python -m accel
        node``.

    Raises
    ------
    InvalidArgumentError
        An argument is wrong.
    BackendUnavailableError
        Ray is not installed, the cluster is not reached, or has no room for all in time, or an
        agent does not start.
    """
    bundle = _bundle(cpus, gpus, resources)
    check_count("count", count)
    check_choice("placement", placement, *_PLACEMENTS)
    check_seconds("timeout", timeout)
    check_seconds("keep", keep)
    if (tls is None) != (tls_cert is None) or (tls_key is not None and tls_cert is None):
        raise InvalidArgumentError("one end alone is given TLS", remedy="Give tls= and tls_cert=, or neither.")
    arguments = ["--keep", str(keep), *(["--no-tls"] if tls_cert is None else ["--tls-cert", tls_cert])]
    arguments += [] if tls_key is None else ["--tls-key", tls_key]
    token = secrets.token_hex(32)
    unplaced = Node("127.0.0.1:0", token, tls or False)
    thread = ThreadPoolExecutor(1, "accel-ray")
    cluster = _Cluster(thread)
    watching: list[asyncio.Task[None]] = []
    reserving = thread.submit(cluster.reserve, address, [bundle] * count, placement.upper(), token, arguments)
    try:
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wrap_future(reserving)
                addresses = await asyncio.gather(*[cluster.address(number) for number in range(count)])
        except TimeoutError as error:
            raise BackendUnavailableError(
                f"Ray had not started {count} agents, each with {bundle}, in {timeout:g} s",
                library="ray",
                retryable=True,
                remedy="`ray status` says what the cluster has, and what is in use.",
            ) from error
        machines = RayNodes(cluster, [replace(unplaced, address=found) for found in addresses], keep)
        watching = [asyncio.create_task(machines.watch(number)) for number in range(count)]
        yield machines
    finally:
        for task in watching:
            task.cancel()
        releasing = thread.submit(cluster.release)
        if reserving.done():  # else Ray is not to be interrupted, and its thread releases all as soon as it can
            await _finished(asyncio.gather(*watching, asyncio.wrap_future(releasing), return_exceptions=True))
        thread.shutdown(wait=False)


class RayNodes(Sequence[Node]):
    """The nodes that Ray has started; made by :func:`nodes`.

    A sequence, as ``nodes=`` of :meth:`accel.System.open_pool` takes it. One that is lost stays in
    it until Ray has started another in its place.
    """

    def __init__(self, cluster: _Cluster, started: Sequence[Node], keep: float) -> None:
        self._cluster = cluster
        self._nodes = list(started)
        self._keep = keep
        self._followers: list[_Follower] = []

    def __repr__(self) -> str:
        return f"<RayNodes {', '.join(node.address for node in self)}>"

    def __len__(self) -> int:
        return len(self._nodes)

    @overload
    def __getitem__(self, place: int) -> Node: ...
    @overload
    def __getitem__(self, place: slice) -> list[Node]: ...
    def __getitem__(self, place: int | slice) -> Node | list[Node]:
        """Return a node by its place, or those of a slice."""
        return self._nodes[place]

    def follow(
        self,
        pool: Pool,
        *,
        on_added: Callable[[Device], Awaitable[object]] | None = None,
        on_lost: Callable[[Device], Awaitable[object]] | None = None,
    ) -> None:
        """Drain and close the pool's devices of a node that is lost, and add those of the one in its place.

        Parameters
        ----------
        pool
            One with devices on these nodes. The same devices are opened on a node that is new.
        on_added
            ``async def on_added(device)``: the pool has another device. A service gets its model
            here, ``await service.add(await device.load_model(...))``.
        on_lost
            ``async def on_lost(device)``: the pool is about to lose one. A service is told here,
            ``await service.drain(device)``.

        Raises
        ------
        InvalidArgumentError
            The pool has no devices on these nodes.
        """
        specs = [[device.name.partition("@")[0] for device in _devices_on(node, pool)] for node in self]
        if not any(specs):
            raise InvalidArgumentError(f"{pool!r:.80} has no devices on {self!r:.80}", remedy="Open it with nodes=, and these.")
        self._followers.append(_Follower(pool, specs, [[] for _ in specs], on_added, on_lost))

    async def watch(self, number: int) -> None:
        """Tell pools of each loss of a node, and of the one in its place, until this is cancelled. Called by :func:`nodes`."""
        while True:
            adding = asyncio.create_task(self._add_missing(number))
            try:
                await self._cluster.end(number)
            finally:
                adding.cancel()
                await asyncio.gather(adding, return_exceptions=True)
            node = self._nodes[number]
            logger.warning("ray_node_lost", node=node.address)
            starting = asyncio.ensure_future(self._cluster.address(number))
            await asyncio.wait({starting}, timeout=self._keep)
            try:
                is_removed = not starting.done()
                if is_removed:
                    await self._remove(node)
                address = await starting
            except AccelError as error:
                logger.exception("ray_starts_no_node", node=node.address, error=error)
                await self._remove(node)
                return
            finally:
                starting.cancel()
            if is_removed or address != node.address:  # else it was Ray that was not reached
                self._nodes[number] = replace(node, address=address)
                logger.info("ray_node_started", node=address, instead_of=node.address)
                for follower in self._followers:
                    follower.missing[number] = list(follower.specs[number])
                await self._add(number)
                if not is_removed:
                    await self._remove(node)

    async def _add_missing(self, number: int) -> None:
        """Go on to open the devices of a node that could not be opened yet."""
        pause = _PAUSE
        while any(follower.missing[number] for follower in self._followers):
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            await self._add(number)

    async def _add(self, number: int) -> None:
        """Open the devices of a node that the pools miss."""
        for follower in self._followers:
            for spec in tuple(follower.missing[number]):
                with _logging("ray_node_not_added", node=self[number].address):
                    device = await follower.pool.add(spec, node=self[number])
                    follower.missing[number].remove(spec)
                    if follower.on_added is not None:
                        await follower.on_added(device)

    async def _remove(self, node: Node) -> None:
        """Let the devices of a node leave the pools, which they may have left before."""
        for follower in self._followers:
            for device in _devices_on(node, follower.pool):
                with _logging("ray_node_not_drained", node=node.address):
                    if follower.on_lost is not None:
                        await follower.on_lost(device)
                with _logging("ray_node_not_drained", node=node.address):
                    await follower.pool.drain(device)
                    await device.aclose(timeout=0.0)


@dataclass(frozen=True, slots=True)
class _Follower:
    """A pool that is told of nodes, and the specs of its devices on each of them, and of those that are not open."""

    pool: Pool
    specs: list[list[str]]
    missing: list[list[str]]
    on_added: Callable[[Device], Awaitable[object]] | None
    on_lost: Callable[[Device], Awaitable[object]] | None


class _Cluster:
    """What is reserved of a cluster. Calls of Ray may block: all are on one thread, one after the other."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._undo = contextlib.ExitStack()
        self._actors: list[Any] = []
        self._unavailable: type[Exception] = Exception  # what Ray raises while it starts an actor again

    def reserve(self, address: str | None, bundles: list[dict[str, float]], strategy: str, token: str, arguments: list[str]) -> None:
        """Connect to the cluster, and have an actor started in each bundle, without waiting for them. Blocks."""
        try:
            import ray
            from ray.util import placement_group, remove_placement_group
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        except ImportError as error:
            raise BackendUnavailableError(
                "Ray is not installed", library="ray", remedy="In a checkout, run: pip install '.[ray]'"
            ) from error
        self._unavailable = ray.exceptions.ActorUnavailableError
        if not ray.is_initialized():
            try:
                ray.init(address=address or "auto")
            except Exception as error:
                raise BackendUnavailableError(f"the Ray cluster cannot be reached: {error}", library="ray", retryable=True) from error
            self._undo.callback(ray.shutdown)
        elif address is not None:
            raise InvalidArgumentError("this process is connected to a Ray cluster", remedy="Leave out address=, or call ray.shutdown().")
        group = placement_group(bundles, strategy=strategy)
        self._undo.callback(remove_placement_group, group)
        for index, bundle in enumerate(bundles):
            actor = ray.remote(concurrency_groups={_ASKED: 1})(_Agent).options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            )
            self._actors.append(actor.remote(token, arguments))
            self._undo.callback(ray.kill, self._actors[-1])

    def release(self) -> None:
        """Kill the actors, and give back what was reserved. Blocks."""
        with _logging("ray_not_released"):
            self._undo.close()

    async def address(self, number: int) -> str:
        """Return where an agent listens, as soon as Ray has started it.

        Raises
        ------
        BackendUnavailableError
            It does not start.
        """
        while True:
            try:
                return str(await self._call(number, "address", _ASKED))
            except self._unavailable:
                # Ray would try again by itself, but would write a line to the program's output each time.
                await asyncio.sleep(_PAUSE)
            except Exception as error:
                raise BackendUnavailableError(f"Ray has started no agent: {error}", library="ray") from error

    async def end(self, number: int) -> None:
        """Wait until an agent has ended, or Ray does not reach it."""
        try:
            await self._call(number, "end")
        except Exception as error:
            logger.debug("ray_agent_ended", error=error)

    async def _call(self, number: int, method: str, group: str | None = None) -> Any:
        """Call a method of an actor, on a thread of a concurrency group, and return what that returns."""

        def call() -> concurrent.futures.Future[Any]:
            options = {} if group is None else {"concurrency_group": group}
            future: concurrent.futures.Future[Any] = getattr(self._actors[number], method).options(**options).remote().future()
            return future

        return await asyncio.wrap_future(await asyncio.get_running_loop().run_in_executor(self._thread, call))


class _Agent:
    """The actor: runs ``python -m accel node`` where it is, and ends with it. Ray then starts both again.

    Parameters
    ----------
    token
        What controllers must have. It is in the environment of the agent, not on its command line.
    arguments
        Of the agent, besides its address.
    """

    def __init__(self, token: str, arguments: list[str]) -> None:
        import ray

        host = ray.util.get_node_ip_address()
        listen = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AGENT, str(os.getpid()), "node", "--listen", listen, *arguments],
            env={**os.environ, "ACCEL_TOKEN": token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if " listens at " not in line:
            raise BackendUnavailableError(f"`accel node --listen {listen}` has ended; its log says why", library="node")
        self._address = line.split(" listens at ")[1].partition(", ")[0]

    def address(self) -> str:
        """Return ``host:port`` of the agent."""
        return self._address

    def end(self) -> None:
        """Wait for the end of the agent, and end too."""
        self._process.wait()
        os._exit(1)  # Ray starts no actor again that has raised, or left by exit_actor()


def _bundle(cpus: float, gpus: float, resources: Mapping[str, float] | None) -> dict[str, float]:
    """Return what Ray reserves for one node, as it takes it."""
    given = {**(resources or {}), "CPU": cpus, "GPU": gpus}
    for name, amount in given.items():
        if not isinstance(amount, (int, float)) or isinstance(amount, bool) or not 0 <= amount < float("inf"):
            raise InvalidArgumentError(f"{amount!r:.80} is no amount of {name}", remedy="Give numbers, 0 or more.")
    if not any(given.values()):
        raise InvalidArgumentError("nothing is reserved for a node", remedy="Give cpus=, gpus= or resources=.")
    return {name: amount for name, amount in given.items() if amount}


def _devices_on(node: Node, pool: Pool) -> list[Device]:
    """Return the pool's devices of a node."""
    return [device for device in pool if device.info().node == node.address]


@contextlib.contextmanager
def _logging(event: str, **fields: Any) -> Iterator[None]:
    """Log what the block raises: other pools, and other nodes, are told all the same."""
    try:
        yield
    except Exception as error:
        logger.exception(event, **fields, error=error)


async def _finished(future: asyncio.Future[T]) -> T:
    """Await what must end before the caller may, also if that is cancelled meanwhile."""
    cancelled = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return future.result()
