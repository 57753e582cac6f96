"""How the parent of a process host waits for a long op: half asleep, by a precise timer, and awake when the end is near."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from accel.device.remote.attention import Pacing

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.device.remote.attention._FEW", 1)


async def once(pacing: Pacing, seconds: float) -> bool:
    """Send one op that takes so long, and return whether the parent was awake at its end."""
    pacing.sent(1, is_first=True, is_attended=False)
    began = time.perf_counter()
    done = asyncio.get_running_loop().create_future()

    def turn() -> None:
        if time.perf_counter() - began < seconds:
            asyncio.get_running_loop().call_soon(turn)
        else:
            done.set_result(pacing.is_awake)

    turn()
    awake: bool = await done
    pacing.idle()
    return awake


async def often(pacing: Pacing, seconds: float) -> float:
    """Return of how many ops, of all, the end found the parent awake."""
    return sum([await once(pacing, seconds) for _ in range(30)]) / 30


async def test_the_end_of_a_steady_op_finds_the_parent_awake() -> None:
    pacing = Pacing(asyncio.get_running_loop(), lambda: None)
    before = len(os.listdir("/proc/self/fd"))
    try:
        # A machine that does something else meanwhile is late now and then, not always.
        assert max([await often(pacing, 3e-3) for _ in range(5)]) >= 0.75
        assert not pacing.is_awake
    finally:
        pacing.end()
        pacing.end()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_loop_with_a_coarse_clock_makes_no_difference() -> None:
    loop = asyncio.get_running_loop()
    pacing = Pacing(loop, lambda: None)
    real = loop.time
    try:
        loop.time = lambda: round(real(), 3)  # type: ignore[method-assign]
        usual = []
        for _ in range(5):
            shares = await often(pacing, 0.6e-3)
            usual.append((shares >= 0.75, 0.4e-3 < pacing._usual < 1.2e-3))
        assert (True, True) in usual
    finally:
        loop.time = real  # type: ignore[method-assign]
        pacing.end()
