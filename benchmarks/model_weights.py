"""The weights of a large model: from a file to the device, and into the next generation after a fault; beside safetensors alone.

``python benchmarks/model_weights.py [--backend cpu] [--gigabytes 1] [--standby none] [--json FILE]``; needs torch and safetensors. The file has random bfloat16
tensors in the shapes of a language model, and is in the system's page cache. The subjects are measured one after the other:

- safetensors alone reads the file into memory of the device (``safetensors.torch.load_file``; on the CPU with a copy, for it only maps the file);
- ``device.load_model`` loads a torch module, on either host: the time of the weights, and that until the model is there;
- the device is poisoned, or its child killed: the time until it is READY again, with the weights mapped and the module built around them.

The module returns a sum over the bits of each weight; it is compared with the file's after loading and after the fault. So are the ends of each tensor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import numpy as np

import accel
from accel.testing import FaultPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = np.ndarray[Any, Any]

GIGABYTES = "ACCEL_MODEL_WEIGHTS_GIGABYTES"
"""Environment variable by which children know the size of the model."""

BLOCK = 64 << 20
"""Random bytes that the tensors are made of."""

ENDS = 1000
"""Elements at each end of a tensor that are compared one by one."""


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model: those of Llama 3 8B for 16 GB, else narrower ones."""
    hidden = 4096 if gigabytes >= 8 else 1024
    layer = {
        "q": (hidden, hidden),
        "k": (hidden // 4, hidden),
        "v": (hidden // 4, hidden),
        "o": (hidden, hidden),
        "gate": (7 * hidden // 2, hidden),
        "up": (7 * hidden // 2, hidden),
        "down": (hidden, 7 * hidden // 2),
        "norm_1": (hidden,),
        "norm_2": (hidden,),
    }
    ends = {"embedding": (32 * hidden, hidden), "head": (32 * hidden, hidden)}
    left = gigabytes * 1e9 - sum(2 * math.prod(shape) for shape in ends.values())
    layers = max(1, round(left / sum(2 * math.prod(shape) for shape in layer.values())))
    return ends | {f"layer_{n}_{name}": shape for n in range(layers) for name, shape in layer.items()}


def build() -> Any:
    """Return a module with a parameter for each tensor, whose forward returns the sum of the words of 64 bits of each, for each row of the input."""
    import torch

    class Sums(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in shapes(float(os.environ[GIGABYTES])).items():
                self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)))

        def forward(self, x: Any) -> Any:
            sums = [each.view(torch.int64).sum() for each in self.parameters()]
            return x + torch.stack(sums)

    return Sums()


def make(path: Path, gigabytes: float) -> dict[str, int]:
    """Write the file, and return the sum of each tensor's words of 64 bits.

    A tensor has its number as the first word, and behind it the block, begun at a place of its own, again and again.
    """
    block = np.random.default_rng().integers(0, 256, BLOCK, np.uint8).view(np.int64)
    upto = np.concatenate([[0], block.cumsum()])
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes(gigabytes).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    sums: dict[str, np.int64] = {}  # they wrap around, as torch's do
    with path.open("wb") as file, np.errstate(over="ignore"):
        file.write(len(text).to_bytes(8, "little") + text)
        for number, (name, shape) in enumerate(shapes(gigabytes).items()):
            file.write(np.int64(number).tobytes())
            sums[name], left, place = np.int64(number), math.prod(shape) // 4 - 1, number * 7919 % len(block)
            while left:
                part = block[place : place + left]
                file.write(part.data)
                sums[name] += upto[place + len(part)] - upto[place]
                left, place = left - len(part), 0
    return {name: int(each) for name, each in sums.items()}


def raw(path: Path, backend: str) -> float:
    """Return the seconds in which safetensors loads the file alone."""
    import torch
    from safetensors.torch import load_file

    if backend == "cuda":
        torch.zeros(1, device="cuda")
    began = time.perf_counter()
    loaded = load_file(path, device=backend)
    kept = [each.clone() if backend == "cpu" else each for each in loaded.values()]
    if backend == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    del loaded, kept
    if backend == "cuda":
        torch.cuda.empty_cache()
    return took


class Shown:
    """A line that shows how far the weights are, and the time at which they were all there."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._percent = -1
        self.began = self.ended = time.perf_counter()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Be told of bytes."""
        if stage != "weights":
            return
        self.ended = time.perf_counter()
        percent = 100 * done // max(total, 1)
        if percent // 5 > self._percent // 5:
            self._percent = percent
            print(f"\r{self._name}: {done / 1e9:6.2f} of {total / 1e9:.2f} GB", end="" if done < total else "\n", flush=True)


async def check(model: accel.Model, path: Path, sums: dict[str, int]) -> None:
    """Compare what is on the device with the file."""
    found = await model.numpy(np.zeros((1, 1), np.int64))
    assert found[0].tolist() == list(sums.values()), "the sums of the bits differ"
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, ref in model.weights.items():
        begin, end = (8 + length + place for place in header[name]["data_offsets"])
        bits = np.memmap(path, np.uint8, "r", begin, (end - begin,)).view(np.int16)
        flat = ref.ravel()
        for part in (slice(0, ENDS), slice(max(len(bits) - ENDS, 0), len(bits))):
            assert np.array_equal((await model.device.get(flat[part])).view(np.int16), bits[part]), f"{name} differs"


async def loaded(path: Path, backend: str, host: Any, standby: Any, sums: dict[str, int]) -> dict[str, float]:
    """Load the model, have a fault, and return the seconds of both. An inline device on a GPU has no fault: it would take CUDA from this process."""
    name = host if host == "inline" else f"{host}, standby {standby}"
    plan = FaultPlan().poison_at(1, op="fill") if host == "inline" else None
    async with accel.System() as system:
        device = await system.open_device(backend, host=host, standby=standby, faults=plan)
        shown = Shown(name)
        model = await device.load_model(
            "benchmarks.model_weights:build", weights=path, inputs={"x": accel.TensorSpec(("batch", 1), "int64")}, on_progress=shown
        )
        ready = time.perf_counter()
        await check(model, path, sums)
        if standby == "model":
            print(f"{name}: the spare gets ready", flush=True)
            async with asyncio.timeout(120):
                assert await device.spare_ready()
        found = {"weights_s": shown.ended - shown.began, "model_s": ready - shown.began}
        began = time.perf_counter()
        if host == "inline" and backend == "cuda":
            return found
        if host == "inline":
            with contextlib.suppress(accel.ContextPoisonedError):
                await device.zeros(3)
        else:
            pid = device.info().pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        async for generation in device.generations():
            if generation == 2:
                break
        found["remap_s"] = time.perf_counter() - began
        await check(model, path, sums)
        await model.aclose()
    return found


async def compare(path: Path, backend: str, sums: dict[str, int], show: Callable[[str, dict[str, float]], None]) -> None:
    """Measure accel's hosts."""
    for host, standby in (("process", "none"), ("process", "model"), ("inline", "none")):
        show(f"accel, {host}, {standby}", await loaded(path, backend, host, standby, sums))


def main() -> None:
    """Measure, and print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gigabytes", type=float, help="of weights; without it 16 on a GPU, and 1 on the CPU")
    parser.add_argument("--json", type=Path, help="write the seconds there")
    given = parser.parse_args()
    gigabytes = given.gigabytes or (16.0 if given.backend == "cuda" else 1.0)
    os.environ[GIGABYTES] = str(gigabytes)
    rows: dict[str, dict[str, float]] = {}

    def show(name: str, row: dict[str, float]) -> None:
        rows[name] = row
        print(
            f"{name:22}", *(f"{key} {value:7.2f}" for key, value in row.items()), f"{nbytes / 1e9 / row['weights_s']:6.2f} GB/s", flush=True
        )

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        began = time.perf_counter()
        sums = make(path, gigabytes)
        nbytes = path.stat().st_size
        print(f"{len(sums)} tensors of {nbytes / 1e9:.2f} GB were written in {time.perf_counter() - began:.1f} s", flush=True)
        for turn in ("first", "second"):
            show(f"safetensors, {turn}", {"weights_s": raw(path, given.backend)})
        asyncio.run(compare(path, given.backend, sums, show))
    if given.json is not None:
        given.json.write_text(json.dumps({"backend": given.backend, "nbytes": nbytes, "seconds": rows}, indent=1))


if __name__ == "__main__":
    main()
