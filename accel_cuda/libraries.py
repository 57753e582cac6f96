"""The parts of CUDA that are separate downloads: loads them, and says which one is missing and how to get it."""

from __future__ import annotations

import importlib
from typing import Any

from accel import BackendUnavailableError

__all__ = ["INSTALL", "load_library", "load_module"]

INSTALL = "Install it: pip install 'accel-actors[cuda]'."


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


def load_library(name: str, distribution: str) -> None:
    """Load a shared library, such as ``"nvrtc"``, before a package of NVIDIA's looks for it and fails with an error of its own.

    Raises
    ------
    BackendUnavailableError
        If it is neither in a wheel nor in a toolkit that can be found; it names the ``distribution`` that has it.
    """
    pathfinder = load_module("cuda.pathfinder", "cuda-pathfinder")
    try:
        pathfinder.load_nvidia_dynamic_lib(name)
    except pathfinder.DynamicLibNotFoundError as error:
        raise BackendUnavailableError(
            f"{distribution} (or the CUDA toolkit) is not installed: lib{name} is not found", remedy=INSTALL
        ) from error
