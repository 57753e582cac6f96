"""cuFFT's plans of one context: made when first needed, kept while they are used, and with the caller's memory to work in."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from accel import LibraryError
from accel_cuda.core.libraries import VendorLibrary
from accel_cuda.core.memo import Memo
from accel_cuda.core.plan_cache import PlanCache
from accel_cuda.errors import error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream
    from accel_cuda.families.fft_layout import Layout

__all__ = ["CUFFT", "KEPT", "FftPlans", "Rehearsal", "WorkMemory"]

CUFFT = VendorLibrary("cufft", "nvidia-cufft", "nvmath.bindings.cufft", "cuFFTError")

KEPT = 64
"""How many plans a context keeps; see :class:`~accel_cuda.core.plan_cache.PlanCache`."""

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


_ALIGNMENT = 256
_LAUNCHES = 8
"""Kernels that cuFFT launches for one plan at most, as seen: one to three, more for lengths with large prime factors."""


class WorkMemory:
    """One op's memory. What is freed last has to be allocated first; the stream's order lets later steps have what earlier ones had.

    Parameters
    ----------
    address, nbytes
        The piece; without ``nbytes`` there is no end.

    Attributes
    ----------
    most : int
        Bytes that were in use together, at most.
    """

    __slots__ = ("_address", "_nbytes", "_used", "most")

    def __init__(self, address: int, nbytes: int | None = None) -> None:
        self._address = address
        self._nbytes = nbytes
        self._used = 0
        self.most = 0

    def alloc(self, nbytes: int) -> int:
        """Return the address of a part, 0 if it is of no bytes.

        Raises
        ------
        LibraryError
            If the piece is too small: then it was measured wrongly.
        """
        if not nbytes:
            return 0
        address = self._address + self._used
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.most = max(self.most, self._used)
        if self._nbytes is not None and self._used > self._nbytes:
            raise LibraryError(f"a transform works in {self._used} bytes, {self._nbytes} were expected", library="cufft")
        return address

    def free(self, address: int) -> None:
        """Give a part back, and all that were allocated after it; 0 is ignored."""
        if address:
            self._used = min(self._used, address - self._address)


class Rehearsal:
    """Stands for stream, kernels and plans while the steps of an op are taken for nothing.

    Parameters
    ----------
    sizes
        Layout -> bytes that a plan works in.

    Attributes
    ----------
    commands : int
        How many commands the steps would have enqueued at most.
    """

    __slots__ = ("_sizes", "commands", "functions")

    def __init__(self, sizes: Mapping[Layout, int]) -> None:
        self._sizes = sizes
        self.commands = 0
        self.functions: Any = self

    def __getitem__(self, name: str) -> None:
        return None

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Count the copy."""
        self.commands += 1

    def launch(self, *arguments: Any) -> None:
        """Count the launch."""
        self.commands += 1

    def launch_wide(self, *arguments: Any) -> None:
        """Count the launch."""
        self.commands += 1

    def execute(
        self, stream: Any, layout: Layout, source: int, destination: int, memory: WorkMemory, *, calls: int = 1, **options: Any
    ) -> None:
        """Use the memory that the plan would work in, and count its launches."""
        self.commands += _LAUNCHES * calls
        memory.free(memory.alloc(self._sizes[layout]))


class _Plan(NamedTuple):
    handle: int
    work: int
    execute: Callable[..., None]


class FftPlans:
    """The plans of one context, and how much memory each works in. Any thread may call it.

    cuFFT makes a plan while it holds the driver's lock, and waits for the device then. So all streams share the plans, and each op sets the stream and
    the work area of its plan, which cuFFT reads on the host when the plan is executed.

    Parameters
    ----------
    context
        The context.

    Attributes
    ----------
    cache : PlanCache
        Layout -> plan.
    sizes : Memo
        Layout -> bytes that its plan works in, of those that were measured.
    """

    def __init__(self, context: CudaContext) -> None:
        self._cufft = CUFFT.load()
        self._error: Any = self._cufft.cuFFTError
        self._context = context
        self.cache: PlanCache[Layout, _Plan] = PlanCache(self._make, self._destroy, KEPT)
        self.sizes: Memo[Layout, int] = Memo()

    def measure(self, layout: Layout) -> None:
        """See that :attr:`sizes` has a layout. The plan that this takes is kept for the op that will need it. May block."""
        if layout not in self.sizes:
            self.sizes[layout] = self.cache.prepare(layout).work

    def execute(
        self,
        stream: CudaStream,
        layout: Layout,
        source: int,
        destination: int,
        memory: WorkMemory,
        *,
        is_forward: bool,
        calls: int = 1,
        step: int = 0,
    ) -> None:
        """Enqueue a plan, ``calls`` times on memory that lies ``step`` bytes further each time. May block where the plan is new."""
        cufft = self._cufft
        direction = (_FORWARD if is_forward else _INVERSE,) if layout.transform == "whole" else ()
        with self.cache.use(layout, stream) as plan:
            area = memory.alloc(plan.work)
            try:
                cufft.set_stream(plan.handle, stream.handle)
                if area:
                    cufft.set_work_area(plan.handle, area)
                for call in range(calls):
                    plan.execute(plan.handle, source + call * step, destination + call * step, *direction)
            except self._error as error:
                raise stream.failure(int(error.status), "execute", "cufft") from error
            finally:
                memory.free(area)

    def close(self) -> None:
        """Destroy the plans. May block; the streams have ended, and the context is healthy."""
        self.cache.close()

    def _make(self, layout: Layout) -> _Plan:
        cufft, call = self._cufft, "create"
        handle = 0
        try:
            with self._context.section:
                handle = int(cufft.create())
                call = "make_plan"
                cufft.set_auto_allocation(handle, 0)
                sides = [(layout.embed(is_real=each), layout.stride, layout.dist(is_real=each)) for each in self._sides(layout)]
                lengths, kind = layout.lengths, int(cufft.Type[_TYPES[layout.transform, layout.is_double]])
                work = int(cufft.make_plan_many64(handle, len(lengths), lengths, *sides[0], *sides[1], kind, layout.batch))
        except self._error as error:
            if handle:
                self._give_back(handle)
            raise error_of(int(error.status), call, library="cufft", device=self._context.description.spec) from error
        return _Plan(handle, work, getattr(cufft, f"exec_{_TYPES[layout.transform, layout.is_double].lower()}"))

    @staticmethod
    def _sides(layout: Layout) -> tuple[bool, bool]:
        """Return whether the source and the destination are real."""
        return layout.transform == "real", layout.transform == "back"

    def _destroy(self, plan: _Plan) -> None:
        self._give_back(plan.handle)

    def _give_back(self, handle: int) -> None:
        with self._context.section, contextlib.suppress(self._error):  # what else there is is given back all the same
            self._cufft.destroy(handle)
