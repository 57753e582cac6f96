"""What each output of a model has to do with the sizes of its inputs, and with the rows of a batch: found out by running it, and proved by values.

Shapes are those of runs on several lengths of each named dimension. Whether an output is split among requests, or is common to all, is proved by runs in which
the other rows have other values: what belongs to a row must keep its own.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from accel.errors import InvalidArgumentError, LibraryError
from accel.models.examples import example_rows, fill_of
from accel.models.outputs import Follows, is_of_batch
from accel.models.runner import deadline_of, device_of, filled, left
from accel.models.tensor_spec import BATCH
from accel.ops import Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.actors.system import ActorSystem
    from accel.models.outputs import Dim, OutputSpecs
    from accel.models.runner import ModelDevice, ModelHome, Runner
    from accel.models.tensor_spec import Buckets, Sizes

__all__ = ["BatchAxis", "Known", "Relations", "check_batch_axis", "tried_lengths"]

Array: TypeAlias = np.ndarray[Any, Any]
BatchAxis: TypeAlias = "int | Mapping[str, int | None] | None"
"""The batch dimension of the outputs, of one or of each by name; in a mapping ``None`` says that it is common to all requests."""

_FREE = (16, 31)
"""Lengths on which a dimension without buckets is tried: one is a multiple of usual strides, and the other is one less than a multiple."""
_KEPT = 256
"""Sizes for which a run has told the outputs' shapes that are remembered."""


class Known(NamedTuple):
    """The inputs of a run of some size, and what its outputs must be."""

    inputs: tuple[tuple[int, ...], ...]
    """Their shapes."""
    specs: tuple[Spec, ...]
    common: Mapping[int, Array]
    """By the place of the output: the values of those that are common to all requests."""


class Relations:
    """Runs a model to see what its outputs follow.

    Parameters
    ----------
    home, runner, buckets
        The model that is run, and its inputs.
    system
        Makes inputs and compares outputs off the loop.
    batch_axis
        What the user says of outputs: they are not tried.

    Attributes
    ----------
    outputs : OutputSpecs
        What was established.
    """

    outputs: OutputSpecs

    def __init__(self, home: ModelHome, runner: Runner, buckets: Buckets, system: ActorSystem, batch_axis: BatchAxis) -> None:
        self._home = home
        self._system = system
        self._runner = runner
        self._buckets = buckets
        self._specs = tuple(buckets.inputs.values())
        self._said = batch_axis
        self._common: Mapping[int, Array] = {}
        self._is_told = True  # what a run must return is told by the sizes of its inputs
        self._known: OrderedDict[tuple[int, ...], Known] = OrderedDict()

    @property
    def _device(self) -> ModelDevice:
        """Where inputs are made; another one may take the rank of the first in a world."""
        return device_of(self._home)

    async def establish(self) -> None:
        """Run the model as often as needed, and have :attr:`outputs`.

        Raises
        ------
        InvalidArgumentError
            An output can neither be split among requests nor given to each: the message names it.
        LibraryError
            The model raised.
        """
        smallest = {dim: tried_lengths(dim, self._buckets)[0] for dim in self._buckets.dims}
        first = await self._described(smallest)
        said = _said(self._said, first.names)
        is_said = set(said) == set(first.names)
        seen: dict[str, dict[int, OutputSpecs]] = {}
        for dim in self._buckets.dims:
            seen[dim] = {smallest[dim]: first}
            if dim == BATCH and is_said and len(self._buckets.lengths.get(BATCH, ())) == 1:
                continue  # it may take no other batch
            await self._see(seen[dim], tried_lengths(dim, self._buckets)[1:], smallest, dim, said)
            if dim != BATCH and _is_strided(seen[dim]):  # how are the lengths between rounded?
                await self._see(seen[dim], (smallest[dim] + 1, smallest[dim] - 1 or 2), smallest, dim, said)
        self.outputs = dataclasses.replace(
            first,
            shapes=tuple(
                [
                    _shape(name, [_dim(seen, place, axis, self._buckets) for axis in range(len(shape))], shape, said, smallest.get(BATCH))
                    for place, (name, shape) in enumerate(zip(first.names, first.shapes, strict=True))
                ]
            ),
        )
        if BATCH in smallest and not (is_said and self.outputs.batch_axes.count(None) == 0):
            await self._prove([(found, {**smallest, BATCH: rows}) for rows, found in sorted(seen[BATCH].items())], said)
        self._is_told = not any(None in shape for shape in self.outputs.shapes) and (
            BATCH not in smallest or all(isinstance(dim, int) for place in self._common_places() for dim in self.outputs.shapes[place])
        )

    async def adopt(self, other: Relations) -> None:
        """Take what was established for the same model with the same weights, after one run that shows it."""
        smallest = {dim: tried_lengths(dim, self._buckets)[0] for dim in self._buckets.dims}
        found = await self._described(smallest)
        if not other.outputs.admits(found, smallest):
            raise InvalidArgumentError(
                f"on {self._device.name} the model returns {found.described()} for inputs of {smallest}, and before {other.outputs.described()}",
                remedy="What a model returns must depend on its inputs and weights alone.",
            )
        self.outputs = dataclasses.replace(other.outputs, is_captured=found.is_captured)
        self._common, self._is_told = other._common, other._is_told

    async def known(self, bucket: Sizes, timeout: float | None) -> Known:
        """Return what a run on inputs of a size must return. The sizes tell it, or the first use of them is a run on examples."""
        key = tuple(map(bucket.__getitem__, self._buckets.dims))
        known = self._known.get(key)
        if known is None:
            told = (self.outputs.specs(bucket), self._common) if self._is_told else await self._found(bucket, timeout)
            known = self._known[key] = Known(tuple([spec.of_size(bucket) for spec in self._specs]), *told)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return known

    async def _found(self, bucket: Sizes, timeout: float | None) -> tuple[tuple[Spec, ...], Mapping[int, Array]]:
        """Run the model on examples, to see what it returns for inputs of a size."""
        deadline = deadline_of(timeout)
        found = await self._described(bucket, left(deadline))
        if not self.outputs.admits(found, bucket):
            raise LibraryError(
                f"the model returns {found.described()} for inputs of {dict(bucket)}, and {self.outputs.described()} at other sizes",
                remedy="Shapes of a model's outputs must depend on the shapes of its inputs alone.",
            )
        specs = found.specs({})
        common = self._common_places()
        values: Sequence[Array] = []
        if common:
            inputs = await self._system.run_blocking(self._inputs, bucket, 0, is_varied=False)
            values = await self._values(specs, bucket, inputs, left(deadline))
        return specs, {place: values[place] for place in common}

    def check_common(self, arrays: Sequence[Array], known: Known) -> None:
        """Raise unless the outputs that are common to all requests have the values that were established.

        Raises
        ------
        LibraryError
            One has not: it may be another request's.
        """
        for place, value in known.common.items():
            if not _same(arrays[place], value):
                raise LibraryError(
                    f"output {self.outputs.names[place]!r} of the model was the same for all inputs when it was loaded, and now is another",
                    remedy="Leave it out with load_model(outputs=), or return a row of it for each row of the batch.",
                )

    # -- runs

    async def _described(self, sizes: Sizes, timeout: float | None = None) -> OutputSpecs:
        """Run the model on examples, and return what it returned, with lengths alone."""
        deadline = deadline_of(timeout)
        refs = [await filled(self._device, Spec(spec.of_size(sizes), spec.dtype), fill_of(spec), left(deadline)) for spec in self._specs]
        try:
            return await self._runner.describe(tuple(refs), left(deadline))
        except LibraryError as error:
            if error.is_fault:
                raise
            shapes = {name: spec.of_size(sizes) for name, spec in self._buckets.inputs.items()}
            raise error.clone(
                remedy=f"It was run on examples of the shapes {shapes}. Give valid values with TensorSpec(example=), and one name to what has one length."
            ) from error

    async def _see(
        self, seen: dict[int, OutputSpecs], lengths: Sequence[int], smallest: Sizes, dim: str, said: Mapping[str, int | None]
    ) -> None:
        """Run the model on other lengths of one dimension; what is none of its buckets it need not take."""
        first, buckets = seen[smallest[dim]], self._buckets.lengths.get(dim)
        for length in lengths:
            sizes = {**smallest, dim: length}
            try:
                found = await self._described(sizes)
            except LibraryError as error:
                if error.is_fault or buckets is None or length in buckets:
                    raise
                if dim != BATCH:
                    continue
                names = [name for name in first.names if name not in said]
                raise InvalidArgumentError(
                    f"the model takes no batch but one of {smallest[BATCH]}, so no run shows along which dimension {', '.join(names)} are split",
                    argument="batch_axis",
                    remedy=f'Name it: load_model(batch_axis={{"{names[0]}": 0}}).',
                ) from error
            if first.form != found.form:
                raise InvalidArgumentError(
                    f"the model returns {first.described()} for inputs of {dict(smallest)}, and {found.described()} for {sizes}",
                    remedy="Names, order, dtypes and dimensions of a model's outputs must not depend on its inputs.",
                )
            seen[length] = found

    async def _values(
        self, specs: tuple[Spec, ...], sizes: Sizes, inputs: Sequence[Array | None], timeout: float | None = None
    ) -> Sequence[Array]:
        """Run the model on inputs, ``None`` being one that has no rows, and return the outputs."""
        deadline = deadline_of(timeout)
        operands = [
            await filled(self._device, Spec(spec.of_size(sizes), spec.dtype), fill_of(spec), left(deadline)) if each is None else each
            for spec, each in zip(self._specs, inputs, strict=True)
        ]
        return await self._runner.fetch(operands, specs, [None] * len(specs), left(deadline))

    def _inputs(self, sizes: Sizes, seed: int, *, is_varied: bool) -> list[Array | None]:
        return [None if spec.batch_axis is None else example_rows(spec, sizes, seed, is_varied=is_varied) for spec in self._specs]

    def _common_places(self) -> list[int]:
        return [place for place, axis in enumerate(self.outputs.batch_axes) if axis is None]

    # -- values

    async def _prove(self, runs: Sequence[tuple[OutputSpecs, Sizes]], said: Mapping[str, int | None]) -> None:
        """See that outputs keep their values when the rows do that they are said to belong to; and common ones, whatever the rows are."""
        (small, small_sizes), (large, sizes) = runs[0], runs[-1]
        specs, blocking = large.specs({}), self._system.run_blocking
        try:
            tried = await blocking(self._tried, sizes, is_varied=True)
            found = [await self._values(specs, sizes, each) for each in tried]
        except LibraryError as error:
            if error.is_fault:
                raise
            tried = await blocking(self._tried, sizes, is_varied=False)  # it has no use for zeros
            found = [await self._values(specs, sizes, each) for each in tried]
        is_varied = any(mine is not None and not np.array_equal(mine, changed) for mine, changed in zip(*tried[:2], strict=True))
        common = self._common_places()
        if common:
            others = await blocking(self._inputs, small_sizes, 1, is_varied=False)
            found.append(await self._values(small.specs({}), small_sizes, others))
        await blocking(self._compare, found, sizes[BATCH], said, is_varied=is_varied)
        self._common = {place: found[0][place] for place in common}

    def _compare(self, found: Sequence[Sequence[Array]], rows: int, said: Mapping[str, int | None], *, is_varied: bool) -> None:
        """Raise unless the outputs of the runs are each split, or common, as is said of them."""
        for place, (name, axis) in enumerate(zip(self.outputs.names, self.outputs.batch_axes, strict=True)):
            values = [each[place] for each in found]
            if axis is not None:
                if name not in said:
                    _check_kept(name, axis, rows, *values[:3])
            elif not all(_same(values[0], other) for other in values[1:]):
                raise _inseparable(name, "has no dimension that follows the batch, and its values change with the rows")
            elif not is_varied and name not in said:
                raise _inseparable(name, "has no dimension that follows the batch, and no two examples show whether the rows change it")

    def _tried(self, sizes: Sizes, *, is_varied: bool) -> list[list[Array | None]]:
        """Return inputs, others of which only the last row is the same, and others of which only the first is."""
        inputs, last, first = [self._inputs(sizes, seed, is_varied=is_varied) for seed in (0, 1, 1)]
        for others, row in ((last, -1), (first, 0)):
            for spec, mine, other in zip(self._specs, inputs, others, strict=True):
                if mine is not None and other is not None:
                    place: Any = (*[slice(None)] * (spec.batch_axis or 0), row)
                    other[place] = mine[place]
        return [inputs, last, first]


def check_batch_axis(given: Any) -> None:
    """Raise unless it is a :data:`BatchAxis`."""
    each = given.values() if isinstance(given, Mapping) else [given]
    if not all(axis is None or (isinstance(axis, int) and not isinstance(axis, bool)) for axis in each):
        raise InvalidArgumentError(
            f"batch_axis is {given!r}",
            argument="batch_axis",
            remedy='Give the dimension of each output that is split: {"state": 1}; None for one that is not.',
        )


def _said(given: BatchAxis, names: Sequence[str]) -> Mapping[str, int | None]:
    """Return what is said of each output."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    unknown = [name for name in given if name not in names]
    if unknown:
        raise InvalidArgumentError(
            f"batch_axis names {unknown[0]!r}, which is no output of the model",
            argument="batch_axis",
            remedy=f"It returns {', '.join(names)}.",
        )
    return given


def tried_lengths(dim: str, buckets: Buckets) -> tuple[int, ...]:
    """Return the lengths of a dimension on which a model is tried: two of the batch, of others all that it has buckets for, and one that is far from them."""
    lengths = buckets.lengths.get(dim)
    if lengths is None:
        return (1, 2) if dim == BATCH else _FREE
    if dim == BATCH:
        return lengths[:2] if len(lengths) > 1 else (lengths[0], lengths[0] - 1 or 2)
    return lengths if lengths[-1] >= 2 * lengths[0] else (*lengths, lengths[0] // 2 or 2)


def _dim(seen: Mapping[str, Mapping[int, OutputSpecs]], place: int, axis: int, buckets: Buckets) -> Dim | Literal["?"]:
    """Return what a dimension of an output follows, given runs on several lengths of each dimension of the inputs; ``"?"``: the batch, in another way."""
    lengths = {dim: {size: found.shapes[place][axis] for size, found in sorted(runs.items())} for dim, runs in seen.items()}
    moved = [dim for dim, each in lengths.items() if len(set(each.values())) > 1]
    if not moved:
        return next(iter(next(iter(lengths.values())).values())) if lengths else None
    dim, sizes = moved[0], list(lengths[moved[0]])
    of_sizes: list[Any] = list(lengths[dim].values())
    if BATCH in moved:
        found = _line(sizes, of_sizes) if len(moved) == 1 else None
        if found is None or found.plus:
            return "?"
    else:
        found = _line(sizes, of_sizes) or _stride(sizes, of_sizes, is_unique=dim not in buckets.lengths) if len(moved) == 1 else None
    return dim if found == Follows("") else found and dataclasses.replace(found, dim=dim)


def _is_strided(runs: Mapping[int, OutputSpecs]) -> bool:
    """Return whether a dimension of an output grows, and not by a whole number for each place of the inputs' dimension."""
    lengths = [list(zip(*each, strict=True)) for each in zip(*[found.shapes for found in runs.values()], strict=True)]
    return any(len(set(seen)) > 1 and _line(list(runs), seen) is None for shape in lengths for seen in shape)


def _line(sizes: Sequence[int], seen: Sequence[int]) -> Follows | None:
    """Return ``times * n + plus``, if the lengths are that for the sizes."""
    times, rest = divmod(seen[-1] - seen[0], sizes[-1] - sizes[0])
    found = Follows("", times, seen[0] - times * sizes[0])
    return found if not rest and times > 0 and [found.of(size) for size in sizes] == list(seen) else None


def _stride(sizes: Sequence[int], seen: Sequence[int], *, is_unique: bool) -> Follows | None:
    """Return ``(n + plus) // over``, if the lengths are that for the sizes: of several the one that leaves nothing out, if it need not be the only one."""
    points = list(zip(sizes, seen, strict=True))
    strides = {round((size - other) / (length - less)) for size, length in points for other, less in points if length > less}
    for over in sorted(each for each in strides if each > 1):
        low = max(over * length - size for size, length in points)
        high = min(over * length - size + over - 1 for size, length in points)
        if low == high if is_unique else low <= high:
            return Follows("", 1, high, over)
    return None


def _shape(name: str, dims: Sequence[Dim], shape: Sequence[Any], said: Mapping[str, int | None], rows: int | None) -> tuple[Dim, ...]:
    """Return the dimensions of an output, of which at most one follows the batch, by a whole factor: the one that the user names, if one is named."""
    found, axis = [None if dim == "?" else dim for dim in dims], said.get(name)
    if name not in said or rows is None:
        if "?" in dims:
            raise _inseparable(
                name, f"has the dimension {dims.index('?')}, which changes with the batch, and not as a multiple of it alone"
            )
    elif axis is not None:
        fits = -len(dims) <= axis < len(dims) and (is_of_batch(dims[axis]) or (isinstance(dims[axis], int) and shape[axis] % rows == 0))
        if not fits:
            raise InvalidArgumentError(
                f"batch_axis says {axis} for output {name!r}, whose shape is {tuple(shape)} for a batch of {rows}",
                argument="batch_axis",
                remedy="Name a dimension that is as long as the batch, or several times as long.",
            )
        times = shape[axis] // rows
        found[axis] = BATCH if times == 1 else Follows(BATCH, times)
    if sum(map(is_of_batch, found)) > (1 if axis is not None or name not in said else 0):
        raise _inseparable(name, f"has the dimensions ({', '.join(map(str, found))}), and not one alone that follows the batch")
    return tuple(found)


def _inseparable(name: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"output {name!r} of the model {what}: it cannot be split among the requests of a batch",
        argument="outputs",
        remedy="Name its batch dimension with load_model(batch_axis=), leave it out with outputs=, or show what rows do with TensorSpec(example=). "
        f'A model that is only called, and not served, may call the dimension otherwise than "{BATCH}".',
    )


def _check_kept(name: str, axis: int, rows: int, *runs: Array) -> None:
    """See that the parts of the last row and of the first are the same in runs in which the other rows were changed."""
    before, last, first = [np.moveaxis(each, axis, 0) for each in runs]
    times = len(before) // rows
    if not (_same(before[-times:], last[-times:], before) and _same(before[:times], first[:times], before)):
        raise _inseparable(name, "has values that change with the other rows of the batch, or from run to run")
    # Several places of a row: they follow each other, and are not those of one place of all rows after another.
    if times > 1 and _same(before[rows - 1 :: rows], last[rows - 1 :: rows], before):
        raise _inseparable(name, f"has {times} places for each row, and the examples do not show which")


def _same(value: Array, other: Array, among: Array | None = None) -> bool:
    """Return whether two arrays have the same values: floats but for rounding, by the largest of them."""
    if np.array_equal(value, other):
        return True
    if value.shape != other.shape or value.dtype.kind in "biu":
        return False
    wide, others = [np.asarray(each, np.complex128 if value.dtype.kind == "c" else np.float64) for each in (value, other)]
    magnitudes = np.abs(np.asarray(value if among is None else among, wide.dtype))
    largest = magnitudes.max(initial=0.0, where=np.isfinite(magnitudes))
    real = value.real.dtype if value.dtype.kind == "c" else value.dtype
    return bool(np.allclose(wide, others, rtol=0, atol=_eps(real) ** 0.5 * largest, equal_nan=True))


def _eps(dtype: np.dtype[Any]) -> float:
    finfo: Any = ml_dtypes.finfo  # it has no types
    return float(finfo(dtype).eps)
