"""Errors that a child tells of are bounded when they are read: a service keeps as many of them as it has callers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import accel
from accel.ops import Plan, Spec
from tests import lying_child

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 30.0
"""Seconds for what takes a second, on a machine that has much else to do."""
CHARACTERS = 1 << 17
"""Of one error, all its texts and its causes together."""


def characters(error: BaseException | None) -> int:
    """Return how long the texts of an error, its notes and its causes are."""
    count, seen = 0, set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        count += len(repr(error.args)) + len(repr(error.__dict__))
        error = error.__cause__
    return count


@pytest.mark.parametrize("lie", ["errors of a megabyte", "errors of many megabytes"])
async def test_errors_of_a_lying_child_are_short(lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = lying_child.install(monkeypatch, tmp_path)
    lying_child.lie(monkeypatch, lie, once=tmp_path / "told")
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device(name, host="process")
        found = await asyncio.wait_for(asyncio.gather(*(device.zeros(4) for _ in range(20)), return_exceptions=True), PATIENCE)
        errors = [each for each in found if isinstance(each, accel.ContextPoisonedError)]
        assert len(errors) == len(found)
        assert max(map(characters, errors)) < CHARACTERS
        is_killed = lie == "errors of many megabytes"  # no honest child says as much
        if is_killed:
            await asyncio.wait_for(device.zeros(4), PATIENCE)
        assert (device.state, device.generation) == (accel.DeviceState.READY, 2 if is_killed else 1)


@dataclass(frozen=True, eq=False, slots=True)
class Complain(accel.KernelOp):
    """Fails at length."""

    library: ClassVar[str] = "complains"
    kind: ClassVar[str] = "complain"

    x: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Complains(accel.KernelLibrary):
    """A library whose errors show the data."""

    name = "complains"

    @accel.kernel(Complain)
    def complain(self, op: Complain, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        raise accel.LibraryError("the data is wrong: " + "0.0, " * 1_000_000, remedy="Give other data. " + "Not this. " * 100_000)


async def test_errors_of_an_honest_child_are_short_and_say_that_they_were_cut() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        await device.register(Complains)
        x = await device.zeros(4)
        found = await asyncio.wait_for(asyncio.gather(*(device.run(Complain(x)) for _ in range(20)), return_exceptions=True), PATIENCE)
        for error in found:
            assert isinstance(error, accel.LibraryError)
            assert characters(error) < CHARACTERS
            assert error.message.startswith("the data is wrong: 0.0, 0.0")
            assert error.message.endswith("more characters)")
        assert (device.state, device.generation) == (accel.DeviceState.READY, 1)
