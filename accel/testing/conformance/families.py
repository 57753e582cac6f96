"""Every op of every family, by the samples of the CPU: awaited, batched, replayed by a graph, and on strided views."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.parts import PARTS
from accel.errors import BackendUnavailableError, UnsupportedError
from accel.ops import SizedOp
from accel.sparse_ref import SparseRef
from accel.testing.conformance.device_harness import opened
from accel.testing.conformance.harness import difference

if TYPE_CHECKING:
    from accel.device import Device
    from accel.family import Sample
    from accel.ops import Family
    from accel.ref import AccelRef
    from accel.testing.conformance.harness import Harness

__all__ = ["check_samples", "samples_of"]


def samples_of(family: Family, rng: np.random.Generator) -> list[Sample]:
    """Return the samples of a family: those that it brings for the CPU itself, else those of the CPU backend."""
    part = family.part("cpu") or PARTS.get(family.name)
    return [] if part is None else list(part.samples(rng))


async def check_samples(harness: Harness, family: Family) -> None:
    """Check every sample of a family that the backend offers: awaited, in a batch, in a graph that is replayed, and on strided views."""
    samples = samples_of(family, harness.rng)
    sampled = {sample.name.split()[0] for sample in samples}
    assert sampled == {op.kind for op in family.ops}, f"the samples of {family.name} are of {sorted(sampled)}"
    async with opened(harness) as device:
        offered = 0
        for sample in samples:
            try:
                await _check_awaited(harness, device, family, sample)
            except (UnsupportedError, BackendUnavailableError):  # a backend need not have every op in every dtype, nor an optional library
                continue
            offered += 1
            if offered % 8 == 1:  # the same kernels: a few show that batches and graphs call them rightly
                await _check_recorded(harness, device, family, sample)
            elif offered % 8 == 5:
                await _check_strided(harness, device, family, sample)


async def _check_awaited(harness: Harness, device: Device, family: Family, sample: Sample) -> None:
    refs = [await device.put(array) for array in sample.operands]
    made = await sample.call(device.family(family.namespace), *refs)
    await _compare(harness, device, made, sample, "awaited")


async def _check_recorded(harness: Harness, device: Device, family: Family, sample: Sample) -> None:
    refs = [await device.put(array) for array in sample.operands]
    async with device.batch() as batch:
        made = sample.call(batch.family(family.namespace), *refs)
    await _compare(harness, device, await _trimmed(device, family, sample, made), sample, "in a batch")
    refs = [await device.put(array) for array in sample.operands]
    try:
        async with device.graph() as graph:
            made = sample.call(graph.family(family.namespace), *refs)
    except UnsupportedError:  # a backend need not record every op
        return
    for ref, array in zip(refs, sample.operands, strict=True):
        await device.put(array, out=ref)
    await graph.replay()
    await _compare(harness, device, await _trimmed(device, family, sample, made), sample, "replayed")
    await graph.aclose()


async def _trimmed(device: Device, family: Family, sample: Sample, made: Any) -> Any:
    """Return what a method of the device would have, of results whose last one may be how many elements there are."""
    op = next(op for op in family.ops if op.kind == sample.name.split()[0])
    return op.trimmed(made, int(await device.get(made[-1]))) if issubclass(op, SizedOp) else made


async def _check_strided(harness: Harness, device: Device, family: Family, sample: Sample) -> None:
    """Check a sample whose operands are every second element, along axes in another order, of larger buffers."""
    views: list[AccelRef] = []
    for array in sample.operands:
        order = harness.rng.permutation(array.ndim)
        place = (slice(1, None, 2),) * array.ndim
        whole = np.zeros([2 * array.shape[axis] + 1 for axis in order], array.dtype)
        whole[place] = array.transpose(order)
        views.append((await device.put(whole))[place].transpose([int(axis) for axis in np.argsort(order)]))
    with contextlib.suppress(UnsupportedError):  # a backend need not take them
        await _compare(harness, device, await sample.call(device.family(family.namespace), *views), sample, "on strided views")


async def _compare(harness: Harness, device: Device, made: Any, sample: Sample, how: str) -> None:
    expected = sample.expected if isinstance(sample.expected, tuple) else (sample.expected,)
    refs = made.refs if isinstance(made, SparseRef) else made if isinstance(made, tuple) else (made,)
    found = tuple([await device.get(ref) for ref in refs])
    for got, wanted in zip(found if sample.seen is None else sample.seen(*found), expected, strict=True):
        sizes = np.abs(wanted[np.isfinite(wanted)])
        largest = max(sizes.max(initial=0.0), sample.terms)
        wrong = difference(got, wanted, sample.error * largest)
        assert not wrong, f"{sample.name}, {how} (seed {harness.seed}): {wrong}"
