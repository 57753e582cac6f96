"""A lane, without a device: what it does with ops that are not wanted, that fail, or whose end cannot be seen."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.engine.lane import Lane
from accel.engine.launches import BatchedOp, LaunchGroup, OpSubmission
from accel.engine.stream_clock import EventPool
from accel.engine.submission import BatchSubmission
from accel.ops import Empty, Plan
from tests.device_support import bounded, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OP = Empty((1,), accel.DType.FLOAT32)
PLAN = Plan((), (), ())


class Failures:
    """Notes which places in line failed, and which were dropped."""

    reported = tracked = ()

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.gone: list[int] = []

    def on_failed(self, lane: Any, seq: int, error: Any) -> None:
        self.lost.append(seq)

    def on_dropped(self, lane: Any, seq: int) -> None:
        self.gone.append(seq)

    def reject_failed(self, group: Any) -> None:
        pass


class Context:
    """Notes what it is told."""

    fault: Any = None
    generation = 1

    def __init__(self) -> None:
        self.failures = Failures()
        self.told: list[Any] = []
        self.retired: list[tuple[int, bool]] = []
        self.submissions: dict[Any, None] = {}
        self.device: Any = SimpleNamespace()
        self.events = EventPool(SimpleNamespace(create_event=object))
        self.kernels = SimpleNamespace(may_block=lambda lane, op: False)
        self.run_blocking: Any = None
        self.core: Any = SimpleNamespace(
            options=SimpleNamespace(debug=False),
            name="cpu:0",
            loop=asyncio.get_running_loop(),
            system=SimpleNamespace(run_blocking=self._run_blocking),
        )
        self.offloaded = SimpleNamespace(call_kernel=None)

    async def _run_blocking(self, *arguments: Any) -> Any:
        return self.run_blocking(*arguments)

    def is_out_of_memory(self, raised: BaseException) -> bool:
        return False

    def fault_of(self, stream: Any, error: Any) -> None:
        return None

    def report_fault(self, error: Any) -> None:
        self.told.append(error)

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
    """A lane, and a context that notes what it is told."""

    def __init__(self) -> None:
        self.context = Context()
        self.lane = self.new_lane()
        self.calls: list[Any] = []

    def new_lane(self) -> Any:
        return Lane("lane", self.context, Stream())  # type: ignore[arg-type]

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
        launches = [BatchedOp(OP, PLAN, kernel, None, index) for index, kernel in enumerate(kernels)]
        for launch in launches:
            launch.inputs, launch.outputs, launch.seq, launch.dependencies = (), (), launch.index + 1, []
        self.context.submissions[submission] = None
        return LaunchGroup(self.context, submission, self.lane, launches, len(launches), is_last=True)  # type: ignore[arg-type]

    def take(self, group: Any) -> bool:
        """Send a group, and return whether it was enqueued in the call."""
        self.lane.send(group)
        return self.lane.task is None

    async def wait_sent(self) -> None:
        """Wait until all that was sent is enqueued."""
        while self.lane.task is not None:
            await self.lane.task


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
    assert bench.context.failures.lost == [2]
    assert bench.context.failures.gone == [3]
    assert (bench.lane.enqueued, bench.lane.completed) == (3, 3)


@pytest.mark.parametrize(
    ("error", "is_kernel_called"),
    [(ValueError("broken"), True), (accel.LibraryError("-1"), True), (accel.InvalidArgumentError("no"), False)],
)
async def test_what_a_kernel_that_raised_may_have_written_is_torn(error: Exception, is_kernel_called: bool) -> None:
    bench = Bench()
    op = bench.op(fails(error))
    assert bench.take(op)
    assert isinstance(op.future.exception(), type(error) if isinstance(error, accel.AccelError) else accel.LibraryError)
    assert bench.context.failures.lost == [1] * is_kernel_called
    assert bench.context.failures.gone == [1] * (not is_kernel_called)


async def test_an_injected_error_comes_before_the_kernel_and_tears_nothing() -> None:
    bench = Bench()
    op = bench.op(action=accel.LibraryError("planned"))
    assert bench.take(op)
    assert str(op.future.exception()).count("planned") == 1
    assert (bench.calls, bench.context.failures.lost) == ([], [])


async def test_a_wait_that_could_not_be_made_is_owed_to_the_next_op() -> None:
    bench = Bench()
    other = bench.new_lane()
    other.advance(1)
    other.stream.error = ValueError("no mark")
    first = bench.op(dependencies=[(other, 1)])
    assert bench.take(first)
    assert first.future.exception().__cause__ is other.stream.error  # type: ignore[union-attr]
    assert (bench.calls, bench.lane.pending_waits) == ([], [(other, 1)])
    second = bench.op()
    second.seq, other.stream.error = 2, None
    assert bench.take(second)
    assert (len(bench.calls), bench.lane.pending_waits, other.completed) == (1, [], 1)


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("what", ["debug", "another lane"])
async def test_what_has_to_wait_is_not_enqueued_in_the_call(what: str, is_group: bool) -> None:
    bench = Bench()
    message: Any = bench.group(bench.kernel) if is_group else bench.op()
    other = bench.new_lane()
    if what == "debug":
        bench.context.core.options.debug = True
        bench.context.run_blocking = lambda call, *arguments: call(*arguments)
        bench.context.offloaded.call_kernel = lambda kernel, *arguments: kernel(*arguments)
    else:
        message.launches[0].dependencies = [(other, 1)]
    assert not bench.take(message)
    behind = bench.op()
    behind.seq = 2
    assert not bench.take(behind), "what is sent after it keeps its place"
    await turns()
    assert len(bench.calls) == (2 if what == "debug" else 0)
    other.advance(1)
    await bounded(bench.wait_sent())
    assert len(bench.calls) == 2
    assert bench.context.retired == [(1, True)] * 2
    assert bench.lane.stream.synchronized == (2 if what == "debug" else 0)


async def test_a_batch_is_enqueued_as_far_as_nothing_has_to_be_waited_for() -> None:
    bench = Bench()
    group, other = bench.group(*[bench.kernel] * 3), bench.new_lane()
    group.launches[1].dependencies = [(other, 1)]
    assert not bench.take(group)
    assert (len(bench.calls), bench.lane.enqueued) == (1, 1)
    other.advance(1)
    await bounded(bench.wait_sent())
    assert (len(bench.calls), bench.lane.enqueued, bench.context.retired) == (3, 3, [(3, True)])


async def test_a_lane_that_is_stopped_enqueues_nothing_more() -> None:
    bench = Bench()
    op, other = bench.op(), bench.new_lane()
    op.dependencies = [(other, 1)]
    assert not bench.take(op)
    enqueuing = bench.lane.task
    assert enqueuing is not None
    enqueuing.cancel()
    await bounded(asyncio.wait((enqueuing,)))
    other.advance(1)
    await turns()
    assert bench.calls == []


@pytest.mark.parametrize("error", [None, ValueError("broken")])
async def test_an_op_that_is_enqueued_beside_the_loop(error: Exception | None) -> None:
    bench = Bench()
    bench.context.run_blocking = lambda function, call, kernel, *arguments: error or kernel(*arguments)
    op = bench.op()
    op.is_offloaded = True
    assert not bench.take(op)
    await bounded(bench.wait_sent())
    assert op.launched == 1
    assert len(bench.calls) == (error is None)
    assert bench.context.failures.lost == [1] * (error is not None)
    assert op.future.done() is (error is not None)


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_a_batch_whose_end_cannot_be_marked_is_answered_and_all_of_it_is_torn(count: int) -> None:
    bench = Bench()
    bench.lane.stream.error = ValueError("no mark")
    group = bench.group(*[bench.kernel] * count)
    assert bench.take(group)
    assert group.submission.future.exception().__cause__ is bench.lane.stream.error  # type: ignore[union-attr]
    assert bench.context.failures.lost == list(range(1, count + 1))
    assert bench.context.retired == [(count, True)]
    assert bench.context.told == []


@pytest.mark.parametrize("is_group", [False, True])
async def test_an_op_is_enqueued_beside_the_loop_where_the_backend_cannot_say(is_group: bool) -> None:
    bench = Bench()
    bench.context.kernels.may_block = fails(AttributeError("no such field"))
    bench.context.run_blocking = lambda function, call, kernel, *arguments: kernel(*arguments)
    assert not bench.take(bench.group(bench.kernel) if is_group else bench.op())
    assert bench.calls == []
    await bounded(bench.wait_sent())
    assert len(bench.calls) == 1


async def test_an_op_for_which_there_is_no_thread_counts_once() -> None:
    bench = Bench()
    error = ValueError("no thread")
    bench.context.run_blocking = fails(error)
    op = bench.op()
    op.is_offloaded = True
    assert not bench.take(op)
    await bounded(bench.wait_sent())
    assert op.future.exception().__cause__ is error  # type: ignore[union-attr]
    assert op.launched == 1, "what is not known to have stayed away may have come"
    assert bench.context.failures.lost == []


@pytest.mark.parametrize("wanted", [0, 1, 1 << 20])
async def test_a_workspace_is_needed_where_any_is_wanted(wanted: int) -> None:
    lane = Bench().lane
    lane.stream = SimpleNamespace(workspace_wanted=lambda library: wanted, use_workspace=lambda *_: None, release_workspaces=list)
    assert lane.needs_workspace("blas") is (wanted > 0)


async def test_a_kernel_that_ends_after_its_op_was_answered_is_still_named() -> None:
    bench = Bench()
    fault = accel.LibraryError("gone", scope=accel.FaultScope.CONTEXT)

    def kernel(*_: Any) -> None:
        op.reject(accel.ContextPoisonedError("the context faulted"))  # what becomes of all that is in flight
        bench.context.fault = fault
        raise fault

    op = bench.op(kernel)
    assert bench.take(op)
    assert [error.op for error in bench.context.told] == ["empty"]
    assert isinstance(op.future.exception(), accel.ContextPoisonedError)
