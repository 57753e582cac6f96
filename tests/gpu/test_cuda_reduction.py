"""How reductions are cut: every element in one chunk, every result in one launch."""

from __future__ import annotations

import secrets

import numpy as np

from accel_cuda.reduction import launches


def test_plans_cover_every_element_and_result() -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    for _ in range(3000):
        outer, length, inner = (int(2 ** rng.uniform(0, 22)) for _ in range(3))
        inner = 1 if rng.integers(2) else inner
        itemsize = int(rng.choice([1, 2, 4, 8, 16]))
        case = f"{(outer, length, inner, itemsize)} (seed {seed})"
        plan = launches(outer, length, inner, itemsize, 132, is_aligned=bool(rng.integers(2)))
        first, last = plan[0], plan[-1]
        assert len(plan) == 1 + first.is_partial, case
        assert first.block[0] * first.block[1] == 256, case
        chunks = first.grid[1]
        if first.kind in ("rows", "column", "column_packed"):
            chunk = first.sizes[-1]
            assert chunk * chunks >= length > chunk * (chunks - 1), case
            assert first.kind != "rows" or chunks == 1 or chunk * itemsize % 16 == 0, case
        if first.is_partial:
            assert chunks * outer * inner * 16 <= 32 << 20, case
            assert last.kind == "finish", case
            assert last.sizes[:3] == (1, chunks, outer * inner), case
        assert chunks <= 65535, case
