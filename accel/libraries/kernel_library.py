"""Kernels of the user's own: torch, CuPy, NVRTC or anything that enqueues into a stream."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np

from accel import dlpack
from accel.dtype import DType
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops import KernelOp
from accel.ops.base import check_frozen
from accel.values import check_count, check_flag

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.backend import DeviceDescription

__all__ = ["KernelLibrary", "Operand", "Ranks", "kernel", "kernels_of"]

F = TypeVar("F", bound="Callable[..., object]")

_MARK = "__accel_kernel__"


@dataclass(frozen=True, slots=True)
class Operand:
    """An array in device memory, as a kernel of the user's own gets it: valid until the kernel's work in the stream has ended.

    One that stands for a durable ref among the arguments of :meth:`accel.Device.register` is valid as long as the library's instance.

    Array libraries take it without a copy: on CUDA devices by DLPack (``torch.from_dlpack``, every dtype but float4) or ``__cuda_array_interface__``
    (``cupy.asarray``, numba), on the CPU by ``np.asarray`` and DLPack. What is made of it must not outlive the op, and an input must not be written.

    Attributes
    ----------
    address : int
        Where it starts; 0 where there are no elements.
    shape : tuple of int
    dtype : DType
    is_output : bool
        Whether the op writes it.
    backend : str
        Name of the backend whose memory it is.
    index : int
        Of the device, among those of its backend.
    stream
        The one that the kernel enqueues into, in whose order the memory may be used; ``None`` where it may be read in any.
    """

    address: int
    shape: tuple[int, ...]
    dtype: DType
    is_output: bool
    backend: str
    index: int = 0
    stream: Any = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements (C order, no padding)."""
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface of version 3; the stream is the kernel's own, so there is nothing to wait for."""
        if self.backend != "cuda":
            raise AttributeError(f"this array is in memory of the backend {self.backend!r}, not of CUDA")
        if self.dtype.is_extended:
            raise AttributeError(f"the interface knows no {self.dtype.value}; use the address")
        return {
            "shape": self.shape,
            "typestr": self.dtype.numpy.str,
            "data": (self.address, not self.is_output),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's name of the device.

        Raises
        ------
        BufferError
            If DLPack has none for this backend that accel knows.
        """
        if self.backend == "cuda":
            return dlpack.CUDA, self.index
        if self.backend == "cpu":
            return dlpack.CPU, 0
        raise BufferError(f"memory of the backend {self.backend!r} is not shared by DLPack: use the address")

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule over the memory, which it does not keep.

        Parameters
        ----------
        stream
            The consumer's stream: the kernel's own one, because in no other is the memory ready, or -1. Any, where there is no :attr:`stream`.
        max_version
            The newest DLPack that the consumer knows.
        dl_device, copy
            Another device, and ``copy=True``, are refused.

        Raises
        ------
        BufferError
            If the consumer works in another stream, asks for what is refused, or DLPack has no such elements.
        """
        device = self.__dlpack_device__()
        if copy or (dl_device is not None and tuple(dl_device) != device):
            raise BufferError("an operand is shared where it is, and not copied")
        if self.backend == "cuda" and self.stream is not None and stream != -1 and stream != self.stream.__cuda_stream__()[1]:
            raise BufferError(
                f"the current stream ({stream}) is not the kernel's: take the operand inside "
                "`with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle))`, or what your library has for that"
            )
        return dlpack.export(self.address, self.shape, self.dtype, device, None, max_version=max_version)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        """Return a view where the processor can read the memory, which is on the CPU backend."""
        if self.backend != "cpu":
            raise TypeError(f"this array is in memory of {self.backend}, which numpy cannot read")
        interface = {"shape": self.shape, "typestr": f"|V{self.dtype.itemsize}", "data": (self.address, not self.is_output), "version": 3}
        if not self.size:
            return np.empty(self.shape, self.dtype.numpy)
        return np.asarray(_Interface(interface)).view(self.dtype.numpy)


class Ranks(Protocol):
    """The ranks of worlds that a context is."""

    def get(self, world: int, epoch: int) -> Any:
        """Return its place in a world's communicator of an epoch, a :class:`~accel.world.member.Member`.

        Raises
        ------
        WorldChangedError
            The epoch is over.
        """


class _Interface:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def kernel(op: type[KernelOp[Any]]) -> Callable[[F], F]:
    """Mark a method of a :class:`KernelLibrary` as what enqueues ops of one class.

    The method is called as ``method(op, stream, inputs, outputs)``: the op with its options, the stream to enqueue into, and the
    :class:`Operand` of each ref that the op reads, and of each that it writes or makes, in the order of its plan.
    """

    def mark(method: F) -> F:
        setattr(method, _MARK, op)
        return method

    return mark


class KernelLibrary:
    """Kernels of the user's own, by which a device runs ops of the user's own; base class.

    A subclass marks methods with :func:`kernel`, one for each class of op, and is given to :meth:`accel.Device.register`. From then on
    ``await device.run(MyOp(x))`` and ``batch.run(MyOp(x))`` run these ops like all others: in the device's order, in a stream of the library's own, with
    refs in and out, deadlines, cancellation and backpressure, and the same errors after a fault.

    There is one instance per context: it is made, and :meth:`open` called, when the library is registered, and again after every rebuild.

    Durable refs among the arguments of the registration, also in dicts, lists and tuples, reach ``__init__`` as :class:`Operand` over the same memory. They
    are for reading: what writes the refs meanwhile is not ordered with the library's ops.

    Rules for a kernel method: it only *enqueues* into the stream that it is given, and waits for nothing. It reads ``inputs``, writes ``outputs``, and
    keeps neither. Memory of its own must stay until the stream has passed its use (torch's and CuPy's allocators see to that in a ``with stream`` block).
    A graph on a GPU calls it once, at the recording, and repeats what it enqueued: memory of its own must then stay as long as the graph, which those
    allocators do not know; so record only methods that work in ``inputs``, ``outputs`` and what :meth:`open` made.
    What it raises is the op's error: an :class:`~accel.AccelError` as it is, anything else wrapped in :class:`~accel.LibraryError`. On CUDA the stream
    speaks ``__cuda_stream__`` and has a ``handle``; on the CPU it has ``submit(work, cost)``, which calls ``work()`` in its turn (``cost``: about how many
    seconds that takes). What ``work`` raises is the op's error too, and that of ops behind it which read what it was to write; only an
    :class:`~accel.AccelError` whose scope is more than the op is a fault of the context.

    Attributes
    ----------
    name : str
        The library's name: what its ops have as ``library``, and its kernel actor in ``system.tree()``.
    description : DeviceDescription
        Of the device; there before :meth:`open` is called.
    blocking : bool
        Whether a kernel method may take long on the host (it imports, loads kernels, allocates): it is then called on a worker thread, in its place in
        line, one at a time. ``False`` calls it on the loop's thread: for launches that are known not to block.
    launches : int
        How many kernels and copies a kernel method enqueues at most. A GPU's queue takes about a thousand, and whatever enqueues more waits; so ops of this
        library are in flight only as long as the sum of their launches is below ``max_in_flight``. Counts on devices that have such a bound.
    eager : bool
        When the library is opened again after a rebuild: ``True`` before the generation is READY, ``False`` at its first op.
    capturable : bool
        Whether what a kernel method enqueues may be captured into a graph and repeated: it works in ``inputs``, ``outputs`` and what :meth:`open` made, and
        in no memory that an allocator may give to others between two replays. ``False`` has such recordings refused where graphs are captured.
    captures : bool
        Whether :meth:`open` captures its stream into graphs. The library then shares its stream with no other, whatever the device's ``streams`` say, and
        memory that other libraries gave back is not waited for while it opens: CUDA would break the capture off.
    several_streams : bool
        Whether independent ops of this library may run on several streams at a time, as those of the built-in libraries do.
        Methods are still called one at a time, but work of two ops overlaps on the device: what :meth:`open` made is only read, or each op has its own.
        ``False`` keeps the ops in one stream, in their order.
    collective : bool
        Whether its ops have collectives in them. They go into the stream of all collectives then, so that these come in one order on all ranks of a world;
        what :meth:`open` gets is a stream of the library's own.
    members : Ranks
        The ranks of worlds that the context is; there before :meth:`open` is called.
    """

    name: ClassVar[str]
    blocking: ClassVar[bool] = True
    capturable: ClassVar[bool] = False
    captures: ClassVar[bool] = False
    eager: ClassVar[bool] = False
    launches: ClassVar[int] = 64
    several_streams: ClassVar[bool] = False
    collective: ClassVar[bool] = False
    description: DeviceDescription
    members: Ranks

    @classmethod
    def preload(cls, *args: Any, **kwargs: Any) -> None:
        """Import what :meth:`open` will, besides the module of this class, with the arguments of the registration. It makes nothing, and uses no device.

        With ``standby=`` it is called in a process that children are forked from, so that they need not import. No thread may run when it returns.
        """

    def open(self, stream: Any) -> None:
        """Prepare: imports, handles, weights. Called once, on a worker thread, before the first kernel.

        Parameters
        ----------
        stream
            The library's own stream, or the first of several. In a batch with other libraries' ops they come in another one: kernels enqueue into the stream
            that they are given.
        """

    def close(self) -> None:
        """Give back what :meth:`open` made. Called on a worker thread, with nothing of the library in the streams any more. Not called after a fault.

        What it raises is logged.
        """


def kernels_of(library: type[KernelLibrary]) -> dict[type[KernelOp[Any]], str]:
    """Return the ops of a library and the names of the methods that enqueue them, after checking them.

    Raises
    ------
    InvalidArgumentError
        If it is no such class, or a method does not fit it.
    """
    if not (isinstance(library, type) and issubclass(library, KernelLibrary)):
        raise InvalidArgumentError(
            f"{library!r} is not a KernelLibrary", remedy="Give a subclass of accel.KernelLibrary, and its arguments."
        )
    name = getattr(library, "name", None)
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"{library.__name__} has no name", remedy='Give it one: `name = "mine"`.')
    remedy = "Give the most kernels and copies that a kernel method enqueues, such as 64."
    check_count(f"{library.__name__}.launches", library.launches, remedy=remedy)
    for option in ("several_streams", "eager", "captures", "collective"):
        check_flag(f"{library.__name__}.{option}", getattr(library, option))
    if library.captures and library.several_streams:
        raise InvalidArgumentError(
            f"{library.__name__} captures its stream, and has several", remedy="Set captures or several_streams to False."
        )
    if library.collective and library.several_streams:
        raise InvalidArgumentError(f"{library.__name__} is collective, and has several streams", remedy="Set one of these to False.")
    found: dict[type[KernelOp[Any]], str] = {}
    for attribute in dir(library):
        op = getattr(getattr(library, attribute), _MARK, None)
        if op is None:
            continue
        if not (isinstance(op, type) and issubclass(op, KernelOp)):
            raise InvalidArgumentError(
                f"{op!r}, which {library.__name__}.{attribute} is for, is not a KernelOp", remedy="Use a class of ops."
            )
        check_frozen(op)
        if op.library != name and isinstance(op.library, str):  # else it is a field: each op says its library
            raise InvalidArgumentError(
                f"{op.__name__} is of library {op.library!r} and {library.__name__} is {name!r}",
                remedy=f'Set `library = "{name}"` in the op.',
            )
        if any(other.kind == op.kind for other in found):
            raise InvalidArgumentError(
                f"{library.__name__} has two kernels for {op.kind!r}", remedy="Give each class of ops a kind of its own."
            )
        found[op] = attribute
    for attribute in ("preload", "open", "close", *found.values()):
        if inspect.iscoroutinefunction(getattr(library, attribute)):
            raise InvalidArgumentError(
                f"{library.__name__}.{attribute} is a coroutine function, and nothing awaits it",
                remedy="Define it with `def`: it enqueues, or runs on a worker thread.",
            )
    if not found:
        raise UnsupportedError(f"{library.__name__} has no kernels", remedy="Mark methods with @accel.kernel(OpClass).")
    return found
