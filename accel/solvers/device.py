"""What the solvers use of a device, its batches and its graphs, which are above them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np

    from accel.dtype import DTypeLike
    from accel.ops.blas import BlasOps
    from accel.ops.elementwise import ElementwiseOps
    from accel.ops.namespace import Awaited, Recorded
    from accel.ops.sparse import SparseOps
    from accel.ref import AccelRef

__all__ = ["Batch", "Graph", "Recorder", "SolvingDevice"]


class Recorder(Protocol):
    """What records ops inside its block: a batch or a graph."""

    @property
    def blas(self) -> BlasOps[Recorded]:
        """See :class:`~accel.ops.BlasOps`."""

    @property
    def elementwise(self) -> ElementwiseOps[Recorded]:
        """See :class:`~accel.ops.ElementwiseOps`."""

    @property
    def sparse(self) -> SparseOps[Recorded]:
        """See :class:`~accel.ops.SparseOps`."""

    def empty(self, shape: Any, dtype: DTypeLike = "float32") -> AccelRef:
        """See :meth:`accel.Batch.empty`."""

    def zeros(self, shape: Any, dtype: DTypeLike = "float32") -> AccelRef:
        """See :meth:`accel.Batch.zeros`."""

    def copy(self, source: AccelRef, destination: AccelRef) -> AccelRef:
        """See :meth:`accel.Batch.copy`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...


class Batch(Recorder, Protocol):
    """See :class:`accel.Batch`."""

    def get(self, ref: AccelRef) -> np.ndarray[Any, Any]:
        """See :meth:`accel.Batch.get`."""


class Graph(Recorder, Protocol):
    """See :class:`accel.Graph`."""

    async def replay(self, *, timeout: float | None = None) -> None:
        """See :meth:`accel.Graph.replay`."""

    async def aclose(self) -> None:
        """See :meth:`accel.Graph.aclose`."""


class SolvingDevice(Protocol):
    """See :class:`accel.Device`."""

    def batch(self, *, timeout: float | None = None) -> Batch:
        """See :meth:`accel.Device.batch`."""

    def graph(self, *, timeout: float | None = None) -> Graph:
        """See :meth:`accel.Device.graph`."""

    async def put(self, array: Any, *, out: AccelRef | None = None, durable: bool = False, timeout: float | None = None) -> AccelRef:
        """See :meth:`accel.Device.put`."""

    async def get(self, ref: AccelRef, *, timeout: float | None = None) -> np.ndarray[Any, Any]:
        """See :meth:`accel.Device.get`."""

    @property
    def elementwise(self) -> ElementwiseOps[Awaited]:
        """See :class:`~accel.ops.ElementwiseOps`."""

    @property
    def sparse(self) -> SparseOps[Awaited]:
        """See :class:`~accel.ops.SparseOps`."""
