"""Model and program in one file: with a main guard it works; without, what imports the file for the model says what to write, and runs the program once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import accel
from accel.actors import ActorSystem
from accel.process.child import ChildProcess
from tests.child_support import no_child_left, received

__all__ = ["no_child_left"]

ROOT = Path(__file__).resolve().parents[2]
GUARD = 'if __name__ == "__main__":'

PROGRAM = """
import asyncio, json, os
import numpy as np
import accel

class Twice:
    def open(self, weights, *_): pass
    def run(self, inputs): return {"y": np.asarray(inputs["x"]) * 2}

async def main():
    depth = int(os.environ.get("DEPTH", "0"))
    os.environ["DEPTH"] = str(depth + 1)
    if depth > 1:  # of an endless tree
        os._exit(9)
    async with accel.System() as system:
        device = await system.open_device("cpu", **json.loads(os.environ["HOSTING"]))
        try:
            model = await device.load_model("program:Twice", weights={}, inputs={"x": accel.TensorSpec(("batch", 4), "float32")}, buckets={"batch": (1,)})
            print((await model.numpy(np.full((1, 4), 3, "f4")))["y"].tolist())
        except accel.AccelError as error:
            print(type(error).__name__, error)

"""


def run(text: str, hosting: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(text)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOSTING": json.dumps(hosting)}
    return subprocess.run([sys.executable, "program.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_a_program_with_a_guard_loads_a_model_of_its_own_by_name(tmp_path: Path) -> None:
    done = run(f"{PROGRAM}{GUARD}\n    asyncio.run(main())\n", {"host": "process"}, tmp_path)
    assert (done.stdout, done.returncode) == ("[[6.0, 6.0, 6.0, 6.0]]\n", 0), done


@pytest.mark.parametrize("hosting", [{"host": "process"}, {"host": "auto", "standby": "model"}], ids=["process", "inline"])
def test_program_that_a_model_is_imported_from_is_not_run_again(hosting: dict[str, str], tmp_path: Path) -> None:
    done = run(PROGRAM + "asyncio.run(main())\n", hosting, tmp_path)
    assert done.stdout.startswith("UnsupportedError a device is opened while accel imports module program"), done
    assert str(tmp_path / "program.py") in done.stdout
    assert GUARD in done.stdout


async def test_module_that_ends_the_program_when_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "served_and_gone.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        with pytest.raises(accel.LibraryError, match=r"importing served_and_gone ended the program: SystemExit\(3\)") as caught:
            await device.load_model("served_and_gone:Model", inputs={"x": accel.TensorSpec(("batch", 4), "float32")})
    assert GUARD in str(caught.value)


@pytest.mark.usefixtures("no_child_left")
async def test_child_starts_no_children() -> None:
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, "tests.child_programs:starts_a_child")
        kind, text = json.loads(await received(child))
        await child.aclose()
    assert kind == "UnsupportedError"
    assert GUARD in text
