"""NCCL on bindings that only take down their calls: which call a collective is, what is waited for, and what ends it."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import pytest

from accel import BackendUnavailableError, DeadlineExceededError, DType, FaultScope, InvalidArgumentError, LibraryError, WorldChangedError
from accel.ops.collective import REDUCED_DTYPES, Call, Reduction
from accel_cuda.core.nccl import DTYPES, NCCL, REDUCTIONS, Nccl, NcclGroup
from accel_cuda.errors import error_of
from tests.cuda_support import FakeLibrary

if TYPE_CHECKING:
    from accel_cuda.core.stream import CudaStream

SOURCE, TARGET, COMMUNICATOR = 1 << 20, 2 << 20, 99
SUCCESS, IN_PROGRESS = 0, 7


class FakeNccl(FakeLibrary):
    """Its communicator goes through ``states``, and stays in the last one."""

    def __init__(self) -> None:
        super().__init__(NCCL.module, NCCL.error)
        self.states = deque([SUCCESS])
        self.version = 22809
        self.configs: list[Any] = []

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> bytes:
        return b"id" * 64

    def comm_get_async_error(self, communicator: int) -> int:
        assert communicator == COMMUNICATOR, "a communicator that was aborted is freed"
        return self.states.popleft() if len(self.states) > 1 else self.states[0]

    def Config(self) -> Any:  # noqa: N802  # the bindings' name
        self.configs.append(SimpleNamespace(ptr=5, blocking=1))
        return self.configs[-1]

    def comm_init_rank_scalable(self, *arguments: Any) -> int:
        self.called.append(("comm_init_rank_scalable", *arguments))
        return COMMUNICATOR


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    fake = FakeNccl()
    fake.install(monkeypatch, NCCL.name)
    return fake


@pytest.fixture
def stream(context: Any, streams: list[CudaStream]) -> CudaStream:
    capture = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_ACTIVE=1)
    driver = context.driver
    driver.CUstreamCaptureStatus, driver.CUhostFn = capture, lambda address: address
    driver.CUuserObject_flags = SimpleNamespace(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC=1)
    driver.CUuserObjectRetain_flags = SimpleNamespace(CU_GRAPH_USER_OBJECT_MOVE=1)
    driver.answers |= {"cuStreamGetCaptureInfo": (0, 0, None, [], [], 0), "cuMemAlloc": 4096}
    context.register_host = lambda address, nbytes: SimpleNamespace(close=lambda: driver.called.append(("unregister", address)))
    return streams[0]


@pytest.fixture
def library(fake: FakeNccl, context: Any, stream: CudaStream) -> Nccl:
    return Nccl(context)


def joined(library: Nccl, deadline: float = 10.0) -> NcclGroup:
    return library.join(b"id", 1, 2, time.monotonic() + deadline, threading.Event())


@pytest.fixture
def group(library: Nccl, fake: FakeNccl) -> NcclGroup:
    group = joined(library)
    fake.called.clear()
    return group


def test_everything_that_can_be_reduced_has_a_number() -> None:
    assert DTYPES.keys() == REDUCED_DTYPES
    assert sorted(DTYPES.values()) == list(range(len(DTYPES)))
    assert REDUCTIONS.keys() == set(get_args(Reduction))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (Call("all_reduce", 6, DType.BFLOAT16, "avg"), ("all_reduce", SOURCE, TARGET, 6, 9, 4, COMMUNICATOR, 77)),
        (Call("reduce", 6, DType.INT64, "max", 1), ("reduce", SOURCE, TARGET, 6, 4, 2, 1, COMMUNICATOR, 77)),
        (Call("reduce_scatter", 6, DType.FLOAT64, "prod"), ("reduce_scatter", SOURCE, TARGET, 6, 8, 1, COMMUNICATOR, 77)),
        (Call("all_gather", 6, DType.COMPLEX64), ("all_gather", SOURCE, TARGET, 48, 1, COMMUNICATOR, 77)),
        (Call("all_to_all", 6, DType.INT16), ("allto_all", SOURCE, TARGET, 12, 1, COMMUNICATOR, 77)),
        (Call("broadcast", 6, DType.BOOL, root=1), ("broadcast", SOURCE, TARGET, 6, 1, 1, COMMUNICATOR, 77)),
        (Call("gather", 6, DType.FLOAT32, root=1), ("gather", SOURCE, TARGET, 24, 1, 1, COMMUNICATOR, 77)),
        (Call("scatter", 6, DType.FLOAT32, root=1), ("scatter", SOURCE, TARGET, 24, 1, 1, COMMUNICATOR, 77)),
        (Call("send", 6, DType.FLOAT32, root=0), ("send", SOURCE, 24, 1, 0, COMMUNICATOR, 77)),
        (Call("receive", 6, DType.FLOAT32, root=0), ("recv", TARGET, 24, 1, 0, COMMUNICATOR, 77)),
        (Call("barrier", 0, DType.UINT8), ("all_reduce", 4096, 4096, 1, 2, 2, COMMUNICATOR, 77)),
    ],
    ids=lambda value: value.kind if isinstance(value, Call) else "",
)
def test_a_collective_is_one_call(group: NcclGroup, stream: CudaStream, fake: FakeNccl, call: Call, expected: tuple[Any, ...]) -> None:
    group.launch(stream, call, SOURCE, TARGET)
    assert fake.called == [expected]


def test_nothing_is_called_for_no_elements(group: NcclGroup, stream: CudaStream, fake: FakeNccl) -> None:
    group.launch(stream, Call("all_reduce", 0, DType.FLOAT32, "sum"), 0, 0)
    assert fake.called == []


def test_a_launch_ends_when_the_communicator_is_not_in_progress(group: NcclGroup, stream: CudaStream, fake: FakeNccl) -> None:
    fake.states = deque([*[IN_PROGRESS] * 300, SUCCESS])
    group.launch(stream, Call("all_reduce", 6, DType.FLOAT32, "sum"), SOURCE, TARGET)
    assert [*fake.states] == [SUCCESS]


def test_the_stream_writes_the_number_of_what_it_has_come_to(group: NcclGroup, stream: CudaStream, context: Any) -> None:
    group.launch(stream, Call("all_reduce", 6, DType.FLOAT32, "sum", number=7), SOURCE, TARGET)
    (written,) = [call for call in context.driver.called if call[0] == "cuStreamWriteValue64"]
    assert written[1] == 77
    assert written[3:] == (7, 0)
    assert group.reached == 0  # until the stream is there


def test_an_error_ends_the_communicator(group: NcclGroup, stream: CudaStream, fake: FakeNccl) -> None:
    fake.states = deque([IN_PROGRESS, 6])
    call = Call("all_reduce", 6, DType.FLOAT32, "sum")
    with pytest.raises(LibraryError, match="RemoteError") as caught:
        group.launch(stream, call, SOURCE, TARGET)
    assert (caught.value.code, caught.value.library, caught.value.scope) == (6, "nccl", FaultScope.OP)
    fake.states = deque([SUCCESS])
    with pytest.raises(LibraryError, match="RemoteError"):
        group.launch(stream, call, SOURCE, TARGET)


def test_a_call_that_is_refused_raises_what_the_status_stands_for(group: NcclGroup, stream: CudaStream, fake: FakeNccl) -> None:
    fake.fails["all_reduce"] = 4
    with pytest.raises(InvalidArgumentError, match="all_reduce answered InvalidArgument"):
        group.launch(stream, Call("all_reduce", 6, DType.FLOAT32, "sum"), SOURCE, TARGET)


def test_what_the_driver_says_comes_before_what_nccl_says(group: NcclGroup, stream: CudaStream, fake: FakeNccl, context: Any) -> None:
    fake.states = deque([1])
    context.driver.fails["cuStreamQuery"] = 700
    with pytest.raises(error_of(700, "x").__class__) as caught:
        group.launch(stream, Call("all_reduce", 6, DType.FLOAT32, "sum"), SOURCE, TARGET)
    assert caught.value.code == 700


def test_a_launch_that_waits_for_a_dead_rank_ends_when_the_group_is_revoked(group: NcclGroup, stream: CudaStream, fake: FakeNccl) -> None:
    fake.states = deque([IN_PROGRESS])
    caught: list[BaseException] = []

    def launch() -> None:
        try:
            group.launch(stream, Call("all_reduce", 6, DType.FLOAT32, "sum"), SOURCE, TARGET)
        except WorldChangedError as error:
            caught.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    while "all_reduce" not in fake.names():
        time.sleep(0.001)
    revoking = threading.Thread(target=group.revoke)
    revoking.start()
    thread.join(10)
    assert not thread.is_alive()
    fake.states = deque([SUCCESS])  # quiet
    revoking.join(10)
    assert not revoking.is_alive()
    group.abort()
    group.abort()
    assert [type(error) for error in caught] == [WorldChangedError]
    assert fake.names() == ["all_reduce", "comm_revoke", "comm_abort"]


def test_a_join_ends_when_it_is_revoked(library: Nccl, fake: FakeNccl) -> None:
    fake.states = deque([IN_PROGRESS])
    revoked = threading.Event()
    revoked.set()
    with pytest.raises(WorldChangedError, match="was revoked") as caught:
        library.join(b"id", 1, 2, time.monotonic() + 10, revoked)
    assert caught.value.scope is FaultScope.OP
    assert fake.names() == ["comm_init_rank_scalable", "comm_abort"]


def test_a_join_ends_at_its_deadline(library: Nccl, fake: FakeNccl) -> None:
    fake.states = deque([IN_PROGRESS])
    with pytest.raises(DeadlineExceededError, match="rank 1 of 2"):
        joined(library, 0.01)
    assert fake.names() == ["comm_init_rank_scalable", "comm_abort"]


def test_a_join_that_fails_says_why(library: Nccl, fake: FakeNccl) -> None:
    fake.states = deque([IN_PROGRESS, 3])
    with pytest.raises(LibraryError, match="InternalError"):
        joined(library)
    assert fake.names() == ["comm_init_rank_scalable", "comm_abort"]


def test_communicators_do_not_block(group: NcclGroup, fake: FakeNccl) -> None:
    assert [config.blocking for config in fake.configs] == [0]


def test_a_communicator_is_freed_after_the_graphs_that_captured_it(
    library: Nccl, group: NcclGroup, stream: CudaStream, fake: FakeNccl, context: Any
) -> None:
    context.driver.answers["cuStreamGetCaptureInfo"] = (1, 3, "graph", [], [], 0)
    group.launch(stream, Call("all_reduce", 6, DType.FLOAT32, "sum", number=7), SOURCE, TARGET)
    kept = [call for call in context.driver.called if call[0] == "cuUserObjectCreate"]
    assert len(kept) == 2  # in front of the collective and behind it
    assert "cuStreamWriteValue64" not in context.driver.names()
    group.revoke()
    group.abort()
    joined(library)
    assert "comm_abort" not in fake.names()
    for _ in kept:
        group._graphs._destroyed()  # as the driver does
    joined(library)
    assert fake.names().count("comm_abort") == 1


def test_what_a_dead_context_has_is_left_alone(group: NcclGroup, fake: FakeNccl, context: Any) -> None:
    context.fault = error_of(700, "cuStreamQuery")
    group.revoke()
    group.abort()
    assert fake.called == []


def test_the_context_gets_its_memory_back(library: Nccl, context: Any) -> None:
    library.close()
    assert context.driver.names()[-2:] == ["unregister", "cuMemFree"]


def test_an_old_nccl_is_refused(fake: FakeNccl, context: Any, stream: CudaStream) -> None:
    fake.version = 22703
    with pytest.raises(BackendUnavailableError, match="cannot revoke") as caught:
        Nccl(context)
    assert "pip install '.[nccl]'" in caught.value.remedy


@pytest.mark.parametrize("missing", ["nccl4py", "nvidia-nccl-cu13"])
def test_what_is_missing_is_named_with_its_remedy(context: Any, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    fake = FakeNccl()
    fake.install(monkeypatch, *([NCCL.name] if missing == "nccl4py" else []))
    if missing == "nccl4py":
        monkeypatch.setitem(__import__("sys").modules, NCCL.module, None)
    with pytest.raises(BackendUnavailableError, match=missing) as caught:
        Nccl(context)
    assert "pip install '.[nccl]'" in caught.value.remedy


def test_a_communicator_that_has_failed_is_revoked_and_freed_all_the_same(group: NcclGroup, fake: FakeNccl) -> None:
    fake.fails |= {"comm_revoke": 6, "comm_abort": 6}  # they answer its state, and have done what they shall
    fake.states = deque([IN_PROGRESS, 6])
    group.revoke()
    group.abort()
    assert fake.names() == ["comm_revoke", "comm_abort"]
    assert len(fake.states) == 1, "it was not polled to the end of the revoking"
