"""Options are honoured or rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import accel
from accel.cpu.backend import CpuBackend
from accel.testing import FaultPlan
from tests.device_support import failure, generation, opened

pytestmark = pytest.mark.usefixtures("nothing_left")

WRONG: dict[str, list[Any]] = {
    "host": ["remote", 1, None],
    "completion": ["often", 3, None],
    "streams": ["many", "balanced", "pooled(2)", 0, -1, True, 2.0, None, 129, 2**40],
    "libraries": ["astrology", ["blas", "astrology"], 5],
    "memory_limit": [0, -1, "1G", 1.5, True],
    "pending_limit": [0, -1, "1", None, True],
    "max_in_flight": [0, -1, 2.0, None],
    "overload": ["drop", None],
    "restart": ["always", 3],
    "standby": ["warm", None],
    "spares": [0, True, 1.0, "2", 2],
    "hang_timeout": [0, -1.0, "1", True, float("nan")],
    "faults": ["all", 1],
    "debug": ["yes", 1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values], ids=repr)
async def test_wrong_option_is_rejected(name: str, value: Any) -> None:
    async with accel.System() as system:
        error = await failure(system.open_device("cpu", **{name: value}), accel.InvalidArgumentError)
        assert str(error.remedy)
        assert system.devices == ()


@pytest.mark.parametrize("option", [{"standby": "context"}, {"standby": "imports"}, {"hang_timeout": 1.0}])
async def test_option_that_is_of_no_use_inline_is_unsupported(option: dict[str, Any]) -> None:
    async with accel.System() as system:
        error = await failure(system.open_device("cpu", host="inline", **option), accel.UnsupportedError)
        assert str(error.remedy)


async def test_device_that_is_not_there() -> None:
    async with accel.System() as system:
        await failure(system.open_device("cpu:7"), accel.BackendUnavailableError)
        for spec in ("abacus", "cpu:x", "CPU-0000", ""):
            await failure(system.open_device(spec), accel.InvalidArgumentError)
        await failure(system.open_device(0), accel.InvalidArgumentError)  # type: ignore[arg-type]


async def test_ways_to_name_a_device() -> None:
    async with accel.System() as system:
        first = await system.open_device("cpu")
        names = [first.name]
        for spec in ("cpu:0", CpuBackend().devices()[0].uuid):
            device = await system.open_device(spec)
            names.append(device.name)
        assert names == ["cpu:0", "cpu:0#2", "cpu:0#3"]
        assert len(system.devices) == 3
        assert (await system.open_device("auto")).health().is_ready


@pytest.mark.parametrize("libraries", [(), ("blas",), "reduce", ["blas", "elementwise", "blas", "memory"], iter(["dnn"])])
async def test_libraries_are_warm_before_it_returns_and_in_every_generation(libraries: Any) -> None:
    names = {libraries} if isinstance(libraries, str) else set(libraries) if not hasattr(libraries, "__next__") else {"dnn"}
    async with opened(FaultPlan().poison_at(1), libraries=libraries if not hasattr(libraries, "__next__") else iter(["dnn"])) as device:
        warm = names - {"memory"}
        assert set(device._host.context.libraries.actors) == warm
        await failure(device.zeros(1), accel.ContextPoisonedError)
        await generation(device, 2)
        assert set(device._host.context.libraries.actors) == warm


@pytest.mark.parametrize(
    "completion",
    ["adaptive", "polled", "sync", "host_fn", accel.PolledCompletion(interval=0.0), accel.HostFnCompletion(watch_interval=0.001)],
    ids=repr,
)
async def test_every_completion_serves(completion: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal((40, 40))
    plan = FaultPlan().poison_at(1, op="reduce")
    async with opened(plan, completion=completion) as device:
        a = await device.put(x)
        async with device.batch() as batch:
            h = batch.elementwise.unary("neg", batch.blas.gemm(a, a))
        np.testing.assert_allclose(await device.get(h), -(x @ x))
        await failure(device.reduce("sum", h), accel.ContextPoisonedError)
        a = await device.put(x)
        np.testing.assert_allclose(await device.get(await device.reduce("sum", a)), x.sum())
