"""Loads that must fail, beside a model that serves: hostile and damaged files, unknown ops, weights of another model. Each costs itself alone."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from benchmarks.chaos_parts.clients import ask
from benchmarks.chaos_parts.oracle import WrongAnswerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.chaos_parts.oracle import Ledger
    from benchmarks.chaos_parts.subject import Subject

__all__ = ["BadLoads", "makers"]

_EVERY = 3.0
"""Seconds between two loads, on average."""
_REFUSALS = (accel.InvalidArgumentError, accel.OutOfMemoryError, accel.UnsupportedError, accel.LibraryError, accel.BackendUnavailableError)


class BadLoads:
    """Loads files into a device that serves, each of which is to be refused.

    Parameters
    ----------
    subject
        The device.
    ledger
        Where requests are entered.
    seed
        Of the run.
    target, inputs, buckets
        Of the model that serves, for which weights are damaged.
    """

    def __init__(self, subject: Subject, ledger: Ledger, seed: int, target: Any, **model: Any) -> None:
        self._subject = subject
        self._ledger = ledger
        self._seed = seed
        self._target = target
        self._model = model

    async def run(self, stop: asyncio.Event) -> None:
        """Load one file after the other, until told to stop."""
        draw = random.Random(f"{self._seed} bad loads")
        with tempfile.TemporaryDirectory() as folder:
            while not stop.is_set():
                with_weights = draw.random() < 0.2
                path = None if with_weights else draw.choice(makers())(Path(folder), draw)
                await ask(self._ledger, self._ledger.begin("bad load", self._subject), self.load(path))
                if path is not None:
                    path.unlink()
                try:
                    async with asyncio.timeout(_EVERY * draw.uniform(0.5, 1.5)):
                        await stop.wait()
                except TimeoutError:
                    continue

    async def load(self, path: Path | None) -> None:
        """Load a file, or the weights of another model, which must be refused."""
        device = self._subject.device
        try:
            if path is not None and path.suffix == ".onnx":
                await device.load_model(path)
            else:
                weights: Any = {"other": np.zeros(3, np.float32)} if path is None else path
                await device.load_model(self._target, weights=weights, **self._model)
        except _REFUSALS as error:
            if error.is_fault:
                raise
            return
        raise WrongAnswerError(f"{'weights of another model were' if path is None else f'{path.name} was'} loaded")


def makers() -> list[Callable[[Path, random.Random], Path]]:
    """Return functions that write a file, one kind each, of those that can be written here."""
    has_onnx = importlib.util.find_spec("onnx") is not None and importlib.util.find_spec("onnxruntime") is not None
    return [_torn, _huge, _code, _endless, *([_unknown_op, _wide] if has_onnx else [])]


def _safetensors(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def _torn(folder: Path, draw: random.Random) -> Path:
    header = {"a": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}}
    path = _safetensors(folder / "torn.safetensors", header, bytes(400))
    os.truncate(path, draw.randrange(path.stat().st_size))
    return path


def _huge(folder: Path, draw: random.Random) -> Path:
    """Write a file of 1 TiB that takes nothing of the disk."""
    path = _safetensors(folder / "huge.safetensors", {"a": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}, b"")
    os.truncate(path, path.stat().st_size + (1 << 40))
    return path


def _code(folder: Path, draw: random.Random) -> Path:
    """Write a state dict that would run something."""
    path = folder / "code.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", b"cos\nabort\n)R.")
    return path


def _endless(folder: Path, draw: random.Random) -> Path:
    path = folder / draw.choice(["endless.onnx", "endless.pt", "endless.safetensors"])
    path.symlink_to("/dev/zero")
    return path


def _onnx(path: Path, op: str, columns: int) -> Path:
    from onnx import TensorProto, helper

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", columns]) for name in "xy"]
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], "bad", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def _unknown_op(folder: Path, draw: random.Random) -> Path:
    return _onnx(folder / "unknown.onnx", "NoSuchOp", 4)


def _wide(folder: Path, draw: random.Random) -> Path:
    """Write a model whose input takes 1 TiB a row."""
    return _onnx(folder / "wide.onnx", "Identity", 1 << 38)
