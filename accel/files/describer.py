"""The program of the process that describes files: it finds them, parses them, and tells where the tensors are. It has no GPU, and little memory.

The files are hostile until this has read them. What they make it do ends here: it may take a bounded part of the machine's memory, it reads regular files
only, and its parent takes its answers as numbers and names.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accel.dtype import DType
from accel.errors import AccelError, BackendUnavailableError, InvalidArgumentError, LibraryError, OutOfMemoryError
from accel.files import safetensors, state_dict
from accel.files.growth import limit_address_space
from accel.files.messages import MAX_MESSAGE, Kind
from accel.files.regular_file import RegularFile
from accel.files.stored_tensor import StoredTensor
from accel.process.channel import Channel
from accel.remote.error_codec import encode_error

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping

__all__ = ["serve"]

_INDEX: Final = ".safetensors.index.json"
_PICKLED: Final = (".pt", ".pth", ".bin", ".ckpt")

_ROOM: Final = 1 << 30
"""Bytes of address space for what a file says of itself."""
_ROOM_PER_BYTE: Final = 4
"""More of it for each byte of an ONNX file: its bytes, the protocol buffer and the weights that ONNX Runtime makes of them, and one more."""


async def serve(sock: socket.socket) -> None:
    """Describe the files that the first message names, and end."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[list[str]] = loop.create_future()
    ended: asyncio.Future[None] = loop.create_future()

    def received(kind: int, data: bytes, fds: list[int]) -> None:
        asked.set_result(json.loads(data))

    def lost(error: AccelError | None) -> None:
        if not asked.done():
            asked.set_result([])
        ended.set_result(None)

    channel = Channel(sock, loop, on_message=received, on_lost=lost, max_message=MAX_MESSAGE)
    paths = await asked
    limit_address_space(_ROOM)
    for source, path in enumerate(paths):
        error = _refusal(channel, source, Path(path))
        if error is not None:
            channel.send(Kind.REFUSED, encode_error(error))
            break
    else:
        channel.send(Kind.DONE)
    await ended  # the parent has read all, and closes


def _refusal(channel: Channel, source: int, path: Path) -> AccelError | None:
    """Describe a source, or return why that cannot be."""
    try:
        _describe(channel, source, path)
    except MemoryError:
        return OutOfMemoryError(
            f"describing {path} takes more memory than a file of its size may",
            remedy="Look at where it comes from: it declares more than it has.",
        )
    except AccelError as error:
        return error
    except Exception as error:
        refused = LibraryError(f"{path} could not be described: {error!r:.1000}", remedy="See its cause, and the file.")
        refused.__cause__ = error
        return refused
    return None


def _describe(channel: Channel, source: int, path: Path) -> None:
    if path.suffix == ".onnx":
        _describe_onnx(channel, source, path)
        return
    for file, found in _files(path):
        channel.send(Kind.FILE, _json([str(file.path), file.identity]))
        for name, stored in found.items():
            if isinstance(stored, StoredTensor):
                text = [source, name, stored.dtype.value, stored.shape, stored.start, stored.strides]
                channel.send(Kind.TENSOR, _json(text))
            else:
                number = [stored.real, stored.imag] if isinstance(stored, complex) else stored
                channel.send(Kind.NUMBER, _json([source, name, number]))


def _describe_onnx(channel: Channel, source: int, path: Path) -> None:
    """Tell that the bytes of the file are one tensor, once ONNX Runtime has taken them, and what the model's inputs are."""
    try:
        from accel.files import onnx
    except ImportError as error:
        raise BackendUnavailableError(
            f"{path} is read by ONNX Runtime, which cannot be imported: {error}",
            remedy="Install it: pip install '.[onnx]'  # in a checkout",
        ) from error
    file = RegularFile(path)
    limit_address_space(_ROOM + _ROOM_PER_BYTE * file.size)
    inputs = onnx.session(onnx.whole(file), path, 1, optimizes=False).get_inputs()
    channel.send(Kind.FILE, _json([str(path), file.identity]))
    channel.send(Kind.TENSOR, _json([source, "model.onnx", DType.UINT8.value, [file.size], 0, None]))
    channel.send(Kind.INPUTS, _json([source, [[each.name, each.type, each.shape] for each in inputs]]))


def _files(path: Path) -> Iterator[tuple[RegularFile, Mapping[str, Any]]]:
    """Yield the files of a source, and what is in each."""
    if path.is_dir():
        yield from _folder(path)
    elif path.name.endswith(_INDEX):
        yield from _indexed(path)
    elif path.suffix == ".safetensors":
        file = RegularFile(path)
        yield file, safetensors.stored_in(file)
    elif path.suffix in _PICKLED:
        file = RegularFile(path)
        yield file, state_dict.stored_in(file)
    else:
        raise InvalidArgumentError(
            f"weights is {path}, whose format is not known",
            remedy=f"Give a .safetensors file, a folder of them, or one of {', '.join(_PICKLED)}.",
        )


def _folder(path: Path) -> Iterator[tuple[RegularFile, Mapping[str, Any]]]:
    indices, files = sorted(path.glob("*" + _INDEX)), sorted(path.glob("*.safetensors"))
    if len(indices) > 1 or not (indices or files):
        raise InvalidArgumentError(
            f"folder {path} has {len(indices)} files *{_INDEX} and {len(files)} *.safetensors",
            remedy="Give the path of the one that has the weights.",
        )
    if indices:
        yield from _indexed(indices[0])
        return
    for each in files:
        file = RegularFile(each)
        yield file, safetensors.stored_in(file)


def _indexed(path: Path) -> Iterator[tuple[RegularFile, Mapping[str, Any]]]:
    """Yield the files that an index names, each with the tensors that it is to have."""
    index = RegularFile(path)
    try:
        files: dict[str, set[str]] = {}
        for name, each in json.loads(index.read(0, index.size).decode())["weight_map"].items():
            if not isinstance(each, str) or Path(each).name != each:
                raise ValueError(f"{each!r:.200} is no name of a file beside the index")  # noqa: TRY301 - reported like what json raises
            files.setdefault(each, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{path} is not a valid index of safetensors files: {error!r:.1000}", remedy="Download it again, or give the folder without it."
        ) from None
    for each, wanted in files.items():
        file = RegularFile(path.parent / each)
        found = safetensors.stored_in(file)
        missing = wanted - found.keys()
        if missing:
            raise InvalidArgumentError(
                f"{file.path} has no tensor {min(missing)!r:.200}, which the index names", remedy="Download both files again."
            )
        yield file, {name: stored for name, stored in found.items() if name in wanted}


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
