"""A notebook's device: opened without a system, ended by itself; and arrays that show their values there."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from tests.child_support import no_child_left
from tests.device_support import until

__all__ = ["no_child_left"]

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import asyncio, sys
import accel

async def main():
    device = await accel.open_device("cpu", host=sys.argv[2])
    await device.put([1.0])
    print(device.info().pid)

if sys.argv[1] == "asyncio.run":
    asyncio.run(main())
else:
    loop = asyncio.new_event_loop()  # as a notebook's, which is never closed
    loop.run_until_complete(main())
"""


@pytest.mark.usefixtures("no_child_left")
@pytest.mark.parametrize("host", ["inline", "process"])
async def test_the_device_ends_its_system(host: Any) -> None:
    device = await accel.open_device("cpu", host=host)
    ref = await device.put(np.arange(3.0))
    np.testing.assert_array_equal(await device.get(ref), np.arange(3.0))
    await device.aclose()
    await device.aclose()
    assert device.state is accel.DeviceState.CLOSED
    with pytest.raises(accel.ClosedError):
        await device.put([1.0])


async def test_a_device_that_cannot_be_opened_leaves_nothing() -> None:
    with pytest.raises(accel.BackendUnavailableError):
        await accel.open_device("cpu:99")
    with pytest.raises(accel.InvalidArgumentError):
        await accel.open_device("cpu", pending_limit=0)


def test_its_options_are_those_of_a_system() -> None:
    method, function = (inspect.signature(opening).parameters for opening in (accel.System.open_device, accel.open_device))
    assert [*method.values()][1:] == [*function.values()]


@pytest.mark.parametrize(("way", "host"), [("asyncio.run", "process"), ("open loop", "inline")])
async def test_a_program_that_leaves_it_open_ends_with_a_warning(way: str, host: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, way, host]
    done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True, timeout=40, check=True)
    warning = "system_not_closed system='of one device'" if way == "asyncio.run" else "device_not_closed device='cpu:0'"
    assert warning in done.stderr
    assert "Traceback" not in done.stderr
    if host == "process":
        await until(lambda: not Path(f"/proc/{int(done.stdout)}").exists())


async def test_arrays_show_their_values_in_an_interactive_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async with accel.System() as system:
        xp = (await system.open_device("cpu", host="process")).xp
        silent = await (xp.asarray(np.arange(3.0)) + 1)
        assert repr(silent) == "<Array float64[3] computed on cpu:0>"
        got = await silent.numpy()
        got[:] = 7
        assert repr(silent) == "Array([1., 2., 3.], float64, cpu:0)"
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        x = xp.asarray(np.arange(4.0, dtype=np.float32).reshape(2, 2))
        later = x * 2
        assert "not awaited" in repr(later)
        assert repr(await later) == "Array([[0., 2.],\n       [4., 6.]], float32, cpu:0)"
        one, large = await accel.evaluate(x.sum(), xp.zeros((100, 100)))
        assert (repr(one), repr(large)) == ("Array(6., float32, cpu:0)", "<Array float32[100, 100] computed on cpu:0>")
        assert repr(await later.T) == "Array([[0., 4.],\n       [2., 6.]], float32, cpu:0)"
