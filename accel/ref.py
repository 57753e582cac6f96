"""Handles to device memory. A handle is never the memory: it is a name with a shape, checked before each use.

The owner (a device) is seen through :class:`RefOwner` only, so that this module knows nothing of event loops or devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from accel.errors import StaleRefError

if TYPE_CHECKING:
    from collections import deque

    from accel.dtype import DType

__all__ = ["AccelRef", "AccelToken", "RefOwner"]


class RefOwner(Protocol):
    """What a ref needs of the device that made it."""

    name: str
    """Name of the device, such as ``"cpu:0"``."""
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
    """

    device: str
    buffer: int
    generation: int


class AccelRef:
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
        Generation of the context that holds the memory.
    durable : bool
        Whether the memory stays valid in the next generation.
    buffer : int
        The device's number for the memory; never used again.
    owner : RefOwner
        The device, as refs see it.
    is_freed : bool
        Whether the memory was freed although this handle still exists.
    """

    __slots__ = ("__weakref__", "buffer", "dtype", "durable", "generation", "is_freed", "nbytes", "owner", "shape")

    def __init__(
        self, owner: RefOwner, buffer: int, shape: tuple[int, ...], dtype: DType, generation: int, *, durable: bool = False
    ) -> None:
        self.is_freed = False
        self.owner = owner
        self.buffer = buffer
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
    def is_stale(self) -> bool:
        """Whether using this ref raises :class:`~accel.StaleRefError`."""
        return self.is_freed or self.owner.live_generation != self.generation

    def check(self) -> None:
        """Raise unless the memory is there.

        Raises
        ------
        StaleRefError
            With ``reason`` ``"freed"`` or ``"generation"``.
        ClosedError
            In a process forked from the device's.
        """
        self.owner.check_process()
        if self.is_freed or self.owner.live_generation != self.generation:
            raise self.stale_error()

    def stale_error(self) -> StaleRefError:
        """Return a new error that says why the memory is not there."""
        if self.is_freed:
            return StaleRefError(f"{self!r} was freed", reason="freed", device=self.owner.name, generation=self.generation)
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
