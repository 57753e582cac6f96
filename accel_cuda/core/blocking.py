"""Which ops may block while they are enqueued.

These are captures, advice about managed memory, copies of large pageable arrays, small copies without pinned memory to stage them in, and what the families
name: ops whose lane lacks something, and ops whose kernel may not be loaded yet.

A library such as cuBLAS loads a kernel when it is first used, and loading may wait for everything that runs on the device. Only the library knows which
kernel an op uses. So ops of a signature are enqueued off the loop until one of them has run through: functions are loaded into the context, for all of its
streams. A question alone proves nothing: the op may be dropped before it is enqueued, or another lane may ask while the kernel is being loaded.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from accel import AccelError
from accel_cuda.core.memo import Memo
from accel_cuda.core.transfers import STAGED

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from accel.backend import Kernel
    from accel_cuda.core.family import LaneCheck, Signature
    from accel_cuda.core.pinned import PinnedRanges

__all__ = ["Blocking"]


class Blocking:
    """What one context's streams have done before, as far as it matters here. The loop's thread asks; any thread enqueues.

    Parameters
    ----------
    checks
        Library and op kind -> whether such an op may block, by what its lane and the context have.
    signatures
        Library and op kind -> the signature by which a library loads functions.
    pinned
        Which host memory is page-locked.
    """

    __slots__ = ("_checks", "_home", "_pinned", "_seen", "_signatures")

    def __init__(
        self, checks: Mapping[tuple[str, str], LaneCheck], signatures: Mapping[tuple[str, str], Signature], pinned: PinnedRanges
    ) -> None:
        self._pinned = pinned
        self._signatures = signatures
        self._seen: Memo[Hashable, None] = Memo()
        self._home = 0
        # One look for each op: most are of kinds that never block.
        self._checks: dict[tuple[str, str], LaneCheck] = {
            **checks,
            ("capture", "capture"): lambda lane, op: True,
            ("memory", "prefetch"): lambda lane, op: True,  # the driver may have to set pages up, and takes locks of the system's
            ("memory", "advise"): lambda lane, op: True,
            ("memory", "put"): lambda lane, op: self._copies(lane, op.source),
            ("memory", "get"): lambda lane, op: self._copies(lane, op.destination),
            ("memory", "checksum"): lambda lane, op: self._copies(lane, op.destination),
            **{key: self._loads(signature, checks.get(key)) for key, signature in signatures.items()},
        }

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing ``op`` may block this time; asked once for each, on the loop's thread."""
        check = self._checks.get((op.library, op.kind))
        if not self._home:
            self._home = get_ident()
        return check is not None and check(lane, op)

    def _loads(self, signature: Signature, check: LaneCheck | None) -> LaneCheck:
        """Return the check of ops whose functions a library may have to load. It is on the way of every product."""
        seen = self._seen
        if check is None:
            return lambda lane, op: signature(lane, op) not in seen
        return lambda lane, op: signature(lane, op) not in seen or check(lane, op)

    def _copies(self, lane: Any, array: Any) -> bool:
        nbytes: int = array.nbytes
        if nbytes <= STAGED:
            return bool(nbytes) and not lane.stream.transfers.reserve(nbytes)
        try:
            return not self._pinned.covers(array.ctypes.data, nbytes)
        except AccelError:
            return True  # the copy itself will say what is wrong

    def noting(self, library: str, kernels: Mapping[str, Kernel]) -> Mapping[str, Kernel]:
        """Return kernels of a library of which those with a signature record which functions they have loaded."""
        return {kind: self._noted(kernel, self._signatures.get((library, kind))) for kind, kernel in kernels.items()}

    def _noted(self, kernel: Kernel, signature: Signature | None) -> Kernel:
        if signature is None:
            return kernel

        def noted(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            kernel(lane, op, plan, inputs, outputs)
            if get_ident() != self._home:
                self._seen[signature(lane, op)] = None

        return noted
