"""Attention with statistics, and its gradients, on the CPU, and their samples: group by group of heads with the same keys, in blocks of queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.families.precision import blocks, wider
from accel.cpu.kernels import kernel
from accel.dtype import DType

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from accel.backend import Kernel
    from accel.cpu.views import Array
    from accel.enums import Causal
    from accel.family import Sample

__all__ = ["KERNELS", "samples"]


def _cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    batch, heads, seq_q, dim = op.q.shape
    return costs.attention(3 * batch * heads * seq_q * op.k.shape[2], dim, op.q.dtype.numpy)


def _hidden(rows: slice, seq_q: int, seq_kv: int, causal: Causal, window: int | None) -> Array:
    """Return which keys some queries do not see."""
    ends = np.full(rows.stop - rows.start, seq_kv) if causal is False else np.arange(rows.start, rows.stop) + 1
    ends = ends + (seq_kv - seq_q if causal == "bottom_right" else 0)
    keys = np.arange(seq_kv)
    hidden: Array = keys >= ends[:, None]
    return hidden if window is None else hidden | (keys < ends[:, None] - window)


def _groups(q: Array, k: Array) -> Iterator[tuple[int, slice, int, slice]]:
    """Yield (batch, heads with the same keys, head of the keys, queries)."""
    share = q.shape[1] // max(1, k.shape[1])
    for batch, head in np.ndindex(*k.shape[:2]):
        for rows in blocks(q.shape[2], 3 * share * k.shape[2] * wider(q.dtype).itemsize):
            yield batch, slice(head * share, (head + 1) * share), head, rows


def _with_stats(op: Any, operands: list[Array], results: list[Array]) -> None:
    (q, k, v), (out, stats), scale = operands, results, op.forward().multiplier()
    wide, (seq_q, seq_kv) = wider(q.dtype), (q.shape[2], k.shape[2])
    out[...], stats[...] = 0, -np.inf
    if not seq_kv:
        return
    for batch, heads, head, rows in _groups(q, k):
        scores = q[batch, heads, rows].astype(wide) * wide.type(scale) @ k[batch, head].astype(wide).T
        scores[:, _hidden(rows, seq_q, seq_kv, op.causal, op.window)] = -np.inf
        most = scores.max(axis=2, keepdims=True)
        weights = np.where(scores == -np.inf, 0, np.exp(scores - most))
        total = weights.sum(axis=2, keepdims=True)
        sees = most[..., 0] > -np.inf
        is_any = sees | np.isnan(most[..., 0])
        out[batch, heads, rows] = np.where(is_any[..., None], weights @ v[batch, head].astype(wide) / total, 0)
        stats[batch, heads, rows] = np.where(is_any, (most + np.log(total))[..., 0], -np.inf)


def _gradients(op: Any, operands: list[Array], results: list[Array]) -> None:
    (grad, q, k, v, result, stats), (of_q, of_k, of_v), scale = operands, results, op.forward().multiplier()
    wide, (seq_q, seq_kv) = wider(q.dtype), (q.shape[2], k.shape[2])
    of_q[...] = 0
    sums_k, sums_v = np.zeros(k.shape, wide), np.zeros(v.shape, wide)
    for batch, heads, head, rows in _groups(q, k):
        if not seq_kv:
            break
        query, change, made = (each[batch, heads, rows].astype(wide) for each in (q, grad, result))
        key, value = k[batch, head].astype(wide), v[batch, head].astype(wide)
        scores = query * wide.type(scale) @ key.T
        hidden = _hidden(rows, seq_q, seq_kv, op.causal, op.window)
        weights = np.exp(scores - stats[batch, heads, rows, None].astype(wide, copy=False))
        weights[:, hidden] = 0
        shares = weights * (change @ value.T - (change * made).sum(axis=2, keepdims=True)) * wide.type(scale)
        shares[:, hidden] = 0
        of_q[batch, heads, rows] = shares @ key
        sums_k[batch, head] += np.tensordot(shares, query, ((0, 1), (0, 1)))
        sums_v[batch, head] += np.tensordot(weights, change, ((0, 1), (0, 1)))
    of_k[...], of_v[...] = sums_k, sums_v


KERNELS: Mapping[str, Kernel] = {"attention_with_stats": kernel(_with_stats, _cost), "attention_grad": kernel(_gradients, _cost)}


def _expected(q: Array, k: Array, v: Array, grad: Array, scale: float, causal: Causal, window: int | None) -> tuple[Array, ...]:
    """Return attention, its statistics and the gradients of q, k and v, query by query, by the derivative of a softmax."""
    (batches, heads, seq_q, _), (kv_heads, seq_kv) = q.shape, k.shape[1:3]
    share = heads // kv_heads
    out, stats = np.zeros((*q.shape[:3], v.shape[3]), q.dtype), np.full(q.shape[:3], -np.inf, q.dtype)
    of_q, of_k, of_v = (np.zeros(each.shape, q.dtype) for each in (q, k, v))
    for batch, head, query in np.ndindex(batches, heads, seq_q):
        end = seq_kv if causal is False else query + 1 + (seq_kv - seq_q if causal == "bottom_right" else 0)
        seen = slice(0 if window is None else max(0, end - window), min(end, seq_kv))
        if seen.start >= seen.stop:
            continue
        keys, values, change = k[batch, head // share, seen], v[batch, head // share, seen], grad[batch, head, query]
        powers = np.exp(scale * keys @ q[batch, head, query])
        weights = powers / powers.sum()
        out[batch, head, query], stats[batch, head, query] = weights @ values, np.log(powers.sum())
        slope = (np.diag(weights) - np.outer(weights, weights)) @ (values @ change)
        of_q[batch, head, query] = scale * slope @ keys
        of_k[batch, head // share, seen] += scale * np.outer(slope, q[batch, head, query])
        of_v[batch, head // share, seen] += np.outer(weights, change)
    return out, stats, of_q, of_k, of_v


# Heads and queries, heads and keys, sizes of a head, options.
_FORMS: tuple[tuple[tuple[int, int], tuple[int, int], tuple[int, int], dict[str, Any]], ...] = (
    ((3, 5), (3, 7), (8, 8), {}),
    ((2, 40), (2, 40), (16, 16), {"causal": True}),
    ((6, 5), (2, 9), (8, 16), {"causal": "bottom_right", "window": 3, "scale": 0.4}),
    ((4, 6), (1, 9), (5, 3), {"causal": True, "window": 2}),
    ((2, 7), (1, 3), (8, 8), {"causal": "bottom_right"}),
    ((1, 1), (1, 1), (1, 1), {}),
    ((2, 0), (1, 3), (8, 8), {}),
    ((2, 3), (1, 0), (8, 8), {}),
)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield samples of every op here."""
    for dtype in sampling.ALL_FLOATS:
        for queries, keys, dims, options in _FORMS:
            yield from _samples(rng, dtype, queries, keys, dims, options)


def _samples(
    rng: np.random.Generator, dtype: DType, queries: tuple[int, int], keys: tuple[int, int], dims: tuple[int, int], options: dict[str, Any]
) -> Iterator[Sample]:
    q, k, v, grad = (
        sampling.random(rng, (2, *sizes), dtype) for sizes in ((*queries, dims[0]), (*keys, dims[0]), (*keys, dims[1]), (*queries, dims[1]))
    )
    scale, causal, window = options.get("scale", dims[0] ** -0.5), options.get("causal", False), options.get("window")
    wide = (sampling.wide(q), sampling.wide(k), sampling.wide(v), sampling.wide(grad))
    out, stats, *grads = _expected(*wide, scale, causal, window)
    name = f"{dtype.value} {queries} of {keys} {dims} {options}"
    # Weights, and the result that is given, are rounded to the operands' type.
    error = sampling.sums(dtype, 32) + 8 * sampling.rounding(dtype)
    yield sampling.sample("attention_with_stats", name, (q, k, v), (out, stats), error, **options)
    given = out.astype(dtype.numpy), stats.astype(np.float64 if dtype is DType.FLOAT64 else np.float32)
    yield sampling.sample("attention_grad", name, (grad, q, k, v, *given), tuple(grads), error, **options)
