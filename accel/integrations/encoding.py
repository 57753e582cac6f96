"""JSON of arrays, encoded in pieces, so that a large answer does not hold up the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["dumps"]

_PIECE = 1024
"""Numbers that are encoded at once: about a millisecond, for which the loop does nothing else."""


async def dumps(value: Any) -> bytes:
    """Return JSON of arrays and what JSON has besides. The loop goes on in between; NaN and infinities become ``null``.

    Numbers of narrow floats have all digits of the double that they are: a client that parses them has the same bits.
    """
    found = []
    for place, piece in enumerate(_pieces(value)):
        if place:
            await asyncio.sleep(0)
        found.append(piece)
    return "".join(found).encode()


def _pieces(value: Any) -> Iterator[str]:
    """Yield JSON text in pieces of about ``_PIECE`` numbers, between which the event loop can run."""
    text, numbers = "", 0
    for part, count in _parts(value):
        text += part
        numbers += count
        if numbers >= _PIECE:
            yield text
            text, numbers = "", 0
    yield text


def _parts(value: Any) -> Iterator[tuple[str, int]]:
    """Yield JSON text, and how many numbers are in it."""
    if isinstance(value, np.ndarray):
        yield from _of_array(value)
    elif isinstance(value, Mapping):
        yield from _joined("{}", [(f"{json.dumps(str(key))}:", each) for key, each in value.items()])
    elif isinstance(value, (tuple, list)):
        yield from _joined("[]", [("", each) for each in value])
    elif isinstance(value, np.generic):
        yield from _of_array(np.asarray(value))
    elif isinstance(value, float):
        yield _text(_plain(np.asarray(value))), 1
    else:
        yield _text(value), 1


def _joined(ends: str, members: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, int]]:
    yield ends[0], 0
    for place, (name, value) in enumerate(members):
        yield ("," if place else "") + name, 0
        yield from _parts(value)
    yield ends[1], 0


def _of_array(array: np.ndarray[Any, Any]) -> Iterator[tuple[str, int]]:
    if array.size <= _PIECE:
        yield _text(_plain(array)), array.size
        return
    numbers = array.size // len(array)
    if numbers > _PIECE:
        yield from _joined("[]", [("", row) for row in array])
        return
    rows = max(1, _PIECE // max(1, numbers))
    yield "[", 0
    for start in range(0, len(array), rows):
        part = array[start : start + rows]
        yield ("," if start else "") + _text(_plain(part))[1:-1], part.size
    yield "]", 0


def _plain(array: np.ndarray[Any, Any]) -> Any:
    """Return Python's numbers, nested, with ``None`` for what is not finite."""
    if array.dtype.kind == "V":
        array = array.astype(np.float32)  # bfloat16 and the float8s, which are exact there
    if array.dtype.kind != "f":
        return array.tolist()
    finite = np.isfinite(array)
    if finite.all():
        return array.tolist()
    plain = array.astype(object)
    plain[~finite] = None
    return plain.tolist()


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
