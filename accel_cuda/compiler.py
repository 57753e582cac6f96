"""NVRTC: from CUDA C++ to a cubin for the device's own architecture, kept on disk between processes."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from accel import CompileError
from accel_cuda.kernels import PROGRAMS, source_of
from accel_cuda.libraries import load_library, load_module

__all__ = ["compile_source", "own_kernels"]

_CACHE_BYTES = 256 << 20


def own_kernels(arch: str) -> list[bytes]:
    """Return the backend's own kernels as cubins for ``arch`` (``"sm_90"``). Blocks: seconds at first, milliseconds from the cache."""
    _core()  # its import is not safe in several threads at once
    with ThreadPoolExecutor(len(PROGRAMS), thread_name_prefix="accel-nvrtc") as workers:
        return list(workers.map(lambda program: compile_source(source_of(program), arch), PROGRAMS))


def compile_source(source: str, arch: str) -> bytes:
    """Compile ``source`` for ``arch`` and return the cubin. May block for seconds.

    Raises
    ------
    CompileError
        With the compiler's log.
    BackendUnavailableError
        If NVRTC cannot be loaded.
    """
    core, utils = _core()
    options = core.ProgramOptions(arch=arch, std="c++17")
    log = io.StringIO()
    try:
        cache = utils.FileStreamProgramCache(max_size_bytes=_CACHE_BYTES)
    except OSError:  # a read-only home
        cache = utils.InMemoryProgramCache()
    try:
        program = core.Program(source, "c++", options)
        return bytes(program.compile("cubin", logs=log, cache=cache).code)
    except (RuntimeError, ImportError) as error:
        raise CompileError(f"NVRTC: {error}", log=log.getvalue() or str(error), library="nvrtc") from error


def _core() -> tuple[Any, Any]:
    load_library("nvrtc", "nvidia-cuda-nvrtc")
    return load_module("cuda.core", "cuda-core"), load_module("cuda.core.utils", "cuda-core")
