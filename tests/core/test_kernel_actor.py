"""The kernel actor, without a device: what it does with ops that are not wanted, that fail, or whose end cannot be seen."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.engine.kernel_actor import KernelActor
from accel.engine.lane import EventPool, Lane
from accel.engine.launches import BatchedOp, LaunchGroup, OpSubmission
from accel.engine.submission import BatchSubmission
from accel.ops import Empty, Plan
from tests.device_support import bounded, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OP = Empty((1,), accel.DType.FLOAT32)
PLAN = Plan((), (), ())


class Failures:
    """Notes which places in line failed, and which were dropped."""

    raised = uses = ()

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.gone: list[int] = []

    def failed(self, lane: Any, seq: int, error: Any) -> None:
        self.lost.append(seq)

    def dropped(self, lane: Any, seq: int) -> None:
        self.gone.append(seq)

    def settle(self, group: Any) -> None:
        pass


class Context:
    """Notes what it is told."""

    fault: Any = None
    generation = 1

    def __init__(self) -> None:
        self.failures = Failures()
        self.told: list[Any] = []
        self.torn: list[tuple[int, int]] = []
        self.retired: list[tuple[int, bool]] = []
        self.submissions: dict[Any, None] = {}
        self.lanes: list[Any] = []
        self.run_blocking: Any = None
        self.core: Any = SimpleNamespace(
            options=SimpleNamespace(debug=False),
            name="cpu:0",
            loop=asyncio.get_running_loop(),
            system=SimpleNamespace(run_blocking=self._run_blocking),
        )
        self.offloaded = SimpleNamespace(run=None)

    async def _run_blocking(self, *arguments: Any) -> Any:
        return self.run_blocking(*arguments)

    def may_block(self, lane: Any, op: Any) -> bool:
        return False

    def is_out_of_memory(self, raised: BaseException) -> bool:
        return False

    def fault_of(self, stream: Any, error: Any) -> None:
        return None

    def report_fault(self, error: Any) -> None:
        self.told.append(error)

    def tear(self, lane: Any, first: int, last: int, why: str) -> None:
        self.torn.append((first, last))

    def retire(self, submission: Any, count: int, commands: int, *, is_last: bool) -> None:
        self.retired.append((count, is_last))


class Stream:
    """Its marks are passed when they are recorded."""

    error: Exception | None = None
    synchronized = 0

    def record(self, event: Any) -> bool:
        if self.error is not None:
            raise self.error
        return True

    def wait(self, event: Any) -> None:
        if self.error is not None:
            raise self.error

    def synchronize(self) -> None:
        self.synchronized += 1


class Bench:
    """A kernel actor with one lane and a context that notes what it is told."""

    def __init__(self) -> None:
        self.context = Context()
        self.lane = self.new_lane()
        self.actor = KernelActor(self.context)  # type: ignore[arg-type]
        self.calls: list[Any] = []

    def new_lane(self) -> Any:
        events: Any = EventPool(SimpleNamespace(create_event=object))
        lane = Lane("lane", SimpleNamespace(), Stream(), SimpleNamespace(), events)  # type: ignore[arg-type]
        self.context.lanes.append(lane)
        return lane

    def kernel(self, *arguments: Any) -> None:
        self.calls.append(arguments)

    def op(self, kernel: Callable[..., None] | None = None, *, action: Any = None, dependencies: Sequence[Any] = ()) -> OpSubmission:
        submission = OpSubmission(OP, PLAN, asyncio.get_running_loop().create_future(), 1)
        submission.bind(self.context, self.lane, kernel or self.kernel, action, 1)  # type: ignore[arg-type]
        submission.inputs, submission.outputs, submission.seq, submission.dependencies = (), (), 1, list(dependencies)
        self.context.submissions[submission] = None
        return submission

    def group(self, *kernels: Callable[..., None]) -> LaunchGroup:
        count = len(kernels)
        submission = BatchSubmission((OP,) * count, (PLAN,) * count, [()] * count, asyncio.get_running_loop().create_future(), 1)
        launches = [BatchedOp(OP, PLAN, kernel, None, index, 1) for index, kernel in enumerate(kernels)]
        for launch in launches:
            launch.inputs, launch.outputs, launch.seq, launch.dependencies = (), (), launch.index + 1, []
        self.context.submissions[submission] = None
        port: Any = SimpleNamespace(lane=self.lane, actor=None)
        return LaunchGroup(self.context, submission, port, launches, is_last=True)  # type: ignore[arg-type]

    def take(self, message: Any) -> bool:
        return self.actor.receive_now(message, None)  # type: ignore[arg-type]

    async def receive(self, message: Any) -> None:
        await self.actor.receive(message, None)  # type: ignore[arg-type]


def fails(error: BaseException) -> Callable[..., None]:
    def kernel(*_: Any) -> None:
        raise error

    return kernel


async def test_an_op_that_was_cancelled_is_passed_over_and_is_its_submissions_last() -> None:
    bench = Bench()
    op = bench.op()
    op.future.cancel()
    assert bench.take(op)
    assert bench.calls == []
    assert bench.context.failures.gone == [1]
    assert bench.context.retired == [(1, True)]
    assert (bench.lane.enqueued, bench.lane.completed) == (1, 1)


async def test_nothing_is_enqueued_after_a_fault() -> None:
    bench = Bench()
    bench.context.fault = accel.DriverError("gone", scope=accel.FaultScope.CONTEXT)
    assert bench.take(bench.op())
    assert bench.calls == []
    assert bench.context.failures.gone == [1]


async def test_ops_of_a_batch_after_one_that_failed_are_not_enqueued() -> None:
    bench = Bench()
    group = bench.group(bench.kernel, fails(ValueError("broken")), bench.kernel)
    assert bench.take(group)
    assert len(bench.calls) == 1
    error = group.submission.future.exception()
    assert isinstance(error, accel.LibraryError)
    assert error.op_index == 1
    assert bench.context.torn == [(2, 2)]
    assert bench.context.failures.lost == [2]
    assert bench.context.failures.gone == [3]
    assert (bench.lane.enqueued, bench.lane.completed) == (3, 3)


@pytest.mark.parametrize(
    ("error", "is_begun"), [(ValueError("broken"), True), (accel.LibraryError("-1"), True), (accel.InvalidArgumentError("no"), False)]
)
async def test_what_a_kernel_that_raised_may_have_written_is_torn(error: Exception, is_begun: bool) -> None:
    bench = Bench()
    op = bench.op(fails(error))
    assert bench.take(op)
    assert isinstance(op.future.exception(), type(error) if isinstance(error, accel.AccelError) else accel.LibraryError)
    assert bench.context.torn == [(1, 1)] * is_begun
    assert bench.context.failures.lost == [1] * is_begun
    assert bench.context.failures.gone == [1] * (not is_begun)


async def test_an_injected_error_comes_before_the_kernel_and_tears_nothing() -> None:
    bench = Bench()
    op = bench.op(action=accel.LibraryError("planned"))
    assert bench.take(op)
    assert str(op.future.exception()).count("planned") == 1
    assert (bench.calls, bench.context.torn) == ([], [])


async def test_a_wait_that_could_not_be_made_is_owed_to_the_next_op() -> None:
    bench = Bench()
    other = bench.new_lane()
    other.advance(1)
    other.stream.error = ValueError("no mark")
    first = bench.op(dependencies=[(other, 1)])
    assert bench.take(first)
    assert first.future.exception().__cause__ is other.stream.error  # type: ignore[union-attr]
    assert (bench.calls, bench.lane.owed) == ([], [(other, 1)])
    second = bench.op()
    second.seq, other.stream.error = 2, None
    assert bench.take(second)
    assert (len(bench.calls), bench.lane.owed, other.completed) == (1, [], 1)


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("what", ["debug", "its lane", "another lane"])
async def test_what_has_to_wait_is_not_enqueued_in_the_call(what: str, is_group: bool) -> None:
    bench = Bench()
    message: Any = bench.group(bench.kernel) if is_group else bench.op()
    launch, other = message.launches[0], bench.new_lane()
    if what == "debug":
        bench.actor._debug = True
        bench.context.run_blocking = lambda call: call()
    elif what == "its lane":
        launch.seq = 2
    else:
        launch.dependencies = [(other, 1)]
    assert not bench.take(message)
    receiving = asyncio.ensure_future(bench.receive(message))
    await turns()
    assert len(bench.calls) == (what == "debug")
    bench.lane.advance(1)
    other.advance(1)
    await bounded(receiving)
    assert len(bench.calls) == 1
    assert bench.context.retired == [(1, True)]
    assert bench.lane.stream.synchronized == (what == "debug")


async def test_the_event_of_an_op_that_has_ended_marks_the_next() -> None:
    bench = Bench()
    first, second = bench.op(), bench.op()
    second.seq = 2
    assert bench.take(first)
    assert bench.take(second)
    assert (first.event, bench.lane.completed) == (second.event, 2)
    assert first.event is not None


@pytest.mark.parametrize("error", [None, ValueError("broken")])
async def test_an_op_that_is_enqueued_beside_the_loop(error: Exception | None) -> None:
    bench = Bench()
    bench.context.run_blocking = lambda function, call, kernel, *arguments: error or kernel(*arguments)
    op = bench.op()
    op.is_offloaded = True
    await bench.receive(op)
    assert op.launched == 1
    assert len(bench.calls) == (error is None)
    assert bench.context.torn == [(1, 1)] * (error is not None)
    assert op.future.done() is (error is not None)


@pytest.mark.parametrize("way", ["at once", "later"])
@pytest.mark.parametrize("count", [1, 2, 3])
async def test_a_batch_whose_end_cannot_be_marked_is_answered_and_all_of_it_is_torn(way: str, count: int) -> None:
    bench = Bench()
    bench.lane.stream.error = ValueError("no mark")
    group = bench.group(*[bench.kernel] * count)
    if way == "at once":
        assert bench.take(group)
    else:
        await bench.receive(group)
    assert group.submission.future.exception().__cause__ is bench.lane.stream.error  # type: ignore[union-attr]
    assert bench.context.torn == [(1, count)]
    assert bench.context.failures.lost == list(range(1, count + 1))
    assert bench.context.retired == [(count, True)]
    assert bench.context.told == []


async def test_an_op_is_enqueued_beside_the_loop_where_the_backend_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(Context, "may_block", fails(AttributeError("no such field")))
    assert not bench.take(bench.op())
    assert bench.calls == []
    assert not bench.take(bench.group(bench.kernel))
    assert bench.calls == []


async def test_an_op_for_which_there_is_no_thread_counts_once() -> None:
    bench = Bench()
    error = ValueError("no thread")
    bench.context.run_blocking = fails(error)
    op = bench.op()
    op.is_offloaded = True
    await bench.receive(op)
    assert op.future.exception().__cause__ is error  # type: ignore[union-attr]
    assert op.launched == 1, "what is not known to have stayed away may have come"
    assert bench.context.torn == []
