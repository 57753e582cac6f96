"""The parts of CUDA that are separate downloads: this module loads them; its errors name what is missing and the command that installs it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from accel import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "INSTALL",
    "REQUIRED",
    "Requirement",
    "VendorLibrary",
    "load_extension",
    "load_library",
    "load_module",
    "requirements",
    "version_of",
]

# NVIDIA's packages import each other in circles: of two threads that import at the same time, one
# may get a module that is half there, for good. Modules are the process's, and so is this lock.
_importing = threading.RLock()

_INSTALL = "In a checkout, run: pip install '.[{}]'"
INSTALL = _INSTALL.format("cuda")


@dataclass(frozen=True, slots=True)
class Requirement:
    """A Python module, or a shared library, that may come from a toolkit instead.

    Parameters
    ----------
    distribution
        What brings it.
    name
        Name of the module, or of the shared library without ``lib``.
    is_library
        Whether it is a shared library.
    extra
        The extra that installs it.
    extension
        Name of an extension module in the package ``name``; it is loaded without the package. Empty for the package.
    """

    distribution: str
    name: str
    is_library: bool = False
    extra: str = "cuda"
    extension: str = ""

    def load(self) -> None:
        """Load it.

        Raises
        ------
        BackendUnavailableError
            If it is not there; the error names the distribution.
        """
        if self.extension:
            load_extension(self.name, self.extension, self.distribution, self.extra)
        else:
            (load_library if self.is_library else load_module)(self.name, self.distribution, self.extra)


REQUIRED = (
    Requirement("cuda-bindings", "cuda.bindings.driver"),
    Requirement("cuda-core", "cuda.core"),
    Requirement("cuda-core", "cuda.core.utils"),
    Requirement("nvidia-cuda-nvrtc", "nvrtc", is_library=True),
)
"""What the backend needs for any op."""


@dataclass(frozen=True, slots=True)
class VendorLibrary:
    """A library of NVIDIA's that kernels of a family call.

    Parameters
    ----------
    name
        Name of the shared library without ``lib``. Its statuses have it as their key in :data:`accel_cuda.errors.TABLES`.
    wheel
        Distribution of the shared library.
    module
        Python module with the bindings.
    error
        Name of the exception that the bindings raise; it has the ``status``. With the name of its module in front, where that is another one.
    bindings
        Distribution of the module.
    extra
        The extra that installs both.
    extension
        The extension module that has the bindings, where the package imports more than they need; see :class:`Requirement`.
    """

    name: str
    wheel: str
    module: str
    error: str
    bindings: str = "nvmath-python"
    extra: str = "cuda"
    extension: str = ""

    @property
    def requirements(self) -> tuple[Requirement, Requirement]:
        """What has to be there."""
        return Requirement(self.wheel, self.name, True, self.extra), Requirement(
            self.bindings, self.module, False, self.extra, self.extension
        )

    def load(self) -> Any:
        """Load the library and return the module. May block.

        Raises
        ------
        BackendUnavailableError
            If one of them is not there; the error names the distribution and the command that installs it.
        """
        load_library(self.name, self.wheel, self.extra)
        if self.extension:
            return load_extension(self.module, self.extension, self.bindings, self.extra)
        return load_module(self.module, self.bindings, self.extra)

    def load_error(self) -> Any:
        """Return the class of the exception that the bindings raise. Once they are loaded, this does not block."""
        module, _, name = self.error.rpartition(".")
        return getattr(load_module(module, self.bindings, self.extra) if module else self.load(), name)


def requirements(libraries: Iterable[VendorLibrary]) -> tuple[Requirement, ...]:
    """Return what the backend and these libraries need, each once."""
    return tuple(dict.fromkeys((*REQUIRED, *(needed for library in libraries for needed in library.requirements))))


def version_of(distribution: str) -> str | None:
    """Return the installed version, or ``None``: a library may come from a toolkit."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def load_module(name: str, distribution: str, extra: str = "cuda") -> Any:
    """Import a Python package of NVIDIA's.

    Raises
    ------
    BackendUnavailableError
        If it cannot be imported; it names the ``distribution`` that has it.
    """
    found = sys.modules.get(name)
    if found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False):
        return found  # without the lock, which another thread may hold for seconds
    try:
        with _importing:
            return importlib.import_module(name)
    except ImportError as error:
        raise BackendUnavailableError(f"{distribution} cannot be imported: {error}", remedy=_INSTALL.format(extra)) from error


def load_extension(package: str, name: str, distribution: str, extra: str = "cuda") -> Any:
    """Load an extension module of a package without the package, which may import PyTorch.

    Raises
    ------
    BackendUnavailableError
        If it is not there, or cannot be loaded; the error names the ``distribution`` that has it.
    """
    whole = f"{package}.{name}"
    if whole in sys.modules:
        return sys.modules[whole]
    found = importlib.util.find_spec(package)
    spec = None if found is None else PathFinder.find_spec(whole, found.submodule_search_locations)
    if spec is None or spec.loader is None:
        raise BackendUnavailableError(f"{distribution} is not installed: there is no {whole}", remedy=_INSTALL.format(extra))
    try:
        with _importing:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    except ImportError as error:
        raise BackendUnavailableError(f"{distribution} cannot be imported: {error}", remedy=_INSTALL.format(extra)) from error
    return sys.modules.setdefault(whole, module)


def load_library(name: str, distribution: str, extra: str = "cuda") -> str:
    """Load a shared library, such as ``"nvrtc"``, before a package of NVIDIA's looks for it and fails with an error of its own; return its path.

    Raises
    ------
    BackendUnavailableError
        If it is neither in a wheel nor in a toolkit that can be found; it names the ``distribution`` that has it.
    """
    pathfinder = load_module("cuda.pathfinder", "cuda-pathfinder")
    try:
        return str(pathfinder.load_nvidia_dynamic_lib(name).abs_path)
    except pathfinder.DynamicLibNotFoundError as error:
        raise BackendUnavailableError(
            f"{distribution} (or the CUDA toolkit) is not installed: lib{name} is not found", remedy=_INSTALL.format(extra)
        ) from error


def _renew_lock() -> None:
    """Make another lock in a forked child: a thread that is not there may have held this one."""
    global _importing
    _importing = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
