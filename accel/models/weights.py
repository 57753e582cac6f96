"""Weights of models: named arrays out of files and mappings, put into durable buffers with checksums.

What is in files a child process finds out; see :mod:`accel.files`. Their bytes go through chunks of pinned memory: worker threads fill some, while the
device copies others.
"""

from __future__ import annotations

import asyncio
import math
import os
import traceback
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np

from accel.dtype import DType, DTypeLike, native
from accel.errors import AccelError, InvalidArgumentError
from accel.files.description import describe
from accel.files.strided import gather

if TYPE_CHECKING:
    from accel.actors.system import ActorSystem
    from accel.files.description import StoredFile
    from accel.files.stored_tensor import StoredTensor
    from accel.ref import AccelRef

__all__ = ["Collected", "Progress", "Told", "Weight", "WeightsDevice", "collect", "load_weights", "tell_nothing"]

Array: TypeAlias = np.ndarray[Any, Any]
Told: TypeAlias = Callable[[int, int], object]
"""Called with how much is done, and how much there is."""
Progress: TypeAlias = Callable[[str, int, int], object]
"""Called with what is made, how much of it is done, and how much there is; see :meth:`accel.Device.load_model`."""

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

    async def keep_checksum(self, ref: AccelRef) -> int:
        """See :meth:`accel.Device.keep_checksum`."""

    async def verify_checksum(self, ref: AccelRef) -> bool:
        """See :meth:`accel.Device.verify_checksum`."""


Read: TypeAlias = "Callable[[int, memoryview], object]"
"""Fills memory with the bytes of an array, from a place on. May block; several threads call it at once."""
Content: TypeAlias = "Array | tuple[StoredFile, StoredTensor]"
"""An array, or its file and the place there."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One array that is not read yet.

    Attributes
    ----------
    name : str
    shape : tuple of int
    dtype : DType
    identity : Hashable
        Equal for names of one array, such as an embedding and the output layer that shares its weights.
    content : Content
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    identity: Hashable
    content: Content

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, axis: int, start: int, stop: int) -> Weight:
        """Return the weight of this name that has the elements from ``start`` to ``stop`` along one dimension."""
        content: Content
        if isinstance(self.content, tuple):
            file, stored = self.content
            content = file, stored.part(axis, start, stop)
        else:
            content = self.content[(*[slice(None)] * axis, slice(start, stop))]
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return Weight(self.name, shape, self.dtype, (self.identity, axis, start, stop), content)

    def opened(self) -> Read:
        """Return what reads it. May block."""
        return _opened(*self.content) if isinstance(self.content, tuple) else _reader(self.content)


@dataclass(frozen=True, slots=True)
class Collected:
    """What sources of weights have, not read yet.

    Attributes
    ----------
    weights : list
    inputs : dict
        Of each ONNX file among the sources, by its path, what it says of the model's inputs; see :class:`~accel.files.description.Description`.
    ranks : list
        Copies of the weights that each rank of a world has; there are no others then.
    """

    weights: list[Weight] = field(default_factory=list)
    inputs: dict[Path, list[tuple[str, str, list[int | str | None]]]] = field(default_factory=dict)
    ranks: list[Collected] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of the elements of all weights, each array counted once."""
        return sum({each.identity: each.nbytes for each in self.weights}.values())

    def kept(self) -> Collected | None:
        """Return itself, with its files closed, if all can be read again without arrays of the caller's; else ``None``."""
        if not self.weights or any(isinstance(each.content, np.ndarray) and each.content.ndim for each in self.weights):
            return None
        for each in self.weights:
            if isinstance(each.content, tuple):
                each.content[0].close()
        return self


def tell_nothing(done: int, total: int) -> None:
    """Tell nothing of how far it has come."""


async def collect(system: ActorSystem, source: Any) -> Collected:
    """Find out what is in a source of weights. The parameters and errors are those of :func:`load_weights`."""
    parts = list(source) if isinstance(source, (list, tuple)) else [source]
    for part in parts:
        if not isinstance(part, (str, os.PathLike, Mapping)):
            raise InvalidArgumentError(
                f"weights is a {type(part).__name__}", remedy="Give a path, a mapping of names to arrays, or a list of these."
            )
    paths = [Path(part) for part in parts if not isinstance(part, Mapping)]
    described = iter(await describe(system, paths))
    found = Collected()
    names = set[str]()
    for part in parts:
        if isinstance(part, Mapping):
            weights = await system.run_blocking(_mapped, part)
        else:
            description = next(described)
            weights = [
                _stored(name, *place) if isinstance(place, tuple) else _number(name, place) for name, place in description.tensors.items()
            ]
            if description.inputs is not None:
                found.inputs[Path(part)] = description.inputs
        for each in weights:
            if each.name in names:
                raise InvalidArgumentError(f"the weights have two arrays {each.name!r}", remedy="Give each name in one source only.")
            names.add(each.name)
        found.weights.extend(weights)
    return found


async def load_weights(device: WeightsDevice, source: Any, *, system: ActorSystem, on_progress: Told | None = None) -> dict[str, AccelRef]:
    """Put named arrays on a device, each in a durable buffer with a checksum.

    Parameters
    ----------
    device
        An :class:`accel.Device` whose memory outlives its contexts.
    source
        A path to a ``.safetensors`` file, to a folder of such files, or to the ``.safetensors.index.json`` of several; to a state dict that
        ``torch.save`` wrote (``.pt .pth .bin .ckpt``); or to an ``.onnx`` file, whose bytes become the one array ``"model.onnx"``. Or a mapping of names
        to arrays or tensors. Or a list of these; no name may be in two of them. Arrays keep shape and dtype, 0-d and empty ones too. Or what
        :func:`collect` returned for one of these.
    system
        Runs what blocks on worker threads, and what parses files in a child process.
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
    UnsupportedError
        The device's memory does not outlive its contexts.
    OutOfMemoryError
        There is no room.
    AccelError
        See :func:`accel.files.description.describe`.

    Notes
    -----
    The memory of the host that this takes does not grow with the weights, nor with what a file says that they are: files are read in chunks, a few at once.
    They must not be changed meanwhile. After an error or a cancellation everything that was put is freed.
    """
    weights = (source if isinstance(source, Collected) else await collect(system, source)).weights
    loading = _Loading(device, {each.identity: each for each in weights}, system, on_progress)
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

    def __init__(self, device: WeightsDevice, weights: Mapping[Hashable, Weight], system: ActorSystem, on_progress: Told | None) -> None:
        self._device = device
        self._weights = weights
        self._run_blocking = system.run_blocking
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
                read = await self._run_blocking(each.opened)
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


def _stored(name: str, file: StoredFile, stored: StoredTensor) -> Weight:
    """Return a tensor of a file."""
    # Two tensors of one place, shape and dtype are one.
    identity = (file, stored) if math.prod(stored.shape) else object()
    return Weight(name, stored.shape, stored.dtype, identity, (file, stored))


def _opened(file: StoredFile, stored: StoredTensor) -> Read:
    """Open the file, and return what reads a tensor in it."""
    opened = file.opened()
    if stored.strides is None:
        return lambda start, out: opened.fill(stored.start + start, out)
    return partial(gather, opened, stored)


def _number(name: str, value: complex) -> Weight:
    array = native(value)
    return Weight(name, array.shape, DType.of(array.dtype), object(), array)


def _mapped(arrays: Mapping[Any, Any]) -> list[Weight]:
    found = []
    for name, value in arrays.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"the mapping has the name {name!r}", remedy="Give strings as names of weights.")
        try:
            array, identity = _host_array(value)
        except AccelError as error:
            raise error.clone(message=f"weight {name!r} of the mapping: {error.message}") from error
        found.append(Weight(name, array.shape, DType.of(array.dtype.newbyteorder("=")), identity, array))
    return found


def _reader(array: Array) -> Read:
    """Return what reads an array of the host: one of another layout or byte order part by part, because it may be much larger than its memory."""
    if array.flags.c_contiguous and array.dtype.isnative:
        data = array.reshape(-1).view(np.uint8)
        return lambda start, out: np.copyto(np.frombuffer(out, np.uint8), data[start : start + len(out)])
    size = array.itemsize

    def read(start: int, out: memoryview) -> None:
        first, last = start // size, -(-(start + len(out)) // size)
        part = native(array.flat[first:last]).view(np.uint8)
        np.copyto(np.frombuffer(out, np.uint8), part[start - first * size :][: len(out)])

    return read


def _host_array(value: Any) -> tuple[Array, Hashable]:
    """Return an array of the host over what is given, and what tells its elements from others'."""
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        array = _of_tensor(value)
    else:
        array = value if type(value) is np.ndarray else native(value)
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
