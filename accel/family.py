"""What a backend has of one family of ops, and the samples that every backend is checked by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from accel.backend import Kernel

__all__ = ["BackendPart", "OpFamily", "Sample"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    """One call of an op, with its result from numpy or scipy in higher precision.

    Parameters
    ----------
    name
        What is called, for messages: the op's kind, then what is special about the call.
    call
        ``call(namespace, *refs)`` makes the call: ``lambda blas, a, b: blas.gemm(a, b)``. The namespace is a device's, a batch's or a graph's.
    operands
        Arrays that are put on the device, one for each ref.
    expected
        The result, or the tuple of all results; integers are compared exactly.
    error
        How far a result may be off, besides the rounding to its dtype, relative to the largest element of ``expected``.
    terms
        How large the numbers are whose sums the results are, if these may be much smaller: ``error`` is relative to it then.
    seen
        Given all results as arrays, returns the arrays that are compared with ``expected``: of results of which several are right, such as eigenvectors.
    """

    name: str
    call: Callable[..., Any]
    operands: tuple[Array, ...]
    expected: Array | tuple[Array, ...]
    error: float = 0.0
    terms: float = 0.0
    seen: Callable[..., tuple[Array, ...]] | None = None


def _no_samples(rng: np.random.Generator) -> Iterator[Sample]:
    return iter(())


@dataclass(frozen=True, eq=False, slots=True)
class BackendPart:
    """What one backend has of one family.

    Parameters
    ----------
    kernels
        Kind of an op -> the kernel that enqueues it; see :data:`accel.backend.Kernel`. It takes the place of the family's generic kernel.
    may_block
        Whether a kernel may block: it is then called on a worker thread, in its place in line.
    launches
        How many commands a kernel enqueues at most, on a device that counts them.
    capturable
        Whether what the kernels enqueue may be captured into a graph and repeated; see :attr:`accel.KernelLibrary.capturable`.
    scratch
        Given an op, returns how many bytes its kernel works in besides operands and results. The memory is the context's, for the time of the op, and counts
        against its limit. The kernel finds the address, a multiple of 256, behind those of results and status; for 0 bytes it means nothing. Quick; called on
        the loop's thread, perhaps several times for one op. ``None``: no kernel has any.
    wheels
        Distributions that the kernels need; the doctor lists them, with the command that installs what is missing.
    samples
        Given a random generator, yields samples of every op. The part of the CPU has them; all backends are checked by them.
    """

    kernels: Mapping[str, Kernel]
    may_block: bool = False
    launches: int = 1
    capturable: bool = True
    scratch: Callable[[Any], int] | None = None
    wheels: tuple[str, ...] = ()
    samples: Callable[[np.random.Generator], Iterator[Sample]] = field(default=_no_samples)


class OpFamily(Protocol):
    """What the class of an op knows of its family; :class:`accel.ops.Family` is one."""

    @property
    def name(self) -> str:
        """The family's name."""

    def part(self, backend: str) -> BackendPart | None:
        """Return what the named backend has of it besides the generic kernels, as far as the family itself brings it."""

    def kernel(self, kind: str, backend: str) -> Kernel | None:
        """Return the kernel of an op on a backend: the backend's own, else the generic one."""
