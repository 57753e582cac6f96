"""cuRAND's own generators, for numbers that are those of its host interface, bit by bit."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from accel import DType, UnsupportedError
from accel_cuda.core.libraries import VendorLibrary

if TYPE_CHECKING:
    from accel_cuda.core.stream import CudaStream

__all__ = ["CURAND", "CurandGenerators"]

CURAND = VendorLibrary("curand", "nvidia-curand", "nvmath.bindings.curand", "cuRANDError")

_TYPES = {"curand_philox": 161, "curand_mrg32k3a": 121}
"""Name of a generator -> its number in curandRngType."""

_SUFFIXES = {DType.FLOAT32: "", DType.FLOAT64: "_double"}


class CurandGenerators:
    """The generators of one context's streams, by type: each has a state in device memory that cuRAND takes by itself, until the stream ends."""

    def __init__(self) -> None:
        self._handles: dict[tuple[int, str], int] = {}

    def draw(self, stream: CudaStream, op: Any, out: int) -> None:
        """Enqueue uniform or normal numbers of the generator that an op names. May block: a new seed makes the generator's state anew.

        Raises
        ------
        UnsupportedError
            In a graph: the host makes the state.
        """
        if stream.is_capturing:
            raise UnsupportedError(
                f"{op.generator} cannot become a part of a graph: cuRAND makes its state on the host's call",
                library=CURAND.name,
                remedy="Await the op outside the graph, or use generator='philox'.",
            )
        if not op.size:
            return
        curand, call = CURAND.load(), "create_generator"
        with stream.ready().section:
            try:
                handle = self._handle(stream, op.generator, curand)
                call = "set_pseudo_random_generator_seed"
                curand.set_pseudo_random_generator_seed(handle, op.seed)
                call = "set_generator_offset"
                curand.set_generator_offset(handle, op.offset)
                call = f"generate_{op.kind}{_SUFFIXES[op.dtype]}"
                parameters = (op.mean, op.std) if op.kind == "normal" else ()
                getattr(curand, call)(handle, out, op.size, *parameters)
            except curand.cuRANDError as error:
                raise stream.failure(int(error.status), call, CURAND.name) from error

    def _handle(self, stream: CudaStream, name: str, curand: Any) -> int:
        """Return the generator of a stream, which one thread at a time uses."""
        key = id(stream), name
        handle = self._handles.get(key)
        if handle is None:
            handle = int(curand.create_generator(_TYPES[name]))
            stream.at_close(partial(self._end, key, handle, curand))
            curand.set_stream(handle, stream.handle)
            self._handles[key] = handle  # one without its stream would draw in another
        return handle

    def _end(self, key: tuple[int, str], handle: int, curand: Any) -> None:
        self._handles.pop(key, None)
        with contextlib.suppress(curand.cuRANDError):  # what else the stream has is given back all the same
            curand.destroy_generator(handle)
