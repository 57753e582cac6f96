"""Handles to device memory. A handle is never the memory: it is a name with a shape, checked before each use.

The owner (a device) is seen through :class:`RefOwner` only, so that this module knows nothing of event loops or devices.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

from accel.dtype import DType, DTypeLike
from accel.errors import InvalidArgumentError, StaleRefError
from accel.hints import REF_HINTS, NoArray, hinted_in_class
from accel.views import is_contiguous, permutation, recast, reshaped, restrided, selected, share_bytes, span, steps_of

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterator, Sequence

__all__ = ["AccelRef", "AccelToken", "ForeignRef", "ManagedRef", "RefOwner", "RefView", "SharedRef", "StridedRef", "ViewToken", "overlap"]


class RefOwner(Protocol):
    """What a ref needs of the device that made it."""

    name: str
    """Name of the device, such as ``"cpu:0"``."""
    durable: Any
    """What knows which durable buffers are there."""
    identity: str
    """What tells this opened device from every other one, in any process."""
    is_closing: bool
    """Whether no generation will follow."""
    live_generation: int
    """The generation whose ordinary refs are valid now; 0 while there is none."""
    dropped: deque[int]
    """Ids of buffers whose last ref went away; appended to from any thread."""
    device: Any
    """The public face of the device."""
    sharing: Any
    """What shares memory with other libraries, while there is a generation."""

    def check_process(self) -> None:
        """Raise :class:`~accel.ClosedError` in a process forked from the owner's."""

    def register_token(self, ref: AccelRef) -> None:
        """Remember ``ref`` (weakly), so that its token can be resolved to it."""


@dataclass(frozen=True, slots=True)
class AccelToken:
    """A ref as it travels through pickle: it names a buffer and owns nothing.

    Parameters
    ----------
    device
        Identity of the opened device.
    buffer
        Number of the buffer on that device.
    generation
        Generation in which the buffer was made.
    node
        Name of the machine whose processes find the device by it, if ``device.publish`` made it;
        else ``""``.
    """

    device: str
    buffer: int
    generation: int
    node: str = field(default="", kw_only=True)

    def of(self, ref: AccelRef) -> AccelRef:
        """Return what this names, given the ref of the whole buffer."""
        return ref


@dataclass(frozen=True, slots=True)
class ViewToken(AccelToken):
    """A :class:`RefView` as it travels through pickle.

    Parameters
    ----------
    offset
        Bytes from the start of the buffer.
    shape, dtype, strides
        Of the view; ``None`` for the strides of C order.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None

    def of(self, ref: AccelRef) -> AccelRef:
        """Return a view of ``ref`` like the one that was pickled.

        Raises
        ------
        InvalidArgumentError
            If it is not within the buffer, or not aligned to its elements: no view was ever like that.
        """
        dtype, offset, shape = DType.of(self.dtype), self.offset, self.shape
        if not (isinstance(shape, tuple) and all(_is_size(n) for n in (offset, *shape))):
            raise InvalidArgumentError(f"{self!r} names no view: offset and shape are sizes", remedy=_OWN_TOKENS)
        strides = steps_of(shape) if self.strides is None else self.strides
        if not (isinstance(strides, tuple) and len(strides) == len(shape) and all(_is_whole(n) for n in strides)):
            raise InvalidArgumentError(f"{self!r} names no view: strides are as many ints as there are axes", remedy=_OWN_TOKENS)
        first, end = (offset + place * dtype.itemsize for place in span(shape, strides))
        if first < 0 or end > ref.nbytes or offset % dtype.itemsize or ref.alignment % dtype.itemsize:
            raise InvalidArgumentError(
                f"{self!r} names no view of {ref!r}: it runs past its {ref.nbytes} bytes, or is not aligned to its elements",
                remedy=_OWN_TOKENS,
            )
        return view_of(ref, offset, shape, dtype, strides)


_COPY = "Copy it first: await device.arrays.part(view, ...)."
_OWN_TOKENS = "Give a token that a view's own token() returned."


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_whole(value) and value >= 0


@hinted_in_class(REF_HINTS)
class AccelRef(NoArray):
    """A handle to an array on a device. Made by a device, never by hand.

    The memory is freed, in stream order, when the last reference to the handle is dropped, or by ``await device.free(ref)``.
    ``copy.copy`` and ``copy.deepcopy`` give the same handle; ``pickle`` gives an :class:`AccelToken`, which ``device.resolve`` turns back.

    Attributes
    ----------
    shape : tuple of int
    dtype : DType
    nbytes : int
        Bytes of the elements (C order, no padding).
    generation : int
        Generation of the context that holds the memory; of a durable ref it rises with the device's.
    durable : bool
        Whether the memory, and so this ref, stays valid in the next generation.
    buffer : int
        The device's number for the memory; never used again.
    owner : RefOwner
        The device, as refs see it.
    is_freed : bool
        Whether the memory was freed although this handle still exists.
    offset : int
        Bytes from the start of the buffer: 0, but for a :class:`RefView`.
    alignment : int
        What the address of the buffer is a multiple of.
    is_foreign, is_managed : bool
        Whether the memory belongs to another library's array (``device.wrap``), and whether it is managed (``device.managed``).
    is_strided : bool
        Whether it is a :class:`StridedRef`, whose elements are not one run in C order.

    Notes
    -----
    ``ref[index]``, :attr:`T`, :meth:`transpose`, :meth:`reshape`, :meth:`ravel` and :meth:`view` give a :class:`RefView` of the same memory; nothing is
    copied and nothing is sent.
    """

    is_strided: bool = False
    alignment: int = 256
    is_foreign: bool = False
    is_managed: bool = False

    __slots__ = ("__weakref__", "buffer", "dtype", "durable", "generation", "is_freed", "nbytes", "offset", "owner", "shape")

    def __init__(
        self, owner: RefOwner, buffer: int, shape: tuple[int, ...], dtype: DType, generation: int, *, durable: bool = False
    ) -> None:
        self.is_freed = False
        self.owner = owner
        self.buffer = buffer
        self.offset = 0
        self.shape = shape
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.generation = generation
        self.durable = durable

    def __del__(self) -> None:
        # Any thread, any moment, even inside the garbage collector: one append, nothing else.
        if not self.is_freed:
            self.owner.dropped.append(self.buffer)

    @property
    def device(self) -> Any:
        """The device that holds the memory."""
        return self.owner.device

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """How far neighbours along each axis are apart, in elements."""
        return steps_of(self.shape)

    @property
    def is_stale(self) -> bool:
        """Whether using this ref raises :class:`~accel.StaleRefError`."""
        if self.is_freed or (self.durable and self.owner.durable.is_torn(self)):
            return True
        return self.owner.live_generation != self.generation and not (self.durable and self.owner.durable.is_intact(self))

    def check(self) -> None:
        """Raise unless the memory is there.

        Raises
        ------
        StaleRefError
            With ``reason`` ``"freed"``, ``"generation"`` or ``"torn"``.
        ClosedError
            In a process forked from the device's.
        """
        self.owner.check_process()
        if self.is_stale:
            raise self.stale_error()

    def stale_error(self) -> StaleRefError:
        """Return a new error that says why the memory is not there."""
        if self.is_freed:
            return StaleRefError(
                f"{self!r} was freed, or the batch that makes it did not run",
                reason="freed",
                device=self.owner.name,
                generation=self.generation,
            )
        torn = self.owner.durable.torn_error(self) if self.durable else None
        if torn is not None:
            raised: StaleRefError = torn
            return raised
        if self.owner.is_closing:
            why, remedy = "its device is closed", "Open the device again, and put the data on it."
        else:
            why, remedy = f"generation {self.generation} is gone", None
        return StaleRefError(
            f"{self!r} cannot be used: {why}",
            remedy=remedy,
            reason="generation",
            device=self.owner.name,
            generation=self.owner.live_generation or None,
        )

    def token(self) -> AccelToken:
        """Return a picklable name of this ref, which ``device.resolve`` turns back while the ref lives.

        Raises
        ------
        StaleRefError
            If the memory is no longer there.
        """
        self.check()
        self.owner.register_token(self)
        return AccelToken(self.owner.identity, self.buffer, self.generation)

    def __reduce__(self) -> tuple[Any, ...]:
        token = self.token()
        return AccelToken, (token.device, token.buffer, token.generation)

    # -- views

    def __getitem__(self, index: Any) -> RefView:
        """Return a view of a part, as numpy's basic indexing selects it: ints, slices with any step, and ``...``.

        Raises
        ------
        InvalidArgumentError
            If it is no such index.
        """
        start, shape, strides = selected(self.shape, self.strides, index)
        return view_of(self, self.offset + start * self.dtype.itemsize, shape, self.dtype, strides)

    @property
    def T(self) -> RefView:  # noqa: N802 - as in numpy and the array API
        """A view with the axes in reverse order."""
        return self.transpose()

    def transpose(self, axes: Sequence[int] | None = None) -> RefView:
        """Return a view with the axes in another order: reversed, or that of ``axes``.

        Raises
        ------
        InvalidArgumentError
            If ``axes`` does not name each axis once.
        """
        order, strides = permutation(axes, len(self.shape)), self.strides
        return view_of(self, self.offset, tuple([self.shape[n] for n in order]), self.dtype, tuple([strides[n] for n in order]))

    if TYPE_CHECKING:
        # Rows are not iterated over by accident: each would be a view.
        __iter__: ClassVar[None]

    def reshape(self, shape: Any, *more: int) -> RefView:
        """Return a view of another shape with as many elements, in C order; one dimension may be -1. As in numpy: ``(2, 3)`` or ``2, 3``.

        Raises
        ------
        InvalidArgumentError
            If the shape does not fit, or the elements of a strided view would have to be copied.
        """
        wanted = reshaped(self.shape, (shape, *more) if more else shape)
        strides = restrided(self.shape, self.strides, wanted) if self.is_strided else steps_of(wanted)
        if strides is None:
            raise InvalidArgumentError(f"{self!r} has no view of shape {wanted}: elements would be copied", remedy=_COPY)
        return view_of(self, self.offset, wanted, self.dtype, strides)

    def ravel(self) -> RefView:
        """Return a view of one dimension; raises as :meth:`reshape` does."""
        return self.reshape(-1 if self.size else 0)

    def view(self, dtype: DTypeLike) -> RefView:
        """Return a view of the same bytes as elements of ``dtype``; the last axis grows or shrinks.

        Raises
        ------
        InvalidArgumentError
            If the last axis is no whole number of them, or its start is not aligned to one; or of a strided view, whose elements keep their size.
        """
        new = DType.of(dtype)
        if self.is_strided and new.itemsize != self.dtype.itemsize:
            raise InvalidArgumentError(f"{self!r} has no view as {new.value}: its elements are not one run", remedy=_COPY)
        shape = recast(self.shape, self.dtype, new)
        if self.offset % new.itemsize or self.alignment % new.itemsize:
            raise InvalidArgumentError(
                f"{self!r} does not start at a multiple of {new.itemsize} bytes, as {new.value} must",
                remedy="Copy it into a buffer of its own.",
            )
        return view_of(self, self.offset, shape, new, self.strides if self.is_strided else steps_of(shape))

    # -- as an object

    def __copy__(self) -> AccelRef:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> AccelRef:
        return self

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{self!r} is on a device; copy it to the host first: array = await device.get(ref)")

    def __bool__(self) -> bool:
        # A handle is there, whatever is in it: `if ref:` must not mean "has elements", as __len__ would have it.
        return True

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d AccelRef")
        return self.shape[0]

    def __repr__(self) -> str:
        state = " freed" if self.is_freed else " stale" if self.is_stale else ""
        durable = " durable" if self.durable else ""
        return f"<AccelRef {self.buffer} {self.dtype.value}{list(self.shape)} on {self.owner.name} generation {self.generation}{durable}{state}>"

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's name of the device.

        Raises
        ------
        BufferError
            If the device's memory cannot be shared by DLPack.
        StaleRefError
            If the memory is no longer there.
        """
        self.check()
        found: tuple[int, int] = self.owner.sharing.dlpack_device(self)
        return found

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule over this memory, which it keeps; see ``docs/interop.md`` for what is ordered after what.

        Parameters
        ----------
        stream
            The consumer's stream, which is made to wait for what accel has enqueued on the memory: ``None`` and 1 the legacy default stream, 2 the
            calling thread's, -1 no waiting, else a handle.
        max_version
            The newest DLPack that the consumer knows.
        dl_device, copy
            Another device than this one's, and ``copy=True``, are refused.

        Raises
        ------
        BufferError
            If the device's memory, or the dtype, cannot be shared so, or work on it is not enqueued yet.
        StaleRefError
            If the memory is no longer there.
        """
        self.check()
        return self.owner.sharing.capsule(self, stream, max_version, dl_device, copy)

    @contextlib.contextmanager
    def address(self, *, stream: int | None = None) -> Iterator[int]:
        """Lend the address of the first element: ``with ref.address() as pointer:``, for kernels and libraries that take no refs.

        Inside the block the buffer is neither freed nor moved, also if all refs are dropped. Ops of accel on it, there and later, come after what the process
        has enqueued before they are sent; the memory is used again only after what was enqueued by the end of the block. No use of the address that is
        enqueued later is allowed.

        Parameters
        ----------
        stream
            Where the address is used first, which is made to wait for what accel has enqueued on the memory: as in :meth:`__dlpack__`.

        Raises
        ------
        UnsupportedError
            The device's memory cannot be reached so: it is in a process host, or on a CPU.
        BufferError
            Work on the memory is not enqueued yet: await it first.
        StaleRefError
            If the memory is no longer there.
        """
        self.check()
        pointer, hold = self.owner.sharing.address(self, stream)
        try:
            yield pointer
        finally:
            del hold

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface, version 3. Missing on devices that are not CUDA's."""
        self.check()
        found: dict[str, Any] = self.owner.sharing.interface(self)
        return found


class RefView(AccelRef):
    """A part of a buffer, or the whole of it in another shape. Made by indexing a ref, and by :meth:`AccelRef.reshape` and its kin.

    It is used like any ref. It keeps the ref that it is a view of alive, and is stale when that is; dropping a view frees nothing. Uses are
    ordered by whole buffers: an op on one view waits for an earlier write to another.

    Attributes
    ----------
    base : AccelRef
        The ref of the whole buffer.
    offset : int
        Bytes from the start of the buffer.
    """

    __slots__ = ("base",)

    def __init__(self, ref: AccelRef, offset: int, shape: tuple[int, ...], dtype: DType) -> None:
        # Not by super(): a view owns nothing.
        self.base: AccelRef = ref.base if isinstance(ref, RefView) else ref
        self.offset = offset
        self.owner = ref.owner
        self.buffer = ref.buffer
        self.shape = shape
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.generation = ref.generation
        self.durable = ref.durable

    def __del__(self) -> None:
        pass  # the base frees the memory

    @property
    def is_freed(self) -> bool:  # type: ignore[override]
        """Whether the base was freed."""
        return self.base.is_freed

    @property
    def alignment(self) -> int:  # type: ignore[override]
        """What the address of the buffer is a multiple of."""
        return self.base.alignment

    @property
    def is_foreign(self) -> bool:  # type: ignore[override]
        """Whether the memory belongs to another library's array."""
        return self.base.is_foreign

    @property
    def is_managed(self) -> bool:  # type: ignore[override]
        """Whether the memory is managed."""
        return self.base.is_managed

    def token(self) -> ViewToken:
        """Return a picklable name of this view, which ``device.resolve`` turns into a view like it while the base lives.

        Raises
        ------
        StaleRefError
            If the memory is no longer there.
        """
        base = self.base.token()
        strides = self.strides if self.is_strided else None
        return ViewToken(base.device, base.buffer, base.generation, self.offset, self.shape, self.dtype.value, strides)

    def __reduce__(self) -> tuple[Any, ...]:
        token = self.token()
        return ViewToken, (token.device, token.buffer, token.generation, token.offset, token.shape, token.dtype, token.strides)

    def __repr__(self) -> str:
        return f"<{super().__repr__()[1:-1]} view at {self.offset}>"


class StridedRef(RefView):
    """A view whose elements are not one run in C order: ``ref[:, 2:5]``, ``ref[::2]``, ``ref.T``. No two of its elements have the same place.

    Ops that take strided operands read them where they are; for all others the device copies them first, and what was written back afterwards.

    Attributes
    ----------
    offset : int
        Bytes from the start of the buffer to element ``[0, 0, ...]``; others may be before it.
    strides : tuple of int
        How far neighbours along each axis are apart, in elements.
    """

    __slots__ = ("strides",)

    is_strided = True
    strides: tuple[int, ...]

    def __init__(self, ref: AccelRef, offset: int, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...]) -> None:
        super().__init__(ref, offset, shape, dtype)
        self.strides = strides

    def __repr__(self) -> str:
        return f"<{super().__repr__()[1:-1]} strides {list(self.strides)}>"


def view_of(ref: AccelRef, offset: int, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...]) -> RefView:
    """Return a view of the buffer of ``ref``: a :class:`StridedRef` only where elements are not one run in C order."""
    return RefView(ref, offset, shape, dtype) if is_contiguous(shape, strides) else StridedRef(ref, offset, shape, dtype, strides)


class ForeignRef(AccelRef):
    """A ref to the memory of another library's array; made by ``device.wrap``. The array is kept until the ref is dropped and its last use is over."""

    __slots__ = ("alignment",)

    alignment: int
    is_foreign = True


class ManagedRef(AccelRef):
    """A ref to managed memory, which moves between device and host; made by ``device.managed``."""

    __slots__ = ()

    is_managed = True


class SharedRef(AccelRef):
    """A ref to memory that other processes can reach; made with ``shareable=True``, and by ``device.attach``."""

    __slots__ = ()


def overlap(a: AccelRef, b: AccelRef) -> bool:
    """Return whether two refs have bytes in common."""
    if a is b:
        return True
    if a.buffer != b.buffer or a.owner is not b.owner:
        return False
    if a.is_strided or b.is_strided:
        return share_bytes(*[(each.offset, each.shape, each.strides, each.dtype.itemsize) for each in (a, b)])
    return max(a.offset, b.offset) < min(a.offset + a.nbytes, b.offset + b.nbytes)  # of an empty one in the middle, too
