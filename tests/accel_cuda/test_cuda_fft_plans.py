"""cuFFT's plans of one context, on a library that only takes down its calls: made once for all lanes, and given the stream and the memory of each op."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from accel import DType, LibraryError, OutOfMemoryError, ops
from accel.ref import AccelRef
from accel_cuda.families.fft import FftLibrary
from accel_cuda.families.fft_layout import Layout
from accel_cuda.families.fft_plans import CUFFT, FftPlans, WorkMemory
from tests.cuda_support import FakeLibrary

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.ref import RefOwner
    from accel_cuda.core.stream import CudaStream

PATIENCE = 30.0
ALLOC_FAILED, EXEC_FAILED = 2, 6
LAYOUT = Layout("whole", False, (16,), 1, 1)
OTHER = Layout("whole", False, (32,), 1, 1)
WORK = 1 << 20


class FakeFft(FakeLibrary):
    """Each plan works in 1,000 bytes."""

    set_stream: Callable[[int, int], object]

    def make_plan_many64(self, *arguments: Any) -> int:
        self.called.append(("make_plan_many64", *arguments))
        if "make_plan_many64" in self.fails:
            raise self.cuFFTError(self.fails["make_plan_many64"])
        return 1000


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeFft:
    fake = FakeFft(CUFFT.module, CUFFT.error)
    fake.install(monkeypatch, CUFFT.name)
    return fake


def execute(plans: FftPlans, stream: CudaStream, layout: Layout = LAYOUT, address: int = WORK) -> None:
    plans.execute(stream, layout, 4096, 8192, WorkMemory(address), is_forward=True)


def test_no_other_op_comes_between_the_steps_of_one(context: Any, streams: list[CudaStream], library: FakeFft) -> None:
    plans = FftPlans(context)
    plans.measure(LAYOUT)
    library.called.clear()
    begun, may_go_on = threading.Event(), threading.Event()

    def set_stream(handle: int, stream: int) -> None:
        library.called.append(("set_stream", handle, stream))
        if stream == 77:
            begun.set()
            may_go_on.wait(0.05)

    library.set_stream = set_stream
    thread = threading.Thread(target=execute, args=(plans, streams[0]))
    thread.start()
    assert begun.wait(PATIENCE)
    execute(plans, streams[1])
    thread.join(PATIENCE)
    assert library.names() == ["set_stream", "set_work_area", "exec_c2c"] * 2
    assert library.called[0] == ("set_stream", 1, 77)


def test_a_size_that_was_forgotten_is_found_in_the_plan(context: Any, library: FakeFft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_cuda.core.memo._MOST", 1)
    plans = FftPlans(context)
    for layout in (LAYOUT, OTHER, LAYOUT):
        plans.measure(layout)
        assert plans.sizes == {layout: 1000}
    assert plans.cache.made == 2


def test_a_plan_that_cannot_be_made_leaves_no_handle(context: Any, streams: list[CudaStream], library: FakeFft) -> None:
    plans = FftPlans(context)
    library.fails["make_plan_many64"] = ALLOC_FAILED
    with pytest.raises(OutOfMemoryError):
        execute(plans, streams[0])
    assert library.called[-1] == ("destroy", 1)
    library.fails.clear()
    execute(plans, streams[0])
    assert library.called[-1][:2] == ("exec_c2c", 2)


def test_an_execution_that_fails_is_the_error_of_its_op(context: Any, streams: list[CudaStream], library: FakeFft) -> None:
    plans = FftPlans(context)
    library.fails["exec_c2c"] = EXEC_FAILED
    with pytest.raises(LibraryError) as caught:
        execute(plans, streams[0])
    assert (caught.value.library, caught.value.code) == ("cufft", EXEC_FAILED)
    library.fails.clear()
    execute(plans, streams[1])
    assert plans.cache.made == 1


def test_an_op_may_block_until_its_plan_was_used_in_some_lane(context: Any, streams: list[CudaStream], library: FakeFft) -> None:
    owner: RefOwner = SimpleNamespace(dropped=[], check_process=lambda: None)
    op = ops.Fft(AccelRef(owner, 1, (16,), DType.COMPLEX64, 1))
    op.plan()
    lanes = [SimpleNamespace(stream=stream) for stream in streams]
    family = FftLibrary(context)
    assert family.may_block(lanes[0], op), "cuFFT is not loaded"
    family.prepare(streams[0])
    family.measure(op)
    assert family.may_block(lanes[0], op), "the first use loads kernels"
    assert family.scratch_nbytes(op) == 1024
    family.kernels["fft"](lanes[0], op, op.plan(), [4096], [8192, WORK])
    assert not family.may_block(lanes[0], op)
    assert not family.may_block(lanes[1], op)
    family.close()
    assert library.called[-1] == ("destroy", 1)
