"""Recorded expressions: a small expression that is awaited again and again becomes a graph, which the device runs as one command.

Building, checking and enqueuing the ops of a small expression takes the host longer than the device takes to compute them. So the third await of an
expression of one structure records a graph of its ops, where the backend has graphs. Operands that were the same in all three awaits, such as weights,
are read where they are. The others are copied into the graph's own memory before each replay, and the results out of it behind.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

from accel.errors import AccelError, StaleRefError
from accel.expressions.array import Array, Cut
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

__all__ = ["Recordings"]

_AWAITS: Final = 3
"""At which await of one structure it is recorded."""

_ATTEMPTS: Final = 3
"""How often a structure is recorded, whose operands turn out to vary more than they did before."""

_MOST_BYTES: Final = 16 << 20
"""Of all arrays of an expression that is recorded: with more, the device takes longer than the host."""

_MOST_COPIED: Final = 4 << 20
"""Of operands and results that are copied for one replay."""

_MOST_KEPT: Final = 128 << 20
"""Of all recorded graphs of a device; a sixteenth of its ``memory_limit``, if that is less."""

_STRUCTURES: Final = 256
"""How many are remembered, recorded or not."""


class _Structure:
    """Expressions that differ in their operands only.

    Attributes
    ----------
    awaits, attempts
        How often it was awaited since it was recorded last, and how often it was recorded.
    places
        Where each operand of the last await is.
    varying
        Numbers of the operands that were elsewhere in another await.
    function
        The recorded graph.
    is_out
        Whether it is not to be recorded, or is being recorded.
    nbytes
        Of the graph's own memory, at most.
    used
        When it was awaited last, as the number of that await.
    """

    __slots__ = ("attempts", "awaits", "function", "is_out", "nbytes", "places", "used", "varying")

    def __init__(self, places: list[tuple[int, int]]) -> None:
        self.awaits = self.attempts = self.nbytes = self.used = 0
        self.places = places
        self.varying: set[int] = set()
        self.function: Any = None
        self.is_out = False

    def meets(self, places: list[tuple[int, int]]) -> bool:
        """Take note of where the operands are; return whether those that did not vary so far are where they were."""
        known = len(self.varying)
        if places != self.places:
            self.varying.update([number for number, (old, new) in enumerate(zip(self.places, places, strict=True)) if old != new])
            self.places = places
        return len(self.varying) == known


class Recordings:
    """The recorded expressions of a device.

    Parameters
    ----------
    device
        The device.

    Notes
    -----
    Nothing is recorded on a device that does not run graphs as single commands, or that was opened with ``debug=`` or ``faults=``, which count ops.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._structures: dict[Hashable, _Structure] = {}
        self._finds = 0
        self._kept = 0
        self._is_off: bool | None = None

    def find(self, roots: Sequence[Array]) -> tuple[_Structure, list[AccelRef]] | None:
        """Return the structure of what computes ``roots``, and its operands; ``None`` if it is not to be recorded. Called once for each await."""
        if self._is_off is None:
            self._is_off = not self._device.graph().is_one_command
        if self._is_off or (key := _key(roots)) is None:
            return None
        structures, leaves = self._structures, key[1]
        places = [(leaf.buffer, leaf.offset) for leaf in leaves]
        try:
            structure = structures.get(key[0])
        except TypeError:  # an argument that cannot be hashed, such as an array of the host's
            return None
        if structure is None:
            if len(structures) >= _STRUCTURES:
                oldest = min(structures, key=lambda each: structures[each].used)
                self._forget(structures.pop(oldest))
            structures[key[0]] = structure = _Structure(places)
        self._finds = structure.used = self._finds + 1
        if structure.is_out:
            return None
        is_met = structure.meets(places)
        if structure.function is not None and (not is_met or structure.function.is_stale):
            self._forget(structure)
        return structure, leaves

    async def call(self, structure: _Structure, leaves: Sequence[AccelRef], roots: Sequence[Array]) -> Sequence[AccelRef] | None:
        """Compute ``roots`` by their recorded graph, and return the results; ``None`` if they have none."""
        function, varying = structure.function, structure.varying
        if function is None:
            return None
        if varying:
            read = [leaf for number, leaf in enumerate(leaves) if number not in varying]
            leaves = [*[leaves[number] for number in sorted(varying)], *read]
        try:
            made: tuple[AccelRef, ...] = await function(*leaves)
        except StaleRefError:
            if not function.is_stale:
                raise
            return None  # rebuilt meanwhile; the batch says what became of the operands
        return made

    async def learn(
        self,
        structure: _Structure,
        leaves: Sequence[AccelRef],
        roots: Sequence[Array],
        order: Sequence[Array],
        record: Callable[..., dict[Array, Any]],
    ) -> None:
        """Record an expression that was computed by a batch, if it is time. Behind the batch: it reads its operands when it is awaited.

        Parameters
        ----------
        roots, order, record
            Those of :func:`accel.expressions.evaluate.record`, and that function.
        """
        structure.awaits += 1
        if structure.awaits < _AWAITS or structure.is_out or structure.function is not None:
            return
        structure.is_out = True  # what awaits the same meanwhile sends its batch
        structure.awaits = 0
        structure.attempts += 1
        varying = [leaves[number] for number in sorted(structure.varying)]
        copied = sum([leaf.nbytes for leaf in varying])
        structure.nbytes = nbytes = copied + sum(map(_nbytes, order))
        if (
            structure.attempts > _ATTEMPTS
            or nbytes > _MOST_BYTES
            or copied + sum(map(_nbytes, roots)) > _MOST_COPIED
            or any(leaf.is_strided for leaf in varying)
        ):
            return
        try:
            async with self._device.graph() as graph:
                inputs = {id(leaf): graph.empty(leaf.shape, leaf.dtype) for leaf in varying}
                operands = [i for each in order for i in each.inputs if isinstance(i, Array) and id(i.result) in inputs]
                made = record(graph, roots, order, {i: inputs[id(i.result)] for i in operands})
            function = graph.into_function(list(inputs.values()), [made[root] for root in roots])
        except AccelError as error:
            # Another context may take it; else it has what graphs do not record, or no command of its own.
            structure.is_out = not error.is_fault and not isinstance(error, StaleRefError)
        except BaseException:
            structure.is_out = False
            raise
        else:
            self._make_room(nbytes)
            structure.function = function
            structure.is_out = False
            self._kept += nbytes

    def _make_room(self, nbytes: int) -> None:
        limit = self._device.info().memory.limit
        most = _MOST_KEPT if limit is None else min(_MOST_KEPT, limit // 16)
        for structure in sorted(self._structures.values(), key=lambda each: each.used):
            if self._kept + nbytes <= most:
                return
            self._forget(structure)

    def _forget(self, structure: _Structure) -> None:
        """Give a recorded graph back."""
        if structure.function is not None:
            structure.function = None
            structure.awaits = 0
            self._kept -= structure.nbytes


def _nbytes(array: Array) -> int:
    return prod([length or 0 for length in array.shape]) * array.dtype.itemsize


def _key(roots: Sequence[Array]) -> tuple[Hashable, list[AccelRef]] | None:
    """Return what is the same for expressions of one structure, and the operands; ``None`` if there is nothing like that.

    Numbers and other arguments belong to the structure, by their values and how these are written: ``0.0 == -0.0 == 0``.
    """
    found = list(dict.fromkeys(roots))
    numbers = {each: number for number, each in enumerate(found)}
    places: dict[int, int] = {}
    leaves: list[AccelRef] = []
    parts: list[Hashable] = [numbers[root] for root in roots]
    for each in found:  # which grows
        step = each.step
        parts.append(step)
        for i in each.inputs:
            if not isinstance(i, Array):
                parts.append((type(i), repr(i)))
                continue
            result: Any = i.result
            if result is None:
                if (number := numbers.get(i)) is None:
                    number = numbers[i] = len(found)
                    found.append(i)
                parts.append(number)
            elif not isinstance(result, AccelRef):  # several results of one op
                return None
            elif (number := places.get(id(result))) is not None:
                parts.append(-1 - number)
            else:
                places[id(result)] = len(leaves)
                leaves.append(result)
                parts += (result.shape, result.dtype, result.is_strided and result.strides)
        if not isinstance(step, str):  # of functions of elements the operands tell
            if type(step) is Cut:
                return None
            arguments = each.arguments
            parts.append((each.shape, each.dtype, arguments and repr(arguments), arguments))
    return tuple(parts), leaves
