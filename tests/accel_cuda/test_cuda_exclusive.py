"""A GPU in compute mode EXCLUSIVE_PROCESS, where one is: tests leave settings as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel_cuda import CudaBackend
from accel_cuda.core.driver import load_driver

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu

EXCLUSIVE = 3
UNAVAILABLE = 46


@pytest.fixture(autouse=True)
def used_here() -> Iterator[None]:
    """Hold a context in this process, on a GPU that is one process's at a time."""
    driver = load_driver()
    mode = driver.device_attribute(driver.call("cuDeviceGet", 0), "COMPUTE_MODE")
    if mode != EXCLUSIVE:
        pytest.skip(f"the GPU is in compute mode {mode}, and not {EXCLUSIVE} (EXCLUSIVE_PROCESS), which only its owner sets")
    device = CudaBackend().open(0)
    yield
    device.close()


async def test_this_process_goes_on_and_a_child_is_told_why_not() -> None:
    async with accel.System() as system:
        inline = await system.open_device("cuda", host="inline")
        x = await inline.put(np.arange(4.0))
        with pytest.raises(accel.BackendUnavailableError, match="EXCLUSIVE_PROCESS") as caught:
            await system.open_device("cuda", host="process")
        assert caught.value.code == UNAVAILABLE
        assert "-c DEFAULT" in caught.value.remedy
        np.testing.assert_array_equal(await inline.get(await inline.elementwise.unary("neg", x)), -np.arange(4.0))


async def test_there_is_no_spare_context() -> None:
    async with accel.System() as system:
        with pytest.raises(accel.UnsupportedError, match="EXCLUSIVE_PROCESS") as caught:
            await system.open_device("cuda", standby="context")
        assert "standby='imports'" in caught.value.remedy
