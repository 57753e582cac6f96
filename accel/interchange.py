"""How other libraries see a ref: DLPack and the CUDA array interface. What is ordered after what is told in ``docs/interop.md``."""

from __future__ import annotations

from typing import Any

__all__ = ["Interchange"]


class Interchange:
    """The protocols of :class:`~accel.AccelRef` that are for other libraries."""

    __slots__ = ()

    owner: Any

    def check(self) -> None:
        """Raise unless the memory is there."""
        raise NotImplementedError

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

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface, version 3. Missing on devices that are not CUDA's."""
        self.check()
        found: dict[str, Any] = self.owner.sharing.interface(self)
        return found
