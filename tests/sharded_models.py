"""Models of several ranks for tests: plain objects with ``open`` and ``run``, which a child process can import."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import accel
    from accel.models import ModelGroup

SPLIT = {"up": 1, "bias": 0, "down": 0}
KILL, HANG, RAISE, ONE = 666.0, 667.0, 668.0, 669.0
"""Values of an input with which the last rank ends its process, or hangs, all ranks raise, or the last one alone."""


class Mlp:
    """Two layers: each rank has a part of the hidden units, and the answer is the sum over the ranks; ``version`` is one more weight."""

    def __init__(self, group: ModelGroup) -> None:
        self._group = group

    def open(self, weights: Mapping[str, accel.Operand], *_: Any) -> None:
        self._weights = {name: np.asarray(each) for name, each in weights.items()}

    def run(self, inputs: Mapping[str, accel.Operand]) -> dict[str, np.ndarray[Any, Any]]:
        x, is_last = np.asarray(inputs["x"]), self._group.rank == self._group.size - 1
        if (x == KILL).any() and is_last:
            os.kill(os.getpid(), signal.SIGSEGV)
        if (x == HANG).any() and is_last:
            threading.Event().wait()
        if (x == RAISE).any() or ((x == ONE).any() and is_last):
            raise ArithmeticError("the model raised this")
        part = np.tanh(x @ self._weights["up"] + self._weights["bias"]) @ self._weights["down"]
        y: np.ndarray[Any, Any] = self._group.all_reduce(part)
        return {"y": y, "version": np.full(len(x), self._weights["version"])}


def weights(version: int = 1) -> dict[str, np.ndarray[Any, Any]]:
    """Return weights of 5 inputs, 16 hidden units and 3 outputs."""
    rng = np.random.default_rng(version)
    shapes = {"up": (5, 16), "bias": (16,), "down": (16, 3)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()} | {"version": np.array(version)}


def answer(x: np.ndarray[Any, Any], version: int = 1) -> np.ndarray[Any, Any]:
    """Return ``y`` as one process computes it."""
    given = weights(version)
    y: np.ndarray[Any, Any] = np.tanh(x @ given["up"] + given["bias"]) @ given["down"]
    return y


class Slow(Mlp):
    """One that takes its time to be made ready together with the others."""

    def warm(self, inputs: Mapping[str, Any]) -> None:
        if self._group.launcher is not None:
            time.sleep(0.5)
