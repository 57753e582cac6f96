"""How graphs of products are made, without a GPU: on a driver and a library that take down what they are asked for, and fail when they are told to."""

from __future__ import annotations

import contextlib
import gc
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from accel import AccelError, DriverError, DType, FaultScope, LibraryError, Transpose
from accel_cuda import blas, repeats
from accel_cuda.compute import CudaCompute

if TYPE_CHECKING:
    from collections.abc import Callable

NONE, NO_MEMORY, INVALIDATED, POISONED = Transpose.NONE, 2, 901, 700


class BlasError(Exception):
    status = 14


class World:
    """A context, its driver, and cuBLAS."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails: dict[str, Exception | int] = {}
        self.fault: AccelError | None = None
        self.in_the_way: str | None = None
        self.looks = 0
        self.when: Callable[[], object] = lambda: None
        self.section = contextlib.nullcontext()
        self.description = SimpleNamespace(spec="cuda:0", index=0)
        self.staging = None
        self.driver = SimpleNamespace(
            hot=SimpleNamespace(
                begin_capture=self.begin,
                end_capture=self.end,
                copy_from_host=None,
                copy_to_host=None,
                event_record=None,
                event_query=None,
            ),
            ignore=lambda *_: None,
        )
        self.stream = self.create_stream()
        self.handles = 0

    def look(self) -> str | None:
        self.looks += 1
        return self.in_the_way

    def does(self, what: str) -> Any:
        self.log.append(what)
        if what in ("begin", "capture", "end"):
            self.when()
        failure = self.fails.get(what, 0)
        if isinstance(failure, Exception):
            raise failure
        return failure

    def begin(self, stream: Any, mode: int) -> int:
        return int(self.does("begin"))

    def end(self, stream: Any, graph: Any) -> int:
        graph._obj.value = 7
        return int(self.does("end"))

    def held(self, *arguments: Any) -> int:
        assert len(arguments) in (len(blas._ONE), len(blas._MANY))
        return int(self.does("capture"))

    def failure(self, status: int, call: str, library: str = "driver") -> AccelError:
        return DriverError(call, code=status, scope=FaultScope.PROCESS if status == POISONED else FaultScope.OP)

    def create_stream(self, *, priority: int = 0) -> Any:
        if hasattr(self, "stream"):
            self.does("side stream")
        return SimpleNamespace(
            context=self, handle=1, pointer=1, priority=priority, is_capturing=False, failure=self.failure, at_close=lambda _: None, ready=lambda: self,
            close=lambda: self.log.append("side stream closed"), launch_graph=lambda _: self.log.append("graph"), synchronize=lambda: None,
        )  # fmt: skip

    # -- cuBLAS's bindings

    cuBLASError = BlasError  # noqa: N815 - as it is called there

    def create(self) -> int:
        self.handles += 1
        return self.handles

    def set_stream(self, handle: int, stream: int) -> None:
        if self.handles:
            self.does("set stream")

    def set_workspace(self, *_: Any) -> None: ...

    set_math_mode = set_pointer_mode = set_workspace

    def gemm_ex_64(self, *arguments: Any) -> None:
        assert len(arguments) == len(blas._ONE)
        self.log.append("library")

    def gemm_strided_batched_ex_64(self, *arguments: Any) -> None:
        assert len(arguments) == len(blas._MANY)
        self.log.append("library")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(blas, "load_library", lambda *_: "")
    monkeypatch.setattr(blas, "load_module", lambda *_: made)
    monkeypatch.setattr(blas, "_held", lambda _: (made.held, made.held))
    monkeypatch.setattr(blas, "in_the_way", made.look)
    monkeypatch.setattr(
        blas, "executable", lambda stream, graph: made.does("graph made") or SimpleNamespace(pointer=graph, close=lambda: None)
    )
    return made


@pytest.fixture
def compute(world: World, monkeypatch: pytest.MonkeyPatch) -> CudaCompute:
    made = CudaCompute(world.stream, "blas")
    monkeypatch.setattr(made, "prepare_workspace", lambda: 4096)
    return made


def product(compute: CudaCompute, address: int = 1 << 20) -> None:
    compute.product(NONE, NONE, 4, 4, 4, 1.0, address, 4, address, 4, 0.0, address + 4096, 4, DType.FLOAT32)


def products(compute: CudaCompute, address: int = 1 << 20) -> None:
    compute.products(NONE, NONE, 4, 4, 4, 1.0, address, 4, 16, address, 4, 16, 0.0, address + 4096, 4, 16, 3, DType.FLOAT32)


@pytest.mark.parametrize("call", [product, products])
def test_a_graph_is_captured_in_one_piece_and_in_a_stream_of_its_own(world: World, compute: CudaCompute, call: Callable[..., None]) -> None:
    for _ in range(repeats._OFTEN):
        call(compute)
    wishes = [compute.has_wishes]
    world.log.clear()
    compute.prepare_repeats()
    assert world.log == ["side stream", "set stream", "begin", "capture", "end", "graph made", "set stream", "side stream closed"]
    assert [*wishes, compute.has_wishes] == [True, False]
    world.log.clear()
    call(compute)
    assert world.log == ["graph"]
    compute.prepare_repeats()
    assert world.log == ["graph"], "there is nothing to make"


def test_where_others_may_be_about_to_call_the_driver_graphs_are_made_later(
    world: World, compute: CudaCompute, caplog: pytest.LogCaptureFixture
) -> None:
    world.in_the_way = "somebody.waits, line 7"
    for address in (1 << 20, 2 << 20, 3 << 20):
        for _ in range(repeats._OFTEN):
            product(compute, address)
    world.log.clear()
    with caplog.at_level(logging.DEBUG, "accel.cuda"):
        compute.prepare_repeats()
    assert world.log == ["side stream", "set stream", "set stream", "side stream closed"], "nothing is captured"
    assert world.looks == len(blas._PAUSES), "and it is not waited for again for the others"
    assert "somebody.waits, line 7" in caplog.text
    world.in_the_way = None
    assert wishes_after(compute, repeats._LATER) == [False] * (repeats._LATER - 1) + [True]
    compute.prepare_repeats()
    world.log.clear()
    product(compute)
    assert world.log == ["graph"]


def wishes_after(compute: CudaCompute, times: int) -> list[bool]:
    """Return after each of so many products whether there is a graph to make."""
    wishes: list[bool] = []
    for _ in range(times):
        product(compute)
        wishes.append(compute.has_wishes)
    return wishes


def test_a_capture_that_somebody_breaks_off_is_tried_again_much_later(world: World, compute: CudaCompute) -> None:
    wishes_after(compute, repeats._OFTEN)
    world.fails |= {"capture": 14, "end": INVALIDATED}  # the library feels it too, and may capture it all the same
    compute.prepare_repeats()
    world.fails.clear()
    assert wishes_after(compute, repeats._LATER) == [False] * (repeats._LATER - 1) + [True]


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_in_the_middle_of_a_capture(world: World, compute: CudaCompute, was_enabled: bool) -> None:
    seen: list[bool] = []
    wishes_after(compute, repeats._OFTEN)
    world.when = lambda: seen.append(gc.isenabled())
    if not was_enabled:
        gc.disable()
    try:
        compute.prepare_repeats()
        seen.append(gc.isenabled())
    finally:
        gc.enable()
    assert seen == [False, False, False, was_enabled]


@pytest.mark.parametrize(
    ("step", "failure"),
    [
        ("side stream", DriverError("no room", code=NO_MEMORY, scope=FaultScope.OP)),
        ("begin", NO_MEMORY),
        ("capture", 13),
        ("end", INVALIDATED),
        ("graph made", DriverError("no room", code=NO_MEMORY, scope=FaultScope.OP)),
    ],
)
def test_what_fails_while_graphs_are_made_is_nobody_s_business(
    world: World, compute: CudaCompute, step: str, failure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world.fails[step] = failure
    for _ in range(repeats._OFTEN):
        product(compute)
    with caplog.at_level(logging.WARNING, "accel.cuda"):
        compute.prepare_repeats()
    assert bool(caplog.records) == isinstance(failure, Exception)
    assert compute.has_blas
    assert not compute.has_wishes
    world.log.clear()
    product(compute)
    assert world.log == ["library"]
    del world.fails[step]
    for _ in range(repeats._LATER if step in ("begin", "end") else repeats._OFTEN):
        product(compute)
    compute.prepare_repeats()
    world.log.clear()
    product(compute)
    assert world.log == (["library"] if step == "capture" else ["graph"]), "what the library refuses it refuses again"


@pytest.mark.parametrize("step", ["begin", "end", "graph made"])
def test_a_fault_while_graphs_are_made_is_told(world: World, compute: CudaCompute, step: str) -> None:
    world.fails[step] = POISONED if step != "graph made" else world.failure(POISONED, step)
    for _ in range(repeats._OFTEN):
        product(compute)
    with pytest.raises(DriverError) as raised:
        compute.prepare_repeats()
    assert raised.value.code == POISONED


def test_a_handle_that_cannot_be_led_back_to_its_stream_is_not_used_again(
    world: World, compute: CudaCompute, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(repeats._OFTEN):
        product(compute)
    world.fails["set stream"] = BlasError()
    compute.prepare_repeats()
    assert caplog.records
    assert not compute.has_blas
    del world.fails["set stream"]
    product(compute)
    assert (world.handles, compute.has_blas) == (2, True)


def test_what_cublas_raises_is_an_error_of_ours(world: World, compute: CudaCompute, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise BlasError

    monkeypatch.setattr(world, "gemm_ex_64", refuse)
    with pytest.raises((DriverError, LibraryError)) as raised:
        product(compute)
    assert raised.value.code == BlasError.status
