"""Ops on arrays copy nothing to or from the host but the status that they declare, and need neither torch nor CuPy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import accel
from accel.cpu.parts import PARTS
from accel.ops import SizedOp
from accel.ops.families import FAMILIES
from accel_cuda.core.host_copies import HostCopies

if TYPE_CHECKING:
    import numpy as np

    from accel.family import Sample
    from accel.ops import Family

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

ARRAYS = [
    family for family in FAMILIES if family.name in ("elementwise", "reduce", "arrays", "scan", "sort", "linalg", "tensor", "blas", "dnn")
]


def first_samples(family: Family, rng: np.random.Generator) -> dict[str, Sample]:
    """Return a sample of each op that has elements."""
    found: dict[str, Sample] = {}
    for sample in PARTS[family.name].samples(rng):
        expected = sample.expected if isinstance(sample.expected, tuple) else (sample.expected,)
        if all(each.size for each in (*sample.operands, *expected)):
            found.setdefault(sample.name.split()[0], sample)
    return found


def expected(family: Family, kind: str) -> list[int]:
    """Return the bytes of the copies of an op: of its status, or of the number of what it has found."""
    if issubclass(next(op for op in family.ops if op.kind == kind), SizedOp):
        return [8]
    return (
        [16] if kind in ("take", "take_along_axis", "put_along_axis", "scatter_add", "bincount", "segment_reduce", "segment_sort") else []
    )


@pytest.mark.parametrize("family", ARRAYS, ids=lambda family: family.name)
async def test_ops_copy_nothing_but_their_status(family: Family, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    copies: list[int] = []
    copy = HostCopies.run

    def counted(self: HostCopies, device: int, host: int, nbytes: int, keep: memoryview, *, is_put: bool) -> None:
        copies.append(nbytes)
        copy(self, device, host, nbytes, keep, is_put=is_put)

    monkeypatch.setattr(HostCopies, "run", counted)
    async with accel.System() as system:
        device = await system.open_device("cuda", host="inline")  # in a child, copies would be counted there
        for kind, sample in first_samples(family, rng).items():
            refs = [await device.put(array) for array in sample.operands]
            assert copies or not refs, "puts are counted"
            copies.clear()
            await sample.call(device.family(family.namespace), *refs)
            assert copies == expected(family, kind), kind
