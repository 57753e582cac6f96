"""Numbers of index operands may be anything: every op that has such operands is called with corrupt ones, in a child whose end is a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import accel
from tests.index_support import check_attention_numbers, check_corrupt_operands

if TYPE_CHECKING:
    import numpy as np

pytest.importorskip("scipy.sparse")
pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_corrupt_indices_are_answered_or_refused_and_touch_no_other_memory(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", memory_limit=256 << 20)
        assert await check_corrupt_operands(device, rng) > 100


@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_numbers_of_attention_that_are_out_of_range_are_the_nearest_that_are_not(rng: np.random.Generator, dtype: str) -> None:
    async with accel.System() as system:
        await check_attention_numbers(await system.open_device("cpu", host="inline"), rng, dtype)
