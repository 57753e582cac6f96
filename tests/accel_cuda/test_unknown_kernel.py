"""The name of a kernel that does not exist fails at once, and the error names it. No GPU is needed: what compiles and loads is a stand-in."""

from __future__ import annotations

from typing import Any

import pytest

import accel
from accel_cuda.families.programs import Programs


class Loads:
    """Counts the programs that are compiled; each has one function."""

    def __init__(self) -> None:
        self.count = 0

    def load(self, take: Any, source: str, *_: Any) -> dict[str, int]:
        self.count += 1
        return {"fill8": self.count}


@pytest.mark.parametrize("name", ["nosuch", "unary_nosuch_f32", "reduce_rows_nosuch_f64"])
def test_an_unknown_kernel_is_named_and_nothing_else_is_compiled_for_it(name: str) -> None:
    loads: Any = Loads()
    programs = Programs(None, loads)  # type: ignore[arg-type]
    with pytest.raises(accel.UnsupportedError, match=name):
        programs[name]
    assert loads.count == 1
    assert list(programs) == ["fill8"]


def test_an_unknown_program_is_named() -> None:
    loads: Any = Loads()
    with pytest.raises(accel.UnsupportedError, match="'nosuch'"):
        Programs(None, loads).load("nosuch")  # type: ignore[arg-type]
    assert loads.count == 0
