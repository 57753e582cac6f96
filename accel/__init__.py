"""Supervised actors for accelerators: ``await`` kernel operations from asyncio, and survive device faults.

::

    import accel

    async with accel.System() as system:
        device = await system.open_device("auto")
        a = await device.put(array)
        c = await device.blas.gemm(a, a)
        result = await device.get(c)

A device has the libraries ``blas``, ``linalg``, ``elementwise``, ``reduce``, ``arrays``, ``scan``, ``sort``, ``dnn``, ``fft``, ``rng`` and ``sparse``, batches
(``device.batch()``) and graphs (``device.graph()``), and takes kernels of your own: CUDA C++ through ``device.compiler``, anything that enqueues through
:class:`KernelLibrary`. Two backends come with the distribution: ``"cpu"``, and ``"cuda"`` in the package ``accel_cuda``, which is found by its entry point
and loaded when it is asked for.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from accel import _child as _child  # first: it binds the life of a child process to its parent's
from accel import _startup as _startup  # it minds Ctrl-C while the rest is imported

if _child.is_deferred():
    _child.defer(globals())
else:
    from accel import patterns, testing
    from accel.actors import Actor, ActorContext, ActorRef, ActorState, Directive, RestartStrategy, Terminated
    from accel.backend import AccelBackend, AccelDevice, AccelEvent, AccelStream, DeviceDescription
    from accel.completion import (
        AdaptiveCompletion,
        CompletionStrategy,
        HostFnCompletion,
        PolledCompletion,
        SyncCompletion,
    )
    from accel.compute import ComputeBackend
    from accel.device import (
        Batch,
        Device,
        DeviceHealth,
        DeviceInfo,
        DeviceState,
        Graph,
        HardwareInfo,
        InlineHost,
        KernelLibrary,
        MemoryInfo,
        Node,
        Operand,
        PinnedInfo,
        Pool,
        ProcessHost,
        SharedMemory,
        SpareInfo,
        System,
        World,
        kernel,
        kernel_op,
        open_device,
    )
    from accel.dtype import DType
    from accel.enums import BinaryOp, ReduceOp, Transpose, UnaryOp
    from accel.errors import (
        AccelError,
        ActorStoppedError,
        BackendUnavailableError,
        ClosedError,
        CompileError,
        ContextPoisonedError,
        DeadlineExceededError,
        DeviceLostError,
        DriverError,
        FaultScope,
        HostDiedError,
        InvalidArgumentError,
        KernelFaultError,
        LibraryError,
        LinAlgError,
        MailboxFullError,
        NonFiniteError,
        NotInitializedError,
        OutOfMemoryError,
        PoisonedInputError,
        StaleRefError,
        UnknownTenantError,
        UnsupportedError,
        WorldChangedError,
    )
    from accel.expressions import Array, LazyArrayError, evaluate
    from accel.models import Model, TensorSpec
    from accel.ops import KernelOp
    from accel.patterns import ModelService, serve
    from accel.ref import AccelRef, AccelToken, RefView, StridedRef, ViewToken
    from accel.sparse_ref import SparseRef
    from accel.telemetry import DeviceTime, Probe

    if not TYPE_CHECKING:  # for whom any name would be there

        def __getattr__(name: str) -> str:
            if name != "__version__":
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
            from accel._version import installed_version

            return globals().setdefault(name, installed_version())


if TYPE_CHECKING:
    __version__: str

__all__ = [
    "AccelBackend",
    "AccelDevice",
    "AccelError",
    "AccelEvent",
    "AccelRef",
    "AccelStream",
    "AccelToken",
    "Actor",
    "ActorContext",
    "ActorRef",
    "ActorState",
    "ActorStoppedError",
    "AdaptiveCompletion",
    "Array",
    "BackendUnavailableError",
    "Batch",
    "BinaryOp",
    "ClosedError",
    "CompileError",
    "CompletionStrategy",
    "ComputeBackend",
    "ContextPoisonedError",
    "DType",
    "DeadlineExceededError",
    "Device",
    "DeviceDescription",
    "DeviceHealth",
    "DeviceInfo",
    "DeviceLostError",
    "DeviceState",
    "DeviceTime",
    "Directive",
    "DriverError",
    "FaultScope",
    "Graph",
    "HardwareInfo",
    "HostDiedError",
    "HostFnCompletion",
    "InlineHost",
    "InvalidArgumentError",
    "KernelFaultError",
    "KernelLibrary",
    "KernelOp",
    "LazyArrayError",
    "LibraryError",
    "LinAlgError",
    "MailboxFullError",
    "MemoryInfo",
    "Model",
    "ModelService",
    "Node",
    "NonFiniteError",
    "NotInitializedError",
    "Operand",
    "OutOfMemoryError",
    "PinnedInfo",
    "PoisonedInputError",
    "PolledCompletion",
    "Pool",
    "Probe",
    "ProcessHost",
    "ReduceOp",
    "RefView",
    "RestartStrategy",
    "SharedMemory",
    "SpareInfo",
    "SparseRef",
    "StaleRefError",
    "StridedRef",
    "SyncCompletion",
    "System",
    "TensorSpec",
    "Terminated",
    "Transpose",
    "UnaryOp",
    "UnknownTenantError",
    "UnsupportedError",
    "ViewToken",
    "World",
    "WorldChangedError",
    "__version__",
    "evaluate",
    "kernel",
    "kernel_op",
    "open_device",
    "patterns",
    "serve",
    "testing",
]
