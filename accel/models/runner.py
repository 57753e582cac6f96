"""What runs a model on inputs that have the sizes of a bucket: a library in the device's context, or a function of refs."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

from accel.errors import AccelError, ClosedError, DeadlineExceededError, InvalidArgumentError, LibraryError
from accel.models.examples import Fill, expanded, fill_of
from accel.models.library import CpuModelLibrary, CpuRankLibrary, Describe, Forward, InitialLibrary, ModelLibrary, Prepare, RankLibrary
from accel.models.outputs import OutputSpecs, flattened
from accel.models.weights import Collected, WeightsDevice, collect, load_weights
from accel.ops import Spec
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence

    from typing_extensions import TypeIs

    from accel.actors.system import ActorSystem
    from accel.dtype import DTypeLike
    from accel.libraries.kernel_library import KernelLibrary
    from accel.models.adapters.base import ModelSource
    from accel.models.adapters.group import ModelGroup
    from accel.models.tensor_spec import Buckets
    from accel.models.weights import Told

__all__ = [
    "DeviceRunner",
    "FunctionRunner",
    "LibraryRunner",
    "ModelDevice",
    "Operand",
    "Runner",
    "deadline_of",
    "filled",
    "left",
    "warm_of",
]

T = TypeVar("T")
Array: TypeAlias = np.ndarray[Any, Any]
Operand: TypeAlias = Array | AccelRef

_numbers = itertools.count(1)
"""Of models in this process: the names of their libraries."""


class ModelDevice(WeightsDevice, Protocol):
    """What a model needs of :class:`accel.Device`."""

    @property
    def name(self) -> str:
        """Backend and index."""

    @property
    def arrays(self) -> Any:
        """Ops that rearrange."""

    async def put(self, array: Any, *, out: AccelRef | None = None, timeout: float | None = None) -> AccelRef:
        """See :meth:`accel.Device.put`."""

    async def full(self, shape: Any, value: Any, dtype: DTypeLike = "float32", *, timeout: float | None = None) -> AccelRef:
        """See :meth:`accel.Device.full`."""

    async def get(self, ref: AccelRef, *, timeout: float | None = None) -> Array:
        """See :meth:`accel.Device.get`."""

    async def run(self, op: Any, *, timeout: float | None = None) -> Any:
        """See :meth:`accel.Device.run`."""

    def batch(self, *, timeout: float | None = None, name: str = "batch") -> Any:
        """See :meth:`accel.Device.batch`."""

    async def register_as(self, name: str, library: Any, /, *args: Any, **kwargs: Any) -> None:
        """See :meth:`accel.Device.register_as`."""

    async def unregister(self, name: str) -> None:
        """See :meth:`accel.Device.unregister`."""

    def generations(self) -> AsyncIterator[int]:
        """See :meth:`accel.Device.generations`."""


class Place(Protocol):
    """Where a collective goes: see :class:`accel.device.epochs.Place`."""

    @property
    def epoch(self) -> int:
        """Of the world."""

    @property
    def number(self) -> int:
        """Of the collective."""


class ModelWorld(Protocol):
    """What a model needs of :class:`accel.World`, if several devices run it."""

    @property
    def extras(self) -> Sequence[ModelDevice]:
        """Devices that stand by."""

    @property
    def takeovers(self) -> list[Callable[[int], Awaitable[object]]]:
        """See :attr:`accel.World.takeovers`."""

    @property
    def name(self) -> str:
        """What its errors call it."""

    @property
    def number(self) -> int:
        """Of the world, in its system."""

    @property
    def devices(self) -> Sequence[ModelDevice]:
        """One a rank."""

    @property
    def epoch(self) -> int:
        """Of its communicator."""

    def generations(self) -> AsyncIterator[int]:
        """See :meth:`accel.World.generations`."""

    async def lockstep(
        self,
        what: str,
        work: Callable[[Any, Place], Coroutine[Any, Any, T]],
        *,
        timeout: float | None = None,
        grace: Callable[[], float] = lambda: 0.0,
    ) -> tuple[T, ...]:
        """See :meth:`accel.World.lockstep`."""

    async def broadcast(self, source: AccelRef, *, root: int = 0, timeout: float | None = None) -> Sequence[AccelRef]:
        """See :meth:`accel.World.broadcast`."""


ModelHome: TypeAlias = ModelDevice | ModelWorld
"""What a model is loaded on."""


def device_of(home: ModelHome) -> ModelDevice:
    """Return where a model's inputs and outputs are: its device, or that of the first rank of its world."""
    return home.devices[0] if is_world(home) else home


def is_world(home: ModelHome) -> TypeIs[ModelWorld]:
    """Return whether several devices run the model."""
    return hasattr(home, "devices")


class Runner(Protocol):
    """What runs a model with one set of weights."""

    @property
    def weights(self) -> Mapping[str, Any]:
        """Their durable refs, by name."""

    @property
    def nbytes(self) -> int:
        """Of its weights on the device, each counted once; where there are several devices, on the first."""

    @property
    def is_torn(self) -> bool:
        """Whether a weight is torn: the memory of the device is gone, or does not hold what was loaded."""

    async def load(self, weights: Collected, on_weights: Told, on_buckets: Told) -> None:
        """Put weights on the device, and make the model ready with them, in every bucket.

        After an error :meth:`close` is to be called. ``on_buckets`` is called with how many buckets
        are ready, and how many there are.
        """

    async def describe(self, operands: tuple[AccelRef, ...], timeout: float | None = None) -> OutputSpecs:
        """Run the model, and return what it returns for these inputs."""

    async def run(self, operands: Sequence[Operand], outputs: tuple[Spec, ...], timeout: float | None) -> Sequence[AccelRef]:
        """Run the model, and return the outputs, which are as ``outputs`` says."""

    async def fetch(
        self, operands: Sequence[Operand], outputs: tuple[Spec, ...], rows: Sequence[int | None], timeout: float | None
    ) -> Sequence[Array]:
        """Run the model, and return the outputs on the host: of each the first of its ``rows``, or all."""

    async def changed_weight(self) -> str | None:
        """Return the name of a weight that does not hold what was loaded, if there is one; it is torn from now on."""

    async def copied(self) -> Collected:
        """Return copies of the weights on the host."""

    async def close(self) -> None:
        """Let the model and its weights go, however far it was loaded; nothing runs.

        Called again where the device was full, or faulted.
        """


class DeviceRunner:
    """What a :class:`Runner` has that runs a model on one device; base class.

    Parameters
    ----------
    device
        Where.
    source
        Makes the model's adapter.
    buckets
        The model's inputs.
    system
        Runs what blocks.

    Attributes
    ----------
    weights : dict of str to AccelRef
        What is on the device.
    outputs : tuple of str
        Their names, in their order, once the model was described.
    """

    def __init__(self, device: ModelDevice, source: ModelSource, buckets: Buckets, system: ActorSystem) -> None:
        self._device = device
        self._source = source
        self._buckets = buckets
        self._system = system
        self.weights: dict[str, AccelRef] = {}
        self.outputs: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """See :class:`Runner`."""
        return sum({ref.buffer: ref.nbytes for ref in self.weights.values()}.values())

    @property
    def is_torn(self) -> bool:
        """See :class:`Runner`."""
        first = next(iter(self.weights.values()), None)
        return first is not None and first.owner.durable.any_torn and any(ref.is_stale for ref in self.weights.values())

    async def load(self, weights: Collected, on_weights: Told, on_buckets: Told) -> None:
        """See :class:`Runner`."""
        await self.put(weights, on_weights)
        await self.open(on_buckets)

    async def put(self, weights: Collected, on_weights: Told) -> None:
        """Put weights on the device, and those that the model makes itself: the first half of :meth:`load`."""
        device, system = self._device, self._system
        self.weights |= await load_weights(device, weights, system=system, on_progress=on_weights)
        self.weights |= await load_weights(device, await self.initial(tuple(self.weights)), system=system)

    async def initial(self, given: tuple[str, ...]) -> dict[str, Array]:
        """Return the arrays that the model needs beside the weights of these names.

        They are tables that are no weights, or all of the weights.
        """
        raise NotImplementedError

    async def open(self, on_buckets: Told) -> None:
        """Make the model ready with its weights: the second half of :meth:`load`."""
        raise NotImplementedError

    async def changed_weight(self) -> str | None:
        """See :class:`Runner`."""
        for name, ref in {ref.buffer: (name, ref) for name, ref in self.weights.items()}.values():
            if not await self._device.verify_checksum(ref):
                return name
        return None

    async def checksums(self) -> dict[str, int]:
        """Return those of the weights, by name."""
        return {name: await self._device.keep_checksum(ref) for name, ref in self.weights.items()}

    async def copied(self) -> Collected:
        """See :class:`Runner`."""
        return await collect(self._system, {name: await self._device.get(ref) for name, ref in self.weights.items()})

    async def close(self) -> None:
        """See :class:`Runner`."""
        self.weights.clear()


class LibraryRunner(DeviceRunner):
    """Runs a model where the context is: :class:`~accel.models.library.ModelLibrary`.

    Parameters
    ----------
    device, source, buckets, system
        As for :class:`DeviceRunner`.
    group
        The ranks that run the model together, of which this is one.
    world
        The number of their world.
    """

    def __init__(
        self,
        device: ModelDevice,
        source: ModelSource,
        buckets: Buckets,
        system: ActorSystem,
        group: ModelGroup | None = None,
        world: int = 0,
    ) -> None:
        super().__init__(device, source, buckets, system)
        self._group = group
        self._world = world
        self._library = f"model-{next(_numbers)}"
        self._registered: list[str] = []  # libraries that the device may have

    async def initial(self, given: tuple[str, ...]) -> dict[str, Array]:
        """See :class:`DeviceRunner`."""
        device, library = self._device, f"{self._library}-initial"
        await self._register(library, InitialLibrary, self._source, given, self._group)
        made = OutputSpecs.decoded(await device.get(await device.run(Describe(library, ()))))
        refs = await device.run(Forward(library, (), made.specs({}), made.names))
        arrays = {name: await device.get(ref) for name, ref in zip(made.names, refs, strict=True)}
        await self._unregister()
        return arrays

    async def open(self, on_buckets: Told) -> None:
        """See :class:`DeviceRunner`."""
        warm = warm_of(self._buckets)
        on_buckets(0, len(warm))
        on_cpu, elsewhere = (CpuModelLibrary, ModelLibrary) if self._group is None else (CpuRankLibrary, RankLibrary)
        library = on_cpu if self._device.info().backend == "cpu" else elsewhere
        inputs = tuple(self._buckets.inputs)
        await self._register(self._library, library, self._source, inputs, self.weights, warm, self._group, self._world)
        on_buckets(len(warm), len(warm))

    async def _register(self, name: str, library: type[KernelLibrary], *arguments: Any) -> None:
        self._registered.append(name)
        await self._device.register_as(name, library, *arguments)

    async def describe(self, operands: tuple[AccelRef, ...], timeout: float | None = None) -> OutputSpecs:
        """See :class:`Runner`."""
        async with self._device.batch(timeout=timeout, name=Describe.kind) as batch:
            told = batch.get(self.record_describe(batch, operands))
        return self.described(told)

    async def run(self, operands: Sequence[Operand], outputs: tuple[Spec, ...], timeout: float | None) -> Sequence[AccelRef]:
        """See :class:`Runner`."""
        async with self._device.batch(timeout=timeout, name=Forward.kind) as batch:
            return self.record(batch, operands, outputs)

    async def fetch(
        self, operands: Sequence[Operand], outputs: tuple[Spec, ...], rows: Sequence[int | None], timeout: float | None
    ) -> Sequence[Array]:
        """See :class:`Runner`. That is one message to the device, and one back."""
        async with self._device.batch(timeout=timeout, name=Forward.kind) as batch:
            made = self.record(batch, operands, outputs)
            return [batch.get(ref if count is None else ref[:count]) for ref, count in zip(made, rows, strict=True)]

    def record_prepare(self, batch: Any, place: tuple[int, int]) -> None:
        """Record that a rank runs the model once for each bucket, together with the others."""
        batch.run(Prepare(self._library, place))

    def record_describe(self, batch: Any, operands: Sequence[Operand], place: tuple[int, int] = (0, 0)) -> AccelRef:
        """Record a forward, and return the description of its outputs, for :meth:`described`."""
        refs = tuple([each if isinstance(each, AccelRef) else batch.put(each) for each in operands])
        described: AccelRef = batch.run(Describe(self._library, refs, place))
        return described

    def described(self, told: Array) -> OutputSpecs:
        """Return what the model returns, given the description."""
        found = OutputSpecs.decoded(told)
        self.outputs = found.names
        return found

    def record(
        self, batch: Any, operands: Sequence[Operand], outputs: tuple[Spec, ...], place: tuple[int, int] = (0, 0)
    ) -> tuple[AccelRef, ...]:
        """Record a forward, and return its outputs. The place is its epoch and number among the collectives of a world."""
        refs = tuple([each if isinstance(each, AccelRef) else batch.put(each) for each in operands])
        made: tuple[AccelRef, ...] = batch.run(Forward(self._library, refs, outputs, self.outputs, place))
        return made

    async def close(self) -> None:
        """See :class:`Runner`."""
        await self._unregister()
        await super().close()

    async def _unregister(self) -> None:
        while self._registered:
            with contextlib.suppress(InvalidArgumentError, ClosedError):  # it could not be registered, or has gone with the device
                await self._device.unregister(self._registered[-1])
            self._registered.pop()


class FunctionRunner(DeviceRunner):
    """Runs a coroutine function of refs, in the process that opened the device. The parameters are those of :class:`DeviceRunner`."""

    def __init__(self, device: ModelDevice, source: ModelSource, buckets: Buckets, system: ActorSystem) -> None:
        super().__init__(device, source, buckets, system)
        self._function = source.target
        self._name = source.name
        self._given: Mapping[str, AccelRef] | None = None  # weights that the function gets

    async def initial(self, given: tuple[str, ...]) -> dict[str, Array]:
        """See :class:`DeviceRunner`: a function has the weights that it is given."""
        return {}

    async def open(self, on_buckets: Told) -> None:
        """See :class:`DeviceRunner`; raises as :meth:`check`."""
        self.check()
        warm = warm_of(self._buckets)
        on_buckets(0, len(warm))
        for done, inputs in enumerate(warm, 1):
            await self.warm(inputs)
            on_buckets(done, len(warm))

    def check(self) -> None:
        """Check the function against what it will be called with.

        Raises
        ------
        InvalidArgumentError
            The function does not take the inputs, the weights or the options.
        """
        parameters = inspect.signature(self._function).parameters
        if self.weights or "weights" in parameters:
            self._given = MappingProxyType(self.weights)  # a view: it keeps no weights that are to go
        names = [*self._buckets.inputs, *self._source.options, *([] if self._given is None else ["weights"])]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidArgumentError(
                f"{self._name} would get two arguments {twice!r}", remedy="Give inputs, options and the weights different names."
            )
        try:
            inspect.signature(self._function).bind(self._device, **self._arguments(dict.fromkeys(self._buckets.inputs)))
        except TypeError as error:
            raise InvalidArgumentError(
                f"{self._name} does not take the inputs {', '.join(self._buckets.inputs)}: {error}",
                argument="inputs",
                remedy="Give a function of the device, and by name of the inputs, of weights, if there are any, and of the options.",
            ) from None

    async def warm(self, inputs: Mapping[str, tuple[Spec, Fill]], place: Any = None) -> None:
        """Call the function once with inputs of these shapes and dtypes, filled so."""
        await self._called(tuple([await filled(self._device, spec, fill, None) for spec, fill in inputs.values()]), None, place)

    async def describe(self, operands: tuple[AccelRef, ...], timeout: float | None = None, place: Any = None) -> OutputSpecs:
        """See :class:`Runner`. A place is given to the function instead of the device."""
        structure, names, refs = flattened(await self._called(operands, timeout, place), self._source.outputs)
        for name, ref in zip(names, refs, strict=True):
            if not isinstance(ref, AccelRef):
                raise InvalidArgumentError(
                    f"output {name!r} of {self._name} is a {type(ref).__name__}", remedy="Return refs; await what makes them."
                )
        self.outputs = names
        return OutputSpecs(structure, names, tuple([ref.shape for ref in refs]), tuple([ref.dtype for ref in refs]))

    async def run(
        self, operands: Sequence[Operand], outputs: tuple[Spec, ...], timeout: float | None, place: Any = None
    ) -> Sequence[AccelRef]:
        """See :class:`Runner`. A place is given to the function instead of the device."""
        deadline = deadline_of(timeout)
        put = [each if isinstance(each, AccelRef) else await self._device.put(each, timeout=left(deadline)) for each in operands]
        _, names, refs = flattened(await self._called(tuple(put), left(deadline), place), self._source.outputs)
        given = [(name, ref.shape, ref.dtype) for name, ref in zip(names, refs, strict=True)]
        wanted = [(name, each.shape, each.dtype) for name, each in zip(self.outputs, outputs, strict=True)]
        if given != wanted:
            raise LibraryError(
                f"{self._name} returned {given} for inputs of {[ref.shape for ref in operands]}, and {wanted} before",
                remedy="Names, order and shapes of a model's outputs must depend on the shapes of its inputs alone.",
            )
        return refs

    async def fetch(
        self, operands: Sequence[Operand], outputs: tuple[Spec, ...], rows: Sequence[int | None], timeout: float | None
    ) -> Sequence[Array]:
        """See :class:`Runner`."""
        deadline = deadline_of(timeout)
        made = await self.run(operands, outputs, timeout)
        return [
            await self._device.get(ref if count is None else ref[:count], timeout=left(deadline))
            for ref, count in zip(made, rows, strict=True)
        ]

    async def _called(self, operands: tuple[AccelRef, ...], timeout: float | None, place: Any = None) -> Any:
        """Await the function. What it raises itself is the model's error, as it is of a model in a library."""
        named = dict(zip(self._buckets.inputs, operands, strict=True))
        try:
            async with asyncio.timeout(timeout) as limit:
                return await self._function(self._device if place is None else place, **self._arguments(named))
        except AccelError:
            raise
        except Exception as error:
            if limit.expired():
                raise DeadlineExceededError(
                    f"{self._name} did not end within {timeout:g} s", op=Forward.kind, device=self._device.name
                ) from None
            raise LibraryError(
                f"{self._name} raised {error!r}", op=Forward.kind, device=self._device.name, remedy="See its cause."
            ) from error

    def _arguments(self, inputs: Mapping[str, AccelRef | None]) -> dict[str, Any]:
        weights = {} if self._given is None else {"weights": self._given}
        return {**self._source.options, **weights, **inputs}


async def filled(device: ModelDevice, spec: Spec, fill: Fill, timeout: float | None) -> AccelRef:
    """Return a ref that is filled. A number is written by the device, whose limit bounds it, not this process's memory."""
    if isinstance(fill, np.ndarray):
        return await device.put(expanded(fill, spec.shape, spec.dtype), timeout=timeout)
    return await device.full(spec.shape, fill, spec.dtype, timeout=timeout)


def deadline_of(timeout: float | None) -> float | None:
    """Return the loop's time at which a timeout that begins now ends."""
    return None if timeout is None else asyncio.get_running_loop().time() + timeout


def left(deadline: float | None) -> float | None:
    """Return the seconds until a deadline; with none left, as little as the device takes for an answer."""
    return None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 1e-9)


def warm_of(buckets: Buckets) -> list[dict[str, tuple[Spec, Fill]]]:
    """Return shape, dtype and filling of each input in each bucket."""
    return [
        {name: (Spec(spec.of_size(sizes), spec.dtype), fill_of(spec)) for name, spec in buckets.inputs.items()} for sizes in buckets.all()
    ]
