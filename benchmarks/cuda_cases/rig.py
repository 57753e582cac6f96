"""What the cases share for the whole run: the raw twin, CuPy and PyTorch where they are installed, and the names of subjects."""

from __future__ import annotations

import gc
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accel_cuda.backend import CudaBackend
from accel_cuda.core.driver import load_driver
from benchmarks.cuda_cases.others import CupyWays, TorchWays
from benchmarks.cuda_cases.raw import Raw

if TYPE_CHECKING:
    from accel.cli.bench.suite import Bench

__all__ = ["CUPY", "INSTALL_TWINS", "TORCH_QUERY", "TORCH_THREAD", "Rig", "index_of", "machine"]

CUPY = "CuPy, launch_host_func"
TORCH_QUERY = "PyTorch, event.query each turn"
TORCH_THREAD = "PyTorch, to_thread(event.synchronize)"
INSTALL_TWINS = "Install CuPy, PyTorch or both: pip install cupy-cuda13x torch."

_PACKAGES = ("cuda-bindings", "cuda-core", "nvmath-python", "nvidia-cublas", "uvloop", "cupy-cuda13x", "torch")

W = TypeVar("W", CupyWays, TorchWays)


class Rig:
    """Opened at first use, closed by the command at the end: the primary context is kept for the whole run, as in a service."""

    def __init__(self) -> None:
        self._raw: Raw | None = None
        self._others: dict[type[Any], Any] = {}

    def raw(self, bench: Bench) -> Raw:
        """Return the raw twin; its context is current on this thread."""
        if self._raw is None:
            self._raw = Raw(index_of(bench))
        self._raw.enter()
        return self._raw

    def cupy(self, bench: Bench) -> CupyWays | None:
        """Return CuPy's ways, or ``None`` where it is not installed."""
        return self._other(CupyWays, bench)

    def torch(self, bench: Bench) -> TorchWays | None:
        """Return PyTorch's ways, or ``None`` where it is not installed."""
        return self._other(TorchWays, bench)

    def _other(self, ways: type[W], bench: Bench) -> W | None:
        self.raw(bench)
        if ways not in self._others:
            try:
                self._others[ways] = ways(index_of(bench))
            except (ImportError, RuntimeError, AssertionError) as error:
                self._others[ways] = None
                bench.report.skipped[ways.name] = f"left out beside the others: {error}"
            # Each makes a context current of its own accord.
            self.raw(bench)
            # PyTorch alone brings a million objects. A collection that walks through them takes a tenth of a second, in any subject's round.
            gc.collect()
            gc.freeze()
        found: W | None = self._others[ways]
        return found

    def close(self) -> None:
        """Give everything back."""
        gc.unfreeze()
        self._others.clear()
        if self._raw is not None:
            self._raw.close()
            self._raw = None


def index_of(bench: Bench) -> int:
    """Return the GPU's number."""
    return int(bench.spec.partition(":")[2] or 0)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Return the driver's version and those of the packages; ``None`` for what is not installed."""
    driver = load_driver()
    try:
        release = Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        release = "unknown"
    versions = {package: _version(package) for package in _PACKAGES}
    return {"driver": release, "cuda": driver.version, "gpus": len(CudaBackend().devices()), "host": platform.node(), **versions}
