"""The ``fft`` family on a GPU: passes of cuFFT, and the kernels that scale and turn around them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from accel import DType
from accel.ops import FftOps
from accel.ops.pieces import kinds_of_pieces
from accel_cuda.core.family import CudaPart, FamilyState, Source
from accel_cuda.core.memo import Memo
from accel_cuda.families.arrays import copy_pieces, count_pieces
from accel_cuda.families.fft_layout import Pass, passes
from accel_cuda.families.fft_plans import CUFFT, FftPlans, Rehearsal, WorkMemory
from accel_cuda.families.fft_steps import CONVOLUTIONS, COSINES, STEPS, layouts_of
from accel_cuda.families.kernels import bits, launch_each

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from accel import AccelRef
    from accel_cuda.core.context import CudaContext
    from accel_cuda.families.fft_layout import Layout

__all__ = ["PART", "FftLibrary", "Work", "enqueue"]

_BLOCK = 256
_TILE, _ROWS = 32, 8
_ALIGNED = 1 << 20
_UNKNOWN = 64
"""Commands of an op whose plans were not measured yet."""
_BASES = {"fft": "fft", "ifft": "ifft", "rfft": "rfft", "irfft": "irfft", "hfft": "irfft", "ihfft": "rfft"}
"""Kind of a transform -> whose passes it has; it may conjugate before or after them."""
_KINDS = (*_BASES, *COSINES, *CONVOLUTIONS)
_DOUBLES = frozenset({DType.FLOAT64, DType.COMPLEX128})


class FftLibrary(FamilyState[FftPlans]):
    """cuFFT in one context, and what its ops work in."""

    def __init__(self, context: CudaContext) -> None:
        super().__init__(context, FftPlans)
        self.kernels = dict.fromkeys(_KINDS, self._run)
        self._needs: Memo[Hashable, tuple[int, int]] = Memo()  # bytes to work in, and commands

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing ``op`` loads cuFFT, makes a plan or uses one for the first time: that takes milliseconds and waits for the device."""
        plans = self.library
        return plans is None or not all(plans.cache.is_ready(layout) for layout in _layouts(op))

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes an op works in, or ``None`` if a plan of its has not been measured; see :class:`accel.backend.TakesScratch`."""
        needs = self._needs_of(op)
        return None if needs is None else needs[0]

    def commands(self, op: Any) -> int:
        """Return how many commands an op enqueues at most; see :class:`accel.backend.CountsCommands`."""
        needs = self._needs_of(op)
        return _UNKNOWN if needs is None else max(1, needs[1])

    def _needs_of(self, op: Any) -> tuple[int, int] | None:
        if not _size(op):
            return 0, 0
        key = _signature(op)
        needs = self._needs.get(key)
        if needs is None and self.library is not None:
            sizes = self.library.sizes
            if all(layout in sizes for layout in _layouts(op)):
                needs = self._needs[key] = _rehearsed(op, sizes)
        return needs

    def measure(self, op: Any) -> None:
        """See that :meth:`scratch_nbytes` knows. May block."""
        plans = self.loaded()
        for layout in _layouts(op):
            plans.measure(layout)

    def _run(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        stream = lane.stream
        with stream.ready().section:
            enqueue(stream, WorkMemory(outputs[1], self.scratch_nbytes(op)), self.loaded(), op, inputs, outputs)


def enqueue(stream: Any, memory: WorkMemory, plans: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue an op, or for a :class:`~accel_cuda.families.fft_plans.Rehearsal` take its steps for nothing."""
    if not _size(op):
        return
    if op.kind in STEPS:
        STEPS[op.kind](stream, memory, plans, op, inputs, outputs)
    else:
        Work(stream, memory, plans, op).run(inputs[0], outputs[0], _size(op))


def _made(op: Any) -> tuple[int, ...]:
    """Return the shape of the result."""
    if op.kind in COSINES:
        return tuple(op.x.shape)
    if op.kind in CONVOLUTIONS:
        extent = op.extent()
        return extent.batch, *extent.result
    return tuple(op.spec().shape)


def _size(op: Any) -> int:
    return math.prod(_made(op))


def _signature(op: Any) -> Hashable:
    if op.kind in COSINES:
        return op.kind, op.type, op.axis, op.x.shape, op.x.dtype
    if op.kind in CONVOLUTIONS:
        return op.kind, op.extent(), op.a.dtype
    x, unit = op.x, 2 * _real(op)
    return op.kind, x.shape, x.dtype, op.axes, op.lengths()[-1], _begins_between(x, unit), _begins_between(op.out, unit)


def _begins_between(ref: AccelRef | None, unit: int) -> bool:
    return ref is not None and bool(ref.offset % unit or ref.alignment % unit)


def _rehearsed(op: Any, sizes: Mapping[Layout, int]) -> tuple[int, int]:
    """Return how many bytes an op works in, wherever in its memory it begins, and how many commands it enqueues."""
    memory, stage, places = WorkMemory(_ALIGNED), Rehearsal(sizes), (0, 0)
    if op.kind in _BASES:
        unit = 2 * _real(op)
        places = int(_begins_between(op.x, unit)), int(_begins_between(op.out, unit))
    enqueue(stage, memory, stage, op, (places[0], 0), (places[1], 0))
    return memory.most, stage.commands


def _real(op: Any) -> int:
    return 8 if op.x.dtype in _DOUBLES else 4


def _passes(op: Any) -> tuple[Pass, ...]:
    if not _size(op):
        return ()
    base = _BASES[op.kind]
    shape = op.x.shape if base == "rfft" else op.spec().shape
    return passes(base, shape, op.axes, op.lengths()[-1], op.x.dtype in _DOUBLES)


def _layouts(op: Any) -> tuple[Layout, ...]:
    """Return the layouts of an op's plans."""
    return layouts_of(op) if op.kind in STEPS else tuple([each.layout for each in _passes(op)])


class Work:
    """One op on its way into a stream.

    Parameters
    ----------
    stream, plans
        Where it goes, and what it is made of; or a :class:`~accel_cuda.families.fft_plans.Rehearsal` for both.
    memory
        What it works in.
    op
        The op, planned.
    """

    def __init__(self, stream: Any, memory: WorkMemory, plans: Any, op: Any) -> None:
        self._stream, self._memory, self._plans, self._op = stream, memory, plans, op
        self._functions = stream.functions
        self._passes = _passes(op)
        self._is_forward = _BASES[op.kind] in ("fft", "rfft")
        self._real = _real(op)

    def run(self, source: int, destination: int, size: int) -> None:
        """Enqueue all of it.

        cuFFT takes a real array only where a complex one could lie, which the beginning of a view need not be: such arrays are copied.
        """
        op, memory, stream, unit = self._op, self._memory, self._stream, 2 * self._real
        nbytes = op.spec().nbytes
        read = memory.alloc(op.x.nbytes) if source % unit else 0
        written = memory.alloc(nbytes) if destination % unit else 0
        try:
            if read:
                stream.copy(read, source, op.x.nbytes)
            if _BASES[op.kind] == "irfft":
                self.back(read or source, written or destination)
            else:
                self.there(read or source, written or destination)
            if op.kind == "ihfft":
                self._conjugate(written or destination, size)
            self.scale(written or destination, size)
            if written:
                stream.copy(destination, written, nbytes)
        finally:
            memory.free(written)
            memory.free(read)

    def there(self, source: int, destination: int) -> None:
        """Enqueue the passes of a transform whose source is only read by the first."""
        for each in self._passes:
            self._pass(each, source, destination)
            source = destination
        if not self._passes and source != destination:
            self._stream.copy(destination, source, self._op.x.nbytes)

    def back(self, source: int, destination: int) -> None:
        """Enqueue an inverse real transform, on a copy: cuFFT may overwrite what it reads, and takes the ends of a spectrum for real unseen."""
        op, (*others, last) = self._op, self._passes
        scratch = self._memory.alloc(op.x.nbytes)
        try:
            if op.kind == "hfft":
                self._stream.copy(scratch, source, op.x.nbytes)
                source = scratch
                self._conjugate(scratch, op.x.size)
            for each in others:
                self._pass(each, source, scratch)
                source = scratch
            if source != scratch:
                self._stream.copy(scratch, source, op.x.nbytes)
            (length,) = last.layout.lengths
            name = "fft_ends_c128" if self._real == 8 else "fft_ends_c64"
            blocks = -(-last.outer * last.inner // _BLOCK)
            self._stream.launch(
                self._functions[name], blocks, _BLOCK, scratch, last.outer, length // 2 + 1, last.inner, int(length % 2 == 0)
            )
            self._pass(last, scratch, destination)
        finally:
            self._memory.free(scratch)

    def _conjugate(self, address: int, size: int) -> None:
        name = "fft_conjugate_c128" if self._real == 8 else "fft_conjugate_c64"
        self._stream.launch(self._functions[name], -(-size // _BLOCK), _BLOCK, address, size)

    def scale(self, address: int, size: int) -> None:
        """Enqueue the multiplication that the norm asks for."""
        factor = self._op.scale()
        if factor != 1:
            count = size * (2 if self._op.spec().dtype.is_complex else 1)
            per_block = _BLOCK * (16 // self._real)
            name = "fft_scale_f64" if self._real == 8 else "fft_scale_f32"
            self._stream.launch(self._functions[name], -(-count // per_block), _BLOCK, address, count, bits(factor))

    def _pass(self, each: Pass, source: int, destination: int) -> None:
        layout, is_forward = each.layout, self._is_forward
        if not each.is_turned:
            step = 2 * self._real * each.count(is_real=False) * each.inner if each.calls > 1 else 0
            self._plans.execute(self._stream, layout, source, destination, self._memory, is_forward=is_forward, calls=each.calls, step=step)
            return
        real_in, real_out = layout.transform == "real", layout.transform == "back"
        count_in, count_out = each.count(is_real=real_in), each.count(is_real=real_out)
        width_in, width_out = self._real * (2 - real_in), self._real * (2 - real_out)
        groups = each.outer * each.inner
        before = self._memory.alloc(groups * count_in * width_in)
        try:
            self._turn(source, before, each.outer, count_in, each.inner, width_in)
            # In place where both sides are alike.
            after = before if layout.transform == "whole" else self._memory.alloc(groups * count_out * width_out)
            try:
                self._plans.execute(self._stream, layout, before, after, self._memory, is_forward=is_forward)
                self._turn(after, destination, each.outer, each.inner, count_out, width_out)
            finally:
                if after != before:
                    self._memory.free(after)
        finally:
            self._memory.free(before)

    def _turn(self, source: int, destination: int, batch: int, rows: int, columns: int, width: int) -> None:
        tiles = batch * -(-rows // _TILE) * -(-columns // _TILE)
        self._stream.launch_wide(self._functions[f"fft_turn_{width}"], (tiles, 1), (_TILE, _ROWS), 0, source, destination, rows, columns)


def _frequencies(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    count, positive = op.counts()
    name = "fft_frequencies_f64" if op.dtype is DType.FLOAT64 else "fft_frequencies_f32"
    launch_each(lane.stream, name, count, outputs[0], count, positive, op.n, bits(op.step()))


_FREQUENCIES, _SHIFTS = ("fftfreq", "rfftfreq"), kinds_of_pieces(FftOps)

PART = CudaPart(
    kernels={**dict.fromkeys(_FREQUENCIES, _frequencies), **dict.fromkeys(_SHIFTS, copy_pieces)},
    open=FftLibrary,
    libraries=(CUFFT,),
    programs=(Source("fft", lambda code: ("fft.cu", "spectra.cu", "")),),
    program={**dict.fromkeys((*_KINDS, *_FREQUENCIES), "fft"), **dict.fromkeys(_SHIFTS, "arrays")},
    commands=dict.fromkeys(_SHIFTS, count_pieces),
)
