"""Files of the safetensors format, read without its package: the header is validated, and the data read part by part.

The format: eight bytes with the length of the header (little-endian), the header in JSON, the data of the tensors without gaps. numpy's readers of it do not
know bfloat16 and float8. See https://huggingface.co/docs/safetensors for what each field means.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from accel.dtype import DType
from accel.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SafetensorsFile", "StoredTensor", "parse_header"]

_MOST_HEADER: Final = 100_000_000
"""Bytes of the longest header that the format allows."""

_MOST_DIMENSIONS: Final = 32
_MOST_BYTES: Final = 1 << 59

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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is in a file.

    Attributes
    ----------
    shape : tuple of int
    dtype : DType
    begin, end : int
        Its bytes, counted from the begin of the data.
    """

    shape: tuple[int, ...]
    dtype: DType
    begin: int
    end: int


class SafetensorsFile:
    """A file whose header was read. It stays open for as long as this object lives.

    Making one may block.

    Parameters
    ----------
    path
        Of the file.

    Raises
    ------
    InvalidArgumentError
        It cannot be read, or is not a valid file of the format.
    UnsupportedError
        A tensor's elements have no counterpart on a device.

    Attributes
    ----------
    tensors : dict of str to StoredTensor
        What is in it, in the order of the data.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        weakref.finalize(self, os.close, self._fd)
        try:
            size = os.fstat(self._fd).st_size
            if size < 8:
                raise _invalid(path, f"it has {size} bytes, and the length of the header alone takes 8")
            length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
            if length > min(_MOST_HEADER, size - 8):
                raise _invalid(path, f"its header has {length} bytes, and the file {size}")
            header = os.pread(self._fd, length, 8)
        except OSError as error:
            raise self._unreadable(error) from error
        self._start = 8 + length
        self.tensors = parse_header(header, size - self._start, path)

    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` with bytes of a tensor, from ``start`` on. May block; several threads may call it at once.

        Raises
        ------
        InvalidArgumentError
            The file cannot be read any more, or was truncated.
        """
        place, done = self._start + self.tensors[name].begin + start, 0
        while done < len(out):
            try:
                count = os.preadv(self._fd, [out[done:]], place + done)
            except OSError as error:
                raise self._unreadable(error) from error
            if not count:
                raise _invalid(self._path, f"it ends at byte {place + done}, within tensor {name!r}: it was truncated after it was opened")
            done += count

    def _unreadable(self, error: Exception) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._path} cannot be read: {error}", remedy="Give the path of a readable file.")


def parse_header(header: bytes, size: int, path: Path) -> dict[str, StoredTensor]:
    """Return the tensors that a header declares, in the order of the data.

    Parameters
    ----------
    header
        The JSON.
    size
        Bytes of the data behind it, which the tensors must cover without overlaps and gaps.
    path
        Of the file, for errors.

    Raises
    ------
    InvalidArgumentError
        It is not valid.
    UnsupportedError
        A tensor's elements have no counterpart on a device.
    """
    try:
        entries = json.loads(header.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant) if header[:1] == b"{" else None
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"its header is not JSON as the format has it: {error}") from None
    if not isinstance(entries, dict):
        raise _invalid(path, "its header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _invalid(path, "__metadata__ is not an object of strings")
    tensors = {name: _stored(name, entry, path) for name, entry in entries.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    at = 0
    for name, stored in ordered.items():
        if stored.begin != at:
            raise _invalid(path, f"tensor {name!r} begins at byte {stored.begin} of the data, and the one before it ends at {at}")
        at = stored.end
    if at != size:
        raise _invalid(path, f"the tensors end at byte {at} of the data, and the data at {size}")
    return ordered


def _stored(name: str, entry: Any, path: Path) -> StoredTensor:
    try:
        name.encode()  # a lone surrogate is no name
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _invalid(path, f"tensor {name!r} has no dtype, shape and pair of data_offsets") from None
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(_is_size(each) for each in (*shape, begin, end)):
        raise _invalid(path, f"tensor {name!r} has dtype {dtype!r:.50}, shape {shape!r:.200} and data_offsets {[begin, end]!r:.100}")
    if dtype not in _DTYPES:
        raise UnsupportedError(
            f"tensor {name!r} of {path} has elements of {dtype}", remedy=f"Convert it to one of {', '.join(_DTYPES)} before it is saved."
        )
    known = _DTYPES[dtype]
    # numpy has no arrays beyond these, not even empty ones.
    is_sane = len(shape) <= _MOST_DIMENSIONS and math.prod(filter(None, shape)) < _MOST_BYTES
    if not is_sane or begin > end or end - begin != math.prod(shape) * known.itemsize:
        raise _invalid(path, f"tensor {name!r} of {dtype}{shape!r:.200} has bytes {begin} to {end}")
    return StoredTensor(tuple(shape), known, begin, end)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST_BYTES


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _invalid(path: Path, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{path} is not a valid safetensors file: {what}", remedy="Save or download the file again.")
