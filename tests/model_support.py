"""Models for tests: plain objects with ``open`` and ``run``, which a child process can import."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import accel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel.ops import Spec

KILL, HANG, RAISE, NAN = 666.0, 667.0, 668.0, 669.0
"""Values of an input that kill the process, hang, raise, and make a NaN."""


class Affine:
    """``tanh(x @ w + b)`` of rows, their sum, and what version the weights are of; ``version`` is one more weight."""

    def open(self, weights: Mapping[str, accel.Operand], *_: Any) -> None:
        self._weights = {name: np.asarray(each) for name, each in weights.items()}
        log = os.environ.get("ACCEL_TEST_OPENS")
        if log:
            with Path(log).open("a") as file:
                file.write(f"{os.getpid()}\n")

    def run(self, inputs: Mapping[str, accel.Operand]) -> dict[str, np.ndarray[Any, Any]]:
        x = np.asarray(inputs["x"])
        if ((x >= KILL) & (x < HANG)).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if (x == HANG).any():
            threading.Event().wait()
        if (x == RAISE).any():
            raise ArithmeticError("the model raised this")
        made = np.tanh(x @ self._weights["w"] + self._weights["b"])
        made[(x == NAN).any(axis=1)] = np.nan
        return {"y": made, "total": made.sum(axis=1), "version": np.full(len(x), self._weights["version"])}


def affine(rng: np.random.Generator, version: int = 1) -> dict[str, np.ndarray[Any, Any]]:
    """Return weights of :class:`Affine` for 5 inputs and 3 outputs."""
    w, b = rng.standard_normal((5, 3), np.float32), rng.standard_normal(3, np.float32)
    return {"w": w, "b": b, "version": np.array(version, np.int64)}


def expected(weights: dict[str, np.ndarray[Any, Any]], x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return ``y`` in double precision."""
    y: np.ndarray[Any, Any] = np.tanh(x.astype(float) @ weights["w"].astype(float) + weights["b"].astype(float))
    return y


class Mean:
    """The mean of each sequence, by its mask, and the sequence doubled: outputs that follow the length, and without weights."""

    def open(self, weights: Mapping[str, accel.Operand], *_: Any) -> None:
        assert not weights

    def run(self, inputs: Mapping[str, accel.Operand]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        ids, mask = np.asarray(inputs["ids"]), np.asarray(inputs["mask"])
        return (ids * mask).sum(axis=1) / mask.sum(axis=1).clip(1), 2 * ids


class Replaying(Affine):
    """One that says that it replays graphs; ``version`` is the bucket that was warmed last."""

    is_captured = True

    def warm(self, inputs: Mapping[str, tuple[Spec, float]]) -> None:
        self._weights["version"] = np.array(inputs["x"][0].shape[0])


class Turning:
    """Two arrays of one shape, in another order where the first element is negative."""

    def open(self, *_: Any) -> None:
        """Has no weights."""

    def run(self, inputs: Mapping[str, accel.Operand]) -> dict[str, np.ndarray[Any, Any]]:
        x = np.asarray(inputs["x"])
        made = {"half": x / 2, "double": x * 2}
        return dict(reversed(made.items())) if x.flat[0] < 0 else made


class Moody(Affine):
    """Takes as long as its weight ``seconds`` says, and raises at the items that ``raises`` is less than."""

    def run(self, inputs: Mapping[str, accel.Operand]) -> dict[str, np.ndarray[Any, Any]]:
        time.sleep(float(self._weights["seconds"]))
        if (np.asarray(inputs["x"]) > float(self._weights["raises"])).any():
            raise ArithmeticError("these weights raise")
        return super().run(inputs)


def moody(rng: np.random.Generator, version: int = 1, *, seconds: float = 0.0, raises: float = np.inf) -> dict[str, np.ndarray[Any, Any]]:
    """Return weights of :class:`Moody`."""
    return affine(rng, version) | {"seconds": np.array(seconds), "raises": np.array(raises)}


class Scribbling(Affine):
    """Writes its first weight, past what keeps arrays from being written."""

    def run(self, inputs: Mapping[str, accel.Operand]) -> dict[str, np.ndarray[Any, Any]]:
        ctypes.memset(self._weights["w"].ctypes.data, 1, 4)
        return super().run(inputs)


X = {"x": accel.TensorSpec(("batch", 5), "float32")}
SEQUENCES = {"ids": accel.TensorSpec(("batch", "length"), "int64", pad=-1), "mask": accel.TensorSpec(("batch", "length"), "float64")}
