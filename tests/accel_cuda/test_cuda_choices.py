"""What the CUDA part of random order and random elements gives CUB and kernels, without a GPU: parts of memory that lie apart, and as much as was asked for."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from accel import DType, ops
from accel_cuda.core.cub import Algorithm, RadixSort
from accel_cuda.families import choices
from accel_cuda.families.rng import RngLibrary
from tests.cuda_support import Names, ref

SCRATCH, ROOM = 1 << 40, 1000


class Taken:
    """A ``Cub`` that takes down where a call reads and writes."""

    def __init__(self, context: Any) -> None:
        self.measured: set[Any] = set()
        self.parts: list[list[tuple[int, int]]] = []

    def is_ready(self, algorithm: Algorithm) -> bool:
        return any(each[0] == algorithm for each in self.measured)

    def measure(self, *need: Any) -> None:
        self.measured.add(need)

    def scratch_nbytes(self, *need: Any) -> int | None:
        return ROOM if need in self.measured else None

    def run(self, stream: Any, algorithm: Algorithm, scratch: int, count: int, x: int, y: int, **other: int) -> None:
        assert (algorithm, count, other.get("bits", 0)) in self.measured
        parts = [(scratch, scratch + ROOM), (x, x + 8 * count)]
        if isinstance(algorithm, RadixSort):
            parts.append((y, y + 8 * count))
            parts += [(other[name], other[name] + 4 * count) for name in ("values", "sorted_values")]
        else:
            assert x == y
        self.parts.append(sorted(parts))


MANY = 1001
X, P = ref((3, MANY, 2), DType.FLOAT32), ref((MANY,), DType.FLOAT64)
CALLS: tuple[tuple[Any, list[str]], ...] = (
    (ops.Permutation(MANY), ["choice_keys", "choice_places"]),
    (ops.Permutation(X, 1), ["choice_keys", "choice_places", "choice_take_4"]),
    (ops.Choice(MANY, 5), ["draws_words_8"]),
    (ops.Choice(1 << 40, 5), ["draws_pairs_8"]),
    (ops.Choice(X, (5, 2), axis=-2), ["draws_words_8", "choice_take_4"]),
    (ops.Choice(MANY, 5000, p=P), ["choice_largest", "choice_weigh_f64", "choice_search"]),
    (ops.Choice(X, 5000, p=P, axis=1), ["choice_largest", "choice_weigh_f64", "choice_search", "choice_take_4"]),
    (ops.Choice(X, 1000, False, P, 1), ["choice_clocks_f64", "choice_places", "choice_take_4"]),
    (ops.Choice(X, 0, False, P, 1), []),
    (ops.Permutation(ref((4, 0), DType.UINT8), 1), []),
)


@pytest.mark.parametrize(("op", "kernels"), CALLS, ids=[f"{op.kind}-{len(kernels)}-{number}" for number, (op, kernels) in enumerate(CALLS)])
def test_parts_of_memory_lie_apart_and_within_what_was_asked_for(op: Any, kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "Cub", Taken)
    op.plan()
    library, launched = RngLibrary(SimpleNamespace()), []  # type: ignore[arg-type]  # nothing is made in the context

    def launch(function: str, blocks: int, threads: int, *arguments: int) -> None:
        assert blocks > 0
        launched.append(function)

    needs_cub = "choice_places" in kernels or "choice_search" in kernels
    assert library.may_block(None, op) is needs_cub
    assert (library.scratch_nbytes(op) is None) is needs_cub
    library.measure(op)
    assert not library.may_block(None, op)
    nbytes = library.scratch_nbytes(op)
    assert nbytes is not None

    def fill(address: int, pattern: bytes, count: int) -> None:
        assert SCRATCH <= address <= SCRATCH + nbytes - len(pattern) * count

    stream = SimpleNamespace(ready=lambda: None, launch=launch, fill=fill, functions=Names())
    outputs = (1 << 20, 1 << 21, SCRATCH) if op.plan().status is not None else (1 << 20, SCRATCH)
    library.kernels[op.kind](SimpleNamespace(stream=stream), op, op.plan(), (1 << 22, 1 << 23), outputs)
    assert launched == kernels
    assert len(launched) + 20 * needs_cub <= library.commands(op)
    cub: Any = library.loaded()._cub
    assert len(cub.parts) == needs_cub
    for parts in cub.parts:
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(parts))
        assert SCRATCH <= parts[0][0] <= parts[-1][1] <= SCRATCH + nbytes
