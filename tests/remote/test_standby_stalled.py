"""A spare child is judged by what was heard of it, not by the clock alone: this process may have been stopped, or its loop held up."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.remote import actor
from accel.remote.link import Link
from accel.remote.messages import Kind
from accel.testing import FaultPlan
from tests.device_support import failure

if TYPE_CHECKING:
    from collections.abc import Callable

_STALL = 1.5


class Stalls:
    """Holds the loop up when a generation begins in a spare child: before that hears of it, or together with the child, which has heard of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        self.armed = False
        self.count = 0
        tell = Link.tell

        def told(link: Link, kind: Kind, *rest: Any, **more: Any) -> None:
            # The first word to it in its new office; what is said there leaves at the end of the turn.
            is_it = self.armed and kind == Kind.PING and isinstance(link.listener, actor.RemoteContextActor) and link.watchdog.is_starting
            if is_it:
                self.armed = False
                self.count += 1
                asyncio.get_running_loop().call_soon(self._stall, link.pid if what == "both" else None)
            tell(link, kind, *rest, **more)

        monkeypatch.setattr(Link, "tell", told)

    def _stall(self, pid: int | None) -> None:
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(_STALL)
        if pid is not None:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("what", ["parent", "both"])
@pytest.mark.usefixtures("used_loops")
def test_a_spare_is_promoted_although_the_loop_was_held_up(
    run_on_loop: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(actor, "_PROMOTION_TIMEOUT", 1.0)
    stalls = Stalls(monkeypatch, what)

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cpu", host="process", standby="context", faults=FaultPlan().poison_at(1, op="unary"))
            x = await device.zeros(3)
            async with asyncio.timeout(60):
                assert await device.spare_ready()
            first, spare = device.info().pid, _spare(system, device)
            stalls.armed = True
            await failure(device.elementwise.unary("neg", x), accel.ContextPoisonedError)
            assert (await asyncio.wait_for(device.get(await device.put(np.arange(3.0))), 30)).sum() == 3
            assert stalls.count == 1, "the spare was thrown away"
            assert device.info().pid == spare != first
            assert device.generation == 2

    run_on_loop(main)


def _spare(system: accel.System, device: accel.Device) -> int:
    children: Any = device._host.children
    pid: int = children.spares[0].pid
    assert os.path.exists(f"/proc/{pid}")
    return pid
