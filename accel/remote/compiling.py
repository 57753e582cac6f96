"""The compilation of users' kernels in a child, which sends their layout to the parent."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import TYPE_CHECKING

from accel.engine.kernels import NO_COMPILER
from accel.errors import UnsupportedError
from accel.ops import CompilesKernels, KernelLayout
from accel.process.protocol import ProtocolError

if TYPE_CHECKING:
    from accel.backend import AccelDevice

__all__ = ["layout_of", "packed_layout"]


def packed_layout(device: AccelDevice, name: str, data: bytes) -> bytes:
    """Compile and load a pickled kernel, and return its layout for :func:`layout_of`. May block.

    Raises
    ------
    CompileError, InvalidArgumentError
        See :class:`accel.ops.CompilesKernels`.
    UnsupportedError
        The device has no compiler.
    """
    if not isinstance(device, CompilesKernels):
        raise UnsupportedError(f"{name} has no compiler", remedy=NO_COMPILER)
    return json.dumps(dataclasses.asdict(device.compile(pickle.loads(data)))).encode()


def layout_of(data: bytes) -> KernelLayout:
    """Return the layout that a child has sent, checked.

    Raises
    ------
    ProtocolError
        If it is no layout.
    """
    try:
        fields = json.loads(data)
        block, grid, sizes = _ints(fields["max_block"]), _ints(fields["max_grid"]), _ints(fields["sizes"])
        threads, shared = _ints([fields["max_threads"], fields["max_shared"]])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"a message that should be the layout of a kernel is none: {type(error).__name__}: {error}") from None
    if len(block) != len(grid) or len(block) != 3:
        raise ProtocolError("the layout of a kernel has grids or blocks that are not of three dimensions")
    return KernelLayout(sizes, threads, (block[0], block[1], block[2]), (grid[0], grid[1], grid[2]), shared)


def _ints(values: object) -> tuple[int, ...]:
    """Return a list of integers that are not negative; raise :class:`ProtocolError` for anything else."""
    if not isinstance(values, list) or not all(isinstance(value, int) and value >= 0 for value in values):
        raise ProtocolError(f"the layout of a kernel has {values!r} where integers of 0 or more must be")
    return tuple(values)
