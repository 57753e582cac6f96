"""The kernels of cuBLAS's typed calls on a column-major BLAS in numpy: all samples, through an engine whose device memory is the host's."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from accel import LibraryError
from accel.cpu.backend import CpuBackend
from accel.cpu.parts import PARTS
from accel.ops.families import FAMILIES
from accel.testing.conformance.device_harness import DeviceHarness
from accel.testing.conformance.families import check_samples
from accel_cuda.families import blas, blas_matrices, blas_vectors
from accel_cuda.families.cublas import CUBLAS, Blas
from tests.cuda_support import Numbers
from tests.cuda_twins import HOST, ROOM, ColumnMajor, Stream, product
from tests.device_support import opened

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ColumnMajor:
    cublas = ColumnMajor()
    cublas.install(monkeypatch, CUBLAS.name)
    monkeypatch.setattr(sys.modules["nvmath"], "CudaDataType", Numbers(), raising=False)
    return cublas


class Counted(Stream):
    """Counts what is enqueued besides calls of the library."""

    enqueued = 0

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self.enqueued += 1
        super().copy(destination, source, nbytes)

    def fill(self, destination: int, pattern: bytes, count: int) -> None:
        self.enqueued += 1
        super().fill(destination, pattern, count)

    def launch(self, function: str, blocks: int, threads: int, out: int, *arguments: int) -> None:
        self.enqueued += 1
        super().launch(function, blocks, threads, out, *arguments)


@pytest.fixture
def lane(library: ColumnMajor) -> Any:
    stream: Any = Counted()
    blas: Any = Blas(stream, ROOM.ctypes.data, ROOM.nbytes)
    blas.gemm = product  # a twin of its own
    stream.blas = blas
    return SimpleNamespace(stream=stream)


async def test_every_sample_is_right_on_a_column_major_blas(lane: Any, library: ColumnMajor, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(kernel: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        called, enqueued = len(library.called), lane.stream.enqueued
        kernel(lane, op, plan, inputs, outputs)
        if op.kind in blas_matrices.KERNELS:
            calls = len(library.called) - called
            assert calls <= blas_matrices.count_calls(op), op
            assert calls + lane.stream.enqueued - enqueued <= blas_matrices.commands(op), op

    def beside(kernel: Any, cpu_lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        cpu_lane.stream.submit(partial(counted, kernel, op, plan, inputs, outputs), 0.0)

    all_kernels = {**blas_vectors.KERNELS, **blas_matrices.KERNELS, "gemm_grouped": blas.gemm_grouped}
    kernels = {kind: partial(beside, kernel) for kind, kernel in all_kernels.items()}
    part = PARTS["blas"]
    monkeypatch.setitem(PARTS, "blas", replace(part, kernels={**part.kernels, **kernels}))
    await check_samples(DeviceHarness(CpuBackend()), next(family for family in FAMILIES if family.name == "blas"))
    called = {name.removesuffix("_64") for name in library.names()}
    assert called >= {"axpy_ex", "scal_ex", "dot_ex", "nrm2_ex", "snrm2", "dnrm2"}
    assert called >= {f"{letter}trsm_batched" for letter in "sdcz"}
    wanted = {letter + kind for letter in "sdcz" for kind in ("swap", "rot", "trmv", "trsv", "trmm", "trsm", "symm", "syrk", "geam")}
    wanted |= {"sasum", "dasum", "scasum", "dzasum", "cdotc", "zdotc", "chemm", "zhemm", "cherk", "zherk"}
    assert called >= wanted | {f"i{letter}a{which}" for letter in "sdcz" for which in ("max", "min")}


async def test_batches_take_one_call_where_their_rows_are_those_of_one_matrix(
    lane: Any, library: ColumnMajor, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def kernel(each: Any, cpu_lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        called = len(library.called)
        each(lane, op, plan, inputs, outputs)
        taken.append(len(library.called) - called)

    part = PARTS["blas"]
    kernels = {kind: partial(kernel, each) for kind, each in blas_matrices.KERNELS.items()}
    monkeypatch.setitem(PARTS, "blas", replace(part, kernels={**part.kernels, **kernels}))
    async with opened() as device:
        device_blas: Any = device.blas
        square, few, many, large = [await device.zeros(shape) for shape in ((3, 3), (2, 3, 3), (20, 3, 3), (9, 300, 300))]
        out = await device.zeros((20, 3, 3))
        for made, calls in (
            (device_blas.geam(many, many), 1),
            (device_blas.geam(many, many, out=many), 1),
            (device_blas.geam(square, many), 1),
            (device_blas.geam(many, square, out=out), 1),
            (device_blas.geam(many, square, out=many), 20),
            (device_blas.geam(many, square, beta=0.0), 20),
            (device_blas.geam(few, square), 2),
            (device_blas.geam(large, large[0]), 9),
            (device_blas.geam(many, many, transpose_a=True), 20),
            (device_blas.symm(square, many, side="right"), 1),
            (device_blas.symm(square, many), 20),
            (device_blas.symm(many, square, side="right"), 20),
            (device_blas.hemm(many, many, side="right"), 20),
            (device_blas.syrk(many), 20),
            (device_blas.herk(square), 1),
        ):
            await made
            assert taken.pop() == calls


def test_the_pointer_mode_is_the_hosts_again_after_a_failure(lane: Any, library: ColumnMajor) -> None:
    library.fails["sasum_64"] = 13
    with pytest.raises(LibraryError, match="EXECUTION_FAILED"):
        lane.stream.blas.call_on_device("sasum_64", 1, 4096, 1, 8192)
    assert library.mode == HOST
