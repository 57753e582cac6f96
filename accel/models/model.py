"""A model on a device: loaded once, called from anywhere, there again after every fault, and swapped while it serves."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from accel._log import get_logger
from accel.errors import AccelError, InvalidArgumentError, LibraryError, NonFiniteError, StaleRefError
from accel.models.adapters.base import source_of
from accel.models.library import Forward
from accel.models.onnx_inputs import input_specs
from accel.models.relations import check_batch_axis
from accel.models.runner import deadline_of, device_of, is_world, left
from accel.models.tensor_spec import BATCH, Buckets, Item, TensorSpec
from accel.models.versions import Coming, VersionLoader, Versions
from accel.models.weights import collect
from accel.ref import AccelRef
from accel.values import check_count

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

    from accel.actors.system import ActorSystem
    from accel.models.outputs import OutputSpecs
    from accel.models.relations import BatchAxis
    from accel.models.runner import ModelHome, Operand
    from accel.models.tensor_spec import Inputs, Sizes
    from accel.models.versions import Version
    from accel.models.weights import Collected, Progress

__all__ = ["Model", "Rows"]

logger = get_logger()

Array: TypeAlias = np.ndarray[Any, Any]
Compare: TypeAlias = "Callable[[Any, Any], bool | Awaitable[bool]]"
"""Says whether the answers of the old and the new weights to one canary go together."""

_OLD_SERVE = "Look at the weights; the model serves its old ones."


class Rows(list[Any]):
    """What a model gives for each of several requests, all by one set of weights.

    Attributes
    ----------
    version : int
        Of these weights.
    """

    __slots__ = ("version",)

    version: int


class Model:
    """A model that a device runs. Made by :meth:`accel.Device.load_model`.

    ``await model(x)`` returns refs, ``await model.numpy(x)`` host arrays. The weights are durable: after a fault the model is built around them again, before
    the device is READY, and nothing is read from disk.

    All methods are for the device's loop.

    Attributes
    ----------
    on_rollback : callable or None
        Called with the version that was left when the weights of before serve again, in the same
        turn of the loop, and with the error that these answered instead, or ``None``.
    """

    def __init__(self, name: str, home: ModelHome, buckets: Buckets, versions: Versions) -> None:
        self._name = name
        self._home = home
        self._buckets = buckets
        self._versions = versions
        self._forwards: Counter[tuple[int, ...]] = Counter()
        self._replays = 0
        self._swapping = asyncio.Lock()
        self.on_rollback: Callable[[int, BaseException | None], object] | None = None

    @classmethod
    async def load(
        cls,
        home: ModelHome,
        target: Any,
        *,
        system: ActorSystem,
        weights: Any = None,
        inputs: Mapping[str, TensorSpec] | None = None,
        buckets: Mapping[str, Iterable[int]] | None = None,
        graphs: Literal["auto", "off"] = "auto",
        options: Mapping[str, Any] | None = None,
        imports: Sequence[str] = (),
        outputs: Sequence[str] | None = None,
        batch_axis: BatchAxis = None,
        on_progress: Progress | None = None,
        split: Mapping[str, int] | None = None,
    ) -> Model:
        """See :meth:`accel.Device.load_model` and :meth:`accel.World.load_model`."""
        _check_function("on_progress", on_progress)
        check_batch_axis(batch_axis)
        source = source_of(target, options, graphs=graphs, imports=imports, outputs=outputs)
        file = source.target if isinstance(source.target, Path) else None
        if weights is None:
            weights = () if file is None else file
        if inputs is None and file is None:
            raise InvalidArgumentError(
                f"the inputs of {target!r} are not known",
                argument="inputs",
                remedy='Give inputs={"x": accel.TensorSpec(("batch", 784), "float32")}.',
            )
        async with Coming().ended_early(home):
            collected = await collect(system, weights)
            if inputs is None:
                assert file is not None, "or it was refused above"
                said = collected.inputs if file in collected.inputs else (await collect(system, file)).inputs
                inputs = input_specs(said[file])
        checked = Buckets(inputs, buckets)
        versions = Versions(home, VersionLoader(home, source, checked, system, batch_axis, split), system.close_timeout)
        async with versions.coming(collected, on_progress):
            pass
        return cls(source.name, home, checked, versions)

    def __repr__(self) -> str:
        state = "closed" if self._versions.is_closed else f"version {self.version}"
        return f"<Model {self._name} on {self._home.name} {state}>"

    # -- what it is

    @property
    def name(self) -> str:
        """What it was loaded from: ``"module:build"``, or the name of a class, a function or a file."""
        return self._name

    @property
    def device(self) -> Any:
        """The :class:`accel.Device` that runs it, or the :class:`accel.World`."""
        return self._home

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """What it takes, by name."""
        return dict(self._buckets.inputs)

    @property
    def outputs(self) -> OutputSpecs:
        """What it returns."""
        return self._versions.serving.outputs

    @property
    def buckets(self) -> Buckets:
        """The sizes that inputs are padded to."""
        return self._buckets

    @property
    def weights(self) -> dict[str, Any]:
        """The durable refs of the weights that serve, by name; in a world a tuple of them each, one a rank."""
        return dict(self._versions.serving.runner.weights)

    @property
    def forwards(self) -> dict[tuple[int, ...], int]:
        """How often it was run in each bucket; the keys are the bucket's lengths, in the order of ``buckets.lengths``."""
        return dict(self._forwards)

    @property
    def replays(self) -> int:
        """How many of them replayed a CUDA graph."""
        return self._replays

    @property
    def version(self) -> int:
        """Which weights serve: 1, and after a :meth:`swap` one more than any before."""
        return self._versions.serving.number

    @property
    def is_torn(self) -> bool:
        """Whether weights that serve are torn, so that each call raises :class:`~accel.StaleRefError`; :meth:`swap` gives it others."""
        return not self._versions.is_closed and self._versions.serving.runner.is_torn

    @property
    def generation(self) -> int:
        """Of its device, or the epoch of its world."""
        generation: int = self.device.epoch if is_world(self._home) else self.device.generation
        return generation

    @property
    def latest_version(self) -> int:
        """The largest number of a version that has served, which may have been rolled back."""
        return self._versions.latest

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

    def rows(self, items: Sequence[Item], *, check_finite: bool = False) -> Coroutine[Any, Any, Rows]:
        """Run the model once on several requests, and return what it gives for each, in host arrays: a list with a ``version``.

        Parameters
        ----------
        items
            Requests as :meth:`item` returns them; not more than the largest bucket takes.
        check_finite
            Return a :class:`~accel.NonFiniteError` in the place of a result that has a NaN or an infinity.
        """
        serving, kept = self._versions.serving, self._versions.kept
        return self._rows(serving, items, check_finite) if kept is None else self._rows_of_either(serving, kept, items, check_finite)

    async def _rows_of_either(self, serving: Version, kept: Version, items: Sequence[Item], check_finite: bool) -> Rows:
        """Return what the weights that serve give, or those of before, if they alone give an answer: they serve from then on."""
        with serving, kept:
            results, failed = await self._attempt(serving, items, check_finite)
            if failed is not None:
                instead, also_failed = await self._attempt(kept, items, check_finite)
                if instead is not None and also_failed is None:  # else it is not the new weights' fault
                    self.leave(serving.number, failed)
                    return instead
        if results is None:
            assert failed is not None, "there are results, or there is an error"
            raise failed
        return results

    async def _attempt(self, version: Version, items: Sequence[Item], check_finite: bool) -> tuple[Rows | None, AccelError | None]:
        """Return results, if there are any, and the first error that is the model's own, of all items or in the place of a result."""
        try:
            results = await self._rows(version, items, check_finite)
        except (LibraryError, InvalidArgumentError) as error:
            if error.is_fault:
                raise
            return None, error
        return results, next((each for each in results if isinstance(each, AccelError)), None)

    def leave(self, version: int, error: BaseException | None = None) -> bool:
        """Serve the weights of before, from the next call on, if ``version`` serves and they are there; return whether that is so.

        Parameters
        ----------
        version
            Which weights are to go; they go when no call uses them any more.
        error
            Why, for the log and :attr:`on_rollback`.
        """
        versions = self._versions
        is_left = not versions.is_closed and versions.kept is not None and version == self.version
        if is_left:
            self._roll_back(error)
        return is_left

    def _roll_back(self, error: BaseException | None = None) -> None:
        left = self._versions.roll_back().number
        told = {"device": self._home.name, "version": self.version, "left": left}
        if error is None:
            logger.warning("model_rolled_back", **told)
        else:
            logger.error("model_rolled_back", **told, error=error)
        if self.on_rollback is not None:
            self.on_rollback(left, error)

    async def _rows(self, version: Version, items: Sequence[Item], check_finite: bool) -> Rows:
        buckets, rows = self._buckets, len(items)
        sizes = [item.sizes for item in items]
        largest = {dim: max(map(itemgetter(dim), sizes)) for dim in sizes[0]}
        bucket = buckets.bucket({BATCH: rows, **largest})
        with version:
            self._count(version, bucket)
            relations = version.relations
            try:
                known = await relations.known(bucket, None)
                inputs = buckets.stacked(items, known.inputs)
                arrays = await version.runner.fetch(inputs, known.specs, relations.outputs.leading(rows, bucket), None)
            except StaleRefError:
                version.check()  # if that is why, it says what to do
                raise
            if known.common:
                relations.check_common(arrays, known)
        results = relations.outputs.rows(arrays, sizes)
        answered = Rows([self.checked(each) for each in results] if check_finite else results)
        answered.version = version.number
        return answered

    def item(self, given: Any, *, finite: bool = False) -> Item:
        """Return one request as :meth:`rows` takes it. Its arrays share no memory with what was given, which may be changed.

        Parameters
        ----------
        given
            A mapping of inputs, or the only input, without the batch dimension.
        finite
            Refuse NaN and infinities.

        Raises
        ------
        InvalidArgumentError
            It does not fit the specs, or is longer than the longest bucket; ``argument`` names the input.
        """
        return self._buckets.item(given, finite=finite)

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

    def checked(self, result: Any) -> Any:
        """Return one result of the model, or a :class:`~accel.NonFiniteError` if it has a NaN or an infinity."""
        named = result.items() if isinstance(result, dict) else enumerate(result if isinstance(result, tuple) else (result,))
        for name, array in named:
            if array.dtype.kind not in "biu" and not np.isfinite(array).all():
                text = f"output {name} of the model has NaNs or infinities"
                return NonFiniteError(text, output=str(name), device=self._home.name, op=Forward.kind)
        return result

    async def _called(self, given: dict[str, Any], timeout: float | None, *, to_host: bool) -> Any:
        buckets, version = self._buckets, self._versions.serving
        buckets.check_names(given)
        arrays = {name: buckets.array(name, given[name]) for name in buckets.inputs}
        sizes = buckets.sizes({name: each.shape for name, each in arrays.items()})
        rows, most = sizes.get(BATCH, 1), buckets.most
        version.check()
        with version:
            if most is None or rows <= most:
                return version.outputs.joined(await self._part(version, arrays, sizes, timeout, to_host=to_host))
            deadline = deadline_of(timeout)
            parts = []
            for start in range(0, rows, most):
                part = buckets.part(arrays, start, start + most)
                some = {**sizes, BATCH: min(most, rows - start)}
                parts.append(await self._part(version, part, some, left(deadline), to_host=to_host))
            return version.outputs.joined(await self._together(version, parts, left(deadline), to_host=to_host))

    async def _together(self, version: Version, parts: list[list[Any]], timeout: float | None, *, to_host: bool) -> list[Any]:
        """Return the outputs of a batch whose parts were run one after another."""
        together = []
        for axis, pieces in zip(version.outputs.batch_axes, zip(*parts, strict=True), strict=True):
            if axis is None:
                together.append(pieces[0])
            elif to_host:
                together.append(np.concatenate(pieces, axis))
            else:
                together.append(await device_of(self._home).arrays.concatenate(pieces, axis=axis, timeout=timeout))
        return together

    async def _part(self, version: Version, arrays: Mapping[str, Any], sizes: Sizes, timeout: float | None, *, to_host: bool) -> list[Any]:
        """Run inputs that fit a bucket, and return the outputs, cut to their size: on the host only the rows that are wanted are fetched."""
        deadline, bucket, outputs = deadline_of(timeout), self._buckets.bucket(sizes), version.outputs
        self._count(version, bucket)
        known = await version.relations.known(bucket, timeout)
        operands = [await self._operand(name, each, bucket, deadline) for name, each in arrays.items()]
        if not to_host:
            return outputs.cut(await version.runner.run(operands, known.specs, left(deadline)), sizes)
        found = await version.runner.fetch(operands, known.specs, outputs.leading(sizes.get(BATCH, 0), bucket), left(deadline))
        version.relations.check_common(found, known)
        return outputs.cut(found, sizes)

    async def _operand(self, name: str, value: Any, bucket: Sizes, deadline: float | None) -> Operand:
        """Return an input of the size of a bucket."""
        if not isinstance(value, AccelRef):
            return self._buckets.padded(name, value, bucket)
        spec = self._buckets.inputs[name]
        widths = [(0, wanted - length) for wanted, length in zip(spec.of_size(bucket), value.shape, strict=True)]
        if not any(after for _, after in widths):
            return value
        padded: AccelRef = await device_of(self._home).arrays.pad(value, widths, value=spec.pad, timeout=left(deadline))
        return padded

    def _count(self, version: Version, bucket: Sizes) -> None:
        self._forwards[tuple(map(bucket.__getitem__, self._buckets.lengths))] += 1
        self._replays += version.relations.outputs.is_captured

    def canaries(self, given: Iterable[Any]) -> list[Item]:
        """Return canaries as :meth:`item` does, and items as they are; an error says which one is wrong."""
        items: list[Item] = []
        try:
            items.extend(each if isinstance(each, Item) else self.item(each) for each in given)
        except Exception as error:  # of the item, or of the caller's iterable
            said = error.message if isinstance(error, InvalidArgumentError) else str(error)
            raise InvalidArgumentError(
                f"canary {len(items)} is no item of the model: {said}",
                argument="canaries",
                remedy="Give a list of items, each as submit() takes it: one request's inputs, without the batch dimension.",
            ) from error
        return items

    # -- versions

    async def swap(
        self,
        weights: Any,
        *,
        canaries: Iterable[Any] = (),
        compare: Compare | None = None,
        on_progress: Progress | None = None,
        version: int | None = None,
    ) -> int:
        """Serve other weights, from one call to the next, and return the number of their version.

        The new weights are loaded beside the old ones, and the model is built around them and warmed up, while the old ones serve. Then both answer the
        canaries. Only if that goes well calls go to the new ones. The old ones stay, for :meth:`rollback`, until :meth:`release`, or the next swap: there are
        never more than two sets of weights.

        Parameters
        ----------
        weights
            As for :meth:`accel.Device.load_model`.
        canaries
            Items, as :meth:`item` takes them, that both versions must answer with finite numbers.
        compare
            ``compare(old, new)`` says, for each canary, whether the new answer will do; it may be a coroutine function.
        on_progress
            As for :meth:`accel.Device.load_model`.
        version
            Its number, so that models on several devices have the same one for the same weights; ``None``: one more than any before.

        Raises
        ------
        OutOfMemoryError
            There is no room for both versions. Nothing was changed, if ``memory_limit`` says so beforehand.
        InvalidArgumentError
            With these weights the model returns other arrays, dtypes or shapes than it serves; the old weights serve as before. Or an argument is wrong.
        LibraryError
            A canary was not answered well, or :meth:`rollback` came before the end. The old weights serve as before, and the new ones are gone.
        ClosedError, DeviceLostError
            The model or its device was closed, or lost, before the end.
        AccelError
            What loading the new weights, or running them, raised; the old ones serve as before.

        Notes
        -----
        Swaps of one model wait for each other. Cancelling leaves the old weights in service; the new ones go as soon as the device lets go of them. The
        weights of before the last swap are let go once it is known what the new ones are, before they are loaded, and are gone also if the swap then fails.
        """
        _check_function("compare", compare)
        _check_function("on_progress", on_progress)
        if version is not None and check_count("version", version) == self.version and not self.is_torn:
            raise InvalidArgumentError(f"version {version} serves already", argument="version", remedy="Give other weights another number.")
        items = self.canaries(canaries)
        try:
            async with self._swapping, self._versions.coming(weights, on_progress, number=version) as new:
                old = self._versions.serving
                new.outputs.check_serves_for(old.outputs)
                await self._check_canaries(old, new, items, compare)
        except LibraryError as error:
            if error.op != "swap":  # the model's own code raised it, with these weights
                error.remedy = f"Its cause says what the model raised. {_OLD_SERVE}"
            raise
        if old.runner.is_torn:  # there is nothing to go back to
            self._versions.release()
        logger.info("model_swapped", device=self._home.name, version=new.number, canaries=len(items))
        return new.number

    async def rollback(self) -> int:
        """Serve the weights of before the last swap again, and return their version; a swap that is under way is ended instead.

        Raises
        ------
        InvalidArgumentError
            They were released, or there was no swap.

        Notes
        -----
        Calls go to the other weights at once. This returns when the weights that were left have gone: as :meth:`release` does.
        """
        version = self.version
        if not self._versions.end_coming():
            self._roll_back()
            version = self.version
        await self._versions.gone()
        return version

    async def release(self) -> None:
        """Let the weights of before the last swap go, once no call uses them; does nothing if there are none.

        Notes
        -----
        The wait for calls is as long as the system's ``close_timeout`` at most. Cancelling ends the wait alone: the weights go all the same.
        """
        self._versions.release()
        await self._versions.gone()

    def drop_kept(self) -> None:
        """Let the weights of before the last swap go, and do not wait for that: see :meth:`release`."""
        self._versions.release()

    async def on(self, device: Any) -> Model:
        """Return the same model, with copies of the weights that serve and their version, on another device, or on a world of as many ranks."""
        version = self._versions.serving
        weights = await self._copied(version)
        versions = self._versions.elsewhere(device)
        async with versions.coming(weights, number=version.number, like=version):
            pass
        return Model(self._name, device, self._buckets, versions)

    async def follow(self, other: Model) -> None:
        """Serve copies of the weights that ``other`` serves, with their version, unless that version serves already and is whole."""
        version = other._versions.serving
        if version.number != self.version or self.is_torn:
            await self.swap(await other._copied(version), version=version.number)
            self._versions.serving.files = version.files

    async def reload(self) -> bool:
        """Serve the weights of this version again, read from their files; return whether there are any."""
        files = self._versions.serving.files
        if files is not None:
            await self.swap(files, version=self.version)
        return files is not None

    async def collected(self, weights: Any) -> Collected:
        """Find out what is in a source of weights, which several models may be swapped to then; reads no elements."""
        return await self._versions.loader.collected(weights)

    async def _copied(self, version: Version) -> Collected:
        """Return copies of a version's weights on the host."""
        version.check()
        with version:
            return await version.runner.copied()

    async def aclose(self) -> None:
        """Let the model go: a swap under way is ended, and calls that run end first. Idempotent. The device's own close does this too.

        Notes
        -----
        No call is taken from now on. The wait for those that run is as long as the system's ``close_timeout`` at most; what they use goes when they end.
        Cancelling ends the wait alone.
        """
        self._versions.close()
        await self._versions.gone()

    async def _check_canaries(self, old: Version, new: Version, items: Sequence[Item], compare: Compare | None) -> None:
        for number, item in enumerate(items):
            versions = (new,) if compare is None and old.runner.is_torn else (old, new)
            answers = [await self._answer(version, item) for version in versions]
            checked = self.checked(answers[-1])
            if isinstance(checked, NonFiniteError):
                raise NonFiniteError(
                    f"output {checked.output} of version {new.number} of the model has NaNs or infinities for canary {number}",
                    output=checked.output,
                    device=self._home.name,
                    op="swap",
                    remedy=_OLD_SERVE,
                )
            if compare is None:
                continue
            verdict = compare(*answers)
            if not (await verdict if inspect.isawaitable(verdict) else verdict):
                raise LibraryError(
                    f"compare refused what version {new.number} of the model answers to canary {number}",
                    device=self._home.name,
                    op="swap",
                    remedy=_OLD_SERVE,
                )

    async def _answer(self, version: Version, item: Item) -> Any:
        return (await self._rows(version, [item], False))[0]


def _check_function(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise InvalidArgumentError(f"{name} is {value!r:.80}", argument=name, remedy="Give a function, or None.")
