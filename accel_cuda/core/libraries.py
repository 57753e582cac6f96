"""The parts of CUDA that are separate downloads: loads them, and says which one is missing and how to get it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from accel import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["INSTALL", "REQUIRED", "Parts", "load_distribution", "load_library", "load_module", "version_of"]

INSTALL = "In a checkout, run: pip install '.[cuda]'"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a distribution brings: Python modules, and shared libraries that may come from a toolkit instead."""

    modules: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


REQUIRED: Mapping[str, Parts] = {
    "cuda-bindings": Parts(("cuda.bindings.driver",)),
    "cuda-core": Parts(("cuda.core", "cuda.core.utils")),
    "nvmath-python": Parts(("nvmath.bindings.cublas", "nvmath.bindings.cufft")),
    "nvidia-cuda-nvrtc": Parts(libraries=("nvrtc",)),
    "nvidia-cublas": Parts(libraries=("cublas",)),
    "nvidia-cufft": Parts(libraries=("cufft",)),
}
"""Distribution -> what of it the backend loads."""


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


def load_distribution(distribution: str) -> None:
    """Load all that the backend uses of one of :data:`REQUIRED`.

    Raises
    ------
    BackendUnavailableError
        If something of it is not there.
    """
    parts = REQUIRED[distribution]
    for library in parts.libraries:
        load_library(library, distribution)
    for module in parts.modules:
        load_module(module, distribution)
