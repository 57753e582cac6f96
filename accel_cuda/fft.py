"""The ``fft`` library on a GPU: passes of cuFFT, and the kernels that scale and turn around them."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

from accel import DType
from accel_cuda.fft_layout import Pass, passes
from accel_cuda.fft_plans import FftPlans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import Kernel

__all__ = ["FftLibrary"]

_BLOCK = 256
_TILE, _ROWS = 32, 8
_DOUBLE = struct.Struct("d")
_DOUBLES = frozenset({DType.FLOAT64, DType.COMPLEX128})


class FftLibrary:
    """The library of one context; its plans belong to its streams.

    Attributes
    ----------
    kernels : mapping
        Op kind -> kernel.
    plans : dict
        Stream -> its plans.
    """

    def __init__(self) -> None:
        self.plans: dict[Any, FftPlans] = {}
        self.kernels: Mapping[str, Kernel] = dict.fromkeys(("fft", "ifft", "rfft", "irfft"), self._run)

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing ``op`` makes a plan, or loads cuFFT, which takes milliseconds and waits for the device."""
        plans = self.plans.get(lane.stream)
        return plans is None or any(each.layout not in plans for each in _passes(op))

    def _run(self, lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        if not (size := math.prod(op.spec().shape)):
            return
        stream = lane.stream
        with stream.ready().section:
            plans = self.plans.get(stream)
            if plans is None:
                plans = self.plans[stream] = FftPlans(stream, lane.compute)
            _Work(lane, plans, op).run(inputs[0], outputs[0], size)


def _passes(op: Any) -> tuple[Pass, ...]:
    shape = op.x.shape if op.kind == "rfft" else op.spec().shape
    return passes(op.kind, shape, op.axes, op.lengths()[-1], op.x.dtype in _DOUBLES)


class _Work:
    """One op on its way into a stream."""

    def __init__(self, lane: Any, plans: FftPlans, op: Any) -> None:
        self._stream, self._compute, self._plans, self._op = lane.stream, lane.compute, plans, op
        self._functions = lane.stream.context.functions
        self._passes = _passes(op)
        self._real = 8 if op.x.dtype in _DOUBLES else 4

    def run(self, source: int, destination: int, size: int) -> None:
        """Enqueue all of it.

        cuFFT takes a real array only where a complex one could lie, which the beginning of a view need not be: such arrays are copied.
        """
        op, compute, stream, unit = self._op, self._compute, self._stream, 2 * self._real
        nbytes = op.spec().nbytes
        read = compute.alloc(op.x.nbytes) if source % unit else 0
        written = compute.alloc(nbytes) if destination % unit else 0
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
            compute.free(read)
            compute.free(written)

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
        scratch = self._compute.alloc(op.x.nbytes)
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
            self._compute.free(scratch)

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
            self._plans.execute(layout, source, destination, is_forward=is_forward, calls=each.calls, step=step)
            return
        real_in, real_out = layout.transform == "real", layout.transform == "back"
        count_in, count_out = each.count(is_real=real_in), each.count(is_real=real_out)
        width_in, width_out = self._real * (2 - real_in), self._real * (2 - real_out)
        groups = each.outer * each.inner
        before = self._compute.alloc(groups * count_in * width_in)
        try:
            self._turn(source, before, each.outer, count_in, each.inner, width_in)
            # In place where both sides are alike.
            after = before if layout.transform == "whole" else self._compute.alloc(groups * count_out * width_out)
            try:
                self._plans.execute(layout, before, after, is_forward=is_forward)
                self._turn(after, destination, each.outer, each.inner, count_out, width_out)
            finally:
                if after != before:
                    self._compute.free(after)
        finally:
            self._compute.free(before)

    def _turn(self, source: int, destination: int, batch: int, rows: int, columns: int, width: int) -> None:
        tiles = batch * -(-rows // _TILE) * -(-columns // _TILE)
        self._stream.launch_wide(self._functions[f"fft_turn_{width}"], (tiles, 1), (_TILE, _ROWS), 0, source, destination, rows, columns)
