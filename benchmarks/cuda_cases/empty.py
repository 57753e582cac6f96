"""What awaiting an empty kernel costs: P1, P2 and P6, each beside its raw twin, CuPy and PyTorch."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from accel import System, UnsupportedError
from accel.cli.bench.cases import OURS, RAW, await_empty, micro
from accel.cli.bench.measure import Samples, awaited, called, compare
from accel_cuda.families.kernels.bench import EmptyKernel
from benchmarks.cuda_cases.rig import CUPY, INSTALL_TWINS, TORCH_QUERY, TORCH_THREAD
from benchmarks.measures import together

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.cli.bench.suite import Bench
    from benchmarks.cuda_cases.rig import Rig

    Op = Callable[[], Awaitable[Any]]

__all__ = ["await_one", "busy", "from_tasks"]

_TASKS = 64


def _others(rig: Rig, bench: Bench) -> dict[str, Op]:
    """Return how others await the smallest op that they have."""
    found: dict[str, Op] = {}
    cupy, torch = rig.cupy(bench), rig.torch(bench)
    if cupy is not None:
        found[CUPY] = cupy.empty()
    if torch is not None:
        found |= {TORCH_QUERY: torch.queried(torch.add()), TORCH_THREAD: torch.in_thread(torch.add())}
    return found


async def await_one(rig: Rig, bench: Bench) -> None:
    """P1: one empty kernel at a time, beside how others await theirs."""
    await await_empty(bench, _others(rig, bench))


async def from_tasks(rig: Rig, bench: Bench) -> None:
    """P2: empty kernels from 64 tasks. The twin is the faster of CuPy and PyTorch."""
    others = _others(rig, bench)
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        ops = [EmptyKernel(await device.zeros(4)) for _ in range(_TASKS)]
        turn = iter(range(1 << 62))
        subjects = {
            OURS: together(lambda: device.run(ops[next(turn) % _TASKS]), _TASKS, bench.scale(150, 40)),
            **{name: together(other, _TASKS, bench.scale(40, 15)) for name, other in others.items()},
        }
        results = await bench.compare(f"empty kernels from {_TASKS} tasks", subjects)
    rates = {name: round(samples.rate) for name, samples in results.items()}
    twins = [results[name].rate for name in (CUPY, TORCH_QUERY) if name in results]
    if not twins:
        raise UnsupportedError("P2 has no twin", remedy=INSTALL_TWINS)
    bench.report.hold("P2", results[OURS].rate / max(twins), ops_per_s=rates)


class _BusyThread:
    """A thread that computes in Python while the block runs."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._compute, name="bench-busy", daemon=True)

    def _compute(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *details: object) -> None:
        self._stop.set()
        self._thread.join()


async def busy(rig: Rig, bench: Bench) -> None:
    """P6: an empty kernel beside a thread that never sleeps."""
    raw, others = rig.raw(bench), _others(rig, bench)
    idle, many = Samples(), Samples()
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        op = EmptyKernel(await device.zeros(4))

        def ours() -> Awaitable[Any]:
            return device.run(op)

        await awaited(ours, 200)(Samples())
        together_idle = together(ours, _TASKS, bench.scale(200, 60))
        await together_idle(idle)
        # A subject that releases the GIL pays milliseconds each time: few of these.
        subjects = {
            OURS: awaited(ours, bench.scale(1000, 300)),
            RAW: called(raw.blocking(), bench.scale(40, 15)),
            **{name: awaited(other, bench.scale(25, 10)) for name, other in others.items()},
        }
        with _BusyThread():
            results = await compare(subjects, 1, warm_up=0)
            await together(ours, _TASKS, bench.scale(200, 60))(many)
    for name, samples in results.items():
        bench.report.add("await an empty kernel beside a busy thread", name, samples)
    bench.report.hold("P6", results[OURS].median * 1e6, **micro({"p99_us": results[OURS].percentile(99)}))
    bench.report.hold("P6-rate", many.rate / idle.rate, ops_per_s=round(many.rate), idle_ops_per_s=round(idle.rate))
