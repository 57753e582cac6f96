"""The version of what is installed."""

from __future__ import annotations

__all__ = ["installed_version"]

_DISTRIBUTION = "accel-actors"


def installed_version() -> str:
    """Return the version in the metadata of the installation.

    A checkout that is not installed has the version of its ``pyproject.toml``, with ``+checkout`` behind it.
    """
    from importlib import metadata  # its 15 ms are not spent by each child

    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return f"{_checkout_version()}+checkout"


def _checkout_version() -> str:
    import tomllib
    from pathlib import Path

    try:
        text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:  # the packages alone were copied
        return "0"
    return str(tomllib.loads(text)["project"]["version"])
