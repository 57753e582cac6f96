"""Attention on the CPU, and its samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.families.precision import WORKSPACE, blocks, wider
from accel.cpu.kernels import kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from accel.backend import Kernel
    from accel.cpu.views import Array
    from accel.dtype import DType
    from accel.enums import Causal
    from accel.family import Sample

__all__ = ["KERNELS", "attention", "samples"]


def _first(causal: Causal, seq_q: int, seq_kv: int) -> int:
    """Return how many keys query 0 sees, before those that do not exist are taken off; each further query sees one more."""
    return seq_kv if causal is False else 1 if causal is True else 1 + seq_kv - seq_q


def _dense(op: Any, operands: list[Array], results: list[Array]) -> None:
    """Compute attention over whole arrays, or over as much of each batch as its lengths say."""
    (q, k, v, *given), out = operands, results[0]
    others = iter(given)
    bias, lengths_q, lengths_kv = (None if ref is None else next(others) for ref in (op.bias, op.lengths_q, op.lengths_kv))
    options = op.multiplier(), op.causal, op.window
    if bias is None and lengths_q is None is lengths_kv:
        _grouped(q, k, v, out, *options)
        return
    for one in range(q.shape[0]):
        seq_q = q.shape[2] if lengths_q is None else min(max(int(lengths_q[one]), 0), q.shape[2])
        seq_kv = k.shape[2] if lengths_kv is None else min(max(int(lengths_kv[one]), 0), k.shape[2])
        batch = slice(one, one + 1)
        shift = None
        if bias is not None:
            of_batch = bias[one if bias.shape[0] > 1 else 0]
            shift = np.broadcast_to(of_batch, (q.shape[1], q.shape[2], k.shape[2]))[:, :seq_q, :seq_kv]
        _grouped(q[batch, :, :seq_q], k[batch, :, :seq_kv], v[batch, :, :seq_kv], out[batch, :, :seq_q], *options, shift)
        out[one, :, seq_q:] = 0


def _ragged(op: Any, operands: list[Array], results: list[Array]) -> None:
    (q, k, v, begins_q, begins_kv), out = operands, results[0]
    begins_q, begins_kv = begins_q.clip(0, len(q)), begins_kv.clip(0, len(k))
    for one in range(len(begins_q) - 1):
        queries, keys = slice(begins_q[one], begins_q[one + 1]), slice(begins_kv[one], begins_kv[one + 1])
        sequence, key, value, result = (each.swapaxes(0, 1)[None] for each in (q[queries], k[keys], v[keys], out[queries]))
        _grouped(sequence, key, value, result, op.multiplier(), op.causal, op.window)


def _paged(op: Any, operands: list[Array], results: list[Array]) -> None:
    (q, k, v, table, lengths), out = operands, results[0]
    count, size = k.shape[0], k.shape[2]
    most = table.shape[1] * size if count else 0
    for one in range(q.shape[0]):
        seq_kv = min(max(int(lengths[one]), 0), most)
        pages = table[one, : -(-seq_kv // size) if size else 0].clip(0, count - 1)
        key, value = (each[pages].swapaxes(0, 1).reshape(1, each.shape[1], -1, each.shape[3])[:, :, :seq_kv] for each in (k, v))
        _grouped(q[one : one + 1], key, value, out[one : one + 1], op.multiplier(), op.causal, op.window)


def _grouped(q: Array, k: Array, v: Array, out: Array, scale: float, causal: Causal, window: int | None, bias: Array | None = None) -> None:
    """Compute attention of (batch, heads, ...) arrays whose queries and keys all count; ``bias`` is (heads, queries, keys) of the only batch.

    A cut through one axis of a single batch, and a batch that is whole, can be seen as groups of heads without a copy.
    """
    batch, heads, seq_q, dim = q.shape
    kv_heads, seq_kv = k.shape[1:3]
    each = heads // kv_heads
    groups = batch * kv_heads
    queries, result = q.reshape(groups, each, seq_q, dim), out.reshape(groups, each, seq_q, v.shape[3])
    keys, values = (x.reshape(groups, *x.shape[2:]) for x in (k, v))
    shift = None if bias is None else bias.reshape(kv_heads, each, *bias.shape[1:])
    attention(queries, keys, values, result, scale, _first(causal, seq_q, seq_kv), window, shift)


def attention(
    q: Array, k: Array, v: Array, out: Array, scale: float, first: int, window: int | None = None, bias: Array | None = None
) -> None:
    """Compute ``softmax(scale * Q K^T + bias) V`` of groups of heads with the same keys; query i sees the first ``first + i`` keys, ``window`` at most.

    Groups are done together while their scores fit the workspace, and the queries of one group in blocks otherwise.

    Parameters
    ----------
    q, out, bias
        (groups, heads, queries, ...).
    k, v
        (groups, keys, ...).
    """
    groups, heads, seq_q, dim = q.shape
    seq_kv = k.shape[1]
    # Queries before `start` see no key, and from `stop` on the window is behind the last.
    start = min(seq_q, max(0, 1 - first)) if seq_kv else seq_q
    stop = seq_q if window is None else max(start, min(seq_q, seq_kv - first + window))
    out[:, :, :start] = 0
    out[:, :, stop:] = 0
    if start >= stop or not groups:
        return
    wide = wider(out.dtype)
    row = heads * seq_kv * wide.itemsize
    for some in blocks(groups, row * seq_q + 2 * seq_kv * dim * wide.itemsize):
        key, value = (each[some, None].astype(wide, copy=False) for each in (k, v))
        # A weight of 0 does not hide a NaN or an infinity in the value of a key that is not seen, so no query shares a product with such a key.
        together = (first >= seq_kv and window is None) or bool(np.isfinite(value).all())
        for block in blocks(stop - start, (some.stop - some.start) * row, WORKSPACE if together else 1):
            begin, end = block.start + start, block.stop + start
            least = 0 if window is None else max(0, first + begin - window)
            seen = min(seq_kv, first + end - 1)
            shift = None if bias is None else bias[some, :, begin:end, least:seen]
            query = q[some, :, begin:end].astype(wide) * wide.type(scale)
            out[some, :, begin:end] = _attend(query, key[:, :, least:seen], value[:, :, least:seen], first + begin - least, window, shift)


def _attend(query: Array, key: Array, value: Array, first: int, window: int | None, bias: Array | None) -> Array:
    scores = np.matmul(query, key.swapaxes(2, 3))
    if bias is not None:
        scores += bias
    count, seen = scores.shape[2:]
    if first < seen or (window is not None and first + count - 1 > window):
        ends, keys = first + np.arange(count)[:, None], np.arange(seen)
        hidden = keys >= ends if window is None else (keys >= ends) | (keys < ends - window)
        np.copyto(scores, -np.inf, where=hidden)
    most = scores.max(axis=3, keepdims=True)
    if (is_hidden := most == -np.inf).any():  # by the bias
        most[is_hidden] = 0
    scores -= most
    np.exp(scores, out=scores)
    total = scores.sum(axis=3, keepdims=True)
    result: Array = np.matmul(scores, value)
    result /= total
    np.copyto(result, 0, where=is_hidden)
    return result


def _cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    """Return the cost of as many keys as a query can see."""
    q, k = operands[:2]
    pages = operands[3].shape[1] if op.kind == "paged_attention" else 1
    keys = op.longest_kv if op.kind == "ragged_attention" else k.shape[2] * pages
    return costs.attention(math.prod(q.shape[:-1]) * keys, q.shape[-1], q.dtype)


KERNELS: Mapping[str, Kernel] = {
    "attention": kernel(_dense, _cost),
    "ragged_attention": kernel(_ragged, _cost),
    "paged_attention": kernel(_paged, _cost),
}


def _expected(
    q: Array, k: Array, v: Array, *, scale: float | None = None, causal: Causal = False, window: int | None = None, bias: Array | None = None,
    lengths: tuple[int, int] | None = None,
) -> Array:  # fmt: skip
    """Return attention of one batch, (heads, queries, head_dim), in the operands' precision, over the keys that each query sees alone."""
    seq_q, seq_kv = lengths or (q.shape[1], k.shape[1])
    each = q.shape[0] // k.shape[0]
    result = np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
    for head, query in np.ndindex(q.shape[0], seq_q):
        end = seq_kv if causal is False else query + 1 + (seq_kv - seq_q if causal == "bottom_right" else 0)
        begin = 0 if window is None else max(0, end - window)
        end = min(end, seq_kv)
        if begin >= end:
            continue
        scores = k[head // each, begin:end] @ q[head, query] * (q.shape[2] ** -0.5 if scale is None else scale)
        if bias is not None:
            scores = scores + bias[head, query, begin:end]
        weights = np.exp(scores - scores.max())
        result[head, query] = weights / weights.sum() @ v[head // each, begin:end]
    return result


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield samples of all forms of attention."""
    for dtype in sampling.ALL_FLOATS:
        causals: tuple[Causal, ...] = (False, True, "bottom_right")
        for causal in causals:
            yield _dense_sample(rng, dtype, (3, 5), (3, 7), (8, 8), causal=causal)
        yield _dense_sample(rng, dtype, (6, 5), (2, 9), (8, 16), causal="bottom_right", window=3)
        yield _dense_sample(rng, dtype, (4, 6), (2, 9), (16, 8), has_bias=True, scale=0.3)
        yield _dense_sample(rng, dtype, (4, 6), (1, 9), (8, 8), causal="bottom_right", lengths=((6, 2), (9, 4)))
        yield _dense_sample(rng, dtype, (2, 7), (2, 5), (5, 3), causal=True, window=2, has_bias=True, lengths=((0, 7), (5, 3)))
        yield _ragged_sample(rng, dtype)
        yield _paged_sample(rng, dtype)


def _error(dtype: DType) -> float:
    # The weights may be rounded to the operands' type before the second product.
    return sampling.sums(dtype, 16) + 2 * sampling.rounding(dtype)


def _dense_sample(
    rng: np.random.Generator,
    dtype: DType,
    queries: tuple[int, int],
    keys: tuple[int, int],
    dims: tuple[int, int],
    *,
    has_bias: bool = False,
    lengths: tuple[tuple[int, int], tuple[int, int]] | None = None,
    **options: Any,
) -> Sample:
    """Return a sample of two batches of (heads, length) queries and keys."""
    q, k, v = (sampling.random(rng, (2, *sizes), dtype) for sizes in ((*queries, dims[0]), (*keys, dims[0]), (*keys, dims[1])))
    operands, names = [q, k, v], []
    if has_bias:
        operands.append(sampling.random(rng, (1, queries[0], queries[1], keys[1]), dtype))
        names.append("bias")
    if lengths is not None:
        operands += [np.array(each, np.int32) for each in lengths]
        names += ["lengths_q", "lengths_kv"]
    bias = sampling.wide(operands[3])[0] if has_bias else None
    wide = [sampling.wide(each) for each in (q, k, v)]
    pairs = [None, None] if lengths is None else list(zip(*lengths, strict=True))
    expected = np.stack([_expected(*(each[one] for each in wide), bias=bias, lengths=pairs[one], **options) for one in (0, 1)])
    words = " ".join([*names, *(f"{name}={value}" for name, value in options.items())])
    what = f"{dtype.value} {queries} of {keys} {words}"
    return sampling.sample("attention", what, tuple(operands), expected, _error(dtype), names=names, **options)


def _ragged_sample(rng: np.random.Generator, dtype: DType) -> Sample:
    begins_q, begins_kv = np.array([0, 5, 5, 9, 10], np.int32), np.array([0, 3, 7, 14, 22], np.int32)
    q, k, v = (sampling.random(rng, shape, dtype) for shape in ((10, 4, 8), (22, 2, 8), (22, 2, 8)))
    expected = np.zeros(q.shape, sampling.wide(q).dtype)
    options: dict[str, Any] = {"causal": "bottom_right", "window": 4}
    for one in range(4):
        queries, keys = slice(begins_q[one], begins_q[one + 1]), slice(begins_kv[one], begins_kv[one + 1])
        parts = (sampling.wide(each).swapaxes(0, 1) for each in (q[queries], k[keys], v[keys]))
        expected[queries] = _expected(*parts, **options).swapaxes(0, 1)
    operands, names = (q, k, v, begins_q, begins_kv), ("offsets_q", "offsets_kv")
    options |= {"longest_q": 5, "longest_kv": 8}
    return sampling.sample("ragged_attention", dtype.value, operands, expected, _error(dtype), names=names, **options)


def _paged_sample(rng: np.random.Generator, dtype: DType) -> Sample:
    q, k, v = (sampling.random(rng, shape, dtype) for shape in ((2, 4, 3, 8), (7, 2, 4, 8), (7, 2, 4, 8)))
    table, lengths = np.array([[6, 2, 0], [1, 5, 5]], np.int32), np.array([11, 4], np.int32)
    expected = []
    for one in (0, 1):
        key, value = (sampling.wide(each)[table[one]].swapaxes(0, 1).reshape(2, 12, 8)[:, : lengths[one]] for each in (k, v))
        expected.append(_expected(sampling.wide(q)[one], key, value, causal="bottom_right"))
    operands, names, made = (q, k, v, table, lengths), ("table", "lengths_kv"), np.stack(expected)
    return sampling.sample("paged_attention", dtype.value, operands, made, _error(dtype), names=names, causal="bottom_right")
