"""The reference page of the ops has every op of every family, as it is called today."""

from __future__ import annotations

from accel.ops.families import FAMILIES
from accel.ops.namespace import ops_of
from tests.op_tables import PAGE, page_with_tables


def test_the_tables_are_those_of_the_families() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_tables(page), "run: python -m tests.op_tables"


def test_every_op_has_its_row_with_a_summary() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `device.")]
    assert len(rows) == sum(len(ops_of(family.namespace)) for family in FAMILIES)
    assert not [row for row in rows if row.count("|") != 3 or row.endswith("|  |")]
    assert "| `device.blas.scal(x, alpha)` | `x *= alpha`, in place; any shape. The result is `x`. |" in rows
