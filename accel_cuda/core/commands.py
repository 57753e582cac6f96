"""How many commands an op puts into a stream, of those ops that are of no family.

A stream takes 1,021 commands that have not run; enqueuing more blocks until one has (``benchmarks/records/driver.md``), and hot calls keep the GIL while
they wait. So the layers above bound the sum over the ops in flight. Kernels, copies and graphs count one each, whatever is in the graph; marks count nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_cuda.core.transfers import STAGED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cuda.core.family import Commands

__all__ = ["COMMANDS", "QUEUE_LIMIT"]

QUEUE_LIMIT = 900
"""Commands in flight at which no further op is sent: what a stream takes, less room for one op."""

_PIECES = 16
"""Transfers of a large copy that are in a stream at the same time: two for each of its eight threads."""


def _of_put(op: Any) -> int:
    return 1 if op.source.nbytes <= STAGED else _PIECES


def _of_get(op: Any) -> int:
    return 1 if op.destination.nbytes <= STAGED else _PIECES


def _of_call(op: Any) -> int:
    return 1 + len(op.inputs) + len(op.results)


COMMANDS: Mapping[tuple[str, str], Commands] = {("memory", "put"): _of_put, ("memory", "get"): _of_get, ("graph", "call"): _of_call}
"""Library and op kind -> its commands at most, or how they are counted; all others are one."""
