"""Kernels that users write, in a child: compiled there, and named by numbers when they are launched."""

from __future__ import annotations

import dataclasses
import json
import pickle
import struct
from typing import TYPE_CHECKING

from accel.backend import CompilesKernels
from accel.engine.kernels import NO_COMPILER
from accel.errors import UnsupportedError
from accel.ops import KernelLayout
from accel.ops.compiler import CompiledKernel, Launch
from accel.process.protocol import ProtocolError
from accel.remote.messages import Kind, WireLaunch

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.backend import AccelDevice

__all__ = ["ChildKernels", "SentKernels", "layout_of", "packed_layout"]

_NUMBER = struct.Struct("<Q")


class SentKernels:
    """The kernels that one child knows by number.

    Parameters
    ----------
    tell
        Sends a message to the child.
    """

    def __init__(self, tell: Callable[[Kind, bytes], None]) -> None:
        self._tell = tell
        self._numbers: dict[tuple[str, KernelLayout | None, tuple[str, ...] | None], int] = {}

    def to_wire(self, op: Launch) -> WireLaunch:
        """Return a launch as it is sent, after telling the child of its kernel if it is the first."""
        kernel = op.kernel
        key = kernel.key, kernel.layout, kernel.parameters
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers) + 1
            self._tell(Kind.KERNEL, _NUMBER.pack(number) + pickle.dumps(kernel))
        return WireLaunch(number, op.grid, op.block, op.args, op.shared_bytes)


class ChildKernels:
    """The same, in the child."""

    def __init__(self) -> None:
        self._kernels: dict[int, CompiledKernel] = {}

    def take(self, data: bytes) -> None:
        """Take note of a kernel."""
        self._kernels[_NUMBER.unpack_from(data)[0]] = pickle.loads(data[_NUMBER.size :])

    def unwired(self, op: WireLaunch) -> Launch:
        """Return the launch."""
        return Launch(self._kernels[op.kernel], op.grid, op.block, op.args, op.shared_bytes)


def packed_layout(device: AccelDevice, name: str, data: bytes) -> bytes:
    """Compile a kernel, pickled, on a device, and return its layout for :func:`layout_of`. May block.

    Raises
    ------
    CompileError, InvalidArgumentError
        See :class:`accel.backend.CompilesKernels`.
    UnsupportedError
        The device has no compiler.
    """
    if not isinstance(device, CompilesKernels):
        raise UnsupportedError(f"{name} has no compiler", remedy=NO_COMPILER)
    return json.dumps(dataclasses.asdict(device.compile(pickle.loads(data)))).encode()


def layout_of(data: bytes) -> KernelLayout:
    """Return the layout that a child has sent; it is looked at closely.

    Raises
    ------
    ProtocolError
        If it is none.
    """
    try:
        found = json.loads(data)
        block, grid, sizes = _ints(found["max_block"]), _ints(found["max_grid"]), _ints(found["sizes"])
        threads, shared = _ints([found["max_threads"], found["max_shared"]])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"a message that should be the layout of a kernel is none: {type(error).__name__}: {error}") from None
    if len(block) != len(grid) or len(block) != 3:
        raise ProtocolError("the layout of a kernel has grids or blocks that are not of three dimensions")
    return KernelLayout(sizes, threads, (block[0], block[1], block[2]), (grid[0], grid[1], grid[2]), shared)


def _ints(values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(isinstance(each, int) and each >= 0 for each in values):
        raise ProtocolError(f"the layout of a kernel has {values!r} where numbers are due")
    return tuple(values)
