"""P17: the ops of each family beside PyTorch's, at three sizes: how long the device takes for one, and how long an await of one takes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from accel import AccelError, DType, System, UnsupportedError
from accel.cli.bench.cases import OURS
from accel.cli.bench.measure import Samples, awaited, called
from benchmarks.cuda_cases.family_lines import LINES
from benchmarks.cuda_cases.rig import INSTALL_TWINS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel import AccelRef, Device
    from accel.cli.bench.suite import Bench
    from benchmarks.cuda_cases.family_lines import Line, Operand, Size
    from benchmarks.cuda_cases.rig import Rig

__all__ = ["data_of", "families", "tensor_of"]

TORCH = "PyTorch"
_SIZES = ("small", "typical", "large")
_PATIENCE = 150.0
"""Seconds after which no further line is begun."""
_FEW, _MANY = 2, 18
_LARGE = 1 << 26
_KIBI = 1 << 10


async def families(rig: Rig, bench: Bench) -> None:
    """Measure every line. The budget is held by the family whose large op does worst beside PyTorch's."""
    torch = rig.torch(bench)
    ratios: dict[str, float] = {}
    began = time.perf_counter()
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        for line in LINES:
            for label, size in zip(_SIZES, line.sizes, strict=True):
                name = f"{line.family} {line.what} {'x'.join(map(str, size))}"
                if time.perf_counter() - began > _PATIENCE:
                    bench.report.skipped[name] = f"not begun after {_PATIENCE:g} s"
                    continue
                try:
                    ratio = await _Measured(bench, device, line, size, None if torch is None else torch.torch).compare(
                        name, is_large=label == _SIZES[-1]
                    )
                except UnsupportedError as error:
                    bench.report.skipped[name] = str(error)
                    break
                except AccelError as error:  # the other lines are measured all the same
                    bench.report.failures[name] = str(error)
                    continue
                if ratio is not None and label == _SIZES[-1]:
                    ratios[name] = round(ratio, 3)
    if not ratios:
        raise UnsupportedError("P17 has no twin", remedy=INSTALL_TWINS)
    bench.report.hold("P17", min(ratios.values()), large=ratios)


class _Slope(NamedTuple):
    """The shortest runs of a few ops, and of many, in seconds."""

    few: float
    many: float


class _Measured:
    """One line at one size.

    Parameters
    ----------
    bench
        What measures.
    device
        Ours.
    line, size
        What is measured.
    torch
        The module, or ``None``.
    """

    def __init__(self, bench: Bench, device: Device, line: Line, size: Size, torch: Any) -> None:
        self._bench, self._device, self._line, self._torch = bench, device, line, torch
        self._operands = line.operands(*size)
        self._refs: list[AccelRef] = []
        self._tensors: list[Any] = []
        nbytes = sum(_nbytes(each) for each in self._operands)
        self._many = _MANY if nbytes < _LARGE else _FEW + 3

    async def compare(self, name: str, *, is_large: bool) -> float | None:
        """Add the rows of ours and theirs; return how many times as fast the device is with ours."""
        bench = self._bench
        rng = bench.rng
        for operand in self._operands:
            self._refs.append(await self._device.put(data_of(rng, operand)))
        slopes = {OURS: [await self._ours()]}
        subjects = {OURS: awaited(self._await_one, bench.scale(10, 4))}
        if self._torch is not None:
            try:
                self._tensors = [tensor_of(self._torch, each) for each in self._operands]
                slopes[TORCH] = [await self._theirs()]
                if is_large:  # a GPU that has been idle computes more slowly at first: each is measured after the other one too
                    slopes = {OURS: [*slopes[OURS], await self._ours()], TORCH: [*slopes[TORCH], await self._theirs()]}
                subjects[TORCH] = called(self._wait_for_one, bench.scale(10, 4))
            except (RuntimeError, AttributeError, TypeError) as error:  # this release of PyTorch has it not, or otherwise
                bench.report.skipped[f"{TORCH}, {name}"] = str(error)
        await bench.compare(f"{name}, awaited", subjects, rounds=bench.scale(3, 2))
        device_time = {subject: self._of_one(found) for subject, found in slopes.items()}
        for subject, seconds in device_time.items():
            samples = Samples()
            samples.add(seconds)
            bench.report.add(f"{name}, device", subject, samples)
        return device_time[TORCH] / device_time[OURS] if TORCH in device_time else None

    async def _await_one(self) -> None:
        await self._line.ours(self._device, *self._refs)

    def _wait_for_one(self) -> None:
        self._line.theirs(self._torch, *self._tensors)
        self._torch.cuda.synchronize()

    def _of_one(self, found: list[_Slope]) -> float:
        """Return the seconds of one op: how much longer many of them take than few. What a replay or a batch costs by itself is not in it."""
        few, many = (min(times) for times in zip(*found, strict=True))
        return float(max(many - few, 1e-9)) / (self._many - _FEW)

    async def _ours(self) -> _Slope:
        await self._await_one()  # what is made at the first use is not measured
        if self._line.is_awaited:
            return await _slope(self._our_awaits, self._many)
        try:
            return await _slope(self._our_graph, self._many)
        except UnsupportedError:  # an op that graphs cannot capture
            return await _slope(self._our_batch, self._many)

    async def _theirs(self) -> _Slope:
        return await _slope(self._their_calls if self._line.is_awaited else self._their_graph, self._many)

    async def _our_graph(self, count: int) -> float:
        async with self._device.graph() as graph:
            for _ in range(count):
                self._line.ours(graph, *self._refs)
        try:
            return await _best(graph.replay)
        finally:
            await graph.aclose()

    async def _our_awaits(self, count: int) -> float:
        async def run() -> None:
            for _ in range(count):
                await self._await_one()

        return await _best(run)

    async def _our_batch(self, count: int) -> float:
        async def run() -> None:
            async with self._device.batch() as batch:
                for _ in range(count):
                    self._line.ours(batch, *self._refs)

        return await _best(run)

    async def _their_calls(self, count: int) -> float:
        async def run() -> None:
            for _ in range(count):
                self._line.theirs(self._torch, *self._tensors)
            self._torch.cuda.synchronize()

        return await _best(run)

    async def _their_graph(self, count: int) -> float:
        torch = self._torch

        def run() -> list[Any]:
            # Each result has a buffer of its own, as in a graph of ours: what is written again may still be in the cache.
            return [self._line.theirs(torch, *self._tensors) for _ in range(count)]

        run()
        torch.cuda.synchronize()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            replay: Callable[[], object] = graph.replay
        except RuntimeError:  # an op that cannot be captured
            torch.cuda.synchronize()
            replay = run

        async def waited() -> None:
            replay()
            torch.cuda.synchronize()

        return await _best(waited)


async def _slope(run: Callable[[int], Awaitable[float]], many: int) -> _Slope:
    return _Slope(await run(_FEW), await run(many))


async def _best(run: Callable[[], Awaitable[object]], rounds: int = 6) -> float:
    """Return the shortest of a few runs, in seconds, after one that does not count."""
    await run()
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        await run()
        found.append(time.perf_counter() - began)
    return min(found)


def data_of(rng: np.random.Generator, operand: Operand) -> np.ndarray[Any, Any]:
    """Return an operand's elements, or random ones, of which large arrays have the same ones again and again."""
    if isinstance(operand, np.ndarray):
        return operand
    shape, dtype = operand[0], DType.of(operand[1])
    count = min(int(np.prod(shape)), 64 * _KIBI)
    values = rng.integers(-50, 50, count) if dtype.is_integer else rng.standard_normal(count)
    return np.resize(values.astype(dtype.numpy), shape)


def _nbytes(operand: Operand) -> int:
    return operand.nbytes if isinstance(operand, np.ndarray) else DType.of(operand[1]).itemsize * int(np.prod(operand[0]))


def tensor_of(torch: Any, operand: Operand) -> Any:
    """Return an operand as a tensor on the device, of random elements unless it has them."""
    if isinstance(operand, np.ndarray):
        return torch.from_numpy(operand).to("cuda")
    shape, dtype = operand
    kind = getattr(torch, dtype)
    if dtype.startswith("int"):
        return torch.randint(-50, 50, shape, dtype=kind, device="cuda")
    if dtype.startswith("complex"):
        return torch.randn(shape, dtype=kind, device="cuda")
    return torch.randn(shape, device="cuda").to(kind)
