"""What the CUDA benchmarks share: the machine in words, rows that are held against the design's budgets, and their table."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from accel.cli.bench.budgets import BUDGETS, holds
from accel_cuda import CudaBackend
from accel_cuda.driver import load_driver

__all__ = ["Report"]

_PACKAGES = ("cuda-bindings", "cuda-core", "nvmath-python", "numpy", "uvloop", "cupy-cuda13x", "torch")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def _driver_version() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        return "?"


@dataclass
class Report:
    """Rows of one run.

    Parameters
    ----------
    rows
        Budget, where it was measured, value, and what it was computed from.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)

    def machine(self) -> dict[str, str]:
        """Return the GPU, the driver and the versions."""
        driver = load_driver()
        gpu = CudaBackend().devices()[0].name
        versions = {package: _version(package) for package in _PACKAGES}
        return {"gpu": gpu, "driver": _driver_version(), "cuda": str(driver.version), "python": platform.python_version(), **versions}

    def add(self, name: str, where: str, value: float, **parts: float) -> None:
        """Add a value; ``name`` may be a budget's. It is printed at once."""
        row = {"name": name, "where": where, "value": value, **parts}
        budget = BUDGETS.get(name)
        if budget is not None:
            row |= {key: found for key, found in asdict(budget).items() if key in ("must", "goal", "unit")}
            row["ok"] = holds(value, budget.must, budget.better)
            row["goal_ok"] = holds(value, budget.goal, budget.better)
        self.rows.append(row)
        print(self._line(row), flush=True)

    def _line(self, row: dict[str, Any]) -> str:
        parts = ", ".join(f"{key} {_number(row[key])}" for key in row if key not in _COLUMNS)
        limits = f"must {row['must']:g}, goal {row['goal']:g}: {'ok' if row['ok'] else 'MISSED'}" if "must" in row else ""
        return f"{row['name']:12} {row['where']:24} {_number(row['value']):>10} {limits:34} {parts}"

    def write(self, path: str | None) -> None:
        """Write the machine and the rows as JSON."""
        if path is not None:
            Path(path).write_text(json.dumps({"machine": self.machine(), "rows": self.rows}, indent=1) + "\n", encoding="utf-8")


_COLUMNS = frozenset({"name", "where", "value", "must", "goal", "unit", "ok", "goal_ok"})


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
