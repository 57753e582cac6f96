"""P38: what an op costs the host beside PyTorch's, awaited and in batches, and how many products a loop keeps going."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from accel import System, UnsupportedError
from accel.cli.bench.cases import OURS
from accel.cli.bench.measure import awaited, called
from benchmarks.cases.mixed import SIZES, Block, matrices_of
from benchmarks.cuda_cases.families import data_of, tensor_of
from benchmarks.cuda_cases.mixed import STREAMS, TORCH_POOL
from benchmarks.cuda_cases.rig import TORCH_QUERY
from benchmarks.measures import hold_worst, together

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel import AccelRef, Batch, Device
    from accel.cli.bench.measure import Meter
    from accel.cli.bench.suite import Bench
    from benchmarks.cuda_cases.family_lines import Operand
    from benchmarks.cuda_cases.others import TorchWays
    from benchmarks.cuda_cases.rig import Rig

__all__ = ["OPS", "Twin", "host_cost"]

_PASSES = 3
_TASKS = 8
_SMALL = 64
"""Side of the products of which the loop, not the device, limits the rate."""
_TORCH_SYNC = "PyTorch, then synchronize"


class Twin(NamedTuple):
    """One op, ours and PyTorch's.

    Attributes
    ----------
    operands
        Shapes and dtypes.
    ours
        The call, given a device or a batch, and refs.
    theirs
        The call, given the module ``torch`` and tensors.
    """

    operands: tuple[Operand, ...]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]


_ROWS = ((256, 1024), "float32")
_SQUARE = ((256, 256), "float32")
_HEADS = ((8, 16, 512, 64), "bfloat16")

OPS: dict[str, Twin] = {
    "add": Twin((_ROWS, _ROWS), lambda d, x, y: d.elementwise.binary("add", x, y), lambda t, x, y: x + y),
    "softmax": Twin((_ROWS,), lambda d, x: d.dnn.softmax(x), lambda t, x: t.softmax(x, 1)),
    "gemm": Twin((_SQUARE, _SQUARE), lambda d, x, y: d.blas.gemm(x, y), lambda t, x, y: x @ y),
    "attention": Twin(
        (_HEADS, _HEADS, _HEADS),
        lambda d, q, k, v: d.dnn.attention(q, k, v),
        lambda t, q, k, v: t.nn.functional.scaled_dot_product_attention(q, k, v),
    ),
    "conv2d": Twin(
        (((32, 64, 56, 56), "float16"), ((64, 64, 3, 3), "float16")),
        lambda d, x, w: d.dnn.conv2d(x, w, padding=1),
        lambda t, x, w: t.nn.functional.conv2d(x, w, padding=1),
    ),
}
_AWAITED = ("add", "softmax", "gemm", "attention")
_BATCHED = {"P38-batch": ("add", "softmax"), "P38-products": ("gemm", "attention")}


async def host_cost(rig: Rig, bench: Bench) -> None:
    """Measure all of P38. Each budget is held by the worst of its ops, and each op's ratio is the median of three passes."""
    torch = rig.torch(bench)
    if torch is None:
        raise UnsupportedError("P38 has no twin", remedy="Install PyTorch: pip install torch.")
    async with System("bench") as system:
        device = await system.open_device(bench.spec, host="inline", libraries=("blas", "dnn", "elementwise", "linalg"))
        ours, theirs = {}, {}
        for name, op in OPS.items():
            ours[name] = [await device.put(data_of(bench.rng, operand)) for operand in op.operands]
            theirs[name] = [tensor_of(torch.torch, operand) for operand in op.operands]
        cost = _HostCost(bench, device, torch, ours, theirs)
        hold_worst(bench, "P38", {name: await cost.awaited(name) for name in _AWAITED})
        for budget, names in _BATCHED.items():
            hold_worst(bench, budget, {f"{name}, {n}": await cost.batched(name, n) for name in names for n in (8, 64)})
        hold_worst(bench, "P38-dnn", {name: await cost.batched(name, 8) for name in ("conv2d", "attention")})
        hold_worst(bench, "P38-matmul", {"matmul": await cost.matmul_over_gemm()})
        hold_worst(bench, "P38-mixed", {"mixed": await cost.mixed()})
    torch.release()


class _HostCost:
    """One device and PyTorch, with the operands of all ops.

    Parameters
    ----------
    bench
        What measures.
    device, torch
        Ours and theirs.
    refs, tensors
        Operands by the name of the op.
    """

    def __init__(
        self, bench: Bench, device: Device, torch: TorchWays, refs: Mapping[str, list[AccelRef]], tensors: Mapping[str, list[Any]]
    ) -> None:
        self._bench, self._device, self._torch, self._refs, self._tensors = bench, device, torch, refs, tensors

    async def awaited(self, name: str) -> float:
        """Return the time of an await over PyTorch's, whose event is queried in each iteration of the loop."""
        device, count = self._device, self._bench.scale(200, 50)
        call, refs = OPS[name].ours, self._refs[name]
        theirs = self._torch.queried(self._calling(name))
        subjects = {OURS: awaited(lambda: call(device, *refs), count), TORCH_QUERY: awaited(theirs, count)}
        return await self._median_ratio(f"await {name}", subjects, lambda samples: samples.median)

    async def batched(self, name: str, ops: int) -> float:
        """Return the time of an op in a batch over that of PyTorch's, as many of which are enqueued and waited for once."""
        call, refs, theirs, torch = OPS[name].ours, self._refs[name], self._calling(name), self._torch
        count = self._bench.scale(800 // ops, 160 // ops)

        async def batch() -> None:
            recorded: Batch
            async with self._device.batch() as recorded:
                for _ in range(ops):
                    call(recorded, *refs)

        def enqueued() -> None:
            for _ in range(ops):
                theirs()
            torch.synchronize()

        subjects = {OURS: awaited(batch, count, ops), _TORCH_SYNC: called(enqueued, count, ops)}
        return await self._median_ratio(f"{name} in a batch of {ops}", subjects, lambda samples: samples.median)

    async def matmul_over_gemm(self) -> float:
        """Return the loop's time of a ``linalg.matmul`` over that of a ``blas.gemm``: small products from tasks that keep the loop busy."""
        a = await self._device.put(matrices_of(self._bench, (_SMALL,))[_SMALL])
        gemm, matmul, count = self._device.blas.gemm, self._device.linalg.matmul, self._bench.scale(200, 50)
        subjects = {"matmul": together(lambda: matmul(a, a), _TASKS, count), "gemm": together(lambda: gemm(a, a), _TASKS, count)}
        return await self._median_ratio(f"products of {_SMALL} from {_TASKS} tasks", subjects, lambda samples: 1 / samples.rate)

    async def mixed(self) -> float:
        """Return the rate of products of all sizes, from tasks that do not pause, over PyTorch's on several streams."""
        matrices = matrices_of(self._bench, SIZES)
        refs = {n: await self._device.put(matrix) for n, matrix in matrices.items()}
        gemm, seconds = self._device.blas.gemm, self._bench.scale(800, 250) / 1e3
        products = {OURS: lambda n: gemm(refs[n], refs[n]), TORCH_POOL: self._torch.products(matrices, STREAMS)}
        blocks: dict[str, Meter] = {
            name: Block(product, SIZES, _TASKS, seconds, self._bench.seed, pause=0.0) for name, product in products.items()
        }
        case = f"products of {SIZES[0]} to {SIZES[-1]} from {_TASKS} tasks without pauses"
        return await self._median_ratio(case, blocks, lambda samples: samples.rate)

    def _calling(self, name: str) -> Callable[[], object]:
        call, torch, tensors = OPS[name].theirs, self._torch.torch, self._tensors[name]
        return lambda: call(torch, *tensors)

    async def _median_ratio(self, case: str, subjects: Mapping[str, Meter], measure: Callable[[Any], float]) -> float:
        """Run both subjects in turn, pass by pass, and return the median of the passes' ratios of the first to the second."""
        ratios = []
        for turn in range(_PASSES):
            ours, theirs = (await self._bench.compare(case, subjects, rounds=1, warm_up=int(not turn))).values()
            ratios.append(measure(ours) / measure(theirs))
        return round(statistics.median(ratios), 3)
