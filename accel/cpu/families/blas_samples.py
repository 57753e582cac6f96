"""Samples of the ops of BLAS besides products: every triangle, side and transpose, in the four dtypes that every BLAS has."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import sampling
from accel.family import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.cpu.views import Array
    from accel.dtype import DType
    from accel.ops.base import Shape

__all__ = ["samples"]


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield samples of the ops on vectors and matrices."""
    for dtype in (*sampling.FLOATS, *sampling.COMPLEX):
        for n in (0, 1, 1001):
            yield from _vectors(rng, dtype, n)
        for lower, trans, side in itertools.product((False, True), "ntc", ("left", "right")):
            yield from _triangular(rng, dtype, 7, 5, lower=lower, trans=trans, side=side, unit_diagonal=bool(rng.integers(2)))
        for n, others in ((1, 1), (0, 3), (3, 0), (130, 33)):
            yield from _triangular(rng, dtype, n, others, lower=n > 1, trans="t", side="left", unit_diagonal=False)
        yield from _batched(rng, dtype)
        for lower, side in itertools.product((False, True), ("left", "right")):
            yield from _symmetric(rng, dtype, 7, 5, lower=lower, side=side)
            yield from _updates(rng, dtype, 9, 4, lower=lower, is_turned=side == "left")
        yield from _symmetric(rng, dtype, 65, 33, lower=True, side="left")
        yield from _updates(rng, dtype, 65, 33, lower=False, is_turned=False)
        yield from _updates(rng, dtype, 3, 0, lower=False, is_turned=False)
        yield from _batched_products(rng, dtype)
        yield from _sums(rng, dtype)
        yield from _batched_sums(rng, dtype)
    for dtype in (*sampling.ALL_FLOATS, *sampling.COMPLEX):
        yield from _outer(rng, dtype)
        yield from _grouped(rng, dtype)


_GROUPED = ((7, 5, 3), (33, 17, 64), (7, 5, 3), (1, 1, 1), (2, 3, 0), (0, 4, 3), (130, 9, 8), (7, 5, 3))


def _group(options: dict[str, Any], count: int, blas: Any, *refs: Any) -> Any:
    out = {"out": refs[2 * count :]} if len(refs) > 2 * count else {}
    return blas.gemm_grouped(refs[:count], refs[count : 2 * count], **out, **options)


def _grouped(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    """Yield groups of products of several sizes, some of which come again, and two have none to add."""
    a = [sampling.random(rng, (m, k), dtype) for m, _, k in _GROUPED]
    b = [sampling.random(rng, (k, n), dtype) for _, n, k in _GROUPED]
    out = [sampling.random(rng, (m, n), dtype) for m, n, _ in _GROUPED]
    products = [sampling.wide(x) @ sampling.wide(y) for x, y in zip(a, b, strict=True)]
    added = [-0.5 * product + 2 * sampling.wide(each) for product, each in zip(products, out, strict=True)]
    count, error = len(_GROUPED), sampling.sums(dtype, 64)
    turned = [np.ascontiguousarray(each.conj().T) for each in a], [np.ascontiguousarray(each.T) for each in b]
    factors = {"alpha": -0.5, "beta": 2.0}
    for operands, expected, options in (
        ((*a, *b), products, {}),
        ((*a, *b, *out), added, factors),
        ((*turned[0], *turned[1], *out), added, {**factors, "transpose_a": "c", "transpose_b": "t"}),
    ):
        yield Sample(f"gemm_grouped {dtype.value} {options}", partial(_group, options, count), operands, tuple(expected), error, 8.0)


def _sample(kind: str, operands: tuple[Array, ...], expected: Any, error: float, terms: float = 0.0, **options: Any) -> Sample:
    what = f"{' '.join(f'{x.dtype}{list(x.shape)}' for x in operands)} {options}"
    return sampling.sample(kind, what, operands, expected, error, terms, **options)


def _sizes(x: Array) -> Array:
    sizes: Array = np.abs(x.real) + np.abs(x.imag)
    return sizes


def _vectors(rng: np.random.Generator, dtype: DType, n: int) -> Iterator[Sample]:
    x, y = sampling.random(rng, n, dtype), sampling.random(rng, n, dtype)
    wide_x, wide_y, error = sampling.wide(x), sampling.wide(y), sampling.sums(dtype, n)
    yield _sample("asum", (x,), np.asarray(_sizes(wide_x).sum()), error)
    products = wide_x.conj() * wide_y
    yield _sample("dotc", (x, y), np.asarray(products.sum()), error, float(np.abs(products).max(initial=0.0)))
    yield _sample("swap", (x, y), (y, x), 0.0)
    c, s = 0.6, 0.48 + 0.64j if dtype.is_complex else 0.8
    expected = c * wide_x + s * wide_y, c * wide_y - np.conj(s) * wide_x
    largest = max(float(np.abs(part).max(initial=0.0)) for part in (wide_x, wide_y))  # one point may be turned close to an axis
    yield _sample("rot", (x, y), expected, sampling.sums(dtype, 4), largest, c=c, s=s)
    if n:
        yield _sample("iamax", (x,), np.asarray(np.argmax(_sizes(x))), 0.0)
        yield _sample("iamin", (x,), np.asarray(np.argmin(_sizes(x))), 0.0)
        ties = np.where(np.arange(n) % 3 == n // 2 % 3, -2, 1).astype(dtype.numpy)
        yield _sample("iamax", (ties,), np.asarray(np.argmax(_sizes(ties))), 0.0)
        first, last = sorted(rng.integers(n, size=2).tolist())
        lacking = x.copy()
        lacking[[first, last]] = 1j * np.nan if dtype.is_complex else np.nan
        yield _sample("iamax", (lacking,), np.asarray(first), 0.0)
        yield _sample("iamin", (lacking,), np.asarray(first), 0.0)


def _applied(a: Array, trans: str) -> Array:
    turned = a if trans == "n" else a.swapaxes(-1, -2)
    return turned.conj() if trans == "c" else turned


def _triangle(a: Array, lower: bool, unit_diagonal: bool) -> Array:
    """Return one triangle of a, in higher precision."""
    kept = sampling.wide(np.tril(a) if lower else np.triu(a))
    if unit_diagonal:
        places = np.arange(a.shape[-1])
        kept[..., places, places] = 1
    return kept


def _conditioned(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Array:
    """Return square matrices whose triangles have a condition of a few units."""
    n = shape[-1]
    return np.asarray(sampling.random(rng, shape, dtype) / max(n, 1) + 2 * np.eye(n), dtype.numpy)


def _triangular(
    rng: np.random.Generator, dtype: DType, n: int, others: int, *, lower: bool, trans: Any, side: str, unit_diagonal: bool
) -> Iterator[Sample]:
    a, is_left = _conditioned(rng, (n, n), dtype), side == "left"
    triangle, error = _applied(_triangle(a, lower, unit_diagonal), trans), 8 * sampling.sums(dtype, n)
    form = {"lower": lower, "trans": trans, "unit_diagonal": unit_diagonal}
    b = sampling.random(rng, (n, others) if is_left else (others, n), dtype)
    wide = sampling.wide(b)
    product = triangle @ wide if is_left else wide @ triangle
    yield _sample("trmm", (a, b), -0.5 * product, error, alpha=-0.5, side=side, **form)
    # What was multiplied is the solution.
    yield _sample("trsm", (a, product.astype(dtype.numpy)), 2 * wide, error, alpha=2.0, side=side, **form)
    if is_left:
        x = sampling.random(rng, n, dtype)
        y = triangle @ sampling.wide(x)
        yield _sample("trmv", (a, x), y, error, **form)
        yield _sample("trsv", (a, y.astype(dtype.numpy)), sampling.wide(x), error, **form)
        if trans != "c":
            stored = np.ascontiguousarray(a.T)
            yield Sample(
                f"trsv of views {dtype.value} {form}",
                partial(_turned, "trsv", form),
                (stored, y.astype(dtype.numpy)),
                sampling.wide(x),
                error,
            )
            yield Sample(f"trmm of views {dtype.value} {form}", partial(_turned, "trmm", form), (stored, b), product, error)


def _turned(kind: str, options: dict[str, Any], blas: Any, a: Any, b: Any) -> Any:
    return getattr(blas, kind)(a.T, b, **options)


def _batched(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    error = 8 * sampling.sums(dtype, 6)
    for many_a, many_b, side in itertools.product((False, True), (False, True), ("left", "right")):
        if many_a or many_b:
            a = _conditioned(rng, (3, 6, 6) if many_a else (6, 6), dtype)
            shape = (6, 4) if side == "left" else (4, 6)
            x = sampling.random(rng, (3, *shape) if many_b else shape, dtype)
            triangle, wide = _triangle(a, lower=True, unit_diagonal=False), sampling.wide(x)
            product = triangle @ wide if side == "left" else wide @ triangle
            yield _sample("trmm", (a, x), product, error, side=side, lower=True)
            if many_b:
                yield _sample("trsm", (a, product.astype(dtype.numpy)), wide, error, side=side, lower=True)
    b = sampling.random(rng, (6, 4), dtype)
    a = _conditioned(rng, (2, 6, 6), dtype)
    inverse = np.linalg.inv(_triangle(a, lower=False, unit_diagonal=False).astype(np.complex128 if dtype.is_complex else np.float64))
    yield _sample("trsm", (a, b), inverse @ sampling.wide(b), error)
    for count, n in ((2, 70), (20, 9)):  # few large ones, and many small ones
        a, x = _conditioned(rng, (count, n, n), dtype), sampling.random(rng, (count, n, 5), dtype)
        product = _triangle(a, lower=True, unit_diagonal=False) @ sampling.wide(x)
        yield _sample("trsm", (a, product.astype(dtype.numpy)), sampling.wide(x), n * error, lower=True)


def _symmetric(
    rng: np.random.Generator, dtype: DType, n: int, others: int, *, lower: bool, side: str, batch_a: Shape = (), batch_b: Shape = ()
) -> Iterator[Sample]:
    a = sampling.random(rng, (*batch_a, n, n), dtype)
    b = sampling.random(rng, (*batch_b, *((n, others) if side == "left" else (others, n))), dtype)
    wide_a, wide_b, error = sampling.wide(a), sampling.wide(b), sampling.sums(dtype, n)
    half = np.tril(wide_a, -1) if lower else np.triu(wide_a, 1)
    middle = wide_a * np.eye(n)
    for kind, turn, diagonal in (("symm", "t", middle), ("hemm", "c", middle.real)):
        whole = half + _applied(half, turn) + diagonal
        product = whole @ wide_b if side == "left" else wide_b @ whole
        yield _sample(kind, (a, b), 0.5 * product, error, alpha=0.5, side=side, lower=lower)
        if batch_a or batch_b:
            c = sampling.random(rng, product.shape, dtype)
            options: dict[str, Any] = {"alpha": -2.0, "beta": 0.5, "side": side, "lower": lower}
            updated, terms = -2 * product + 0.5 * sampling.wide(c), float(np.abs(product).max(initial=0.0))
            yield _sample(kind, (a, b, c), updated, error, terms, names=("out",), **options)


def _batched_products(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    """Yield batches of symmetric and Hermitian matrices, and of products with themselves."""
    for batch_a, batch_b, side in itertools.product(((), (3,)), ((), (3,)), ("left", "right")):
        if batch_a or batch_b:
            yield from _symmetric(rng, dtype, 7, 5, lower=side == "left" or not batch_b, side=side, batch_a=batch_a, batch_b=batch_b)
    yield from _symmetric(rng, dtype, 5, 2, lower=True, side="right", batch_a=(0,), batch_b=(0,))
    for lower, is_turned in itertools.product((False, True), (False, True)):
        yield from _updates(rng, dtype, 9, 4, lower=lower, is_turned=is_turned, batch=(3,))
    yield from _updates(rng, dtype, 3, 2, lower=True, is_turned=False, batch=(0,))
    yield from _updates(rng, dtype, 3, 0, lower=True, is_turned=True, batch=(2,))
    # Rows that lie apart, of matrices that do too.
    stored = sampling.random(rng, (4, 6, 8), dtype)
    wide = sampling.wide(stored[::2, :, 1:6])
    for kind, turn in (("syrk", "t"), ("herk", "c")):
        yield Sample(
            f"{kind} of a batch of views {dtype.value}",
            partial(_of_views, kind),
            (stored,),
            np.tril(wide @ _applied(wide, turn)),
            sampling.sums(dtype, 5),
        )


def _of_views(kind: str, blas: Any, stored: Any) -> Any:
    return getattr(blas, kind)(stored[::2, :, 1:6], lower=True)


def _updates(
    rng: np.random.Generator, dtype: DType, n: int, k: int, *, lower: bool, is_turned: bool, batch: Shape = ()
) -> Iterator[Sample]:
    a = sampling.random(rng, (*batch, *((k, n) if is_turned else (n, k))), dtype)
    error = sampling.sums(dtype, max(k, 1))
    for kind, turn in (("syrk", "t"), ("herk", "c")):
        trans = turn if is_turned else "n"
        wide = _applied(sampling.wide(a), trans)
        product = wide @ _applied(wide, turn)
        triangle = np.tril(product) if lower else np.triu(product)
        yield _sample(kind, (a,), 2 * triangle, error, alpha=2.0, lower=lower, trans=trans)
        c = sampling.random(rng, (*batch, n, n), dtype)
        if kind == "herk":
            c = np.where(np.eye(n, dtype=bool), c.real, c).astype(dtype.numpy)
        kept = np.tri(n, dtype=bool) if lower else np.tri(n, dtype=bool).T
        updated = np.where(kept, product + 0.5 * sampling.wide(c), c)
        yield _sample(kind, (a, c), updated, error, names=("out",), beta=0.5, lower=lower, trans=trans)


def _sums(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    alpha, beta = (0.5 - 1j, 2j) if dtype.is_complex else (0.5, -2.0)
    for turn_a, turn_b in itertools.product("ntc", "ntc"):
        a = sampling.random(rng, (5, 3) if turn_a == "n" else (3, 5), dtype)
        b = sampling.random(rng, (5, 3) if turn_b == "n" else (3, 5), dtype)
        expected = alpha * _applied(sampling.wide(a), turn_a) + beta * _applied(sampling.wide(b), turn_b)
        options: dict[str, Any] = {"alpha": alpha, "beta": beta, "transpose_a": turn_a, "transpose_b": turn_b}
        yield _sample("geam", (a, b), expected, sampling.sums(dtype, 2), **options)
    a, b = sampling.random(rng, (33, 65), dtype), sampling.random(rng, (33, 65), dtype)
    yield Sample(f"geam in place {dtype.value}", lambda blas, a, b: blas.geam(a, b, out=a, beta=0.0), (a, b), sampling.wide(a), 0.0)
    nothing = np.zeros((0, 4), dtype.numpy)
    yield _sample("geam", (nothing, nothing), nothing, 0.0)


def _batched_sums(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    """Yield sums of batches: one longer matrix, a single matrix with few and with many others, and matrices one by one."""
    alpha, beta = (0.5 - 1j, 2j) if dtype.is_complex else (0.5, -2.0)
    forms = itertools.product((0, 3, 21), ("both", "a", "b"), (("n", "n"), ("t", "n"), ("n", "c"), ("c", "t")))
    for count, batched, (turn_a, turn_b) in forms:
        shape_a, shape_b = [(5, 3) if turn == "n" else (3, 5) for turn in (turn_a, turn_b)]
        a = sampling.random(rng, shape_a if batched == "b" else (count, *shape_a), dtype)
        b = sampling.random(rng, shape_b if batched == "a" else (count, *shape_b), dtype)
        terms = alpha * _applied(sampling.wide(a), turn_a), beta * _applied(sampling.wide(b), turn_b)
        expected, largest = terms[0] + terms[1], max(float(np.abs(term).max(initial=0.0)) for term in terms)
        options: dict[str, Any] = {"alpha": alpha, "beta": beta, "transpose_a": turn_a, "transpose_b": turn_b}
        yield _sample("geam", (a, b), expected, sampling.sums(dtype, 2), largest, **options)
        if (turn_a, turn_b) == ("n", "n") and batched == "a":
            yield Sample(
                f"geam of {count} in place {dtype.value}",
                partial(_into_first, {"alpha": alpha, "beta": beta}),
                (a, b),
                expected,
                sampling.sums(dtype, 2),
                largest,
            )
    a, b = sampling.random(rng, (20, 4, 6), dtype), np.full((4, 6), np.nan, dtype.numpy)
    yield _sample("geam", (a, b), sampling.wide(a), 0.0, beta=0.0)  # b is not read


def _into_first(options: dict[str, Any], blas: Any, a: Any, b: Any) -> Any:
    return blas.geam(a, b, out=a, **options)


def _outer(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    for m, n in ((1, 1), (5, 7), (0, 3), (65, 33)):
        x, y, c = sampling.random(rng, m, dtype), sampling.random(rng, n, dtype), sampling.random(rng, (m, n), dtype)
        wide_x, wide_y, error = sampling.wide(x), sampling.wide(y), sampling.sums(dtype, 2)
        yield _sample("ger", (x, y), -2 * np.outer(wide_x, wide_y), error, alpha=-2.0)
        expected = np.outer(wide_x, wide_y.conj()) + sampling.wide(c)
        terms = float(np.abs(c).astype(np.float64).max(initial=0.0))  # one element may be close to 0
        yield _sample("ger", (x, y, c), expected, error, terms, names=("out",), beta=1.0, conjugate=True)
