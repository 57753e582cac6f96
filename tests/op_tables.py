"""The tables of ops in ``docs/reference/ops.md``, made from the families: ``python -m tests.op_tables`` writes them."""

from __future__ import annotations

import inspect
import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.ops.families import FAMILIES
from accel.ops.namespace import ops_of

if TYPE_CHECKING:
    from accel.ops import Family, FamilyOp

__all__ = ["PAGE", "page_with_tables"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "ops.md"
START, END = "<!-- tables: python -m tests.op_tables -->\n", "<!-- end of tables -->\n"


def page_with_tables(page: str) -> str:
    """Return the page with the tables of today between its marks."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return before + START + "\n" + "\n".join(table(family) for family in FAMILIES) + "\n" + END + after


def table(family: Family) -> str:
    """Return the table of one family."""
    rows = [row(family, name, op) for name, op in ops_of(family.namespace).items()]
    return "\n".join((f"## `device.{family.name}`", "", "| call | result |", "|---|---|", *rows, ""))


def row(family: Family, name: str, op: type[FamilyOp[Any]]) -> str:
    """Return one op's row: how it is called, and the first line of its documentation."""
    call = family.name if name == "__call__" else f"{family.name}.{name}"
    summary = (inspect.getdoc(op) or "").partition("\n")[0]
    summary = re.sub(r" ?See :class:[^.]*\.", "", summary).replace("``", "`")
    return f"| `device.{call}({', '.join(parameters(getattr(family.namespace, name)))})` | {summary} |"


def parameters(method: Any) -> list[str]:
    """Return a method's parameters with their defaults; ``timeout`` is every op's."""
    words: list[str] = []
    is_keyword = False
    for name, parameter in inspect.signature(method).parameters.items():
        if name in ("self", "timeout"):
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            words.append(f"*{name}")
            is_keyword = True
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            words.append("*")
            is_keyword = True
        default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
        words.append(name if default is parameter.empty else f"{name}={default!r}")
    return words


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
