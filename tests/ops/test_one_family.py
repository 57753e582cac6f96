"""A whole family from one module: two ops, kernels, samples; used in every way that a built-in one is."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, assert_type

import numpy as np
import pytest

import accel
from accel.cli import doctor
from accel.cpu.backend import CpuBackend
from accel.cpu.views import array
from accel.family import BackendPart, Sample
from accel.ops import BlasOps, Family, FamilyOp, OpNamespace, Plan, Spec, method
from accel.ops.base import operand
from accel.testing import FaultPlan, conformance
from accel.testing.conformance.device_harness import DeviceHarness

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("nothing_left")

M = TypeVar("M")


@dataclass(frozen=True, eq=False, slots=True)
class Median(FamilyOp):
    """The median of all elements, plus ``shift``, as a 0-d buffer."""

    library: ClassVar[str] = "stats"
    kind: ClassVar[str] = "median"

    x: accel.AccelRef
    shift: float = 0.0

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x = operand("x", self.x)
        if not x.size:
            raise accel.InvalidArgumentError("no elements have no median", remedy="Leave empty buffers out.")
        return Plan((x,), (), (Spec((), x.dtype),))


@dataclass(frozen=True, eq=False, slots=True)
class Extremes(FamilyOp[tuple[accel.AccelRef, accel.AccelRef]]):
    """The least and the largest element."""

    library: ClassVar[str] = "stats"
    kind: ClassVar[str] = "extremes"

    x: accel.AccelRef

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        made = Spec((), operand("x", self.x).dtype)
        return Plan((self.x,), (), (made, made))


class StatsOps(OpNamespace[M]):
    """Order statistics."""

    __slots__ = ()
    library: ClassVar[str] = "stats"

    median = method(Median)
    extremes = method(Extremes)


def _median(lane: Any, op: Median, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x, out = array(inputs[0], op.x.shape, op.x.dtype.numpy), array(outputs[0], (), op.x.dtype.numpy)
    lane.stream.submit(lambda: np.copyto(out, np.median(x) + op.shift, casting="same_kind"), 1e-8 * x.size)


def _extremes(lane: Any, op: Extremes, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x = array(inputs[0], op.x.shape, op.x.dtype.numpy)
    least, largest = (array(address, (), op.x.dtype.numpy) for address in outputs)

    def work() -> None:
        np.min(x, out=least)
        np.max(x, out=largest)

    lane.stream.submit(work, 1e-9 * x.size)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in ((1,), (3, 5), (1000,)):
        x = rng.standard_normal(shape)
        yield Sample(f"median {shape}", lambda stats, x: stats.median(x, shift=2.0), (x,), np.asarray(np.median(x) + 2.0))
        yield Sample(f"extremes {shape}", lambda stats, x: stats.extremes(x), (x,), (np.asarray(x.min()), np.asarray(x.max())))


STATS = Family(
    StatsOps, parts={"cpu": BackendPart({"median": _median, "extremes": _extremes}, wheels=("no-such-wheel",), samples=_samples)}
)

HOSTS = pytest.mark.parametrize("host", ["inline", "process"])
Host = Literal["inline", "process"]


async def test_its_ops_are_awaited_batched_and_recorded(hosted: accel.Device, rng: np.random.Generator) -> None:
    data = rng.standard_normal(101)
    x = await hosted.put(data)
    stats = hosted.family(StatsOps)
    assert await hosted.get(await stats.median(x, shift=1.0, timeout=30.0)) == np.median(data) + 1.0
    least, largest = await stats.extremes(x)
    assert (await hosted.get(least), await hosted.get(largest)) == (data.min(), data.max())
    async with hosted.batch(timeout=30.0) as batch:
        doubled = batch.elementwise.binary("add", x, x)
        middle = batch.family(StatsOps).median(doubled)
    assert await hosted.get(middle) == np.median(2 * data)
    async with hosted.graph() as graph:
        recorded = graph.family(StatsOps).median(x)
    await hosted.put(data + 5, out=x)
    await graph.replay(timeout=30.0)
    assert await hosted.get(recorded) == np.median(data + 5)


async def test_it_is_an_attribute_of_the_device_and_of_its_batches() -> None:
    async with accel.System() as system:
        device: Any = await system.open_device("cpu")
        with pytest.raises(AttributeError):
            device.stats  # noqa: B018 - the device has not met it yet
        assert device.family(StatsOps) is device.stats
        x = await device.put(np.arange(5.0))
        assert await device.get(await device.stats.median(x)) == 2.0
        async with device.batch() as batch:
            middle = batch.stats.median(x)
        assert await device.get(middle) == 2.0
        assert not hasattr(batch, "stats")
        with pytest.raises(AttributeError, match=r"library 'stats' has no 'mode'; it has extremes, median"):
            device.stats.mode(x)


async def test_arguments_timeouts_and_faults_are_those_of_any_op() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=FaultPlan().fail_at(2, accel.LibraryError("planned"), op="median"))
        stats = device.family(StatsOps)
        with pytest.raises(accel.InvalidArgumentError, match="no median") as refused:
            await stats.median(await device.zeros(0))
        assert (refused.value.op, refused.value.device) == ("median", "cpu:0")
        x = await device.put(np.arange(5.0))
        await stats.median(x)
        with pytest.raises(accel.LibraryError, match="planned"):
            await stats.median(x)
        with pytest.raises(accel.DeadlineExceededError):
            await stats.median(x, timeout=0.0)
        with pytest.raises(accel.InvalidArgumentError, match="timeout of its own"):
            await device.run(Median(x, timeout=1.0), timeout=1.0)
        with pytest.raises(accel.InvalidArgumentError, match="an op of a batch has no timeout"):
            async with device.batch() as batch:
                batch.family(StatsOps).median(x, timeout=1.0)


@pytest.mark.parametrize("check", conformance.checks("families", families=(STATS,)), ids=lambda check: check.name)
@HOSTS
async def test_the_conformance_suite_checks_its_samples(check: conformance.Check, host: Host) -> None:
    assert check.name == "families.stats"
    await check.run(DeviceHarness(CpuBackend(), options={"host": host}))


async def test_a_wrong_kernel_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        lane.stream.submit(lambda: np.copyto(array(outputs[0], (), np.dtype(np.float64)), 0.25), 1e-6)

    monkeypatch.setitem(STATS.parts["cpu"].kernels, "median", wrong)
    (check,) = conformance.checks("families", families=(STATS,))
    with pytest.raises(AssertionError, match=r"median \(1,\), awaited"):
        await check.run(DeviceHarness(CpuBackend()))


def test_the_doctor_finds_it_and_what_it_lacks(tmp_path: Path) -> None:
    info = tmp_path / "stats-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stats\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[accel.families]\nstats = tests.ops.test_one_family:STATS\n")
    program = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "from accel.cli.doctor import checks\n"
        "for check in checks():\n"
        "    print(check.name, check.state, check.detail, check.remedy, sep='|')\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout
    lines = printed.replace("uv pip", "pip").splitlines()  # as accel was installed here
    assert "family stats|ok|extremes, median|" in lines
    assert "family stats on cpu|missing|not installed: no-such-wheel|pip install no-such-wheel" in lines
    assert any(line.startswith("family blas|ok|") for line in lines)


def test_a_family_is_checked_when_it_is_made() -> None:
    with pytest.raises(accel.InvalidArgumentError, match="Extremes is an op of <Family stats> already"):
        Family(StatsOps)

    class Empty(OpNamespace[M]):
        library: ClassVar[str] = "empty"

    with pytest.raises(accel.InvalidArgumentError, match="empty has kernels for nothing"):
        Family(Empty, {"nothing": _median})


async def test_a_family_with_a_name_that_is_taken_is_refused(device: accel.Device) -> None:
    @dataclass(frozen=True, eq=False, slots=True)
    class Gemm(FamilyOp):
        library: ClassVar[str] = "blas"
        kind: ClassVar[str] = "gemm"
        x: accel.AccelRef

        def plan(self) -> Plan:
            return Plan((self.x,), (), (Spec((), self.x.dtype),))

    class Mine(OpNamespace[M]):
        library: ClassVar[str] = "blas"
        gemm = method(Gemm)

    Family(Mine, {"gemm": _median})
    with pytest.raises(accel.InvalidArgumentError, match="another library 'blas'"):
        await device.family(Mine).gemm(await device.zeros(1))


async def test_two_families_or_libraries_of_one_name_are_refused(rng: np.random.Generator) -> None:
    @dataclass(frozen=True, eq=False, slots=True)
    class Other(FamilyOp):
        library: ClassVar[str] = "stats"
        kind: ClassVar[str] = "median"
        x: accel.AccelRef
        shift: float = 42.0

        def plan(self) -> Plan:
            return Plan((self.x,), (), (Spec((), self.x.dtype),))

    class Others(OpNamespace[M]):
        library: ClassVar[str] = "stats"
        median = method(Other)

    class Library(accel.KernelLibrary):
        name = "stats"

        @accel.kernel(Other)
        def median(self, op: Other, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None: ...

    Family(Others, {"median": _median})
    async with accel.System() as system:
        device = await system.open_device("cpu")
        x = await device.put(rng.standard_normal(5))
        await device.family(StatsOps).median(x)
        with pytest.raises(accel.InvalidArgumentError, match="another library 'stats'"):
            await device.family(Others).median(x)
        with pytest.raises(accel.InvalidArgumentError, match="has a library 'stats'"):
            await device.register(Library)
        stats: Any = device
        assert type(stats.stats) is StatsOps
        assert "stats" in dir(device)
        assert "status" not in dir(device)
        assert "put" in dir(device.batch())
        assert "put" not in dir(device.graph())
        other = await system.open_device("cpu")
        await other.register(Library)
        with pytest.raises(accel.InvalidArgumentError, match="another library 'stats'"):
            await other.family(StatsOps).median(await other.zeros(3))


async def test_an_op_without_a_family_says_what_is_missing(device: accel.Device) -> None:
    @dataclass(frozen=True, eq=False, slots=True)
    class Alone(FamilyOp):
        library: ClassVar[str] = "alone"
        kind: ClassVar[str] = "alone"
        x: accel.AccelRef
        creates: Any = ()

        def plan(self) -> Plan:
            return Plan((self.x,), (), self.creates)

    class AloneOps(OpNamespace[M]):
        library: ClassVar[str] = "alone"
        alone = method(Alone)

    x = await device.zeros(3)
    with pytest.raises(accel.UnsupportedError, match=r"Make the accel\.ops\.Family of Alone"):
        await device.family(AloneOps).alone(x)
    with pytest.raises(accel.InvalidArgumentError, match=r"plan\(\) of alone names results that are not Specs"):
        await device.family(AloneOps).alone(x, ("float32",))

    class Plain(accel.KernelOp):
        library: ClassVar[str] = "alone"
        kind: ClassVar[str] = "plain"

        def plan(self) -> Plan:
            return Plan((), (), ())

    made: Any = method
    with pytest.raises(accel.InvalidArgumentError, match="Plain is not a FamilyOp"):
        made(Plain)


def test_an_entry_point_that_names_no_family_is_a_failure_of_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {
        "gone": "tests.ops.no_such_module:FAMILY",
        "good": "tests.ops.test_one_family:STATS",
        "ops": "tests.ops.test_one_family:StatsOps",
    }
    points = [metadata.EntryPoint(name, value, "accel.families") for name, value in named.items()]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    found = {check.name: check for check in doctor._families()}
    assert found["family stats"].state == "ok"
    assert found["family blas"].state == "ok"
    assert (found["family gone"].state, found["family ops"].state) == ("failed", "failed")
    assert "No module named 'tests.ops.no_such_module'" in found["family gone"].detail
    assert "test_one_family:StatsOps of ops is not a Family" in found["family ops"].detail


@pytest.mark.parametrize(("name", "what"), [("is_stale", "a member of Graph"), ("put", "a member of Device"), ("_ops", "private")])
async def test_a_family_that_would_hide_a_member_is_refused(device: accel.Device, name: str, what: str) -> None:
    class Hiding(OpNamespace[M]):
        library: ClassVar[str] = name

    for _ in range(2):
        with pytest.raises(accel.InvalidArgumentError, match=f"cannot be named '{name}': that is {what}"):
            device.family(Hiding)
    async with device.graph() as graph:
        graph.zeros(3)
    assert graph.is_stale is False


async def test_a_wrong_call_names_the_method() -> None:
    async with accel.System() as system:
        device: Any = await system.open_device("cpu")
        x = await device.put(np.eye(3))
        with pytest.raises(
            TypeError, match=r"^device\.blas\.gemm\(\) got an unexpected keyword argument 'transpse_a'. Did you mean 'transpose_a'\?$"
        ):
            await device.blas.gemm(x, x, transpse_a="t")
        with pytest.raises(TypeError, match=r"^device\.reduce\(\) missing a required argument: 'x'$"):
            await device.reduce("sum")
        batch: Any
        async with device.batch() as batch:
            with pytest.raises(TypeError, match=r"^batch\.blas\.gemm\(\) too many positional arguments$"):
                batch.blas.gemm(x, x, x, x, x, x)
            batch.zeros(3)
        with pytest.raises(
            TypeError, match=r"^device\.stats\.median\(\) got an unexpected keyword argument 'shfit'. Did you mean 'shift'\?$"
        ):
            device.family(StatsOps).median(x, shfit=1.0)


def what_a_type_checker_sees(device: accel.Device, batch: accel.Batch, graph: accel.Graph, x: accel.AccelRef) -> None:
    """Read by mypy, never run."""
    one: Coroutine[Any, Any, accel.AccelRef] = device.family(StatsOps).median(x, shift=1.0, timeout=2.0)
    two: Coroutine[Any, Any, tuple[accel.AccelRef, accel.AccelRef]] = device.family(StatsOps).extremes(x)
    del one, two
    assert_type(batch.family(StatsOps).extremes(x), tuple[accel.AccelRef, accel.AccelRef])
    assert_type(graph.family(StatsOps).median(x), accel.AccelRef)
    assert_type(batch.family(BlasOps).gemm(x, x, transpose_a="t"), accel.AccelRef)
    device.family(StatsOps).median(x, shfit=1.0)  # type: ignore[call-arg,unused-coroutine]
    batch.family(StatsOps).median()  # type: ignore[call-arg]
    batch.blas.gemm(x, x, transpose_a="x")  # type: ignore[arg-type]
