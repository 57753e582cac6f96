"""What ops make of NaN and infinity: one table of calls with numpy's (or scipy's) results, for every backend."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.special

import accel

__all__ = ["FAMILIES", "SOLVERS", "Case", "cases", "wrong"]

Array = np.ndarray[Any, Any]

VALUES = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
SECONDS = 30.0
"""An op that takes longer hangs."""


@dataclass(frozen=True, eq=False)
class Case:
    """A call with elements that are not finite.

    Parameters
    ----------
    name
        For messages.
    call
        ``await call(device, *refs)``: a ref, or several.
    inputs
        What is put on the device.
    reference
        Of the inputs: the results by numpy, or an exception that it raises, :class:`numpy.linalg.LinAlgError` or ``ValueError``.
    is_exact
        Whether each element is as in the reference: NaN, the same infinity, or a number close to it. Otherwise (factorizations: it depends on the order of
        operations) an element is not finite where the reference's is not, and elsewhere close to it, or NaN. An error in place of what
        is not finite will do.
    """

    name: str
    call: Callable[..., Awaitable[Any]]
    inputs: tuple[Array, ...]
    reference: Callable[..., Any]
    is_exact: bool = True


async def wrong(device: accel.Device, case: Case) -> str:
    """Return what is wrong with the result of a case, or nothing. A device that does not answer within :data:`SECONDS` fails the case."""
    with np.errstate(all="ignore"):
        try:
            expected = _several(case.reference(*case.inputs))
        except (np.linalg.LinAlgError, ValueError) as error:
            expected = error
    refs = [await device.put(array) for array in case.inputs]
    try:
        made = _several(await case.call(device, *refs))
    except accel.DeadlineExceededError:
        return f"{case.name}: no answer within {SECONDS} s"
    except accel.BackendUnavailableError:
        return ""  # an optional library of the vendor's is not installed
    except accel.AccelError as error:
        kind = np.linalg.LinAlgError if isinstance(expected, np.linalg.LinAlgError) else ValueError
        if isinstance(expected, Exception):
            return "" if isinstance(error, kind) else f"{case.name}: {error!r} instead of {expected!r}"
        may_raise = not case.is_exact and isinstance(error, np.linalg.LinAlgError) and any(not np.isfinite(each).all() for each in expected)
        return "" if may_raise else f"{case.name}: {error!r} instead of {expected!r:.400}"
    found = [each if isinstance(each, (int, float)) else await device.get(each) for each in made]
    if isinstance(expected, Exception):
        return f"{case.name}: {found!r:.400} instead of {expected!r}"
    for each, wanted in zip(found, expected, strict=True):
        if not _agree(np.asarray(each), np.asarray(wanted), case.is_exact):
            return f"{case.name} of {case.inputs!r:.600}: {each!r:.400} instead of {wanted!r:.400}"
    return ""


def _several(made: Any) -> Any:
    return made if isinstance(made, (tuple, list)) else (made,)


def _agree(found: Array, wanted: Array, is_exact: bool) -> bool:
    if found.shape != wanted.shape:
        return False
    if found.dtype.kind in "biu":
        return bool((found == wanted).all())
    with np.errstate(all="ignore"):
        coarse = found.dtype.itemsize == 2 or found.dtype in (np.float32, np.complex64)
        error = (2e-2 if found.dtype.itemsize == 2 else 2e-4) if coarse else 1e-8
        close = np.isclose(_wide(found), _wide(wanted), rtol=error, atol=error)
        if is_exact:
            same = _kinds(found.real) == _kinds(wanted.real)
            if found.dtype.kind == "c":  # an infinity of a complex number may come with NaN as its other part
                same = np.isfinite(found) == np.isfinite(wanted)
            return bool((same & (close | ~np.isfinite(_wide(wanted)))).all())
        return bool(np.where(np.isfinite(_wide(wanted)), close | np.isnan(_wide(found)), ~np.isfinite(_wide(found))).all())


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _kinds(array: Array) -> Array:
    """Return 0 for numbers, 2 for NaN, 1 and -1 for the infinities."""
    array = array.astype(np.float64)
    return np.where(np.isnan(array), 2, np.where(np.isinf(array), np.sign(array), 0))


def cases(kind: str, rng: np.random.Generator) -> Iterator[Case]:
    """Yield the cases of an entry of :data:`SOLVERS` or :data:`FAMILIES`."""
    yield from _solver_cases(kind, rng) if kind in SOLVERS else FAMILIES[kind](rng)


# -- solvers: an element, a row, or all of a matrix

_Reference = Callable[..., Any]


def _factored(a: Array, b: Array) -> Array:
    return np.asarray(scipy.linalg.lu_solve(scipy.linalg.lu_factor(a, check_finite=False), b, check_finite=False))


async def _by_lu(device: accel.Device, a: Any, b: Any) -> Any:
    lu, piv = await device.solver.lu_factor(a, timeout=SECONDS)
    return await device.solver.lu_solve(lu, piv, b, timeout=SECONDS)


async def _by_cholesky(device: accel.Device, a: Any, b: Any) -> Any:
    return await device.solver.cho_solve(a, b, timeout=SECONDS)


def _solved_by(c: Array, b: Array) -> Array:
    return np.asarray(scipy.linalg.cho_solve((c, True), b, check_finite=False))


def _op(kind: str, *given: Any) -> Callable[..., Awaitable[Any]]:
    async def call(device: accel.Device, *refs: Any) -> Any:
        method = getattr(device.solver, kind)
        return await method(*refs, *given, timeout=SECONDS)

    return call


def _iteration(reference: _Reference) -> _Reference:
    """Of an iteration. numpy raises for most matrices that are not finite, and for others, ``svd`` of infinities, it never returns."""

    def checked(a: Array, *more: Array) -> Any:
        if not np.isfinite(a).all():
            raise np.linalg.LinAlgError("elements are not finite")
        return reference(a, *more)

    return checked


def _definite(reference: _Reference) -> _Reference:
    """Of one triangle, which is all that is read."""
    checked = _iteration(reference)
    return lambda a: checked(np.tril(a) + np.tril(a, -1).swapaxes(-1, -2).conj())


def _lu(a: Array) -> tuple[Array, Array]:
    lu, piv = scipy.linalg.lu_factor(a, check_finite=False)
    return np.asarray(lu), np.asarray(piv)


async def _lu_only(device: accel.Device, a: Any) -> Any:
    return (await device.solver.lu_factor(a, timeout=SECONDS))[0]


SOLVERS: dict[str, tuple[Callable[..., Awaitable[Any]], _Reference, int]] = {
    "solve": (_op("solve"), np.linalg.solve, 2),
    "inv": (_op("inv"), np.linalg.inv, 1),
    "det": (_op("det"), np.linalg.det, 1),
    "slogdet": (_op("slogdet"), np.linalg.slogdet, 1),
    "qr": (_op("qr"), np.linalg.qr, 1),
    "qr complete": (_op("qr", "complete"), partial(np.linalg.qr, mode="complete"), 1),
    "cholesky": (_op("cholesky"), np.linalg.cholesky, 1),
    "cho_solve": (_by_cholesky, _solved_by, 2),
    "lu_factor": (_lu_only, lambda a: _lu(a)[0], 1),
    "lu_solve": (_by_lu, _factored, 2),
    "eigh": (_op("eigh"), _definite(np.linalg.eigh), 1),
    "eigvalsh": (_op("eigvalsh"), _definite(np.linalg.eigvalsh), 1),
    "eig": (_op("eig"), _iteration(np.linalg.eig), 1),
    "eigvals": (_op("eigvals"), _iteration(np.linalg.eigvals), 1),
    "svd": (_op("svd"), _iteration(np.linalg.svd), 1),
    "svdvals": (_op("svdvals"), _iteration(partial(np.linalg.svd, compute_uv=False)), 1),
    "pinv": (_op("pinv"), _iteration(np.linalg.pinv), 1),
    "lstsq": (_op("lstsq"), _iteration(lambda a, b: np.linalg.lstsq(a, b, rcond=None)), 2),
    "matrix_power 3": (_op("matrix_power", 3), partial(np.linalg.matrix_power, n=3), 1),
    "matrix_power -2": (_op("matrix_power", -2), partial(np.linalg.matrix_power, n=-2), 1),
}
"""Name -> the call, numpy's function, and how many operands it takes."""

_PLACES: dict[str, Any] = {"first": (0, 0), "inside": (-1, 0), "last": (-1, -1), "row": (-1,), "column": (slice(None), 0), "all": ()}


def _solver_cases(kind: str, rng: np.random.Generator) -> Iterator[Case]:
    call, reference, count = SOLVERS[kind]
    for dtype in ("float64", "float32", "complex128"):
        for n in (1, 2, 5, 40):
            for word, value in VALUES.items():
                for place, index in _PLACES.items():
                    a = rng.standard_normal((n, n)) + n * np.eye(n)
                    a[index] = value
                    b = rng.standard_normal((n, 2))
                    inputs = tuple([each.astype(dtype) for each in (a, b)[:count]])
                    yield Case(f"{kind} {dtype} {n} {word} {place}", call, inputs, reference, is_exact=False)
        # The other matrices of a stack are as they are without it; a right-hand side has columns of its own.
        stack = rng.standard_normal((3, 4, 4)) + 4 * np.eye(4)
        stack[1, 2, 1] = np.nan
        sides = rng.standard_normal((3, 4, 2))
        if kind not in ("cho_solve", "lu_solve", "lu_factor", "lstsq"):  # of which the reference takes single matrices
            inputs = tuple([each.astype(dtype) for each in (stack, sides)[:count]])
            yield Case(f"{kind} {dtype} of a stack", call, inputs, reference, is_exact=False)
        if count == 2 and kind != "lstsq":
            a, b = np.eye(4) + np.tri(4) / 8, rng.standard_normal((4, 2))
            b[1, 1] = np.inf
            yield Case(f"{kind} {dtype} of b", call, (a.astype(dtype), b.astype(dtype)), reference, is_exact=False)
    zeros = np.zeros((2, 2))
    zeros[1] = np.inf
    if count == 1:
        yield Case(f"{kind} of [[0, 0], [inf, inf]]", call, (zeros,), reference, is_exact=False)


# -- what else computes


def _strewn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32", share: float = 0.2) -> Iterator[tuple[str, Array]]:
    """Yield arrays of numbers: with one kind of element that is not finite, with all of them, and of nothing else."""
    for word, values in (*((word, [value]) for word, value in VALUES.items()), ("mixed", list(VALUES.values()))):
        for part in (share, 1.0):
            x = rng.permutation(np.arange(1.0, np.prod(shape) + 1)).reshape(shape) / 4  # no number is there twice
            there = rng.random(shape) < part
            there.flat[0] = True
            yield f"{dtype}{list(shape)} {word} {part}", np.where(there, rng.choice(values, shape), x).astype(_numpy(dtype))


def _numpy(dtype: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def _bound(family: str, method: str, *given: Any, **options: Any) -> Callable[..., Awaitable[Any]]:
    async def call(device: accel.Device, *refs: Any) -> Any:
        namespace = getattr(device, family)
        return await (getattr(namespace, method) if method else namespace)(*given, *refs, timeout=SECONDS, **options)

    return call


async def _bincount(device: accel.Device, places: Any, weights: Any) -> Any:
    return await device.sort.bincount(places, 5, weights, timeout=SECONDS)


def _counts(x: Array) -> Array:
    return np.histogram(x[np.isfinite(x)], 4, (0.0, 8.0))[0]


def _sorts(rng: np.random.Generator) -> Iterator[Case]:
    def largest(x: Array) -> Array:
        return np.sort(x, axis=-1)[..., ::-1][..., :3]

    async def topk(device: accel.Device, x: Any, largest: bool) -> Any:
        return (await device.sort.topk(x, 3, largest=largest, timeout=SECONDS))[0]

    for dtype in ("float16", "float32", "float64"):
        for shape in ((3, 7), (2, 300)):
            for name, x in _strewn(rng, shape, dtype):
                yield Case(f"sort {name}", _bound("sort", "sort"), (x,), partial(np.sort, axis=-1))
                descending = _bound("sort", "sort", descending=True)
                yield Case(f"sort descending {name}", descending, (x,), lambda x: np.sort(x, axis=-1)[..., ::-1])
                yield Case(f"argsort {name}", _bound("sort", "argsort"), (x,), partial(np.argsort, axis=-1, kind="stable"))
                yield Case(f"topk {name}", partial(topk, largest=True), (x,), largest)
                yield Case(f"topk least {name}", partial(topk, largest=False), (x,), lambda x: np.sort(x, axis=-1)[..., :3])
                yield Case(f"unique {name}", _bound("sort", "unique"), (x,), np.unique)
                flat = np.sort(x.ravel())
                yield Case(f"searchsorted {name}", _bound("sort", "searchsorted"), (flat, x.ravel()), np.searchsorted)
                right = _bound("sort", "searchsorted", side="right")
                yield Case(f"searchsorted right {name}", right, (flat, x.ravel()), partial(np.searchsorted, side="right"))
                yield Case(f"nonzero {name}", _bound("sort", "nonzero"), (x,), np.nonzero)
    for name, x in _strewn(rng, (50,)):
        yield Case(f"histogram {name}", _bound("sort", "histogram", bins=4, range=(0.0, 8.0)), (x,), _counts)
        places = rng.integers(0, 5, 50)
        yield Case(f"bincount {name}", _bincount, (places, x), partial(np.bincount, minlength=5))


def _scans(rng: np.random.Generator) -> Iterator[Case]:
    functions: dict[str, _Reference] = {
        "cumsum": np.cumsum,
        "cumprod": np.cumprod,
        "cummax": np.maximum.accumulate,
        "cummin": np.minimum.accumulate,
    }
    for kind, function in functions.items():
        for shape in ((3, 9), (2, 700)):
            for name, x in _strewn(rng, shape, "float64", 0.01):
                yield Case(f"{kind} {name}", _bound("scan", kind), (x,), partial(function, axis=-1))


def _logsumexp(x: Array, axis: int | None) -> Array:
    return np.asarray(scipy.special.logsumexp(x, axis=axis))


def _reductions(rng: np.random.Generator) -> Iterator[Case]:
    functions: dict[str, _Reference] = {
        **{kind: getattr(np, kind) for kind in ("sum", "prod", "mean", "max", "min", "var", "std", "any", "all", "argmax", "argmin")},
        "logsumexp": _logsumexp,
    }
    for kind, function in functions.items():
        for dtype in ("float32", "float64"):
            for shape in ((4, 7), (300, 3), (2, 1000)):
                for name, x in _strewn(rng, shape, dtype, 0.1):
                    for axis in (0, 1, None):
                        if kind == "prod" and x.size > 400:
                            continue  # overflows without an infinity
                        yield Case(f"{kind} {name} axis={axis}", _bound("reduce", "", kind, axis=axis), (x,), partial(function, axis=axis))


def _norms(rng: np.random.Generator) -> Iterator[Case]:
    for shape in ((7,), (2000,)):
        for dtype in ("float32", "float64"):
            for name, x in _strewn(rng, shape, dtype, 0.01):
                # Of infinities and NaN together, BLAS may give either.
                yield Case(f"nrm2 {name}", _bound("blas", "nrm2"), (x,), np.linalg.norm, is_exact="mixed" not in name)
                yield Case(f"asum {name}", _bound("blas", "asum"), (x,), lambda x: np.abs(x).sum())
        for scale in (1e30, 1e-30):
            x = np.full(shape, scale, np.float32)
            yield Case(f"nrm2 of {scale}", _bound("blas", "nrm2"), (x,), lambda x: np.float32(np.linalg.norm(x.astype(np.float64))))
    for name, x in _strewn(rng, (4, 6), "float32", 0.1):
        yield Case(
            f"layer_norm {name}",
            _bound("dnn", "layer_norm", normalized_shape=6),
            (x,),
            lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5),
        )
        yield Case(
            f"rms_norm {name}",
            _bound("dnn", "rms_norm", normalized_shape=6, eps=1e-5),
            (x,),
            lambda x: x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5),
            is_exact=False,
        )


def _softmaxes(rng: np.random.Generator) -> Iterator[Case]:
    def softmax(x: Array) -> Array:
        wide = x.astype(np.float64)
        e = np.exp(wide - wide.max(-1, keepdims=True))
        return np.asarray(e / e.sum(-1, keepdims=True))

    def log_softmax(x: Array) -> Array:
        wide = x.astype(np.float64)
        wide = wide - wide.max(-1, keepdims=True)
        return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))

    for dtype in ("float16", "bfloat16", "float32"):
        for shape in ((5, 6), (2, 3000)):
            for name, x in _strewn(rng, shape, dtype, 0.1):
                x = x / _numpy(dtype).type(x.shape[-1] / 8)
                yield Case(f"softmax {name}", _bound("dnn", "softmax"), (x,), softmax)
                yield Case(f"log_softmax {name}", _bound("dnn", "log_softmax"), (x,), log_softmax)


def _attended(q: Array, k: Array, v: Array, bias: Array | None = None) -> Array:
    """Return attention; a query whose keys are all hidden by a bias of -infinity has 0."""
    scores = (q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)) / np.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias.astype(np.float64)
    most = scores.max(-1, keepdims=True)
    e = np.exp(scores - np.where(most == -np.inf, 0, most))
    made = (e / e.sum(-1, keepdims=True)) @ v.astype(np.float64)
    return np.where(most == -np.inf, 0, made)


async def _biased(device: accel.Device, q: Any, k: Any, v: Any, bias: Any) -> Any:
    return await device.dnn.attention(q, k, v, bias=bias, timeout=SECONDS)


def _attention(rng: np.random.Generator) -> Iterator[Case]:
    for dtype in ("float16", "bfloat16", "float32"):
        for word, value in VALUES.items():
            for at, operand in enumerate("qkv"):
                if operand != "v" and np.isinf(value):
                    continue  # a score is infinite, or its own negative, by signs
                arrays = [rng.standard_normal((1, 2, 5, 16)).astype(_numpy(dtype)) for _ in range(3)]
                arrays[at][0, 1, 3, 4] = value
                yield Case(f"attention {dtype} {operand} {word}", _bound("dnn", "attention"), tuple(arrays), _attended)
        arrays = [rng.standard_normal((1, 2, 5, 16)).astype(_numpy(dtype)) for _ in range(3)]
        bias = np.where(rng.random((1, 2, 5, 5)) < 0.4, -np.inf, 0)
        bias[0, 1, 3], bias[0, 0, 0, 0] = -np.inf, 0
        yield Case(f"attention {dtype} hidden", _biased, (*arrays, bias.astype(_numpy(dtype))), _attended)


def _convolutions(rng: np.random.Generator) -> Iterator[Case]:
    def conv2d(x: Array, f: Array) -> Array:
        windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), f.shape[2:], axis=(2, 3))
        # The product of each window is summed by itself: what a window does not hold is not in its sum.
        return np.asarray((windows[:, None] * f[None, :, :, None, None].astype(np.float64)).sum((2, -1, -2)))

    def pooled(x: Array, function: _Reference) -> Array:
        return np.asarray(function(x.reshape(*x.shape[:2], x.shape[2] // 2, 2, x.shape[3] // 2, 2), axis=(3, 5)))

    for dtype in ("float16", "float32"):
        for channels in (1, 8):
            for word, value in VALUES.items():
                x, f = rng.standard_normal((2, channels, 8, 8)), rng.standard_normal((8, channels, 3, 3))
                x[1, 0, 4, 5] = value
                inputs = x.astype(dtype), f.astype(dtype)
                yield Case(f"conv2d {dtype} {channels} {word}", _bound("dnn", "conv2d"), inputs, conv2d)
                yield Case(f"max_pool {dtype} {word}", _bound("dnn", "max_pool", window=2), inputs[:1], partial(pooled, function=np.max))
                yield Case(f"avg_pool {dtype} {word}", _bound("dnn", "avg_pool", window=2), inputs[:1], partial(pooled, function=np.mean))


def _products(rng: np.random.Generator) -> Iterator[Case]:
    for dtype in ("float16", "float32", "float64"):
        for m, n, k in ((3, 4, 5), (64, 64, 64)):
            for word, value in VALUES.items():
                a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
                a[1, 2], b[0, 3] = value, value
                inputs = a.astype(dtype), b.astype(dtype)
                yield Case(f"matmul {dtype} {m} {word}", _bound("linalg", "matmul"), inputs, lambda a, b: _wide(a) @ _wide(b))
                yield Case(f"gemm {dtype} {m} {word}", _bound("blas", "gemm"), inputs, lambda a, b: _wide(a) @ _wide(b))
                if dtype != "float16":
                    x = inputs[1][:, 3].copy()
                    yield Case(f"gemv {dtype} {m} {word}", _bound("blas", "gemv"), (inputs[0], x), lambda a, x: _wide(a) @ _wide(x))
                    yield Case(f"dot {dtype} {m} {word}", _bound("blas", "dot"), (x, inputs[0][1].copy()), lambda x, y: _wide(x) @ _wide(y))


def _transforms(rng: np.random.Generator) -> Iterator[Case]:
    for n in (8, 30):
        for word, value in VALUES.items():
            x = rng.standard_normal(n)
            x[3] = value
            z = (x + 0j).astype(np.complex128)
            yield Case(f"fft {n} {word}", _bound("fft", "fft"), (z,), np.fft.fft, is_exact=False)
            yield Case(f"rfft {n} {word}", _bound("fft", "rfft"), (x,), np.fft.rfft, is_exact=False)


def _unknowns(matrix: Array, b: Array) -> Array:
    """Return the solution, with no factor of 0: an unknown depends on those elements of b only that its row of the inverse has a number for."""
    inverse = np.linalg.inv(matrix)
    return np.array([row[np.abs(row) > 1e-12] @ b[np.abs(row) > 1e-12] for row in inverse])


def _sparse(rng: np.random.Generator) -> Iterator[Case]:
    """Elements that are not stored are no factors: 0 times infinity is nowhere."""
    dense = np.where(rng.random((6, 6)) < 0.4, rng.standard_normal((6, 6)), 0) + 4 * np.eye(6)

    def made(value: float) -> Any:
        matrix = scipy.sparse.csr_array(dense)
        matrix.data[2] = value
        return matrix

    async def applied(device: accel.Device, y: Any, matrix: Any, method: str) -> Any:
        a = await device.sparse.put(matrix)
        return await getattr(device.sparse, method)(a, y, timeout=SECONDS)

    async def squared(device: accel.Device, y: Any, matrix: Any) -> Any:
        a = await device.sparse.put(matrix)
        return await device.sparse.todense(await device.sparse.spgemm(a, a, timeout=SECONDS), timeout=SECONDS)

    async def iterated(device: accel.Device, y: Any, matrix: Any, method: str) -> Any:
        _, info = await getattr(device.sparse, method)(await device.sparse.put(matrix), y, timeout=SECONDS)
        return float(info == 0)

    for word, value in VALUES.items():
        matrix, y, b = made(value), rng.standard_normal(6), rng.standard_normal((6, 3))
        plain = made(0.5)
        y[4], b[4, 1] = value, value
        ones = np.ones(6)
        for name, a, x in (("a", matrix, ones), ("x", plain, y)):
            yield Case(f"spmv {name} {word}", partial(applied, matrix=a, method="spmv"), (x,), lambda x, a=a: a @ x)
        for name, a, x in (("a", matrix, np.ones((6, 3))), ("b", plain, b)):
            yield Case(f"spmm {name} {word}", partial(applied, matrix=a, method="spmm"), (x,), lambda x, a=a: a @ x)
        yield Case(f"spgemm {word}", partial(squared, matrix=matrix), (ones,), lambda _, a=matrix: (a @ a).toarray())
        lower = scipy.sparse.csr_array(np.tril(plain.toarray()))
        triangular = partial(applied, matrix=lower, method="spsolve_triangular")
        yield Case(f"spsolve_triangular {word}", triangular, (y,), partial(_unknowns, lower.toarray()), is_exact=False)
        solved = partial(_unknowns, plain.toarray())
        yield Case(f"sparse solve of b {word}", partial(applied, matrix=plain, method="solve"), (y,), solved, is_exact=False)
        for method in ("cg", "gmres"):
            for name, a, x in (("a", matrix, ones), ("b", plain, y)):
                yield Case(f"{method} {name} {word}: no success", partial(iterated, matrix=a, method=method), (x,), lambda _: 0.0)


def _refused(_: Any) -> Any:
    raise ValueError("numpy refuses it")


def _random(rng: np.random.Generator) -> Iterator[Case]:
    def drawn(name: str, *given: Any, **options: Any) -> Callable[..., Awaitable[Any]]:
        async def call(device: accel.Device, _: Any) -> Any:
            return await getattr(device.rng, name)(*given, seed=1, timeout=SECONDS, **options)

        return call

    async def chosen(device: accel.Device, p: Any, replace: bool) -> Any:
        return await device.rng.choice(5, 3, replace, p, seed=1, timeout=SECONDS)

    nothing = np.zeros(1)
    parameters = {
        "uniform": ("low", "high"),
        "normal": ("mean", "std"),
        "lognormal": ("mean", "sigma"),
        "exponential": ("scale",),
        "poisson": ("lam",),
        "bernoulli": ("p",),
    }
    for word, value in VALUES.items():
        for kind, names in parameters.items():
            for name in names:
                yield Case(f"{kind} {name}={word}", drawn(kind, 4, **{name: value}), (nothing,), _refused)
        yield Case(f"gamma a={word}", drawn("gamma", 4, a=value), (nothing,), _refused)
        yield Case(f"beta a={word}", drawn("beta", 4, a=value, b=1.0), (nothing,), _refused)
        yield Case(f"binomial p={word}", drawn("binomial", 4, 3, value), (nothing,), _refused)
        for replace in (True, False):
            p = np.full(5, 0.2)
            p[3] = value
            yield Case(f"choice p={word} replace={replace}", partial(chosen, replace=replace), (p,), _refused)


def _elementwise(rng: np.random.Generator) -> Iterator[Case]:
    binary: dict[str, _Reference] = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "max": np.maximum,
        "min": np.minimum,
        "pow": np.power,
        "remainder": np.remainder,
        "less": np.less,
        "equal": np.equal,
    }
    unary: dict[str, _Reference] = {
        **{kind: getattr(np, kind) for kind in ("exp", "log", "sqrt", "tanh", "sin", "log1p", "expm1", "floor", "round", "sign", "isnan")},
        "relu": lambda x: np.where(np.isnan(x), x, np.maximum(x, 0)),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "softplus": lambda x: np.logaddexp(x, 0),
        "erf": scipy.special.erf,
        "reciprocal": np.reciprocal,
    }
    values = np.array([np.nan, np.inf, -np.inf, 0.0, 1.5, -2.0], np.float32)
    x, y = (np.ascontiguousarray(each) for each in np.meshgrid(values, values))
    for kind, function in binary.items():
        yield Case(kind, _bound("elementwise", "binary", kind), (x, y), function)
    for kind, function in unary.items():
        yield Case(kind, _bound("elementwise", "unary", kind), (values,), function)


FAMILIES: dict[str, Callable[[np.random.Generator], Iterator[Case]]] = {
    "sorts": _sorts,
    "scans": _scans,
    "reductions": _reductions,
    "norms": _norms,
    "softmax": _softmaxes,
    "attention": _attention,
    "convolution": _convolutions,
    "products": _products,
    "transforms": _transforms,
    "sparse": _sparse,
    "random": _random,
    "elementwise": _elementwise,
}
"""What else computes: name -> its cases."""
