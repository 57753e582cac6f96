"""What other Python packages raise when the device has no memory for them. They are told by their classes, and none is imported for that."""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["is_out_of_memory"]

_CLASSES: Final = (("torch", "OutOfMemoryError"), ("cupy.cuda.memory", "OutOfMemoryError"))
"""Module and class. A package that was not imported cannot have raised anything."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` is a package's way to say that the device has no memory. Any thread may ask."""
    for module, name in _CLASSES:
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and isinstance(error, found):
            return True
    return False
