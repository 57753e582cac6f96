"""cuFFT plans of one stream: made when first needed, kept while they are used, and with the caller's memory to work in."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_cuda.core.libraries import VendorLibrary
from accel_cuda.core.plan_cache import PlanCache
from accel_cuda.errors import error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream
    from accel_cuda.families.fft_layout import Layout
    from accel_cuda.families.fft_memory import WorkMemory

__all__ = ["CUFFT", "KEPT", "FftPlans", "PlanMaker"]

CUFFT = VendorLibrary("cufft", "nvidia-cufft", "nvmath.bindings.cufft", "cuFFTError")

KEPT = 64
"""How many plans one stream keeps; the one that was not used for longest goes first. Those of graphs stay beside them, as long as the stream."""

_SPARE, _SIZES = 16, 1 << 16
_FORWARD, _INVERSE = -1, 1
# Transform, double precision -> name in cufftType.
_TYPES = {
    ("real", False): "R2C",
    ("back", False): "C2R",
    ("whole", False): "C2C",
    ("real", True): "D2Z",
    ("back", True): "Z2D",
    ("whole", True): "Z2Z",
}


class _Plan(NamedTuple):
    handle: int
    work: int
    execute: Callable[..., None]


class PlanMaker:
    """Makes the plans of one context, and knows how much memory each works in. Any thread may call it.

    Parameters
    ----------
    context
        The context.

    Attributes
    ----------
    sizes : dict
        Layout -> bytes that its plans work in, of those that were made or measured.
    """

    def __init__(self, context: CudaContext) -> None:
        self.cufft = CUFFT.load()
        self.error: Any = self.cufft.cuFFTError
        self.sizes: dict[Layout, int] = {}
        self._context = context
        self._lock = threading.Lock()
        self._spare: OrderedDict[Layout, tuple[int, int]] = OrderedDict()

    def measure(self, layout: Layout) -> None:
        """See that :attr:`sizes` has a layout. The plan that this takes waits for the stream that will need it. May block."""
        if layout not in self.sizes:
            made = self._make(layout)
            with self._lock:
                left = [self._spare.pop(layout)] if layout in self._spare else []
                self._spare[layout] = made
                if len(self._spare) > _SPARE:
                    left.append(self._spare.popitem(last=False)[1])
            self._destroy(left)

    def take(self, layout: Layout, stream: CudaStream) -> _Plan:
        """Return a plan for a stream, whose it is from now on. May block."""
        with self._lock:
            made = self._spare.pop(layout, None)
        handle, work = made or self._make(layout)
        try:
            self.cufft.set_stream(handle, stream.handle)
        except self.error as error:
            self._destroy([(handle, work)])
            raise stream.failure(int(error.status), "set_stream", "cufft") from error
        return _Plan(handle, work, self._function(layout))

    def close(self) -> None:
        """Destroy the plans that no stream took. May block; the context is current and healthy."""
        with self._lock:
            spare, self._spare = list(self._spare.values()), OrderedDict()
        self._destroy(spare)

    def destroy(self, plan: _Plan) -> None:
        """Give a plan back. The context is current and healthy."""
        with contextlib.suppress(self.error):  # what else the stream has is given back all the same
            self.cufft.destroy(plan.handle)

    def _make(self, layout: Layout) -> tuple[int, int]:
        cufft, call = self.cufft, "create"
        handle = 0
        try:
            with self._context.section:
                handle = int(cufft.create())
                call = "make_plan"
                cufft.set_auto_allocation(handle, 0)
                sides = [(layout.embed(is_real=each), layout.stride, layout.dist(is_real=each)) for each in self._sides(layout)]
                lengths, kind = layout.lengths, int(cufft.Type[_TYPES[layout.transform, layout.is_double]])
                work = int(cufft.make_plan_many64(handle, len(lengths), lengths, *sides[0], *sides[1], kind, layout.batch))
        except self.error as error:
            if handle:
                self._destroy([(handle, 0)])
            raise error_of(int(error.status), call, library="cufft", device=self._context.description.spec) from error
        with self._lock:
            if len(self.sizes) >= _SIZES:
                self.sizes = {}  # measured again, those that come again
            self.sizes[layout] = work
        return handle, work

    @staticmethod
    def _sides(layout: Layout) -> tuple[bool, bool]:
        """Return whether the source and the destination are real."""
        return layout.transform == "real", layout.transform == "back"

    def _function(self, layout: Layout) -> Callable[..., None]:
        function: Callable[..., None] = getattr(self.cufft, f"exec_{_TYPES[layout.transform, layout.is_double].lower()}")
        return function

    def _destroy(self, made: list[tuple[int, int]]) -> None:
        with self._context.section:
            for handle, _ in made:
                with contextlib.suppress(self.error):  # what else there is is given back all the same
                    self.cufft.destroy(handle)


class FftPlans:
    """The plans of one stream. One thread at a time uses them.

    Parameters
    ----------
    stream
        Where the work goes.
    maker
        Makes them.

    Attributes
    ----------
    cache : PlanCache
        Layout -> plan.
    """

    def __init__(self, stream: CudaStream, maker: PlanMaker) -> None:
        self._cufft = maker.cufft
        self._error: Any = maker.error
        self._stream = stream
        self.cache: PlanCache[Layout, _Plan] = PlanCache(stream, lambda layout: maker.take(layout, stream), maker.destroy, KEPT)

    def __contains__(self, layout: Layout) -> bool:
        return layout in self.cache

    def execute(
        self, layout: Layout, source: int, destination: int, memory: WorkMemory, *, is_forward: bool, calls: int = 1, step: int = 0
    ) -> None:
        """Enqueue a plan, ``calls`` times on memory that lies ``step`` bytes further each time. May block where the plan is new."""
        plan = self.cache.get(layout)
        direction = (_FORWARD if is_forward else _INVERSE,) if layout.transform == "whole" else ()
        area = memory.alloc(plan.work)
        try:
            if area:
                self._cufft.set_work_area(plan.handle, area)
            for call in range(calls):
                plan.execute(plan.handle, source + call * step, destination + call * step, *direction)
        except self._error as error:
            raise self._stream.failure(int(error.status), "execute", "cufft") from error
        finally:
            memory.free(area)
