"""Forwards of a torch module that are captured into CUDA graphs, and replayed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.cuda import _POOL_HANDLE

__all__ = ["CapturedForward"]


class CapturedForward:
    """One forward as a CUDA graph. What it reads and what it returns stay in place, so nothing may run beside a replay that shares the pool.

    ``torch.cuda.graph`` is not used: it synchronizes the device, empties the allocator's cache, and by default forbids other threads to allocate. Everything
    else in the process would feel that.

    Parameters
    ----------
    forward
        Takes tensors by name. It must have run with these shapes before: what it loads, compiles or tunes at first cannot be captured.
    inputs
        Tensors that are the graph's from now on.
    pool
        Of ``torch.cuda.graph_pool_handle()``: memory of the graphs that are never replayed at the same time.

    Raises
    ------
    Exception
        What ``forward`` raised, or torch's ``RuntimeError`` where it did what cannot be captured, such as waiting for a result. The current stream is not
        capturing any more.
    """

    def __init__(
        self, forward: Callable[[Mapping[str, torch.Tensor]], Any], inputs: Mapping[str, torch.Tensor], pool: _POOL_HANDLE
    ) -> None:
        self._inputs = inputs
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self._result = forward(inputs)
            self._graph.capture_end()
        except BaseException:
            _end_failed(self._graph, pool)
            raise

    def replay(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Enqueue a forward of these inputs into the current stream, and return its result: valid until the next replay of a graph of the pool."""
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        self._graph.replay()
        return self._result


def _end_failed(graph: torch.cuda.CUDAGraph, pool: _POOL_HANDLE) -> None:
    """End a capture that failed. Torch's own end of it leaves the allocator as if it still went on, if CUDA had broken it off."""
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)  # noqa: SLF001
