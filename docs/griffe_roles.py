"""Turns the reStructuredText roles of our docstrings into links of the site, and shows ops as the dataclasses that they are.

``mkdocs.yml`` loads it as a griffe extension.

Docstrings say ``:class:`~accel.StaleRefError``` because ``help()``, editors and Sphinx inventories of other projects understand that; Markdown does not.
"""
# ruff: noqa: INP001

from __future__ import annotations

import importlib
import re
from typing import Any

from griffe import Class, Decorator, ExprName, Extension, Module, NameResolutionError, Object

__all__ = ["RolesToLinks"]

ROLE = re.compile(r":(?:py:)?(?:attr|class|const|data|exc|func|meth|mod|obj):`(~?)([^`<>]+)`")
LITERAL_BLOCK = re.compile(r"::(?=\n\n[ ]{4})")


class RolesToLinks(Extension):
    """Rewrites each docstring once its object is complete."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the roles and literal blocks of one docstring."""
        if obj.docstring is not None:
            text = ROLE.sub(lambda match: link(obj, match[2], short=bool(match[1])), obj.docstring.value)
            obj.docstring.value = LITERAL_BLOCK.sub(":", text).removeprefix(":\n").replace("\n\n:\n\n", "\n\n")

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Let griffe see what ``accel.ops`` exports, which it gathers from its modules."""
        if "ops" in pkg.members:
            pkg["ops"].exports = importlib.import_module("accel.ops").__all__

    def on_class_instance(self, *, cls: Class, **kwargs: Any) -> None:
        """Let griffe see a dataclass in a class that ``accel.ops.op`` makes one."""
        if any(str(decorator.value).startswith("op(") for decorator in cls.decorators):
            cls.decorators.append(Decorator(ExprName("dataclasses.dataclass"), lineno=None, endlineno=None))


def link(obj: Object, name: str, *, short: bool) -> str:
    """Return the link for ``name`` as it is seen from ``obj``; it stays plain code where the site has no such name."""
    first, _, rest = name.partition(".")
    try:
        path = ".".join(filter(None, (obj.resolve(first), rest)))
    except NameResolutionError:
        path = name
    title = name.rpartition(".")[2] if short else name
    return f'<autoref identifier="{path}" optional><code>{title}</code></autoref>'
