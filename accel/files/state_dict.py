"""State dicts that ``torch.save`` wrote, read without torch: the pickle in them may name tensors and nothing that runs.

Such a file is a zip archive whose members are stored, not compressed: ``data.pkl`` says what there is, ``data/0``, ``data/1`` ... are the elements.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.files.stored_tensor import StoredTensor, c_strides, is_shape, is_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.files.regular_file import RegularFile

__all__ = ["stored_in"]

_LOCAL_HEADER: Final = 30
"""Bytes of a zip archive before a member's name; the last four are the lengths of the name, and of what is between it and the member."""

_STORAGES: Final = {
    "Bool": DType.BOOL,
    "Byte": DType.UINT8,
    "Char": DType.INT8,
    "Short": DType.INT16,
    "Int": DType.INT32,
    "Long": DType.INT64,
    "Half": DType.FLOAT16,
    "BFloat16": DType.BFLOAT16,
    "Float": DType.FLOAT32,
    "Double": DType.FLOAT64,
    "ComplexFloat": DType.COMPLEX64,
    "ComplexDouble": DType.COMPLEX128,
}
_REMEDY: Final = "Save dense tensors, all in one mapping: torch.save(module.state_dict(), path)."


def stored_in(file: RegularFile) -> dict[str, StoredTensor | bool | int | float | complex]:
    """Return the tensors and numbers of a state dict, by name.

    Raises
    ------
    InvalidArgumentError
        It is none that ``torch.save`` writes, has other things in it, or elements that no device has.
    """
    try:
        found = _unpickled(file)
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}, not a state dict")  # noqa: TRY301 - reported like what pickle raises
        for name, value in dict.items(found):
            if not isinstance(name, str):
                raise TypeError(f"it has the name {name!r:.50}")  # noqa: TRY301
            if not isinstance(value, (StoredTensor, bool, int, float, complex)):
                raise TypeError(f"weight {name!r:.200} is a {type(value).__name__}")  # noqa: TRY301
    except MemoryError:
        raise
    except Exception as error:  # what a broken or hostile file makes zipfile and pickle raise is of any kind
        raise InvalidArgumentError(
            f"{file.path} is not a state dict of tensors: {type(error).__name__}: {error!s:.1000}", remedy=_REMEDY
        ) from None
    return dict(found)


def _unpickled(file: RegularFile) -> Any:
    with file.stream() as stream, zipfile.ZipFile(stream) as archive:
        members = {each.filename.partition("/")[2]: each for each in archive.infolist()}
        order = members.get("byteorder")
        if order is not None and _bytes_of(file, order) != b"little":
            raise ValueError("its elements are big-endian")
        return _Unpickler(file, members).load()


def _place_of(file: RegularFile, member: zipfile.ZipInfo) -> tuple[int, int]:
    """Return where a member begins and ends in the file."""
    header = file.read(member.header_offset, _LOCAL_HEADER) if member.header_offset + _LOCAL_HEADER <= file.size else b""
    if member.compress_type != zipfile.ZIP_STORED or not header.startswith(b"PK\3\4"):
        raise ValueError(f"{member.filename!r} is compressed, or not where the archive says")
    begin = member.header_offset + _LOCAL_HEADER + sum([int.from_bytes(header[place : place + 2], "little") for place in (26, 28)])
    if begin + member.file_size > file.size:
        raise ValueError(f"{member.filename!r} goes beyond the end of the file")
    return begin, begin + member.file_size


def _bytes_of(file: RegularFile, member: zipfile.ZipInfo) -> bytes:
    begin, end = _place_of(file, member)
    return bytes(file.read(begin, end - begin))


@dataclass(frozen=True, slots=True)
class _Storage:
    """Elements in the file: a member of the archive. ``dtype`` is ``None`` for bytes whose tensors say what they are."""

    dtype: DType | None
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Named:
    """What a pickle names beside functions: the class of a storage, or a dtype. ``dtype`` is ``None`` for a class without."""

    dtype: DType | None


class _Unpickler(pickle.Unpickler):
    """Reads ``data.pkl``; of torch and the standard library it knows a few names, which are replaced by functions of this module."""

    def __init__(self, file: RegularFile, members: dict[str, zipfile.ZipInfo]) -> None:
        super().__init__(io.BytesIO(_bytes_of(file, members["data.pkl"])), encoding="utf-8")
        self._file = file
        self._members = members

    def find_class(self, module: str, name: str, /) -> Any:
        """Return what a name stands for here."""
        full = f"{module}.{name}"
        if full in _KNOWN:
            return _KNOWN[full]
        if module in ("torch", "torch.cuda") and name.removesuffix("Storage") in _STORAGES:
            return _Named(_STORAGES[name.removesuffix("Storage")])
        if module == "torch":
            try:
                return _Named(DType(name))
            except ValueError:
                pass
        raise pickle.UnpicklingError(f"it names {full}, which is no part of a dense tensor")

    def persistent_load(self, pid: Any, /) -> _Storage:
        """Return a storage, of which the pickle has the number."""
        kind, named, key, _, _ = pid
        if kind != "storage" or not isinstance(named, _Named):
            raise pickle.UnpicklingError("it refers to something else than a storage")
        return _Storage(named.dtype, *_place_of(self._file, self._members[f"data/{key}"]))


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> StoredTensor:
    """Return a tensor of a storage that says the dtype; ``rest``: whether it requires a gradient, hooks, and perhaps metadata."""
    return _stored(storage, storage.dtype, offset, shape, strides, rest[2:3])


def _tensor_of_dtype(
    storage: Any, offset: Any, shape: Any, strides: Any, gradient: Any, hooks: Any, named: Any, *rest: Any
) -> StoredTensor:
    """Return a tensor of a storage that has bytes."""
    return _stored(storage, named.dtype, offset, shape, strides, rest[:1])


def _stored(storage: _Storage, dtype: Any, offset: Any, shape: Any, strides: Any, metadata: tuple[Any, ...]) -> StoredTensor:
    if not isinstance(dtype, DType):
        raise pickle.UnpicklingError("a tensor has no dtype")
    if not is_shape(shape) or not is_sizes((offset, *strides)) or len(shape) != len(strides):
        raise pickle.UnpicklingError(f"a tensor has shape {shape!r:.200}, strides {strides!r:.200} and offset {offset!r:.50}")
    if any(metadata) and any(metadata[0].values()):
        raise pickle.UnpicklingError(f"a tensor is {', '.join(metadata[0])}, not dense elements")
    plain = c_strides(shape)
    # The stride of a dimension of one element says nothing.
    is_plain = math.prod(shape) < 2 or all(
        length == 1 or stride == wanted for length, stride, wanted in zip(shape, strides, plain, strict=True)
    )
    found = StoredTensor(tuple(shape), dtype, storage.begin + offset * dtype.itemsize, None if is_plain else tuple(strides))
    if found.end > storage.end:
        raise pickle.UnpicklingError(f"a tensor of {dtype.value}{list(shape)!r:.200} goes beyond its storage")
    return found


def _first(value: Any, *rest: Any) -> Any:
    """Return a parameter's tensor."""
    return value


def _of_type(function: Any, cls: Any, arguments: Any, state: Any) -> Any:
    """Return a tensor that has attributes, without these."""
    return function(*arguments)


_KNOWN: dict[str, Callable[..., Any] | _Named] = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": tuple,
    "torch.Tensor": _Named(None),
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch.nn.parameter.Buffer": _Named(None),
    "torch.nn.parameter.Parameter": _Named(None),
    "torch.storage.UntypedStorage": _Named(None),
}
