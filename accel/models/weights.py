"""Weights of models: named arrays out of files, state dicts and mappings, put into durable buffers with checksums.

Their bytes go through chunks of pinned memory: worker threads fill some, while the device copies others.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import traceback
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np

from accel.dtype import DType, DTypeLike, native
from accel.errors import AccelError, BackendUnavailableError, InvalidArgumentError
from accel.models.safetensors import SafetensorsFile

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    from accel.ref import AccelRef

__all__ = ["Progress", "RunBlocking", "WeightsDevice", "load_weights"]

Array: TypeAlias = np.ndarray[Any, Any]
Progress: TypeAlias = Callable[[int, int], object]
"""Called with the bytes that are done, and those of all weights."""
RunBlocking: TypeAlias = "Callable[..., Awaitable[Any]]"
"""Runs a function with its arguments on a worker thread: ``system.run_blocking``."""

_INDEX: Final = ".safetensors.index.json"
_PICKLED: Final = (".pt", ".pth", ".bin", ".ckpt")

_CHUNK: Final = 16 << 20
"""Bytes of a chunk: larger ones are no faster."""

_LEAST: Final = 64 << 10
"""Bytes of the chunks where hardly any pinned memory is free."""

_IN_FLIGHT: Final = 8
"""Chunks that are filled or copied at once."""


class WeightsDevice(Protocol):
    """What weights are put on: an :class:`accel.Device`."""

    def info(self) -> Any:
        """See :meth:`accel.Device.info`."""

    async def empty(self, shape: Any, dtype: DTypeLike, *, durable: bool = False) -> AccelRef:
        """See :meth:`accel.Device.empty`."""

    async def pinned(self, shape: Any, dtype: DTypeLike) -> Array:
        """See :meth:`accel.Device.pinned`."""

    async def put(self, array: Any, *, out: AccelRef | None = None) -> AccelRef:
        """See :meth:`accel.Device.put`."""

    async def keep_checksum(self, ref: AccelRef) -> None:
        """See :meth:`accel.Device.keep_checksum`."""


Read: TypeAlias = "Callable[[int, memoryview], object]"
"""Fills memory with the bytes of an array, from a place on. May block; several threads call it at once."""


@dataclass(frozen=True, slots=True)
class _Weight:
    """One array that is not read yet.

    Attributes
    ----------
    name : str
    shape : tuple of int
    dtype : DType
    identity : Hashable
        Equal for names of one array, such as an embedding and the output layer that shares its weights.
    open : callable
        Returns what reads it. May block.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    identity: Hashable
    open: Callable[[], Read]

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


async def load_weights(
    device: WeightsDevice, source: Any, *, run_blocking: RunBlocking, on_progress: Progress | None = None
) -> dict[str, AccelRef]:
    """Put named arrays on a device, each in a durable buffer with a checksum.

    Parameters
    ----------
    device
        An :class:`accel.Device` whose memory outlives its contexts.
    source
        A path to a ``.safetensors`` file, to a folder of such files, or to the ``.safetensors.index.json`` of several; to a state dict that
        ``torch.save`` wrote (``.pt .pth .bin .ckpt``); or to an ``.onnx`` file, whose bytes become the one array ``"model.onnx"``. Or a mapping of names
        to arrays or tensors. Or a list of these; no name may be in two of them. Arrays keep shape and dtype, 0-d and empty ones too.
    run_blocking
        Runs what blocks on a worker thread: ``system.run_blocking``.
    on_progress
        Called on the loop with the bytes that are done and those of all weights, first with 0, then after each buffer. What it raises ends the load.

    Returns
    -------
    dict of str to AccelRef
        Names that share one array, such as tied weights of torch, have the same ref.

    Raises
    ------
    InvalidArgumentError
        The source cannot be read, is not valid, or an array in it has no counterpart on a device.
    BackendUnavailableError
        A state dict is given and torch is not installed.
    UnsupportedError
        The device's memory does not outlive its contexts.
    OutOfMemoryError
        There is no room.

    Notes
    -----
    The memory of the host that this takes does not grow with the weights: files are read in chunks, a few at once. They must not be changed meanwhile. A
    state dict is mapped by torch, and unpickled with ``weights_only=True``, which runs no code of the file. After an error or a cancellation everything
    that was put is freed.
    """
    weights = await run_blocking(_collect, source)
    loading = _Loading(device, {each.identity: each for each in weights}, run_blocking, on_progress)
    errors: tuple[BaseException, ...] = ()
    try:
        await loading.run()
    except BaseExceptionGroup as group:
        errors = group.exceptions
    except BaseException:
        loading.refs.clear()
        raise
    if not errors:
        return {each.name: loading.refs[each.identity] for each in weights}
    # Errors keep the frames that they were raised in, and these would keep refs: those of the chunks beside the first, too.
    loading.refs.clear()
    for each in errors:
        traceback.clear_frames(each.__traceback__)
    try:
        raise errors[0]
    finally:
        del each, errors  # their tracebacks hold this frame


class _Loading:
    """Weights on their way to a device.

    Parameters
    ----------
    weights
        By identity. The others are those of :func:`load_weights`.

    Attributes
    ----------
    refs : dict
        What is on the device, or on its way, by identity.
    """

    def __init__(
        self, device: WeightsDevice, weights: Mapping[Hashable, _Weight], run_blocking: RunBlocking, on_progress: Progress | None
    ) -> None:
        self._device = device
        self._weights = weights
        self._run_blocking = run_blocking
        self._on_progress = on_progress
        self._done, self._total = 0, sum(each.nbytes for each in weights.values())
        self._chunks: dict[Hashable, int] = {}  # of each array, how many chunks are still to come
        self._room = asyncio.Semaphore(_IN_FLIGHT)
        self.refs: dict[Hashable, AccelRef] = {}

    async def run(self) -> None:
        """Put all arrays; raises a group of what went wrong."""
        # A chunk never waits for room with a part of it: so any limit will do. What others hold may never come back.
        pinned = self._device.info().pinned
        size = max(min(_CHUNK, (pinned.limit - pinned.used) // _IN_FLIGHT), min(_LEAST, pinned.limit // _IN_FLIGHT), 1)
        self._tell(0)
        async with asyncio.TaskGroup() as group:
            for identity, each in self._weights.items():
                await self._room.acquire()
                read = await self._run_blocking(each.open)
                self.refs[identity] = await self._device.empty(each.shape, each.dtype, durable=True)
                starts = range(0, each.nbytes, size) or (0,)
                self._chunks[identity] = len(starts)
                for start in starts:
                    if start:
                        await self._room.acquire()
                    group.create_task(self._move(identity, read, start, min(size, each.nbytes - start)))

    async def _move(self, identity: Hashable, read: Read, start: int, nbytes: int) -> None:
        """Put one chunk; the last one of an array completes it."""
        try:
            if nbytes:
                chunk = await self._device.pinned(nbytes, DType.UINT8)
                await self._run_blocking(read, start, chunk.data)
                await self._device.put(chunk, out=self.refs[identity].ravel().view(DType.UINT8)[start : start + nbytes])
                del chunk
            self._chunks[identity] -= 1
            if not self._chunks[identity]:
                await self._device.keep_checksum(self.refs[identity])
                self._tell(self._weights[identity].nbytes)
        finally:
            self._room.release()

    def _tell(self, nbytes: int) -> None:
        self._done += nbytes
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)


def _collect(source: Any) -> list[_Weight]:
    """Return what is in a source, in the order in which it is best read."""
    found: dict[str, _Weight] = {}
    for part in source if isinstance(source, (list, tuple)) else [source]:
        for each in _weights(part):
            if each.name in found:
                raise InvalidArgumentError(f"the weights have two arrays {each.name!r}", remedy="Give each name in one source only.")
            found[each.name] = each
    return list(found.values())


def _weights(source: Any) -> Iterator[_Weight]:
    if isinstance(source, Mapping):
        return _mapped(source, "the mapping")
    if not isinstance(source, (str, os.PathLike)):
        raise InvalidArgumentError(
            f"weights is a {type(source).__name__}", remedy="Give a path, a mapping of names to arrays, or a list of these."
        )
    path = Path(source)
    if path.is_dir():
        return _folder(path)
    if path.name.endswith(_INDEX):
        return _indexed(path)
    if path.suffix == ".safetensors":
        return _stored(path, None)
    if path.suffix in _PICKLED:
        return _mapped(_state_dict(path), str(path))
    if path.suffix == ".onnx":
        return _mapped({"model.onnx": _read_bytes(path)}, str(path))
    raise InvalidArgumentError(
        f"weights is {path}, whose format is not known",
        remedy=f"Give a .safetensors file, a folder of them, or one of {', '.join(_PICKLED)}.",
    )


def _folder(path: Path) -> Iterator[_Weight]:
    indices, files = sorted(path.glob("*" + _INDEX)), sorted(path.glob("*.safetensors"))
    if len(indices) > 1 or not (indices or files):
        raise InvalidArgumentError(
            f"folder {path} has {len(indices)} files *{_INDEX} and {len(files)} *.safetensors",
            remedy="Give the path of the one that has the weights.",
        )
    if indices:
        return _indexed(indices[0])
    return (weight for file in files for weight in _stored(file, None))


def _indexed(path: Path) -> Iterator[_Weight]:
    """Yield the tensors that an index names, file by file."""
    try:
        names = json.loads(_read_bytes(path).tobytes().decode())["weight_map"]
        files: dict[str, set[str]] = {}
        for name, file in names.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{file!r} is no name of a file beside the index")  # noqa: TRY301 - it is reported like what json raises
            files.setdefault(file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{path} is not a valid index of safetensors files: {error!r}", remedy="Download it again, or give the folder without it."
        ) from None
    return (weight for file, wanted in files.items() for weight in _stored(path.parent / file, wanted))


def _stored(path: Path, wanted: set[str] | None) -> Iterator[_Weight]:
    """Yield the tensors of a safetensors file: all, or those that an index names."""
    file = SafetensorsFile(path)
    missing = (wanted or set()) - file.tensors.keys()
    if missing:
        raise InvalidArgumentError(f"{path} has no tensor {min(missing)!r}, which the index names", remedy="Download both files again.")
    for name, stored in file.tensors.items():
        if wanted is None or name in wanted:
            yield _Weight(name, stored.shape, stored.dtype, (path, name), lambda name=name: partial(file.read, name))  # type: ignore[misc]


def _read_bytes(path: Path) -> Array:
    try:
        return np.fromfile(path, np.uint8)
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}", remedy="Give the path of a readable file.") from error


def _state_dict(path: Path) -> Mapping[Any, Any]:
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailableError(
            f"{path} is read by torch, which is not installed", remedy="pip install '.[torch]'  # in a checkout"
        ) from error
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # what a broken or hostile file makes torch raise is of any kind
        raise InvalidArgumentError(
            f"torch does not read {path} with weights_only=True: {error}", remedy="Save it anew: torch.save(module.state_dict(), path)."
        ) from error
    if not isinstance(found, Mapping):
        raise InvalidArgumentError(
            f"{path} holds a {type(found).__name__}, not a state dict", remedy="Save it anew: torch.save(module.state_dict(), path)."
        )
    return found


def _mapped(arrays: Mapping[Any, Any], source: str) -> Iterator[_Weight]:
    for name, value in arrays.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"{source} has the name {name!r}", remedy="Give strings as names of weights.")
        try:
            array, identity = _host_array(value)
        except AccelError as error:
            raise error.clone(message=f"weight {name!r} of {source}: {error.message}") from error
        yield _Weight(name, array.shape, DType.of(array.dtype.newbyteorder("=")), identity, partial(_reader, array))


def _reader(array: Array) -> Read:
    """Return what reads an array of the host; one of another layout is rearranged first."""
    data = native(array).reshape(-1).view(np.uint8)

    def read(start: int, out: memoryview) -> None:
        np.copyto(np.frombuffer(out, np.uint8), data[start : start + len(out)])

    return read


def _host_array(value: Any) -> tuple[Array, Hashable]:
    """Return an array of the host over what is given, and what tells its elements from others'."""
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        array = _of_tensor(value)
    else:
        array = value if isinstance(value, np.ndarray) else native(value)
        DType.of(array.dtype.newbyteorder("="))
    if not array.size:
        return array, object()
    # Two arrays of one place, shape, strides and dtype are one. The array keeps the place.
    return array, (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype)


def _of_tensor(tensor: Any) -> Array:
    """Return a tensor as an array of numpy, which shares its memory if that is the host's."""
    import torch

    dtype = DType.of(str(tensor.dtype).removeprefix("torch."))
    if tensor.is_meta or tensor.layout is not torch.strided:
        what = "on the device meta: it has no elements" if tensor.is_meta else f"of layout {tensor.layout}"
        raise InvalidArgumentError(f"it is a tensor {what}", remedy="Give dense tensors with their elements.")
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if dtype.is_extended:
        # numpy knows the dtype only by ml_dtypes, of which torch knows nothing; the bytes of both are the same.
        bits = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
        array: Array = tensor.view(bits).numpy().view(dtype.numpy)
    else:
        array = tensor.numpy()
    return array
