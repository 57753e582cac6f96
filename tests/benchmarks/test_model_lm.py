"""The benchmark of a causal language model, with the small one: its comparisons with the module by hand are what is tested."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from benchmarks import model_lm

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.slow
async def test_a_served_language_model_gives_the_logits_of_the_module_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    parameters = model_lm.make(path, model_lm.SHAPES["cpu"])
    assert parameters > 100_000
    found = await model_lm.measured(path, argparse.Namespace(backend="cpu", seconds=0.01, rounds=1))
    assert set(found["buckets"]) == {"1x16", "1x32", "4x16", "4x32"}
    assert found["compared"]["logits_differ_by"] < 1e-4
    assert 0 < found["killed"]["remap_s"] <= found["killed"]["first_answer_s"]


def test_ids_behind_the_last_one_change_no_logits(rng: np.random.Generator) -> None:
    shape = model_lm.SHAPES["cpu"]
    module = model_lm.build(shape).eval()
    ids, last = model_lm.batch_of(shape, 4, 32, rng)
    others = np.where(np.arange(32) > last[:, None], rng.integers(1, shape.vocabulary, ids.shape), ids)
    found, again = (model_lm.eager(module, "cpu")(each, last) for each in (ids, others))
    assert not np.array_equal(ids, others)
    np.testing.assert_allclose(found, again, atol=1e-5)
    changed = ids.copy()
    changed[:, 0] += 1
    assert not np.allclose(model_lm.eager(module, "cpu")(changed % shape.vocabulary, last), found, atol=1e-3)
    assert torch.isfinite(torch.from_numpy(found)).all()
