"""Ops whose success only the GPU knows, by the checks that every backend passes: on both hosts, however streams are shared and waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import accel
from accel.testing.conformance import Check, checks
from accel.testing.conformance.device_harness import DeviceHarness
from accel.testing.conformance.device_status import ConformanceOps
from accel_cuda import CudaBackend

pytestmark = pytest.mark.gpu

CHECKS = [check for check in checks("device") if check.name.startswith("device.status")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize(
    "options",
    [{"host": "process"}, {"streams": 1}, {"streams": 2}, {"completion": "sync"}, {"completion": "host_fn"}],
    ids=lambda options: next(iter(options.values())),
)
async def test_status(check: Check, options: dict[str, Any]) -> None:
    await check.run(DeviceHarness(CudaBackend(), options=options))


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_failed_op_among_products_is_told_to_those_that_read_it_alone(host: Any) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((512, 512)).astype(np.float32)
    async with accel.System() as system:
        device = await system.open_device("cuda", host=host, libraries=("blas",))
        family = device.family(ConformanceOps)
        a, bad = await device.put(x), await device.put(np.array((2, -1), np.int32))
        for _ in range(20):
            out = await device.copy(a, await device.empty(a.shape))
            ended: list[Any] = await asyncio.gather(
                device.blas.gemm(a, a),
                family.guarded(a, bad, out=out),
                device.blas.gemm(out, a),
                device.blas.gemm(a, a),
                return_exceptions=True,
            )
            assert [isinstance(each, accel.LinAlgError) for each in ended] == [False, True, True, False]
            np.testing.assert_allclose(await device.get(ended[3]), x.astype(np.float64) @ x, rtol=1e-3, atol=1e-2)
        assert device.generation == 1
