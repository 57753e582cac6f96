"""The reference page of the ops gets every op of every family, as it is called today."""

from __future__ import annotations

import runpy
from pathlib import Path

from accel import ops
from accel.ops.families import FAMILIES
from accel.ops.namespace import ops_of

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_op_has_its_row_with_a_summary() -> None:
    hook = runpy.run_path(str(DOCS / "op_tables.py"))["on_page_markdown"]
    page = hook((DOCS / "reference" / "ops.md").read_text(encoding="utf-8"))
    rows = [line for line in page.splitlines() if line.startswith("| `device.")]
    assert len(rows) == sum(len(ops_of(family.namespace)) for family in FAMILIES)
    assert not [row for row in rows if row.count("|") != 3 or row.endswith("|  |")]
    assert "| `device.blas.scal(x, alpha)` | `x *= alpha`, in place; any shape. The result is `x`. |" in rows


def test_accel_ops_exports_every_op_and_every_namespace() -> None:
    there = {named for family in FAMILIES for named in (family.namespace, *family.ops)}
    assert {
        named.__qualname__ for named in there if getattr(ops, named.__name__, None) is not named or named.__name__ not in ops.__all__
    } == set()
