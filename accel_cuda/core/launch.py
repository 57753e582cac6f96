"""Kernels that users write, in one context: loaded once, launched with as little as possible in between."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import struct
import threading
from typing import TYPE_CHECKING, Any

from accel import AccelError, InvalidArgumentError, UnsupportedError
from accel.ops import KernelLayout
from accel_cuda.core.driver import Handle, LaunchAttribute, LaunchConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.ops import CompiledKernel, Launch
    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.modules import Modules
    from accel_cuda.core.stream import CudaStream

__all__ = ["UserKernels"]

_WORD = 8
_MANY = 1 << 16
# CU_LAUNCH_ATTRIBUTE_COOPERATIVE.
_COOPERATIVE = 2


class _Block:
    """Where the arguments of one kernel's launches in one stream are put; the driver copies them before a launch returns."""

    __slots__ = ("attribute", "config", "config_pointer", "is_cooperative", "pack", "pointers", "shape", "values")

    def __init__(self, sizes: tuple[int, ...], stream: int) -> None:
        words = [max(1, -(-size // _WORD)) for size in sizes]
        self.values = (ctypes.c_uint64 * max(1, sum(words)))()
        self.pack = struct.Struct(f"<{sum(words)}Q").pack_into
        start = ctypes.addressof(self.values)
        offsets = [_WORD * sum(words[:i]) for i in range(len(words))]
        self.pointers = (ctypes.c_void_p * max(1, len(words)))(*(start + offset for offset in offsets))
        self.attribute = LaunchAttribute(_COOPERATIVE, b"", (ctypes.c_int * 16)(1))
        self.config = LaunchConfig(1, 1, 1, 1, 1, 1, 0, stream, ctypes.addressof(self.attribute), 0)
        self.config_pointer = ctypes.byref(self.config)
        self.shape: tuple[int, ...] = ()
        self.is_cooperative = False

    def reshape(self, shape: tuple[int, ...], *, is_cooperative: bool) -> None:
        """Set grid, block and shared memory, and whether all blocks run at the same time."""
        config = self.config
        config.grid_x, config.grid_y, config.grid_z, config.block_x, config.block_y, config.block_z, config.shared_bytes = shape
        config.attribute_count = int(is_cooperative)
        self.shape, self.is_cooperative = shape, is_cooperative


class _Loaded:
    """A kernel that can be launched."""

    __slots__ = ("blocks", "entry", "function", "layout")

    def __init__(self, entry: Any, layout: KernelLayout) -> None:
        self.entry = entry
        self.function = Handle(int(entry))
        self.layout = layout
        self.blocks: dict[CudaStream, _Block] = {}

    def block(self, stream: CudaStream) -> _Block:
        """Make the place for launches in a stream."""
        made = self.blocks[stream] = _Block(self.layout.sizes, stream.handle)
        return made


class UserKernels:
    """The kernels of one context.

    Parameters
    ----------
    context, modules
        Where they are loaded.
    """

    def __init__(self, context: CudaContext, modules: Modules) -> None:
        self._context = context
        self._modules = modules
        self._hot = context.driver.hot  # and not its function: in a forked process it replaces that
        self._loaded: dict[str, _Loaded] = {}
        self._locks: dict[str, threading.Lock] = {}

    def compile(self, kernel: CompiledKernel) -> KernelLayout:
        """See :meth:`accel.ops.CompilesKernels.compile`."""
        return self._load(kernel).layout

    def lacks(self, op: Launch) -> bool:
        """Return whether an op's kernel is not loaded; quick."""
        return op.kernel.key not in self._loaded

    def launch(self, lane: Any, op: Launch, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Enqueue a launch."""
        kernel = op.kernel
        loaded = self._loaded.get(kernel.key)
        if loaded is None:
            loaded = self._load(kernel)
        words = op.slots if kernel.layout is loaded.layout else _checked(op, loaded.layout)
        stream = lane.stream
        context = stream.ready()
        block = loaded.blocks.get(stream)
        if block is None:
            block = loaded.block(stream)
        if block.shape != op.shape or block.is_cooperative is not op.cooperative:
            if op.cooperative:
                self._check_together(kernel.name, loaded, op.shape)
            block.reshape(op.shape, is_cooperative=op.cooperative)
        addresses = iter(inputs)
        block.pack(block.values, 0, *[next(addresses) if word is None else word for word in words])
        status = self._hot.launch(block.config_pointer, loaded.function, block.pointers, None)
        if status:
            raise context.failure(status, "cuLaunchKernelEx")

    def _check_together(self, name: str, loaded: _Loaded, shape: tuple[int, ...]) -> None:
        """Raise unless all blocks of a grid can run at the same time."""
        context, grid, threads, shared = self._context, math.prod(shape[:3]), math.prod(shape[3:6]), shape[6]
        with context.section:
            if not context.attribute("COOPERATIVE_LAUNCH"):
                raise UnsupportedError("this device has no cooperative launches", device=context.description.spec, op="launch")
            each = int(context.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", loaded.entry, threads, shared))
        if grid > (most := each * context.multiprocessors):
            raise InvalidArgumentError(
                f"a cooperative grid of {grid} blocks of {threads} threads is too large: {most} blocks of {name} run at the same time",
                device=context.description.spec,
                op="launch",
                remedy="Use a smaller grid, whose threads take several elements each, or smaller blocks.",
            )

    def _load(self, kernel: CompiledKernel) -> _Loaded:
        with self._locks.setdefault(kernel.key, threading.Lock()):
            loaded = self._loaded.get(kernel.key)
            if loaded is None:
                loaded = self._loaded[kernel.key] = self._make(kernel)
            return loaded

    def _make(self, kernel: CompiledKernel) -> _Loaded:
        def take(module: Any, symbols: tuple[str, ...]) -> _Loaded:
            try:
                function = self._context.call("cuModuleGetFunction", module, symbols[0].encode())
            except AccelError as error:
                if error.code != self._context.driver.CUresult.CUDA_ERROR_NOT_FOUND:
                    raise
                raise InvalidArgumentError(f"{kernel.name} is not a kernel", remedy="Name a function that is __global__.") from error
            return self._warmed(function)

        if kernel.code:
            return self._modules.load_code(take, kernel.code, (kernel.name,))
        return self._modules.load(take, kernel.source, (kernel.name,), kernel.options, kernel.headers)

    def _warmed(self, function: Any) -> _Loaded:
        """Load a function, whose first launch would else wait for the whole device, and ask what its launches need to know."""
        context = self._context
        attributes = context.driver.CUfunction_attribute
        context.call("cuFuncLoad", function)
        static = int(context.call("cuFuncGetAttribute", attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
        shared = max(0, context.shared_limit - static)
        context.call("cuFuncSetAttribute", function, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        threads = int(context.call("cuFuncGetAttribute", attributes.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function))
        layout = KernelLayout(self._sizes(function), threads, self._limits("MAX_BLOCK_DIM"), self._limits("MAX_GRID_DIM"), shared)
        return _Loaded(function, layout)

    def _limits(self, name: str) -> tuple[int, int, int]:
        x, y, z = (self._context.attribute(f"{name}_{axis}") for axis in "XYZ")
        return x, y, z

    def _sizes(self, function: Any) -> tuple[int, ...]:
        """Return the sizes of a kernel's parameters."""
        context = self._context
        try:
            count = int(context.call("cuFuncGetParamCount", function))
        except RuntimeError:  # what the bindings raise where the driver is older than the function
            count = _MANY
        sizes: list[int] = []
        while len(sizes) < count:
            try:
                sizes.append(int(context.call("cuFuncGetParamInfo", function, len(sizes))[1]))
            except AccelError as error:
                if error.code != context.driver.CUresult.CUDA_ERROR_INVALID_VALUE:
                    raise
                break  # the first that is not there
        return tuple(sizes)


def _checked(op: Launch, layout: KernelLayout) -> tuple[int | None, ...]:
    """Return the arguments of an op that was checked against another layout than this context's, or none; raise if they do not fit this one."""
    if op.kernel.layout == layout:
        return op.slots
    again = dataclasses.replace(op, kernel=op.kernel.with_layout(layout))
    again.plan()
    return again.slots
