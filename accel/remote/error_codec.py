"""Errors on the wire, without pickle: a service reads what its child sends, and must not be made to run code by it.

An error travels as JSON: the name of its class, and its fields where JSON has them. Only classes of :mod:`accel.errors` come out, only with fields that
they have, and only with values of the right kinds. Texts are bounded when they are written, and again when they are read: a caller may keep many errors.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

from accel import errors
from accel.errors import AccelError, FaultScope, LibraryError, said
from accel.process.protocol import ProtocolError

__all__ = ["MAX_LOG", "MAX_TEXT", "RemoteCause", "decode_error", "encode_error"]

MAX_TEXT = 1 << 13
"""Characters of a message, a remedy, a cause, and of an item as JSON; of a longer text the end is left out, and it says so."""
MAX_LOG = 1 << 16
"""Characters of what a compiler has said."""

Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]
_CAUSES = 3
_MAX_NAME, _MAX_NAMES = 1 << 8, 1 << 7
"""Characters of a name, such as that of an op, and how many suspects are named."""
_MAX_INFO = 1 << 12
"""Number of values of a LinAlgError's ``info``; of a larger stack of matrices the first are sent."""
_CLASSES: dict[str, type[AccelError]] = {
    name: cls for name in errors.__all__ if isinstance(cls := getattr(errors, name), type) and issubclass(cls, AccelError)
}


class RemoteCause(Exception):  # noqa: N818 - it is no error of its own: it says what caused one
    """What caused an error in another process, as text: the name of its class, what it said, and its notes, such as where it was raised."""


def encode_error(error: AccelError) -> bytes:
    """Return ``error`` as bytes for :func:`decode_error`.

    A class that is not of :mod:`accel.errors` is sent as the nearest one above it that is. A field with a value that does not belong there is left out, so
    that it has its default at the other end; :attr:`~accel.PoisonedInputError.item` where JSON has no such value. Causes are sent as text, with their
    notes, three of them at most. Never raises.
    """
    name = next(cls.__name__ for cls in type(error).__mro__ if _CLASSES.get(cls.__name__) is cls)
    fields = {}
    for key, value in error.__dict__.items():
        if key in _FIELDS:
            try:
                fields[key] = None if value is None else _FIELDS[key][0](value)
            except Exception:  # left out, as the docstring says: telling of an error must not raise another
                continue
    causes = [_text("\n".join((f"{type(each).__name__}: {said(each)}", *_notes(each)))) for each in _causes(error)]
    return json.dumps({"class": name, "fields": fields, "causes": causes}, separators=(",", ":")).encode()


def decode_error(data: bytes) -> AccelError:
    """Return the error that :func:`encode_error` wrote. A class that this version does not know becomes :class:`~accel.LibraryError`.

    Raises
    ------
    ProtocolError
        If it is no such thing.
    """
    try:
        content = json.loads(bytes(data).decode())
        name, fields, causes = content["class"], content["fields"], content["causes"]
        if not isinstance(name, str) or not isinstance(fields, dict) or not isinstance(causes, list) or len(causes) > _CAUSES:
            raise TypeError("class, fields and causes are a text, an object and a list")  # noqa: TRY301
        error = _CLASSES.get(name, LibraryError)(_text(_str(fields.get("message") or "")))
        for key, value in fields.items():
            if key in error.__dict__ and (value is not None or key not in _REQUIRED):
                setattr(error, key, None if value is None else _FIELDS[key][1](value))
        _chain(error, causes)
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as problem:
        raise ProtocolError(f"a message that should be an error is none: {type(problem).__name__}: {problem}") from None
    return error


def _causes(error: BaseException) -> Iterator[BaseException]:
    for _ in range(_CAUSES):
        if error.__cause__ is None:
            return
        error = error.__cause__
        yield error


def _notes(error: BaseException) -> list[str]:
    """Return what was noted of an error, such as where it was raised."""
    notes = getattr(error, "__notes__", None)
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def _chain(error: BaseException, causes: list[Any]) -> None:
    for text in causes:
        error.__cause__ = RemoteCause(_text(_str(text)))
        error = error.__cause__


# -- values of fields: how each kind is written, and how it is checked when it is read


def _text(value: object, limit: int = MAX_TEXT) -> str:
    """Return a text of at most ``limit`` characters; one that was cut once is not cut again."""
    text = str(value)
    if len(text) <= limit:
        return text
    end = f"\n... ({len(text) - limit} more characters)"
    return text[: limit - len(end)] + end


def _name(value: object) -> str:
    return _text(value, _MAX_NAME)


def _log(value: object) -> str:
    return _text(value, MAX_LOG)


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not a text")
    return value


def _int(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.80} is not an integer")
    return _to_int(value)


def _bool(value: object) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{value!r:.80} is not a truth value")
    return value


def _real(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"{value!r:.80} is not a number")
    return float(value)


def _code(value: object) -> int | str:
    return _name(value) if isinstance(value, str) else _int(value)


def _to_int(value: Any) -> int:
    number = int(operator.index(value))
    if number.bit_length() > 64:
        raise ValueError("too large to be a status or a size")
    return number


def _to_code(value: Any) -> int | str:
    return _to_int(value) if hasattr(value, "__index__") else _name(value)


def _to_json(value: object) -> object:
    return value if len(json.dumps(value)) <= MAX_TEXT else None


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is not a list")
    return tuple([_name(_str(each)) for each in value[:_MAX_NAMES]])


def _info(value: object) -> int | tuple[int, ...]:
    return tuple([_int(each) for each in value[:_MAX_INFO]]) if isinstance(value, (list, tuple)) else _int(value)


def _one_of(*words: str) -> Codec:
    def check(value: object) -> str:
        if value not in words:
            raise TypeError(f"{value!r:.80} is none of {words}")
        return _str(value)

    return check, check


_TEXT: Codec = (_text, lambda value: _text(_str(value)))
_NAME: Codec = (_name, lambda value: _name(_str(value)))
_INTEGER: Codec = (_to_int, _int)
_TRUTH: Codec = (bool, _bool)
_FIELDS: dict[str, Codec] = {
    "message": _TEXT,
    "code": (_to_code, _code),
    "library": _NAME,
    "device": _NAME,
    "generation": _INTEGER,
    "scope": (lambda scope: FaultScope(scope).name, lambda name: FaultScope[_str(name)]),
    "retryable": _TRUTH,
    "op": _NAME,
    "op_index": _INTEGER,
    "remedy": _TEXT,
    "executed": _one_of("no", "unknown"),
    "suspects": (lambda names: [_name(name) for name in names[:_MAX_NAMES]], _texts),
    "requested": _INTEGER,
    "used": _INTEGER,
    "reserved": _INTEGER,
    "limit": _INTEGER,
    "reason": _one_of("generation", "freed", "torn"),
    "log": (_log, lambda value: _log(_str(value))),
    "info": (_info, _info),
    "exit_code": _INTEGER,
    "signal": _INTEGER,
    "hung": _TRUTH,
    "item": (_to_json, _to_json),
    "kind": _one_of("fault", "hang"),
    "remembered": _TRUTH,
    "output": _NAME,
    "argument": _NAME,
    "retry_after": (_real, _real),
}
_REQUIRED = {"message", "scope", "retryable", "remedy", "executed", "suspects", "reason", "log", "info", "hung", "kind", "remembered"}
"""Fields that are never ``None``; where they come as that, they keep their default."""
