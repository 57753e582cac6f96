"""What files have in them, as a child process says that parsed them: this process checks what it is told, and reads nothing but elements."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accel.dtype import DType
from accel.errors import AccelError, InvalidArgumentError
from accel.files.messages import MAX_MESSAGE, Kind
from accel.files.regular_file import RegularFile
from accel.files.stored_tensor import StoredTensor, is_shape, is_sizes
from accel.process.channel import Channel
from accel.process.child import ChildProcess
from accel.process.protocol import ProtocolError
from accel.remote.error_codec import decode_error
from accel.storage.disposal import Disposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.actors.system import ActorSystem
    from accel.files.regular_file import Identity
    from accel.process.exit_status import ExitStatus

__all__ = ["Description", "StoredFile", "describe"]

_TARGET: Final = "accel.files.describer:serve"
_TIMEOUT: Final = 120.0
"""Seconds for a description: parsing the largest ONNX file takes a fraction of that."""
_MOST: Final = 64 << 20
"""Bytes of all that one description says. A model of 100,000 tensors takes about 10 MiB."""


class StoredFile:
    """A file with tensors in it, which is opened when the first of them is read. Used by one thread at a time, but for what it returns.

    Parameters
    ----------
    path, identity
        Of the file, as it was described.
    """

    def __init__(self, path: Path, identity: Identity) -> None:
        self.path = path
        self.size = identity[2]
        self._identity = identity
        self._file: RegularFile | None = None

    def opened(self) -> RegularFile:
        """Return the file. May block.

        Raises
        ------
        InvalidArgumentError
            It cannot be read, or was changed since it was described.
        """
        if self._file is None:
            file = RegularFile(self.path)
            if file.identity != self._identity:
                raise InvalidArgumentError(
                    f"{self.path} was changed while it was loaded",
                    remedy="Load it again, and write files under another name before they are renamed.",
                )
            self._file = file
        return self._file

    def close(self) -> None:
        """Close the file, once no thread reads it; :meth:`opened` opens it again, if it is still the same."""
        self._file = None


@dataclass
class Description:
    """What a source has.

    Attributes
    ----------
    tensors : dict
        By name, the file and the place in it; or the number itself.
    inputs : list or None
        Of an ONNX file: name, type and shape of each input of the model, as ONNX Runtime names them.
    """

    tensors: dict[str, tuple[StoredFile, StoredTensor] | int | float | complex] = field(default_factory=dict)
    inputs: list[tuple[str, str, list[int | str | None]]] | None = None


async def describe(system: ActorSystem, paths: Sequence[Path]) -> list[Description]:
    """Return what each of some sources has: files of weights or models, or folders.

    Parameters
    ----------
    system
        Of which the child is.
    paths
        Of the sources.

    Raises
    ------
    InvalidArgumentError
        A file cannot be read, is not valid, or ends the process that parses it.
    UnsupportedError
        A tensor's elements have no counterpart on a device.
    OutOfMemoryError
        Parsing takes more memory than a file of its size may.
    BackendUnavailableError
        There is no process to be had, or ONNX Runtime is not installed.

    Notes
    -----
    The child is killed at the end, also after a cancellation.
    """
    if not paths:
        return []
    answer = _Answer(paths)
    disposal = Disposal(asyncio.get_running_loop())
    child = await ChildProcess.start(system, _TARGET, env={"OPENBLAS_NUM_THREADS": "1"}, on_exit=answer.exited, nested=True)
    try:
        channel = Channel(
            child.sock,
            asyncio.get_running_loop(),
            on_message=answer.received,
            on_lost=answer.lost,
            max_received=MAX_MESSAGE,
            close_fds=disposal.close_fds,
        )
        try:
            channel.send(Kind.DESCRIBE, json.dumps([str(path) for path in paths]).encode())
            async with asyncio.timeout(_TIMEOUT):
                return await answer.future
        except TimeoutError:
            raise InvalidArgumentError(
                f"{answer.named} could not be described within {_TIMEOUT:g} s", remedy="Look at the file, and at where it lies."
            ) from None
        finally:
            channel.close()
    finally:
        await child.aclose(grace=0.0)
        await disposal.aclose()


class _Answer:
    """Takes what the child says of sources."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._found = [Description() for _ in paths]
        self._file: StoredFile | None = None
        self._nbytes = 0
        self.future: asyncio.Future[list[Description]] = asyncio.get_running_loop().create_future()
        self.named = ", ".join(map(str, paths[:3]))

    def received(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Take a message; see :class:`accel.process.channel.Channel`."""
        if self.future.done():
            return
        self._nbytes += len(data)
        if kind == Kind.DONE:
            self.future.set_result(self._found)
        elif kind == Kind.REFUSED:
            self.future.set_exception(decode_error(data))
        elif self._nbytes > _MOST:
            self._fail(f"{self.named} has more tensors or longer names than any model")
        else:
            try:
                self._take(kind, json.loads(data))
            except (ValueError, TypeError, IndexError, RecursionError) as error:
                raise ProtocolError(f"the process that describes files said what means nothing: {error!r:.200}") from None

    def lost(self, error: AccelError | None) -> None:
        """Take note that nothing more will be said; how the child ended follows, unless it broke the rules."""
        if isinstance(error, ProtocolError) and not self.future.done():
            self.future.set_exception(error)

    def exited(self, status: ExitStatus) -> None:
        """Take note of the child's end."""
        self._fail(f"{self.named} ended the process that parsed it, which {status.describe()}")

    def _fail(self, text: str) -> None:
        if not self.future.done():
            self.future.set_exception(InvalidArgumentError(text, remedy="Look at where the file comes from, or save it again."))

    def _take(self, kind: int, content: Any) -> None:
        if kind == Kind.FILE:
            self._file = self._checked_file(*content)
            return
        source, *rest = content
        found = self._found[_int(source)]
        if kind == Kind.INPUTS:
            found.inputs = [_input(*each) for each in rest[0]]
            return
        name = _str(rest[0])
        if name in found.tensors:
            self._fail(f"the weights have two arrays {name!r:.200}")
        elif kind == Kind.NUMBER:
            found.tensors[name] = _number(rest[1])
        elif kind == Kind.TENSOR and self._file is not None:
            found.tensors[name] = self._file, _tensor(self._file, *rest[1:])
        else:
            raise ValueError(f"a message of kind {kind}")

    def _checked_file(self, path: Any, identity: Any) -> StoredFile:
        place = Path(_str(path))
        if not any(place == each or place.parent in (each, each.parent) for each in self._paths):
            raise ValueError(f"{place} is in none of the sources")
        device, inode, size, changed = map(_int, identity)
        return StoredFile(place, (device, inode, size, changed))


def _tensor(file: StoredFile, dtype: Any, shape: Any, start: Any, strides: Any) -> StoredTensor:
    if not is_shape(shape) or not is_sizes([start]) or not (strides is None or (is_sizes(strides) and len(strides) == len(shape))):
        raise ValueError(f"a tensor of shape {shape!r:.200}")
    found = StoredTensor(tuple(shape), DType(dtype), start, tuple(strides) if strides else None)
    if found.end > file.size:
        raise ValueError(f"a tensor that ends at byte {found.end} of {file.size}")
    return found


def _input(name: Any, type_: Any, shape: Any) -> tuple[str, str, list[int | str | None]]:
    if not isinstance(shape, list) or not all(each is None or type(each) in (int, str) for each in shape):
        raise ValueError(f"an input of shape {shape!r:.200}")
    return _str(name), _str(type_), shape


def _number(value: Any) -> int | float | complex:
    if isinstance(value, list):
        real, imaginary = value
        return complex(_number(real), _number(imaginary))
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r:.80} is no number")
    return value


def _int(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} is no count")
    return value


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not a text")
    return value
