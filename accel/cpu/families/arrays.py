"""Elements that are moved: numpy copies pieces from one place to another."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.families.precision import wider
from accel.cpu.kernels import kernel, touches
from accel.cpu.views import array, operand
from accel.dtype import DType, rounded
from accel.family import BackendPart, Sample
from accel.ops.arrays import ArraysOps
from accel.ops.pieces import kinds_of_pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel.backend import Kernel
    from accel.cpu.views import Array

__all__ = ["PART", "copy_pieces"]


def _view(address: int, start: int, lengths: tuple[int, ...], steps: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = dtype.itemsize
    return array(address + start * size, lengths, dtype, tuple([step * size for step in steps]))


def copy_pieces(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue an op of pieces."""
    made = [(written.shape, written.dtype) for written in (*plan.writes, *plan.creates)]
    dtype = made[0][1].numpy if made else np.dtype(np.uint8)
    size = sum(math.prod(shape) for shape, _ in made)
    if size:
        lane.stream.submit(partial(_copy, op, tuple(inputs), tuple(outputs), made, dtype), costs.copying(2 * size * dtype.itemsize))


def _copy(
    op: Any, inputs: tuple[int, ...], outputs: tuple[int, ...], made: list[tuple[tuple[int, ...], DType]], dtype: np.dtype[Any]
) -> None:
    filled = op.filled()
    if filled is not None:
        array(outputs[0], (math.prod(made[0][0]),), dtype)[...] = np.frombuffer(filled, dtype)[0]
    for piece in op.pieces():
        if 0 not in piece.lengths:
            target = _view(outputs[piece.output], piece.target, piece.lengths, piece.target_steps, dtype)
            if piece.input is None:
                target[...] = np.frombuffer(op.number(), dtype)[0]
            else:
                target[...] = _view(inputs[piece.input], piece.start, piece.lengths, piece.steps, dtype)


def _padding(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if op.mode == "constant":
        copy_pieces(lane, op, plan, inputs, outputs)
        return
    x, shape = op.x, op.shape()
    if 0 not in shape:
        widths = [(before, made - length - before) for before, made, length in zip(op.before(), shape, x.shape, strict=True)]
        source, out = operand(inputs[0], x), array(outputs[0], shape, x.dtype.numpy)
        lane.stream.submit(lambda: np.copyto(out, np.pad(source, widths, op.mode)), costs.copying(3 * out.nbytes))


def _triangle(op: Any, operands: list[Array], results: list[Array]) -> None:
    results[0][...] = (np.tril if op.kind == "tril" else np.triu)(operands[0], op.k)


def _ramp(op: Any, operands: list[Array], results: list[Array]) -> None:
    _, start, step, last = op.ramp()
    out = results[0]
    if out.dtype.kind in "iu":
        # Modulo 2**64: what is in range comes out right, whatever lies between.
        places = np.arange(out.size, dtype=np.uint64) * np.uint64(int(step) % 2**64)
        out[...] = (places + np.uint64(int(start) % 2**64)).astype(out.dtype)
        return
    exact = np.arange(out.size) * float(step) + float(start)
    if last is not None:
        exact[-1] = last
    out[...] = rounded(exact, out.dtype)


def _indexed(apply: Callable[[Array, Array, Array], None], *, is_read: bool) -> Kernel:
    """Return the kernel of an op of elements at indices: ``apply(x, indices, others)`` on arrays of three dimensions, whose indices are in range."""

    def enqueue(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        walk, dtype = op.walk(), op.x.dtype.numpy
        if not walk.size:
            return
        places = tuple([place * dtype.itemsize for place in walk.places])
        x = array(inputs[0] if is_read else outputs[0], (walk.before, walk.length, walk.behind), dtype, places)
        shape = walk.before, walk.count, walk.behind
        kind = op.indices.dtype.numpy
        indices = array(inputs[1 if is_read else 0], shape, kind, tuple([step * kind.itemsize for step in walk.steps]))
        if is_read:
            others = array(outputs[0], shape, dtype)
        else:
            others = array(inputs[1], shape, dtype) if len(inputs) > 1 else np.broadcast_to(np.frombuffer(op.number(), dtype)[0], shape)
        mode = getattr(op, "mode", "raise")
        status = array(outputs[1], (2,), np.dtype(np.int64)) if mode == "raise" else None
        work = partial(_at_indices, apply, x, indices, others, mode, status)
        lane.stream.submit(work, costs.elements(4 * walk.size, dtype))

    return enqueue


def _at_indices(
    apply: Callable[[Array, Array, Array], None], x: Array, indices: Array, others: Array, mode: str, status: Array | None
) -> None:
    length = x.shape[1]
    if mode == "wrap":
        indices = indices % length
    elif mode == "clip":
        indices = np.clip(indices, 0, length - 1)
    elif status is not None:
        wrong = (indices < -length) | (indices >= length)
        if wrong.any():
            status[:] = 1, indices[wrong][0]
            return
    apply(x, indices, others)


def _read(x: Array, indices: Array, others: Array) -> None:
    others[...] = np.take_along_axis(x, indices, 1)


def _write(x: Array, indices: Array, others: Array) -> None:
    np.put_along_axis(x, indices, others, 1)


def _add(x: Array, indices: Array, others: Array) -> None:
    before, _, behind = np.ogrid[: x.shape[0], :1, : x.shape[2]]
    with np.errstate(all="ignore"):
        sums = x.astype(wider(x.dtype), copy=False)
        np.add.at(sums, (before, indices, behind), others.astype(sums.dtype, copy=False))
        if sums is not x:
            x[...] = sums


_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.UINT8, DType.BOOL, DType.INT64, DType.COMPLEX128)


def _operand(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Array:
    return np.asarray(rng.random(shape) < 0.5 if dtype is DType.BOOL else sampling.random(rng, shape, dtype))


def _joined(kind: str, axis: int, arrays: Any, *refs: Any) -> Any:
    return getattr(arrays, kind)(refs, axis)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    calls: tuple[tuple[str, tuple[int, ...], tuple[Any, ...]], ...] = (
        *(("transpose", shape, ()) for shape in ((3, 5), (2, 3, 4), (7,), (0, 3), (64, 33))),
        *(("transpose", (2, 3, 4, 5), (axes,)) for axes in ((0, 2, 1, 3), (3, 0, -2, 1), (0, 1, 3, 2))),
        *(("flip", (3, 4, 5), arguments) for arguments in ((), (1,), ((0, -1),))),
        *(("roll", (3, 4, 5), arguments) for arguments in ((7,), (-2, 1), ((1, 2), (0, 2)), ((3, 5), (0, 2)))),
        *(("broadcast_to", shape, (to,)) for shape, to in (((3, 1), (2, 3, 5)), ((), (4,)), ((33,), (8, 33)))),
        *(("tile", (3, 4), (reps,)) for reps in (2, (2, 3), (2, 1, 3), (0, 1))),
        *(("repeat", (3, 4), arguments) for arguments in ((3,), (2, 0), (2, -1), (0, 1))),
        *(("pad", (3, 4), (width,)) for width in (1, ((0, 2), (3, 0)), 0)),
        *(("split", (6, 8), arguments) for arguments in ((3,), (4, 1), ((1, 4),), ((2, 2, 7), -1))),
        *(("tril", (2, 5, 7), (k,)) for k in (0, -2, 3)),
        *(("triu", (2, 7, 5), (k,)) for k in (0, -2, 3)),
    )
    for dtype in _DTYPES:
        for kind, shape, arguments in calls:
            x = _operand(rng, shape, dtype)
            expected = getattr(np, kind)(x, *arguments)
            made = tuple(expected) if kind == "split" else np.asarray(expected)
            yield sampling.sample(kind, f"{dtype.value}{list(shape)}{arguments}", (x,), made, arguments=arguments)
        for kind, shapes, axis in (
            *(("concatenate", ((3, 4), (3, 1), (3, 8)), axis) for axis in (1, -1)),
            ("concatenate", ((3, 4), (0, 4), (16, 4)), 0),
            *(("stack", ((3, 4), (3, 4)), axis) for axis in (0, 1, -1)),
        ):
            several = tuple(_operand(rng, shape, dtype) for shape in shapes)
            function: Any = getattr(np, kind)
            yield Sample(f"{kind} {dtype.value} axis={axis}", partial(_joined, kind, axis), several, function(several, axis=axis))
        x = _operand(rng, (6, 7, 8), dtype)
        for index in (np.s_[:, 2:5], np.s_[::2, ::-3, 1], np.s_[..., 0], np.s_[-1, 3:1], np.s_[5:0:-2, ..., 2:4], 3, ()):
            yield sampling.sample("part", f"{dtype.value} {index}", (x,), np.asarray(x[index]), arguments=(index,))
        yield from _strided(x, dtype)
        yield from _unfolded(x, dtype)
        yield from _padded(rng, dtype)
        for arguments in ((4,), (3, 5, 1), (5, 3, -2), (2, 3, 9)):
            yield sampling.sample("eye", f"{dtype.value}{arguments}", (), np.eye(*arguments), arguments=arguments, dtype=dtype)
    yield from _ramps()
    yield from _indexed_samples(rng)


def _unfolded(x: Array, dtype: DType) -> Iterator[Sample]:
    """Yield samples of windows along each axis of an array of shape (6, 7, 8), and of a strided view."""
    for size, step, axis in ((3, 1, -1), (4, 2, 0), (7, 3, 1), (1, 5, 2)):
        windows = np.lib.stride_tricks.sliding_window_view(x, size, axis)
        kept = windows[tuple([slice(None, None, step if place == axis % 3 else 1) for place in range(3)])]
        yield sampling.sample("unfold", f"{dtype.value} {size} {step} {axis}", (x,), kept, arguments=(size, step, axis))
    expected = np.lib.stride_tricks.sliding_window_view(x[::-2, 0], 3, -1)
    yield Sample(f"unfold {dtype.value} strided", lambda arrays, x: arrays.unfold(x[::-2, 0], 3), (x,), expected)


def _padded(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    x, short = _operand(rng, (2, 5, 4), dtype), _operand(rng, (1, 3), dtype)
    modes: tuple[Any, ...] = ("edge", "reflect", "symmetric", "wrap")
    for mode in modes:

        def call(arrays: Any, x: Any, mode: str = mode) -> Any:
            return arrays.pad(x, ((0, 0), (2, 1), (0, 3)), mode=mode)

        def call_short(arrays: Any, x: Any, mode: str = mode) -> Any:
            return arrays.pad(x[:, ::-1], ((3, 1), (11, 8)), mode=mode)

        yield Sample(f"pad {dtype.value} {mode}", call, (x,), np.pad(x, ((0, 0), (2, 1), (0, 3)), mode))
        yield Sample(f"pad {dtype.value} {mode} far", call_short, (short,), np.pad(short[:, ::-1], ((3, 1), (11, 8)), mode))


def _strided(x: Array, dtype: DType) -> Iterator[Sample]:
    """Yield samples of ops on strided views of an array of shape (6, 7, 8)."""
    calls: tuple[tuple[str, tuple[Any, ...]], ...] = (
        *(
            ("transpose", ((1, 0),)),
            ("flip", ()),
            ("roll", (2, 1)),
            ("roll", (3,)),
            ("tile", ((2, 1),)),
            ("repeat", (2, 0)),
            ("repeat", (2,)),
        ),
        *(("pad", (1,)), ("broadcast_to", ((2, 3, 3),)), ("tril", ()), ("split", ((1,), 1))),
    )
    part = x[::-1, 1:, 3].T[::2, 1::2]
    for kind, arguments in calls:

        def call(arrays: Any, x: Any, kind: str = kind, arguments: tuple[Any, ...] = arguments) -> Any:
            return getattr(arrays, kind)(x[::-1, 1:, 3].T[::2, 1::2], *arguments)

        expected = getattr(np, kind)(part, *arguments)
        yield Sample(f"{kind} {dtype.value} strided{arguments}", call, (x,), tuple(expected) if kind == "split" else np.asarray(expected))


def _ramps() -> Iterator[Sample]:
    arange = partial(sampling.sample, "arange")
    for dtype in (*sampling.ALL_FLOATS, DType.INT32, DType.UINT8, DType.INT64):
        for arguments in ((10,), (3, 20, 4), (9, 2, -3), (5, 5)):
            yield arange(f"{dtype.value}{arguments}", (), np.arange(*arguments), arguments=arguments, dtype=dtype)
    for dtype in sampling.ALL_FLOATS:
        steps = (0, 1, 0.125)
        yield arange(f"{dtype.value}{steps}", (), np.arange(*steps), arguments=steps, dtype=dtype)
        for form in ((0, 1, 7, True), (-3, 5, 1001, True), (2, 3, 1, True), (1, 2, 0, True), (0, 1, 5, False)):
            expected, error = np.linspace(*form), sampling.sums(dtype, 4)
            yield sampling.sample("linspace", f"{dtype.value} {form}", (), expected, error, arguments=form, dtype=dtype)


def _indexed_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for kind in (np.int32, np.int64):
        for dtype in _DTYPES:
            x = _operand(rng, (4, 6, 5), dtype)
            yield from _taken(rng, x, kind)
            for axis in range(3):
                # All different along the axis, for which of two values stays is not said.
                indices: Array = np.argsort(rng.random(x.shape), axis).take(range(3), axis).astype(kind)
                values, name = _operand(rng, indices.shape, dtype), f"{dtype.value} axis={axis} {indices.dtype}"
                yield sampling.sample("take_along_axis", name, (x, indices), np.take_along_axis(x, indices, axis), axis=axis)
                yield from _changing("put_along_axis", x, indices, values, axis, name, np.put_along_axis)
        for dtype in (*sampling.ALL_FLOATS, DType.INT32, DType.INT64, DType.UINT32, DType.UINT64):
            for x in (sampling.random(rng, (40,), dtype), sampling.random(rng, (5, 7, 3), dtype)):
                for axis in range(-1, x.ndim):
                    places = list(x.shape)
                    places[axis] = 100
                    indices = rng.integers(-x.shape[axis], x.shape[axis], places).astype(kind)
                    name = f"{dtype.value} axis={axis} {indices.dtype}"
                    yield from _changing("scatter_add", x, indices, sampling.random(rng, places, dtype), axis, name, _added)


def _taken(rng: np.random.Generator, x: Array, kind: type[Any]) -> Iterator[Sample]:
    for axis in (None, 0, 1, -1):
        length = x.size if axis is None else x.shape[axis]
        several: tuple[tuple[int, ...], ...] = ((), (3,), (2, 7), (0,))
        for shape in several:
            indices = np.asarray(rng.integers(-length, length, shape), kind)
            name = f"{x.dtype} axis={axis} {shape} {indices.dtype}"
            yield sampling.sample("take", name, (x, indices), np.asarray(np.take(x, indices, axis)), axis=axis)
        indices = np.asarray(rng.integers(-3 * length, 3 * length, 9), kind)
        for mode, inside in (("wrap", indices % length), ("clip", np.clip(indices, 0, length - 1))):
            what = f"{x.dtype} axis={axis} {mode} {indices.dtype}"
            yield sampling.sample("take", what, (x, indices), np.take(x, inside, axis), axis=axis, mode=mode)


def _added(x: Array, indices: Array, values: Any, axis: int) -> None:
    """Add values as :func:`numpy.put_along_axis` puts them."""
    grid = list(np.ogrid[tuple(slice(length) for length in indices.shape)])
    grid[axis] = indices
    np.add.at(x, tuple(grid), values)


def _changing(kind: str, x: Array, indices: Array, values: Array, axis: int, name: str, change: Callable[..., None]) -> Iterator[Sample]:
    """Yield samples of an op that changes ``x``: of one value for each place, of a number, and of the same indices along all other axes."""

    def changed(at: Array, to: Any) -> Array:
        result: Array = sampling.wide(x).copy() if kind == "scatter_add" and DType.of(x.dtype).is_floating else x.copy()
        change(result, at, sampling.wide(np.asarray(to)) if kind == "scatter_add" else to, axis)
        return result

    def number(arrays: Any, x: Any, indices: Any) -> Any:
        return getattr(arrays, kind)(x, indices, 1, axis)

    # Each sum of 16-bit floats is rounded.
    dtype = DType.of(x.dtype)
    error = (16 * sampling.rounding(dtype) if dtype.itemsize == 2 else sampling.sums(dtype, 200)) if kind == "scatter_add" else 0.0
    yield sampling.sample(kind, name, (x, indices, values), changed(indices, values), error, axis=axis)
    yield Sample(f"{kind} {name} number", number, (x, indices), changed(indices, x.dtype.type(1)), error)
    rows = np.moveaxis(indices, axis, 0).reshape(indices.shape[axis], -1)[:, 0].copy()
    each = np.broadcast_to(rows.reshape([-1 if place == axis % x.ndim else 1 for place in range(x.ndim)]), indices.shape)
    yield sampling.sample(kind, f"{name} rows", (x, rows, values), changed(each, values), error, axis=axis)


PART = BackendPart(
    {
        **dict.fromkeys(kinds_of_pieces(ArraysOps), copy_pieces),
        "pad": _padding,
        **dict.fromkeys(("tril", "triu"), kernel(_triangle, touches(2))),
        **dict.fromkeys(("arange", "linspace"), kernel(_ramp, touches(2))),
        "take": _indexed(_read, is_read=True),
        "take_along_axis": _indexed(_read, is_read=True),
        "put_along_axis": _indexed(_write, is_read=False),
        "scatter_add": _indexed(_add, is_read=False),
    },
    samples=_samples,
)
