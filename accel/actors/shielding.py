"""Closing inside a cancelled scope of anyio: the scope must not cancel the close."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

__all__ = ["shielded"]


def shielded() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which no cancel scope of anyio outside it cancels the task.

    A scope of anyio cancels a task again at each turn of the event loop. Where anyio is not imported there is no such scope, and nothing to import:
    the import would take 40 ms of each child's start.
    """
    scope = getattr(sys.modules.get("anyio"), "CancelScope", None)
    return contextlib.nullcontext() if scope is None else scope(shield=True)
