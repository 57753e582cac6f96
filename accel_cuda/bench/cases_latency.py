"""What awaiting a kernel costs: P1, P2, P3, P4 and P6, each beside its raw twin, CuPy and PyTorch."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from accel import System, UnsupportedError
from accel.cli.bench.measure import Samples, awaited, called, compare, together
from accel_cuda.bench.rig import CUPY, INSTALL_CUPY, OURS, RAW, TORCH_QUERY, TORCH_THREAD, Rig
from accel_cuda.bench.waits import Wait, as_awaitable
from accel_cuda.families.kernels.bench import EmptyKernel, SpinKernel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.cli.bench.suite import Bench

    Op = Callable[[], Awaitable[Any]]

__all__ = ["await_one", "batch", "busy", "from_tasks", "graph", "long_kernels"]

_MICRO = 1e6
_TASKS = 64
_BATCH = 64


def _others(rig: Rig, bench: Bench) -> dict[str, Op]:
    """Return how others await the smallest op that they have."""
    found: dict[str, Op] = {}
    cupy, torch = rig.cupy(bench), rig.torch(bench)
    if cupy is not None:
        found[CUPY] = cupy.op()
    if torch is not None:
        found |= {TORCH_QUERY: torch.queried(torch.add()), TORCH_THREAD: torch.in_thread(torch.add())}
    return found


async def await_one(rig: Rig, bench: Bench) -> None:
    """P1: one empty kernel at a time."""
    raw, others = rig.raw(bench), _others(rig, bench)
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        op = EmptyKernel(await device.zeros(4))
        subjects = {
            OURS: awaited(lambda: device.run(op), bench.scale(1000, 300)),
            RAW: called(raw.blocking(), bench.scale(1000, 300)),
            **{name: awaited(other, bench.scale(200, 50)) for name, other in others.items()},
        }
        results = await bench.compare("await an empty kernel", subjects)
    ours, twin = results[OURS], results[RAW]
    details = {"us": ours.median, "p99_us": ours.percentile(99), "raw_us": twin.median, "added_us": ours.median - twin.median}
    bench.report.hold("P1", ours.median / twin.median, **_micro(details))


async def from_tasks(rig: Rig, bench: Bench) -> None:
    """P2: empty kernels from 64 tasks."""
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
    if CUPY not in results:
        raise UnsupportedError("P2 has no twin", remedy=INSTALL_CUPY)
    rates = {name: round(samples.rate) for name, samples in results.items()}
    bench.report.hold("P2", results[OURS].rate / results[CUPY].rate, ops_per_s=rates)


async def batch(rig: Rig, bench: Bench) -> None:
    """P3: tiny kernels in batches, against a loop of raw launches."""
    raw, count = rig.raw(bench), bench.scale(150, 40)
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        op = EmptyKernel(await device.zeros(4))

        async def batched() -> None:
            async with device.batch() as recorded:
                for _ in range(_BATCH):
                    recorded.run(op)

        raw_name = f"{_BATCH} raw launches + synchronize"
        subjects = {
            "batch()": awaited(batched, count, _BATCH),
            raw_name: called(raw.blocking(launches=_BATCH), count, _BATCH),
        }
        results = await bench.compare(f"{_BATCH} empty kernels in a batch, each", subjects)
    bench.report.hold("P3", results["batch()"].rate / results[raw_name].rate)


async def graph(rig: Rig, bench: Bench) -> None:
    """P3-graph: the same kernels as a graph, against a raw graph."""
    raw, count = rig.raw(bench), bench.scale(300, 80)
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        op = EmptyKernel(await device.zeros(4))
        async with device.graph() as recorded:
            for _ in range(_BATCH):
                recorded.run(op)
        raw_name = "raw graph launch + synchronize"
        subjects = {"graph.replay()": awaited(recorded.replay, count), raw_name: called(raw.graph(_BATCH), count)}
        results = await bench.compare(f"a graph of {_BATCH} empty kernels", subjects)
    ours, twin = results["graph.replay()"].median, results[raw_name].median
    bench.report.hold("P3-graph", (ours - twin) * _MICRO, **_micro({"us": ours, "raw_us": twin}))


async def long_kernels(rig: Rig, bench: Bench) -> None:
    """P4: what waiting adds to kernels of 1 and 5 ms, and the processor time of it."""
    raw = rig.raw(bench)
    added: dict[str, float] = {}
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        out = await device.zeros(4)
        for milliseconds, count in ((1, bench.scale(100, 40)), (5, bench.scale(40, 15))):
            op = SpinKernel(out, milliseconds * 1_000_000)
            waits = {
                OURS: Wait(lambda op=op: device.run(op), milliseconds / 1e3, count),  # type: ignore[misc]
                RAW: Wait(as_awaitable(raw.blocking(op.nanoseconds)), milliseconds / 1e3, count // 2),
            }
            await waits[OURS].warm_up(20)
            results = await bench.compare(f"added to a {milliseconds} ms kernel", waits, rounds=bench.scale(7, 2))
            for name, part in (("p50", 50), ("p99", 99)):
                added[f"{milliseconds}ms_{name}_us"] = results[OURS].percentile(part)
            added[f"{milliseconds}ms_raw_us"] = results[RAW].median
            bench.report.hold(f"P4-cpu-{milliseconds}ms", waits[OURS].percent, raw_percent=round(waits[RAW].percent, 1))
    details = _micro(added)
    bench.report.hold("P4", max(details["1ms_p50_us"], details["5ms_p50_us"]), **details)


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
        # What gives the GIL up pays milliseconds each time: few of these.
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
    bench.report.hold("P6", results[OURS].median * _MICRO, **_micro({"p99_us": results[OURS].percentile(99)}))
    bench.report.hold("P6-rate", many.rate / idle.rate, ops_per_s=round(many.rate), idle_ops_per_s=round(idle.rate))


def _micro(seconds: dict[str, float]) -> dict[str, Any]:
    return {name: round(value * _MICRO, 3) for name, value in seconds.items()}
