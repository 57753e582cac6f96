"""What the CPU kernels compute in, and how much memory they take for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["WORKSPACE", "blocks", "wider"]

WORKSPACE = 16 << 20
"""Bytes that a kernel may take for intermediate results, except where a single row of them is larger."""

_FLOAT32 = np.dtype(np.float32)
_WIDER: dict[np.dtype[Any], np.dtype[Any]] = {np.dtype(np.float16): _FLOAT32, np.dtype(ml_dtypes.bfloat16): _FLOAT32}


def wider(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type that ``dtype`` is computed in: float32 for the 16-bit floats, which are then rounded once; else itself."""
    return _WIDER.get(dtype, dtype)


def blocks(count: int, nbytes: int, workspace: int = WORKSPACE) -> Iterator[slice]:
    """Cut ``count`` rows, each of which needs ``nbytes`` of workspace, into slices that stay within it."""
    rows = max(1, workspace // max(1, nbytes))
    for start in range(0, count, rows):
        yield slice(start, min(count, start + rows))
