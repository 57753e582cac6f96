"""How fast data moves: put and get of pinned and pageable arrays, beside the driver's copies and PyTorch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from accel import DeadlineExceededError, OutOfMemoryError, System, UnsupportedError
from accel.cli.bench.measure import awaited, called

if TYPE_CHECKING:
    from accel import Device
    from accel.cli.bench.measure import Meter, Samples
    from accel.cli.bench.suite import Bench
    from benchmarks.cuda_cases.rig import Rig

    Array = np.ndarray[Any, Any]

__all__ = ["copies", "copies_of_all_sizes", "copies_to_a_child"]

_JUDGED = {"64 MiB": 64 << 20, "256 MiB": 256 << 20}
_OTHERS = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "1 GiB": 1 << 30}
_PATIENCE = 5.0
# What a slow way does, to choose how often to repeat: bytes copied each second.
_SLOW = 8e9
_WAYS = ("put", "get")


class _Copier:
    """Measures copies of one kind of host memory."""

    def __init__(self, rig: Rig, bench: Bench, device: Device) -> None:
        self.rig, self.bench, self.device = rig, bench, device

    async def measure(self, size: str, kind: str, host: Array, target: Array, *, is_here: bool = True) -> dict[str, Samples]:
        """Measure ``put`` and ``get`` of ``host``, which is ``kind`` memory; ``target`` is as large and of the same kind.

        With ``is_here=False`` they are pinned in a child: the twins then have memory of their own, which is pinned in this process.
        """
        raw, torch, nbytes = self.rig.raw(self.bench), self.rig.torch(self.bench), host.nbytes
        ref = await self.device.put(host)
        await self.device.get(ref, out=target)
        if not np.array_equal(host, target):
            raise AssertionError(f"{size} of {kind} memory came back changed")
        # Several in a row: after the twin's turn the threads' processors sleep, and the first copies are slow until all are awake.
        count = max(1, min(self.bench.scale(200, 50), int(self.bench.scale(160, 20) * 1e-3 * _SLOW / nbytes)))
        slab = raw.context.create_slab(nbytes)
        try:
            copies = raw.pinned_copies if kind == "pinned" else raw.pageable_copies
            # The same arrays as ours: what the processor's caches hold of them then helps or hinders all alike.
            near, back = (host, target) if is_here else (raw.pinned(nbytes), raw.pinned(nbytes))
            (raw_put, _), (_, raw_get) = copies(slab.address, near), copies(slab.address, back)
            subjects: dict[str, Meter] = {
                "accel put": awaited(lambda: self.device.put(host, out=ref), count),
                "raw put": called(raw_put, count),
                "accel get": awaited(lambda: self.device.get(ref, out=target), count),
                "raw get": called(raw_get, count),
            }
            if torch is not None:
                (torch_put, _), (_, torch_get) = torch.copies(near), torch.copies(back)
                subjects |= {"PyTorch put": called(torch_put, count), "PyTorch get": called(torch_get, count)}
            where = "" if is_here else ", process host"
            return await self.bench.compare(
                f"copy {size}, {kind}{where}", subjects, rounds=self.bench.scale(9 if size in _JUDGED else 5, 2)
            )
        finally:
            slab.close()
            if torch is not None:
                torch.release()

    async def pinned(self, nbytes: int) -> Array | None:
        """Return pinned host memory: this project's, else PyTorch's; ``None`` where there is none of that size."""
        device: Any = self.device
        if hasattr(device, "pinned"):
            try:
                array: Array = await device.pinned((nbytes,), "uint8", timeout=_PATIENCE)
            except (OutOfMemoryError, DeadlineExceededError) as error:
                self.bench.report.skipped[f"pinned copies of {nbytes} bytes"] = str(error)
                return None
            return array
        torch = self.rig.torch(self.bench)
        return None if torch is None else torch.pinned(nbytes)


def _ratios(results: dict[str, Samples], nbytes: int, size: str, kind: str, found: dict[str, dict[str, float]]) -> None:
    for way in _WAYS:
        ours, raw = results[f"accel {way}"].median, results[f"raw {way}"].median
        found[f"{kind} {way} {size}"] = {
            "ratio": round(raw / ours, 3),
            "GB_per_s": round(nbytes / ours / 1e9, 2),
            "raw_GB_per_s": round(nbytes / raw / 1e9, 2),
        }


async def _run(rig: Rig, bench: Bench, sizes: dict[str, int], host: Literal["auto", "process"] = "auto") -> dict[str, dict[str, float]]:
    """Measure all sizes and both kinds of memory, pinned alone for a process host, and return what each way of each gave."""
    found: dict[str, dict[str, float]] = {}
    async with System("bench") as system:
        device = await system.open_device(bench.spec, host=host)
        copier = _Copier(rig, bench, device)
        for size, nbytes in sizes.items():
            source = bench.rng.integers(0, 2**63, nbytes // 8, np.int64).view(np.uint8)
            if host == "auto":
                _ratios(await copier.measure(size, "pageable", source, np.zeros_like(source)), nbytes, size, "pageable", found)
            near, target = await copier.pinned(nbytes), await copier.pinned(nbytes)
            if near is None or target is None:
                continue
            near[:] = source
            _ratios(await copier.measure(size, "pinned", near, target, is_here=host == "auto"), nbytes, size, "pinned", found)
            del near, target, source
    return found


def _least(found: dict[str, dict[str, float]], *beginnings: str) -> tuple[float, dict[str, dict[str, float]]]:
    chosen = {name: each for name, each in found.items() if name.startswith(beginnings)}
    return min((each["ratio"] for each in chosen.values()), default=0.0), chosen


async def copies(rig: Rig, bench: Bench) -> None:
    """P7: large arrays. Each budget is held by the worst of the sizes (and, pinned, of both ways)."""
    found = await _run(rig, bench, {"64 MiB": _JUDGED["64 MiB"]} if bench.quick else _JUDGED)
    for way in _WAYS:
        value, details = _least(found, f"pageable {way}")
        bench.report.hold(f"P7-{way}", value, copies=details)
    value, details = _least(found, "pinned")
    if not details:
        raise UnsupportedError("there is no pinned memory to copy", remedy="Install PyTorch, or a release with device.pinned().")
    bench.report.hold("P7", value, copies=details)


async def copies_of_all_sizes(rig: Rig, bench: Bench) -> None:
    """Measure the sizes that P7 leaves out."""
    await _run(rig, bench, _OTHERS)


async def copies_to_a_child(rig: Rig, bench: Bench) -> None:
    """P9-copy: pinned put and get of large arrays on a process host. Held by the worst of both."""
    value, details = _least(await _run(rig, bench, {"256 MiB": _JUDGED["256 MiB"]}, "process"), "pinned")
    bench.report.hold("P9-copy", value, copies=details)
