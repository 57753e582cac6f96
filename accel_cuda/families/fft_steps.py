"""Ops that are made of one or several transforms of cuFFT, and kernels before and after them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from accel import DType
from accel_cuda.families.fft_layout import Layout
from accel_cuda.families.kernels import bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_cuda.families.fft_plans import WorkMemory

__all__ = ["CONVOLUTIONS", "COSINES", "STEPS", "layouts_of"]

COSINES = ("dct", "idct", "dst", "idst")
CONVOLUTIONS = ("convolve", "correlate")

_BLOCK = 256
# As in spectra.cu.
_FLIP_IN, _SIGN_IN, _FLIP_OUT, _SIGN_OUT, _SINE = 1, 2, 4, 8, 16
_FLAGS = {1: 0, 2: _SIGN_IN | _FLIP_OUT, 3: _FLIP_IN | _SIGN_OUT, 4: _FLIP_IN | _SIGN_OUT}
_ODD_FOUR = 5
_CODES = {DType.FLOAT32: "f32", DType.FLOAT64: "f64", DType.COMPLEX64: "c64", DType.COMPLEX128: "c128"}


def _blocks(size: int) -> int:
    return -(-size // _BLOCK)


def _cosine_layout(op: Any) -> tuple[int, Layout]:
    """Return how the sums are computed, a type or :data:`_ODD_FOUR`, and the transform."""
    before, length, behind = op.lines()
    way, is_double, batch = op.computed(), op.x.dtype is DType.FLOAT64, before * behind
    if way == 1:
        return way, Layout("real", is_double, (2 * (length + 1 if op.is_sine else length - 1),), 1, batch)
    if way == 2:
        return way, Layout("real", is_double, (length,), 1, batch)
    if way == 3:
        return way, Layout("back", is_double, (length,), 1, batch)
    if length % 2:
        return _ODD_FOUR, Layout("whole", is_double, (2 * length,), 1, batch)
    return way, Layout("whole", is_double, (length // 2,), 1, batch)


def _convolution_layouts(op: Any) -> tuple[Layout, Layout, Layout]:
    """Return the transforms of a, of b, and back."""
    extent, dtype = op.extent(), op.a.dtype
    is_double = dtype in (DType.FLOAT64, DType.COMPLEX128)
    *outer, last = extent.padded
    lengths = *(length for length in outer if length > 1), last
    there: Any = "whole" if dtype.is_complex else "real"
    back: Any = "whole" if dtype.is_complex else "back"
    return (
        Layout(there, is_double, lengths, 1, extent.batch_a),
        Layout(there, is_double, lengths, 1, extent.batch_b),
        Layout(back, is_double, lengths, 1, extent.batch),
    )


def layouts_of(op: Any) -> tuple[Layout, ...]:
    """Return the layouts of an op's plans; none if it has no elements."""
    if op.kind in COSINES:
        found: tuple[Layout, ...] = (_cosine_layout(op)[1],) if op.x.size else ()
    else:
        found = _convolution_layouts(op) if op.extent().batch else ()
    return tuple([layout for layout in found if not _is_identity(layout)])


def _is_identity(layout: Layout) -> bool:
    return layout.transform == "whole" and math.prod(layout.lengths) == 1


def _transform(stream: Any, memory: WorkMemory, plans: Any, layout: Layout, source: int, destination: int, *, is_forward: bool) -> None:
    if not _is_identity(layout):  # which is computed in place
        plans.execute(stream, layout, source, destination, memory, is_forward=is_forward)


def _elements(layout: Layout, *, is_real: bool) -> int:
    return layout.batch * math.prod(layout.embed(is_real=is_real))


def _cosine(stream: Any, memory: WorkMemory, plans: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue sums of cosines or sines: a Fourier transform of elements in another order, or of the line and its mirror image."""
    before, length, behind = op.lines()
    way, layout = _cosine_layout(op)
    real = op.x.dtype.itemsize
    is_real_in, is_real_out = layout.transform == "real", layout.transform == "back"
    count_in, count_out = _elements(layout, is_real=is_real_in), _elements(layout, is_real=is_real_out)
    flags = _FLAGS[op.computed()] | _SINE if op.is_sine else 0
    is_orthogonal, functions = op.norm == "ortho", stream.functions
    code_in = _CODES[op.x.dtype] if is_real_in else "c128" if layout.is_double else "c64"
    rows = memory.alloc(count_in * real * (1 if is_real_in else 2))
    after = rows if layout.transform == "whole" else memory.alloc(count_out * real * (1 if is_real_out else 2))
    try:
        ends = math.sqrt(2) if is_orthogonal else 1.0
        arguments = inputs[0], rows, count_in, length, behind, count_in // layout.batch, way, flags, bits(ends)
        stream.launch(functions[f"fft_cosine_in_{code_in}"], _blocks(count_in), _BLOCK, *arguments)
        _transform(stream, memory, plans, layout, rows, after, is_forward=True)
        size, nbytes = before * length * behind, count_out // layout.batch * real * (1 if is_real_out else 2)
        ends = math.sqrt(0.5) if is_orthogonal else 1.0
        last = after, outputs[0], size, length, behind, nbytes, way, flags, bits(op.scale()), bits(ends)
        stream.launch(functions[f"fft_cosine_out_{_CODES[op.x.dtype]}"], _blocks(size), _BLOCK, *last)
    finally:
        if after != rows:
            memory.free(after)
        memory.free(rows)


def _convolve(stream: Any, memory: WorkMemory, plans: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue a convolution: both operands in frames of zeros are transformed, multiplied, and transformed back."""
    extent, code, functions, itemsize = op.extent(), _CODES[op.a.dtype], stream.functions, op.a.dtype.itemsize
    layouts = _convolution_layouts(op)
    is_real = not op.a.dtype.is_complex
    width = 2 * itemsize if is_real else itemsize
    padded = _three(extent.padded)
    spectra: list[int] = []
    try:
        for number, (layout, shape) in enumerate(zip(layouts, (extent.a, extent.b), strict=False)):
            frame_size, spectrum_size = _elements(layout, is_real=is_real), _elements(layout, is_real=False)
            spectrum = memory.alloc(spectrum_size * width)
            spectra.append(spectrum)
            frame = memory.alloc(frame_size * itemsize) if is_real else spectrum
            is_turned = int(op.is_turned and number == 1)
            arguments = inputs[number], frame, frame_size, *_three(shape), *padded, is_turned
            stream.launch(functions[f"fft_frame_{code}"], _blocks(frame_size), _BLOCK, *arguments)
            _transform(stream, memory, plans, layout, frame, spectrum, is_forward=True)
            if is_real:
                memory.free(frame)
        sizes = [_elements(layout, is_real=False) for layout in layouts]
        product = spectra[0] if sizes[0] == sizes[2] else spectra[1]
        name = "fft_product_c128" if layouts[0].is_double else "fft_product_c64"
        factor = bits(1 / math.prod(extent.padded))
        stream.launch(functions[name], _blocks(sizes[2]), _BLOCK, *spectra, product, sizes[2], *sizes[:2], factor)
        whole_size = _elements(layouts[2], is_real=is_real)
        whole = memory.alloc(whole_size * itemsize) if is_real else product
        _transform(stream, memory, plans, layouts[2], product, whole, is_forward=False)
        size = extent.batch * math.prod(extent.result)
        arguments = whole, outputs[0], size, *_three(extent.result), *padded, *_three(extent.starts, 0)
        stream.launch(functions[f"fft_crop_{code}"], _blocks(size), _BLOCK, *arguments)
        if is_real:
            memory.free(whole)
    finally:
        for spectrum in reversed(spectra):
            memory.free(spectrum)


def _three(lengths: tuple[int, ...], fill: int = 1) -> tuple[int, ...]:
    return (fill,) * (3 - len(lengths)) + lengths


STEPS = {**dict.fromkeys(COSINES, _cosine), **dict.fromkeys(CONVOLUTIONS, _convolve)}
"""Kind of an op -> what enqueues it: ``steps(stream, memory, plans, op, inputs, outputs)``, for a stream and plans or what stands for both."""
