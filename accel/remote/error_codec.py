"""Errors on the wire, without pickle: a child must not make its service run code.

An error travels as JSON: the name of its class, and its fields where JSON has such values. What
comes out is of a class of :mod:`accel.errors`, and has only fields of that class with values of the
right kinds. One table checks values at both ends. Texts are bounded when they are written and when
they are read: a caller may keep many errors.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import operator
from typing import TYPE_CHECKING, Any

from accel import errors
from accel.errors import AccelError, FaultScope, LibraryError, said
from accel.process.protocol import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["MAX_LOG", "MAX_TEXT", "RemoteCause", "decode_error", "encode_error"]

MAX_TEXT = 1 << 13
"""Characters of a message, a remedy, a cause, and of an item as JSON; a longer text is cut."""
MAX_LOG = 1 << 16
"""Characters of a compiler's log."""

_MAX_CAUSES = 3
"""Causes of an error that are sent."""
_MAX_NAME, _MAX_NAMES = 1 << 8, 1 << 7
"""Characters of a name, such as that of an op, and the number of suspects that are sent."""
_MAX_LEVELS = 1 << 5
"""Lists and objects within each other in an item: to print or to copy more, a reader would need a deep stack."""
_MAX_INFO = 1 << 12
"""Values of a LinAlgError's ``info``: of a larger stack of matrices the first are sent."""
_CLASSES: dict[str, type[AccelError]] = {
    name: cls for name in errors.__all__ if isinstance(cls := getattr(errors, name), type) and issubclass(cls, AccelError)
}


class RemoteCause(Exception):  # noqa: N818 - it is no error of its own: it says what caused one
    """The cause of an error in another process, as text: its class, its message and its notes."""


def encode_error(error: AccelError) -> bytes:
    """Return ``error`` as bytes for :func:`decode_error`. Never raises.

    A class that is not of :mod:`accel.errors` is sent as its nearest base that is. A field whose
    value is of a wrong kind is left out, and has its default at the other end. Causes are sent as
    text, with their notes, three of them at most.
    """
    name = next(cls.__name__ for cls in type(error).__mro__ if _CLASSES.get(cls.__name__) is cls)
    fields = {}
    for key, value in error.__dict__.items():
        if key in _FIELDS:
            # Telling of an error must not raise another.
            with contextlib.suppress(Exception):
                fields[key] = None if value is None else _FIELDS[key](value)
    causes = [_truncate("\n".join((f"{type(cause).__name__}: {said(cause)}", *_notes_of(cause))), MAX_TEXT) for cause in _causes_of(error)]
    return json.dumps({"class": name, "fields": fields, "causes": causes}, separators=(",", ":")).encode()


def decode_error(data: bytes) -> AccelError:
    """Return the error that :func:`encode_error` wrote.

    An unknown class becomes :class:`~accel.LibraryError`, and unknown fields are dropped.

    Raises
    ------
    ProtocolError
        If the bytes are no error.
    """
    # Any value may be wrong: each is checked, and whatever is raised violates the protocol.
    try:
        content = json.loads(bytes(data).decode())
        name, fields, causes = content["class"], content["fields"], content["causes"]
        if not isinstance(name, str) or not isinstance(fields, dict) or not isinstance(causes, list) or len(causes) > _MAX_CAUSES:
            raise TypeError("class, fields, causes are a text, an object, a list")  # noqa: TRY301
        error = _CLASSES.get(name, LibraryError)(_FIELDS["message"](fields.get("message") or ""))
        for key, value in fields.items():
            if key in error.__dict__ and (value is not None or key not in _REQUIRED):
                setattr(error, key, None if value is None else _FIELDS[key](value))
        # Chain the causes, each of which is a text.
        last: BaseException = error
        for cause in causes:
            last.__cause__ = RemoteCause(_FIELDS["message"](cause))
            last = last.__cause__
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as problem:
        raise ProtocolError(f"a message that should be an error is none: {type(problem).__name__}: {problem}") from None
    return error


def _causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the cause of an error, the cause of that, and so on, three at most."""
    for _ in range(_MAX_CAUSES):
        if error.__cause__ is None:
            return
        error = error.__cause__
        yield error


def _notes_of(error: BaseException) -> list[str]:
    """Return the notes of an error, such as where it was raised."""
    notes = getattr(error, "__notes__", None)
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


# -- checks of values: each returns the value, perhaps cut, or raises TypeError or ValueError


def _truncate(text: str, limit: int) -> str:
    """Return a text of at most ``limit`` characters, with a note of how many were cut."""
    if len(text) <= limit:
        return str(text)  # of a subclass, too
    end = f"\n... ({len(text) - limit} more characters)"
    return text[: limit - len(end)] + end


def _text_check(limit: int) -> Callable[[object], str]:
    """Return the check of a text, which is cut after ``limit`` characters."""

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise TypeError(f"{value!r:.80} is not a text")
        return _truncate(value, limit)

    return check


_check_name = _text_check(_MAX_NAME)


def _check_int(value: Any) -> int:
    """Return an integer of at most 64 bits, which may be one of numpy's."""
    if isinstance(value, bool):
        raise TypeError(f"{value!r} is not an integer")
    number = int(operator.index(value))
    if number.bit_length() > 64:
        raise ValueError("too large to be a status or a size")
    return number


def _check_bool(value: object) -> bool:
    """Return a bool."""
    if type(value) is not bool:
        raise TypeError(f"{value!r:.80} is not a truth value")
    return value


def _check_real(value: object) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"{value!r:.80} is not a number")
    return float(value)


def _check_code(value: object) -> int | str:
    """Return the code of a status: a name or a number."""
    return _check_name(value) if isinstance(value, str) else _check_int(value)


def _check_json(value: object) -> object:
    """Return what JSON can hold; ``None`` if its text is too long, or lists and objects are nested too deeply."""
    return value if _is_shallow(value) and len(json.dumps(value)) <= MAX_TEXT else None


def _is_shallow(value: object) -> bool:
    """Return whether few lists and objects are within each other, looking at no more of them than a text has room for."""
    level: list[Any] = [value]
    for _ in range(_MAX_LEVELS):
        containers = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list, tuple)))
        level = list(itertools.islice(itertools.chain.from_iterable(containers), MAX_TEXT + 1))
        if not 0 < len(level) <= MAX_TEXT:
            return not level
    return False


def _list_check(check: Callable[[object], Any], limit: int) -> Callable[[object], tuple[Any, ...]]:
    """Return the check of a list, of which the first ``limit`` are returned."""

    def check_list(value: object) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{value!r:.80} is not a list")
        return tuple([check(item) for item in value[:limit]])

    return check_list


_check_stack = _list_check(_check_int, _MAX_INFO)


def _check_info(value: object) -> int | tuple[int, ...]:
    """Return the ``info`` of a matrix, or of a stack of matrices."""
    return _check_stack(value) if isinstance(value, (list, tuple)) else _check_int(value)


def _choice_check(*words: str) -> Callable[[object], str]:
    """Return the check of a text that is one of ``words``."""

    def check(value: object) -> str:
        if value not in words:
            raise TypeError(f"{value!r:.80} is none of {words}")
        return str(value)

    return check


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "message": _text_check(MAX_TEXT),
    "code": _check_code,
    "library": _check_name,
    "device": _check_name,
    "generation": _check_int,
    "scope": FaultScope,
    "retryable": _check_bool,
    "op": _check_name,
    "op_index": _check_int,
    "remedy": _text_check(MAX_TEXT),
    "executed": _choice_check("no", "unknown"),
    "suspects": _list_check(_check_name, _MAX_NAMES),
    "requested": _check_int,
    "used": _check_int,
    "reserved": _check_int,
    "limit": _check_int,
    "reason": _choice_check("generation", "freed", "torn"),
    "log": _text_check(MAX_LOG),
    "info": _check_info,
    "exit_code": _check_int,
    "signal": _check_int,
    "hung": _check_bool,
    "item": _check_json,
    "kind": _choice_check("fault", "hang"),
    "remembered": _check_bool,
    "output": _check_name,
    "argument": _check_name,
    "retry_after": _check_real,
    "ranks": _list_check(_check_int, _MAX_NAMES),
    "epoch": _check_int,
}
"""Field -> the check of its values, which cuts long ones. FaultScope travels as a number."""

_REQUIRED = {
    "message",
    "scope",
    "retryable",
    "remedy",
    "executed",
    "suspects",
    "reason",
    "log",
    "info",
    "hung",
    "kind",
    "remembered",
    "ranks",
}
"""Fields that are never ``None``: if they come as that, they keep their default."""
