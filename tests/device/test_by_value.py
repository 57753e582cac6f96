"""Models, ops and libraries of a notebook or a script, which are in ``__main__``: a child gets them by value, through its deaths."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import asyncio, os, signal, sys
import numpy as np
import accel

if "refused" in sys.argv:
    sys.modules["cloudpickle"] = None
SCALE = 3.0

class Twice:
    def open(self, weights, *_): pass
    def run(self, inputs): return {"y": SCALE * np.asarray(inputs["x"])}

@accel.kernel_op(like="x")
def scaled(out: accel.Operand, x: accel.AccelRef) -> None:
    np.copyto(np.asarray(out), SCALE * np.asarray(x))

@accel.ops.op("own")
class Plus(accel.KernelOp):
    x: accel.AccelRef
    by: float = 1.0
    def plan(self): return accel.ops.Plan((self.x,), (), (accel.ops.Spec(self.x.shape, self.x.dtype),))

class Own(accel.KernelLibrary):
    name = "own"
    def open(self, stream): pass
    @accel.kernel(Plus)
    def plus(self, op, stream, inputs, outputs):
        np.copyto(np.asarray(outputs[0]), np.asarray(inputs[0]) + op.by)

async def main():
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="model" if "spare" in sys.argv else "none")

        async def told(found):
            try:
                print(*(await device.get(await found())))
            except accel.UnsupportedError as error:
                print(error)

        async def library():
            await device.register(Own)
            return await added()

        async def model():
            inputs = {"x": accel.TensorSpec(("batch", 2), "float32")}
            loaded["model"] = await device.load_model(Twice, weights={}, inputs=inputs, buckets={"batch": (1,)})
            return await asked()

        async def function(): return await device.run(scaled(await device.put([1.0])))
        async def added(): return await device.run(Plus(await device.put([1.0]), 4.0))
        async def asked(): return (await loaded["model"](np.ones((1, 2), np.float32)))["y"]

        loaded = {}
        for found in function, library, model:
            await told(found)
        if "refused" not in sys.argv:
            await device.spare_ready() if "spare" in sys.argv else None
            os.kill(device.info().pid, signal.SIGKILL)
            async for generation in device.generations():
                if generation == 2: break
            for found in function, added, asked:
                await told(found)

if __name__ == "__main__":
    asyncio.run(main())
"""


def run(tmp_path: Path, *words: str) -> list[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "program.py", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("words", [(), ("spare",)], ids=["no spare", "spare"])
def test_what_is_in_main_works_in_a_child_and_in_the_next_one(words: tuple[str, ...], tmp_path: Path) -> None:
    assert run(tmp_path, *words) == ["3.0", "5.0", "[3. 3.]"] * 2


def test_without_cloudpickle_it_is_refused_in_a_line_that_says_what_to_install(tmp_path: Path) -> None:
    lines = run(tmp_path, "refused")
    assert len(lines) == 3
    for line, name in zip(lines, ("op=scaled", "library 'own'", "library 'model"), strict=True):
        assert name in line
        assert "what is in __main__ is not found in another process" in line
        assert "'script:Model', behind a main guard" in line
        assert "pip install '.[notebook]'" in line
