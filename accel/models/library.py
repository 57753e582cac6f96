"""A model in one context: the ops by which a device runs it, and the library that does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accel.dtype import DType
from accel.errors import LibraryError
from accel.libraries.kernel_library import KernelLibrary, Operand, kernel
from accel.models.outputs import DESCRIPTION_NBYTES, dtype_of, encoded, flattened
from accel.ops import KernelOp, Plan, Spec
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accel.errors import AccelError
    from accel.models.adapters.base import Adapter, ModelSource
    from accel.models.adapters.group import ModelGroup
    from accel.models.examples import Fill

__all__ = ["CpuModelLibrary", "CpuRankLibrary", "Describe", "Forward", "InitialLibrary", "ModelLibrary", "Prepare", "RankLibrary"]

_COST = 1.0
"""Seconds that a forward is said to take on the CPU: more than what runs on the loop's thread."""


@dataclass(frozen=True, eq=False, slots=True)
class Forward(KernelOp[tuple[AccelRef, ...]]):
    """Run a model: inputs in the order of its specs, outputs, with their names, as they were described."""

    kind: ClassVar[str] = "forward"

    library: str  # type: ignore[misc]  # each op says its model
    inputs: tuple[AccelRef, ...]
    outputs: tuple[Spec, ...]
    names: tuple[str, ...]
    place: tuple[int, int] = (0, 0)  # epoch and number, among the collectives of a world

    def plan(self) -> Plan:
        """Return what is read and made."""
        return Plan(self.inputs, (), self.outputs)

    def result(self, refs: tuple[AccelRef, ...]) -> tuple[AccelRef, ...]:
        """Return all outputs, also a single one, as a tuple."""
        return refs


@dataclass(frozen=True, eq=False, slots=True)
class Describe(KernelOp[AccelRef]):
    """Run a model and make a description of its outputs; see :meth:`~accel.models.outputs.OutputSpecs.decoded`."""

    kind: ClassVar[str] = "describe"

    library: str  # type: ignore[misc]  # each op says its model
    inputs: tuple[AccelRef, ...]
    place: tuple[int, int] = (0, 0)  # epoch and number, among the collectives of a world

    def plan(self) -> Plan:
        """Return what is read and made."""
        return Plan(self.inputs, (), (Spec((DESCRIPTION_NBYTES,), DType.UINT8),))


@dataclass(frozen=True, eq=False, slots=True)
class Prepare(KernelOp[AccelRef]):
    """Run a model once for each bucket, with all ranks of an epoch of a world, which captures the graphs of that epoch."""

    kind: ClassVar[str] = "prepare"
    captures: ClassVar[bool] = True

    library: str  # type: ignore[misc]  # each op says its model
    place: tuple[int, int] = (0, 0)  # epoch and number, among the collectives of a world

    def plan(self) -> Plan:
        """Return that no memory is read, and one byte made, so that batches take it."""
        return Plan((), (), (Spec((1,), DType.UINT8),))


class InitialLibrary(KernelLibrary):
    """The arrays that a model needs beside its weights, made in the process where it will live. ``describe`` tells which, ``forward`` writes them.

    Parameters
    ----------
    source
        Makes the adapter.
    given
        Names of the weights that there are.
    group
        The ranks that run the model together.
    """

    name: ClassVar[str] = "model"

    def __init__(self, source: ModelSource, given: tuple[str, ...], group: ModelGroup | None = None) -> None:
        self._source = source
        self._given = given
        self._group = group
        self._adapter: Adapter
        self._arrays: dict[str, Any] = {}

    def open(self, stream: Any) -> None:
        """Make them."""
        self._adapter = self._source.adapter(self._group)
        self._arrays = dict(self._adapter.initial(self._given))

    @kernel(Describe)
    def describe(self, op: Describe, stream: Any, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> None:
        """Enqueue a description of the arrays."""
        self._store(stream, [encoded(self._arrays)], outputs)

    @kernel(Forward)
    def forward(self, op: Forward, stream: Any, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> None:
        """Enqueue the arrays."""
        self._store(stream, list(self._arrays.values()), outputs)

    def _store(self, stream: Any, arrays: list[Any], outputs: Sequence[Operand]) -> None:
        def work() -> None:
            for array, output in zip(arrays, outputs, strict=True):
                self._adapter.store(array, output)

        _enqueue(self, stream, work)


class ModelLibrary(KernelLibrary):
    """One model in one context, opened before the generation is READY.

    Parameters
    ----------
    source
        Makes the adapter, in the process of the context.
    inputs
        Names of the model's inputs, in the order of the ops' operands.
    weights
        By name: memory that outlives the context, only read.
    warm
        For each bucket, shape, dtype and filling of each input: one forward is run for it when the library is opened.
    group
        Of a rank, that of the ranks that run the model together.
    world
        Of a rank, the number of the world whose communicators it uses.
    """

    name: ClassVar[str] = "model"
    captures: ClassVar[bool] = True
    eager: ClassVar[bool] = True

    def __init__(
        self,
        source: ModelSource,
        inputs: tuple[str, ...],
        weights: Mapping[str, Operand],
        warm: Sequence[Mapping[str, tuple[Spec, Fill]]],
        group: ModelGroup | None = None,
        world: int = 0,
    ) -> None:
        self._source = source
        self._inputs = inputs
        self._weights = weights
        self._warm = warm
        self._group = group
        self._world = world
        self._adapter: Adapter

    @classmethod
    def preload(cls, source: ModelSource, *args: Any, **kwargs: Any) -> None:
        """Import the framework, and the module of the model."""
        source.preload()

    def open(self, stream: Any) -> None:
        """Build the model around its weights, and run it once for each bucket."""
        self._adapter = self._source.adapter(self._group)
        self._adapter.open(self._weights, self.description, stream)
        self._warm_up()

    def _warm_up(self) -> None:
        """Run the model once for each bucket."""
        for inputs in reversed(self._warm):  # the largest first: what it needed is room for the others
            try:
                self._adapter.warm(inputs)
            except Exception as error:
                shapes = {name: spec.shape for name, (spec, _) in inputs.items()}
                error.add_note(f"The model was run on examples of the shapes {shapes}: TensorSpec(example=) says which values are valid.")
                raise

    def close(self) -> None:
        """Let the model go."""
        self._adapter.close()

    @kernel(Forward)
    def forward(self, op: Forward, stream: Any, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> None:
        """Enqueue a forward."""

        def work() -> None:
            structure, names, results = flattened(self._run(op, stream, inputs), self._source.outputs)
            given = [(name, tuple(result.shape), dtype_of(result)) for name, result in zip(names, results, strict=True)]
            wanted = [(name, output.shape, output.dtype) for name, output in zip(op.names, outputs, strict=True)]
            if given != wanted:
                shapes = {name: tuple(input_.shape) for name, input_ in zip(self._inputs, inputs, strict=True)}
                raise LibraryError(
                    f"the model returned a {structure} of {given} for inputs of {shapes}, and {wanted} before",
                    remedy="Names, order and shapes of a model's outputs must depend on the shapes of its inputs alone.",
                )
            for result, output in zip(results, outputs, strict=True):
                self._adapter.store(result, output)

        _enqueue(self, stream, work)

    @kernel(Describe)
    def describe(self, op: Describe, stream: Any, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> None:
        """Enqueue a forward whose outputs are described."""
        _enqueue(self, stream, lambda: self._adapter.store(self._described(op, stream, inputs), outputs[0]))

    def _described(self, op: Describe, stream: Any, inputs: Sequence[Operand]) -> Any:
        return encoded(self._run(op, stream, inputs), self._source.outputs, is_captured=self._adapter.is_captured)

    def _run(self, op: Forward | Describe, stream: Any, inputs: Sequence[Operand]) -> Any:
        return self._adapter.run(dict(zip(self._inputs, inputs, strict=True)))


class RankLibrary(ModelLibrary):
    """One rank of a model that several run together. It is opened without the others: their collectives are rehearsed until an epoch is prepared."""

    collective: ClassVar[bool] = True

    @kernel(Prepare)
    def prepare(self, op: Prepare, stream: Any, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> None:
        """Enqueue a forward for each bucket."""

        def work() -> None:
            self._join(stream, *op.place)
            self._warm_up()

        _enqueue(self, stream, work)

    def _run(self, op: Forward | Describe, stream: Any, inputs: Sequence[Operand]) -> Any:
        self._join(stream, *op.place)
        return super()._run(op, stream, inputs)

    def _join(self, stream: Any, epoch: int, number: int) -> None:
        """Use the communicator of the op's epoch; raises if that is over: the other ranks do not run what was left in a queue."""
        group = self._group
        assert group is not None, "a rank has one"
        group.number = number
        group.launcher = self.members.get(self._world, epoch)
        group.stream = _Now(stream) if self.description.backend == "cpu" else stream


class _Now:
    """A stream of the CPU to those that enqueue from its own work, which runs: theirs is a part of that."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @property
    def fault(self) -> AccelError | None:
        """What stopped the stream."""
        found: AccelError | None = self._stream.fault
        return found

    def submit(self, work: Callable[[], object]) -> None:
        """Do the work."""
        work()


class CpuModelLibrary(ModelLibrary):
    """A model on the CPU: a forward is the work of the stream, so that enqueuing one does not block."""

    blocking: ClassVar[bool] = False


class CpuRankLibrary(RankLibrary):
    """One rank of a model on the CPU; see :class:`CpuModelLibrary`."""

    blocking: ClassVar[bool] = False


def _enqueue(library: KernelLibrary, stream: Any, work: Callable[[], None]) -> None:
    """On the CPU the forward is the work of the stream; elsewhere the model enqueues, on the thread that calls this."""
    if library.description.backend == "cpu":
        stream.submit(work, _COST)
    else:
        work()
