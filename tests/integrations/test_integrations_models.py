"""Models over HTTP, on both frameworks: what goes in and out, every status that a client may see, faults, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.openapi.models import OpenAPI

import accel
from accel.integrations import fastapi as with_fastapi
from accel.integrations.encoding import dumps
from accel.testing import FaultPlan
from tests.http_support import affine_service, begun, on_aiohttp, on_fastapi, other_service, pieces, row, rows
from tests.model_support import KILL, NAN, RAISE, SEQUENCES, Mean, affine, expected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


class Echo:
    """Returns its input, of a dtype that has limits."""

    def open(self, weights: Mapping[str, accel.Operand], *_: Any) -> None:
        assert not weights

    def run(self, inputs: Mapping[str, accel.Operand]) -> np.ndarray[Any, Any]:
        return np.array(inputs["copy"])


@pytest.fixture(params=[on_fastapi, on_aiohttp], ids=["fastapi", "aiohttp"])
def serving(request: pytest.FixtureRequest) -> Any:
    return request.param


# -- answers


async def test_concurrent_items_and_lists_are_batched_and_right(serving: Any, rng: np.random.Generator) -> None:
    weights, x = affine(rng), rows(rng, 70)
    async with serving(affine_service(weights), {}) as client:
        singles = await asyncio.gather(*(client.post({"x": each.tolist()}) for each in x[:50]))
        status, listed, _ = await client.post({"items": [{"x": each.tolist()} for each in x[50:]]}, "/m/list")
        statistics = client.service.statistics()
    assert {each[0] for each in singles} == {status} == {200}
    answers = [each[1] for each in singles] + listed["items"]
    assert {tuple(each) for each in answers} == {("y", "total", "version")}
    np.testing.assert_allclose([each["y"] for each in answers], expected(weights, x), **TOLERANCE)
    np.testing.assert_allclose([each["total"] for each in answers], expected(weights, x).sum(axis=1), rtol=1e-4, atol=1e-4)
    assert statistics.answered == 70
    assert statistics.batches < 70


async def test_sequences_of_any_length_come_back_in_their_length(serving: Any, rng: np.random.Generator) -> None:
    service = other_service(Mean, SEQUENCES, {"batch": (1, 4), "length": (6, 8)})
    async with serving(service, {}) as client:
        for length in (1, 6, 7):
            ids = rng.integers(0, 1000, length)
            status, body, _ = await client.post({"ids": ids.tolist(), "mask": [1] * length})
            assert (status, body["outputs"][1]) == (200, (2 * ids).tolist())
            np.testing.assert_allclose(body["outputs"][0], ids.mean())
        status, body, _ = await client.post({"ids": [1, 2, 3], "mask": [1.0] * 2})
        assert (status, body["error"], body["field"]) == (422, "InvalidArgumentError", "mask")
        status, body, _ = await client.post({"ids": [1] * 9, "mask": [1.0] * 9})
        assert (status, "ids" in str(body)) == (422, True)


async def test_an_answer_that_is_not_finite_has_null_and_is_valid_json(serving: Any, rng: np.random.Generator) -> None:
    async with serving(affine_service(affine(rng)), {}) as client:
        status, body, _ = await client.post({"x": row(rng, NAN)})
    assert (status, body["y"], body["total"]) == (200, [None] * 3, None)


async def test_an_answer_that_must_be_finite_is_an_error_of_the_service(serving: Any, rng: np.random.Generator) -> None:
    async with serving(affine_service(affine(rng), check_finite=True), {}) as client:
        answers = await asyncio.gather(client.post({"x": row(rng, NAN)}), *(client.post({"x": row(rng)}) for _ in range(3)))
    assert [status for status, _, _ in answers] == [500, 200, 200, 200]
    assert (answers[0][1]["error"], "finite" in answers[0][1]["detail"]) == ("NonFiniteError", True)


async def test_a_large_answer_is_encoded_in_pieces(rng: np.random.Generator) -> None:
    iterations = 0

    async def count() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    for shape in ((), (0,), (3, 0), (1000, 0), (7,), (1025,), (3, 5000), (5000, 3), (2, 3, 2000)):
        array = rng.standard_normal(shape).astype(np.float32)
        before = iterations
        found = json.loads(await dumps({"a": array, "b": [None, "\u00e9", float("inf"), array[:0] if shape else 1]}))
        np.testing.assert_array_equal(np.asarray(found["a"], np.float32).reshape(shape), array)
        assert found["b"][:3] == [None, "\u00e9", None]
        assert iterations - before >= array.size // 2048, shape
    counting.cancel()


# -- what a client may do wrong


async def test_what_does_not_fit_is_422_and_names_the_field(serving: Any, rng: np.random.Generator) -> None:
    wrong: list[bytes] = [
        json.dumps(each).encode()
        for each in ({}, {"x": 1}, {"x": row(rng)[:4]}, {"x": [*row(rng)[:4], "1"]}, {"x": [[0.0]] * 5}, {"x": None}, {"x": row(rng, 1e39)})
    ]
    wrong += [b'{"x": [NaN, 0, 0, 0, 0]}', b'{"x": [0, 0, 0, 0, 1e999]}', json.dumps({"x": row(rng), "y": 1}).encode()]
    async with serving(affine_service(affine(rng)), {}) as client:
        good = client.post({"x": row(rng)})
        answers = await asyncio.gather(good, *map(client.send, wrong))
        assert [status for status, _, _ in answers] == [200] + [422] * len(wrong)
        named = [body["field"] for _, body, _ in answers[1:]]
        assert named == ["x"] * (len(wrong) - 1) + ["y"]
        for body in (b"", b"{", b"[]", b"3", b"[" * 100_000):
            assert (await client.send(body))[0] in (400, 422)
        status, body, _ = await client.post({"items": [{"x": row(rng)}, {"x": row(rng)[:4]}]}, "/m/list")
        assert (status, body["field"]) == (422, "items[1].x")
        assert client.service.statistics().answered == 1, "nothing of a list with a wrong item runs"


async def test_what_is_wrong_with_the_model_is_not_told_as_if_it_were_the_input(
    serving: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wrong(*_: Any, **__: Any) -> None:
        raise accel.InvalidArgumentError("forward of /opt/secret.py", argument="inputs")

    async with serving(affine_service(affine(rng)), {}) as client:
        monkeypatch.setattr(accel.ModelService, "timed", wrong)
        status, body, _ = await client.post({"x": row(rng)})
    assert (status, "secret" in str(body), "field" in body) == (422, False, False)


async def test_a_list_has_as_many_items_as_it_may(serving: Any, rng: np.random.Generator) -> None:
    async with serving(affine_service(affine(rng)), {"max_list": 2}) as client:
        for count, status in ((0, 422), (1, 200), (2, 200), (3, 422)):
            assert (await client.post({"items": [{"x": row(rng)}] * count}, "/m/list"))[0] == status
        assert (await client.post([], "/m/list"))[0] == 422
    async with serving(affine_service(affine(rng)), {"max_list": 0}) as client:
        assert (await client.post({"items": [{"x": row(rng)}]}, "/m/list"))[0] == 404


async def test_a_long_body_is_413_and_is_not_parsed(serving: Any, rng: np.random.Generator) -> None:
    async with serving(affine_service(affine(rng)), {"body_limit": 1000}) as client:
        fits = json.dumps({"x": row(rng)}).encode()
        assert (await client.send(fits + b" " * (1000 - len(fits))))[0] == 200
        for path in ("/m", "/m/list"):
            for body in (fits + b" " * (1001 - len(fits)), pieces(2000)):
                assert (await client.send(body, path))[:2] == (413, {"detail": "The body is too long."})
        assert client.service.statistics().submitted == 1


async def test_a_body_that_does_not_arrive_is_408(serving: Any, rng: np.random.Generator) -> None:
    ended = asyncio.Event()

    async with serving(affine_service(affine(rng)), {"body_timeout": 0.25}) as client:
        for path in ("/m", "/m/list"):
            assert (await client.send(begun(ended), path))[:2] == (408, {"detail": "The body did not arrive in time."})
        ended.set()
        assert (await client.post({"x": row(rng)}))[0] == 200
        assert client.service.statistics().submitted == 1


# -- what the service may be unable to do


async def test_a_full_service_is_429(serving: Any, rng: np.random.Generator) -> None:
    plan = FaultPlan()
    options = {"max_items": 1, "max_in_flight": 1, "max_pending": 1}
    async with serving(affine_service(affine(rng), **options), {}, faults=plan) as client, asyncio.TaskGroup() as group:
        plan.hang_at(plan.count + 1)
        tasks = [group.create_task(client.post({"x": row(rng)})) for _ in range(4)]
        status, body, headers = await next(asyncio.as_completed(tasks))
        plan.release()
        answered = [each[0] for each in await asyncio.gather(*tasks)].count(200)
        text = (await client.get("/metrics"))[1].decode()
        assert f'accel_request_duration_seconds_count{{device="cpu:0",model="m"}} {answered}.0' in text, "refusals are no latencies"
    assert (status, body["error"], body["retryable"]) == (429, "MailboxFullError", True)
    assert int(headers["Retry-After"]) >= 1
    assert sorted({task.result()[0] for task in tasks}) == [200, 429]


async def test_a_deadline_is_504(serving: Any, rng: np.random.Generator) -> None:
    plan = FaultPlan()
    async with serving(affine_service(affine(rng)), {"timeout": 0.05}, faults=plan) as client:
        plan.hang_at(plan.count + 1)
        status, body, _ = await client.post({"x": row(rng)})
        plan.release()
    assert (status, body["error"], body["retryable"]) == (504, "DeadlineExceededError", True)


async def test_a_model_that_raises_fails_its_request_alone(serving: Any, rng: np.random.Generator) -> None:
    async with serving(affine_service(affine(rng)), {}) as client:
        answers = await asyncio.gather(client.post({"x": row(rng, RAISE)}), *(client.post({"x": row(rng)}) for _ in range(3)))
        status, body, _ = await client.post({"items": [{"x": row(rng)}, {"x": row(rng, RAISE)}]}, "/m/list")
    assert [each[0] for each in answers] == [500, 200, 200, 200]
    assert (status, body["error"]) == (500, "LibraryError")
    assert "the model raised this" not in str(answers[0][1])


async def test_a_fault_in_the_middle_fails_no_request(serving: Any, rng: np.random.Generator) -> None:
    plan, weights, x = FaultPlan(), affine(rng), rows(rng, 60)
    async with serving(affine_service(weights, max_items=4), {}, faults=plan) as client:
        plan.poison_at(plan.count + 8)
        answers = await asyncio.gather(*(client.post({"x": each.tolist()}) for each in x))
        assert client.device.generation == 2
        assert client.service.statistics().retried >= 1
        assert (await client.get("/readyz"))[0] == 200
    assert {status for status, _, _ in answers} == {200}
    np.testing.assert_allclose([body["y"] for _, body, _ in answers], expected(weights, x), **TOLERANCE)


async def test_a_swap_under_load_fails_no_request_and_mixes_no_answer(serving: Any, rng: np.random.Generator) -> None:
    versions, x = {1: affine(rng, 1), 2: affine(rng, 2)}, rows(rng, 8)
    async with serving(affine_service(versions[1]), {}) as client:

        async def seen() -> set[int]:
            answers = await asyncio.gather(*(client.post({"x": each.tolist()}) for each in x))
            assert {status for status, _, _ in answers} == {200}
            for item, (_, body, _) in zip(x, answers, strict=True):
                np.testing.assert_allclose(body["y"], expected(versions[body["version"]], item), **TOLERANCE)
            return {body["version"] for _, body, _ in answers}

        assert await seen() == {1}
        swap = asyncio.ensure_future(client.service.model.swap(versions[2], canaries=[x[0]]))
        while not swap.done():
            assert await seen() <= {1, 2}
        assert await swap == 2
        assert await seen() == {2}
        assert 'accel_model_version{device="cpu:0",model="m"} 2.0' in (await client.get("/metrics"))[1].decode()


async def test_a_poisonous_request_is_422_and_the_others_are_answered(rng: np.random.Generator) -> None:
    weights, x = affine(rng), rows(rng, 3)
    async with asyncio.timeout(50), on_fastapi(affine_service(weights, quarantine=True), {}, host="process") as client:
        poison = asyncio.ensure_future(client._send("POST", "/m", json.dumps({"x": row(rng, KILL)}).encode()))
        answers = await asyncio.gather(*(client._send("POST", "/m", json.dumps({"x": each.tolist()}).encode()) for each in x))
        status, body, _ = await poison
    assert (status, json.loads(body)["error"], json.loads(body)["retryable"]) == (422, "PoisonedInputError", False)
    assert {status for status, _, _ in answers} == {200}
    np.testing.assert_allclose([json.loads(body)["y"] for _, body, _ in answers], expected(weights, x), **TOLERANCE)


# -- FastAPI's own


def references(value: Any) -> set[str]:
    """Return what a document refers to."""
    if isinstance(value, dict):
        own = {value["$ref"]} if "$ref" in value else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


async def test_the_openapi_document_has_the_schemas_and_every_status(rng: np.random.Generator) -> None:
    async with on_fastapi(affine_service(affine(rng)), {"name": "affine"}) as client:
        document = json.loads((await client.get("/openapi.json"))[1])
    OpenAPI.model_validate(document)
    assert set(document["paths"]) == {"/m", "/m/list"}
    for path in document["paths"].values():
        assert set(path["post"]["responses"]) == {"200", "408", "413", "422", "429", "500", "503", "504"}
        assert "Retry-After" in path["post"]["responses"]["429"]["headers"]
    schemas = document["components"]["schemas"]
    assert references(document) <= {f"#/components/schemas/{name}" for name in schemas}
    item, items = (document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"] for path in ("/m", "/m/list"))
    answer = schemas["AffineAnswer"]
    assert (item["title"], items["properties"]["items"]["items"], items["properties"]["items"]["maxItems"]) == ("AffineItem", item, 64)
    x = item["properties"]["x"]
    assert (x["minItems"], x["maxItems"], x["items"]["type"], item["additionalProperties"]) == (5, 5, "number", False)
    assert item["required"] == ["x"]
    assert answer["properties"]["y"]["items"]["anyOf"] == [{"type": "number"}, {"type": "null"}]
    assert answer["properties"]["version"]["type"] == "integer"


async def test_names_that_schemas_have_themselves_are_names_of_inputs(rng: np.random.Generator) -> None:
    spec = accel.TensorSpec(("batch", 2), "float64")
    async with on_fastapi(other_service(Sum, {"copy": spec, "model_fields": spec, "_private": spec}, {"batch": (1,)}), {}) as client:
        body = {"copy": [1, 2], "model_fields": [3, 4], "_private": [5, 6]}
        assert (await client.post(body))[:2] == (200, {"json": [9.0, 12.0]})


class Sum:
    """Adds its inputs."""

    def open(self, weights: Mapping[str, accel.Operand], *_: Any) -> None:
        assert not weights

    def run(self, inputs: Mapping[str, accel.Operand]) -> dict[str, Any]:
        return {"json": np.sum([np.asarray(each) for each in inputs.values()], axis=0)}


async def test_an_application_that_starts_again_serves_its_new_service(rng: np.random.Generator) -> None:
    weights = affine(rng)

    @contextlib.asynccontextmanager
    async def setup(device: accel.Device) -> AsyncIterator[None]:
        async with affine_service(weights)(device) as service:
            with_fastapi.add_model(app, "/m", service)
            yield

    app = FastAPI(lifespan=with_fastapi.lifespan(setup, device="cpu"))
    with_fastapi.install(app)
    for _ in range(2):
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
        ):
            x = rows(rng, 1)[0]
            answer = await client.post("/m", json={"x": x.tolist()})
            np.testing.assert_allclose(answer.json()["y"], expected(weights, x), **TOLERANCE)


async def test_what_cannot_be_mounted_is_refused(device: accel.Device, rng: np.random.Generator) -> None:
    app = FastAPI()
    async with affine_service(affine(rng))(device) as service:
        with pytest.raises(accel.InvalidArgumentError, match=r"accel.serve\(model\)"):
            with_fastapi.add_model(app, "/m", service.model)
        with pytest.raises(accel.InvalidArgumentError, match="slash"):
            with_fastapi.add_model(app, "m", service)
        for wrong in ({"timeout": 0}, {"timeout": "1"}, {"max_list": -1}, {"max_list": True}, {"body_limit": 0}, {"body_timeout": 0}):
            with pytest.raises(accel.InvalidArgumentError, match=next(iter(wrong))):
                with_fastapi.add_model(app, "/m", service, **wrong)
        with_fastapi.add_model(app, "/m", service)
        async with other_service(Mean, SEQUENCES, {"batch": (1,), "length": (4, 8)})(device) as other:
            with pytest.raises(accel.InvalidArgumentError, match="another path"):
                with_fastapi.add_model(app, "/m", other)


async def test_complex_numbers_are_refused_because_json_has_none(serving: Any) -> None:
    service = other_service(Echo, {"copy": accel.TensorSpec(("batch", 2), "complex64")}, {"batch": (1,)})
    with pytest.raises(accel.UnsupportedError, match="JSON"):
        async with serving(service, {}):
            raise AssertionError("unreachable")
