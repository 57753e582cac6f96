"""One table of bodies: both frameworks take the same ones, with the same values, and refuse the others with the same answer, which is short."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError

import accel
from accel.integrations._bodies import has_known_charset
from accel.integrations._fastapi_bodies import on_invalid
from tests.http_support import on_aiohttp, on_fastapi, other_service

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
INPUTS = {dtype: accel.TensorSpec(("batch", 2), dtype) for dtype in DTYPES}
GOOD = dict.fromkeys(DTYPES, "[0, 1]")


class EchoAll:
    """Returns its inputs."""

    def open(self, weights: Mapping[str, accel.Operand], *_: Any) -> None:
        assert not weights

    def run(self, inputs: Mapping[str, accel.Operand]) -> dict[str, np.ndarray[Any, Any]]:
        return {name: np.array(each) for name, each in inputs.items()}


def whole(bits: int, *, signed: bool) -> list[tuple[str, list[Any] | None]]:
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return [
        (f"[{least}, {most}]", [least, most]),
        ("[true, 1.0]", [1, 1]),
        ("[1e1, 0]", [10, 0]),
        *(
            (f"[0, {wrong}]", None)
            for wrong in (most + 1, least - 1, "0.5", "1e30", "NaN", "Infinity", '"1"', "null", "[1]", "{}", "1" * 400)
        ),
    ]


def floats(largest: float) -> list[tuple[str, list[Any] | None]]:
    beyond = (f"{largest * 2:.0f}",) if largest < 1e300 else ()
    return [
        ("[0.5, -1.5]", [0.5, -1.5]),
        ("[true, 3]", [1, 3]),
        *((f"[0, {wrong}]", None) for wrong in (*beyond, "1e999", "NaN", "-Infinity", '"1"', "null", "[1]", "{}", "1" * 400)),
    ]


# A field, its value, and what the model sees; None: refused at this field.
TABLE: list[tuple[str, str, list[Any] | None]] = [
    *(("bool", value, found) for value, found in [("[true, false]", [True, False]), ("[1, 0]", [True, False]), ("[0.0, 1.0]", [False, True])]),
    *(("bool", f"[0, {wrong}]", None) for wrong in ("2", "-1", "0.5", '"true"', "null")),
    *((f"uint{bits}", *case) for bits in (8, 16, 32, 64) for case in whole(bits, signed=False)),
    *((f"int{bits}", *case) for bits in (8, 16, 32, 64) for case in whole(bits, signed=True)),
    *((dtype, *case) for dtype, largest in (("float16", 65504.0), ("bfloat16", 3e38), ("float32", 3e38), ("float64", 1e308)) for case in floats(largest)),
    *(("float64", value, [1e20, 1e20]) for value in ("[100000000000000000000, 1e20]", "[100000000000000000000.0, 1E+20]")),
    *(("uint8", wrong, None) for wrong in ("[1]", "[1, 2, 3]", "[[1], [2, 3]]", "[1, [2]]", "1", "null", '"ab"', "{}", "[]", '{"0": 1, "1": 2}')),
    *(("float32", wrong, None) for wrong in ("[" * 40 + "]" * 40, "[" * 900 + "]" * 900, json.dumps(["a" * 100_000] + [""] * 2000))),
]  # fmt: skip


def body(**fields: str) -> bytes:
    return ("{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in {**GOOD, **fields}.items()) + "}").encode()


WHOLE_BODIES: list[tuple[bytes, str]] = [
    (body(unknown="1"), "unknown"),
    (json.dumps({"u" * 100_000: 1}).encode(), "bool"),
    (b"{}", "bool"),
    (b"", "body"),
    (b"[]", "body"),
    (b"3", "body"),
    (b"{", "body"),
    (b"\xff", "body"),
    (b"[" * 100_000, "body"),
    (body(uint8="9" * 5000), "body"),
]


async def answers(serving: Any) -> list[tuple[int, Any]]:
    """Return what a framework answers to the table."""
    async with serving(other_service(EchoAll, INPUTS, {"batch": (1,)}), {}) as client:
        found = [(await client.send(body(**{field: value})))[:2] for field, value, _ in TABLE]
        found += [(await client.send(content))[:2] for content, _ in WHOLE_BODIES]
        items = b'{"items": [%b, %b]' % (body(), body(uint8="[0, 256]"))
        found += [(await client.send(items + end, "/m/list"))[:2] for end in (b"}", b', "more": 1}')]
        return [*found, (await client.send(b'{"items": [%b, 3]}' % body(), "/m/list"))[:2]]


async def test_both_frameworks_take_and_refuse_the_same_bodies_with_the_same_answers() -> None:
    on_one, on_other = await answers(on_fastapi), await answers(on_aiohttp)
    assert on_one == on_other
    for (field, value, expected), (status, answer) in zip(TABLE, on_one, strict=False):
        if expected is not None:
            assert (status, answer[field]) == (200, expected), (field, value[:80])
    refused = [field for field, _, expected in TABLE if expected is None]
    refused += [*[field for _, field in WHOLE_BODIES], "items[1].uint8", "more", "items[1]"]
    seen = [(status, answer) for status, answer in on_one if status != 200]
    assert [answer["field"] for _, answer in seen] == refused
    for status, answer in seen:
        assert (status, answer.keys()) == (422, {"error", "detail", "retryable", "generation", "field"})
        assert (answer["error"], answer["retryable"], len(str(answer)) < 1000) == ("InvalidArgumentError", False, True)
    place = TABLE.index(("uint8", "[0, 256]", None))
    assert on_one[place][1]["detail"] == "input 'uint8'[1] is 256, which uint8 cannot hold"


@pytest.mark.parametrize("serving", [on_fastapi, on_aiohttp])
async def test_as_many_wrong_numbers_as_a_body_holds_are_one_short_answer(serving: Any) -> None:
    many = 150_000
    service = other_service(EchoAll, {"x": accel.TensorSpec(("batch", many), "float32")}, {"batch": (1,)})
    async with serving(service, {}) as client:
        for wrong in ('""', "null", "[]", "[1]", "NaN"):
            status, answer, _ = await client.send(b'{"x": [' + ",".join([wrong] * many).encode() + b"]}")
            assert (status, answer["field"], len(str(answer)) < 1000) == (422, "x", True), wrong
        unknown = json.dumps({f"unknown{place}": 0 for place in range(40_000)}).encode()
        status, answer, _ = await client.send(unknown)
        assert (status, len(str(answer)) < 1000) == (422, True)


async def test_a_handlers_own_schema_has_as_short_an_answer() -> None:
    errors = [
        {"type": "float_type", "loc": ("body", "x" * 10_000, place), "msg": "wrong" * 1000, "input": float("nan")}
        for place in range(10_000)
    ]
    answer = await on_invalid(Request({"type": "http", "app": FastAPI()}), RequestValidationError(errors))
    assert (answer.status_code, len(answer.body) < 10_000) == (422, True)
    detail = json.loads(bytes(answer.body))["detail"]
    assert (len(detail), detail[0].keys(), detail[7]["loc"][2]) == (8, {"type", "loc", "msg"}, 7)


def test_a_content_type_costs_no_more_than_its_length() -> None:
    assert has_known_charset('application/json; a="b"; Charset = "UTF-8"')
    assert has_known_charset("application/json; charset=")
    for wrong in ("nope", "base64", "\xff"):
        assert not has_known_charset(f"application/json; charset={wrong}")
    assert not has_known_charset("application/json; charset*=utf-8''utf-8")
    assert not has_known_charset("application/json" + "; a=b" * 12_000), (
        "the frameworks parse it in a time that grows with the square of its length"
    )
