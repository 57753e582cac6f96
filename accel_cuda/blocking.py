"""Which ops may block while they are enqueued.

These are captures, advice about managed memory, copies of large pageable arrays, small copies while no pinned memory is at hand to stage them in, the first
ops in a lane that was made for another library, and those whose kernel may not be loaded yet.

cuBLAS loads a kernel when it is first used, and loading may wait for everything that runs on the device. Which kernel a product uses is known to the
library alone, so the first product of each signature counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel import AccelError
from accel_cuda.transfers import STAGED

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from accel_cuda.pinned import PinnedRanges

__all__ = ["Blocking"]

_REMEMBERED = 4096
_ALIGNMENT = 16
_PRODUCTS = frozenset({"gemm", "gemm_batched", "gemv"})


class Blocking:
    """What one context's streams have done before, as far as it matters here.

    Parameters
    ----------
    lacks
        Op kind -> whether the kernel of such an op is not loaded.
    pinned
        Which host memory is page-locked.
    """

    __slots__ = ("_checks", "_lacks", "_pinned", "_seen")

    def __init__(self, lacks: Mapping[str, Callable[[Any], bool]], pinned: PinnedRanges) -> None:
        self._pinned = pinned
        self._seen: dict[Hashable, None] = {}
        self._checks: dict[str, Callable[[Any, Any], bool]] = {
            "capture": lambda lane, op: True,
            "prefetch": lambda lane, op: True,  # the driver may have to set pages up, and takes locks of the system's
            "advise": lambda lane, op: True,
            "put": lambda lane, op: self._copies(lane, op.source),
            "get": lambda lane, op: self._copies(lane, op.destination),
            **dict.fromkeys(("reduce", "attention", "dot", "nrm2"), lambda lane, op: not lane.compute.has_workspace),
            **dict.fromkeys(("gemm", "gemm_batched"), lambda lane, op: self._is_new(_product(op))),
            "gemv": lambda lane, op: self._is_new((op.kind, op.a.shape, op.a.dtype, op.transpose_a, op.a.offset % _ALIGNMENT)),
            "conv2d": lambda lane, op: self._is_new(_convolution(lane, op)),
        }
        self._lacks = lacks

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing ``op`` may block this time; asked once for each."""
        kind = op.kind
        lacks = self._lacks.get(kind)
        if lacks is not None and lacks(op):
            return True
        check = self._checks.get(kind)
        return check is not None and (check(lane, op) or (kind in _PRODUCTS and not lane.compute.has_blas))

    def _copies(self, lane: Any, array: Any) -> bool:
        nbytes: int = array.nbytes
        if nbytes <= STAGED:
            return bool(nbytes) and not lane.stream.transfers.reserve(nbytes)
        try:
            is_staged = not self._pinned.covers(array.ctypes.data, nbytes)
        except AccelError:
            return True  # the copy itself will say what is wrong
        if is_staged:
            lane.device.copiers.rouse(nbytes)
        return is_staged

    def _is_new(self, signature: Hashable) -> bool:
        """Return whether a signature was not seen before. It counts as seen from now on: what is enqueued next in its lane comes after it."""
        seen = self._seen
        if signature in seen:
            return False
        if len(seen) >= _REMEMBERED:
            del seen[next(iter(seen))]
        seen[signature] = None
        return True


def _product(op: Any) -> Hashable:
    alignment = (op.a.offset | op.b.offset) % _ALIGNMENT  # of views: there are other kernels for those
    return op.kind, op.a.shape, op.b.shape, op.a.dtype, op.transpose_a, op.transpose_b, op.allow_tf32, alignment


def _convolution(lane: Any, op: Any) -> Hashable:
    # Some are products, and need more memory of their lane than others.
    return id(lane.compute), op.input.shape, op.filter.shape, op.input.dtype, op.stride, op.padding, op.filter.offset % _ALIGNMENT
