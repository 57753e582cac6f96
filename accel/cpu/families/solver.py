"""Factorizations of dense matrices by LAPACK, which scipy brings, and samples with known answers."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.kernels import LateModule, kernel
from accel.dtype import DType
from accel.enums import Transpose
from accel.family import BackendPart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel.cpu.views import Array
    from accel.family import Sample

__all__ = ["PART"]

# Multiply-adds of each algorithm, in cubes of a side.
_CUBES = {"eigh": 9, "eigvalsh": 3, "svd": 20, "svdvals": 6, "qr": 4, "pinv": 20, "lstsq": 20, "matrix_power": 8, "eig": 25, "eigvals": 10}
_TRANS = {Transpose.NONE: 0, Transpose.TRANSPOSE: 1, Transpose.CONJUGATE: 2}


_lapack = LateModule("scipy.linalg.lapack")


def _function(name: str, dtype: np.dtype[Any]) -> Callable[..., Any]:
    (function,) = _lapack().get_lapack_funcs((name,), dtype=dtype)
    found: Callable[..., Any] = function
    return found


def _cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    *stack, m, n = operands[0].shape
    return costs.matmul(m, n, _CUBES.get(op.kind, 1) * max(m, n), operands[0].dtype, math.prod(stack)) + _lapack.seconds(op.kind)


def _cholesky(op: Any, reads: list[Array], made: list[Array]) -> None:
    (a,), (factors, info) = reads, made
    factor = _function("potrf", a.dtype)
    info[...] = 0
    for at in np.ndindex(a.shape[:-2] if a.size else (0,)):
        factors[at], info[at] = factor(a[at], lower=not op.upper, clean=True)


def _cho_solve(op: Any, reads: list[Array], made: list[Array]) -> None:
    c, b = reads
    solve = _function("potrs", c.dtype)
    _solved(c, b, made[0], lambda at, sides: solve(c[at], sides, lower=not op.upper)[0])


def _cholesky_inverse(op: Any, reads: list[Array], made: list[Array]) -> None:
    (c,), (inverse,) = reads, made
    solve, unit = _function("potrs", c.dtype), np.eye(c.shape[-1], dtype=c.dtype)
    _solved(c, unit, inverse, lambda at, sides: solve(c[at], sides, lower=not op.upper)[0])


def _lu_factor(op: Any, reads: list[Array], made: list[Array]) -> None:
    (a,), (lu, piv, info) = reads, made
    factor = _function("getrf", a.dtype)
    info[...] = 0
    for at in np.ndindex(a.shape[:-2] if a.size else (0,)):
        lu[at], piv[at], info[at] = factor(a[at])


def _lu_solve(op: Any, reads: list[Array], made: list[Array]) -> None:
    (lu, piv, b), (x, status) = reads, made
    wrong = (piv < 0) | (piv >= lu.shape[-1])
    if wrong.any():
        status[:] = 1, piv[wrong][0]
        return
    solve, trans = _function("getrs", lu.dtype), _TRANS[op.transpose]
    _solved(lu, b, x, lambda at, sides: solve(lu[at], piv[at], sides, trans=trans)[0])


def _solve(op: Any, reads: list[Array], made: list[Array]) -> None:
    (a, b), (x, info) = reads, made
    solve = _function("gesv", a.dtype)
    info[...] = 0

    def solved(at: tuple[int, ...], sides: Array) -> Array:
        _, _, found, info[at] = solve(a[_source(at, a)], sides)
        return np.asarray(found)

    _solved(None, b, x, solved)


def _source(at: tuple[int, ...], a: Array) -> tuple[int, ...]:
    """Return the place in a stack that is broadcast of one in the result's."""
    lengths = a.shape[:-2]
    return tuple([i if length != 1 else 0 for i, length in zip(at[len(at) - len(lengths) :], lengths, strict=True)])


def _solved(a: Array | None, b: Array, x: Array, solve: Callable[[tuple[int, ...], Array], Array]) -> None:
    """Write solutions for right-hand sides, which are broadcast; ``solve`` is given the place of the matrix in ``a``, or in the result's stack."""
    if not x.size:
        return
    is_vector = b.ndim == 1
    stack = x.shape[:-1] if is_vector else x.shape[:-2]
    for at in np.ndindex(stack):
        sides = b[:, None] if is_vector else b[_source(at, b)]
        found = solve(at if a is None else _source(at, a), sides)
        x[at] = found[:, 0] if is_vector else found


def _inv(op: Any, reads: list[Array], made: list[Array]) -> None:
    (a,), (inverse, info) = reads, made
    solve, unit = _function("gesv", a.dtype), np.eye(a.shape[-1], dtype=a.dtype)
    info[...] = 0
    for at in np.ndindex(a.shape[:-2] if a.size else (0,)):
        _, _, inverse[at], info[at] = solve(a[at], unit)


def _det(op: Any, reads: list[Array], made: list[Array]) -> None:
    made[0][...] = np.linalg.det(reads[0])


def _slogdet(op: Any, reads: list[Array], made: list[Array]) -> None:
    made[0][...], made[1][...] = np.linalg.slogdet(reads[0])


def _qr(op: Any, reads: list[Array], made: list[Array]) -> None:
    made[0][...], made[1][...] = np.linalg.qr(reads[0], op.mode)


def _finite(matrices: Sequence[Array], info: Array, made: Sequence[Array]) -> Iterator[tuple[int, ...]]:
    """Yield the places of matrices with finite elements. LAPACK's iterations may not end for others: their results are NaN, and their info is -1."""
    info[...] = 0
    for at in np.ndindex(info.shape if matrices[0].size else (0,)):
        if all(np.isfinite(each[_source(at, each)]).all() for each in matrices):
            yield at
            continue
        info[at] = -1
        for each in made:
            each[at] = np.nan


def _eigh(op: Any, reads: list[Array], made: list[Array]) -> None:
    (a, *b), (*found, info) = reads, made
    name = f"{'he' if a.dtype.kind == 'c' else 'sy'}{'gvd' if b else 'evd'}"
    solve = _function(name, a.dtype)
    options = {"uplo": "U" if op.upper else "L"} if b else {"compute_v": len(found) == 2, "lower": not op.upper}
    part = np.triu if op.upper else np.tril  # nothing else is read
    for at in _finite([part(each) for each in reads], info, found):
        *values, info[at] = solve(a[at], *[each[at] for each in b], **options)
        for result, value in zip(found, values, strict=False):
            result[at] = value


def _svd(op: Any, reads: list[Array], made: list[Array]) -> None:
    (a,), (*found, info) = reads, made
    is_full = op.kind == "svd" and bool(op.full_matrices)
    if not a.size:
        info[...] = 0
        for vectors in found[::2] if len(found) == 3 else ():
            vectors[...] = np.eye(*vectors.shape[-2:], dtype=vectors.dtype)
        return
    solve = _function("gesdd", a.dtype)
    for at in _finite(reads, info, found):
        u, s, vh, info[at] = solve(a[at], compute_uv=len(found) == 3, full_matrices=is_full)
        for result, value in zip(found, (u, s, vh) if len(found) == 3 else (s,), strict=True):
            result[at] = value


def _nonzero(s: Array, rtol: float | None, longest: int) -> Array:
    """Return which singular values of a matrix count."""
    least = (longest * np.finfo(s.dtype).eps if rtol is None else rtol) * s.max(initial=0.0)
    return np.asarray(s > least)


def _pinv(op: Any, reads: list[Array], made: list[Array]) -> None:
    (a,), (inverse, info) = reads, made
    solve = _function("gesdd", a.dtype)
    for at in _finite(reads, info, [inverse]):
        u, s, vh, info[at] = solve(a[at], full_matrices=False)
        counts = _nonzero(s, op.rtol, max(a.shape[-2:]))
        inverse[at] = (_turned(vh[counts]) / s[counts]) @ _turned(u[:, counts])


def _lstsq(op: Any, reads: list[Array], made: list[Array]) -> None:
    (a, b), (x, residuals, rank, values, info) = reads, made
    solve, is_vector = _function("gesdd", a.dtype), b.ndim == 1
    x[...], values[...], rank[...] = 0, 0, 0
    if not a.size:
        info[...] = 0
        residuals[...] = (np.abs(b) ** 2).sum(axis=0 if is_vector else -2)
    for at in _finite([a], info, [x, residuals, values]):
        matrix, sides = a[_source(at, a)], b if is_vector else b[_source(at, b)]
        u, values[at], vh, info[at] = solve(matrix, full_matrices=False)
        counts = _nonzero(values[at], op.rcond, max(a.shape[-2:]))
        rank[at] = counts.sum()
        inner = _turned(u[:, counts]) @ sides
        x[at] = _turned(vh[counts]) @ (inner / values[at][counts][(...,) + (None,) * (not is_vector)])
        residuals[at] = (np.abs(sides - matrix @ x[at]) ** 2).sum(axis=0)


def _matrix_power(op: Any, reads: list[Array], made: list[Array]) -> None:
    (a,), (power, info) = reads, made
    inverse = a
    info[...] = 0
    if op.n < 0:
        inverse = np.empty_like(a)
        _inv(op, [a], [inverse, info])
    power[...] = np.linalg.matrix_power(inverse, abs(op.n))


def _eig(op: Any, reads: list[Array], made: list[Array]) -> None:
    (a,), (w, *v, info) = reads, made
    solve = _function("geev", a.dtype)
    for at in _finite(reads, info, [w, *v]):
        *found, _, vectors, info[at] = solve(a[at], compute_vl=False, compute_vr=bool(v))
        w[at] = found[0] if len(found) == 1 else found[0] + 1j * found[1]
        if v:
            v[0][at] = vectors if len(found) == 1 else _paired(vectors, found[1])


def _paired(vectors: Array, imaginary: Array) -> Array:
    """Return complex eigenvectors of a real matrix: LAPACK gives real and imaginary parts of each pair as two columns."""
    made = vectors.astype(np.result_type(vectors, np.complex64))
    first = np.flatnonzero(imaginary > 0)
    made[:, first] += 1j * vectors[:, first + 1]
    made[:, first + 1] = made[:, first].conj()
    return made


# -- samples: matrices that are made of what is to be found


def _unitary(rng: np.random.Generator, n: int, wide: np.dtype[Any], stack: tuple[int, ...] = ()) -> Array:
    """Return random unitary matrices in the precision of ``wide``."""
    x = rng.standard_normal((*stack, n, n))
    if wide.kind == "c":
        x = x + 1j * rng.standard_normal((*stack, n, n))
    q = np.linalg.qr(x)[0].astype(wide)
    for _ in range(2):  # numpy's is unitary in double precision
        q = 1.5 * q - 0.5 * (q @ (_turned(q) @ q))
    return q


def _turned(x: Array) -> Array:
    return x.conj().swapaxes(-1, -2)


_Shape = tuple[int, ...]
_STACKS: tuple[tuple[_Shape, int], ...] = (((), 1), ((), 9), ((3,), 4), ((2, 1), 33), ((2,), 0), ((0,), 3))


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype in (DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128):
        for stack, n in _STACKS:
            yield from _of_square(rng, dtype, stack, n)
            yield from _of_factors(rng, dtype, stack, n, n)
        for stack, m, n in (((), 5, 3), ((2,), 3, 8), ((), 40, 40), ((), 4, 0)):
            yield from _of_any(rng, dtype, stack, m, n)
            yield from _of_factors(rng, dtype, stack, m, n)


def _half(a: Array, upper: bool) -> Array:
    """Return matrices of which nothing but one triangle is there to be read."""
    rows, columns = np.indices(a.shape[-2:])
    return np.where(rows <= columns if upper else rows >= columns, a, a.dtype.type(np.nan))


def _of_square(rng: np.random.Generator, dtype: DType, stack: _Shape, n: int) -> Iterator[Sample]:
    name = f"{dtype.value}{[*stack, n, n]}"
    wide = sampling.wide(np.empty(0, dtype.numpy)).dtype
    real, error = np.empty(0, wide).real.dtype, sampling.sums(dtype, n)
    values = np.sort(rng.uniform(1, 3, (*stack, n)), axis=-1).astype(real)
    q = _unitary(rng, n, wide, stack)
    definite, general = (q * values[..., None, :]) @ _turned(q), q * values[..., None, :]
    a, h = general.astype(dtype.numpy), definite.astype(dtype.numpy)
    # What was rounded is what is solved.
    inverse = (_turned(q) / values[..., :, None]) if n else general
    b = sampling.wide(sampling.random(rng, (*stack, n, 2), dtype))
    vector = sampling.wide(sampling.random(rng, (n,), dtype))
    lower = np.tril(sampling.wide(sampling.random(rng, (*stack, n, n), dtype)), -1) / max(n, 1) + np.eye(n) * (1 + rng.random())
    product = (lower @ _turned(lower)).astype(dtype.numpy)
    unit = np.broadcast_to(np.eye(n), definite.shape).astype(wide)
    inverted = np.linalg.inv((lower @ _turned(lower)).astype(np.result_type(dtype.numpy, np.float64)))
    for upper in (False, True):
        what, one = f"{name} upper={upper}", _half(h, upper)
        factor = _turned(lower) if upper else lower
        rounded = factor.astype(dtype.numpy)
        yield sampling.sample("cholesky", what, (_half(product, upper),), factor, 4 * error, upper=upper)
        sides = (lower @ (_turned(lower) @ b)).astype(dtype.numpy)
        yield sampling.sample("cho_solve", what, (rounded, sides), b, 8 * error, upper=upper)
        yield sampling.sample("cholesky_inverse", what, (rounded,), inverted, 8 * error, upper=upper)
        yield sampling.sample("eigvalsh", what, (one,), values, 2 * error, upper=upper)
        yield sampling.sample("eigh", what, (one,), (values, definite, unit), 4 * error, seen=_of_eigenvectors, upper=upper)
    other = _turned(lower) if n else lower  # b = lower @ lower^H, a = lower @ h @ lower^H
    pencil = (lower @ definite @ other).astype(dtype.numpy), (lower @ other).astype(dtype.numpy)
    whole = tuple([sampling.wide(each) for each in pencil])
    seen_by = partial(_of_pencil, whole[1])
    for upper in (False, True):
        halves = _half(pencil[0], upper), _half(pencil[1], upper)
        what, expected = f"{name} of two upper={upper}", (values, whole[0], unit)
        yield sampling.sample("eigh", what, halves, expected, 16 * error, seen=seen_by, upper=upper)
    for power, raised in ((3, general @ general @ general), (0, unit), (-2, inverse @ inverse)):
        yield sampling.sample("matrix_power", f"{name} {power}", (a,), raised, 16 * error, n=power)
    yield from _of_normal(rng, dtype, stack, n)
    yield sampling.sample("solve", name, (a, (general @ b).astype(dtype.numpy)), b, 4 * error)
    if stack:
        yield sampling.sample("solve", f"{name} of a vector", (a, vector.astype(dtype.numpy)), inverse @ vector, 4 * error)
    yield sampling.sample("inv", name, (a,), inverse, 4 * error)


def _of_normal(rng: np.random.Generator, dtype: DType, stack: _Shape, n: int) -> Iterator[Sample]:
    """Yield samples of normal matrices, whose eigenvectors are orthogonal; the eigenvalues of real ones are pairs, and one real number if n is odd."""
    name, wide = f"{dtype.value}{[*stack, n, n]}", sampling.wide(np.empty(0, dtype.numpy)).dtype
    q, blocks = _unitary(rng, n, wide, stack), np.zeros((*stack, n, n), wide)
    w = np.zeros((*stack, n), sampling.wide(np.empty(0, np.result_type(dtype.numpy, np.complex64))).dtype)
    for k in range(0, n, 2):
        real, imaginary = 1 + k + rng.uniform(-0.5, 0.5, stack), rng.uniform(1, 2, stack)
        w[..., k] = real - 1j * imaginary
        blocks[..., k, k] = real if n == k + 1 or not dtype.is_complex else w[..., k]
        if n == k + 1:
            w[..., k] = real
            continue
        w[..., k + 1] = real + 1j * imaginary
        blocks[..., k + 1, k + 1] = blocks[..., k, k].conj() if dtype.is_complex else real
        if not dtype.is_complex:
            blocks[..., k, k + 1], blocks[..., k + 1, k] = imaginary, -imaginary
    exact = q @ blocks @ _turned(q)
    error = 4 * sampling.sums(dtype, n)
    a = exact.astype(dtype.numpy)
    yield sampling.sample("eigvals", name, (a,), (w,), error, seen=_in_order)
    yield sampling.sample("eig", name, (a,), (w, exact.astype(w.dtype)), error, seen=_of_vectors)


def _in_order(w: Array) -> tuple[Array, ...]:
    """Return eigenvalues by the even number that their real part is next to, and then by their imaginary part."""
    return (np.take_along_axis(w, np.lexsort((w.imag, np.round((w.real - 1) / 2)), axis=-1), -1),)


def _of_vectors(w: Array, v: Array) -> tuple[Array, ...]:
    return *_in_order(w), (v * w[..., None, :]) @ _turned(v)


def _of_pencil(b: Array, w: Array, v: Array) -> tuple[Array, ...]:
    turned = b.astype(v.dtype) @ v
    return w, (turned * w[..., None, :]) @ _turned(turned), _turned(v) @ turned


def _of_factors(rng: np.random.Generator, dtype: DType, stack: _Shape, m: int, n: int) -> Iterator[Sample]:
    """Yield samples of matrices that are made of their factors. Elements below the diagonal of l are far from 1: rounding does not decide what is a pivot."""
    name, k, error = f"{dtype.value}{[*stack, m, n]}", min(m, n), sampling.sums(dtype, max(m, n))
    wide = sampling.wide(sampling.random(rng, (*stack, m, n), dtype))
    lu = np.clip(wide.real, -2, 2) / (4 * math.sqrt(max(m, n, 1))) + (
        1j * np.clip(wide.imag, -2, 2) / (8 * math.sqrt(max(m, n, 1))) if dtype.is_complex else 0
    )
    lu = lu.astype(wide.dtype)
    diagonal = rng.uniform(1, 2, (*stack, k)) * rng.choice((-1, 1), (*stack, k))
    lu[..., range(k), range(k)] = diagonal
    piv = rng.integers(np.arange(k), m, (*stack, k)).astype(np.int32) if k else np.empty((*stack, 0), np.int32)
    exact = (np.tril(lu[..., :k], -1) + np.eye(m, k)) @ np.triu(lu[..., :k, :])
    for at in np.ndindex(*stack):
        for row in reversed(range(k)):
            exact[at][[row, piv[at][row]]] = exact[at][[piv[at][row], row]]
    a = exact.astype(dtype.numpy)
    yield sampling.sample("lu_factor", name, (a,), (lu, piv), error)
    if m != n:
        return
    sign = np.asarray(np.sign(diagonal).prod(axis=-1) * (-1.0) ** (piv != np.arange(n)).sum(axis=-1), wide.dtype)
    log = np.asarray(np.log(np.abs(diagonal)).sum(axis=-1))
    yield sampling.sample("det", name, (a,), np.asarray(sign * np.exp(log)), error)
    yield sampling.sample("slogdet", name, (a,), (sign, log), error, terms=1.0)
    x = sampling.wide(sampling.random(rng, (*stack, n, 3), dtype))
    for transpose, turned in (("n", exact), ("t", exact.swapaxes(-1, -2)), ("c", _turned(exact))):
        refs = (lu.astype(dtype.numpy), piv, (turned @ x).astype(dtype.numpy))
        yield sampling.sample("lu_solve", f"{name} {transpose}", refs, x, 4 * error, transpose=transpose)


def _of_any(rng: np.random.Generator, dtype: DType, stack: _Shape, m: int, n: int) -> Iterator[Sample]:
    name, k = f"{dtype.value}{[*stack, m, n]}", min(m, n)
    wide = sampling.wide(np.empty(0, dtype.numpy)).dtype
    error = sampling.sums(dtype, max(m, n))
    values = -np.sort(-rng.uniform(1, 3, (*stack, k)), axis=-1).astype(np.empty(0, wide).real.dtype)
    left, right = _unitary(rng, m, wide, stack)[..., :k], _unitary(rng, n, wide, stack)[..., :k, :]
    exact = (left * values[..., None, :]) @ right
    a = exact.astype(dtype.numpy)
    yield sampling.sample("svdvals", name, (a,), values, error)
    yield from _of_least_squares(rng, dtype, left, values, right)
    for full in (False, True):
        rows, columns = (m, n) if full else (k, k)
        units = [np.broadcast_to(np.eye(each), (*stack, each, each)).astype(wide) for each in (rows, columns)]
        expected, seen = (values, exact, *units), _of_singular_vectors
        yield sampling.sample("svd", f"{name} full={full}", (a,), expected, 4 * error, seen=seen, full_matrices=full)
        mode = "complete" if full else "reduced"
        parts = exact, units[0], np.zeros((*stack, rows, n), wide)
        yield sampling.sample("qr", f"{name} {mode}", (a,), parts, error, 1.0, seen=_of_columns, mode=mode)


def _of_least_squares(rng: np.random.Generator, dtype: DType, left: Array, values: Array, right: Array) -> Iterator[Sample]:
    """Yield samples of what is not in the range of a matrix, which has full rank, or lacks one."""
    *stack, m, k = left.shape
    n = right.shape[-1]
    error = 4 * sampling.sums(dtype, max(m, n))
    for lacks in range(min(k, 2)):
        s = values * (np.arange(k) < k - lacks)
        exact = (left * s[..., None, :]) @ right
        inverse = (_turned(right) * np.divide(1, s, where=s > 0, out=np.zeros_like(s))[..., None, :]) @ _turned(left)
        a, name, least = exact.astype(dtype.numpy), f"{dtype.value}{[*stack, m, n]} rank {k - lacks}", 1e-3 if lacks else None
        yield sampling.sample("pinv", name, (a,), inverse, error, rtol=least)
        b = sampling.wide(sampling.random(rng, (*stack, m, 3), dtype))
        x = inverse @ b
        residuals, rank = (np.abs(b - exact @ x) ** 2).sum(axis=-2), np.full(stack, k - lacks, np.int64)
        terms = float((np.abs(b) ** 2).sum(axis=-2).max())
        yield sampling.sample("lstsq", name, (a, b.astype(dtype.numpy)), (x, residuals, rank, s), error, terms, rcond=least)


def _of_eigenvectors(w: Array, v: Array) -> tuple[Array, ...]:
    return w, (v * w[..., None, :]) @ _turned(v), _turned(v) @ v


def _of_singular_vectors(u: Array, s: Array, vh: Array) -> tuple[Array, ...]:
    k = s.shape[-1]
    return s, (u[..., :k] * s[..., None, :]) @ vh[..., :k, :], _turned(u) @ u, vh @ _turned(vh)


def _of_columns(q: Array, r: Array) -> tuple[Array, ...]:
    return q @ r, _turned(q) @ q, np.tril(r, -1)


_COMPUTED = {
    "cholesky": _cholesky,
    "cho_solve": _cho_solve,
    "cholesky_inverse": _cholesky_inverse,
    "lu_factor": _lu_factor,
    "lu_solve": _lu_solve,
    "solve": _solve,
    "inv": _inv,
    "det": _det,
    "slogdet": _slogdet,
    "qr": _qr,
    "eigh": _eigh,
    "eigvalsh": _eigh,
    "svd": _svd,
    "svdvals": _svd,
    "pinv": _pinv,
    "lstsq": _lstsq,
    "matrix_power": _matrix_power,
    "eig": _eig,
    "eigvals": _eig,
}

PART = BackendPart({kind: kernel(compute, _cost) for kind, compute in _COMPUTED.items()}, wheels=("scipy",), samples=_samples)
