"""What a backend says about sharing memory with other libraries in the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from accel.backend import SlabMemory
    from accel.dtype import DType

__all__ = ["Exchange", "ForeignMemory", "SharesMemory"]


class ForeignMemory(Protocol):
    """The memory of another library's array, as a :class:`~accel.backend.SlabMemory` that closing gives back to it.

    Attributes
    ----------
    address, nbytes : int
        Where, and how much.
    shape : tuple of int
    dtype : DType
    """

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: DType

    def close(self) -> None:
        """Let go of the array. Nothing on the device uses it any more. Idempotent."""


class Exchange(Protocol):
    """How one context shares memory. Made by :meth:`SharesMemory.create_exchange`, at the first use.

    Attributes
    ----------
    stream : AccelStream
        Stands for everybody in the process who enqueues work on the device: its ``record`` marks all that anybody has enqueued so far, or returns
        ``True`` where such work is over when the call that started it returns. Other libraries may be told to have their data ready in it.
    device : tuple of int
        DLPack's device type and number, for what is exported; ``(0, 0)`` where nothing can be.
    """

    stream: Any
    device: tuple[int, int]
    speaks_cuda: ClassVar[bool]
    """Whether exported memory has a ``__cuda_array_interface__``."""

    def follow(self, stream: int, event: Any) -> None:
        """Let another library's stream, given as DLPack gives it to producers (1, 2 or a handle), wait for an event. Never blocks."""

    def take(self, array: Any) -> ForeignMemory:
        """Take the memory of another library's array, without a copy.

        Raises
        ------
        InvalidArgumentError
            If it is not an array of this device, in C order and writable.
        """

    def create_managed(self, nbytes: int) -> SlabMemory:
        """Take memory that moves between device and host. May block.

        Raises
        ------
        UnsupportedError
            If there is none such.
        OutOfMemoryError
            If there is no room.
        """

    def settle(self) -> None:
        """Block until all is over that anybody in the process has enqueued on the device by now; also when the context was closed.

        Raises
        ------
        AccelError
            If that cannot be known.
        """

    def close(self) -> None:
        """Give back what this holds; streams have ended."""


@runtime_checkable
class SharesMemory(Protocol):
    """What an :class:`~accel.AccelDevice` has besides if its memory can be shared."""

    def create_exchange(self) -> Exchange:
        """Create what shares memory with other libraries in this process; called once, at the first use, on the loop's thread."""
