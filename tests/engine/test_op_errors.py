"""What goes wrong in one op is that op's error, and of those that read its output: every op is answered, and the device goes on."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import accel
from accel import registry
from accel.ops import Plan
from tests.cpu_ops_support import PATIENCE, Ways, Work
from tests.device_support import bounded, failure, task, until
from tests.op_bugs_support import NONSENSE, ODD, RELEASE, Bug, Bugs, BugsOnTheLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator


pytestmark = pytest.mark.usefixtures("nothing_left")


HOSTS = pytest.mark.parametrize("host", ["inline", "process"])


async def error_of(work: Awaitable[Any]) -> accel.AccelError:
    """Return what an op is answered with; an answer that is no error of the tree, or none in time, fails the test."""
    with pytest.raises(accel.AccelError) as caught:
        await asyncio.wait_for(work, PATIENCE)
    assert caught.value.scope is accel.FaultScope.OP
    return caught.value


async def still_works(device: accel.Device, before: accel.AccelRef) -> None:
    """See that the device has lost nothing, and takes the next op."""
    assert (device.state, device.generation) == (accel.DeviceState.READY, 1)
    assert device.health().is_ready
    assert not before.is_stale
    after = await asyncio.wait_for(device.run(Bug(before)), PATIENCE)
    np.testing.assert_array_equal(await asyncio.wait_for(device.get(after), PATIENCE), np.arange(4.0) + 1)


@pytest.mark.parametrize(("host", "library"), [("inline", Bugs), ("inline", BugsOnTheLoop), ("process", Bugs)])
async def test_whatever_a_kernel_raises_is_its_ops_error(host: Any, library: type[Bugs]) -> None:
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host=host)
        await device.register(library)
        x = await device.put(np.arange(4.0))
        for kind in ODD:
            for where in ("kernel", "half"):
                error = await error_of(device.run(Bug(x, f"{where}:{kind}")))
                assert error.op == "bug"
                if kind != "demanding":  # an error of the tree is the answer as it is
                    assert isinstance(error, accel.LibraryError)
                    assert error.library == "bugs"
                    assert "bug" in error.message
                    assert "'bugs'" in error.message
                    assert error.__cause__ is not None
        await still_works(device, x)


@HOSTS
async def test_in_a_batch_a_graph_and_a_quarantine_too(host: Any) -> None:
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host=host)
        await device.register(BugsOnTheLoop)
        x = await device.put(np.arange(4.0))
        for kind in ODD:
            with pytest.raises(accel.AccelError) as caught:
                async with asyncio.timeout(PATIENCE), device.batch() as batch:
                    first = batch.run(Bug(x))
                    batch.run(Bug(x, f"kernel:{kind}"))
                    batch.run(Bug(x))
            assert caught.value.op_index == 1
            np.testing.assert_array_equal(await device.get(first), np.arange(4.0) + 1)
            with pytest.raises(accel.AccelError):
                async with asyncio.timeout(PATIENCE):
                    async with device.graph() as graph:
                        graph.run(Bug(x, f"kernel:{kind}"))
                    await graph.replay()
        await still_works(device, x)
        if host == "inline":
            async with asyncio.timeout(PATIENCE), device.quarantine() as other:
                y = await other.put(np.arange(4.0))
                assert isinstance(await error_of(other.run(Bug(y, "kernel:cancelled"))), accel.LibraryError)
                await still_works(other, y)


async def test_what_result_and_plan_do_is_the_ops_error(hosted: accel.Device) -> None:
    await hosted.register(Bugs)
    x = await hosted.put(np.arange(4.0))
    durable = await hosted.put(np.arange(3.0), durable=True)
    for kind in ("value", "stop", *ODD):
        await error_of(hosted.run(Bug(x, f"result:{kind}")))
    for nonsense in NONSENSE:
        error = await error_of(hosted.run(Bug(x, f"nonsense:{nonsense}")))
        assert isinstance(error, (accel.LibraryError, accel.InvalidArgumentError)), nonsense
    for kind in ("cancelled", "generator"):
        await error_of(hosted.run(Bug(x, f"plan:{kind}")))
    async with hosted.batch() as batch:
        for where in [f"result:{kind}" for kind in ("value", *ODD)] + ["plan:cancelled", "plan:generator"]:
            with pytest.raises(accel.AccelError):
                batch.run(Bug(x, where))
        recorded = batch.run(Bug(x))
        assert len(batch) == 1
    np.testing.assert_array_equal(await hosted.get(recorded), np.arange(4.0) + 1)
    np.testing.assert_array_equal(await hosted.get(durable), np.arange(3.0))
    await still_works(hosted, x)
    assert hosted.info().restarts == 0


async def test_durable_outputs_of_an_op_that_failed_halfway_are_torn(hosted: accel.Device) -> None:
    await hosted.register(Bugs)
    x = await hosted.put(np.arange(4.0))
    sound, torn = await hosted.put(np.zeros(4), durable=True), await hosted.put(np.zeros(4), durable=True)
    view = torn[1:3]
    await error_of(hosted.run(Bug(x, "half:value", torn)))
    for ref in (torn, view):
        with pytest.raises(accel.StaleRefError) as caught:
            await asyncio.wait_for(hosted.get(ref), PATIENCE)
        assert caught.value.reason == "torn"
    np.testing.assert_array_equal(await hosted.get(sound), np.zeros(4))
    await hosted.put(np.full(4, 2.0), out=torn)
    np.testing.assert_array_equal(await hosted.get(torn), np.full(4, 2.0))
    np.testing.assert_array_equal(await hosted.get(view), np.full(2, 2.0))
    await still_works(hosted, x)


async def test_memory_of_an_op_that_failed_halfway_is_its_own_until_the_stream_has_passed() -> None:
    RELEASE.clear()
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host="inline")
        await device.register(Bugs)
        x = await device.put(np.arange(4.0))
        try:
            error = await error_of(device.run(Bug(x, "held:cancelled")))
            assert isinstance(error, accel.LibraryError)
            others = [await asyncio.wait_for(device.put(np.full(4, float(n))), PATIENCE) for n in range(8)]
        finally:
            RELEASE.set()
        await asyncio.wait_for(device.run(Bug(x)), PATIENCE)  # after the work that was held
        for n, other in enumerate(others):
            np.testing.assert_array_equal(await device.get(other), np.full(4, float(n)))


async def test_arrays_of_a_batch_that_failed_are_its_own_until_the_stream_has_passed() -> None:
    """The array that a child still has to read must not be given to the next op for its own."""
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host="process")
        await device.register(BugsOnTheLoop)
        x = await device.put(np.arange(4.0))
        ones, twos = np.ones(1 << 18), np.full(1 << 18, 2.0)
        with pytest.raises(accel.LibraryError):
            async with asyncio.timeout(PATIENCE), device.batch() as batch:
                batch.run(Bug(x, "slow"))
                first = batch.put(ones)
                batch.run(Bug(x, "kernel:value"))
        await asyncio.wait_for(device.put(twos), PATIENCE)
        np.testing.assert_array_equal(await asyncio.wait_for(device.get(first), PATIENCE), ones)


@pytest.fixture(autouse=True)
def gate() -> Iterator[None]:
    Ways.gate.clear()
    yield
    Ways.gate.set()


async def opened(system: accel.System, host: Any = "inline") -> accel.Device:
    device = await system.open_device("cpu", host=host)
    await device.register(Ways)
    return device


def is_of_the_op(error: object, index: int | None = None) -> bool:
    return (
        isinstance(error, accel.LibraryError)
        and (error.scope, error.op, error.library, error.op_index) == (accel.FaultScope.OP, "work", "ways", index)
        and "ValueError: a bad request" in error.message
    )


async def ended(*sent: asyncio.Task[Any]) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*sent, return_exceptions=True), PATIENCE)


@HOSTS
async def test_an_exception_in_submitted_work_is_an_error_of_that_op(host: str) -> None:
    async with accel.System() as system:
        device = await opened(system, host)
        x = await device.put(np.arange(4.0))
        kept = await device.put(np.ones(3), durable=True)
        for gated in (False, True, False, True, False):
            Ways.gate.set()
            with pytest.raises(accel.LibraryError) as caught:
                await device.run(Work(x, "raise", gated=gated and host == "inline"), timeout=PATIENCE)
            assert is_of_the_op(caught.value)
            assert caught.value.__cause__ is not None
        np.testing.assert_array_equal(await device.get(await device.run(Work(x), timeout=PATIENCE)), -np.arange(4.0))
        np.testing.assert_array_equal(await device.get(kept), np.ones(3))
        assert (device.state, device.generation, device.info().restarts) == (accel.DeviceState.READY, 1, 0)


@HOSTS
async def test_every_kind_of_exception_is_answered_and_only_a_fault_is_a_fault(host: str) -> None:
    async with accel.System() as system:
        device = await opened(system, host)
        x = await device.put(np.arange(4.0))
        for way, kind in (
            ("memory", accel.OutOfMemoryError),
            ("cancel", accel.LibraryError),
            ("exit", accel.LibraryError),
            ("unprintable", accel.LibraryError),
        ):
            with pytest.raises(kind) as caught:
                await device.run(Work(x, way), timeout=PATIENCE)
            error = caught.value
            assert (error.scope, error.op, error.retryable) == (accel.FaultScope.OP, "work", way == "memory")
        assert (device.state, device.generation) == (accel.DeviceState.READY, 1)
        with pytest.raises(accel.ContextPoisonedError):
            await device.run(Work(x, "fault"), timeout=PATIENCE)
        x = await device.put(np.arange(4.0), timeout=PATIENCE)
        assert device.generation == 2


async def test_what_was_enqueued_later_and_reads_the_output_fails_with_the_same_error() -> None:
    async with accel.System() as system:
        device = await opened(system)
        x, y = await device.put(np.arange(4.0)), await device.put(np.ones(4))
        z = await device.put(np.ones(4))
        await device.elementwise.unary("neg", await device.elementwise.unary("neg", x))  # its library is there

        async def batch() -> None:
            async with device.batch() as batch:
                batch.elementwise.unary("relu", x)
                batch.elementwise.unary("neg", y, out=z)

        failing = [
            device.run(Work(x, "raise", y, gated=True)),
            device.elementwise.unary("neg", y),
            device.get(y),
            device.get(y[1:3]),
            device.run(Work(y)),
            batch(),
            device.get(z),
        ]
        sent = [asyncio.create_task(each) for each in (*failing, device.run(Work(x)), device.get(x))]
        while device.info().in_flight < len(sent):
            await asyncio.sleep(0)
        Ways.gate.set()
        *errors, good, _ = await ended(*sent)
        assert [is_of_the_op(error, 1 if at == 5 else None) for at, error in enumerate(errors)] == [True] * len(failing)
        assert len({id(error) for error in errors}) == len(failing)
        np.testing.assert_array_equal(await device.get(good), -np.arange(4.0))
        assert (device.state, device.generation) == (accel.DeviceState.READY, 1)


@dataclass(frozen=True, eq=False, slots=True)
class Refused(accel.KernelOp):
    """An op whose kernel refuses it, before it enqueues anything."""

    library: ClassVar[str] = "refusing"
    kind: ClassVar[str] = "refused"

    out: accel.AccelRef
    updates: bool

    def plan(self) -> Plan:
        return Plan((), (self.out,), (), updates=self.updates)


class Refusing(accel.KernelLibrary):
    name = "refusing"

    @accel.kernel(Refused)
    def refused(self, op: Refused, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        raise accel.UnsupportedError("refused")


@pytest.mark.parametrize("updates", [False, True])
async def test_what_reads_behind_an_op_that_never_ran_fails_with_the_write_before_it(updates: bool) -> None:
    async with accel.System() as system:
        device = await opened(system)
        await device.register(Refusing)
        x, y = await device.put(np.arange(4.0)), await device.put(np.ones(4))
        sent: list[asyncio.Task[Any]] = [
            asyncio.create_task(device.run(op)) for op in (Work(x, "raise", y, gated=True), Refused(y, updates))
        ]
        sent.append(asyncio.create_task(device.get(y)))
        await until(lambda: sent[1].done() and device.info().in_flight >= 2)
        Ways.gate.set()
        failed, refused, read = await ended(*sent)
        assert is_of_the_op(failed)
        assert isinstance(refused, accel.UnsupportedError)
        assert is_of_the_op(read), "it would read what the failed one has left"
        with pytest.raises(accel.LibraryError):
            await device.get(y)


async def test_a_failed_output_stays_failed_until_it_is_wholly_rewritten() -> None:
    async with accel.System() as system:
        device = await opened(system)
        x, y = await device.put(np.arange(4.0)), await device.put(np.ones(4))
        with pytest.raises(accel.LibraryError):
            await device.run(Work(x, "raise", y))
        part = device.put(np.zeros(2), out=y[:2])
        for use in (part, device.get(y), device.get(y[2:]), device.blas.axpy(x, y), device.copy(y, x)):
            with pytest.raises(accel.LibraryError) as caught:
                await use
            assert is_of_the_op(caught.value)
        np.testing.assert_array_equal(await device.get(x), np.arange(4.0))
        await device.run(Work(x, out=y))
        np.testing.assert_array_equal(await device.get(y), -np.arange(4.0))


@HOSTS
async def test_a_batch_says_which_op_failed_and_keeps_what_came_before(host: str) -> None:
    async with accel.System() as system:
        device = await opened(system, host)
        x, y = await device.put(np.arange(4.0)), await device.put(np.ones(4))
        with pytest.raises(accel.LibraryError) as caught:
            async with device.batch(timeout=PATIENCE) as batch:
                good = batch.run(Work(x))
                bad = batch.run(Work(x, "raise"))
                after = batch.elementwise.unary("neg", bad)
                batch.run(Work(bad, out=y))
        assert is_of_the_op(caught.value, 1)
        np.testing.assert_array_equal(await device.get(good), -np.arange(4.0))
        for void in (bad, after):
            with pytest.raises(accel.StaleRefError):
                await device.get(void)
        with pytest.raises(accel.LibraryError) as caught:
            await device.get(y)
        assert is_of_the_op(caught.value)
        assert (device.state, device.generation) == (accel.DeviceState.READY, 1)


async def test_a_replay_fails_and_the_next_one_works() -> None:
    async with accel.System() as system:
        device = await opened(system)
        x, y = await device.put(np.arange(4.0)), await device.put(np.ones(4))
        async with device.graph() as graph:
            made = graph.run(Work(x, "checked"))
            graph.elementwise.unary("neg", made, out=y)
        await graph.replay(timeout=PATIENCE)
        np.testing.assert_array_equal(await device.get(y), np.arange(4.0))
        await device.put(-np.ones(4), out=x)
        for failing in (graph.replay(timeout=PATIENCE), device.get(made), device.get(y)):
            with pytest.raises(accel.LibraryError, match="ValueError: a bad request") as caught:
                await failing
            assert (caught.value.scope, caught.value.op) == (accel.FaultScope.OP, "replay")
        await device.put(np.ones(4), out=x)
        await graph.replay(timeout=PATIENCE)
        np.testing.assert_array_equal(await device.get(y), np.ones(4))
        np.testing.assert_array_equal(await device.get(made), -np.ones(4))
        assert device.generation == 1


async def test_results_of_a_failed_replay_stay_failed_while_an_input_is_changed() -> None:
    async with accel.System() as system:
        device = await opened(system)
        async with device.graph() as graph:
            x = graph.empty(4, np.float64)
            made = graph.run(Work(x, "checked"))
            last = graph.elementwise.unary("neg", made)
        await device.put(-np.ones(4), out=x)
        with pytest.raises(accel.LibraryError):
            await graph.replay(timeout=PATIENCE)
        await device.put(np.ones(4), out=x)
        np.testing.assert_array_equal(await device.get(x), np.ones(4))
        for ref in (made, last):
            with pytest.raises(accel.LibraryError, match="a bad request"):
                await device.get(ref)
        await graph.replay(timeout=PATIENCE)
        np.testing.assert_array_equal(await device.get(made), -np.ones(4))
        np.testing.assert_array_equal(await device.get(last), np.ones(4))


async def test_results_of_a_replay_that_fails_stay_failed_if_an_input_was_changed_behind_it() -> None:
    async with accel.System() as system:
        device = await opened(system)
        async with device.graph() as graph:
            x, y = graph.empty(4, np.float64), graph.empty(4, np.float64)
            made = graph.run(Work(x, "checked", gated=True))
            graph.elementwise.binary("add", made, y)
        Ways.gate.set()
        await device.put(np.ones(4), out=y)
        await device.put(np.ones(4), out=x)
        await graph.replay(timeout=PATIENCE)
        await device.put(-np.ones(4), out=x)
        Ways.gate.clear()
        changing = [device.put(np.full(4, 2.0), out=x), device.put(np.full(4, 3.0), out=y)]
        sent = [asyncio.create_task(each) for each in (graph.replay(timeout=PATIENCE), *changing)]
        await until(lambda: device.info().in_flight == len(sent))
        Ways.gate.set()
        failed, *_ = await ended(*sent)
        assert isinstance(failed, accel.LibraryError)
        np.testing.assert_array_equal(await device.get(x), np.full(4, 2.0))
        np.testing.assert_array_equal(await device.get(y), np.full(4, 3.0))
        with pytest.raises(accel.LibraryError, match="a bad request"):
            await device.get(made)


async def test_a_failed_input_of_a_graph_leaves_its_other_buffers_alone() -> None:
    async with accel.System() as system:
        device = await opened(system)
        async with device.graph() as graph:
            x = graph.empty(4, np.float64)
            made = graph.elementwise.unary("neg", x)
        await device.put(np.ones(4), out=x)
        await graph.replay(timeout=PATIENCE)
        source = await device.put(np.ones(4))
        with pytest.raises(accel.LibraryError):
            await device.run(Work(source, "raise", x))
        np.testing.assert_array_equal(await device.get(made), -np.ones(4))
        with pytest.raises(accel.LibraryError):
            await device.get(x)
        await device.put(np.ones(4), out=x)
        np.testing.assert_array_equal(await device.get(x), np.ones(4))


async def test_a_replay_does_not_read_what_a_failed_op_has_left_in_an_input() -> None:
    async with accel.System() as system:
        device = await opened(system)
        async with device.graph() as graph:
            x, y = graph.empty(4, np.float64), graph.empty(4, np.float64)
            made = graph.elementwise.binary("add", x, y)
        source = await device.put(np.ones(4))
        failing = device.run(Work(source, "raise", x, gated=True))
        sent = [asyncio.create_task(each) for each in (failing, device.put(np.ones(4), out=y), graph.replay(timeout=PATIENCE))]
        await until(lambda: device.info().in_flight == len(sent))
        Ways.gate.set()
        failed, written, replayed = await ended(*sent)
        assert is_of_the_op(failed)
        assert written is y
        assert is_of_the_op(replayed)
        for use in (device.get(x), device.get(made), graph.replay(timeout=PATIENCE)):
            with pytest.raises(accel.LibraryError):
                await use
        (copied,) = await graph.into_function([x], [made])(source)  # which overwrites the input
        np.testing.assert_array_equal(await device.get(copied), np.full(4, 2.0))


async def test_a_graph_with_state_of_its_own_waits_for_it_to_be_rewritten_after_a_replay_that_failed() -> None:
    async with accel.System() as system:
        device = await opened(system)
        one = await device.put(np.ones(4))
        async with device.graph() as graph:
            state = graph.empty(4, np.float64)
            graph.elementwise.binary("add", state, one, out=state)
            made = graph.run(Work(state, "checked"))
        await device.put(np.full(4, -1.5), out=state)
        for use in (graph.replay(timeout=PATIENCE), graph.replay(timeout=PATIENCE), device.get(state), device.get(made)):
            with pytest.raises(accel.LibraryError, match="a bad request"):
                await use
        await device.put(np.ones(4), out=state)
        await graph.replay(timeout=PATIENCE)
        np.testing.assert_array_equal(await device.get(made), np.full(4, -2.0))


async def test_results_of_a_graph_that_writes_a_part_of_a_buffer_are_sound_after_a_replay_that_works() -> None:
    async with accel.System() as system:
        device = await opened(system)
        x, y = await device.put(-np.ones(4)), await device.put(np.zeros((2, 4)))
        async with device.graph() as graph:
            made = graph.run(Work(x, "checked"))
            graph.copy(made, y[0])
        with pytest.raises(accel.LibraryError, match="ValueError: a bad request"):
            await graph.replay(timeout=PATIENCE)
        await device.put(np.ones(4), out=x)
        await device.put(np.zeros((2, 4)), out=y)
        await graph.replay(timeout=PATIENCE)
        np.testing.assert_array_equal(await device.get(made), -np.ones(4))
        np.testing.assert_array_equal(await device.get(y), [-np.ones(4), np.zeros(4)])


@dataclass(frozen=True, eq=False, slots=True)
class Break(accel.KernelOp):
    """Does not work."""

    library: ClassVar[str] = "broken"
    kind: ClassVar[str] = "break"

    x: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((), (self.x,), ())


class Broken(accel.KernelLibrary):
    """Raises on the loop's thread."""

    name = "broken"
    blocking = False

    error: ClassVar[Exception] = ZeroDivisionError("broken")

    @accel.kernel(Break)
    def break_it(self, op: Break, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        raise self.error


class Beside(Broken):
    """Raises on another thread."""

    blocking = True


@pytest.mark.parametrize("library", [Broken, Beside])
@pytest.mark.parametrize("depends", [False, True])
async def test_a_bug_keeps_no_operand_alive(library: type[Broken], depends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")
    async with accel.System() as system:
        device = await system.open_device("late", libraries=["memory"])
        await device.register(library)
        x: list[accel.AccelRef] = [await device.put(np.ones(8))]

        async def fails() -> None:
            before = task(device.put(np.zeros(8), out=x[0])) if depends else None  # in another stream
            await asyncio.sleep(0)
            notes: list[str] = []
            try:  # what pytest.raises gives would keep this frame alive
                await device.run(Break(x[0]))
            except accel.LibraryError as error:
                notes += error.__cause__.__notes__  # type: ignore[union-attr]
            assert len(notes) == 1, "one instance, raised again and again, does not grow"
            assert "in break_it" in notes[0]
            if before is not None:
                await before

        gc.collect()
        gc.disable()
        try:
            await bounded(fails())
            is_there = weakref.ref(x.pop())
            await until(lambda: is_there() is None, "the operand is gone")
            await until(lambda: device.info().memory.used == 0, "its memory is free")
        finally:
            gc.enable()


class Bare(accel.AccelError):
    """Leaves the constructor of its base out: it has no fields."""

    def __init__(self) -> None:
        pass


class Single(accel.LibraryError):
    """Cannot be cloned."""

    def clone(self, **fields: Any) -> Any:
        raise RuntimeError("there is one of it")


class Later(Broken):
    """Raises in the stream, on a thread or, for small work, on the loop's; or at once."""

    cost: ClassVar[float | None]
    raises: ClassVar[type[accel.AccelError]]

    @accel.kernel(Break)
    def break_it(self, op: Break, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        def work() -> None:
            raise self.raises

        if self.cost is None:
            work()
        stream.submit(work, self.cost)


@pytest.mark.parametrize("raises", [Bare, Single])
@pytest.mark.parametrize("cost", [None, 1e-6, 1.0])
async def test_an_error_without_fields_or_that_cannot_be_cloned_is_answered(
    cost: float | None, raises: type[accel.AccelError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Later, "cost", cost, raising=False)
    monkeypatch.setattr(Later, "raises", raises, raising=False)
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device("cpu")
        await device.register(Later)
        x = await device.put(np.ones(8))
        for _ in range(2):  # the stream goes on
            error = await failure(device.run(Break(x)), accel.LibraryError)
            what = "the break kernel of library 'broken'" if cost is None else "the work of break of library 'broken'"
            assert error.message.startswith(f"{what} raised {raises.__name__}")
            assert type(error.__cause__) is raises
