"""Errors travel as data: every class with every field, and garbage is a ProtocolError."""

from __future__ import annotations

import enum
import json
import sys
from typing import Any

import numpy as np
import pytest

from accel import errors
from accel.errors import (
    AccelError,
    CompileError,
    DriverError,
    FaultScope,
    HostDiedError,
    LibraryError,
    PoisonedInputError,
)
from accel.process.protocol import MAX_MESSAGE, ProtocolError
from accel.remote.error_codec import MAX_LOG, MAX_TEXT, RemoteCause, decode_error, encode_error

CLASSES = [cls for name in errors.__all__ if isinstance(cls := getattr(errors, name), type) and issubclass(cls, AccelError)]
VALUES: dict[str, Any] = {
    "message": "it broke: ä\n",
    "code": 700,
    "library": "driver",
    "device": "cuda:0",
    "generation": 3,
    "scope": FaultScope.DEVICE,
    "retryable": True,
    "op": "gemm",
    "op_index": 5,
    "remedy": "Do this.",
    "executed": "no",
    "suspects": ("gemm", "relu"),
    "requested": 1 << 40,
    "used": 2,
    "reserved": 3,
    "limit": 4,
    "reason": "torn",
    "log": "line 1\nline 2",
    "info": (0, 3, -1),
    "exit_code": 1,
    "signal": 9,
    "hung": True,
    "item": {"image": [1, 2.5, None, "x"]},
    "kind": "hang",
    "remembered": True,
    "output": "scores",
    "retry_after": 0.25,
    "argument": "input_ids",
    "ranks": (2, 0),
    "epoch": 4,
}


def there_and_back(error: AccelError) -> AccelError:
    return decode_error(encode_error(error))


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_with_every_field_set(cls: type[AccelError]) -> None:
    names = [name for name in cls("").__dict__ if name != "message"]
    assert set(names) <= VALUES.keys(), "a field is new: let it travel, and add it here"
    error = cls(VALUES["message"], **{name: VALUES[name] for name in names})
    back = there_and_back(error)
    assert type(back) is cls
    assert back.__dict__ == error.__dict__
    assert {name: type(value) for name, value in back.__dict__.items()} == {name: type(value) for name, value in error.__dict__.items()}
    assert str(back) == str(error)
    assert back.args == error.args


def test_a_class_of_somebody_else_travels_as_the_nearest_of_ours() -> None:
    class MineError(DriverError):
        pass

    mine = MineError("mine", code="E1")
    mine.extra = object()  # type: ignore[attr-defined]
    back = there_and_back(mine)
    assert type(back) is DriverError
    assert back.code == "E1"
    assert type(there_and_back(ProtocolError("garbage"))) is HostDiedError


def test_an_unknown_class_is_a_library_error() -> None:
    back = decode_error(json.dumps({"class": "os.system", "fields": {"message": "boom", "code": 3, "unknown": 1}, "causes": []}).encode())
    assert type(back) is LibraryError
    assert (back.message, back.code) == ("boom", 3)


def test_causes_travel_as_text_three_of_them() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise ValueError

    causes: list[BaseException] = [ValueError("one"), UnprintableError(), KeyError("three"), OSError("four")]
    error: BaseException = DriverError("it")
    first = error
    for cause in causes:
        error.__cause__ = cause
        error = cause
    assert isinstance(first, AccelError)
    back: BaseException | None = there_and_back(first)
    texts = []
    while back is not None and (back := back.__cause__):
        assert type(back) is RemoteCause
        texts.append(str(back))
    assert texts == ["ValueError: one", "UnprintableError: (it cannot be printed)", "KeyError: 'three'"]


def test_a_circle_of_causes_ends() -> None:
    error = DriverError("it")
    error.__cause__ = ValueError("other")
    error.__cause__.__cause__ = error
    assert len(encode_error(error)) < 4096


class Status(enum.IntEnum):
    BAD = 7


@pytest.mark.parametrize(
    ("code", "expected"), [(Status.BAD, 7), (np.int32(-3), -3), ("E1", "E1"), (True, None), (RuntimeError, None), (1 << 80, None)]
)
def test_statuses_become_plain_numbers_and_texts(code: Any, expected: object) -> None:
    back = there_and_back(LibraryError("bad", code=code))
    assert back.code == expected
    assert type(back.code) is type(expected)


def test_an_item_nested_as_deep_as_can_be_written_does_not_keep_an_error_from_travelling() -> None:
    item: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        item = [item]
        assert encode_error(PoisonedInputError("bad", item=item))


def nested(levels: int) -> Any:
    """Return lists and objects within each other."""
    item: Any = 1
    for level in range(levels):
        item = [item] if level % 2 else {"inner": item}
    return item


@pytest.mark.parametrize(("levels", "travels"), [(20, True), (100, False), (400, False)])
def test_an_item_that_is_deeply_nested_is_dropped_at_both_ends(levels: int, travels: bool) -> None:
    item = nested(levels)
    sent = json.dumps({"class": "PoisonedInputError", "fields": {"message": "bad", "item": item}, "causes": []}).encode()
    for back in (decode_error(sent), there_and_back(PoisonedInputError("bad", item=item))):
        assert isinstance(back, PoisonedInputError)
        assert back.item == (item if travels else None)


def test_an_item_whose_parts_are_the_same_many_times_is_left_out_soon() -> None:
    item: list[Any] = []
    for _ in range(30):
        item = [item, item]
    back = there_and_back(PoisonedInputError("bad", item=item))
    assert isinstance(back, PoisonedInputError)
    assert back.item is None


@pytest.mark.parametrize("causes", ["[" * 100_000, '["x", ["y", ["z"]]]', '["1", "2", "3", "4"]', '{"cause": {"cause": null}}'])
def test_causes_are_few_texts(causes: str) -> None:
    with pytest.raises(ProtocolError):
        decode_error(b'{"class": "LibraryError", "fields": {}, "causes": ' + causes.encode() + b"}")


def test_a_strange_value_is_left_out_and_the_error_still_travels() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    circle: list[Any] = []
    circle.append(circle)
    for item in (object(), circle, deep, np.zeros(3), "x" * (MAX_TEXT + 1)):
        back = there_and_back(PoisonedInputError("bad", item=item))
        assert isinstance(back, PoisonedInputError)
        assert back.item is None
    strange = errors.MailboxFullError("full", retry_after=float("nan"))
    strange.generation = "seven"  # type: ignore[assignment]
    strange.scope = None  # type: ignore[assignment]
    back = there_and_back(strange)
    assert isinstance(back, errors.MailboxFullError)
    assert (back.retry_after, back.generation, back.scope) == (None, None, FaultScope.OP)


def test_long_texts_are_cut_and_fit_into_a_message() -> None:
    log = "\N{SNOWMAN}" * (4 << 20)
    error = CompileError(log, log=log, remedy=log, library=log, device=log, op=log, code=log)
    error.__cause__ = ValueError(log)
    data = encode_error(error)
    assert len(data) < MAX_MESSAGE
    back = decode_error(data)
    assert isinstance(back, CompileError)
    assert back.log.startswith("\N{SNOWMAN}" * (MAX_LOG - 100))
    assert "more characters" in back.log[-100:]
    assert (len(back.log), len(back.message), len(back.remedy)) == (MAX_LOG, MAX_TEXT, MAX_TEXT)
    assert there_and_back(back).__dict__ == back.__dict__, "what was cut once is not cut again"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"7",
        b'"class"',
        b"{}",
        b"[" * 100_000,
        b"1" * 10_000,
        b'{"class":1,"fields":{},"causes":[]}',
        b'{"class":"DriverError","fields":[],"causes":[]}',
        b'{"class":"DriverError","fields":{},"causes":"x"}',
        b'{"class":"DriverError","fields":{},"causes":[1]}',
        b'{"class":"DriverError","fields":{},"causes":["","","",""]}',
    ],
)
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="should be an error"):
        decode_error(data)


WRONG = [
    *(
        ("DriverError", name, value)
        for name, value in [("message", 1), ("code", 1.5), ("code", True), ("library", []), ("generation", "1")]
    ),
    *(
        ("DriverError", name, value)
        for name, value in [("scope", "WORLD"), ("scope", 33), ("retryable", 1), ("op_index", {}), ("remedy", 0)]
    ),
    *(("ContextPoisonedError", name, value) for name, value in [("executed", "yes"), ("suspects", "gemm"), ("suspects", [1])]),
    *(("MailboxFullError", "retry_after", value) for value in ["soon", True, 10**400, float("inf")]),
    ("StaleRefError", "reason", ["freed"]),
    ("HostDiedError", "hung", 1),
    ("PoisonedInputError", "kind", "fear"),
    ("PoisonedInputError", "remembered", "yes"),
    ("NonFiniteError", "output", ["scores"]),
]


@pytest.mark.parametrize(("name", "field", "value"), WRONG)
def test_a_field_of_the_wrong_kind_is_a_protocol_error(name: str, field: str, value: object) -> None:
    with pytest.raises(ProtocolError, match="should be an error"):
        decode_error(json.dumps({"class": name, "fields": {field: value}, "causes": []}).encode())


def test_fields_are_data_and_never_attributes_of_another_kind() -> None:
    fields = {"__class__": "x", "__cause__": "x", "__dict__": {}, "args": [1], "default_remedy": "x", "clone": 1}
    back = decode_error(json.dumps({"class": "DriverError", "fields": fields, "causes": []}).encode())
    assert back.__dict__ == DriverError().__dict__
    assert back.args == ("",)
