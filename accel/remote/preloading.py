"""The imports that a device's forkserver makes for its children."""

from __future__ import annotations

import importlib
import os
import pickle
from dataclasses import dataclass

from accel.backend import PreloadsLibraries
from accel.engine.registration import Registration

__all__ = ["Preload", "preload"]


@dataclass(frozen=True, slots=True)
class Preload:
    """Names of the modules and libraries that the forkserver imports.

    Attributes
    ----------
    backend
        ``"MODULE:CLASS"``.
    libraries
        Built-in libraries whose shared libraries are loaded too.
    modules
        Modules that every child of the device imports.
    registration
        A registered library; ``None``: the backend and ``libraries``, for every child.
    """

    backend: str
    libraries: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    registration: Registration | None = None


def preload(data: bytes) -> str:
    """Import what a pickled :class:`Preload` names; return why this process must not be forked.

    The answer is ``""`` if it may be.

    Raises
    ------
    Exception
        The error of an import. Earlier imports stay.
    """
    request: Preload = pickle.loads(data)
    module, _, name = request.backend.partition(":")
    # Modules of users' libraries import the public names, of which other children need few.
    public = () if request.registration is None else ("accel.device", "structlog")
    for imported in (*public, *request.modules, module):
        importlib.import_module(imported)
    backend_class = getattr(importlib.import_module(module), name)
    try:
        if request.registration is not None:
            request.registration.preload()
        elif isinstance(backend := backend_class(), PreloadsLibraries):
            backend.preload(request.libraries)
    finally:
        driver_file = _open_driver_file(tuple(getattr(backend_class, "device_files", ())))
    return f"a driver is in use: {driver_file} is open" if driver_file else ""


def _open_driver_file(prefixes: tuple[str, ...]) -> str:
    """Return the path of a driver's file that this process has open, or ``""`` if it has none.

    A driver that is in use does not survive a fork.
    """
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor that listed the folder
            continue
        if target.startswith(prefixes):
            return target
    return ""
