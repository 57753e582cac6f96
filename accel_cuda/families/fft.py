"""The ``fft`` family on a GPU: passes of cuFFT, and the kernels that scale and turn around them."""

from __future__ import annotations

import math
import struct
import threading
from typing import TYPE_CHECKING, Any

from accel import DType
from accel_cuda.core.family import CudaPart, Source
from accel_cuda.families.fft_layout import Pass, passes
from accel_cuda.families.fft_memory import Rehearsal, WorkMemory
from accel_cuda.families.fft_plans import CUFFT, FftPlans

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from accel import AccelRef
    from accel.backend import Kernel
    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream
    from accel_cuda.families.fft_layout import Layout

__all__ = ["PART", "FftLibrary", "Work"]

_BLOCK = 256
_TILE, _ROWS = 32, 8
_DOUBLE = struct.Struct("d")
_ALIGNED, _REMEMBERED = 1 << 20, 4096
_UNKNOWN = 64
"""Commands of an op whose plans were not measured yet."""
_KINDS = ("fft", "ifft", "rfft", "irfft")
_DOUBLES = frozenset({DType.FLOAT64, DType.COMPLEX128})


class FftLibrary:
    """The library of one context.

    Parameters
    ----------
    context
        The context.

    Attributes
    ----------
    kernels : mapping
        Op kind -> kernel.
    plans : FftPlans or None
        The plans, once cuFFT is loaded.
    """

    def __init__(self, context: CudaContext) -> None:
        self.plans: FftPlans | None = None
        self.kernels: Mapping[str, Kernel] = dict.fromkeys(_KINDS, self._run)
        self._context = context
        self._lock = threading.Lock()
        self._needs: dict[Hashable, tuple[int, int]] = {}  # bytes to work in, and commands

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing ``op`` loads cuFFT, makes a plan or uses one for the first time: that takes milliseconds and waits for the device."""
        plans = self.plans
        return plans is None or not all(plans.cache.is_ready(each.layout) for each in _passes(op))

    def prepare(self, stream: CudaStream) -> None:
        """Load cuFFT, if it is not loaded. May block."""
        self._loaded()

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes an op works in, or ``None`` if a plan of its has not been measured; see :class:`accel.backend.TakesScratch`."""
        needs = self._needs_of(op)
        return None if needs is None else needs[0]

    def commands(self, op: Any) -> int:
        """Return how many commands an op enqueues at most; see :class:`accel.backend.CountsCommands`."""
        needs = self._needs_of(op)
        return _UNKNOWN if needs is None else max(1, needs[1])

    def _needs_of(self, op: Any) -> tuple[int, int] | None:
        if _is_empty(op):
            return 0, 0
        key = _signature(op)
        needs = self._needs.get(key)
        if needs is None and self.plans is not None:
            sizes = self.plans.sizes
            if all(each.layout in sizes for each in _passes(op)):
                needs = _rehearsed(op, sizes)
                if len(self._needs) >= _REMEMBERED:
                    self._needs.clear()
                self._needs[key] = needs
        return needs

    def measure(self, op: Any) -> None:
        """See that :meth:`scratch_nbytes` knows. May block."""
        plans = self._loaded()
        for each in _passes(op):
            plans.measure(each.layout)

    def close(self) -> None:
        """Destroy the plans. May block; the streams have ended, and the context is healthy."""
        if self.plans is not None:
            self.plans.close()

    def _loaded(self) -> FftPlans:
        with self._lock:
            if self.plans is None:
                self.plans = FftPlans(self._context)
            return self.plans

    def _run(self, lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        if not (size := math.prod(op.spec().shape)):
            return
        stream = lane.stream
        with stream.ready().section:
            plans = self.plans or self._loaded()
            Work(stream, WorkMemory(outputs[1], self.scratch_nbytes(op)), plans, op).run(inputs[0], outputs[0], size)


def _signature(op: Any) -> Hashable:
    x, unit = op.x, 2 * _real(op)
    return op.kind, x.shape, x.dtype, op.axes, op.lengths()[-1], _begins_between(x, unit), _begins_between(op.out, unit)


def _begins_between(ref: AccelRef | None, unit: int) -> bool:
    return ref is not None and bool(ref.offset % unit or ref.alignment % unit)


def _rehearsed(op: Any, sizes: Mapping[Layout, int]) -> tuple[int, int]:
    """Return how many bytes an op works in, wherever in its memory it begins, and how many commands it enqueues."""
    unit = 2 * _real(op)
    memory, stage = WorkMemory(_ALIGNED), Rehearsal(sizes)
    size = math.prod(op.spec().shape)
    if size:
        Work(stage, memory, stage, op).run(int(_begins_between(op.x, unit)), int(_begins_between(op.out, unit)), size)
    return memory.most, stage.commands


def _real(op: Any) -> int:
    return 8 if op.x.dtype in _DOUBLES else 4


def _is_empty(op: Any) -> bool:
    return 0 in op.spec().shape


def _passes(op: Any) -> tuple[Pass, ...]:
    if _is_empty(op):
        return ()
    shape = op.x.shape if op.kind == "rfft" else op.spec().shape
    return passes(op.kind, shape, op.axes, op.lengths()[-1], op.x.dtype in _DOUBLES)


class Work:
    """One op on its way into a stream.

    Parameters
    ----------
    stream, plans
        Where it goes, and what it is made of; or a :class:`~accel_cuda.families.fft_memory.Rehearsal` for both.
    memory
        What it works in.
    op
        The op, planned.
    """

    def __init__(self, stream: Any, memory: WorkMemory, plans: Any, op: Any) -> None:
        self._stream, self._memory, self._plans, self._op = stream, memory, plans, op
        self._functions = stream.functions
        self._passes = _passes(op)
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
            if op.kind == "irfft":
                self.back(read or source, written or destination)
            else:
                self.there(read or source, written or destination)
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

    def scale(self, address: int, size: int) -> None:
        """Enqueue the multiplication that the norm asks for."""
        factor = self._op.scale()
        if factor != 1:
            count = size * (2 if self._op.spec().dtype.is_complex else 1)
            bits = int.from_bytes(_DOUBLE.pack(factor), "little")
            per_block = _BLOCK * (16 // self._real)
            name = "fft_scale_f64" if self._real == 8 else "fft_scale_f32"
            self._stream.launch(self._functions[name], -(-count // per_block), _BLOCK, address, count, bits)

    def _pass(self, each: Pass, source: int, destination: int) -> None:
        layout, is_forward = each.layout, self._op.is_forward
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


def _program(op: Any) -> str:
    return "fft"


PART = CudaPart(
    open=FftLibrary, libraries=(CUFFT,), programs=(Source("fft", lambda code: ("fft.cu", "")),), program=dict.fromkeys(_KINDS, _program)
)
