"""Corrupt index operands on the GPU, in a child whose fault is a failure; and that only copies of sparse indices are read, also by replays."""

from __future__ import annotations

import numpy as np
import pytest

import accel
from tests.index_support import check_attention_numbers, check_corrupt_operands

pytest.importorskip("scipy.sparse")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]


@pytest.mark.timeout(240)  # each kind of op is compiled, or built by CUB, where no test has done it before
async def test_corrupt_indices_are_answered_or_refused_and_touch_no_other_memory(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda", host="process", memory_limit=1 << 30)
        assert await check_corrupt_operands(device, rng) > 100


@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_numbers_of_attention_that_are_out_of_range_are_the_nearest_that_are_not(rng: np.random.Generator, dtype: str) -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda", host="process")
        await check_attention_numbers(device, rng, dtype)  # by accel's own kernel, and by cuDNN
        assert device.generation == 1


async def test_a_replay_checks_the_indices_that_are_there_then(rng: np.random.Generator) -> None:
    n = 3000
    indptr, indices = np.arange(0, 4 * n + 1, 4, dtype=np.int32), rng.integers(0, n, 4 * n).astype(np.int32)
    values, vector = rng.standard_normal(4 * n), rng.standard_normal(n)
    async with accel.System() as system:
        device = await system.open_device("cuda", host="process", memory_limit=1 << 30)
        refs = [await device.put(each) for each in (values, indices, indptr)]
        a, x = await device.sparse.csr((refs[0], refs[1], refs[2]), shape=(n, n)), await device.put(vector)
        async with device.graph() as graph:
            y = graph.sparse.spmv(a, x)
        wrong = indices.copy()
        wrong[77] = np.iinfo(np.int32).max
        for given in (indices, wrong, indices):
            await device.put(given, out=refs[1])
            if given is wrong:
                with pytest.raises(accel.InvalidArgumentError, match="index 2147483647 of a sparse matrix is out of range"):
                    await graph.replay()
                continue
            await graph.replay()
            expected = (values * vector[indices]).reshape(n, 4).sum(1)
            np.testing.assert_allclose(await device.get(y), expected, rtol=1e-10, atol=1e-10)
        assert device.generation == 1
        await graph.aclose()


async def test_a_sum_of_rows_that_are_out_of_order_is_refused(rng: np.random.Generator) -> None:
    n = 5000
    indptr = np.arange(0, 4 * n + 1, 4, dtype=np.int32)
    indices = np.sort(np.argsort(rng.random((n, 64)), axis=1)[:, :4], axis=1).astype(np.int32)
    wrong = indices.copy()
    wrong[n // 2, 1:3] = wrong[n // 2, 2], wrong[n // 2, 1]
    async with accel.System() as system:
        device = await system.open_device("cuda", host="process", memory_limit=1 << 30)
        data, marks = await device.put(rng.standard_normal(4 * n)), await device.put(indptr)
        good, bad = [accel.SparseRef("csr", data, await device.put(each.ravel()), marks, (n, 64)) for each in (indices, wrong)]
        for a, b in ((good, bad), (bad, good), (good.T, bad.T)):
            with pytest.raises(
                accel.InvalidArgumentError, match=f"element {4 * (n // 2) + 2} of the indices of a sparse matrix is out of order"
            ):
                await device.sparse.add(a, b)
        assert (await device.sparse.add(good, good)).nnz == 4 * n
        assert device.generation == 1
