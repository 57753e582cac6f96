"""P1: what awaiting an empty kernel costs over the driver's own launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel import System, UnsupportedError
from accel.backend import LaunchesEmptyKernels
from accel.cli.bench.measure import awaited, called
from accel.registry import find_device

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from accel.cli.bench.suite import Bench

__all__ = ["OURS", "RAW", "await_empty", "micro"]

OURS = "accel"
RAW = "raw launch + synchronize"
_MICRO = 1e6


def micro(seconds: dict[str, float]) -> dict[str, Any]:
    """Return times in microseconds, for the details of a ratio."""
    return {name: round(value * _MICRO, 3) for name, value in seconds.items()}


async def await_empty(bench: Bench, others: Mapping[str, Callable[[], Awaitable[object]]] | None = None) -> None:
    """Measure one empty kernel at a time, beside the raw launch and ``others``: P1."""
    backend, found = find_device(bench.spec)
    if not isinstance(backend, LaunchesEmptyKernels):
        raise UnsupportedError(f"the backend {backend.name} has no empty kernel", remedy="Measure a device that launches kernels.")
    with backend.raw_launch(found.index) as raw:
        async with System("bench") as system:
            device = await system.open_device(bench.spec)
            op = backend.empty_op(await device.zeros(4))
            subjects = {
                OURS: awaited(lambda: device.run(op), bench.scale(1000, 300)),
                RAW: called(raw, bench.scale(1000, 300)),
                **{name: awaited(other, bench.scale(200, 50)) for name, other in (others or {}).items()},
            }
            results = await bench.compare("await an empty kernel", subjects)
    ours, twin = results[OURS], results[RAW]
    details = {"us": ours.median, "p99_us": ours.percentile(99), "raw_us": twin.median, "added_us": ours.median - twin.median}
    bench.report.hold("P1", ours.median / twin.median, **micro(details))
