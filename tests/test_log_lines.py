"""An event is one line of the log, whatever a child or a user's code puts into its name, its keys and what its values look like."""

from __future__ import annotations

import asyncio
import io
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import accel
from accel.cli.console import print_table
from accel.ops import Plan, Spec

if TYPE_CHECKING:
    import pytest

EVENT = "harmless\n2026-01-01 00:00:00 CRITICAL accel forged_by_name"
KEY = "key\r\nforged_by_key"
ESCAPE = "\x1b[2J\u2028\u202e"


@dataclass(frozen=True)
class Speak(accel.KernelOp):
    """A copy, during which the library says something in its log."""

    library: ClassVar[str] = "speaking"
    kind: ClassVar[str] = "speak"

    x: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Speaking(accel.KernelLibrary):
    """Runs in the child, whose log is told to the parent."""

    name = "speaking"

    @accel.kernel(Speak)
    def speak(self, op: Speak, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        source, target = np.asarray(inputs[0]), np.asarray(outputs[0])
        stream.submit(lambda: np.copyto(target, source), 1e-6)
        pairs = {
            "event": EVENT,
            KEY: "value\nforged_by_value",
            ESCAPE: ESCAPE,
            "level": "none",
            "self": "mine",
            "exc_info": "yes",
            "error": "Error: no",
        }
        logging.getLogger("accel").warning("told", extra={"accel": pairs})
        logging.getLogger("accel").warning("plainly\nforged_by_message%s", ESCAPE)


async def test_what_a_child_says_stays_on_its_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "accel")
    async with asyncio.timeout(20), accel.System() as system:
        device = await system.open_device("cpu", host="process")
        await device.register(Speaking)
        x = await device.put(np.arange(4.0))
        np.testing.assert_array_equal(await device.get(await device.run(Speak(x))), np.arange(4.0))
        while not any("forged_by_message" in record.getMessage() for record in caplog.records):
            await device.get(x)  # the log travels on the same connection
        assert device.health().is_ready
    told = [record for record in caplog.records if "forged" in record.getMessage()]
    assert len(told) == 2
    for record in told:
        line = record.getMessage()
        assert line.splitlines() == [line]
        assert line.isprintable(), ascii(line)
        assert logging.Formatter().format(record) == line, "no traceback of nothing"
    assert "error='Error: no'" in told[0].getMessage()
    assert "harmless\\n2026-01-01" in told[0].getMessage()
    assert "key\\r\\nforged_by_key='value\\nforged_by_value'" in told[0].getMessage()


def test_what_a_driver_names_its_device_stays_on_its_row() -> None:
    out = io.StringIO()
    print_table("", ["spec", "name"], [["cuda:0", f"GPU\ncuda:1  forged{ESCAPE}"]], stream=out)
    assert out.getvalue().splitlines()[2:] == [f"cuda:0  GPU\\ncuda:1  forged{ESCAPE.encode('unicode_escape').decode()}", ""]
