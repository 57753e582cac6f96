"""Outputs of models: each request gets its own part, whatever form they have; what belongs to no request alone is refused when the model is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

import accel
from accel import InvalidArgumentError
from accel.integrations.fastapi import add_model, install, lifespan
from accel.models.outputs import Follows
from tests.device_support import bounded, failure, used

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_left")

Array = np.ndarray[Any, Any]


class Computing:
    """What a function of arrays by name returns; it counts its runs, and keeps the shapes of the first input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.shapes: list[tuple[int, ...]] = []

    def open(self, *_: Any) -> None:
        """Has no weights."""

    def run(self, inputs: Any) -> Any:
        arrays = {name: np.array(each) for name, each in inputs.items()}
        self.shapes.append(next(iter(arrays.values())).shape)
        return self.function(**arrays)


class Product:
    """``x @ w``."""

    def open(self, weights: Any, *_: Any) -> None:
        self.w = np.array(weights["w"])

    def run(self, inputs: Any) -> Any:
        return {"y": np.array(inputs["x"]) @ self.w}


VECTORS = {"x": accel.TensorSpec(("batch", 2), "float64")}
STEPS = {"input": accel.TensorSpec(("batch", "length", 8), "float32")}
SEQUENCES = {"x": accel.TensorSpec(("batch", "length"), "float64")}


async def loaded(device: accel.Device, function: Any, inputs: Any = None, **options: Any) -> accel.Model:
    return await device.load_model(Computing(function), inputs=inputs or VECTORS, **options)


async def served(model: accel.Model, items: list[Any]) -> list[Any]:
    """Return the answers to items that are asked for at once."""
    async with accel.serve(model, max_delay=0.2, max_items=len(items)) as service:
        return await bounded(asyncio.gather(*[service.submit(item) for item in items]))


def check(found: Any, expected: Any) -> None:
    """Compare answers, arrays or dicts or tuples of them."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = tuple(found.values()), tuple(expected.values())
    for mine, other in zip(*[each if isinstance(each, tuple) else (each,) for each in (found, expected)], strict=True):
        np.testing.assert_array_equal(mine, other)


def state(x: Array) -> dict[str, Array]:
    """Return what a recurrent network does: a sequence, and a state with the batch in the middle."""
    return {"sequence": np.cumsum(x, 1), "state": np.stack([x.sum(1, keepdims=True), 10 * x, -x][1:])}


SEPARABLE: dict[str, tuple[Any, Any, Any]] = {
    "rows": (lambda x: x * 2, lambda x: x * 2, ("batch", 2)),
    "batch in the middle": (lambda x: np.stack([x, 10 * x]), lambda x: np.stack([x, 10 * x]), (2, "batch", 2)),
    "batch last": (lambda x: x.T.copy(), lambda x: x, (2, "batch")),
    "three places a row": (lambda x: np.repeat(x, 3, 0), lambda x: np.repeat(x[None], 3, 0), (Follows("batch", 3), 2)),
    "two places, last": (lambda x: np.repeat(x.T, 2, 1), lambda x: np.repeat(x[:, None], 2, 1), (2, Follows("batch", 2))),
    "a row of one number": (lambda x: x.sum(1), lambda x: x.sum(), ("batch",)),
    "a table": (lambda x: np.arange(6.0).reshape(3, 2), lambda x: np.arange(6.0).reshape(3, 2), (3, 2)),
    "a number": (lambda x: np.array(7), lambda x: np.array(7), ()),
    "none": (lambda x: (x, np.zeros((0, 3)))[1], lambda x: np.zeros((0, 3)), (0, 3)),
}


@pytest.mark.parametrize("buckets", [None, {"batch": (1, 8)}, {"batch": (4, 8)}, {"batch": (5,)}], ids=str)
@pytest.mark.parametrize("name", SEPARABLE)
async def test_each_request_gets_its_own_part(name: str, buckets: Any, rng: np.random.Generator) -> None:
    function, expected, shape = SEPARABLE[name]
    async with accel.System() as system:
        model = await loaded(await system.open_device("cpu"), lambda x: {"y": function(x), "x": x}, buckets=buckets)
        assert model.outputs.shapes == (shape, ("batch", 2))
        x = rng.standard_normal((5, 2))
        for item, answer in zip(x, await served(model, list(x)), strict=True):
            check(answer, {"y": expected(item), "x": item})
        for rows in (1, 3, 5, 13):
            x = rng.standard_normal((rows, 2))
            check((await model.numpy(x))["y"], function(x))
            refs = await model(await model.device.put(x))
            check(await model.device.get(refs["y"]), function(x))
            del refs


INSEPARABLE: dict[str, Any] = {
    "total": lambda x: x.sum(),
    "mean of the batch": lambda x: x.mean(0),
    "the last row": lambda x: x[-1],
    "the first row": lambda x: x[0] + 0,
    "how many rows": lambda x: np.array(len(x)),
    "one row more": lambda x: np.concatenate([x, x[:1]]),
    "every other row": lambda x: x[::2].copy(),
    "all pairs": lambda x: x @ x.T,
    "rows that are normalized by the others": lambda x: x - x.mean(0),
    "rows in another order": lambda x: x[::-1].copy(),
    "running sums": lambda x: np.cumsum(x, 0),
    "running sums from the end": lambda x: np.cumsum(x[::-1], 0)[::-1].copy(),
    "places of one kind after another": lambda x: np.concatenate([x, 10 * x]),
    "rows and their numbers": lambda x: x.reshape(-1),
    "as many as are large": lambda x: np.full(len(x) * len(x), 1.0),
}


@pytest.mark.parametrize("buckets", [None, {"batch": (2, 8)}, {"batch": (4,)}], ids=str)
@pytest.mark.parametrize("name", INSEPARABLE)
async def test_what_cannot_be_split_is_refused_by_name_when_it_is_loaded(device: accel.Device, name: str, buckets: Any) -> None:
    def function(x: Array) -> Any:
        return {"good": x, "bad": INSEPARABLE[name](x)}

    before = used(device)
    if name == "rows and their numbers":  # two places a row, one after another
        assert (await loaded(device, function, buckets=buckets)).outputs.shapes[1] == (Follows("batch", 2),)
        return
    error = await failure(loaded(device, function, buckets=buckets), InvalidArgumentError)
    assert "'bad'" in error.message
    assert "outputs=" in (error.remedy or "")
    del error
    gc.collect()  # what pytest has kept of it
    assert used(device) == before
    model = await loaded(device, function, buckets=buckets, outputs=("good",))
    x = np.ones(2)
    one, two = await served(model, [x, 2 * x])
    check(one, {"good": x})
    check(two, {"good": 2 * x})


async def test_what_is_common_is_held_against_what_it_was(rng: np.random.Generator) -> None:
    """An output that looked the same for all rows, and then shows what was in one of them."""

    def function(x: Array) -> Any:
        return {"y": x, "alarms": np.array((x > 5).sum())}

    async with accel.System() as system:
        model = await loaded(await system.open_device("cpu"), function, buckets={"batch": (4,)})
        async with accel.serve(model) as service:
            check(await service.submit([1.0, 2.0]), {"y": [1, 2], "alarms": 0})
            error = await failure(service.submit([1.0, 9.0]), accel.LibraryError)
            assert "'alarms'" in error.message
            answers: list[Any] = await bounded(
                asyncio.gather(*map(service.submit, ([1.0, 2.0], [7.0, 7.0], [3.0, 4.0])), return_exceptions=True)
            )
            assert isinstance(answers.pop(1), accel.LibraryError)
            for answer, y in zip(answers, ([1, 2], [3, 4]), strict=True):
                check(answer, {"y": y, "alarms": 0})


async def test_a_run_of_another_form_is_an_error_and_no_wrong_split(rng: np.random.Generator) -> None:
    def function(x: Array) -> Any:
        return np.repeat(x, 2 if (x < 0).any() else 1, 0)

    async with accel.System() as system:
        model = await loaded(await system.open_device("cpu"), function, buckets={"batch": (4,)})
        async with accel.serve(model) as service:
            await failure(service.submit([-1.0, 2.0]), accel.LibraryError)
            check(await service.submit([1.0, 2.0]), np.array([1.0, 2.0]))


LENGTHS: dict[str, Any] = {
    "as long": (lambda x: 2 * x, "length"),
    "twice as long": (lambda x: np.repeat(x, 2, 1), Follows("length", 2)),
    "one longer": (lambda x: np.concatenate([0 * x[:, :1], x], 1), Follows("length", 1, 1)),
    "two shorter": (lambda x: x[:, 2:] + x[:, :-2], Follows("length", 1, -2)),
    "every other": (lambda x: x[:, ::2].copy(), Follows("length", 1, 1, 2)),
    "pairs": (lambda x: x[:, : x.shape[1] // 2 * 2].reshape(len(x), -1, 2).sum(2), Follows("length", 1, 0, 2)),
    "every fourth": (lambda x: x[:, ::4].copy(), Follows("length", 1, 3, 4)),
    "a table": (lambda x: np.arange(3.0), 3),
    "positions": (lambda x: np.arange(float(x.shape[1])), "length"),
}


@pytest.mark.parametrize(
    "buckets", [None, {"batch": (1, 4), "length": (8, 16, 24)}, {"batch": (4,), "length": (24,)}], ids=["free", "three", "one"]
)
@pytest.mark.parametrize("name", LENGTHS)
async def test_outputs_of_another_length_are_right_for_every_length(name: str, buckets: Any, rng: np.random.Generator) -> None:
    function, dim = LENGTHS[name]
    async with accel.System() as system:
        model = await loaded(await system.open_device("cpu"), function, SEQUENCES, buckets=buckets)
        assert model.outputs.shapes[0][-1] == dim
        for length in (4, 7, 8, 9, 16, 17, 24):
            x = rng.standard_normal((3, length))
            found, expected = await model.numpy(x), function(x)
            check(found[..., : expected.shape[-1]], expected)
            assert found.shape[-1] <= expected.shape[-1]
        items = [rng.standard_normal(n) for n in (5, 24, 8, 11)]
        for item, answer in zip(items, await served(model, items), strict=True):
            expected = function(item[None])
            expected = expected[0] if expected.ndim == 2 else expected
            check(answer[: len(expected)], expected)
            assert len(answer) <= len(expected)


async def test_an_output_whose_length_follows_in_no_way_is_asked_of_a_run(device: accel.Device, rng: np.random.Generator) -> None:
    """Up to the next multiple of 8, and of two dimensions at once."""
    inputs = {"x": accel.TensorSpec(("batch", "length"), "float64"), "y": accel.TensorSpec(("batch", "width"), "float64")}

    pause = 0.0

    def function(x: Array, y: Array) -> Any:
        time.sleep(pause)
        more = -x.shape[1] % 8
        return np.pad(x, ((0, 0), (0, more))), np.concatenate([x, y], 1)

    for buckets in (None, {"batch": (4,), "length": (5, 9, 20), "width": (3, 6)}):
        computing = Computing(function)
        model = await device.load_model(computing, inputs=inputs, buckets=buckets)
        assert model.outputs.shapes == (("batch", None), ("batch", None))
        for length, width in ((5, 3), (9, 6), (20, 3), (9, 6)):
            x, y = rng.standard_normal((3, length)), rng.standard_normal((3, width))
            check(await model.numpy(x, y), function(x, y))
        runs = len(computing.shapes)
        await model.numpy(x, y)
        assert len(computing.shapes) == runs + 1, "what was told is remembered"
        items = [{"x": x[0], "y": y[0]}, {"x": x[1], "y": y[1]}]
        for place, answer in enumerate(await served(model, items)):
            check(answer, tuple(each[place] for each in function(x, y)))
        pause = 0.05
        await failure(model.numpy(x, y, timeout=0.01), accel.DeadlineExceededError)
        await failure(model(x, y, timeout=0.01), accel.DeadlineExceededError)
        pause = 0.0


async def test_a_batch_axis_that_is_named_is_taken_where_no_run_can_show_it(device: accel.Device, rng: np.random.Generator) -> None:
    def fixed(x: Array) -> Any:
        if len(x) != 4:
            raise ArithmeticError("only four")
        return {"y": x, "state": np.stack([x, -x, x])}

    buckets = {"batch": (4,)}
    error = await failure(loaded(device, fixed, buckets=buckets), InvalidArgumentError)
    assert error.argument == "batch_axis"
    assert "'y'" in error.message or "y, state" in error.message
    model = await loaded(device, fixed, buckets=buckets, batch_axis={"y": 0, "state": -2})
    assert model.outputs.shapes == (("batch", 2), (3, "batch", 2))
    x = rng.standard_normal((3, 2))
    for item, answer in zip(x, await served(model, list(x)), strict=True):
        check(answer, {"y": item, "state": np.stack([item, -item, item])})
    wrong: list[Any] = [{"y": 1, "state": 1}, {"y": 0, "state": 3}, {"z": 0}, {"y": True}, 0.5, {"y": None, "state": 1}]
    for batch_axis in wrong:
        await failure(loaded(device, fixed, buckets=buckets, batch_axis=batch_axis), InvalidArgumentError)
    model = await loaded(device, lambda x: x - x.mean(0), batch_axis=0)
    assert model.outputs.shapes == (("batch", 2),), "its rows follow the others, and the user says that they may"
    for outputs in ((), "y", ("z",), (1,)):
        error = await failure(loaded(device, fixed, buckets=buckets, outputs=outputs), InvalidArgumentError)
        assert error.argument == "outputs"


async def test_inputs_with_the_batch_elsewhere_are_stacked_and_split_there(device: accel.Device, rng: np.random.Generator) -> None:
    inputs = {"x": accel.TensorSpec(("length", "batch"), "float64", pad=-1), "by": accel.TensorSpec(("batch",), "float64")}

    def function(x: Array, by: Array) -> Any:
        return x * by, (x * by).max(0)

    for buckets in (None, {"batch": (2, 4), "length": (3, 6)}):
        model = await device.load_model(Computing(function), inputs=inputs, buckets=buckets)
        assert model.outputs.shapes == (("length", "batch"), ("batch",))
        x, by = rng.random((6, 9)), rng.random(9) + 1
        check(await model.numpy(x, by), function(x, by))
        refs = await model(await device.put(x), await device.put(by))
        check(await device.get(refs[0]), x * by)
        del refs
        items = [{"x": rng.random(n), "by": np.array(2.0)} for n in (3, 6, 2)]
        for item, answer in zip(items, await served(model, items), strict=True):
            check(answer, (2 * item["x"], 2 * item["x"].max()))


async def test_a_model_is_tried_on_values_that_are_valid_for_it(device: accel.Device) -> None:
    """Divisors and lengths that cannot be 0, a shape, an axis, few token ids; and examples where these are not enough."""

    def picky(ids: Array, divisor: Array, length: Array, shape: Array) -> Any:
        assert ((ids >= 0) & (ids < 2)).all()
        if not (divisor.all() and length.all() and (length <= ids.shape[1]).all()):
            raise ArithmeticError("zero")
        return 12 // divisor, ids.reshape(-1, *shape)[:, 0]

    def far(x: Array) -> Any:
        if (x < 100).any():
            raise ArithmeticError("too small")
        return x - 100

    inputs = {
        "ids": accel.TensorSpec(("batch", "length"), "int64"),
        "divisor": accel.TensorSpec(("batch",), "int32"),
        "length": accel.TensorSpec(("batch",), "uint8"),
        "shape": accel.TensorSpec((1,), "int64"),
    }
    model = await device.load_model(Computing(picky), inputs=inputs, outputs=("0",))
    assert model.outputs.shapes == (("batch",),)
    raised = await failure(loaded(device, far), accel.LibraryError)
    assert "example=" in (raised.remedy or "")
    for example in (100, [[100, 200]], [[100, 200], [300, 400]]):
        computing = Computing(far)
        spec = accel.TensorSpec(("batch", 2), "float64", example=example)
        model = await device.load_model(computing, inputs={"x": spec}, buckets={"batch": (2, 4)})
        assert model.outputs.shapes == (("batch", 2),)
    table: dict[str, Any] = {"y": far, "table": lambda x: np.array(1.0)}

    def function(x: Array) -> Any:
        return {name: each(x) for name, each in table.items()}

    one, two = (accel.TensorSpec(("batch", 2), "float64", example=each) for each in ([[100, 200]], [[100, 200], [300, 400]]))
    error = await failure(device.load_model(Computing(function), inputs={"x": one}), InvalidArgumentError)
    assert "'table'" in error.message
    model = await device.load_model(Computing(function), inputs={"x": two})
    assert model.outputs.batch_axes == (0, None)


async def test_outputs_of_the_loaded_weights_are_those_of_a_swap(device: accel.Device, rng: np.random.Generator) -> None:
    w = rng.standard_normal((2, 3))
    model = await device.load_model(Product, weights={"w": w}, inputs=VECTORS, buckets={"batch": (1, 4)})
    before = used(device)
    for other in (w[:, :2], w.astype("complex128"), w.astype("float32").astype("complex64"), w[None]):
        await failure(model.swap({"w": other}), InvalidArgumentError)
        gc.collect()  # what pytest has kept of the error
        assert (model.version, used(device)) == (1, before)
    x = rng.standard_normal((1, 2))
    np.testing.assert_allclose((await model.numpy(x))["y"], x @ w)
    assert await model.swap({"w": 2 * w}) == 2


async def test_sizes_are_told_apart_whatever_their_order(device: accel.Device) -> None:
    """A length that only a run tells, for two pairs of sizes that are each other turned."""

    def function(x: Array) -> Any:
        return np.zeros((len(x), x.shape[1] + -x.shape[1] % 8 + 1))

    inputs = {"x": accel.TensorSpec(("length", "batch"), "float64")}
    model = await device.load_model(Computing(lambda x: function(x.T)), inputs=inputs)
    assert model.outputs.shapes == (("batch", None),)
    for length, rows in ((4, 9), (9, 4)):
        assert (await model.numpy(np.zeros((length, rows)))).shape == function(np.zeros((rows, length))).shape
        answers = await served(model, [np.zeros(length)] * rows)
        assert [answer.shape for answer in answers] == [function(np.zeros((1, length)))[0].shape] * rows


async def test_a_recurrent_module_of_torch_gives_each_request_its_state(hosted: accel.Device, rng: np.random.Generator) -> None:
    model = await hosted.load_model(
        "tests.model_zoo:gru", inputs=STEPS, buckets={"batch": (1, 4), "length": (3, 6)}, options={"threads": 1}
    )
    assert model.outputs.shapes == (("batch", "length", 5), (2, "batch", 5))
    items = [rng.standard_normal((n, 8)).astype(np.float32) for n in (3, 6, 6)]
    for item, (sequence, state) in zip(items, await served(model, items), strict=True):
        alone = await model.numpy(item[None])
        np.testing.assert_allclose(sequence, alone[0][0], rtol=1e-5, atol=1e-6)
        if len(item) == 6:  # the state after a padded sequence is that of the padding
            np.testing.assert_allclose(state, alone[1][:, 0], rtol=1e-5, atol=1e-6)


async def test_the_forms_of_answers_are_those_of_the_schema(rng: np.random.Generator) -> None:
    """Over HTTP, with the batch in the middle of one output, several places for a row, a table, and the batch last in an input."""

    def function(x: Array) -> Any:
        rows = x.T
        return {"state": np.stack([rows, 10 * rows]), "patches": np.repeat(rows, 3, 0), "table": np.arange(4.0).reshape(2, 2)}

    app = FastAPI()

    @contextlib.asynccontextmanager
    async def setup(device: accel.Device) -> Any:
        spec = accel.TensorSpec((2, "batch"), "float64")
        model = await device.load_model(Computing(function), inputs={"x": spec}, buckets={"batch": (4,)})
        async with accel.serve(model, max_delay=0.05) as service:
            add_model(app, "/m", service)
            yield service

    app.router.lifespan_context = lifespan(setup, device="cpu")
    install(app)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    async with app.router.lifespan_context(app), client:
        given = rng.random((3, 2))
        answers = await asyncio.gather(*[client.post("/m", json={"x": each.tolist()}) for each in given])
        for x, answer in zip(given, answers, strict=True):
            assert answer.json() == {
                "state": [x.tolist(), (10 * x).tolist()],
                "patches": [x.tolist()] * 3,
                "table": [[0, 1], [2, 3]],
            }
        schema = (await client.get("/openapi.json")).json()["components"]["schemas"]
        properties = next(each["properties"] for name, each in schema.items() if "state" in each["properties"])
        lengths = {name: (each["minItems"], each["items"]["minItems"]) for name, each in properties.items()}
        assert lengths == {"state": (2, 2), "patches": (3, 2), "table": (2, 2)}
        assert [each["description"] for each in properties.values()] == [
            "float64 of shape (2, 2)",
            "float64 of shape (3, 2)",
            "float64 of shape (2, 2)",
        ]


async def test_few_runs_show_what_the_outputs_are(device: accel.Device) -> None:
    for function, buckets, runs in (
        (lambda x: x, None, [(1, 16), (2, 16), (1, 31), (2, 16), (2, 16), (2, 16)]),
        (lambda x: x, {"batch": (1, 8, 64), "length": (32, 128)}, [(1, 32), (8, 32), (1, 128), (8, 32), (8, 32), (8, 32)]),
        (lambda x: (x, np.ones(3)), {"batch": (8,), "length": (32,)}, [(8, 32), (7, 32), (8, 16), (8, 32), (8, 32), (8, 32), (7, 32)]),
    ):
        computing = Computing(function)
        model = await device.load_model(computing, inputs=SEQUENCES, buckets=buckets)
        warmed = 0 if buckets is None else len(model.buckets.all())
        assert computing.shapes[warmed:] == runs
        await model.aclose()
