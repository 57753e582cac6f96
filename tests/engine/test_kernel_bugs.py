"""A kernel's bug ends its op and holds nothing: what the op had in hand is free at once, not when cycles are collected."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import accel
from accel import registry
from accel.ops import Plan
from tests.device_support import bounded, failure, task, until

pytestmark = pytest.mark.usefixtures("nothing_left")


@dataclass(frozen=True, eq=False, slots=True)
class Break(accel.KernelOp):
    """Does not work."""

    library: ClassVar[str] = "broken"
    kind: ClassVar[str] = "break"

    x: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((), (self.x,), ())


class Broken(accel.KernelLibrary):
    """Raises on the loop's thread."""

    name = "broken"
    blocking = False

    error: ClassVar[Exception] = ZeroDivisionError("broken")

    @accel.kernel(Break)
    def break_it(self, op: Break, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        raise self.error


class Beside(Broken):
    """Raises on another thread."""

    blocking = True


@pytest.mark.parametrize("library", [Broken, Beside])
@pytest.mark.parametrize("depends", [False, True])
async def test_a_bug_keeps_no_operand_alive(library: type[Broken], depends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")
    async with accel.System() as system:
        device = await system.open_device("late", libraries=["memory"])
        await device.register(library)
        x: list[accel.AccelRef] = [await device.put(np.ones(8))]

        async def fails() -> None:
            before = task(device.put(np.zeros(8), out=x[0])) if depends else None  # in another stream
            await asyncio.sleep(0)
            notes: list[str] = []
            try:  # what pytest.raises gives would keep this frame alive
                await device.run(Break(x[0]))
            except accel.LibraryError as error:
                notes += error.__cause__.__notes__  # type: ignore[union-attr]
            assert len(notes) == 1, "one instance, raised again and again, does not grow"
            assert "in break_it" in notes[0]
            if before is not None:
                await before

        gc.collect()
        gc.disable()
        try:
            await bounded(fails())
            is_there = weakref.ref(x.pop())
            await until(lambda: is_there() is None, "the operand is gone")
            await until(lambda: device.info().memory.used == 0, "its memory is free")
        finally:
            gc.enable()


class Bare(accel.AccelError):
    """Leaves the constructor of its base out: it has no fields."""

    def __init__(self) -> None:
        pass


class Single(accel.LibraryError):
    """Cannot be cloned."""

    def clone(self, **fields: Any) -> Any:
        raise RuntimeError("there is one of it")


class Later(Broken):
    """Raises in the stream, on a thread or, for small work, on the loop's; or at once."""

    cost: ClassVar[float | None]
    raises: ClassVar[type[accel.AccelError]]

    @accel.kernel(Break)
    def break_it(self, op: Break, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        def work() -> None:
            raise self.raises

        if self.cost is None:
            work()
        stream.submit(work, self.cost)


@pytest.mark.parametrize("raises", [Bare, Single])
@pytest.mark.parametrize("cost", [None, 1e-6, 1.0])
async def test_an_error_without_fields_or_that_cannot_be_cloned_is_answered(
    cost: float | None, raises: type[accel.AccelError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Later, "cost", cost, raising=False)
    monkeypatch.setattr(Later, "raises", raises, raising=False)
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device("cpu")
        await device.register(Later)
        x = await device.put(np.ones(8))
        for _ in range(2):  # the stream goes on
            error = await failure(device.run(Break(x)), accel.LibraryError)
            what = "the break kernel of library 'broken'" if cost is None else "the work of break of library 'broken'"
            assert error.message.startswith(f"{what} raised {raises.__name__}")
            assert type(error.__cause__) is raises
