"""Files of the ONNX format: that all data is in the file itself, and what ONNX Runtime says of the inputs.

ONNX Runtime reads external data from wherever the file says, relative to a folder that depends on the version and on how it was given the model. So the
protocol buffer is looked through before, for tensors that say they are elsewhere: in the graph, in nested graphs, in attributes and in functions.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from accel.errors import InvalidArgumentError

# It is read when ONNX Runtime is imported. Since 1.29 it would tell a server of Microsoft's about each session, the model's name among it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from accel.files.regular_file import RegularFile

__all__ = ["CPU", "session", "whole"]

CPU: Final = "CPUExecutionProvider"

_INSIDE: Final[dict[str, dict[int, str]]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
"""Numbers of the fields of onnx.proto that lead to a tensor, by the message that has them."""

_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
_MAX_NESTED: Final = 100
"""Messages within messages that protocol buffers read."""
_MOST: Final = 1 << 31
"""Bytes of the longest protocol buffer."""
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def whole(file: RegularFile) -> bytes:
    """Return the bytes of a file.

    Raises
    ------
    InvalidArgumentError
        It cannot be read, or is longer than any ONNX file.
    """
    if file.size >= _MOST:
        raise InvalidArgumentError(
            f"{file.path} has {file.size} bytes, and an ONNX file less than 2 GiB", remedy="Give a model that has less."
        )
    return bytes(file.read(0, file.size))


def session(data: bytes, path: Path, threads: int | None, *, optimizes: bool = True) -> Any:
    """Return a session of ONNX Runtime for the bytes of a file.

    Parameters
    ----------
    data
        The bytes.
    path
        Of the file, for errors.
    threads
        That compute one op; ``None``: one per core that the process may use.
    optimizes
        Whether the graph is made ready to be run fast.

    Raises
    ------
    InvalidArgumentError
        They are no ONNX file that ONNX Runtime takes, or data is in other files.
    """
    options = onnxruntime.SessionOptions()
    # Given a number, ONNX Runtime pins no thread to a core that the process may not use.
    options.intra_op_num_threads = len(os.sched_getaffinity(0)) if threads is None else threads
    # Threads that spin between two ops take the cores of the event loop.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Its other format is not looked through below.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.log_severity_level = 3  # errors are raised; warnings would go to stderr
    if not optimizes:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        is_whole = not any(_elsewhere(memoryview(data), "model", 0))
        made = onnxruntime.InferenceSession(data, options, providers=[CPU]) if is_whole else None
    except MemoryError:
        raise
    except Exception as error:  # its errors have no common class
        raise InvalidArgumentError(
            f"ONNX Runtime does not take {path}: {error}",
            library="onnxruntime",
            remedy="Give a valid ONNX file that has all of its data in itself.",
        ) from error
    if not is_whole:
        raise InvalidArgumentError(
            f"{path} has data in other files",
            library="onnxruntime",
            remedy="Save it with all data in the file: onnx.save(onnx.load(path), path, save_as_external_data=False).",
        )
    return made


def _elsewhere(message: memoryview, kind: str, depth: int) -> Iterator[bool]:
    """Yield ``True`` for each tensor below a message whose data is not in the file."""
    if depth > _MAX_NESTED:
        raise ValueError("its messages are nested too deep")
    inside = _INSIDE[kind]
    for number, value in _fields(message):
        if isinstance(value, memoryview) and number in inside:
            yield from _elsewhere(value, inside[number], depth + 1)
        elif kind == "tensor" and ((number == _DATA_LOCATION and value) or number == _EXTERNAL_DATA):
            yield True


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of each field of a message of a protocol buffer; of a value of fixed width, 0."""
    place, end = 0, len(message)
    while place < end:
        key, place = _varint(message, place)
        key &= 0xFFFFFFFF  # as protocol buffers cut it
        value: int | memoryview = 0
        wire = key & 7
        if wire == _VARINT:
            value, place = _varint(message, place)
        elif wire in (_FIXED64, _FIXED32):
            place += 8 if wire == _FIXED64 else 4
        elif wire == _LENGTH:
            length, begin = _varint(message, place)
            place = begin + length
            value = message[begin:place]
        else:
            raise ValueError(f"it is no protocol buffer: there is a field of type {wire}")
        if place > end:
            raise ValueError("it is no protocol buffer: a field goes beyond its end")
        yield key >> 3, value


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """Return an integer of variable length, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            break
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("it is no protocol buffer: an integer does not end")
