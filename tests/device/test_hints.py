"""Names of other libraries that users try on accel's objects: each is missing, and the error says what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.device.hints import DEVICE_HINTS, RECORDER_HINTS, SYSTEM_HINTS
from accel.hints import REF_HINTS, hinted

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.usefixtures("nothing_left")

ACTOR_HINTS = {"receive": "Use await ref.ask(message).", "join": "Use await ref.wait_stopped()."}


class Echo(accel.Actor[int, int]):
    async def receive(self, message: int, context: accel.ActorContext) -> int:
        return message


def check(made: object, hints: Mapping[str, str]) -> None:
    names = [name for name in hints if not hasattr(made, name)]
    assert len(names) > 0.9 * len(hints), "few are names that the class has"
    for name in names:
        with pytest.raises(AttributeError) as caught:
            getattr(made, name)
        kind = type(made).__name__
        assert str(caught.value) == f"{kind!r} object has no attribute {name!r}. {hints[name]}"
        assert caught.value.name == name
        assert name not in dir(made)


async def test_each_hint_is_said_where_the_name_is_missing() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu")
        check(device, DEVICE_HINTS)
        check(device.batch(), RECORDER_HINTS)
        check(device.graph(), RECORDER_HINTS)
        check(system, SYSTEM_HINTS)
        check(await device.zeros(3), REF_HINTS)
        check(await system.spawn(Echo), ACTOR_HINTS)


async def test_other_names_are_missing_as_python_says_it() -> None:
    async with accel.System() as system:
        device: Any = await system.open_device("cpu")
        with pytest.raises(AttributeError, match=r"^'Device' object has no attribute 'nothing'$"):
            _ = device.nothing
        with pytest.raises(AttributeError, match=r"^type object 'Device' has no attribute 'gemm'$"):
            _ = accel.Device.gemm  # type: ignore[attr-defined]


def test_the_error_of_a_property_is_not_replaced_by_a_hint() -> None:
    @hinted({"size": "Use nbytes."})
    class Broken:
        @property
        def size(self) -> int:
            raise AttributeError("the cause")

    with pytest.raises(AttributeError, match=r"^the cause$"):
        _ = Broken().size
