"""Files of the safetensors format, read without its package: the header is validated, and tells where the tensors are.

The format: eight bytes with the length of the header (little-endian), the header in JSON, the data of the tensors without gaps. numpy's readers of it do not
know bfloat16 and float8. See https://huggingface.co/docs/safetensors for what each field means.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from accel.dtype import DType
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.files.stored_tensor import StoredTensor, is_shape, is_sizes

if TYPE_CHECKING:
    from pathlib import Path

    from accel.files.regular_file import RegularFile

__all__ = ["stored_in"]

_MOST_HEADER: Final = 100_000_000
"""Bytes of the longest header that the format allows."""

_DTYPES: Final = {
    "BOOL": DType.BOOL,
    "U8": DType.UINT8,
    "I8": DType.INT8,
    "F8_E4M3": DType.FLOAT8_E4M3FN,
    "F8_E5M2": DType.FLOAT8_E5M2,
    "U16": DType.UINT16,
    "I16": DType.INT16,
    "F16": DType.FLOAT16,
    "BF16": DType.BFLOAT16,
    "U32": DType.UINT32,
    "I32": DType.INT32,
    "F32": DType.FLOAT32,
    "U64": DType.UINT64,
    "I64": DType.INT64,
    "F64": DType.FLOAT64,
    "C64": DType.COMPLEX64,
}


def stored_in(file: RegularFile) -> dict[str, StoredTensor]:
    """Return the tensors of a file, in the order of the data.

    Raises
    ------
    InvalidArgumentError
        It is not a valid file of the format.
    UnsupportedError
        A tensor's elements have no counterpart on a device.
    """
    path, size = file.path, file.size
    if size < 8:
        raise _invalid(path, f"it has {size} bytes, and the length of the header alone takes 8")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(_MOST_HEADER, size - 8):
        raise _invalid(path, f"its header has {length} bytes, and the file {size}")
    return _parsed(bytes(file.read(8, length)), 8 + length, size, path)


def _parsed(header: bytes, data: int, size: int, path: Path) -> dict[str, StoredTensor]:
    """Return the tensors that a header declares. The bytes from ``data`` to ``size`` must be theirs, without overlaps and gaps."""
    try:
        entries = json.loads(header.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant) if header[:1] == b"{" else None
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"its header is not JSON as the format has it: {error}") from None
    if not isinstance(entries, dict):
        raise _invalid(path, "its header is not a JSON object")
    metadata = entries.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # the format's own reader takes a null
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _invalid(path, "__metadata__ is not an object of strings")
    tensors = {name: _stored(name, entry, data, path) for name, entry in entries.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    at = data
    for name, stored in ordered.items():
        if stored.start != at:
            raise _invalid(path, f"tensor {name!r} begins at byte {stored.start}, and what is before it ends at {at}")
        at = stored.end
    if at != size:
        raise _invalid(path, f"the tensors end at byte {at}, and the file at {size}")
    return ordered


def _stored(name: str, entry: Any, data: int, path: Path) -> StoredTensor:
    try:
        name.encode()  # a lone surrogate is no name
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _invalid(path, f"tensor {name!r} has no dtype, shape and pair of data_offsets") from None
    if not isinstance(dtype, str) or not isinstance(shape, list) or not is_sizes([*shape, begin, end]):
        raise _invalid(path, f"tensor {name!r} has dtype {dtype!r:.50}, shape {shape!r:.200} and data_offsets {[begin, end]!r:.100}")
    if dtype not in _DTYPES:
        raise UnsupportedError(
            f"tensor {name!r} of {path} has elements of {dtype}", remedy=f"Convert it to one of {', '.join(_DTYPES)} before it is saved."
        )
    known = _DTYPES[dtype]
    if not is_shape(shape) or begin > end or end - begin != math.prod(shape) * known.itemsize:
        raise _invalid(path, f"tensor {name!r} of {dtype}{shape!r:.200} has bytes {begin} to {end} of the data")
    return StoredTensor(tuple(shape), known, data + begin)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _invalid(path: Path, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{path} is not a valid safetensors file: {what}", remedy="Save or download the file again.")
