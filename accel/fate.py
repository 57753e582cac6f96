"""What a backend may offer besides, so that a service survives the faults of its devices: see :mod:`accel.backend` for what each has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel.errors import AccelError

__all__ = ["PreloadsLibraries", "TellsFaults"]


@runtime_checkable
class PreloadsLibraries(Protocol):
    """What an :class:`~accel.AccelBackend` has besides if a child process can make something ready without a context: imports, shared libraries."""

    def preload(self, libraries: Sequence[str]) -> None:
        """Load what contexts need, and what ``libraries`` do, so far as that takes nothing from a device. May block.

        Raises
        ------
        BackendUnavailableError
            If something is missing.
        """


@runtime_checkable
class TellsFaults(Protocol):
    """What an :class:`~accel.AccelDevice` has besides if a fault that surfaces elsewhere in the process ends it too.

    Attributes
    ----------
    on_fault : callable
        Called with the fault, on any thread, as soon as the device is known to be dead; perhaps more than once.
    """

    on_fault: Callable[[AccelError], object]
