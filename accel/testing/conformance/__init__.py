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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from accel.errors import InvalidArgumentError
from accel.testing.conformance.harness import Case, Harness

__all__ = ["LEVELS", "Case", "Check", "Harness", "checks"]

_MODULES: dict[str, tuple[str, ...]] = {
    "compute": ("compute_memory", "compute_arguments", "compute_gemm", "compute_elementwise", "compute_reduce", "compute_dnn"),
    "streams": ("streams",),
    "device": ("device_ops", "device_order", "device_faults", "device_durable"),
}

LEVELS: tuple[str, ...] = tuple(_MODULES)
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


def checks(level: str | None = None) -> tuple[Check, ...]:
    """Return all checks, or those of one level, in a fixed order.

    Raises
    ------
    InvalidArgumentError
        If there is no such level.
    """
    if level is not None and level not in _MODULES:
        raise InvalidArgumentError(f"there is no level {level!r}", remedy=f"Use one of {', '.join(LEVELS)}.")
    found = []
    for each in LEVELS if level is None else (level,):
        for module in _MODULES[each]:
            members = vars(importlib.import_module(f"{__name__}.{module}"))
            found += [Check(f"{each}.{name.removeprefix(_PREFIX)}", each, run) for name, run in members.items() if name.startswith(_PREFIX)]
    return tuple(found)
