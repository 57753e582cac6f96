"""What the process that describes files and its parent say to each other: JSON, in messages of these kinds."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["MAX_MESSAGE", "Kind"]

MAX_MESSAGE = 2 << 20
"""Bytes of the longest message: an error with all its texts at their longest is a little shorter."""


class Kind(IntEnum):
    """Kinds of messages."""

    DESCRIBE = 1
    """To the process: the paths."""
    FILE = 2
    """A file, of which tensors follow: its path and its identity."""
    TENSOR = 3
    """A tensor of the last file: source, name, dtype, shape, start and strides."""
    NUMBER = 4
    """A number that is in a file: source, name, real and imaginary part, or a whole number."""
    INPUTS = 5
    """The inputs of a model: source, and for each its name, type and shape."""
    DONE = 6
    REFUSED = 7
    """An error, which ends the description; see :mod:`accel.remote.error_codec`."""
