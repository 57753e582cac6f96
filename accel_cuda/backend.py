"""The class that the entry point ``accel.backends: cuda`` names: it lists NVIDIA GPUs and opens contexts on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.backend import AccelDevice, DeviceDescription

__all__ = ["CudaBackend"]


class CudaBackend:
    """NVIDIA GPUs. Not usable in this release: every method says so with :class:`~accel.errors.BackendUnavailableError`.

    Attributes
    ----------
    name : str
        ``"cuda"``, as in ``open_device("cuda:1")``.
    preference : int
        Higher than the CPU backend's, so that ``open_device("auto")`` takes a GPU where there is one that can be used.
    """

    name: str = "cuda"
    preference: int = 100

    def devices(self) -> Sequence[DeviceDescription]:
        """List the GPUs of this machine.

        Raises
        ------
        BackendUnavailableError
            Always, in this release.
        """
        raise _unavailable()

    def open(self, index: int) -> AccelDevice:
        """Create a context on GPU ``index``.

        Raises
        ------
        BackendUnavailableError
            Always, in this release.
        """
        raise _unavailable(index)


def _unavailable(index: int | None = None) -> BackendUnavailableError:
    return BackendUnavailableError(
        "the CUDA backend is not part of this release of accel-actors",
        device=None if index is None else f"cuda:{index}",
        remedy="Open 'cpu' (or 'auto'), or upgrade to a release that has it: pip install --upgrade 'accel-actors[cuda]'.",
    )
