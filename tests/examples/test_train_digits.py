"""The training example: through a fault, and through the death of the process that computes, with the losses of a run that met neither."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.cli.digits import load_digits
from accel.testing import FaultPlan
from tests.examples.test_examples import run_example
from tests.program_support import ROOT

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.usefixtures("nothing_left")

_STEPS, _FAULT = 12, 5


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_digits", ROOT / "examples" / "train_digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "STEPS", _STEPS)
    return module


async def trained(example: Any, batches: Any, start: Any, **options: Any) -> tuple[Any, dict[int, float], int]:
    async with accel.System() as system:
        device = await system.open_device("cpu", **options)
        state, losses = await example.train(device, load_digits(), batches, start)
        return await device.get(state), losses, device.generation


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_fault_at_the_write_of_a_state_changes_no_loss(example: Any, rng: np.random.Generator, host: str) -> None:
    start = example.initial(rng)
    batches = rng.integers(0, 1000, (_STEPS, example.BATCH))
    state, losses, _ = await trained(example, batches, start)
    faults, place = FaultPlan(), 2 * _FAULT + 2
    faults = faults.poison_at(place, op="concatenate") if host == "inline" else faults.kill_host_at(place, op="concatenate")
    other, found, generation = await trained(example, batches, start, host=host, faults=faults)
    assert generation == 2
    assert faults.fired == 1
    np.testing.assert_array_equal(other, state)
    assert found == losses
    assert state[-1] == _STEPS


def test_it_learns_as_torch_does() -> None:
    done = run_example("train_digits.py", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done
    fault, learnt, *compared = done.stdout.splitlines()
    assert fault.startswith("a fault in step 100: the states hold steps [100, -1]"), done.stdout
    assert "accuracy" in learnt
    assert len(compared) == 1, "torch is installed where tests run"
