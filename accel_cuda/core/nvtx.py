"""Ranges of ops and batches for NVIDIA's tools, such as Nsight Systems."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from accel import BackendUnavailableError
from accel.telemetry.probe import Probe
from accel_cuda.core.libraries import load_module

if TYPE_CHECKING:
    from accel.telemetry.probe import DeviceWork

__all__ = ["NvtxProbe", "nvtx_probe"]


class NvtxProbe(Probe):
    """Marks what is on the device, from when it was sent until the loop saw its end.

    Ranges are the process's, not a thread's: they overlap, and end in another order than they begin.

    Parameters
    ----------
    domain
        Of NVTX.
    """

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._attributes = functools.lru_cache(maxsize=1024)(lambda name: domain.get_event_attributes(message=name))
        self._ranges: dict[DeviceWork, int] = {}

    def op_sent(self, work: DeviceWork) -> None:
        """See :class:`Probe`."""
        self._ranges[work] = self._domain.start_range(self._attributes(work.name))

    def op_ended(self, work: DeviceWork) -> None:
        """See :class:`Probe`."""
        begun = self._ranges.pop(work, None)
        if begun is not None:
            self._domain.end_range(begun)


@functools.cache
def nvtx_probe() -> NvtxProbe | None:
    """Return the probe of this process; ``None`` without a tool, or without nvtx."""
    try:
        nvtx = load_module("nvtx", "nvtx", "nvtx")
    except BackendUnavailableError:
        return None
    domain = nvtx.get_domain("accel")
    return NvtxProbe(domain) if isinstance(domain, nvtx.Domain) else None
