"""The ``sort`` family on a GPU: CUB's radix sort of numbers in the order of the elements, and kernels of the backend's own around it.

A line along the axis is sorted with all others at once: its number is above the element in the key. Where both have more than 64 bits together, the
places are sorted by the elements and then, as the sort is stable, by the lines.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from accel import DType, UnsupportedError
from accel_cuda.core.cub import CUB, Cub, RadixSort, RunningOp
from accel_cuda.core.family import CudaPart, FamilyState, Source
from accel_cuda.families.kernels import CODES, aligned, bits, clear, launch_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["PART", "SortLibrary"]

_BLOCK = 256
_LIMIT = 2**31 - 1
# As in sort.cu.
_JOINED, _FALLING, _LINES = 1, 2, 4
_DIMENSIONS = 8
_SHARED_BINS, _EACH, _BLOCKS_PER_MULTIPROCESSOR = 8192, 16, 8

_SUM = RunningOp("cumsum", DType.UINT32)
_SORTS = tuple(RadixSort(keys, has_values) for keys in (DType.UINT32, DType.UINT64) for has_values in (False, True))
_ORDERED = frozenset({"sort", "argsort", "topk", "partition", "segment_sort"})
_UNIQUE = frozenset({"unique", "unique_all"})
_SORT_COMMANDS, _OTHER_COMMANDS = 26, 16
# Of how many elements the first k are selected, one block a line, and not sorted.
_LEAST_SELECTED, _MOST_SELECTED, _LONG, _LINES_OF_LONG = 128, 1024, 1 << 16, 32
_KEPT = 32768


class _Order(NamedTuple):
    """How the elements of an op are sorted.

    Attributes
    ----------
    lines, length, behind
        How many lines along the axis there are, their length, and how many elements are behind the axis.
    key
        UINT32 or UINT64.
    code_bits, line_bits
        Of a key: of an element, and of the number of its line.
    is_split
        Whether elements and lines are sorted by one after the other.
    has_places
        Whether the places of elements are sorted with the keys.
    """

    lines: int
    length: int
    behind: int
    key: DType
    code_bits: int
    line_bits: int
    is_split: bool
    has_places: bool

    @property
    def size(self) -> int:
        """How many elements there are."""
        return self.lines * self.length

    def sorts(self) -> list[tuple[RadixSort, int]]:
        """Return the sorts, and by how many bits each."""
        if self.is_split:
            return [(RadixSort(self.key, True), self.code_bits), (RadixSort(DType.UINT32, True), self.line_bits)]
        return [(RadixSort(self.key, self.has_places), self.code_bits + self.line_bits)]


class _Rooms(NamedTuple):
    """Addresses of the parts of the memory that an op works in. Each part holds one array at a time.

    Attributes
    ----------
    keys, sorted_keys
        Of the elements. In a split sort, the sorted keys make way for the numbers of lines.
    places, sorted_places
        Of the elements, if they are sorted with the keys.
    numbers
        Marks of elements and then their sums, or the sorted numbers of lines in a split sort.
    library
        What CUB works in.
    """

    keys: int
    sorted_keys: int
    places: int
    sorted_places: int
    numbers: int
    library: int


class _Work(NamedTuple):
    """What an op does, worked out once for all ops like it.

    Attributes
    ----------
    order
        How elements are sorted, if they are.
    marked
        How many elements are marked, of which some are found.
    size
        How many elements are sorted or marked.
    needs
        What is needed of CUB: algorithms, elements and bits.
    offsets
        Where the parts of the memory begin that the op works in; the last part is CUB's.
    """

    order: _Order | None
    marked: int
    size: int
    needs: tuple[tuple[RadixSort | RunningOp, int, int], ...]
    offsets: tuple[int, ...]

    def rooms(self, start: int) -> _Rooms:
        """Return the parts of memory at ``start``."""
        return _Rooms(*[start + offset for offset in self.offsets])


def _work_of(op: Any) -> _Work:
    kind = op.kind
    if kind == "compress":
        return _work(kind, DType.BOOL, (1, op.condition.size, 1), 0, 0)
    if kind == "segment_sort":
        return _work(kind, op.x.dtype, (1, op.x.size, 1), op.offsets.size - 1, 0)
    if kind in _ORDERED:
        return _work(kind, op.x.dtype, op.lines(), 0, op.k if kind == "topk" else 0)
    if kind in _UNIQUE or kind == "nonzero":
        return _work(kind, op.x.dtype, (1, op.x.size, 1), 0, 0)
    return _NOTHING


@lru_cache(4096)
def _work(kind: str, dtype: DType, lines: tuple[int, int, int], segments: int, k: int) -> _Work:
    before, length, behind = lines
    size = before * length * behind
    if not size or (kind == "topk" and (not k or _selects(k, length, before * behind))):
        return _NOTHING
    order = _order(kind, dtype, lines, segments) if kind in _ORDERED or kind in _UNIQUE else None
    marked = 0 if kind in _ORDERED else size
    needs: list[tuple[RadixSort | RunningOp, int, int]] = []
    keys = places = numbers = 0
    if order is not None:
        keys, places, numbers = size * order.key.itemsize, 4 * size * order.has_places, 4 * size * order.is_split
        needs += [(sort, size, bits) for sort, bits in order.sorts()]
    if marked:
        numbers = 4 * marked
        needs.append((_SUM, marked, 0))
    offsets = [0]
    for nbytes in (keys, keys, places, places, numbers):
        offsets.append(offsets[-1] + aligned(nbytes))
    return _Work(order, marked, size, tuple(needs) if size <= _LIMIT else (), tuple(offsets))


_NOTHING = _Work(None, 0, 0, (), (0,) * 6)


def _selects(k: int, length: int, lines: int) -> bool:
    """Return whether the first elements of lines are selected, and not all sorted."""
    return k <= _MOST_SELECTED and _LEAST_SELECTED <= length <= (_LONG if lines < _LINES_OF_LONG else _LIMIT)


def _order(kind: str, dtype: DType, lines: tuple[int, int, int], segments: int) -> _Order:
    before, length, behind = lines
    count = before * behind
    code_bits = 1 if dtype is DType.BOOL else 8 * dtype.itemsize
    line_bits = max((segments or count) - 1, 0).bit_length()
    # Only the device knows which segment an element is in.
    is_split = code_bits + line_bits > 64 or (segments > 0 and line_bits > 0)
    key = DType.UINT32 if code_bits + (0 if is_split else line_bits) <= 32 else DType.UINT64
    has_places = is_split or kind in ("argsort", "topk", "unique_all")
    return _Order(count, length, behind, key, code_bits, line_bits, is_split, has_places)


class _Indices(ctypes.Structure):
    _fields_ = (
        ("sums", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("size", "room", "dims")),
        ("lengths", ctypes.c_int64 * _DIMENSIONS),
        ("outputs", ctypes.c_uint64 * _DIMENSIONS),
    )


class SortLibrary(FamilyState[Cub]):
    """CUB in one context."""

    def __init__(self, context: CudaContext) -> None:
        super().__init__(context, Cub)
        self.kernels = {
            "sort": self._sort,
            "partition": self._sort,
            "segment_sort": self._sort,
            "argsort": self._pick,
            "topk": self._pick,
            "searchsorted": _search,
            "nonzero": self._nonzero,
            "compress": self._compress,
            "unique": self._unique,
            "unique_all": self._unique,
            "bincount": _bincount,
            "histogram": _histogram,
        }

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether an algorithm that the op needs was not run yet. Quick."""
        return not all(self.loaded().is_ready(algorithm) for algorithm, _, _ in _work_of(op).needs)

    def commands(self, op: Any) -> int:
        """Return how many commands an op enqueues at most. Quick."""
        return _SORT_COMMANDS * len(_work_of(op).needs) + _OTHER_COMMANDS

    def prepare(self, stream: CudaStream) -> None:
        """Build and load all algorithms. May block for seconds."""
        self.loaded().prepare((*_SORTS, _SUM))

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes an op works in, or ``None`` before :meth:`measure`. Quick."""
        work, most = _work_of(op), 0
        for need in work.needs:
            nbytes = self.loaded().scratch_nbytes(*need)
            if nbytes is None:
                return None
            most = max(most, nbytes)
        return work.offsets[-1] + aligned(most) if work.needs else 0

    def measure(self, op: Any) -> None:
        """See that :meth:`scratch_nbytes` knows. May block."""
        for need in _work_of(op).needs:
            self.loaded().measure(*need)

    def _ordered(
        self, stream: CudaStream, op: Any, inputs: Sequence[int], rooms: _Rooms, order: _Order, *, joined: bool, status: int = 0
    ) -> None:
        """Enqueue the sort of an op's elements. Places end in ``rooms.places`` if it is split, and else beside the sorted keys."""
        x, code = inputs[0], CODES[op.x.dtype]
        flags = joined * _JOINED | bool(getattr(op, "falls", False)) * _FALLING | (not order.is_split and order.lines > 1) * _LINES
        places, sorted_places = (rooms.places, rooms.sorted_places) if order.has_places else (0, 0)
        name, sizes = f"sort_encode_{code}_{order.key.itemsize}", (order.size, order.length, order.behind)
        launch_each(stream, name, order.size, x, rooms.keys, places, *sizes, order.code_bits, flags)
        (first, bits), *second = order.sorts()
        self.loaded().run(
            stream, first, rooms.library, order.size, rooms.keys, rooms.sorted_keys, values=places, sorted_values=sorted_places, bits=bits
        )
        for sort, line_bits in second:
            lines, sorted_lines = rooms.sorted_keys, rooms.numbers
            if op.kind == "segment_sort":
                self._segments(stream, op, sorted_places, lines, inputs[1], status)
            else:
                launch_each(stream, "sort_rows", order.size, sorted_places, lines, order.size, order.length)
            self.loaded().run(
                stream, sort, rooms.library, order.size, lines, sorted_lines, values=sorted_places, sorted_values=places, bits=line_bits
            )

    @staticmethod
    def _segments(stream: CudaStream, op: Any, places: int, segments: int, offsets: int, status: int) -> None:
        size, count = op.x.size, op.offsets.size - 1
        launch_each(stream, "sort_segments", max(size, count + 1), places, segments, offsets, status, size, count)

    def _sort(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        stream, work = _ready(lane, op)
        rooms, status, order = work.rooms(outputs[-1]), outputs[1], work.order
        if op.kind == "segment_sort" and (order is None or not order.is_split):
            self._segments(stream, op, 0, 0, inputs[1], status)  # there is nothing to sort by; the offsets are checked
        if order is None:
            return
        self._ordered(stream, op, inputs, rooms, order, joined=False, status=status)
        name = f"sort_decode_{CODES[op.x.dtype]}_{order.key.itemsize}"
        # Places that were sorted by lines say where in the unsorted keys the elements are.
        keys, places = (rooms.keys, rooms.places) if order.is_split else (rooms.sorted_keys, 0)
        flags = bool(op.falls) * _FALLING
        launch_each(stream, name, order.size, keys, places, outputs[0], order.size, order.length, order.behind, flags)

    def _pick(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        stream, work = _ready(lane, op)
        order, rooms = work.order, work.rooms(outputs[-1])
        if order is None:
            if op.x.size and op.k:
                _select(stream, op, inputs[0], *outputs[:2])
            return
        self._ordered(stream, op, inputs, rooms, order, joined=True)
        values, indices = outputs[:2] if op.kind == "topk" else (0, outputs[0])
        places = rooms.places if order.is_split else rooms.sorted_places
        k = op.k if op.kind == "topk" else order.length
        count = order.lines * k
        name = f"sort_pick_{op.x.dtype.itemsize}"
        launch_each(stream, name, count, inputs[0], places, values, indices, count, order.length, order.behind, k)

    def _summed(self, stream: CudaStream, size: int, rooms: _Rooms, count: int) -> None:
        """Enqueue the sums of the marks, and the last one as the number of what was found."""
        self.loaded().run(stream, _SUM, rooms.library, size, rooms.numbers, rooms.numbers)
        stream.launch(stream.functions["sort_count"], 1, 1, rooms.numbers, count, size)

    def _nonzero(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        *found, count, scratch = outputs
        size, room = op.x.size, op.room(op.x.size)
        stream, work = _ready(lane, op)
        clear(stream, (count, 8), *[(each, 8 * room) for each in found])
        if not size:
            return
        rooms = work.rooms(scratch)
        launch_each(stream, f"sort_mark_{CODES[op.x.dtype]}", size, inputs[0], rooms.numbers, size)
        self._summed(stream, size, rooms, count)
        indices = _Indices(sums=rooms.numbers, size=size, room=room, dims=op.x.ndim)
        indices.lengths[: op.x.ndim] = op.x.shape
        indices.outputs[: op.x.ndim] = found
        stream.launch_with(stream.functions["sort_indices"], (-(-size // _BLOCK), 1), (_BLOCK, 1), indices)

    def _compress(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        condition, x = inputs
        found, count, scratch = outputs
        size, width = op.condition.size, op.width()
        room, itemsize = op.room(size), op.x.dtype.itemsize
        stream, work = _ready(lane, op)
        clear(stream, (count, 8), (found, room * width * itemsize))
        if not size:
            return
        rooms = work.rooms(scratch)
        launch_each(stream, "sort_mark_b8", size, condition, rooms.numbers, size)
        self._summed(stream, size, rooms, count)
        launch_each(stream, f"sort_part_{itemsize}", size * width, rooms.numbers, x, found, size, width, room)

    def _unique(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        *found, count, scratch = outputs
        values, indices, inverse, counts = found if len(found) > 1 else (found[0], 0, 0, 0)
        size, room = op.x.size, op.room(op.x.size)
        stream, work = _ready(lane, op)
        clear(stream, (count, 8), (values, room * op.x.dtype.itemsize), *[(each, 8 * room) for each in (indices, counts) if each])
        order, rooms = work.order, work.rooms(scratch)
        if order is None:
            return
        self._ordered(stream, op, inputs, rooms, order, joined=True)
        width = order.key.itemsize
        launch_each(stream, f"sort_change_{width}", size, rooms.sorted_keys, rooms.numbers, size)
        self._summed(stream, size, rooms, count)
        starts = rooms.keys if counts else 0  # the unsorted keys are not needed any more
        name = f"sort_differ_{CODES[op.x.dtype]}_{width}"
        places = rooms.sorted_places if order.has_places else 0
        launch_each(stream, name, size, rooms.numbers, rooms.sorted_keys, places, values, indices, inverse, starts, size, room)
        if counts:
            launch_each(stream, "sort_lengths", size, rooms.numbers, starts, counts, size, room)


def _ready(lane: Any, op: Any) -> tuple[CudaStream, _Work]:
    """Return the stream that an op is enqueued into, and what it does.

    Raises
    ------
    UnsupportedError
        If the op has too many elements.
    """
    lane.stream.ready()
    work = _work_of(op)
    if work.size > _LIMIT:
        raise UnsupportedError(f"{op.kind} of {work.size} elements", op=op.kind, remedy=f"Give {_LIMIT} at most.")
    return lane.stream, work


def _select(stream: CudaStream, op: Any, x: int, values: int, indices: int) -> None:
    before, length, behind = op.lines()
    kept = length * op.x.dtype.itemsize
    is_kept = kept <= _KEPT
    width = 1 << max(op.k - 1, 1).bit_length()
    shared = 12 * width + is_kept * kept
    function = stream.functions[f"sort_select_{CODES[op.x.dtype]}"]
    sizes = length, behind, op.k, int(op.falls) * _FALLING, int(is_kept)
    stream.launch_wide(function, (before * behind, 1), (_BLOCK, 1), shared, x, values, indices, *sizes)


def _search(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if count := op.v.size:
        stream, _ = _ready(lane, op)
        launch_each(stream, f"sort_search_{CODES[op.a.dtype]}", count, *inputs, outputs[0], op.a.size, count, int(op.side == "right"))


def _grid(stream: CudaStream, count: int) -> int:
    return min(-(-count // (_BLOCK * _EACH)), _BLOCKS_PER_MULTIPROCESSOR * stream.context.multiprocessors)


def _bincount(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    stream, _ = _ready(lane, op)
    made, status = outputs[:2]
    code, size, length = CODES[op.x.dtype], op.x.size, op.length
    itemsize = 8 if op.weights is None else op.weights.dtype.itemsize
    clear(stream, (made, length * itemsize))
    if not size:
        return
    if op.weights is not None:
        launch_each(stream, f"sort_weigh_{code}_{CODES[op.weights.dtype]}", size, inputs[0], inputs[1], made, status, size, length)
        return
    is_shared = length <= _SHARED_BINS
    shared = 4 * length if is_shared else 0
    function = stream.functions[f"sort_tally_{code}"]
    stream.launch_wide(function, (_grid(stream, size), 1), (_BLOCK, 1), shared, inputs[0], made, status, size, length, int(is_shared))


def _histogram(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    stream, _ = _ready(lane, op)
    size, bins, (low, high) = op.x.size, op.bins, op.range
    clear(stream, (outputs[0], 8 * bins))
    if not size:
        return
    is_shared = bins <= _SHARED_BINS
    shared = 4 * bins if is_shared else 0
    limits = map(bits, (low, high, (high - low) / bins))
    function = stream.functions[f"sort_bins_{CODES[op.x.dtype]}"]
    stream.launch_wide(function, (_grid(stream, size), 1), (_BLOCK, 1), shared, inputs[0], outputs[0], size, bins, *limits, int(is_shared))


PART = CudaPart(open=SortLibrary, libraries=(CUB,), programs=(Source("sort", lambda code: ("sort.cu", "")),), program="sort")
