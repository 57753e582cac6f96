"""The built-in families of ops of devices, batches and graphs: ``device.blas``, ``batch.blas``."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from accel.ops.arrays import ArraysOps
from accel.ops.blas import BlasOps
from accel.ops.dnn import DnnOps
from accel.ops.elementwise import ElementwiseOps
from accel.ops.fft import FftOps
from accel.ops.linalg import LinalgOps
from accel.ops.reduce import ReduceOps
from accel.ops.rng import RngOps
from accel.ops.scan import ScanOps
from accel.ops.solver import SolverOps
from accel.ops.sort import SortOps
from accel.ops.sparse import SparseOps
from accel.ops.tensor import TensorOps

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.ops.namespace import OpNamespace, Submitter

__all__ = ["BuiltInFamilies"]

M = TypeVar("M")
N = TypeVar("N", bound="OpNamespace[Any]")


class BuiltInFamilies(Generic[M]):
    """One property for each family that comes with ``accel``, made at its first use.

    The type parameter is the mode, :class:`~accel.ops.Awaited` or :class:`~accel.ops.Recorded`.
    """

    __slots__ = ()

    @abstractmethod
    def family(self, namespace: Callable[[Submitter[M]], N]) -> N:
        """Return the ops of any family, typed: ``device.family(Stats).mean(x)``.

        Parameters
        ----------
        namespace
            The family's subclass of :class:`~accel.ops.OpNamespace`.
        """

    @cached_property
    def blas(self) -> BlasOps[M]:
        """Linear algebra; see :class:`~accel.ops.BlasOps`."""
        return self.family(BlasOps)

    @cached_property
    def linalg(self) -> LinalgOps[M]:
        """Products of matrices with what follows them; see :class:`~accel.ops.LinalgOps`."""
        return self.family(LinalgOps)

    @cached_property
    def tensor(self) -> TensorOps[M]:
        """Sums of products of any indices; see :class:`~accel.ops.TensorOps`."""
        return self.family(TensorOps)

    @cached_property
    def solver(self) -> SolverOps[M]:
        """Factorizations of matrices, and what is solved by them.

        See :class:`~accel.ops.SolverOps`.
        """
        return self.family(SolverOps)

    @cached_property
    def elementwise(self) -> ElementwiseOps[M]:
        """Functions of elements; see :class:`~accel.ops.ElementwiseOps`."""
        return self.family(ElementwiseOps)

    @cached_property
    def reduce(self) -> ReduceOps[M]:
        """Reductions; see :class:`~accel.ops.ReduceOps`."""
        return self.family(ReduceOps)

    @cached_property
    def arrays(self) -> ArraysOps[M]:
        """Arrays put together, taken apart and made; see :class:`~accel.ops.ArraysOps`."""
        return self.family(ArraysOps)

    @cached_property
    def scan(self) -> ScanOps[M]:
        """Cumulative operations; see :class:`~accel.ops.ScanOps`."""
        return self.family(ScanOps)

    @cached_property
    def sort(self) -> SortOps[M]:
        """Arrays in order, and what is found in them; see :class:`~accel.ops.SortOps`."""
        return self.family(SortOps)

    @cached_property
    def dnn(self) -> DnnOps[M]:
        """Neural network ops; see :class:`~accel.ops.DnnOps`."""
        return self.family(DnnOps)

    @cached_property
    def fft(self) -> FftOps[M]:
        """Fourier transforms; see :class:`~accel.ops.FftOps`."""
        return self.family(FftOps)

    @cached_property
    def rng(self) -> RngOps[M]:
        """Random numbers; see :class:`~accel.ops.RngOps`."""
        return self.family(RngOps)

    @cached_property
    def sparse(self) -> SparseOps[M]:
        """Sparse matrices; see :class:`~accel.ops.SparseOps`."""
        return self.family(SparseOps)
