"""Functions as ops of the user's own."""

from __future__ import annotations

from typing import Any, Literal, assert_type

import numpy as np
import pytest

import accel
from accel.ops import Spec
from accel.testing import FaultPlan
from tests.own_library_support import ScaleAs, Scaling

pytestmark = pytest.mark.usefixtures("nothing_left")

HOSTS = pytest.mark.parametrize("host", ["inline", "process"])
Host = Literal["inline", "process"]


@accel.kernel_op(like="x")
def softmax(out: accel.Operand, x: accel.AccelRef, scale: float = 1.0) -> None:
    """``exp(scale * x)``, divided by its sum."""
    powers = np.exp(scale * np.asarray(x))
    np.divide(powers, powers.sum(), out=np.asarray(out))


@accel.kernel_op(makes=lambda x, bias, *, bins: (Spec((bins,), accel.DType.INT64), Spec((bins + 1,), x.dtype)), cost=1e-6)
def histogram(counts: accel.Operand, edges: accel.Operand, x: accel.AccelRef, bias: accel.AccelRef | None = None, *, bins: int) -> None:
    """numpy's histogram."""
    values: Any = np.asarray(x) if bias is None else np.asarray(x) + np.asarray(bias)
    np.asarray(counts)[...], np.asarray(edges)[...] = np.histogram(values, bins)


@accel.kernel_op(like="x")
def broken(out: accel.Operand, x: accel.AccelRef) -> None:
    """Fail."""
    raise ZeroDivisionError("tripped")


def expected_softmax(x: Any, scale: float) -> Any:
    return np.exp(scale * x) / np.exp(scale * x).sum()


@HOSTS
async def test_a_function_is_awaited_batched_and_recorded(host: Host, rng: np.random.Generator) -> None:
    data = rng.standard_normal(50)
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host)
        x = await device.put(data)
        np.testing.assert_allclose(
            await device.get(
                await device.run(
                    softmax(
                        x,
                        scale=2.0,
                    )
                )
            ),
            expected_softmax(data, 2.0),
        )
        counts, edges = await device.run(histogram(x, bins=7), timeout=30.0)
        for made, wanted in zip((counts, edges), np.histogram(data, 7), strict=True):
            np.testing.assert_array_equal(await device.get(made), wanted)
        async with device.batch() as batch:
            doubled = batch.elementwise.binary("add", x, x)
            y = batch.run(softmax(doubled))
            total = batch.reduce("sum", y)
            counts, _ = batch.run(histogram(x, doubled, bins=5))
        assert await device.get(total) == pytest.approx(1.0)
        np.testing.assert_array_equal(await device.get(counts), np.histogram(3 * data, 5)[0])
        async with device.graph() as graph:
            y = graph.run(softmax(x))
        await device.put(data / 2, out=x)
        await graph.replay()
        np.testing.assert_allclose(await device.get(y), expected_softmax(data, 0.5))


@HOSTS
async def test_its_errors_are_those_of_an_op(host: Host) -> None:
    plan = FaultPlan().fail_at(1, accel.LibraryError("planned"), op="softmax")
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host, faults=plan)
        x = await device.put(np.ones(3))
        with pytest.raises(accel.LibraryError, match="planned"):
            await device.run(softmax(x))
        with pytest.raises(accel.LibraryError, match="ZeroDivisionError: tripped") as caught:
            await device.run(broken(x))
        assert caught.value.op == "broken"
        np.testing.assert_allclose(await device.get(await device.run(softmax(x))), [1 / 3] * 3)
        with pytest.raises(accel.InvalidArgumentError, match="x is a ndarray"):
            await device.run(softmax(np.ones(3)))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="bins"):
            histogram(x)  # type: ignore[call-arg]


async def test_a_closure_is_refused_by_a_process_host_with_the_remedy() -> None:
    @accel.kernel_op(like="x")
    def local(out: accel.Operand, x: accel.AccelRef) -> None:
        np.copyto(np.asarray(out), np.asarray(x))

    async with accel.System() as system:
        inline = await system.open_device("cpu")
        assert (await inline.get(await inline.run(local(await inline.put([1.0]))))).tolist() == [1.0]
        device = await system.open_device("cpu", host="process")
        with pytest.raises(accel.UnsupportedError, match="local") as refused:
            await device.run(local(await device.put([1.0])))
        assert "at the top of a module that can be imported" in refused.value.remedy


async def test_a_backend_without_a_function_says_so_and_another_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = softmax.functions.by_backend  # type: ignore[attr-defined]
    seen: list[Any] = []
    monkeypatch.setitem(functions, "cuda", None)

    @softmax.on("cuda")
    def enqueue(out: accel.Operand, x: accel.Operand, scale: float = 1.0) -> None:
        seen.append((out, x, scale))

    assert functions["cuda"] is enqueue
    family = softmax.family  # type: ignore[attr-defined]
    assert family.kernel("softmax", "other") is None
    assert family.part("cuda").may_block
    assert not family.part("cuda").capturable


@pytest.mark.parametrize(
    ("define", "message"),
    [
        (lambda: accel.kernel_op(like="x")(lambda x: None), r"0 result\(s\)"),
        (lambda: accel.kernel_op()(_plain), "names no parameter to be like"),
        (lambda: accel.kernel_op(like="y")(_plain), "names no parameter to be like"),
        (lambda: accel.kernel_op(like="x")(_waiting), "a coroutine function"),
        (lambda: accel.kernel_op(like="x")(_hurried), "has a parameter timeout"),
        (lambda: accel.kernel_op(like="x")(_kind), "has a parameter kind"),
        (lambda: accel.kernel_op(like="x")(_result), "has a parameter result"),
        (lambda: accel.kernel_op(like="x")(_listed), "the default of weights can change"),
        (lambda: accel.kernel_op(like="x")(_positional), "positional-only"),
        (lambda: accel.kernel_op(like="x")(_unannotated), "names no parameter to be like"),
        (lambda: accel.kernel_op(like="x", cost="a"), "cost is 'a'"),  # type: ignore[arg-type]
        (lambda: accel.kernel_op(like="x", cost=-1), "cost is -1"),
        (lambda: accel.kernel_op(like="x", cost=float("nan")), "cost is nan"),
        (lambda: accel.kernel_op(like="x", capturable=1), "capturable is 1"),  # type: ignore[arg-type]
    ],
)
def test_a_function_that_does_not_fit_is_refused(define: Any, message: str) -> None:
    with pytest.raises(accel.InvalidArgumentError, match=message):
        define()


def _plain(out: accel.Operand, x: accel.AccelRef) -> None: ...


async def _coroutine(out: accel.Operand, x: accel.AccelRef) -> None: ...


_waiting: Any = _coroutine


def _hurried(out: accel.Operand, x: accel.AccelRef, timeout: float) -> None: ...


def _kind(out: accel.Operand, x: accel.AccelRef, kind: str) -> None: ...


def _result(out: accel.Operand, x: accel.AccelRef, result: int) -> None: ...


def _listed(out: accel.Operand, x: accel.AccelRef, weights: list[float] = []) -> None: ...  # noqa: B006 - it is refused


def _positional(out: accel.Operand, x: accel.AccelRef, /) -> None: ...


def _unannotated(out: accel.Operand, x: Any) -> None: ...


@accel.kernel_op(like="x")
def returned(out: accel.Operand, x: accel.AccelRef, y: Any = None) -> None:
    """Return what should be written."""
    value: Any = np.asarray(x) + 1
    return value  # type: ignore[no-any-return]


@accel.kernel_op(makes=lambda x, spec: spec)
def made(out: accel.Operand, x: accel.AccelRef, spec: Any) -> None:
    """Do nothing."""


@accel.kernel_op(makes=lambda x, dtype: Spec(x.shape, dtype))
def cast(out: accel.Operand, x: accel.AccelRef, dtype: Any) -> None:
    """Return it in another dtype."""
    assert out.dtype is accel.DType.of(dtype)
    np.asarray(out)[...] = np.asarray(x)


async def test_a_spec_may_name_its_dtype(hosted: accel.Device) -> None:
    await hosted.register(Scaling)
    x = await hosted.put(np.arange(3.0))
    for dtype in ("float32", "f4", np.dtype("float32"), np.float32):
        for op in (cast(x, dtype), ScaleAs(x, 1.0, dtype)):
            y = await hosted.run(op)
            assert y.dtype is accel.DType.FLOAT32
            np.testing.assert_array_equal(await hosted.get(y), np.arange(3, dtype="f4"))
            async with hosted.batch() as batch:
                y = batch.run(op)
            assert (await hosted.get(y)).dtype == np.float32
    for op in (cast(x, "text"), ScaleAs(x, 1.0, None)):
        with pytest.raises(accel.InvalidArgumentError, match="not a dtype"):
            await hosted.run(op)


async def test_a_result_that_is_returned_or_no_spec_is_an_error(hosted: accel.Device) -> None:
    x = await hosted.put(np.zeros(4))
    with pytest.raises(accel.InvalidArgumentError, match="returned a value"):
        await hosted.get(await hosted.run(returned(x)))
    with pytest.raises(accel.InvalidArgumentError, match="y is a ref"):
        await hosted.run(returned(x, x))
    for spec in (None, [Spec((), x.dtype)], Spec((-1,), x.dtype), (1,)):
        with pytest.raises(accel.InvalidArgumentError, match=r"makes= of made gives .*Give a Spec for each result"):
            await hosted.run(made(x, spec))
        with pytest.raises(accel.InvalidArgumentError, match=r"makes= of made gives .*Give a Spec for each result"):
            async with hosted.batch() as batch:
                batch.run(made(x, spec))


def what_a_type_checker_sees(device: accel.Device, batch: accel.Batch, x: accel.AccelRef) -> None:
    """Read by mypy, never run."""
    assert_type(batch.run(softmax(x, scale=2.0)), accel.AccelRef)
    assert_type(batch.run(histogram(x, bins=3)), tuple[accel.AccelRef, accel.AccelRef])
    softmax(x, scael=2.0)  # type: ignore[call-arg]
