"""Elements in random order, and random elements, on a GPU: CUB sorts the keys and sums the weights, kernels of the backend's own do the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from accel import DType
from accel_cuda.core.cub import Cub, RadixSort, RunningOp
from accel_cuda.families.kernels import CODES, aligned, launch_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["Choices"]

_SORT, _BITS = RadixSort(DType.UINT64, True), 64
_SUM = RunningOp("cumsum", DType.FLOAT64)
_SORT_COMMANDS, _OTHER_COMMANDS = 26, 8


class _Work(NamedTuple):
    """What an op does.

    Attributes
    ----------
    algorithm, elements, bits
        What is needed of CUB, for how many elements, and by how many bits.
    offsets
        Where the parts of the memory begin that the op works in: keys and sorted keys, places and sorted places; or the weights, whose sums take their place,
        and the largest one; then the places that were chosen, and what CUB works in.
    """

    algorithm: RadixSort | RunningOp | None
    elements: int
    bits: int
    offsets: tuple[int, ...]


def _work(op: Any) -> _Work:
    (length, count), way, width = op.counts(), op.way(), 0 if isinstance(op.source(), int) else 8
    if not count:
        return _Work(None, 0, 0, (0,) * 6)
    sizes = (
        (8 * length, 8 * length, 4 * length, 4 * length) if way == "ordered" else (8 * length, 8, 0, 0) if way == "weighed" else (0,) * 4
    )
    offsets = [0]
    for nbytes in (*sizes, width * count):
        offsets.append(offsets[-1] + aligned(nbytes))
    if way == "drawn":
        return _Work(None, 0, 0, tuple(offsets))
    if way == "ordered":
        return _Work(_SORT, length, _BITS, tuple(offsets))
    return _Work(_SUM, length, 0, tuple(offsets))


class Choices:
    """What these ops have in one context. CUB's algorithms are built when an op first needs one.

    Parameters
    ----------
    context
        The context.
    drawn
        The kernel that enqueues integers.
    """

    def __init__(self, context: CudaContext, drawn: Any) -> None:
        self._cub = Cub(context)
        self._drawn = drawn

    def may_block(self, op: Any) -> bool:
        """Return whether an algorithm that the op needs was not run yet. Quick."""
        algorithm = _work(op).algorithm
        return algorithm is not None and not self._cub.is_ready(algorithm)

    def commands(self, op: Any) -> int:
        """Return how many commands an op enqueues at most. Quick."""
        return _OTHER_COMMANDS + _SORT_COMMANDS * (_work(op).algorithm is not None)

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes an op works in, or ``None`` before :meth:`measure`. Quick."""
        work = _work(op)
        if work.algorithm is None:
            return work.offsets[-1]
        nbytes = self._cub.scratch_nbytes(work.algorithm, work.elements, work.bits)
        return None if nbytes is None else work.offsets[-1] + nbytes

    def measure(self, op: Any) -> None:
        """See that :meth:`scratch_nbytes` knows. May block."""
        work = _work(op)
        if work.algorithm is not None:
            self._cub.measure(work.algorithm, work.elements, work.bits)

    def close(self) -> None:
        """Unload the algorithms. May block; the streams have ended, and the context is healthy."""
        self._cub.close()

    def pick(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Enqueue an op."""
        stream, work, source = lane.stream, _work(op), op.source()
        stream.ready()
        length, count = op.counts()
        if not count:
            return
        rooms = [outputs[-1] + offset for offset in work.offsets]
        chosen = outputs[0] if isinstance(source, int) else rooms[4]
        if op.way() == "ordered":
            self._order(stream, op, inputs, outputs, rooms, chosen)
        elif op.way() == "weighed":
            weights, status = rooms[0], outputs[1]
            given = weights, length, inputs[-1], status
            if op.p.dtype is DType.FLOAT32:
                launch_each(stream, "choice_weigh_f32", length, *given)
            else:
                stream.fill(rooms[1], bytes(8), 1)
                launch_each(stream, "choice_largest", length, rooms[1], *given[1:])
                launch_each(stream, "choice_weigh_f64", length, *given, rooms[1])
            self._cub.run(stream, _SUM, rooms[5], length, weights, weights)
            arguments = chosen, count, op.key(), op.offset, weights, length, status
            launch_each(stream, "choice_search", count, *arguments)
        else:
            self._drawn(stream, op, length, count, chosen)
        if isinstance(source, int):
            return
        before, behind = op.lines()
        size = before * count * behind
        launch_each(stream, f"choice_take_{source.dtype.itemsize}", size, outputs[0], size, inputs[0], chosen, length, count, behind)

    def _order(self, stream: CudaStream, op: Any, inputs: Sequence[int], outputs: Sequence[int], rooms: list[int], chosen: int) -> None:
        """Enqueue the sort of keys, and take the first places of it."""
        length, count = op.counts()
        keys, sorted_keys, places, sorted_places = rooms[:4]
        has_weights = getattr(op, "p", None) is not None
        status = outputs[1] if has_weights else 0
        arguments = keys, places, length, op.key(), op.offset
        if has_weights:
            launch_each(stream, f"choice_clocks_{CODES[op.p.dtype]}", length, *arguments, inputs[-1], status)
        else:
            launch_each(stream, "choice_keys", length, *arguments)
        self._cub.run(stream, _SORT, rooms[5], length, keys, sorted_keys, values=places, sorted_values=sorted_places, bits=_BITS)
        launch_each(stream, "choice_places", count, chosen, count, sorted_places, sorted_keys, status)
