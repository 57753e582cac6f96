"""Kernels that users wrote, on a driver that is a stand-in: loaded code, launches whose blocks run at the same time, and what is refused."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from accel import CompileError, InvalidArgumentError, UnsupportedError
from accel.ops import CompiledKernel, Launch
from accel_cuda.core.driver import LaunchAttribute, LaunchConfig
from accel_cuda.core.launch import UserKernels
from accel_cuda.core.modules import Modules
from tests.cuda_support import Numbers

PTX = ".version 8.0\n.target sm_90\n"


class Driver:
    """Answers what a kernel of one int32 would have; takes down launches."""

    CUjit_option = CUfunction_attribute = Numbers()
    CUresult = SimpleNamespace(CUDA_ERROR_NOT_FOUND=500, CUDA_ERROR_INVALID_VALUE=1)

    def __init__(self) -> None:
        self.hot = SimpleNamespace(launch=self.launch)
        self.loaded: list[Any] = []
        self.launched: list[tuple[int, int, list[int]]] = []
        self.says = b""
        self.fits, self.is_cooperative = 4, 1

    def launch(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:
        found: LaunchConfig = config._obj
        attributes = [LaunchAttribute.from_address(found.attributes)] if found.attribute_count else []
        self.launched.append((found.grid_x, found.shared_bytes, [x for each in attributes for x in (each.id, each.value[0])]))
        return 0

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "cuModuleLoadDataEx":
            image, count, keys, (log, size) = arguments
            assert (count, len(keys), len(log)) == (2, 2, size)
            self.loaded.append(image)
            if self.says:
                log[: len(self.says)] = self.says
                raise CompileError("cuModuleLoadDataEx: INVALID_PTX", code=218, library="driver")
            return "module"
        if name == "cuOccupancyMaxActiveBlocksPerMultiprocessor":
            assert arguments[0] == 77
            return self.fits if arguments[2] == 0 else self.fits // 2
        return {"cuModuleGetFunction": 77, "cuFuncGetAttribute": 128, "cuFuncGetParamCount": 1, "cuFuncGetParamInfo": (0, 4)}.get(name, 0)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def context(driver: Driver) -> Any:
    return SimpleNamespace(
        driver=driver, call=driver.call, section=contextlib.nullcontext(), fault=None, multiprocessors=10, shared_limit=1 << 16,
        description=SimpleNamespace(spec="cuda:0"), attribute=lambda name: driver.is_cooperative if name == "COOPERATIVE_LAUNCH" else 1 << 20,
    )  # fmt: skip


@pytest.fixture
def kernels(context: Any) -> UserKernels:
    return UserKernels(context, Modules(context, nvrtc=None))  # type: ignore[arg-type]  # nothing is compiled


class Stream:
    handle = 5

    def __init__(self, context: Any) -> None:
        self._context = context

    def ready(self) -> Any:
        return self._context


def launch(kernels: UserKernels, stream: Stream, kernel: CompiledKernel, grid: int, *, shared: int = 0, cooperative: bool) -> None:
    op = Launch(kernel, grid, 64, (3,), shared, cooperative)
    kernels.launch(SimpleNamespace(stream=stream), op, op.plan(), (), ())


def loaded(kernels: UserKernels) -> CompiledKernel:
    kernel = CompiledKernel("", "work", parameters=("int32",), code=PTX.encode())
    return kernel.with_layout(kernels.compile(kernel))


def test_code_is_loaded_once_and_its_parameters_are_asked_for(kernels: UserKernels, driver: Driver) -> None:
    kernel = loaded(kernels)
    assert kernel.layout is not None
    assert (kernel.layout.sizes, kernel.layout.max_threads) == ((4,), 128)
    kernels.compile(kernel)
    assert driver.loaded == [PTX.encode() + b"\0"]


def test_what_the_driver_says_is_in_the_error(kernels: UserKernels, driver: Driver) -> None:
    driver.says = b"ptxas line 3: unknown instruction\nptxas fatal\0rest"
    with pytest.raises(CompileError, match="line 3: unknown instruction") as caught:
        loaded(kernels)
    assert caught.value.log == "ptxas line 3: unknown instruction\nptxas fatal"
    assert caught.value.code == 218
    with pytest.raises(InvalidArgumentError, match="neither a cubin"):
        kernels.compile(CompiledKernel("", "work", code=b"hello"))
    assert len(driver.loaded) == 1


def test_a_launch_is_cooperative_only_where_that_is_asked_for(kernels: UserKernels, driver: Driver, context: Any) -> None:
    kernel, stream = loaded(kernels), Stream(context)
    for grid, cooperative in ((3, False), (3, True), (3, True), (40, True), (3, False), (1000, False)):
        launch(kernels, stream, kernel, grid, cooperative=cooperative)
    assert driver.launched == [(3, 0, []), (3, 0, [2, 1]), (3, 0, [2, 1]), (40, 0, [2, 1]), (3, 0, []), (1000, 0, [])]
    assert ctypes.sizeof(LaunchAttribute) == 72


def test_a_cooperative_grid_that_is_too_large_is_refused_with_the_number_that_fits(
    kernels: UserKernels, driver: Driver, context: Any
) -> None:
    kernel, stream = loaded(kernels), Stream(context)
    for grid, shared, most in ((41, 0, 40), (21, 16, 20)):
        for _ in range(2):
            with pytest.raises(InvalidArgumentError, match=rf"{most} blocks of work run at the same time"):
                launch(kernels, stream, kernel, grid, shared=shared, cooperative=True)
    launch(kernels, stream, kernel, 20, shared=16, cooperative=True)
    driver.is_cooperative = 0
    with pytest.raises(UnsupportedError, match="no cooperative launches"):
        launch(kernels, stream, kernel, 1, cooperative=True)
    assert driver.launched == [(20, 16, [2, 1])]
