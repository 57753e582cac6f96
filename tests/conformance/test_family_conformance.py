"""Every op of every family gives what numpy gives: on the CPU, inline and in a child, and where results are waited for as those of hardware."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from accel import DType, ReduceOp, registry
from accel.cpu.backend import CpuBackend
from accel.cpu.families import reduce
from accel.cpu.parts import PARTS
from accel.ops.families import FAMILIES
from accel.testing.conformance import Check, checks
from accel.testing.conformance.device_harness import DeviceHarness
from accel.testing.conformance.families import check_samples
from accel.testing.conformance.harness import difference
from tests.late_backend import LateBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.backend import AccelBackend
    from accel.family import BackendPart, Sample

pytestmark = pytest.mark.usefixtures("nothing_left")


# Ops whose sizes the device finds out, ops with a status, and ops of several: what they wait for comes late where results are looked for.
_LATE = {"families.arrays", "families.solver", "families.tensor"}
_CASES = [(kind, check) for kind in ("inline", "process", "late") for check in checks("families") if kind != "late" or check.name in _LATE]


assert len([kind for kind, _ in _CASES if kind == "late"]) == len(_LATE)


def _one_of_each(part: BackendPart, rng: np.random.Generator) -> Iterator[Sample]:
    """Yield a random sample of each op."""
    samples = list(part.samples(rng))
    yield from {samples[i].name.split()[0]: samples[i] for i in rng.permutation(len(samples))}.values()


@pytest.mark.parametrize(("kind", "check"), _CASES, ids=lambda each: each if isinstance(each, str) else each.name)
async def test_family_conformance(check: Check, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")
    if kind != "inline":  # the kernels are the same: how an op travels, and what is waited for, goes by its class
        family = check.name.removeprefix("families.")
        monkeypatch.setitem(PARTS, family, replace(PARTS[family], samples=partial(_one_of_each, PARTS[family])))
    backend: AccelBackend = LateBackend() if kind == "late" else CpuBackend()
    options: dict[str, Any] = {"host": "process"} if kind == "process" else {}
    await check.run(DeviceHarness(backend, options=options))


async def test_a_sum_that_is_close_to_zero_is_as_good_as_its_terms(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    family = next(family for family in FAMILIES if family.name == "reduce")
    half = rng.standard_normal(1500).astype(np.float32)
    x = rng.permutation(np.concatenate([half, -half]))
    right = reduce._sample(ReduceOp.SUM, x, None, False, 0, DType.FLOAT32)

    async def checked(sample: Sample) -> None:
        monkeypatch.setitem(PARTS, "reduce", replace(PARTS["reduce"], samples=lambda rng: iter([sample])))
        await check_samples(DeviceHarness(CpuBackend()), family)

    await checked(right)
    with pytest.raises(AssertionError, match="1 of 1 are wrong"):
        await checked(replace(right, expected=right.expected + 0.01 * np.abs(half).max()))


def test_a_result_below_the_normal_numbers_is_rounded_to_their_spacing() -> None:
    spacing = 2.0**-24  # float16's, below 2**-14
    expected = np.array([2.4, 2.6]) * spacing
    assert not difference(np.array([2, 3], np.float16) * np.float16(spacing), expected)
    assert "2 of 2 are wrong" in difference(np.array([4, 1], np.float16) * np.float16(spacing), expected)
