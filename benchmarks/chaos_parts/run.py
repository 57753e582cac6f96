"""A whole run with its audit, for the command line and for tests."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING

import accel
from accel_cuda import CudaBackend
from accel_cuda.core.nvml import kept_nbytes
from benchmarks.chaos_parts.audit import Left, Witness, device_memory
from benchmarks.chaos_parts.oracle import Ledger
from benchmarks.chaos_parts.plants import Plant
from benchmarks.chaos_parts.report import Figures, Report
from benchmarks.chaos_parts.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.chaos_parts.schedule import Options

__all__ = ["run_chaos"]

_ENDS = 240.0
"""Seconds beyond those of the faults after which the whole program is ended, with the stacks of all threads."""
_CONTEXT = 700
"""MiB of device memory that a context of this process may still hold when its device has moved to a child."""
_ROUNDING = 16
_LINES = 100


def run_chaos(options: Options, tell: Callable[[str], None] = print) -> Report:
    """Run, and look at what is left.

    Parameters
    ----------
    options
        What to do.
    tell
        Called with lines of progress.
    """
    with asyncio.Runner() as runner:
        runner.run(_use_once(options))
    ledger, plant = Ledger(), Plant(options.plant)
    witness = Witness(ledger.violation)
    on_cuda = options.device == "cuda"
    uuid = _measured_gpu() if on_cuda else ""
    faulthandler.dump_traceback_later(options.seconds + _ENDS, exit=True)
    memory = device_memory(uuid) if on_cuda else None
    before, began = Left(), time.perf_counter()
    try:
        with witness.watching():
            with asyncio.Runner() as runner:
                figures = runner.run(_run(options, ledger, tell, plant))
            plant.leave()
        for each in before.behind(options.patience):
            ledger.violation(each)
        after = device_memory(uuid) if on_cuda else None
        if memory is not None and after is not None and after - memory > (_CONTEXT if "auto" in options.hosts else _ROUNDING):
            ledger.violation(f"{after - memory} MiB of device memory are left")
    finally:
        plant.remove()
        faulthandler.cancel_dump_traceback_later()
    if ledger.violated:
        tell("the last that was logged:\n  " + "\n  ".join(list(witness.recent)[-_LINES:]))
    if options.log:
        Path(options.log).write_text("\n".join(witness.recent), encoding="utf-8")
    return Report.of(options, time.perf_counter() - began, ledger, figures, dict(witness.events.most_common()), (memory, after))


def _measured_gpu() -> str:
    """Return the UUID of the first GPU, once NVML was used: its first use opens an eventfd that stays open as long as the process."""
    description = CudaBackend().devices()[0]
    kept_nbytes(description)
    return description.uuid


async def _use_once(options: Options) -> None:
    """Use what stays open for the whole process: the event loop's own descriptors, and a driver's where the device is in this process."""
    if options.device != "cpu" and "auto" in options.hosts:
        async with accel.System() as system:
            device = await system.open_device(options.device, host="inline", libraries=("blas",))
            await device.blas.gemm(*[await device.zeros((8, 8)) for _ in range(2)])


async def _run(options: Options, ledger: Ledger, tell: Callable[[str], None], plant: Plant) -> Figures:
    service = Service(options, ledger, tell, plant)
    await service.run()
    gc.collect()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        ledger.violation(f"task {task!r} is left")
    return service.figures()
