"""The ``dnn`` family on a GPU: convolutions and attention by cuDNN, all else by kernels of the backend's own."""

from __future__ import annotations

import contextlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from accel import BackendUnavailableError, UnaryOp
from accel_cuda.core.family import CudaPart, FamilyState, Source, derived
from accel_cuda.core.memo import Memo
from accel_cuda.families import attention_grad, loss, normalization, pooling, training
from accel_cuda.families.attention import AttentionWork, attend
from accel_cuda.families.attention_grad import attend_backward
from accel_cuda.families.convolution import GRADS, ConvolutionWork, convolve, fill
from accel_cuda.families.cudnn import CUDNN, Cudnn, Plan, Room, Work
from accel_cuda.families.elementwise import enqueue_unary
from accel_cuda.families.kernels import CODES, aligned

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["PART", "DnnLibrary"]

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", *GRADS)
_ATTENTIONS = ("attention", "ragged_attention", "paged_attention", "attention_with_stats")
_REFS = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), attrgetter("input", "filter", "bias", "out")),
    **{kind: attrgetter("grad", "filter", "out") if of == "input" else attrgetter("input", "grad", "out") for kind, of in GRADS.items()},
    "attention_with_stats": attrgetter("q", "k", "v"),
    "attention_grad": attrgetter("grad", "q", "k", "v", "attended", "stats"),
    "attention": attrgetter("q", "k", "v", "bias", "out"),
    **dict.fromkeys(("ragged_attention", "paged_attention"), attrgetter("q", "k", "v", "out")),
}
"""Kind of an op -> its operands, and its result, that plans take."""
_TENSOR, _RESULT = 16, 4
_COMMANDS = 8
"""Commands of an op at most: copies, fills, and the kernels of a plan."""


class DnnLibrary(FamilyState[Cudnn]):
    """cuDNN in one context, and what its ops work in."""

    commands = _COMMANDS

    def __init__(self, context: CudaContext) -> None:
        super().__init__(context, Cudnn)
        self.kernels = {
            **dict.fromkeys(_CONVOLUTIONS, self._convolve),
            **dict.fromkeys((*_ATTENTIONS, "attention_grad"), self._attend),
            **training.WORKING,
        }
        self._measured: Memo[Work, int] = Memo()

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing ``op`` loads cuDNN, makes a handle or a plan, or uses a plan for the first time."""
        if op.kind in training.WORKING:
            return False
        work = derived(op, _work_of)
        if not work.is_for_cudnn:
            return False
        cudnn = self.library
        return cudnn is None or not cudnn.has_handle(lane.stream) or not cudnn.plans.is_ready(work)

    def prepare(self, stream: CudaStream) -> None:
        """Load cuDNN, and make the handle of a stream. May block. Where cuDNN is not installed, an op that needs it says so."""
        with contextlib.suppress(BackendUnavailableError):
            self.loaded().prepare(stream)

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes an op works in, or ``None`` if its plan was not made yet; see :class:`accel.backend.TakesScratch`."""
        if op.kind in training.WORKING:
            return training.scratch_nbytes(op)
        work = derived(op, _work_of)
        if not work.is_for_cudnn:
            return 0
        nbytes = self._measured.get(work)
        return None if nbytes is None else nbytes + _copied_nbytes(op)

    def measure(self, op: Any) -> None:
        """See that :meth:`scratch_nbytes` knows. May block."""
        self.measured(derived(op, _work_of))

    def measured(self, work: Work) -> int:
        """Return the bytes that a work needs whose operands and result are all aligned. May block."""
        nbytes = self._measured.get(work)
        if nbytes is None:
            plan = self.loaded().plans.prepare(work) if work.is_for_cudnn else None
            nbytes = work.own_nbytes + (aligned(plan.workspace) if isinstance(plan, Plan) else 0)
            self._measured[work] = nbytes
        return nbytes

    def _convolve(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        work: Any = derived(op, _work_of)
        stream, (y, scratch) = lane.stream, outputs
        x, w, bias = (*inputs, 0)[:3]
        nbytes = work.sizes[_RESULT]
        if not nbytes:
            return
        if work.is_for_cudnn:
            convolve(stream, self.loaded(), work, x, w, bias, y, Room(scratch))
        else:
            fill(stream, work, y)
        if work.makes == "output" and op.activation:
            # cuDNN's relu is 0 for NaN in some of its engines.
            enqueue_unary(stream, UnaryOp.RELU, work.dtype, y, y, nbytes // work.dtype.itemsize)

    def _attend(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        work: Any = derived(op, _work_of)
        *made, scratch = outputs
        pointers = dict(zip(work.tensors, (*inputs, *made), strict=True))
        enqueue = attend_backward if work.form == "attention_grad" else attend
        enqueue(lane.stream, self.loaded() if work.is_for_cudnn else None, work, pointers, Room(scratch))


_WORKS: Memo[Hashable, ConvolutionWork | AttentionWork] = Memo()


def _work_of(op: Any) -> ConvolutionWork | AttentionWork:
    """Return what an op is to cuDNN; ops that are alike have one."""
    signature = _signature(op)
    work = _WORKS.get(signature)
    if work is None:
        work = _WORKS[signature] = ConvolutionWork.of(op) if op.kind in _CONVOLUTIONS else AttentionWork.of(op)
    return work


def _signature(op: Any) -> Hashable:
    """Return all that decides how an op is made."""
    kind = op.kind
    if kind in _CONVOLUTIONS:
        steps = op.stride, op.padding, op.dilation, op.groups
        followed = None if kind in GRADS else op.bias is None
        return kind, op.given(), op.dtype(), steps, followed, op.channels_last, op.allow_tf32
    q = op.q
    common = kind, q.shape, op.k.shape, op.v.shape, q.dtype, op.scale, op.causal, op.window
    if kind == "ragged_attention":
        return common, op.offsets_q.shape, op.longest_q, op.longest_kv
    if kind == "paged_attention":
        return common, op.table.shape
    strides = [ref.strides if ref.is_strided else None for ref in (q, op.k, op.v)]
    if kind != "attention":
        return common, tuple(strides)
    return common, tuple(strides), None if op.bias is None else op.bias.shape, op.lengths_q is None, op.lengths_kv is None


def _copied_nbytes(op: Any) -> int:
    """Return the bytes of copies of operands, and of a result, that begin where plans take none: views may."""
    nbytes = 0
    for ref in _REFS[op.kind](op):
        if ref is not None and (ref.offset | ref.alignment) % _TENSOR:
            nbytes += aligned(ref.nbytes)
    return nbytes


def _activation_program(op: Any) -> str:
    return f"unary_{CODES[op.dtype()]}" if op.activation else ""


def _attention_program(op: Any) -> str:
    # What is for cuDNN needs it where cuDNN refuses, or is given lengths: its first use loads it then, beside the loop.
    work: Any = derived(op, _work_of)
    return "" if work.is_for_cudnn and not work.has_lengths else f"attention_{CODES[op.q.dtype]}"


def _backward_program(op: Any) -> str:
    return "" if derived(op, _work_of).is_for_cudnn else f"backward_{CODES[op.q.dtype]}"


def _attention_source(code: str) -> tuple[str, ...]:
    return "attention.cu", f"ATTENTION({code})"


PART = CudaPart(
    open=DnnLibrary,
    kernels={**normalization.KERNELS, **pooling.KERNELS, **loss.KERNELS, **training.KERNELS},
    libraries=(CUDNN,),
    programs=(
        Source("attention", _attention_source, "attention"),
        *normalization.SOURCES,
        *pooling.SOURCES,
        *loss.SOURCES,
        *attention_grad.SOURCES,
        *training.SOURCES,
    ),
    program={
        **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _activation_program),
        **dict.fromkeys(_ATTENTIONS, _attention_program),
        "attention_grad": _backward_program,
        **normalization.PROGRAM,
        **pooling.PROGRAM,
        **loss.PROGRAM,
        **training.PROGRAM,
    },
)
