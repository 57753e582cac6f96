"""What is optional: which module comes with which extra, and the command that installs it."""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["CORE", "EXTRAS", "UNUSED", "extra_of", "install_command", "installable", "version_of"]

CORE = ("numpy", "ml_dtypes", "anyio", "structlog")
"""Distributions that accel cannot be without."""

EXTRAS: dict[str, dict[str, str]] = {
    "cpu": {"scipy": "scipy"},
    "web": {"fastapi": "fastapi", "pydantic": "pydantic", "uvicorn": "uvicorn", "aiohttp": "aiohttp"},
    "cli": {"rich": "rich"},
    "metrics": {"prometheus_client": "prometheus_client"},
    "otel": {"opentelemetry": "opentelemetry-api"},
    "bench": {"matplotlib": "matplotlib"},
    "cuda": {"cuda": "cuda-bindings", "cuda.core": "cuda-core", "nvmath": "nvmath-python"},
    "nvtx": {"nvtx": "nvtx"},
    "dnn": {"cudnn": "nvidia-cudnn-frontend"},
    "sparse-direct": {"cudss": "nvidia-cudss-cu13"},
    "tensor": {"cutensor": "cutensor-cu13"},
    "nccl": {"nccl": "nccl4py"},
    "torch": {"torch": "torch"},
    "onnx": {"onnxruntime": "onnxruntime"},
    "notebook": {"cloudpickle": "cloudpickle"},
    "ray": {"ray": "ray"},
}
"""Extra -> module -> distribution."""

UNUSED: tuple[str, ...] = ()
"""Extras that nothing in this release imports."""

_DISTRIBUTION = "accel-actors"
_ALONE = {"uvloop": "uvloop"}


def extra_of(module: str | None) -> str | None:
    """Return what to install for ``module`` (or a module below it): an extra or a distribution; ``None`` if it is not optional."""
    top = (module or "").partition(".")[0]
    # starlette comes with fastapi, and is what an import of fastapi's parts may name.
    top = "fastapi" if top == "starlette" else top
    return next((extra for extra, modules in EXTRAS.items() if top in modules), _ALONE.get(top))


def install_command(*names: str) -> str:
    """Return the shell command that installs an extra of accel, or other distributions, as accel was installed.

    pip or uv; and for an extra the checkout, the folder or wheel that accel was installed from, or its name.
    """
    installer, origin = _installation()
    if names[0] not in EXTRAS:
        return f"{installer} {' '.join(names)}"
    runs_there = Path(origin) == _root()
    return f"{installer} {'-e ' if runs_there else ''}{shlex.quote(f'{origin}[{names[0]}]')}"


def installable(remedy: str) -> str:
    """Return a remedy with the commands of :func:`install_command`: backends only know those of a checkout."""
    command = r"(?:[Ii]n a checkout(?:, run)?: )?pip install '\.\[([\w-]+)\]'(?:  # in a checkout|, in a checkout)?"
    return re.sub(command, lambda found: install_command(found[1]), remedy)


def _root() -> Path:
    """Return the folder that has accel: a checkout, or site-packages."""
    return Path(__file__).resolve().parents[2]


@functools.cache
def _installation() -> tuple[str, str]:
    """Return the installer's command, and what an extra in brackets follows to be installed."""
    root = _root()
    try:
        found = metadata.distribution(_DISTRIBUTION)
        installer, origin = found.read_text("INSTALLER") or "", json.loads(found.read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        installer, origin = "", {}
    config = Path(sys.prefix) / "pyvenv.cfg"
    is_uv = installer.strip() == "uv" or (config.is_file() and re.search(r"^uv\b", config.read_text(), re.MULTILINE))
    command = "uv pip install" if is_uv else "pip install"
    if (root / "pyproject.toml").is_file():
        return command, str(root)
    url = urlsplit(origin.get("url", ""))
    path = unquote(url.path)
    return command, path if url.scheme == "file" and Path(path).exists() else _DISTRIBUTION


def version_of(distribution: str) -> str | None:
    """Return the installed version, or ``None``. Imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
