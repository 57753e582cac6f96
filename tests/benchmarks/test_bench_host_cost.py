"""P38's case, run on the CPU backend beside PyTorch on the CPU: that it judges what it measures, not what that is."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from accel import DType, System, UnsupportedError
from accel.cli.bench.cases import OURS
from accel.cli.bench.report import Report
from accel.cli.bench.suite import Bench
from benchmarks.cuda_cases import host_cost
from benchmarks.cuda_cases.rig import TORCH_QUERY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator


BUDGETS = {"P38", "P38-batch", "P38-products", "P38-dnn", "P38-matmul", "P38-mixed"}
SMALL: dict[str, tuple[Any, ...]] = {
    "add": (((4, 8), "float32"),) * 2,
    "softmax": (((4, 8), "float32"),),
    "gemm": (((8, 8), "float32"),) * 2,
    "attention": (((1, 2, 8, 16), "bfloat16"),) * 3,
    "conv2d": (((1, 2, 8, 8), "float16"), ((2, 2, 3, 3), "float16")),
}


def on_the_cpu(torch: Any, operand: Any) -> Any:
    shape, dtype = operand
    return torch.from_numpy(np.random.default_rng(5).standard_normal(shape, np.float32)).to(getattr(torch, dtype))


class TorchOnCpu:
    """What the case needs of :class:`benchmarks.cuda_cases.others.TorchWays`."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def queried(self, launch: Callable[[], object]) -> Callable[[], Awaitable[None]]:
        async def op() -> None:
            launch()
            await asyncio.sleep(0)

        return op

    def products(self, matrices: object, streams: int) -> Callable[[int], Awaitable[None]]:
        return lambda n: asyncio.sleep(1e-3 / streams)

    def synchronize(self) -> None: ...

    def release(self) -> None: ...


def rig(torch: Any) -> Any:
    return SimpleNamespace(torch=lambda bench: torch)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(Bench, "scale", lambda self, full, quick: 2)
    return Bench(Report({}))


@pytest.fixture
def small_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The ops of P38 on small operands, and PyTorch on the CPU."""
    torch = pytest.importorskip("torch")
    gc.freeze()  # as a rig does: PyTorch alone brings a million objects
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(host_cost, "OPS", {name: op._replace(operands=SMALL[name]) for name, op in host_cost.OPS.items()})
    monkeypatch.setattr(host_cost, "SIZES", (8, 16))
    monkeypatch.setattr(host_cost, "tensor_of", on_the_cpu)
    yield torch
    torch.set_num_threads(threads)
    gc.freeze()


async def test_the_cost_of_each_op_is_told_beside_pytorchs(bench: Bench, small_ops: Any) -> None:
    await host_cost.host_cost(rig(TorchOnCpu(small_ops)), bench)
    ratios = bench.report.ratios
    assert set(ratios) == BUDGETS
    assert set(ratios["P38"].details["ratios"]) == {"add", "softmax", "gemm", "attention"}
    assert set(ratios["P38-batch"].details["ratios"]) == {f"{name}, {n}" for name in ("add", "softmax") for n in (8, 64)}
    assert set(ratios["P38-products"].details["ratios"]) == {f"{name}, {n}" for name in ("gemm", "attention") for n in (8, 64)}
    assert set(ratios["P38-dnn"].details["ratios"]) == {"conv2d", "attention"}
    for name, ratio in ratios.items():
        each = ratio.details["ratios"].values()
        assert ratio.value == (min if name == "P38-mixed" else max)(each)
    rows = {(row.case, row.subject) for row in bench.report.rows}
    assert {("await add", OURS), ("await add", TORCH_QUERY), ("conv2d in a batch of 8", OURS)} <= rows
    with pytest.raises(UnsupportedError, match="pip install torch"):
        await host_cost.host_cost(rig(None), bench)


async def test_both_compute_the_same(small_ops: Any) -> None:
    async with System("bench") as system:
        device = await system.open_device("cpu")
        for name, op in host_cost.OPS.items():
            tensors = [on_the_cpu(small_ops, operand) for operand in op.operands]
            arrays = [tensor.float().numpy().astype(DType.of(dtype).numpy) for tensor, (_, dtype) in zip(tensors, op.operands, strict=True)]
            ours = await device.get(await op.ours(device, *[await device.put(array) for array in arrays]))
            theirs = op.theirs(small_ops, *tensors).float().numpy()
            np.testing.assert_allclose(ours.astype(np.float32), theirs, rtol=2e-2, atol=2e-2, err_msg=name)
