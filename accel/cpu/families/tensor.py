"""The ``tensor`` family on the CPU: ops of other families compute it. Samples of all that it is made of."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import sampling
from accel.family import BackendPart, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.dtype import DType

__all__ = ["PART"]

Shapes = tuple[tuple[int, ...], ...]

_EINSUMS: tuple[tuple[str, Shapes], ...] = (
    ("ij,jk->ik", ((7, 5), (5, 3))),
    ("ji,kj->ik", ((5, 7), (3, 5))),
    ("ij,jk->ki", ((7, 5), (5, 3))),
    ("bij,bjk->bik", ((4, 3, 5), (4, 5, 6))),
    ("bhqd,bhkd->bhqk", ((2, 3, 5, 4), (2, 3, 6, 4))),
    ("bqhd,bkhd->bhqk", ((2, 5, 3, 4), (2, 6, 3, 4))),
    ("ij,bjk->bik", ((6, 5), (3, 5, 4))),
    ("bji,jk->bki", ((3, 5, 4), (5, 6))),
    ("abcd,cdbe->ea", ((3, 4, 5, 2), (5, 2, 4, 3))),
    ("...ij,...jk->...ik", ((2, 1, 3, 4), (5, 4, 2))),
    ("i,j->ij", ((5,), (4,))),
    ("ij,ij->ij", ((5, 4), (5, 4))),
    ("ij,j->ji", ((5, 4), (4,))),
    ("ij,ij->", ((5, 4), (5, 4))),
    ("i,i", ((9,), (9,))),
    ("ijk->kij", ((2, 3, 4),)),
    ("ijk->k", ((4, 3, 5),)),
    ("ii", ((6, 6),)),
    ("iij->ji", ((4, 4, 3),)),
    ("iji->j", ((4, 3, 4),)),
    ("ii,ij->j", ((4, 4), (4, 3))),
    ("ij,jk,kl->il", ((4, 30), (30, 3), (3, 20))),
    ("ea,fb,abcd,gc,hd->efgh", ((3, 4), (2, 4), (4, 4, 3, 3), (2, 3), (4, 3))),
    ("ij,kl->", ((4, 3), (2, 5))),
    ("i,i,i->i", ((7,), (7,), (7,))),
    ("ij,jk->ik", ((1, 5), (1, 4))),
    ("ij,jk->ik", ((3, 0), (0, 4))),
    ("ij,j->ij", ((0, 3), (3,))),
    (",ij->ij", ((), (2, 3))),
    ("->", ((),)),
)
_TENSORDOTS: tuple[tuple[Shapes, Any], ...] = (
    (((3, 4, 5), (4, 5, 6)), 2),
    (((3, 4), (5,)), 0),
    (((4, 5, 3), (6, 3, 5)), ((1, 2), (2, 1))),
    (((4, 5), (5, 4)), (1, 0)),
)


def _einsum(subscripts: str, options: dict[str, Any], tensor: Any, *refs: Any) -> Any:
    return tensor.einsum(subscripts, *refs, **options)


def _into(subscripts: str, tensor: Any, *refs: Any) -> Any:
    *operands, out = refs
    return tensor.einsum(subscripts, *operands, out=out)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype in (*sampling.ALL_FLOATS, *sampling.COMPLEX):
        for subscripts, shapes in _EINSUMS:
            yield _sample(rng, dtype, subscripts, shapes)
        for shapes, axes in _TENSORDOTS:
            operands = tuple([sampling.random(rng, shape, dtype) for shape in shapes])
            a, b = (sampling.wide(each) for each in operands)
            terms = float(np.abs(a).max() * np.abs(b).max())
            expected = np.asarray(np.tensordot(a, b, axes))
            what, error = f"{dtype.value} {shapes} {axes}", sampling.sums(dtype, 20)
            yield sampling.sample("tensordot", what, operands, expected, error, terms, axes=axes)
        operands = tuple([sampling.random(rng, shape, dtype) for shape in ((3, 5), (5, 4), (4, 6))])
        wide = [sampling.wide(each) for each in operands]
        expected = np.einsum("ij,jk,kl->li", *wide)
        error, terms = _error(dtype, wide, 20)
        out = np.zeros(expected.shape, dtype.numpy)
        yield Sample(f"einsum {dtype.value} out", partial(_into, "ij,jk,kl->li"), (*operands, out), expected, error, terms)
        for optimize in ("greedy", ((1, 2), (0, 1))):
            call = partial(_einsum, "ij,jk,kl->li", {"optimize": optimize})
            yield Sample(f"einsum {dtype.value} optimize={optimize}", call, operands, expected, error, terms)


def _sample(rng: np.random.Generator, dtype: DType, subscripts: str, shapes: Shapes) -> Sample:
    operands = tuple([sampling.random(rng, shape, dtype) for shape in shapes])
    wide = [sampling.wide(each) for each in operands]
    expected = np.asarray(np.einsum(subscripts, *wide))
    most = max([length for shape in shapes for length in shape], default=1)
    error, terms = _error(dtype, wide, most * most)
    return Sample(f"einsum {dtype.value} {subscripts} {shapes}", partial(_einsum, subscripts, {}), operands, expected, error, terms)


def _error(dtype: DType, wide: list[Any], count: int) -> tuple[float, float]:
    """Return how far a result may be off, and relative to what: what is between contractions is rounded to the dtype."""
    terms = 1.0
    for each in wide:
        terms *= float(np.abs(each).max(initial=0.0))
    return sampling.sums(dtype, count) + sampling.rounding(dtype) * 4 * (len(wide) > 1), terms


PART = BackendPart({}, samples=_samples)
