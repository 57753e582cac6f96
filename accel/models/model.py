"""A model on a device: loaded once, called from anywhere, there again after every fault, and swapped while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np

from accel._log import get_logger
from accel.errors import AccelError, ClosedError, InvalidArgumentError, LibraryError, NonFiniteError, OutOfMemoryError
from accel.models.adapters.base import source_of
from accel.models.library import Describe, Forward, InitialLibrary, ModelLibrary
from accel.models.outputs import OutputSpecs
from accel.models.tensor_spec import BATCH, Buckets, TensorSpec
from accel.models.weights import load_weights
from accel.ops import Spec
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from accel.models.adapters.base import ModelSource
    from accel.models.tensor_spec import Inputs, Sizes
    from accel.models.weights import Progress, RunBlocking

__all__ = ["Model", "ModelDevice"]

logger = get_logger()

Array: TypeAlias = np.ndarray[Any, Any]
Compare: TypeAlias = "Callable[[Any, Any], bool | Awaitable[bool]]"
"""Says whether the answers of the old and the new weights to one canary go together."""

_TRIED = 16
"""Length of a dimension without buckets on which a model is tried."""

_numbers = itertools.count(1)
"""Of models in this process: the names of their libraries."""


class ModelDevice(Protocol):
    """What a model needs of :class:`accel.Device`."""

    @property
    def name(self) -> str:
        """Backend and index."""

    @property
    def arrays(self) -> Any:
        """Ops that rearrange."""

    def info(self) -> Any:
        """See :meth:`accel.Device.info`."""

    async def put(self, array: Any, *, durable: bool = False, checksum: bool = False, timeout: float | None = None) -> AccelRef:
        """See :meth:`accel.Device.put`."""

    async def get(self, ref: AccelRef, *, timeout: float | None = None) -> Array:
        """See :meth:`accel.Device.get`."""

    async def free(self, ref: AccelRef) -> None:
        """See :meth:`accel.Device.free`."""

    async def run(self, op: Any, *, timeout: float | None = None) -> Any:
        """See :meth:`accel.Device.run`."""

    async def register_as(self, name: str, library: Any, /, *args: Any, **kwargs: Any) -> None:
        """See :meth:`accel.Device.register_as`."""

    async def unregister(self, name: str) -> None:
        """See :meth:`accel.Device.unregister`."""


class _Version:
    """One set of weights, and the library that runs the model with them.

    Attributes
    ----------
    number : int
        From 1, counted up by every swap, also after a rollback.
    library : str
        Its name.
    weights : dict of str to AccelRef
        Durable.
    outputs : OutputSpecs
        What the model returns.
    """

    def __init__(self, number: int, library: str, weights: dict[str, AccelRef]) -> None:
        self.number = number
        self.library = library
        self.weights = weights
        self.outputs: OutputSpecs
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self._calls += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self._calls -= 1
        if not self._calls:
            self._idle.set()

    async def drained(self) -> None:
        """Wait until no call uses it."""
        await self._idle.wait()


class Model:
    """A model that a device runs. Made by :meth:`accel.Device.load_model`.

    ``await model(x)`` returns refs, ``await model.numpy(x)`` host arrays. The weights are durable: after a fault the model is built around them again, before
    the device is READY, and nothing is read from disk.

    All methods are for the device's loop.
    """

    def __init__(self, device: ModelDevice, source: ModelSource, buckets: Buckets, run_blocking: RunBlocking) -> None:
        self._device = device
        self._run_blocking = run_blocking
        self._source = source
        self._buckets = buckets
        self._versions: list[_Version] = []  # the one that serves is last, behind the one that it replaced
        self._latest = 0  # number of a version; none is used for two sets of weights that served
        self._left: list[_Version] = []  # rolled back by themselves, and not unregistered yet
        self._forwards: Counter[tuple[int, ...]] = Counter()
        self._swapping = asyncio.Lock()
        self._is_closed = False

    @classmethod
    async def load(
        cls,
        device: ModelDevice,
        target: Any,
        *,
        weights: Any,
        inputs: Mapping[str, TensorSpec] | None,
        buckets: Mapping[str, Iterable[int]] | None,
        graphs: Literal["auto", "off"],
        options: Mapping[str, Any] | None,
        on_progress: Progress | None,
        run_blocking: RunBlocking,
    ) -> Model:
        """See :meth:`accel.Device.load_model`."""
        source = source_of(target, options, graphs=graphs)
        if inputs is None:
            inputs = await run_blocking(source.input_specs)
        if weights is None and isinstance(source.target, Path):
            weights = source.target
        model = cls(device, source, Buckets(inputs, buckets), run_blocking)
        model._serve(await model._load(weights, on_progress))
        return model

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"version {self.version}"
        return f"<Model {self._source.name} on {self._device.name} {state}>"

    # -- what it is

    @property
    def device(self) -> Any:
        """The :class:`accel.Device` that runs it."""
        return self._device

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """What it takes, by name."""
        return dict(self._buckets.inputs)

    @property
    def outputs(self) -> OutputSpecs:
        """What it returns."""
        return self._serving.outputs

    @property
    def buckets(self) -> Buckets:
        """The sizes that inputs are padded to."""
        return self._buckets

    @property
    def weights(self) -> dict[str, AccelRef]:
        """The durable refs of the weights that serve, by name."""
        return dict(self._serving.weights)

    @property
    def forwards(self) -> dict[tuple[int, ...], int]:
        """How often it was run in each bucket; the keys are the bucket's lengths, in the order of ``buckets.lengths``."""
        return dict(self._forwards)

    @property
    def version(self) -> int:
        """Which weights serve: 1, and after a :meth:`swap` one more than any before."""
        return self._serving.number

    @property
    def _serving(self) -> _Version:
        if self._is_closed:
            raise ClosedError(f"the model on {self._device.name} is closed", device=self._device.name, remedy="Load it again.")
        return self._versions[-1]

    # -- calls

    async def __call__(self, *args: Any, timeout: float | None = None, **inputs: Any) -> Any:
        """Run the model and return refs: one, a tuple or a dict, as the model returns its arrays.

        Parameters
        ----------
        *args, **inputs
            Host arrays or refs, by position or name. They are padded to the smallest bucket that has room; a batch that is larger than the largest bucket
            is split.
        timeout
            Seconds until waiting ends with :class:`~accel.DeadlineExceededError`.

        Raises
        ------
        InvalidArgumentError
            An input is missing or does not fit its spec, or is longer than the longest bucket; ``argument`` is its name.
        AccelError
            As :meth:`accel.Device.run`; a :class:`~accel.LibraryError` is what the model raised.

        Notes
        -----
        Outputs are cut to the sizes of the inputs, as views: what they are views of is as large as the bucket. Cancelling detaches the caller at once.
        """
        return await self._called(self._given(args, inputs), timeout, to_host=False)

    async def numpy(self, *args: Any, timeout: float | None = None, **inputs: Any) -> Any:
        """Run the model and return host arrays; otherwise as calling it."""
        return await self._called(self._given(args, inputs), timeout, to_host=True)

    async def rows(self, items: Sequence[Mapping[str, Array]], *, check_finite: bool = False) -> list[Any]:
        """Run the model once on several requests, and return what it gives for each, in host arrays.

        Parameters
        ----------
        items
            Requests as :meth:`item` returns them; not more than the largest bucket takes.
        check_finite
            Return a :class:`~accel.NonFiniteError` in the place of a result that has a NaN or an infinity.
        """
        serving = self._serving
        kept = self._versions[-2] if len(self._versions) > 1 else None
        with serving, kept or contextlib.nullcontext():
            results, failed = await self._attempt(serving, items, check_finite=check_finite)
            if failed is not None and kept is not None:
                instead, also_failed = await self._attempt(kept, items, check_finite=check_finite)
                if also_failed is None:  # else it is not the new weights' fault
                    self._roll_back(serving, failed)
                    return instead or []
        if results is None:
            assert failed is not None, "there are results, or there is an error"
            raise failed
        return results

    async def _attempt(
        self, version: _Version, items: Sequence[Mapping[str, Array]], *, check_finite: bool
    ) -> tuple[list[Any] | None, AccelError | None]:
        """Return results, if there are any, and the first error that is the model's own, of all items or in the place of a result."""
        try:
            results = await self._rows(version, items)
        except (LibraryError, InvalidArgumentError) as error:
            if error.is_fault:
                raise
            return None, error
        if check_finite:
            results = [self._checked(each) for each in results]
        return results, next((each for each in results if isinstance(each, AccelError)), None)

    def _roll_back(self, failed: _Version, error: AccelError) -> None:
        """Serve the weights of before, which answer what these cannot, unless they do already."""
        if failed is self._versions[-1]:
            self._left.append(self._versions.pop())
            logger.error("model_rolled_back", device=self._device.name, version=self.version, left=failed.number, error=error)

    async def _rows(self, version: _Version, items: Sequence[Mapping[str, Array]]) -> list[Any]:
        buckets = self._buckets
        sizes = [buckets.sizes({name: each.shape for name, each in item.items()}, is_item=True) for item in items]
        largest = {dim: max(each[dim] for each in sizes) for dim in sizes[0]}
        bucket = buckets.bucket({BATCH: len(items), **largest})
        with version:
            arrays = await self._forward(version, buckets.stacked(items, bucket), bucket, {BATCH: len(items)}, None, to_host=True)
        return [version.outputs.row(arrays, place, each) for place, each in enumerate(sizes)]

    def item(self, given: Any) -> dict[str, Array]:
        """Return one request as :meth:`rows` takes it: a mapping of inputs, or the only input, without the batch dimension.

        Raises
        ------
        InvalidArgumentError
            It does not fit the specs, or is longer than the longest bucket; ``argument`` names the input.
        """
        buckets = self._buckets
        named = self._given((), given) if isinstance(given, dict) else self._given((given,), {})
        buckets.check_names(named)
        arrays: dict[str, Array] = {name: buckets.array(name, named[name], is_item=True) for name in buckets.inputs}
        buckets.bucket(buckets.sizes({name: each.shape for name, each in arrays.items()}, is_item=True))
        return arrays

    def _given(self, args: tuple[Any, ...], inputs: Inputs) -> dict[str, Any]:
        names = tuple(self._buckets.inputs)
        if len(args) > len(names):
            raise InvalidArgumentError(
                f"the model takes {len(names)} inputs, and was given {len(args)}", remedy=f"Give {', '.join(names)}."
            )
        given = dict(zip(names, args, strict=False))
        for name, value in inputs.items():
            if name in given:
                raise InvalidArgumentError(f"input {name!r} was given twice", argument=name, remedy="Give it by position or by name.")
            given[name] = value
        return given

    def _checked(self, result: Any) -> Any:
        named = result.items() if isinstance(result, dict) else enumerate(result if isinstance(result, tuple) else (result,))
        for name, array in named:
            if array.dtype.kind not in "biu" and not np.isfinite(array).all():
                text = f"output {name} of the model has NaNs or infinities"
                return NonFiniteError(text, output=str(name), device=self._device.name, op=Forward.kind)
        return result

    async def _called(self, given: dict[str, Any], timeout: float | None, *, to_host: bool) -> Any:
        buckets, version = self._buckets, self._serving
        buckets.check_names(given)
        arrays = {name: buckets.array(name, given[name]) for name in buckets.inputs}
        sizes = buckets.sizes({name: each.shape for name, each in arrays.items()})
        rows, most = sizes.get(BATCH, 1), buckets.most
        with version:
            if most is None or rows <= most:
                return version.outputs.joined(await self._part(version, arrays, sizes, timeout, to_host=to_host))
            deadline = _deadline(timeout)
            parts = []
            for start in range(0, rows, most):
                is_split = {name: spec.shape[:1] == (BATCH,) for name, spec in buckets.inputs.items()}
                part = {name: each[start : start + most] if is_split[name] else each for name, each in arrays.items()}
                some = {**sizes, BATCH: min(most, rows - start)}
                parts.append(await self._part(version, part, some, _left(deadline), to_host=to_host))
            return version.outputs.joined(await self._together(version, parts, _left(deadline), to_host=to_host))

    async def _together(self, version: _Version, parts: list[list[Any]], timeout: float | None, *, to_host: bool) -> list[Any]:
        """Return the outputs of a batch whose parts were run one after another."""
        together = []
        for name, shape, pieces in zip(version.outputs.names, version.outputs.shapes, zip(*parts, strict=True), strict=True):
            if shape[:1] != (BATCH,):
                raise InvalidArgumentError(
                    f"output {name!r} of the model has no batch dimension, and the batch is larger than a bucket",
                    remedy="Give fewer rows at once, or a larger bucket.",
                )
            together.append(np.concatenate(pieces) if to_host else await self._device.arrays.concatenate(pieces, axis=0, timeout=timeout))
        return together

    async def _part(self, version: _Version, arrays: Mapping[str, Any], sizes: Sizes, timeout: float | None, *, to_host: bool) -> list[Any]:
        """Run inputs that fit a bucket, and return the outputs, cut to their size."""
        bucket = self._buckets.bucket(sizes)
        outputs = await self._forward(version, arrays, bucket, sizes, timeout, to_host=to_host)
        return version.outputs.cut(outputs, sizes)

    async def _forward(
        self, version: _Version, arrays: Mapping[str, Any], bucket: Sizes, sizes: Sizes, timeout: float | None, *, to_host: bool
    ) -> Sequence[Any]:
        """Run inputs in a bucket. On the host the outputs have only the rows that are wanted, in their other dimensions they are as the bucket has them."""
        deadline = _deadline(timeout)
        operands = [await self._operand(name, each, bucket, deadline) for name, each in arrays.items()]
        op = Forward(version.library, tuple(operands), version.outputs.specs(bucket))
        self._forwards[tuple([bucket[dim] for dim in self._buckets.lengths])] += 1
        made: tuple[AccelRef, ...] = await self._device.run(op, timeout=_left(deadline))
        if not to_host:
            return made
        rows = sizes.get(BATCH)
        found = []
        for ref, shape in zip(made, version.outputs.shapes, strict=True):
            wanted = ref[:rows] if shape[:1] == (BATCH,) and rows != ref.shape[0] else ref
            found.append(await self._device.get(wanted, timeout=_left(deadline)))
        return found

    async def _operand(self, name: str, value: Any, bucket: Sizes, deadline: float | None) -> AccelRef:
        """Return an input on the device, of the size of a bucket."""
        spec = self._buckets.inputs[name]
        if not isinstance(value, AccelRef):
            return await self._device.put(self._buckets.padded(name, value, bucket), timeout=_left(deadline))
        widths = [(0, wanted - length) for wanted, length in zip(spec.of_size(bucket), value.shape, strict=True)]
        if not any(after for _, after in widths):
            return value
        padded: AccelRef = await self._device.arrays.pad(value, widths, value=spec.pad, timeout=_left(deadline))
        return padded

    # -- versions

    def _serve(self, version: _Version) -> None:
        self._versions.append(version)
        self._latest = version.number

    async def _load(self, weights: Any, on_progress: Progress | None) -> _Version:
        """Put weights on the device, build the model around them, and see what it returns."""
        buckets = self._buckets
        given = () if weights is None else weights
        refs = await load_weights(self._device, given, run_blocking=self._run_blocking, on_progress=on_progress)
        version = _Version(self._latest + 1, f"model-{next(_numbers)}", refs)
        warm = [{name: (Spec(spec.of_size(each), spec.dtype), spec.pad) for name, spec in buckets.inputs.items()} for each in buckets.all()]
        try:
            refs |= await load_weights(self._device, await self._initial(tuple(refs)), run_blocking=self._run_blocking)
            await self._device.register_as(version.library, ModelLibrary, self._source, tuple(buckets.inputs), refs, warm)
            try:
                version.outputs = await self._described(version)
            except BaseException:
                await self._unregister(version)
                raise
        except BaseException:
            refs.clear()  # the traceback keeps this frame
            raise
        return version

    async def _initial(self, given: tuple[str, ...]) -> dict[str, Array]:
        """Return the arrays that the model needs and was not given, such as tables that are no weights, or all of its weights."""
        device, library = self._device, f"model-{next(_numbers)}-initial"
        await device.register_as(library, InitialLibrary, self._source, given)
        try:
            made = OutputSpecs.decoded(await device.get(await device.run(Describe(library, ()))))
            refs = await device.run(Forward(library, (), made.specs({})))
            return {name: await device.get(ref) for name, ref in zip(made.names, refs, strict=True)}
        finally:
            await device.unregister(library)

    async def _described(self, version: _Version) -> OutputSpecs:
        """Return what the model returns. It is run on two lengths of each dimension: what is different between the outputs follows that dimension."""
        buckets = self._buckets
        lengths = {dim: _two_lengths(dim, buckets.lengths.get(dim)) for dim in buckets.dims}
        sizes = {dim: length for dim, (length, _) in lengths.items()}
        found = await self._describe(version, sizes)
        for dim, (_, other) in lengths.items():
            changed = {**sizes, dim: other}
            found = found.named(sizes, await self._describe(version, changed), changed)
        return found

    async def _describe(self, version: _Version, sizes: Sizes) -> OutputSpecs:
        device = self._device
        inputs = [await device.put(np.full(spec.of_size(sizes), spec.pad, spec.dtype.numpy)) for spec in self._buckets.inputs.values()]
        return OutputSpecs.decoded(await device.get(await device.run(Describe(version.library, tuple(inputs)))))

    async def _unregister(self, version: _Version) -> None:
        with contextlib.suppress(ClosedError):  # the device is closed, and the library with it
            await self._device.unregister(version.library)
        version.weights.clear()

    async def swap(
        self,
        weights: Any,
        *,
        canaries: Iterable[Any] = (),
        compare: Compare | None = None,
        on_progress: Progress | None = None,
    ) -> int:
        """Serve other weights, from one call to the next, and return the number of their version.

        The new weights are loaded beside the old ones, and the model is built around them and warmed up, while the old ones serve. Then both answer the
        canaries. Only if that goes well calls go to the new ones. The old ones stay, for :meth:`rollback`, until :meth:`release`, or the next swap.

        Parameters
        ----------
        weights
            As for :meth:`accel.Device.load_model`.
        canaries
            Items, as :meth:`item` takes them, that both versions must answer with finite numbers.
        compare
            ``compare(old, new)`` says, for each canary, whether the new answer will do; it may be a coroutine function.
        on_progress
            Called with the bytes loaded, and their sum.

        Raises
        ------
        OutOfMemoryError
            There is no room for both versions. Nothing was changed.
        LibraryError
            A canary was not answered well. The old weights serve as before, and the new ones are gone.
        AccelError
            What loading the new weights, or running them, raised; the old ones serve as before.

        Notes
        -----
        Swaps of one model wait for each other. Cancelling leaves the old weights in service.
        """
        async with self._swapping:
            old = self._serving
            await self._release()
            self._check_room(old)
            items = [self.item(each) for each in canaries]
            new = await self._load(weights, on_progress)
            try:
                await self._check_canaries(old, new, items, compare)
            except BaseException:
                await self._unregister(new)
                raise
            self._serve(new)
        logger.info("model_swapped", device=self._device.name, version=new.number, canaries=len(items))
        return new.number

    async def rollback(self) -> int:
        """Serve the weights of before the last swap again, and return their version. The others go when no call uses them any more.

        Raises
        ------
        InvalidArgumentError
            They were released, or there was no swap.
        """
        async with self._swapping:
            if len(self._versions) < 2:
                raise InvalidArgumentError("the model has no weights to go back to", remedy="Roll back before release, after a swap.")
            left = self._versions.pop()
            self._left.append(left)
            logger.warning("model_rolled_back", device=self._device.name, version=self.version, left=left.number)
            await self._release()
            return self.version

    async def release(self) -> None:
        """Let the weights of before the last swap go, once no call uses them; does nothing if there are none."""
        async with self._swapping:
            await self._release()

    async def on(self, device: Any) -> Model:
        """Return the same model, with copies of the weights that serve, on another device."""
        model = Model(device, self._source, self._buckets, self._run_blocking)
        version = self._serving
        with version:
            arrays = {name: await self._device.get(ref) for name, ref in version.weights.items()}
        model._serve(await model._load(arrays, None))
        return model

    async def aclose(self) -> None:
        """Let the model go: calls that run end first. Idempotent. The device's own close does this too."""
        async with self._swapping:
            self._is_closed = True
            self._left += self._versions
            self._versions = []
            await self._release()

    async def _release(self) -> None:
        self._left += self._versions[:-1]
        del self._versions[:-1]
        while self._left:
            await self._left[-1].drained()
            await self._unregister(self._left.pop())

    def _check_room(self, old: _Version) -> None:
        """Refuse a swap for which there is no memory: before anything is read."""
        memory, needed = self._device.info().memory, sum(ref.nbytes for ref in old.weights.values())
        if memory.limit is not None and memory.used + needed > memory.limit:
            raise OutOfMemoryError(
                f"a second set of weights of {needed} bytes does not fit beside the {memory.used} bytes in use",
                requested=needed,
                used=memory.used,
                limit=memory.limit,
                device=self._device.name,
                remedy="Open the device with a larger memory_limit, or free other buffers first.",
            )

    async def _check_canaries(self, old: _Version, new: _Version, items: list[dict[str, Array]], compare: Compare | None) -> None:
        for number, item in enumerate(items):
            answers = [await self._answer(version, item) for version in (old, new)]
            checked = self._checked(answers[1])
            if isinstance(checked, AccelError):
                raise checked
            if compare is None:
                continue
            verdict = compare(*answers)
            if not (await verdict if inspect.isawaitable(verdict) else verdict):
                raise LibraryError(
                    f"compare refused what version {new.number} of the model answers to canary {number}",
                    device=self._device.name,
                    op="swap",
                    remedy="Look at the weights; the model serves its old ones.",
                )

    async def _answer(self, version: _Version, item: dict[str, Array]) -> Any:
        return (await self._rows(version, [item]))[0]


def _two_lengths(dim: str, lengths: tuple[int, ...] | None) -> tuple[int, int]:
    """Return two lengths of a dimension on which to try a model: of its buckets, if it has two."""
    if lengths is None:
        return (1, 2) if dim == BATCH else (_TRIED, _TRIED + 1)
    if len(lengths) > 1:
        return lengths[0], lengths[1]
    return lengths[0], lengths[0] - 1 or 2


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else asyncio.get_running_loop().time() + timeout


def _left(deadline: float | None) -> float | None:
    """Return the seconds until a deadline; with none left, as little as the device takes for an answer."""
    return None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 1e-9)
