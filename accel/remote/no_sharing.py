"""What a context in another process has instead of memory shared with libraries in this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.errors import UnsupportedError

if TYPE_CHECKING:
    from accel.ref import AccelRef

__all__ = ["NoSharing"]


class NoSharing:
    """Stands where a context in this process shares memory with other libraries: they cannot reach a child's."""

    def __init__(self, device: str) -> None:
        self._device = device

    def check_free(self, ref: AccelRef) -> None:
        """Agree: nobody else has the memory."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(
            "other libraries cannot reach the memory of a process host",
            device=self._device,
            remedy="Open the device with host='inline', or copy: await device.get(ref), await device.put(array).",
        )
