"""The tables of ops in ``reference/ops.md``, which ``mkdocs.yml`` has made from the families when the site is built."""
# ruff: noqa: INP001

from __future__ import annotations

import inspect
import re
from enum import Enum
from typing import TYPE_CHECKING, Any

from accel.ops.families import FAMILIES
from accel.ops.namespace import ops_of

if TYPE_CHECKING:
    from accel.ops import Family, FamilyOp

__all__ = ["on_page_markdown", "tables"]

MARK = "<!-- tables -->\n"


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Put the tables in the place of their mark."""
    return markdown.replace(MARK, tables()) if MARK in markdown else markdown


def tables() -> str:
    """Return the tables of all families."""
    return "\n".join(table(family) for family in FAMILIES)


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
