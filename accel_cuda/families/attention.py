"""Attention: by cuDNN for 16-bit floats, as far as it offers it, else by one kernel of the backend's own.

cuDNN multiplies the values of hidden keys by 0, so they must be numbers. Its float32 attention is not used: it is TF32's, and faults for some sizes.
"""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from accel import DType, UnsupportedError
from accel.enums import Causal
from accel_cuda.families.convolution import CUDNN_TYPES
from accel_cuda.families.kernels import CODES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel import AccelRef
    from accel_cuda.core.stream import CudaStream
    from accel_cuda.families.cudnn import Cudnn, Room

__all__ = ["CAUSAL", "GRADIENT_TENSORS", "AttentionSteps", "AttentionWork", "attend"]

_HALVES = frozenset({DType.FLOAT16, DType.BFLOAT16})
CAUSAL = {False: 0, True: 1, "bottom_right": 2}
"""What kernels call ``causal``."""
_ALIGNMENT = {False: None, True: "TOP_LEFT", "bottom_right": "BOTTOM_RIGHT"}
_ROWS, _KEYS, _WARPS, _SHARED = 4, 32, 4, 48 << 10
_LIMIT = 2**31 - 1
_BLOCK = 256

# Numbers of tensors in cuDNN's plans.
_Q, _K, _V, _OUT, _BIAS, _LENGTHS_Q, _LENGTHS_KV, _BEGINS_Q, _BEGINS_KV, _TABLE, _STATS = range(1, 12)
GRADIENT_TENSORS = (8, 1, 2, 3, 7, 9, 4, 5, 6)
"""In plans of gradients: of the gradient, q, k, v, what attention gave, the statistics, and the gradients of q, k and v."""


class _Layout(NamedTuple):
    """Shape and strides, in elements, of a (batch, heads, length, dim) array; the batch is a page where keys lie in pages."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]

    @classmethod
    def dense(cls, *shape: int) -> _Layout:
        """Return a C-contiguous one."""
        batch, heads, length, dim = shape
        return cls((batch, heads, length, dim), (heads * length * dim, length * dim, dim, 1))

    @classmethod
    def of(cls, ref: AccelRef) -> _Layout:
        """Return that of an operand, whose last axis is contiguous."""
        return cls(cast("tuple[int, int, int, int]", ref.shape), cast("tuple[int, int, int, int]", ref.strides))

    @classmethod
    def ragged(cls, batch: int, heads: int, longest: int, dim: int) -> _Layout:
        """Return that of sequences in a (tokens, heads, dim) array."""
        return cls((batch, heads, longest, dim), (longest * heads * dim, dim, heads * dim, 1))


@dataclass(frozen=True, eq=False)
class AttentionWork:
    """What decides how attention is made: the key of its plan, by identity.

    Attributes
    ----------
    form : str
        Kind of the op.
    lengths : tuple of bool
        Whether lengths of queries, and of keys, are given.
    bias : tuple of int or None
        Its shape.
    pages : int
        How many pages a batch has at most; 0 without pages.
    tokens : tuple of int
        How many there are in ragged arrays.
    """

    form: str
    dtype: DType
    q: _Layout
    k: _Layout
    v: _Layout
    out: _Layout
    scale: float
    causal: Causal = False
    window: int | None = None
    bias: tuple[int, ...] | None = None
    lengths: tuple[bool, bool] = (False, False)
    pages: int = 0
    tokens: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, op: Any) -> AttentionWork:
        """Return what an op asks for."""
        kind, value_dim = op.kind, op.v.shape[-1]
        forward = op.forward() if kind in ("attention_with_stats", "attention_grad") else op
        common = forward.multiplier(), op.causal, op.window
        if kind == "ragged_attention":
            (tokens, heads, dim), (keys, kv_heads, _), batch = op.q.shape, op.k.shape, op.offsets_q.size - 1
            sides = (
                (heads, op.longest_q, dim),
                (kv_heads, op.longest_kv, dim),
                (kv_heads, op.longest_kv, value_dim),
                (heads, op.longest_q, value_dim),
            )
            q, k, v, out = (_Layout.ragged(batch, *side) for side in sides)
            return cls(kind, op.q.dtype, q, k, v, out, *common, None, (True, True), 0, (tokens, keys))
        arrays = _Layout.of(op.q), _Layout.of(op.k), _Layout.of(op.v), _Layout.dense(*op.q.shape[:3], value_dim)
        if kind in ("attention_with_stats", "attention_grad"):
            return cls(kind, op.q.dtype, *arrays, *common)
        if kind == "paged_attention":
            return cls(kind, op.q.dtype, *arrays, *common, None, (False, True), op.table.shape[1])
        lengths = op.lengths_q is not None, op.lengths_kv is not None
        return cls(kind, op.q.dtype, *arrays, *common, None if op.bias is None else op.bias.shape, lengths)

    @classmethod
    def dense(cls, batch: int, heads: int, seq_q: int, seq_kv: int, dim: int, scale: float, causal: Causal, dtype: DType) -> AttentionWork:
        """Return attention of arrays of one number of heads, and one head dimension."""
        q, k = _Layout.dense(batch, heads, seq_q, dim), _Layout.dense(batch, heads, seq_kv, dim)
        return cls("attention", dtype, q, k, k, q, scale, causal)

    @cached_property
    def seq_kv(self) -> int:
        """How many keys a batch has at most."""
        # A cache without pages has no keys, whatever tables say.
        return self.k.shape[2] * (self.pages * bool(self.k.shape[0]) if self.form == "paged_attention" else 1)

    @cached_property
    def has_lengths(self) -> bool:
        """Whether lengths of queries, or of keys, are given."""
        return any(self.lengths)

    @cached_property
    def is_for_cudnn(self) -> bool:
        """Whether cuDNN may offer it: it is asked then."""
        heads_fit = self.q.shape[3] % 8 == 0 and self.v.shape[3] % 8 == 0
        # Hidden scores are -infinity before cuDNN multiplies them.
        if not 0 < self.scale < math.inf:
            return False
        if self.dtype not in _HALVES or not heads_fit or 0 in (*self.q.shape, *self.k.shape, *self.v.shape, self.seq_kv):
            return False
        # Sequences of one array begin at elements that 32 bits count, and those of v at the elements of k.
        widths = self.q.strides[2] * self.tokens[0], self.k.strides[2] * self.tokens[1]
        return self.form != "ragged_attention" or (self.q.shape[3] == self.v.shape[3] and max(widths) <= _LIMIT)

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """The bytes of cuDNN's tensors."""
        size, numbers, batch = self.dtype.itemsize, 4, self.q.shape[0]
        stats = max(size, 4) * math.prod(self.q.shape[:3])
        if self.form == "attention_grad":
            q, k, v, out = (size * math.prod(each.shape) for each in (self.q, self.k, self.v, self.out))
            return dict(enumerate((q, k, v, q, k, v, out, out, stats), 1))
        if self.form == "ragged_attention":
            (tokens, keys), k, v = self.tokens, self.k.strides[2], self.v.strides[2]
            arrays = {_Q: tokens * self.q.strides[2], _K: keys * k, _V: keys * v, _OUT: tokens * self.out.strides[2]}
        else:
            arrays = {uid: math.prod(each.shape) for uid, each in ((_Q, self.q), (_K, self.k), (_V, self.v), (_OUT, self.out))}
        arrays[_BIAS] = math.prod(self.bias or (0,))
        tables = {_LENGTHS_Q: batch, _LENGTHS_KV: batch, _BEGINS_Q: batch + 1, _BEGINS_KV: batch + 1, _TABLE: batch * self.pages}
        counts = {**{uid: size * count for uid, count in arrays.items()}, **{uid: numbers * count for uid, count in tables.items()}}
        return {**counts, _STATS: stats}

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """The numbers that the op's operands, and then its results, have in plans."""
        if self.form == "ragged_attention":
            return _Q, _K, _V, _BEGINS_Q, _BEGINS_KV, _OUT
        if self.form == "paged_attention":
            return _Q, _K, _V, _TABLE, _LENGTHS_KV, _OUT
        if self.form == "attention_grad":
            return GRADIENT_TENSORS
        if self.form == "attention_with_stats":
            return _Q, _K, _V, _OUT, _STATS
        given = ((self.bias is not None, _BIAS), (self.lengths[0], _LENGTHS_Q), (self.lengths[1], _LENGTHS_KV))
        return (_Q, _K, _V, *(uid for is_given, uid in given if is_given), _OUT)

    def request(self) -> dict[str, Any]:
        """See :meth:`accel_cuda.families.cudnn.Work.request`."""
        arrays = {"q": self.q, "k": self.k, "v": self.v, "out": self.out}
        layouts = {name: {"dims": each.shape, "strides": each.strides} for name, each in arrays.items()}
        dtype = CUDNN_TYPES[self.dtype]
        return {
            "op": "attention_grad" if self.form == "attention_grad" else "attention",
            "has_stats": self.form == "attention_with_stats",
            "dtype": dtype,
            **layouts,
            "scale": self.scale,
            "causal": _ALIGNMENT[self.causal],
            "window": self.window,
            "bias": None if self.bias is None else {"dims": self.bias, "dtype": dtype},
            "has_lengths": self.has_lengths,
            "is_ragged": self.form == "ragged_attention",
            "pages": self.pages or None,
            "without": [],
        }

    @cached_property
    def own_nbytes(self) -> int:
        """The bytes of lengths, and of where sequences begin, that are made for cuDNN."""
        batch = self.q.shape[0]
        if self.form == "ragged_attention":
            return 2 * (_rounded(4 * batch) + _rounded(4 * batch + 4))
        return 2 * _rounded(4 * batch) + _rounded(4 * batch * self.pages) if self.has_lengths else 0


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def attend(stream: CudaStream, cudnn: Cudnn | None, work: AttentionWork, pointers: Mapping[int, int], room: Room) -> None:
    """Enqueue attention. May block where a plan is new, or the backend's own kernel is not loaded.

    Parameters
    ----------
    cudnn
        cuDNN, if the work is for it.
    pointers
        Number of a tensor -> address, of those that are given. Where sequences of one array begin has the numbers of what cuDNN is told of it.
    room
        What it works in.
    """
    sizes = work.sizes
    if not sizes[_OUT]:
        return
    if not work.seq_kv:
        stream.fill(pointers[_OUT], bytes(1), sizes[_OUT])
        if _STATS in pointers:
            nothing = struct.pack("<d" if sizes[_STATS] == 8 * math.prod(work.q.shape[:3]) else "<f", -math.inf)
            stream.fill(pointers[_STATS], nothing, math.prod(work.q.shape[:3]))
        return
    if cudnn is None:
        _launch(stream, work, pointers)
        return
    tensors = pointers
    if work.has_lengths:
        # cuDNN leaves out what sees no key.
        stream.fill(pointers[_OUT], bytes(1), sizes[_OUT])
        tensors = {**pointers, **_made(stream, work, pointers, room)}
    cudnn.run(stream, work, tensors, room, lambda stream, _: _launch(stream, work, pointers))


def _made(stream: CudaStream, work: AttentionWork, pointers: Mapping[int, int], room: Room) -> Mapping[int, int]:
    """Enqueue what makes the lengths, tables, and places where sequences begin, that cuDNN is given: it reads wherever they say, so all are in range."""
    batch, sizes = work.q.shape[0], work.sizes
    longest = work.q.shape[2], work.seq_kv
    if work.form == "ragged_attention":
        made = {uid: room.take(sizes[uid]) for uid in (_LENGTHS_Q, _LENGTHS_KV, _BEGINS_Q, _BEGINS_KV)}
        function = stream.functions[f"attention_ragged_{CODES[work.dtype]}"]
        widths = work.q.strides[2], work.k.strides[2]
        addresses = pointers[_BEGINS_Q], pointers[_BEGINS_KV], *made.values()
        stream.launch(function, -(-(batch + 1) // _BLOCK), _BLOCK, *addresses, batch, *widths, *work.tokens, *longest)
        return made
    made = {uid: room.take(sizes[uid]) for uid in (_LENGTHS_Q, _LENGTHS_KV, *([_TABLE] if work.pages else []))}
    numbers = [each for uid in (_LENGTHS_Q, _LENGTHS_KV, _TABLE) for each in (pointers.get(uid, 0), made.get(uid, 0))]
    entries = batch * work.pages
    function, blocks = stream.functions[f"attention_numbers_{CODES[work.dtype]}"], -(-max(batch, entries) // _BLOCK)
    stream.launch(function, blocks, _BLOCK, *numbers, batch, entries, *longest, work.k.shape[0] - 1)
    return made


class AttentionSteps(ctypes.Structure):
    """Strides, in elements, of a batch, a head and a row."""

    _fields_ = (("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("row", ctypes.c_int64))


class _Arguments(ctypes.Structure):
    """What the kernel calls Attention."""

    _fields_ = (
        ("pointers", ctypes.c_void_p * 10),
        ("numbers", ctypes.c_int64 * 14),
        ("steps", AttentionSteps * 5),
        ("scale", ctypes.c_double),
        ("stats", ctypes.c_void_p),
    )


def _launch(stream: CudaStream, work: AttentionWork, pointers: Mapping[int, int]) -> None:
    """Enqueue the backend's own kernel."""
    (batch, heads, seq_q, dim), kv_heads, value_dim = work.q.shape, work.k.shape[1], work.v.shape[3]
    context, device = stream.ready(), stream.context.description.spec
    warp = _ROWS * (dim + _KEYS + value_dim) * max(work.dtype.itemsize, 4)
    if warp > context.shared_limit:
        raise UnsupportedError(f"attention with heads of {dim} and {value_dim} does not fit shared memory", op=work.form, device=device)
    warps = max(1, min(_WARPS, _SHARED // warp))
    blocks = batch * heads * -(-seq_q // (_ROWS * warps))
    if blocks > _LIMIT:
        raise UnsupportedError(
            f"attention of {batch * heads * seq_q} queries takes more blocks than one launch can have", op=work.form, device=device
        )
    if not blocks:
        return
    arguments = _Arguments()
    order = (_Q, _K, _V, _OUT, _BIAS, _LENGTHS_Q, _LENGTHS_KV, _BEGINS_Q, _BEGINS_KV, _TABLE)
    arguments.pointers[:] = [pointers.get(uid, 0) for uid in order]
    page_size = work.k.shape[2] if work.pages else 0
    arguments.numbers[:] = (
        *(batch, heads, kv_heads, seq_q, work.seq_kv, dim, value_dim, CAUSAL[work.causal], work.window or 0, page_size, work.pages),
        *(*work.tokens, work.k.shape[0]),
    )
    ragged = work.form == "ragged_attention"
    steps = [AttentionSteps(0 if ragged else each.strides[0], *each.strides[1:3]) for each in (work.q, work.k, work.v, work.out)]
    arguments.steps[:] = (*steps, _bias_steps(work.bias))
    arguments.scale = work.scale
    arguments.stats = pointers.get(_STATS, 0)
    stream.launch_with(stream.functions[f"attention_any_{CODES[work.dtype]}"], (blocks, 1), (32 * warps, 1), arguments, warps * warp)


def _bias_steps(shape: Sequence[int] | None) -> AttentionSteps:
    """Return the strides of a bias; 0 where it has one element for all."""
    if shape is None:
        return AttentionSteps()
    _, heads, rows, keys = shape
    return AttentionSteps(
        *(step if length > 1 else 0 for length, step in zip(shape, (heads * rows * keys, rows * keys, keys), strict=False))
    )
