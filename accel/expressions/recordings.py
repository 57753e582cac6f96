"""Recorded expressions: a small expression that is awaited again and again becomes a graph, which the device runs as one command.

Building, checking and enqueuing the ops of a small expression takes the host longer than the device takes to compute them. So the third await of an
expression of one structure records a graph of its ops, where the backend has graphs. Operands that were the same in all three awaits, such as weights,
are read where they are. The others are copied into the graph's own memory before each replay, and the results out of it behind.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from accel.errors import AccelError, StaleRefError
from accel.expressions.array import Array, Cut

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence

    from accel.ref import AccelRef

__all__ = ["Recordings"]

_AWAITS: Final = 3
"""At which await of one structure it is recorded."""

_ATTEMPTS: Final = 3
"""How often a structure is recorded, whose operands turn out to vary more than they did before."""

_MOST_ARRAYS: Final = 1024
"""Of an expression that is recorded; to compare larger ones would hold the loop."""

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
        Where the operands of the last await are: the buffer of each, and then the offset of each.
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

    def __init__(self, places: list[int]) -> None:
        self.awaits = self.attempts = self.nbytes = self.used = 0
        self.places = places
        self.varying: set[int] = set()
        self.function: Any = None
        self.is_out = False

    def meets(self, places: list[int]) -> bool:
        """Take note of where the operands are; return whether those that did not vary so far are where they were."""
        if places == self.places:
            return True
        known, count = len(self.varying), len(places) // 2
        self.varying.update([number % count for number, (old, new) in enumerate(zip(self.places, places, strict=True)) if old != new])
        self.places = places
        return len(self.varying) == known


class _Known(NamedTuple):
    """An expression whose structure is remembered.

    Attributes
    ----------
    structure, operands, refs
        The structure, what is computed already, and the refs of that.
    """

    structure: _Structure
    operands: list[Array]
    refs: list[AccelRef]

    def call(self) -> Awaitable[tuple[AccelRef, ...]]:
        """Compute the expression by its recorded graph, where it is awaited."""
        structure, refs = self.structure, self.refs
        if varying := structure.varying:
            read = [ref for number, ref in enumerate(refs) if number not in varying]
            refs = [*[refs[number] for number in sorted(varying)], *read]
        made: Awaitable[tuple[AccelRef, ...]] = structure.function(*refs)
        return made


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

    def find(self, roots: Sequence[Array]) -> _Known | None:
        """Return what is known of the expression of ``roots``; ``None`` if it is not to be recorded. Called once for each await."""
        if self._is_off is None:
            self._is_off = not self._device.graph().is_one_command
        if self._is_off or (described := _described(roots)) is None:
            return None
        key, operands = described
        refs: list[Any] = [each.result for each in operands]
        places = [ref.buffer for ref in refs] + [ref.offset for ref in refs]
        structures = self._structures
        try:
            structure = structures.get(key)
        except TypeError:  # an argument that cannot be hashed, such as an array of the host's
            return None
        if structure is None:
            if len(structures) >= _STRUCTURES:
                oldest = min(structures, key=lambda each: structures[each].used)
                self._forget(structures.pop(oldest))
            structures[key] = structure = _Structure(places)
        self._finds = structure.used = self._finds + 1
        if structure.is_out:
            return None
        is_met = structure.meets(places)
        if structure.function is not None and (not is_met or structure.function.is_stale):
            self._forget(structure)
        return _Known(structure, operands, refs)

    async def learn(
        self, known: _Known, roots: Sequence[Array], order: Iterable[Array], record: Callable[..., Awaitable[dict[Array, Any]]]
    ) -> None:
        """Record an expression that was computed by a batch, if it is time. Behind the batch: it reads its operands when it is awaited.

        Parameters
        ----------
        known
            What :meth:`find` returned.
        roots, order, record
            Those of :func:`accel.expressions.evaluate.record`, and that function.
        """
        structure = known.structure
        structure.awaits += 1
        if structure.awaits < _AWAITS or structure.is_out or structure.function is not None:
            return
        structure.is_out = True  # what awaits the same meanwhile sends its batch
        structure.awaits = 0
        structure.attempts += 1
        varying = [known.operands[number] for number in sorted(structure.varying)]
        copied = sum(map(_nbytes, varying))
        structure.nbytes = nbytes = copied + sum(map(_nbytes, order))
        if (
            structure.attempts > _ATTEMPTS
            or nbytes > _MOST_BYTES
            or copied + sum(map(_nbytes, roots)) > _MOST_COPIED
            or any(each.ref.is_strided for each in varying)
        ):
            return
        try:
            async with self._device.graph() as graph:
                inputs = [graph.empty(each.shape, each.dtype) for each in varying]
                made = await record(graph, roots, order, dict(zip(varying, inputs, strict=True)))
            function = graph.into_function(inputs, [made[root] for root in roots])
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


def _described(roots: Sequence[Array]) -> tuple[Hashable, list[Array]] | None:
    """Return what is the same for expressions of one structure, and the operands; ``None`` if there is nothing like that.

    Numbers and other arguments belong to the structure, by their values and how these are written: ``0.0 == -0.0 == 0``.
    """
    found = list(dict.fromkeys(roots))
    numbers = {each: number for number, each in enumerate(found)}
    operands: list[Array] = []
    parts: list[Hashable] = [numbers[root] for root in roots]
    for each in found:  # which grows
        if len(found) > _MOST_ARRAYS:
            return None
        step = each.step
        parts.append(step)
        for i in each.inputs:
            if not isinstance(i, Array):
                parts.append((type(i), repr(i)))
                continue
            number = numbers.get(i)
            if number is None:
                if i.signature is not None:
                    operands.append(i)
                    numbers[i] = -len(operands)
                    parts.append(i.signature)
                    continue
                if i.result is not None:  # several results of one op
                    return None
                number = numbers[i] = len(found)
                found.append(i)
            parts.append(number)
        if not isinstance(step, str):  # of functions of elements the operands tell
            if type(step) is Cut:
                return None
            arguments = each.arguments
            parts.append((each.shape, each.dtype, arguments and repr(arguments), arguments))
    return tuple(parts), operands
