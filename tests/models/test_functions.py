"""Coroutine functions of refs as models: called, served, swapped and there after a fault as other models are."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, generation, until, used
from tests.model_support import X, affine, expected

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.usefixtures("nothing_left")

Array = np.ndarray[Any, Any]
Refs = dict[str, accel.AccelRef]

ON_EVERY_HOST = pytest.mark.parametrize("host", ["inline", "process"])


async def tanh_of_affine(device: accel.Device, *, x: accel.AccelRef, weights: Mapping[str, accel.AccelRef]) -> Refs:
    """``tanh(x @ w + b)``, and the sums of its rows."""
    product = await device.blas.gemm(x, weights["w"])
    y = await device.elementwise.unary("tanh", await device.elementwise.binary("add", product, weights["b"]))
    return {"y": y, "total": await device.reduce("sum", y, axis=1)}


async def masked(device: accel.Device, *, ids: accel.AccelRef, mask: accel.AccelRef) -> tuple[accel.AccelRef, ...]:
    """The sums of what is not masked, and the input turned, in a batch of ops."""
    async with device.batch() as batch:
        product = batch.elementwise.binary("mul", batch.elementwise.cast(ids, "float64"), mask)
        total = batch.reduce("sum", product, axis=1)
    return total, ids


async def scaled(device: accel.Device, *, x: accel.AccelRef, by: float = 1.0) -> accel.AccelRef:
    """A multiple of the input; of a large number none."""
    if (await device.get(x)).max() > 100:
        raise ArithmeticError("too large")
    return await device.elementwise.binary("mul", x, await device.full(x.shape, by))


async def loaded(device: accel.Device, weights: Any, **options: Any) -> accel.Model:
    return await device.load_model(tanh_of_affine, weights=weights, inputs=X, buckets={"batch": (1, 4, 8)}, **options)


def check(answer: Any, weights: dict[str, Array], x: Array) -> None:
    np.testing.assert_allclose(answer["y"], expected(weights, x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(answer["total"], expected(weights, x).sum(axis=-1), rtol=1e-5, atol=1e-5)


def rows(rng: np.random.Generator, n: int) -> Array:
    return rng.standard_normal((n, 5), np.float32)


async def test_a_function_answers_batches_of_any_size(hosted: accel.Device, rng: np.random.Generator) -> None:
    weights = affine(rng)
    before = used(hosted)
    model = await loaded(hosted, weights)
    assert model.outputs.shapes == (("batch", 3), ("batch",))
    for n in (1, 3, 8, 21):
        x = rows(rng, n)
        check(await model.numpy(x), weights, x)
        refs = await model(await hosted.put(x))
        assert isinstance(refs["y"], accel.AccelRef)
        assert refs["y"].shape == (n, 3)
        check({name: await hosted.get(ref) for name, ref in refs.items()}, weights, x)
        del refs
    assert model.forwards == {(1,): 2, (4,): 2, (8,): 8}
    async with accel.serve(model) as service:
        items = rows(rng, 30)
        answers = await bounded(asyncio.gather(*[service.submit(each) for each in items]))
        check({name: np.stack([each[name] for each in answers]) for name in ("y", "total")}, weights, items)
    await model.aclose()
    await until(lambda: used(hosted) == before)


@ON_EVERY_HOST
async def test_a_function_serves_on_after_a_fault_with_the_same_weights(host: Any, rng: np.random.Generator) -> None:
    weights = affine(rng)
    plan = FaultPlan()
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host, faults=plan)
        model = await loaded(device, weights)
        x = rows(rng, 6)
        ran = 8  # once in each bucket, and five times to see what it returns
        plan.poison_at(ran + 1, op="gemm")
        await failure(model.numpy(x), accel.ContextPoisonedError)
        await generation(device, 2)
        check(await bounded(model.numpy(x)), weights, x)
        plan.poison_at(ran + 3, op="gemm")
        async with accel.serve(model) as service:
            answers = await asyncio.wait_for(asyncio.gather(*[service.submit(each) for each in x]), 60)
            assert device.generation == 3
        check({name: np.stack([each[name] for each in answers]) for name in ("y", "total")}, weights, x)


async def test_what_a_function_raises_is_an_error_of_the_model(device: accel.Device, rng: np.random.Generator) -> None:
    model = await device.load_model(scaled, inputs=X, buckets={"batch": (4,)}, options={"by": 3.0})
    x = rows(rng, 4)
    np.testing.assert_allclose(await model.numpy(x), 3 * x, rtol=1e-6)
    x[2] = 666
    error = await failure(model.numpy(x), accel.LibraryError)
    assert isinstance(error.__cause__, ArithmeticError)
    async with accel.serve(model) as service:
        answers = await bounded(asyncio.gather(*[service.submit(each) for each in x], return_exceptions=True))
    assert [type(each) for each in answers] == [np.ndarray, np.ndarray, accel.LibraryError, np.ndarray]


async def test_a_deadline_ends_a_function(device: accel.Device, rng: np.random.Generator) -> None:
    entered = asyncio.Event()
    waits = False

    async def waiting(device: accel.Device, *, x: accel.AccelRef) -> accel.AccelRef:
        if waits:
            entered.set()
            await asyncio.Event().wait()
        return x

    async def impatient(device: accel.Device, *, x: accel.AccelRef) -> accel.AccelRef:
        raise TimeoutError("of its own")

    model = await device.load_model(waiting, inputs=X)
    x = rows(rng, 3)
    np.testing.assert_array_equal(await model.numpy(x, timeout=10.0), x)
    waits = True
    await failure(model.numpy(x, timeout=0.05), accel.DeadlineExceededError)
    assert entered.is_set()
    await failure(device.load_model(impatient, inputs=X), accel.LibraryError)


async def test_what_is_no_such_function_is_refused(device: accel.Device, rng: np.random.Generator) -> None:
    async def on_host(device: accel.Device, *, x: accel.AccelRef) -> Any:
        return await device.get(x)

    async def anything(device: accel.Device, **given: Any) -> Any:
        return await device.zeros(3)

    async def fickle(device: accel.Device, *, x: accel.AccelRef) -> Any:
        return await device.elementwise.cast(x, "float64") if x.shape[0] > 5 else x

    async def turning(device: accel.Device, *, x: accel.AccelRef) -> Any:
        found = {"a": x, "b": await device.elementwise.unary("neg", x)}
        return dict(reversed(found.items())) if x.shape[0] > 5 else found

    before = used(device)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (on_host, {}),
        (masked, {}),
        (scaled, {"weights": affine(rng)}),
        (scaled, {"options": {"of": 3}}),
        (scaled, {"options": {"x": 3}}),
        (tanh_of_affine, {"weights": affine(rng), "options": {"weights": {}}}),
        (anything, {"weights": affine(rng), "inputs": {"weights": X["x"]}}),
        ("tests.models.test_functions:scaled", {}),
    ]
    for function, options in cases:
        await failure(device.load_model(function, **{"inputs": X, **options}), accel.InvalidArgumentError)
        gc.collect()  # what pytest has kept of the error
        await until(lambda: used(device) == before)
    for function in (fickle, turning):
        model = await device.load_model(function, inputs=X)
        await failure(model.numpy(rows(rng, 9)), accel.LibraryError)
