"""Which backends there are, and which device a spec such as ``"cuda:1"`` names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from accel.errors import BackendUnavailableError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.backend import AccelBackend, DeviceDescription

__all__ = ["ENTRY_POINT_GROUP", "backend_names", "find_device", "load_backend"]

ENTRY_POINT_GROUP = "accel.backends"

# Found without installation too: a checkout is enough to run.
_BUILT_IN = {"cpu": "accel.cpu.backend:CpuBackend", "cuda": "accel_cuda.backend:CudaBackend"}


def backend_names() -> tuple[str, ...]:
    """Return the names of all registered backends, installed or found in the checkout, whether or not they can be used here."""
    return tuple(sorted(_registered()))


def load_backend(name: str) -> AccelBackend:
    """Import and instantiate a backend. May block: it imports.

    Raises
    ------
    BackendUnavailableError
        If there is no such backend, or it cannot be imported.
    """
    registered = _registered()
    if name not in registered:
        known = ", ".join(sorted(registered))
        raise BackendUnavailableError(
            f"no backend is called {name!r}", remedy=f"Use one of: {known}; or install the package that provides it."
        )
    return _load(name, registered[name])


def _registered() -> dict[str, str]:
    """Return name -> ``MODULE:CLASS`` of all backends. Reads the entry points of every installed distribution, which takes milliseconds."""
    from importlib import metadata  # its 15 ms are not spent by each child

    return _BUILT_IN | {point.name: point.value for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}


def _load(name: str, target: str) -> AccelBackend:
    module, _, attribute = target.partition(":")
    try:
        backend: AccelBackend = getattr(importlib.import_module(module), attribute)()
    except ImportError as error:
        raise BackendUnavailableError(f"backend {name!r} cannot be imported: {error}") from error
    return backend


def find_device(spec: str = "auto") -> tuple[AccelBackend, DeviceDescription]:
    """Return the backend and the device that ``spec`` names. May block.

    Parameters
    ----------
    spec
        ``"auto"`` (the best there is), a backend (``"cpu"``: its first device), ``"cuda:1"``, or a device's UUID.

    Raises
    ------
    BackendUnavailableError
        If the named backend or device is not there.
    InvalidArgumentError
        If ``spec`` is not of these forms.
    """
    name, _, index = spec.partition(":")
    registered = _registered()
    if name in registered:
        if index and not index.isdecimal():
            raise InvalidArgumentError(f"{spec!r} does not name a device", remedy=f"Use {name!r} or '{name}:0'.")
        backend = _load(name, registered[name])
        return backend, _at(backend.devices(), int(index or 0), spec)
    available, reasons = _available(registered)
    if spec == "auto":
        if not available:
            raise BackendUnavailableError("no backend can be used: " + "; ".join(reasons))
        best, devices = max(available, key=lambda entry: entry[0].preference)
        return best, devices[0]
    for backend, devices in available:
        for device in devices:
            if device.uuid == spec:
                return backend, device
    raise InvalidArgumentError(
        f"{spec!r} names no device", remedy="Use 'auto', a backend's name, 'cuda:1', or a UUID that `python -m accel devices` lists."
    )


def _at(devices: Sequence[DeviceDescription], index: int, spec: str) -> DeviceDescription:
    if index >= len(devices):
        raise BackendUnavailableError(f"{spec!r} is not there: the backend has {len(devices)} device(s)")
    return devices[index]


def _available(registered: dict[str, str]) -> tuple[list[tuple[AccelBackend, Sequence[DeviceDescription]]], list[str]]:
    available: list[tuple[AccelBackend, Sequence[DeviceDescription]]] = []
    reasons: list[str] = []
    for name, target in sorted(registered.items()):
        try:
            backend = _load(name, target)
            devices = backend.devices()
        except BackendUnavailableError as error:
            reasons.append(f"{name}: {error.message}")
            continue
        if devices:
            available.append((backend, devices))
    return available, reasons
