"""The ``dnn`` family on a GPU: convolution and attention by programs of the backend's own, some convolutions by cuBLAS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_cuda.core.compute_memory import WORKSPACE, lacks_workspace
from accel_cuda.core.family import CudaPart, Source
from accel_cuda.families.conv2d import convolution
from accel_cuda.families.kernels import CODES
from accel_cuda.families.kernels.attention import ATTENTION_DIMS, ATTENTION_GROUPS, ATTENTION_TILES

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from accel.ops import Attention

__all__ = ["PART"]

_ALIGNMENT = 16
_ATTENTION = {dtype: f"attention_{code}" for dtype, code in CODES.items()}


def conv2d(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Convolve."""
    shapes = inputs[0], op.input.shape, inputs[1], op.filter.shape, outputs[0], op.output_shape()
    lane.compute.conv2d_forward(*shapes, op.stride, op.padding, dtype=op.input.dtype)


def _conv2d_signature(lane: Any, op: Any) -> Hashable:
    # Some are products, and need more memory of their lane than others.
    return op.kind, id(lane.compute), op.input.shape, op.filter.shape, op.input.dtype, op.stride, op.padding, op.filter.offset % _ALIGNMENT


def _conv2d_commands(op: Any) -> int:
    work = convolution("conv2d_forward", op.input.shape, op.filter.shape, op.output_shape(), op.stride, op.padding, "")
    piece = 0 if 0 in work.output else work.piece(op.input.dtype, op.filter.offset, WORKSPACE)
    n, _, p, q = work.output
    return 4 * -(-n * p * q // piece) if piece else 2


def _conv2d_program(op: Any) -> str:
    return "conv2d"


def _attention_program(op: Attention) -> str:
    return _ATTENTION.get(op.q.dtype, "")


def _attention_source(code: str) -> tuple[str, ...]:
    tiled = ("attention_mma.cu", "attention_warpgroup.cu") if code in ("f16", "bf16") else ("attention_fma.cu",)
    lines = [f"ANYWISE({code})", *(f"ROWWISE({code}, {dim})" for dim in ATTENTION_DIMS)]
    for (dtype, dim), tile in ATTENTION_TILES.items():
        if CODES[dtype] == code:
            lines.append(f"TILED({code}, {dim}, {tile.tall}, {tile.keys}, {tile.lines}, {tile.blocks})")
    for (dtype, dim), tile in ATTENTION_GROUPS.items():
        if CODES[dtype] == code:
            lines.append(f"GROUPED({code}, {dim}, {tile.keys}, {tile.lines}, {tile.blocks})")
    return "attention.cuh", "attention_rows.cu", *tiled, "\n".join(lines)


PART = CudaPart(
    kernels={"conv2d": conv2d},
    programs=(Source("conv2d", lambda code: ("conv2d.cu", "")), Source("attention", _attention_source, "attention")),
    program={"conv2d": _conv2d_program, "attention": _attention_program},
    lacks={"attention": lacks_workspace},
    signatures={"conv2d": _conv2d_signature},
    commands={"conv2d": _conv2d_commands, "attention": 2},
    workspaces=2,
)
