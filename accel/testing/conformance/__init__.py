"""The conformance suite: what every backend must do, as plain async functions that any test runner can call.

::

    @pytest.mark.parametrize("check", conformance.checks(), ids=lambda check: check.name)
    async def test_conformance(check: conformance.Check) -> None:
        await check.run(conformance.Harness(MyBackend()))

A check passes by returning and fails by raising :class:`AssertionError` (or whatever the backend raised). Inputs are random and fresh; the seed is in
every message, and ``Harness(backend, seed=...)`` repeats a run.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from accel.errors import InvalidArgumentError
from accel.ops.families import FAMILIES
from accel.testing.conformance.families import check_samples
from accel.testing.conformance.harness import Case, Harness

if TYPE_CHECKING:
    from accel.ops import Family

__all__ = ["LEVELS", "Case", "Check", "Harness", "checks"]

_MODULES: dict[str, tuple[str, ...]] = {
    "compute": ("compute_memory", "compute_arguments", "compute_calls"),
    "streams": ("streams",),
    "device": ("device_ops", "device_order", "device_status", "device_faults", "device_durable"),
}

LEVELS: tuple[str, ...] = (*_MODULES, "families")
"""What can be checked, from the lowest layer up."""

_PREFIX = "check_"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a backend must do.

    Parameters
    ----------
    name
        Unique name, such as ``"compute.gemm_transposes"``.
    level
        One of :data:`LEVELS`.
    run
        ``await run(harness)`` checks it. It blocks the loop while the backend computes.
    """

    name: str
    level: str
    run: Callable[[Harness], Awaitable[None]]


def checks(level: str | None = None, families: Iterable[Family] = FAMILIES) -> tuple[Check, ...]:
    """Return all checks, or those of one level, in a fixed order.

    Parameters
    ----------
    level
        One of :data:`LEVELS`.
    families
        Whose samples are checked, at the level ``"families"``, by one check each.

    Raises
    ------
    InvalidArgumentError
        If there is no such level.
    """
    if level is not None and level not in LEVELS:
        raise InvalidArgumentError(f"there is no level {level!r}", remedy=f"Use one of {', '.join(LEVELS)}.")
    found = []
    for each in LEVELS if level is None else (level,):
        for module in _MODULES.get(each, ()):
            members = vars(importlib.import_module(f"{__name__}.{module}"))
            found += [Check(f"{each}.{name.removeprefix(_PREFIX)}", each, run) for name, run in members.items() if name.startswith(_PREFIX)]
    if level in (None, "families"):
        found += [Check(f"families.{family.name}", "families", partial(check_samples, family=family)) for family in families]
    return tuple(found)
