"""CUDA graphs: what a program enqueues is captured once, and launched as one command from then on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from accel import AccelError
from accel_cuda.core.driver import Handle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import Kernel
    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["GRAPH_KERNELS", "CudaGraph"]


class CudaGraph:
    """An executable graph.

    Parameters
    ----------
    context
        The context that it was made in.
    handle
        The driver's CUgraphExec.
    """

    __slots__ = ("_context", "_handle", "pointer")

    def __init__(self, context: CudaContext, handle: Any) -> None:
        self._context = context
        self._handle = handle
        self.pointer = Handle(int(handle))

    def close(self) -> None:
        """Give it back; no launch of it is on the device any more. Idempotent. What the driver keeps of a dead context is left to it."""
        handle, self._handle = self._handle, None
        if handle is not None and self._context.fault is None:
            with self._context.section:
                self._context.driver.ignore("cuGraphExecDestroy", handle)


def capture(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Capture the ops of a program, which nothing else enqueues into this lane's stream meanwhile. Blocks: libraries load their kernels now."""
    stream: CudaStream = lane.stream
    context = stream.ready()
    driver = context.driver
    lane.device.prepare(op.library, stream)  # during the capture nothing can be made
    with context.section:
        # Relaxed: what is forbidden to others during a capture (to load a kernel, say) is what this thread may have to do for it.
        context.call("cuStreamBeginCapture", stream.handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        stream.is_capturing = True
        try:
            op.program.enqueue(lane)
        except BaseException:
            with contextlib.suppress(AccelError):  # nothing to destroy, if the capture was invalid
                driver.ignore("cuGraphDestroy", context.call("cuStreamEndCapture", stream.handle))
            raise
        finally:
            stream.is_capturing = False
        op.program.native = _executable(stream, context.call("cuStreamEndCapture", stream.handle))


def _executable(stream: CudaStream, graph: Any) -> CudaGraph:
    """Return what was captured as a graph that can be launched; the driver's CUgraph is given back. In the section. Blocks."""
    context = stream.context
    driver = context.driver
    try:
        made = CudaGraph(context, context.call("cuGraphInstantiate", graph, 0))
    finally:
        driver.ignore("cuGraphDestroy", graph)
    try:
        # Otherwise the first launch would do it.
        context.check(driver.status("cuGraphUpload", made.pointer.value, stream.handle), "cuGraphUpload")
    except BaseException:
        made.close()
        raise
    return made


def replay(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Launch a captured program."""
    stream: CudaStream = lane.stream
    stream.ready()
    stream.launch_graph(op.program.native.pointer)
    op.program.copy_status(lane, outputs)


def call(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Launch a captured program between the copies of its operands and results."""
    stream: CudaStream = lane.stream
    stream.ready()
    op.copy_in(lane, inputs, outputs)
    stream.launch_graph(op.program.native.pointer)
    op.copy_out(lane, outputs)


GRAPH_KERNELS: Mapping[str, Kernel] = {"capture": capture, "replay": replay, "call": call}
"""Op kind -> kernel. Captures go into a lane of their own, so they are a library of their own."""
