"""What `accel` offers by name, and what it keeps to itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import accel

ROOT = Path(__file__).resolve().parents[1]


def test_patterns_are_there_without_a_further_import() -> None:
    program = "import accel; print(accel.patterns.DynamicBatcher.__name__, 'patterns' in accel.__all__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    assert (done.stdout, done.stderr) == ("DynamicBatcher True\n", "")


async def test_a_system_shows_no_bookkeeping_and_a_call_from_elsewhere_still_says_where_it_lives() -> None:
    assert {"enlist", "cell_of", "not_at_home", "dismiss"} & set(dir(accel.System)) == set()

    class Echo(accel.Actor[str, str]):
        async def receive(self, message: str, context: accel.ActorContext) -> str:
            if message == "about yourself":
                await context.spawn(Echo, name="below")
            return message

    async with accel.System(name="here") as system:
        echo = await system.spawn(Echo, name="echo")
        assert await echo.ask("about yourself") == "about yourself"
        assert [each.name for each in system.tree()] == ["here", "echo", "below"]
        with pytest.raises(accel.ClosedError, match="lives in another thread"):
            await system.run_blocking(echo.tell, "from a thread")
        await echo.stop()
        assert [each.name for each in system.tree()] == ["here"]
