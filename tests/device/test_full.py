"""`full` refuses a value that its dtype cannot hold, in words, before anything is sent; what a float rounds is its own affair."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import accel

REFUSED: list[tuple[Any, str]] = [
    (1.5, "int8"),
    (-0.5, "uint64"),
    (np.float32(2.25), "int32"),
    (300, "int8"),
    (-1, "uint8"),
    (1e30, "int64"),
    (math.nan, "int32"),
    (math.inf, "uint16"),
    (1 + 0j, "int8"),
    (2, "bool"),
    (0.5, "bool"),
    (math.nan, "bool"),
    (1 + 0j, "bool"),
    (1j, "float32"),
]
TAKEN: list[tuple[Any, str, Any]] = [
    (2.0, "int8", 2),
    (np.float64(-7.0), "int32", -7),
    (127, "int8", 127),
    (2**64 - 1, "uint64", 2**64 - 1),
    (True, "int16", 1),
    (0.1, "float32", np.float32(0.1)),
    (1 / 3, "float16", np.float16(1 / 3)),
    (2**53 + 1, "float64", 2.0**53),
    (math.nan, "float32", math.nan),
    (1, "bool", True),
    (0.0, "bool", False),
    (np.True_, "bool", True),
    (1.5, "complex64", 1.5),
]


async def test_a_value_that_the_dtype_cannot_hold_is_refused_with_a_remedy() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu")
        for value, dtype in REFUSED:
            with pytest.raises(accel.InvalidArgumentError, match=r"value is") as refused:
                await device.full(3, value, dtype)
            assert dtype in str(refused.value), (value, dtype)
            assert refused.value.remedy, (value, dtype)
            async with device.batch() as batch:
                with pytest.raises(accel.InvalidArgumentError, match=r"value is"):
                    batch.full(3, value, dtype)
        assert device.info().memory.used == 0
        for value, dtype, expected in TAKEN:
            got = await device.get(await device.full(3, value, dtype))
            np.testing.assert_array_equal(got, np.full(3, expected, dtype), err_msg=f"{value!r} as {dtype}")
