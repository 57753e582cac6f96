"""cuTENSOR on a library that only takes down its calls: plans, statuses, and a missing wheel."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from accel import BackendUnavailableError, DType, InvalidArgumentError, OutOfMemoryError, UnsupportedError, ops
from accel_cuda.core.stream import CudaStream
from accel_cuda.families import tensor
from accel_cuda.families.tensor import CUTENSOR, KEPT, TensorLibrary
from tests.cuda_support import FakeLibrary, Numbers, ref

A, B, OUT, SCRATCH = (place << 30 for place in range(1, 5))


class FakeTensor(FakeLibrary):
    """Its objects are numbers. A plan works in as many bytes as its number says."""

    def __init__(self) -> None:
        super().__init__(CUTENSOR.module, CUTENSOR.error)
        self.PlanAttribute = SimpleNamespace(REQUIRED_WORKSPACE=0)
        self.ComputeDesc = SimpleNamespace(COMPUTE_32F=lambda: 32, COMPUTE_64F=lambda: 64, COMPUTE_TF32=lambda: 19)

    def __getattr__(self, name: str) -> Any:
        answered = super().__getattr__(name)
        if name[0].isupper() or name == "create":
            return answered

        def call(*arguments: Any) -> Any:
            answered(*arguments)
            if name == "plan_get_attribute":
                ctypes.c_uint64.from_address(arguments[3]).value = 256 * arguments[1]
            self.handles += name.startswith("create_")
            return self.handles

        return call

    def calls(self, name: str) -> list[list[Any]]:
        return [arguments for each, *arguments in self.called if each == name]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTensor:
    fake = FakeTensor()
    fake.install(monkeypatch, CUTENSOR.name)
    monkeypatch.setattr(tensor, "load_module", lambda name, distribution: SimpleNamespace(CudaDataType=Numbers()))
    monkeypatch.setattr(tensor, "version_of", lambda distribution: "2.8.1")
    return fake


def op_of(subscripts: str, *shapes: tuple[int, ...], dtype: DType = DType.FLOAT32, **options: Any) -> Any:
    """Return the last step of an einsum."""
    found: list[Any] = []

    def run(op: Any) -> Any:
        found.append(op)
        return ref(op.step.result.lengths, dtype)

    ops.Einsum(subscripts, tuple([ref(shape, dtype) for shape in shapes]), **options).compose(run)
    return found[-1]


def send(library: TensorLibrary, stream: CudaStream, op: Any) -> None:
    lane: Any = SimpleNamespace(stream=stream)
    if library.scratch_nbytes(op) is None:
        library.measure(op)
    library.kernels["contract"](lane, op, op.plan(), [A, B][: len(op.operands)], (OUT, SCRATCH))


def test_plans_are_of_what_differs_for_the_library_and_bounded(fake: FakeTensor, context: Any) -> None:
    library, stream = TensorLibrary(context), CudaStream(context, {})
    for subscripts in ("ij,jk->ki", "ab,bc->ca"):
        send(library, stream, op_of(subscripts, (4, 5), (5, 6)))
    cache = library.loaded().cache
    assert len(cache) == 1, "other letters are the same call"
    send(library, stream, op_of("ij,jk->ki", (4, 5), (5, 6), allow_tf32=True))
    assert fake.calls("create_contraction")[-1][-1] == 19
    send(library, stream, op_of("ij->ji", (4, 5), allow_tf32=True))
    assert fake.calls("create_permutation")[-1][-1] == 32, "nothing but products is rounded"
    for n in range(KEPT + 10):
        send(library, stream, op_of("ij->ji", (2, n + 2)))
    assert len(cache) >= KEPT
    stream.transfers.finished = 1 << 40  # the stream has passed all
    send(library, stream, op_of("ij->ji", (2, KEPT + 50)))
    assert len(cache) <= KEPT
    assert fake.names().count("destroy_plan") >= 10


def test_autotune_tries_the_candidates_once_and_not_in_a_capture(fake: FakeTensor, context: Any) -> None:
    library, stream = TensorLibrary(context), CudaStream(context, {})
    lane: Any = SimpleNamespace(stream=stream)
    times = {1: 3.0, 2: 1.0}
    answered, asked = context.driver.call, iter(range(1, 100))

    def call(name: str, *arguments: Any) -> Any:
        return times.get(next(asked), 2.0) if name == "cuEventElapsedTime" else answered(name, *arguments)

    context.driver.call = call
    op = op_of("ij,jk->ki", (4, 5), (5, 6), autotune=True)
    stream.is_capturing = True
    send(library, stream, op)
    ways = len(fake.calls("create_plan"))
    assert ways > 1
    assert len(fake.calls("contract")) == 1
    stream.is_capturing = False
    assert library.may_block(lane, op)
    send(library, stream, op)
    calls = fake.calls("contract")
    assert len(calls) == 1 + ways * 6 + 1
    assert calls[-1][1] == calls[1 + 6][1], "the second way was the quickest"
    assert not library.may_block(lane, op)
    assert library.scratch_nbytes(op) == max(call[9] for call in calls), "there is room for each of them"


def test_its_statuses_are_errors(fake: FakeTensor, context: Any) -> None:
    library, stream = TensorLibrary(context), CudaStream(context, {})
    library.loaded()
    for n, (name, status, kind) in enumerate(
        (
            ("create_plan", 15, UnsupportedError),
            ("create_contraction", 7, InvalidArgumentError),
            ("estimate_workspace_size", 3, OutOfMemoryError),
        )
    ):
        fake.fails = {name: status}
        fake.called.clear()
        with pytest.raises(kind, match="create_plan of contract answered") as caught:
            send(library, stream, op_of("ij,jk->ki", (4, 5), (5, 6 + n)))
        error: Any = caught.value
        assert (error.code, error.library) == (status, "cutensor")
        assert fake.names().count("destroy_tensor_descriptor") == 3
    op = op_of("ij,jk->ki", (4, 5), (5, 20))
    fake.fails = {}
    library.measure(op)
    fake.fails = {"contract": 19}
    with pytest.raises(InvalidArgumentError, match="contract answered INSUFFICIENT_WORKSPACE"):
        send(library, stream, op)


def test_without_its_wheel_nothing_is_offered(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor, "version_of", lambda distribution: None)
    library = TensorLibrary(context)
    assert not library.capabilities
    library.prepare(CudaStream(context, {}))  # asks for nothing
    assert library.library is None


def test_a_library_that_cannot_be_loaded_names_its_extra(fake: FakeTensor, context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(monkeypatch)
    library = TensorLibrary(context)
    assert library.capabilities
    with pytest.raises(BackendUnavailableError, match="cutensor-cu13") as caught:
        library.prepare(CudaStream(context, {}))
    assert "'.[tensor]'" in caught.value.remedy
