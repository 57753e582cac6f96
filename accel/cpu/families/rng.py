"""Random numbers made of words; :mod:`accel.ops.rng` says how."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import choices, distributions, sampling
from accel.cpu.families.words import key_of, philox, philox_blocks, wide
from accel.cpu.kernels import LateModule, kernel
from accel.dtype import DType
from accel.errors import UnsupportedError
from accel.family import BackendPart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel.backend import Kernel
    from accel.cpu.views import Array
    from accel.family import Sample

__all__ = ["PART"]

_WORDS = 1 << 18
"""Words of an array of points: they fit the second-level cache."""
_U32, _U64 = np.dtype(np.uint32), np.dtype(np.uint64)
_TO_FRACTION = {np.dtype(np.float32): (8, 2.0**-24), np.dtype(np.float64): (11, 2.0**-53)}
# Calls of numpy for one chunk of words, for one number among many, and for one that takes several functions.
_CALL, _NUMBER, _CHAIN = 150e-6, 20e-9, 200e-9


def _draw(numbers: Callable[[Any, Array, Array], Array], op: Any, out: Array) -> None:
    """Write the numbers of ``op`` that ``numbers`` makes of it, of blocks of words and of their indices."""
    size, offset, per_block = op.size, op.offset, op.per_block()
    first = offset // per_block
    count = -(-(offset + size) // per_block) - first
    done = 0
    skip = offset - first * per_block
    index = first
    for words in philox_blocks(op.key(), first, count):
        made = numbers(op, words, np.arange(index, index + len(words), dtype=_U64)).reshape(-1)[skip:]
        taken = min(len(made), size - done)
        out[done : done + taken] = made[:taken]
        done, skip, index = done + taken, 0, index + len(words)


def _uniform(op: Any, words: Array, blocks: Array) -> Array:
    dtype = op.dtype.numpy
    shift, unit = _TO_FRACTION[dtype]
    whole = words if dtype.itemsize == 4 else wide(words)
    result: Array = (whole >> whole.dtype.type(shift)).astype(dtype)
    low, high = dtype.type(op.low), dtype.type(op.high)
    result *= dtype.type(unit)
    result *= high - low
    result += low
    # Rounding may have reached the end, which does not belong to the range.
    np.minimum(result, np.nextafter(high, low), out=result)
    return result


def _standard(dtype: np.dtype[Any], words: Array) -> Array:
    """Return standard normal numbers."""
    if dtype.itemsize == 4:
        radius = words[:, 0::2].astype(dtype) * dtype.type(2.0**-32) + dtype.type(2.0**-33)
        angle = words[:, 1::2].astype(dtype) * dtype.type(2.0**-32)
    else:
        whole = wide(words) >> np.uint64(11)
        radius = (whole[:, :1].astype(dtype) + 0.5) * 2.0**-53
        angle = whole[:, 1:].astype(dtype) * 2.0**-53
    # Fractions are exact, the multiple of pi is not: so the product is rounded once.
    angle *= dtype.type(2 * np.pi)
    radius = np.sqrt(dtype.type(-2) * np.log(radius))
    result: Array = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=2).reshape(len(words), -1)
    return result


@np.errstate(over="ignore")
def _normal(op: Any, words: Array, blocks: Array) -> Array:
    kind = op.dtype.numpy.type
    result: Array = _standard(op.dtype.numpy, words) * kind(op.std) + kind(op.mean)
    return result


@np.errstate(over="ignore", under="ignore")
def _lognormal(op: Any, words: Array, blocks: Array) -> Array:
    kind = op.dtype.numpy.type
    result: Array = np.exp(_standard(op.dtype.numpy, words) * kind(op.sigma) + kind(op.mean))
    return result


def _integers(op: Any, words: Array, blocks: Array) -> Array:
    span = op.span()
    scaled = _scaled_words if op.per_block() == 4 else _scaled_pairs
    values, is_biased = scaled(words, span)
    attempt = 0
    while is_biased.any():
        attempt += 1
        rows, places = np.nonzero(is_biased)
        again, still = scaled(philox(op.key(), blocks[rows], attempt), span)
        here = np.arange(len(rows)), places
        values[rows, places] = again[here]
        is_biased = np.zeros_like(is_biased)
        is_biased[rows, places] = still[here]
    values += np.uint64(op.low % 2**64)
    return values.astype(op.dtype.numpy)


def _scaled_words(words: Array, span: int) -> tuple[Array, Array]:
    """Return ``word * span >> 32`` and which of them are to be drawn again."""
    if span == 1 << 32:
        return words.astype(_U64), np.zeros(words.shape, np.bool_)
    product = words * np.uint64(span)
    return product >> np.uint64(32), product.astype(_U32) < np.uint32(-span % 2**32 % span)


def _scaled_pairs(words: Array, span: int) -> tuple[Array, Array]:
    """Return ``pair * span >> 64`` and which of them are to be drawn again."""
    pairs = wide(words)
    if span == 1 << 64:
        return pairs, np.zeros(pairs.shape, np.bool_)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    low, high = pairs & mask, pairs >> half
    span_low, span_high = np.uint64(span & 0xFFFFFFFF), np.uint64(span >> 32)
    middle = high * span_low + (low * span_low >> half)
    crossed = low * span_high + (middle & mask)
    upper = high * span_high + (middle >> half) + (crossed >> half)
    return upper, pairs * np.uint64(span) < np.uint64(-span % 2**64 % span)


_special = LateModule("scipy.special")


def _kernel(numbers: Callable[[Any, Array, Array], Array], cost: float = _NUMBER, late: LateModule | None = None) -> Kernel:
    """Return the kernel of a distribution: its numbers, the seconds of one, and the module that it needs."""

    def compute(op: Any, operands: list[Array], results: list[Array]) -> None:
        _draw(numbers, op, results[0].reshape(-1))

    def seconds(op: Any, operands: list[Array], results: list[Array]) -> float:
        return _CALL + results[0].size * cost + (0.0 if late is None else late.seconds(op.kind))

    drawn = kernel(compute, seconds)

    def enqueue(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        if op.generator != "philox":  # no numbers of it either
            raise UnsupportedError(f"the CPU has no generator {op.generator!r}", remedy="Use generator='philox', or a CUDA device.")
        drawn(lane, op, plan, inputs, outputs)

    return enqueue


def _truncated_normal(op: Any, words: Array, blocks: Array) -> Array:
    return distributions.truncated_normal(op, _special().ndtri, words)


def _sobol(op: Any, operands: list[Array], results: list[Array]) -> None:
    directions, out = operands[0], results[0]
    step = max(1, _WORDS // len(directions))
    for start in range(0, op.n, step):
        words = distributions.sobol(directions, op.offset + start, min(step, op.n - start))
        shift, unit = (8, 2.0**-24) if op.dtype is DType.FLOAT32 else (0, 2.0**-32)
        np.multiply(words >> np.uint32(shift), op.dtype.numpy.type(unit), out=out[start : start + step])


def _sobol_cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    return _CALL + results[0].size * _NUMBER


def _picked_cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    length, count = op.counts()
    return _CALL + float(length + count) * _CHAIN + results[0].size * _NUMBER


def _numbers(op: Any) -> Array:
    """Return numbers that elements are chosen by: integers, pairs of words, or fractions."""
    if op.kind == "integers":
        more: dict[str, Any] = {
            "dtype": DType.INT64,
            "low": 0,
            "span": lambda: op.high,
            "per_block": lambda: 4 if op.high <= 1 << 32 else 2,
        }
    else:
        more = {"dtype": DType.UINT64 if op.kind == "pairs" else DType.FLOAT64, "per_block": lambda: 2}
    stream = SimpleNamespace(**vars(op), **more)
    out = np.empty(op.size, stream.dtype.numpy)
    _draw(_CHOOSING[op.kind], stream, out)
    return out


_CHOOSING: dict[str, Callable[[Any, Array, Array], Array]] = {
    "integers": _integers,
    "pairs": lambda op, words, blocks: wide(words),
    "fractions": lambda op, words, blocks: distributions.unit(words),
    "clocks": lambda op, words, blocks: distributions.inner(words),
}


def _blocks(key: int, offset: int, count: int, per_block: int) -> tuple[Array, slice]:
    """Return the blocks of words that numbers come from, and where these are among the numbers of the blocks."""
    first = offset // per_block
    blocks = np.arange(first, -(-(offset + count) // per_block), dtype=_U64)
    return philox(key, blocks, 0), slice(offset - first * per_block, offset - first * per_block + count)


def _normals(words: Array, dtype: DType) -> Array:
    """Return standard normal numbers by the transform of Box and Muller in higher precision, of fractions that are rounded as the kernels round them."""
    radius: Array
    angle: Array
    # Near 1 the logarithm tells the rounding of a fraction from the fraction itself.
    if dtype is DType.FLOAT32:
        radius = (words[:, 0::2].astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)).astype(np.float64)
        angle = words[:, 1::2] * 2.0**-32
    else:
        pairs = (words[:, 0::2].astype(_U64) | words[:, 1::2].astype(_U64) << np.uint64(32)) >> np.uint64(11)
        wide = pairs.astype(np.longdouble)
        radius = ((pairs[:, :1].astype(np.float64) + 0.5) * 2.0**-53).astype(np.longdouble)
        angle = wide[:, 1:] * np.longdouble(2.0) ** -53
    length, turn = np.sqrt(-2 * np.log(radius)), 8 * np.arctan(angle.dtype.type(1)) * angle
    return np.stack((length * np.cos(turn), length * np.sin(turn)), axis=2).reshape(-1)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype, per_block in ((DType.FLOAT32, 4), (DType.FLOAT64, 2)):
        for count, offset in ((1, 0), (1001, 3), (64, (1 << 40) + 1)):
            seed = int(rng.integers(1 << 63))
            words, part = _blocks(key_of(seed, f"uniform {per_block}"), offset, count, per_block)
            options: dict[str, Any] = {"shape": count, "dtype": dtype, "seed": seed, "offset": offset}
            what = f"{dtype.value} count={count} offset={offset} seed={seed}"
            whole = words >> np.uint32(8) if per_block == 4 else wide(words) >> np.uint64(11)
            fractions = whole.reshape(-1)[part].astype(np.longdouble) * np.longdouble(2.0) ** (-24 if per_block == 4 else -53)
            yield sampling.sample("uniform", what, (), fractions * 4 - 1, sampling.sums(dtype), low=-1.0, high=3.0, **options)
            words, part = _blocks(key_of(seed, f"normal {per_block}"), offset, count, per_block)
            normal, error = _normals(words, dtype)[part], sampling.sums(dtype, 8)
            # One number may be close to 0: twice the standard deviation is what is usual.
            yield sampling.sample("normal", what, (), normal * 2 + 1, error, terms=4.0, mean=1.0, std=2.0, **options)
            yield sampling.sample("lognormal", what, (), np.exp(normal / 2), error, sigma=0.5, **options)
    for whole_type in (DType.INT64, DType.UINT8):
        seed = int(rng.integers(1 << 63))
        words, part = _blocks(key_of(seed, "integers 4"), 5, 999, 4)
        options = {"shape": 999, "low": 3, "high": 3 + 64, "dtype": whole_type, "seed": seed, "offset": 5}
        values = (words.reshape(-1)[part].astype(_U64) * np.uint64(64) >> np.uint64(32)).astype(np.int64) + 3
        yield sampling.sample("integers", f"{whole_type.value} seed={seed}", (), values, **options)
    yield from distributions.samples(rng)
    yield from choices.samples(rng)


PART = BackendPart(
    {
        "uniform": _kernel(_uniform),
        "normal": _kernel(_normal),
        "lognormal": _kernel(_lognormal),
        "integers": _kernel(_integers),
        **{kind: _kernel(numbers, _CHAIN) for kind, numbers in distributions.NUMBERS.items()},
        "truncated_normal": _kernel(_truncated_normal, _CHAIN, _special),
        "sobol": kernel(_sobol, _sobol_cost),
        **dict.fromkeys(("permutation", "choice"), kernel(partial(choices.pick, _numbers), _picked_cost)),
    },
    samples=_samples,
    wheels=("scipy",),
)
