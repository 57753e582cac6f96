"""Which backends there are, and which device a spec such as ``"cuda:1"`` names."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from accel.errors import BackendUnavailableError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.backend import AccelBackend, DeviceDescription

__all__ = ["ENTRY_POINT_GROUP", "backend_names", "find_device", "find_specs", "load_backend"]

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


def find_specs(specs: str | Iterable[str], count: int | None = None) -> list[str]:
    """Return what :func:`find_device` takes, for each device of a pool; see :meth:`accel.System.open_pool`. May block.

    Raises
    ------
    BackendUnavailableError
        If there is no such backend or device, or fewer than ``count``.
    InvalidArgumentError
        If ``specs`` names no device, or is a list with a ``count``.
    """
    if not isinstance(specs, str):
        found = list(specs) if isinstance(specs, Iterable) else []
        if not found or count is not None:
            raise InvalidArgumentError(
                f"specs is {specs!r:.80}" + ("" if count is None else f", and count is {count}"),
                remedy="Give a backend's name, for all of its devices, or for count= of them; or a list of devices.",
            )
        return found
    backend, description = find_device(specs)
    is_backend = specs in ("auto", backend.name)
    found = [device.spec for device in backend.devices()] if is_backend else [description.spec]
    if count is None:
        return found
    if len(found) == 1:
        return found * count
    if count > len(found):
        raise BackendUnavailableError(
            f"{count} devices were asked for, and {specs!r} names {len(found)}", remedy="Ask for fewer, or name each in a list."
        )
    return found[:count]


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
