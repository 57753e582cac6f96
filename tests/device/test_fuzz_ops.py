"""Random arguments for every method of a device: answers, or errors of accel's; never anything else, never a context lost, never a wrong answer."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import secrets
import time
import warnings
from typing import Any, Literal

import numpy as np
import pytest

import accel
from tests.fuzz_support import LIMIT, Call, Fuzzer, expected, shown

pytestmark = pytest.mark.usefixtures("nothing_left")

CALLS = 20_000
SECONDS, LONGEST = 2.0, 45.0  # how much that is depends on who else is busy
HUNG = 20.0


async def outcome(call: Call) -> Any:
    """Return what a call gave, or the error; whatever is not one of accel's errors is a failure of the test."""
    try:
        answer = call.method(**call.arguments)
        return await asyncio.wait_for(answer, HUNG) if inspect.isawaitable(answer) and not isinstance(answer, accel.AccelRef) else answer
    except accel.AccelError as refusal:
        error = refusal
    assert error.message, shown(call)
    assert str(error)
    assert not error.is_fault, f"{shown(call)}: {error!r}"
    return error


async def strange_refs(device: accel.Device, other: accel.Device) -> list[Any]:
    """Return refs that a device must refuse."""
    freed, elsewhere = await device.zeros(4), await other.zeros((2, 3))
    await device.free(freed)
    with contextlib.suppress(accel.StaleRefError):
        freed.check()
    kept = await device.zeros(3)
    async with device.batch() as batch:
        early = batch.zeros(3)
    await device.free(early)
    return [freed, elsewhere, elsewhere[1:], elsewhere.token(), kept.token(), early]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("host", ["inline", "process"])
async def test_random_arguments_are_answered_or_refused(host: Literal["inline", "process"]) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    refused = answered = compared = 0
    async with accel.System() as system:
        other = await system.open_device("cpu", host="inline", memory_limit=LIMIT)
        device = await system.open_device("cpu", host=host, memory_limit=LIMIT, pinned_limit=LIMIT)
        strange = await strange_refs(device, other)
        fuzzer = Fuzzer(device, random.Random(seed), strange)
        await fuzzer.fill()
        began = time.monotonic()
        for number in range(CALLS):
            spent, is_enough = time.monotonic() - began, answered > 50 and compared > 5 and refused > 50
            if spent > (SECONDS if is_enough else LONGEST):
                break
            call = fuzzer.call()
            where = f"seed {seed}, call {number}: {shown(call)}"
            try:
                result = await outcome(call)
            except Exception as error:
                raise AssertionError(f"{where} raised {error!r}") from error
            assert (device.generation, device.state) == (1, accel.DeviceState.READY), where
            if isinstance(result, accel.AccelError):
                refused += 1
                continue
            answered += 1
            compared += await compare(device, call, result, where)
            if call.name in ("free", "copy", "blas.axpy", "blas.scal") or "out" in call.arguments or call.name.startswith("run "):
                await refresh(fuzzer)
        assert device.info().in_flight == 0
        # It serves as before.
        np.testing.assert_array_equal(await device.get(await device.put(np.arange(5.0))), np.arange(5.0))
    print(f"{host}: {answered} answered, {compared} of them compared, {refused} refused")
    assert answered > 50
    assert compared > 5
    assert refused > 50


async def compare(device: accel.Device, call: Call, result: Any, where: str) -> bool:
    """Compare an answer with numpy's, where that is worked out; return whether it was."""
    wanted = expected(call)
    if wanted is None:
        return False
    array = await device.get(result) if isinstance(result, accel.AccelRef) else result
    assert array.shape == wanted.shape, where
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        rounded = wanted.astype(array.dtype)
    if array.dtype.kind in "iub":
        return bool(np.isfinite(wanted).all() and (wanted == rounded).all()) and _equal(array, rounded, where)
    tolerance = 2.0 ** -(6 if array.dtype.itemsize <= 2 else 20)
    np.testing.assert_allclose(_wide(array), _wide(rounded), rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=where)
    return True


def _equal(array: Any, wanted: Any, where: str) -> bool:
    np.testing.assert_array_equal(array, wanted, err_msg=where)
    return True


def _wide(array: Any) -> Any:
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


async def refresh(fuzzer: Fuzzer) -> None:
    """See what the operands hold now: what was written into is not what was put there, and what was freed or half written is put again."""
    kept = []
    for ref, array in fuzzer.refs:
        try:
            if not ref.is_freed:
                kept.append((ref, await fuzzer.device.get(ref)))
                continue
        except accel.InvalidArgumentError as error:
            if error.op not in ("put_along_axis", "scatter_add", "segment_sort", "segment_reduce"):  # which leave their output half written
                raise
        kept.append((await fuzzer.device.put(array), array))
    fuzzer.refs[:] = kept
