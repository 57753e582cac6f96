"""The ``scan`` family on a GPU: long sums and products of one line by CUB; many lines, extremes and exclusive ones by kernels of the backend's own.

CUB has no scan of several lines at once, and its largest of a number and NaN is the number.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from accel import DType, UnsupportedError
from accel_cuda.core.cub import CUB, Cub, RunningOp
from accel_cuda.core.family import CudaPart, FamilyState, Source
from accel_cuda.families.kernels import CODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_cuda.core.context import CudaContext

__all__ = ["PART", "ScanLibrary"]

_KINDS = ("cumsum", "cumprod", "cummax", "cummin")
# As in scan.cu: elements that a block takes at once.
_TILE = 1024
_BLOCK, _BLOCKS_PER_MULTIPROCESSOR, _TILES_PER_CHUNK = 256, 4, 4
_ALIGNED, _LIMIT = 256, 2**31 - 1
# From how many elements on CUB, which reads them once, is worth its build.
_LONG = 1 << 20
_COMMANDS = 6


class _Lines(NamedTuple):
    """The lines of an op, and how each is cut into chunks."""

    lines: int
    length: int
    behind: int
    chunk: int
    chunks: int


def _lines_of(op: Any, multiprocessors: int) -> _Lines:
    before, length, behind = op.lines()
    count = before * behind
    wanted = -(-_BLOCKS_PER_MULTIPROCESSOR * multiprocessors // max(count, 1))
    chunks = max(1, min(wanted, length // (_TILES_PER_CHUNK * _TILE)))
    chunk = -(-length // (chunks * _TILE)) * _TILE
    return _Lines(count, length, behind, max(chunk, _TILE), max(1, -(-length // max(chunk, 1))))


def _wide(dtype: DType) -> DType:
    return DType.FLOAT32 if dtype in (DType.FLOAT16, DType.BFLOAT16) else dtype


def _library(op: Any) -> RunningOp | None:
    """Return the algorithm of CUB's that an op needs, or ``None``."""
    if op.kind not in ("cumsum", "cumprod"):
        return None
    before, length, behind = op.lines()
    is_one = before * behind == 1 and length >= _LONG
    return RunningOp(op.kind, op.element()) if is_one and not op.exclusive else None


class ScanLibrary(FamilyState[Cub]):
    """CUB in one context. It has many algorithms, of which a service needs few; each is built at its first use."""

    commands = _COMMANDS

    def __init__(self, context: CudaContext) -> None:
        super().__init__(context, Cub)
        self._multiprocessors = context.multiprocessors
        self.kernels = {**dict.fromkeys(_KINDS, self._run), "segment_reduce": _segments}

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether the algorithm that the op needs was not run yet. Quick."""
        algorithm = _library(op)
        return algorithm is not None and not self.loaded().is_ready(algorithm)

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes an op works in, or ``None`` before :meth:`measure`. Quick."""
        algorithm = _library(op)
        if algorithm is not None:
            return self.loaded().scratch_nbytes(algorithm, op.x.size)
        if op.kind == "segment_reduce":
            return 0
        lines = _lines_of(op, self._multiprocessors)
        return 2 * self._nbytes(op, lines) if lines.chunks > 1 else 0

    def measure(self, op: Any) -> None:
        """See that :meth:`scratch_nbytes` knows. May block."""
        algorithm = _library(op)
        if algorithm is not None:
            self.loaded().measure(algorithm, op.x.size)

    @staticmethod
    def _nbytes(op: Any, lines: _Lines) -> int:
        """Return the bytes of one number for each chunk."""
        return -(-lines.lines * lines.chunks * _wide(op.element()).itemsize // _ALIGNED) * _ALIGNED

    def _run(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        if not op.x.size:
            return
        stream, algorithm = lane.stream, _library(op)
        stream.ready()
        if algorithm is not None:
            self.loaded().run(stream, algorithm, outputs[-1], op.x.size, inputs[0], outputs[0])
            return
        lines = _lines_of(op, self._multiprocessors)
        blocks = lines.lines * lines.chunks
        if blocks > _LIMIT:
            raise UnsupportedError(f"{op.kind} of {lines.lines} lines", op=op.kind, remedy="Give fewer at a time.")
        dtype = op.element()
        nothing = np.frombuffer(op.neutral(), dtype.numpy)
        sizes = lines.length, lines.behind, lines.chunk, lines.chunks, _bits(nothing)
        name, carries = f"{op.kind}_{CODES[dtype]}", 0
        if lines.chunks > 1:
            totals, carries = outputs[-1], outputs[-1] + self._nbytes(op, lines)
            stream.launch(stream.functions[f"scan_whole_{name}"], blocks, _BLOCK, inputs[0], totals, *sizes)
            wide = _wide(dtype)
            between = stream.functions[f"scan_{op.kind}_{CODES[wide]}"]
            start = _bits(nothing.astype(wide.numpy))
            stream.launch(between, lines.lines, _BLOCK, totals, carries, 0, lines.chunks, 1, lines.chunks, 1, start, 1)
        stream.launch(stream.functions[f"scan_{name}"], blocks, _BLOCK, inputs[0], outputs[0], carries, *sizes, int(op.exclusive))


def _segments(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    stream, x = lane.stream, op.x
    stream.ready()
    behind = math.prod(x.shape[1:])
    blocks = (op.offsets.size - 1) * behind
    if blocks > _LIMIT:
        raise UnsupportedError(f"{op.kind} of {blocks} results", op=op.kind, remedy="Give fewer at a time.")
    if blocks:
        nothing = _bits(np.frombuffer(op.neutral(), x.dtype.numpy))
        function = stream.functions[f"scan_segment_{op.cumulative()}_{CODES[x.dtype]}"]
        stream.launch(function, blocks, _BLOCK, *inputs, *outputs[:2], x.shape[0], behind, nothing)


def _bits(value: np.ndarray[Any, Any]) -> int:
    return int.from_bytes(value.tobytes(), "little")


PART = CudaPart(
    open=ScanLibrary,
    libraries=(CUB,),
    programs=(Source("scan", lambda code: ("scan.cu", "")),),
    program="scan",
)
