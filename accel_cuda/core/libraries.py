"""The parts of CUDA that are separate downloads: this module loads them; its errors name what is missing and the command that installs it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from accel import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["INSTALL", "REQUIRED", "Requirement", "VendorLibrary", "load_library", "load_module", "requirements", "version_of"]

INSTALL = "In a checkout, run: pip install '.[cuda]'"


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
    """

    distribution: str
    name: str
    is_library: bool = False

    def load(self) -> None:
        """Load it.

        Raises
        ------
        BackendUnavailableError
            If it is not there; the error names the distribution.
        """
        (load_library if self.is_library else load_module)(self.name, self.distribution)


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
        Name of the exception that the bindings raise; it has the ``status``.
    bindings
        Distribution of the module.
    """

    name: str
    wheel: str
    module: str
    error: str
    bindings: str = "nvmath-python"

    @property
    def requirements(self) -> tuple[Requirement, Requirement]:
        """What has to be there."""
        return Requirement(self.wheel, self.name, is_library=True), Requirement(self.bindings, self.module)

    def load(self) -> Any:
        """Load the library and return the module. May block.

        Raises
        ------
        BackendUnavailableError
            If one of them is not there; the error names the distribution and the command that installs it.
        """
        load_library(self.name, self.wheel)
        return load_module(self.module, self.bindings)


def requirements(libraries: Iterable[VendorLibrary]) -> tuple[Requirement, ...]:
    """Return what the backend and these libraries need, each once."""
    return tuple(dict.fromkeys((*REQUIRED, *(needed for library in libraries for needed in library.requirements))))


def version_of(distribution: str) -> str | None:
    """Return the installed version, or ``None``: a library may come from a toolkit."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def load_module(name: str, distribution: str) -> Any:
    """Import a Python package of NVIDIA's.

    Raises
    ------
    BackendUnavailableError
        If it cannot be imported; it names the ``distribution`` that has it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BackendUnavailableError(f"{distribution} cannot be imported: {error}", remedy=INSTALL) from error


def load_library(name: str, distribution: str) -> str:
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
            f"{distribution} (or the CUDA toolkit) is not installed: lib{name} is not found", remedy=INSTALL
        ) from error
