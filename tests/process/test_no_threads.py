"""A machine that has no thread to give: ops on the CPU go on, or fail with an error that says so, and work again when there are threads."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, NoReturn

import numpy as np
import pytest

import accel
from tests.cpu_ops_support import PATIENCE

LARGE = np.ones(1 << 17)
"""So large that it is copied on a stream's own thread."""


async def ended(*calls: Any) -> list[Any]:
    """Return what came of calls; one that is not answered in time is a ``TimeoutError``."""
    return await asyncio.gather(*[asyncio.wait_for(call, PATIENCE / 4) for call in calls], return_exceptions=True)


def refuse(thread: threading.Thread) -> NoReturn:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("completion", ["adaptive", "sync"])
async def test_every_op_is_answered_without_threads_and_with_them_again(monkeypatch: pytest.MonkeyPatch, completion: Any) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", completion=completion)
        x = await device.put(np.arange(4.0))
        with monkeypatch.context() as none:
            none.setattr(threading.Thread, "start", refuse)
            puts = await ended(*[device.put(LARGE) for _ in range(36)])
            first_of_its_library = await ended(device.blas.gemm(x.reshape((2, 2)), x.reshape((2, 2))))
        for answer in (*puts, *first_of_its_library):
            if not isinstance(answer, accel.AccelRef):
                assert isinstance(answer, accel.OutOfMemoryError), answer
                assert (answer.retryable, answer.scope) == (True, accel.FaultScope.OP)
                assert "thread" in str(answer)
        assert device.info().in_flight == 0
        (ref,) = await ended(device.put(LARGE))
        (product,) = await ended(device.blas.gemm(x.reshape((2, 2)), x.reshape((2, 2))))
        np.testing.assert_array_equal(await device.get(ref, timeout=PATIENCE), LARGE)
        np.testing.assert_array_equal(await device.get(product, timeout=PATIENCE), [[2, 3], [6, 11]])
        assert (device.state, device.generation) == (accel.DeviceState.READY, 1)
