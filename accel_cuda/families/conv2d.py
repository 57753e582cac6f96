"""How a convolution is made: as a batch of products where the filters are of one element, else by kernels of the backend's own."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache

from accel import DType, UnsupportedError, arguments

__all__ = ["Convolution", "convolution"]

_PIXELS = 128
_LIMIT = 1 << 29
_WAVES = 3
_MOST_PARTS = 4
_MANY, _LEAST_PIECE = 64, 1024


class _Sizes(ctypes.Structure):
    """What the kernels call Shape, between pointers and further numbers."""

    _fields_ = (("pointers", ctypes.c_void_p * 4), ("numbers", ctypes.c_int64 * 14), ("further", ctypes.c_int64 * 2))


@dataclass(frozen=True, slots=True)
class Convolution:
    """Shapes of one convolution, checked.

    Parameters
    ----------
    input, filter, output
        (N, C, H, W), (K, C, R, S) and (N, K, P, Q).
    stride, padding
        (vertical, horizontal).
    """

    input: tuple[int, ...]
    filter: tuple[int, ...]
    output: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    def check(self, device: str) -> None:
        """Refuse sizes that the kernels do not count to.

        Raises
        ------
        UnsupportedError
            If rows, columns, elements of a filter, or elements of an image are more than 2^29.
        """
        height, width = (self.input[2 + axis] + 2 * self.padding[axis] for axis in (0, 1))
        if max(height, width, self.taps, math.prod(self.input[1:]), math.prod(self.output[2:])) > _LIMIT:
            raise UnsupportedError(
                f"a convolution of {self.input} with {self.filter} is too large",
                op="conv2d_forward",
                device=device,
                remedy="Cut the images into smaller ones.",
            )

    @property
    def taps(self) -> int:
        """Products that each result is a sum of."""
        return math.prod(self.filter[1:])

    def is_product(self, dtype: DType) -> bool:
        """Return whether it is made as products of matrices as they lie: the filters by each image.

        Rows of 16-bit floats that do not begin at multiples of 16 bytes are slow in products.
        """
        is_matrix = self.filter[2:] == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)
        return is_matrix and self.taps > 0 and (dtype.itemsize > 2 or math.prod(self.output[2:]) % 8 == 0)

    def piece(self, dtype: DType, filter: int, nbytes: int) -> int:
        """Return for how many pixels at a time a matrix of ``nbytes`` is built, so that cuBLAS makes the product; 0 if it is not.

        That is for 16-bit floats, whose products are so fast that building the matrix pays, and where there are many filters to use it for.
        """
        taps, filters = self.taps, self.output[1]
        if dtype.itemsize != 2 or filters <= _MANY or taps <= _MANY or taps % 8 or filter % 16:
            return 0
        pixels = self.output[0] * self.output[2] * self.output[3]
        most = nbytes // (2 * (taps + filters)) // _PIXELS * _PIXELS
        return min(most, -(-pixels // _PIXELS) * _PIXELS) if most >= _LEAST_PIECE else 0

    def tiling(self, dtype: DType, multiprocessors: int, workspace: int) -> tuple[int, int, int]:
        """Return how many filters a block takes, how many taps, and how many blocks share a tile.

        With few tiles, several blocks share the taps of each, until the device is busy or ``workspace`` bytes do not hold their partial results.
        """
        filters, pixels = self.output[1], self.output[0] * self.output[2] * self.output[3]
        wanted, columns = _WAVES * multiprocessors, -(-pixels // _PIXELS)
        height = 128 if dtype is DType.FLOAT32 and filters > 64 else 64
        tiles = columns * -(-filters // height)
        step, least = (32, 512) if dtype.itemsize == 2 else (8, 512)
        nbytes = filters * pixels * (8 if dtype is DType.FLOAT64 else 4)
        parts = max(1, min(wanted // tiles, _MOST_PARTS, self.taps // least, workspace // nbytes))
        each = max(1, -(-self.taps // (parts * step))) * step
        return height, each, max(1, -(-self.taps // each))

    def parameters(
        self, input: int, filter: int, output: int, partial: int, taps_each: int
    ) -> tuple[ctypes.Array[ctypes.c_void_p], _Sizes]:
        """Return a kernel's arguments, and what holds them."""
        (n, c, h, w), (k, _, r, s), (_, _, p, q) = self.input, self.filter, self.output
        held = _Sizes()
        held.pointers[:] = (input, filter, output, partial)
        held.numbers[:] = (n, c, h, w, k, r, s, p, q, *self.stride, *self.padding, taps_each)
        start = ctypes.addressof(held)
        return (ctypes.c_void_p * 5)(*(start + 8 * i for i in range(5))), held

    def piece_parameters(self, input: int, columns: int, pixel: int, ld: int) -> tuple[ctypes.Array[ctypes.c_void_p], _Sizes]:
        """Return the arguments of the kernel that builds a matrix, and what holds them."""
        _, held = self.parameters(input, columns, 0, 0, 0)
        held.further[:] = (pixel, ld)
        start, further = ctypes.addressof(held), ctypes.addressof(held) + _Sizes.further.offset
        return (ctypes.c_void_p * 5)(start, start + 8, start + _Sizes.numbers.offset, further, further + 8), held


@lru_cache(maxsize=256)
def convolution(
    op: str, input: tuple[int, ...], filter: tuple[int, ...], output: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
    device: str,
) -> Convolution:  # fmt: skip
    """Return a convolution whose shapes are right: those of one layer are looked at once, for that takes as long as some layers do.

    Raises
    ------
    InvalidArgumentError
        If shapes, strides and paddings do not belong together.
    UnsupportedError
        As :meth:`Convolution.check`.
    """
    arguments.convolution(op, input, filter, output, stride, padding)
    work = Convolution(input, filter, output, stride, padding)
    if 0 not in output:
        work.check(device)
    return work
