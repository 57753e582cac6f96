"""What is optional: which module comes with which extra, and the command that installs it."""

from __future__ import annotations

from importlib import metadata

__all__ = ["CORE", "EXTRAS", "UNUSED", "extra_of", "install_command", "version_of"]

CORE = ("numpy", "ml_dtypes", "anyio", "structlog")
"""Distributions that accel cannot be without."""

EXTRAS: dict[str, dict[str, str]] = {
    "cpu": {"scipy": "scipy"},
    "web": {"fastapi": "fastapi", "pydantic": "pydantic", "uvicorn": "uvicorn", "aiohttp": "aiohttp"},
    "cli": {"rich": "rich"},
    "metrics": {"prometheus_client": "prometheus_client"},
    "bench": {"matplotlib": "matplotlib"},
    "cuda": {"cuda": "cuda-bindings", "cuda.core": "cuda-core", "nvmath": "nvmath-python"},
    "dnn": {"cudnn": "nvidia-cudnn-frontend"},
    "sparse-direct": {"cudss": "nvidia-cudss-cu13"},
    "torch": {"torch": "torch"},
    "onnx": {"onnxruntime": "onnxruntime"},
    "notebook": {"cloudpickle": "cloudpickle"},
}
"""Extra -> module -> distribution."""

UNUSED: tuple[str, ...] = ()
"""Extras that nothing in this release imports."""

_ALONE = {"uvloop": "uvloop"}


def extra_of(module: str | None) -> str | None:
    """Return what to install for ``module`` (or a module below it): an extra or a distribution; ``None`` if it is not optional."""
    top = (module or "").partition(".")[0]
    # starlette comes with fastapi, and is what an import of fastapi's parts may name.
    top = "fastapi" if top == "starlette" else top
    return next((extra for extra, modules in EXTRAS.items() if top in modules), _ALONE.get(top))


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra of this distribution, which is on no index, or a distribution that stands alone."""
    return f"pip install {extra}" if extra in _ALONE.values() else f"pip install '.[{extra}]'  # in a checkout"


def version_of(distribution: str) -> str | None:
    """Return the installed version, or ``None``. Imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
