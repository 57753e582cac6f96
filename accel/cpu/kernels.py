"""Kernels that are functions of numpy arrays, as most of the CPU's are, and what their libraries cost."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from accel.cpu import costs
from accel.cpu.views import Array, array, operand
from accel.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel.backend import Kernel

__all__ = ["LateModule", "fill", "kernel", "touches"]

Compute: TypeAlias = "Callable[[Any, list[Array], list[Array]], object]"
"""``compute(op, operands, results)`` writes the results."""
Cost: TypeAlias = "Callable[[Any, list[Array], list[Array]], float]"
"""``cost(op, operands, results)`` returns the seconds that it takes; see :mod:`accel.cpu.costs`."""


def kernel(compute: Compute, cost: Cost) -> Kernel:
    """Return the kernel that lets ``compute`` write the results of an op in its stream, without numpy's warnings.

    Parameters
    ----------
    compute
        It gets views of what the op's plan reads; and of what the plan writes and creates, with the status behind them.
        Of an op whose results are all empty it is not called.
    cost
        Called when the op is enqueued. What it raises fails the op.
    """

    def enqueue(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        operands = [_view(at, ref) for at, ref in zip(inputs, plan.reads, strict=True)]
        specs = plan.creates if plan.status is None else (*plan.creates, plan.status.spec)
        count = len(plan.writes)
        results = [_view(at, ref) for at, ref in zip(outputs[:count], plan.writes, strict=True)]
        results += [_array(at, spec.shape, spec.dtype.numpy) for at, spec in zip(outputs[count:], specs, strict=False)]
        if any(result.size for result in results):
            lane.stream.submit(partial(_quietly, compute, op, operands, results), cost(op, operands, results))

    return enqueue


def touches(times: float) -> Cost:
    """Return the cost of ``times`` passes over the largest array."""

    def cost(op: Any, operands: list[Array], results: list[Array]) -> float:
        largest = results[0]
        for given in operands:
            if given.size > largest.size:
                largest = given
        return costs.elements(round(times * largest.size), largest.dtype)

    return cost


@np.errstate(all="ignore")
def _quietly(compute: Compute, op: Any, operands: list[Array], results: list[Array]) -> None:
    compute(op, operands, results)


def _view(address: int, ref: Any) -> Array:
    return np.empty(ref.shape, ref.dtype.numpy) if 0 in ref.shape else operand(address, ref)


def _array(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.empty(shape, dtype) if 0 in shape else array(address, shape, dtype)


def fill(room: Array, found: Array) -> None:
    """Write as much as there is room for, and zeros behind it."""
    room[: len(found)] = found[: len(room)]
    room[len(found) :] = 0


class LateModule:
    """A module that the first op which needs it imports, in its stream's thread: an import takes tenths of a second.

    Parameters
    ----------
    name
        Of the module.
    instead
        The module that takes its place where its package is not installed; without one, ops need the package.
    """

    def __init__(self, name: str, instead: str = "") -> None:
        self._name = name
        self._instead = instead
        self._module: Any = None

    def __call__(self) -> Any:
        """Return the module."""
        if self._module is None:
            self._module = importlib.import_module(self._name if self._is_installed else self._instead)
        return self._module

    @property
    def _is_installed(self) -> bool:
        return importlib.util.find_spec(self._name.partition(".")[0]) is not None

    def seconds(self, kind: str) -> float:
        """Return what the import adds to the cost of an op of this kind: nothing once the module is there.

        Raises
        ------
        BackendUnavailableError
            If the package is not installed, and nothing takes its place.
        """
        if self._module is not None:
            return 0.0
        if not self._instead and not self._is_installed:
            raise BackendUnavailableError(f"{kind} needs scipy on the CPU", remedy="In a checkout: pip install '.[cpu]'.")
        return _IMPORT


_IMPORT = 1.0
"""More than what sends an op to its stream's thread."""
