"""Which ops may block while they are enqueued.

These are captures, advice about managed memory, copies of large pageable arrays, small copies without pinned memory to stage them in, the first ops in a
lane that was made for another library, and ops whose kernel may not be loaded yet.

cuBLAS loads a kernel when it is first used, and loading may wait for everything that runs on the device. Only the library knows which kernel a product
uses. So products of a signature are enqueued beside the loop until one of them has run through: functions are loaded into the context, for all of its
streams. A question alone proves nothing: the op may be dropped before it is enqueued, or another lane may ask while the kernel is being loaded.
"""

from __future__ import annotations

from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any

from accel import AccelError
from accel_cuda.core.transfers import STAGED

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from accel.backend import Kernel
    from accel_cuda.core.pinned import PinnedRanges

__all__ = ["NOTED", "Blocking"]

_REMEMBERED = 4096
_ALIGNMENT = 16
_PRODUCTS = frozenset({"gemm", "gemm_batched", "gemv"})


class Blocking:
    """What one context's streams have done before, as far as it matters here. The loop's thread asks; any thread enqueues.

    Parameters
    ----------
    lacks
        Op kind -> whether the kernel of such an op is not loaded.
    plans
        Op kind -> whether what such an op needs in a lane is not made.
    pinned
        Which host memory is page-locked.
    """

    __slots__ = ("_checks", "_home", "_lock", "_pinned", "_seen")

    def __init__(
        self, lacks: Mapping[str, Callable[[Any], bool]], plans: Mapping[str, Callable[[Any, Any], bool]], pinned: PinnedRanges
    ) -> None:
        self._pinned = pinned
        self._seen: dict[Hashable, None] = {}
        self._lock = Lock()
        self._home = 0
        checks: dict[str, Callable[[Any, Any], bool]] = {
            **plans,
            "capture": lambda lane, op: True,
            "prefetch": lambda lane, op: True,  # the driver may have to set pages up, and takes locks of the system's
            "advise": lambda lane, op: True,
            "put": lambda lane, op: self._copies(lane, op.source),
            "get": lambda lane, op: self._copies(lane, op.destination),
            **dict.fromkeys(("reduce", "attention", "dot", "nrm2"), lambda lane, op: not lane.compute.has_workspace),
            **{kind: self._loads(kind) for kind in _SIGNATURES},
        }
        # One look for each op: most are of kinds that never block.
        self._checks = checks | {kind: _either(lacks[kind], checks.get(kind)) for kind in lacks}

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing ``op`` may block this time; asked once for each, on the loop's thread."""
        check = self._checks.get(op.kind)
        if not self._home:
            self._home = get_ident()
        return check is not None and check(lane, op)

    def _loads(self, kind: str) -> Callable[[Any, Any], bool]:
        """Return the check of ops whose functions a library may have to load. It is on the way of every product."""
        signature, seen, is_product = _SIGNATURES[kind], self._seen, kind in _PRODUCTS

        def loads(lane: Any, op: Any) -> bool:
            return signature(lane, op) not in seen or (is_product and not lane.compute.has_blas)

        return loads

    def _copies(self, lane: Any, array: Any) -> bool:
        nbytes: int = array.nbytes
        if nbytes <= STAGED:
            return bool(nbytes) and not lane.stream.transfers.reserve(nbytes)
        try:
            return not self._pinned.covers(array.ctypes.data, nbytes)
        except AccelError:
            return True  # the copy itself will say what is wrong

    def noting(self, kernel: Kernel) -> Kernel:
        """Return a kernel that records which functions it has loaded."""

        def noted(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            kernel(lane, op, inputs, outputs)
            if get_ident() != self._home:
                self._note(_SIGNATURES[op.kind](lane, op))

        return noted

    def _note(self, signature: Hashable) -> None:
        with self._lock:
            seen = self._seen
            if len(seen) >= _REMEMBERED and signature not in seen:
                del seen[next(iter(seen))]
            seen[signature] = None


def _either(lacks: Callable[[Any], bool], check: Callable[[Any, Any], bool] | None) -> Callable[[Any, Any], bool]:
    if check is None:
        return lambda lane, op: lacks(op)
    return lambda lane, op: lacks(op) or check(lane, op)


def _product(lane: Any, op: Any) -> Hashable:
    a, b, out = op.a, op.b, op.out
    # There are other kernels for views that begin between two vectors.
    alignment = a.offset % _ALIGNMENT, b.offset % _ALIGNMENT, out is not None and out.offset % _ALIGNMENT
    return op.kind, a.shape, b.shape, a.dtype, op.transpose_a, op.transpose_b, op.allow_tf32, not op.beta, alignment


def _matrix_by_vector(lane: Any, op: Any) -> Hashable:
    a, x, out = op.a, op.x, op.out
    alignment = a.offset % _ALIGNMENT, x.offset % _ALIGNMENT, out is not None and out.offset % _ALIGNMENT
    return op.kind, a.shape, a.dtype, op.transpose_a, not op.beta, alignment


def _convolution(lane: Any, op: Any) -> Hashable:
    # Some are products, and need more memory of their lane than others.
    return op.kind, id(lane.compute), op.input.shape, op.filter.shape, op.input.dtype, op.stride, op.padding, op.filter.offset % _ALIGNMENT


_SIGNATURES: Mapping[str, Callable[[Any, Any], Hashable]] = {
    "gemm": _product,
    "gemm_batched": _product,
    "gemv": _matrix_by_vector,
    "conv2d": _convolution,
}
"""Op kind -> all that decides which functions of a library such an op uses."""

NOTED = tuple(_SIGNATURES)
"""Kinds of ops whose kernels have to be :meth:`Blocking.noting` ones."""
