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

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ColumnMajor:
    cublas = ColumnMajor()
    cublas.install(monkeypatch, CUBLAS.name)
    monkeypatch.setattr(sys.modules["nvmath"], "CudaDataType", Numbers(), raising=False)
    return cublas


@pytest.fixture
def lane(library: ColumnMajor) -> Any:
    stream: Any = Stream()
    blas = Blas(stream, ROOM.ctypes.data, ROOM.nbytes)
    return SimpleNamespace(stream=stream, compute=SimpleNamespace(prepare_blas=lambda: blas, product=product))


async def test_every_sample_is_right_on_a_column_major_blas(lane: Any, library: ColumnMajor, monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(kernel: Any, cpu_lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        cpu_lane.stream.submit(partial(kernel, lane, op, inputs, outputs), 0.0)

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


def test_the_pointer_mode_is_the_hosts_again_after_a_failure(lane: Any, library: ColumnMajor) -> None:
    library.fails["sasum_64"] = 13
    with pytest.raises(LibraryError, match="EXECUTION_FAILED"):
        lane.compute.prepare_blas().call_on_device("sasum_64", 1, 4096, 1, 8192)
    assert library.mode == HOST
