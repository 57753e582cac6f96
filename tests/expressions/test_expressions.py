"""Expressions of arrays that are awaited: what is sent, how often something is computed, what is kept, and what is refused."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import ops
from accel.device import Batch
from tests.device_support import failure, opened

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Return the ops of all batches."""
    batches: list[list[Any]] = []
    enter, record = Batch.__aenter__, Batch._record

    async def entered(self: Batch) -> Batch:
        batches.append([])
        return await enter(self)

    def recorded(self: Batch, op: Any) -> Any:
        batches[-1].append(op)
        return record(self, op)

    monkeypatch.setattr(Batch, "__aenter__", entered)
    monkeypatch.setattr(Batch, "_record", recorded)
    return batches


def single(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(np.float32)


async def test_a_layer_is_one_batch(device: accel.Device, rng: np.random.Generator, sent: list[list[Any]]) -> None:
    x, w, b = single(rng, 8, 16), single(rng, 16, 4), single(rng, 4)
    xp = device.xp
    weights, bias = xp.asarray(await device.put(w)), xp.asarray(await device.put(b))
    y = (xp.asarray(x) @ weights + bias).relu().sum(axis=1)
    assert (y.shape, y.dtype, y.ndim, y.size, y.device) == ((8,), accel.DType.FLOAT32, 1, 8, device)
    assert not sent
    assert await y is y
    expected = np.maximum(x.astype(np.float64) @ w + b, 0).sum(axis=1)
    np.testing.assert_allclose(await y.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(await device.get(y.ref), await y.numpy())
    assert [[type(op) for op in batch] for batch in sent] == [[ops.Put, ops.Matmul, ops.Reduce]]
    # A bias and an activation belong to the product, unless it is kept.
    rows, columns, row = (xp.asarray(each) for each in (x, w, b))
    column = xp.asarray(single(rng, 8, 1))
    kept = rows @ columns
    for made, count in (
        (row + rows @ columns, 1),
        ((rows @ columns + row).gelu_tanh(), 1),
        ((rows @ columns + row).relu(), 1),
        ((rows @ columns + row).tanh(), 2),
        (rows @ columns + column, 2),
        (kept + kept, 2),
        (rows.astype("float64") @ columns + row, 4),
    ):
        await made
        assert sum(not isinstance(op, ops.Put) for op in sent[-1]) == count
    first, second = await accel.evaluate(kept, kept + row)
    np.testing.assert_allclose(await second.numpy(), await (first + row).numpy(), rtol=1e-6, atol=1e-6)


async def test_a_chain_is_one_op_and_a_function_alone_its_own(
    device: accel.Device, rng: np.random.Generator, sent: list[list[Any]]
) -> None:
    x = single(rng, 5, 7)
    xp = device.xp
    leaf = await xp.asarray(x)
    y = leaf
    for number in range(8):
        y = y * 1.5 - number
    np.testing.assert_allclose(await y.numpy(), _chain(x), rtol=1e-5, atol=1e-5)
    await leaf.exp()
    await (leaf + 1)
    await leaf.astype("float64")
    await xp.where(leaf < 0, 0, leaf)
    kinds = [[type(op) for op in batch] for batch in sent[1:]]
    assert kinds == [[ops.Fused], [ops.Unary], [ops.Binary], [ops.Cast], [ops.Fused]]
    assert len(sent[1][0].program) == 16


def _chain(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    y = x.astype(np.float64)
    for number in range(8):
        y = y * 1.5 - number
    return y


async def test_what_is_shared_is_computed_once(device: accel.Device, rng: np.random.Generator, sent: list[list[Any]]) -> None:
    x = single(rng, 5, 7)
    xp = device.xp
    shared = xp.asarray(x).exp()
    a, b = shared.sum(), shared.max(axis=0)
    assert await accel.evaluate(a, b, a) == (a, b, a)
    assert [type(op) for op in sent[0]] == [ops.Put, ops.Unary, ops.Reduce, ops.Reduce]
    np.testing.assert_allclose(await a.numpy(), np.exp(x.astype(np.float64)).sum(), rtol=1e-6)
    # A result that is kept is no part of what uses it besides.
    c = xp.asarray(x) * 2
    d = c + 1
    await accel.evaluate(c, d)
    assert [type(op) for op in sent[1]] == [ops.Put, ops.Binary, ops.Binary]
    await (c - 1)
    assert [type(op) for op in sent[2]] == [ops.Binary]
    assert await accel.evaluate() == ()
    # Both operands of the last product are one value, which the op computes once.
    e = xp.asarray(x) + 1
    assert len((await _program(e * e, sent)).program) == 2


async def _program(x: accel.Array, sent: list[list[Any]]) -> ops.Fused:
    await x
    found: ops.Fused = sent[-1][-1]
    return found


async def test_broadcast_operands_and_small_results_are_computed_apart(
    device: accel.Device, rng: np.random.Generator, sent: list[list[Any]]
) -> None:
    x = single(rng, 6, 5)
    xp = device.xp
    array = xp.asarray(x)
    centred = array - array.mean(axis=1, keepdims=True)
    scale = ((centred * centred).mean(axis=1, keepdims=True) + 1e-5).rsqrt()
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(await (centred * scale).numpy(), expected, rtol=1e-4, atol=1e-5)
    # The root of a row's variance is computed once for the row, not for each of its elements.
    assert any(isinstance(op, ops.Fused) and op.program[-1][0] == "rsqrt" for op in sent[0])


async def test_more_operands_than_an_op_takes_are_several_ops(
    device: accel.Device, rng: np.random.Generator, sent: list[list[Any]]
) -> None:
    arrays = [single(rng, 9) for _ in range(40)]
    xp = device.xp
    total = xp.asarray(arrays[0])
    for each in arrays[1:]:
        total = total + xp.asarray(each)
    np.testing.assert_allclose(await total.numpy(), np.sum(arrays, axis=0, dtype=np.float64), rtol=1e-4, atol=1e-5)
    assert 3 <= sum(isinstance(op, ops.Fused) for op in sent[0]) <= 4


async def test_leaves_are_read_at_the_await(device: accel.Device) -> None:
    xp = device.xp
    host, ref = np.zeros(3), await device.put(np.zeros(3))
    y = xp.asarray(host) + xp.asarray(ref)
    copied = xp.asarray(host, copy=True)
    shared = xp.from_dlpack(host)
    host[:] = 1
    await device.put(np.full(3, 10.0), out=ref)
    assert (await y.numpy()).tolist() == [11, 11, 11]
    assert (await copied.numpy()).tolist() == [0, 0, 0]
    assert (await shared.numpy()).tolist() == [1, 1, 1]
    with pytest.raises(accel.InvalidArgumentError, match="wrap"):
        xp.from_dlpack(object())


async def test_a_result_keeps_nothing_that_it_was_computed_from(device: accel.Device) -> None:
    xp = device.xp
    leaf = xp.asarray(np.ones(4))
    middle = leaf * 2
    y = middle + 1
    gone = weakref.ref(middle), weakref.ref(leaf)
    await y
    del leaf, middle
    gc.collect()
    assert [each() for each in gone] == [None, None]


async def test_several_tasks_await_one_array(device: accel.Device, sent: list[list[Any]]) -> None:
    y = device.xp.asarray(np.ones(4)) + 1

    async def result() -> accel.AccelRef:
        return (await y).ref

    first, second = await asyncio.gather(result(), result())
    assert first is second
    assert len(sent) == 1
    # If the one that computes is cancelled, another one does.
    z = y * 3
    tasks = [asyncio.create_task(z.numpy()), asyncio.create_task(z.numpy())]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert (await tasks[1]).tolist() == [6, 6, 6, 6]
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]


async def test_an_error_is_the_op_s_and_the_next_await_computes_anew(device: accel.Device) -> None:
    xp = device.xp
    indices = np.array([0, 7])
    y = xp.take(xp.asarray(np.arange(3.0)), xp.asarray(indices)) + 1
    with pytest.raises(accel.AccelError) as caught:
        await y
    assert caught.value.op_index is not None
    indices[1] = 2
    assert (await y.numpy()).tolist() == [1, 3]


async def test_freed_leaves_are_stale(device: accel.Device) -> None:
    ref = await device.put(np.ones(3))
    y = device.xp.asarray(ref) + 1
    await device.free(ref)
    await failure(y.numpy(), accel.StaleRefError)


async def test_sizes_that_depend_on_values_cut_the_expression(
    device: accel.Device, rng: np.random.Generator, sent: list[list[Any]]
) -> None:
    x = rng.integers(-3, 4, (4, 5))
    xp = device.xp
    array = xp.asarray(x) * 1
    picked = array[array > 0] * 2
    assert (picked.shape, picked.size) == ((None,), None)
    total = picked.sum() + xp.asarray(1)
    assert total.shape == ()
    assert int(await total.numpy()) == (x[x > 0] * 2).sum() + 1
    assert len(sent) == 2
    np.testing.assert_array_equal(await picked.numpy(), x[x > 0] * 2)
    assert picked.shape == np.zeros(np.count_nonzero(x > 0)).shape
    rows, columns = xp.nonzero(array)
    values, indices, inverse, counts = xp.unique_all(array)
    await accel.evaluate(rows, columns, values, indices, inverse, counts)
    for got, expected in zip((rows, columns), np.nonzero(x), strict=True):
        np.testing.assert_array_equal(await got.numpy(), expected)
    wanted = np.unique(x, return_index=True, return_inverse=True, return_counts=True)
    for got, expected in zip((values, indices, inverse, counts), wanted, strict=True):
        np.testing.assert_array_equal(await got.numpy(), expected)
    scalar = xp.asarray(np.float32(3))
    assert (await scalar[xp.asarray(True)].numpy()).tolist() == [3]
    repeated = xp.repeat(xp.asarray(x), xp.asarray(np.array([0, 2, 1, 1])), axis=0)
    np.testing.assert_array_equal(await repeated.numpy(), np.repeat(x, [0, 2, 1, 1], axis=0))


async def test_arrays_are_immutable_and_never_wait_where_nothing_can_be_awaited(device: accel.Device) -> None:
    xp = device.xp
    x = first = xp.asarray(np.ones(3))
    x += 1
    assert x is not first
    with pytest.raises(accel.InvalidArgumentError, match=r"xp\.where"):
        x[0] = 5
    conversions: tuple[Callable[[Any], Any], ...] = (bool, int, float, complex, np.asarray, iter, list, lambda x: range(3)[x])
    for convert in conversions:
        with pytest.raises(accel.LazyArrayError) as caught:
            convert(x)
        assert isinstance(caught.value, ValueError)
        assert caught.value.remedy
    with pytest.raises(accel.LazyArrayError):
        x.ref  # noqa: B018  # it is asked for
    assert "not awaited" in repr(x)
    assert len(x) == 3
    assert len({x, first, x}) == 2
    with pytest.raises(AttributeError):
        x.nosuch()
    with pytest.raises(AttributeError):
        x.asarray()
    with pytest.raises(TypeError):
        np.ones(3) + x
    await x
    assert "computed" in repr(x)


async def test_numbers_take_the_dtype_of_arrays_unless_they_are_of_a_higher_kind(device: accel.Device) -> None:
    xp = device.xp
    of = {
        name: xp.zeros(2, dtype=name) for name in ("bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    }
    for x, y, expected in (
        ("uint8", 1, "uint8"),
        ("float16", 2.5, "float16"),
        ("int8", 2.5, "float32"),
        ("bool", 1, "int64"),
        ("float64", 1j, "complex128"),
        ("float32", np.float64(2), "float32"),
        ("uint8", "int8", "int16"),
        ("int64", "float32", "float32"),
        ("float16", "bfloat16", "float32"),
        ("float32", "float64", "float64"),
    ):
        other = of[y] if isinstance(y, str) else y
        made = of[x] + other if x != "bool" else of[x] * other
        assert made.dtype.value == expected, (x, y)
        assert (await made.numpy()).dtype == accel.DType.of(expected).numpy
        assert xp.result_type(of[x], other).value == expected
    refused: tuple[Callable[[], Any], ...] = (
        lambda: of["uint8"] + 300,
        lambda: of["bool"] + of["bool"],
        lambda: xp.zeros(2, dtype="uint64") + of["int8"],
    )
    for wrong in refused:
        with pytest.raises(accel.InvalidArgumentError):
            wrong()
    signs = await (xp.asarray([1.0, 1.0]) * xp.asarray([0.0, 1.0]) * -0.0).numpy()
    assert np.signbit(signs).all()
    assert not np.signbit(await (xp.asarray([1.0]) * 0.0).numpy()).any()


async def test_what_does_not_fit_is_refused_when_it_is_recorded(device: accel.Device) -> None:
    xp = device.xp
    x = xp.zeros((3, 4))
    refused: tuple[Callable[[], Any], ...] = (
        lambda: x + xp.zeros(5),
        lambda: x @ xp.zeros((3, 4)),
        lambda: xp.reshape(x, (5, -1)),
        lambda: x[3],
        lambda: x[0, 0, 0],
        lambda: x[xp.zeros((4, 4), dtype="bool")],
        lambda: xp.sum(x, axis=2),
        lambda: xp.concat([x, xp.zeros((3, 4, 1))]),
        lambda: xp.astype(xp.zeros(2, dtype="complex64"), "float32"),
        lambda: xp.asarray(np.ones(3), copy=False),
        lambda: xp.zeros(3, device="cpu"),
        lambda: xp.permute_dims(x, (0, 0)),
        lambda: xp.add(x, "text"),
    )
    for wrong in refused:
        with pytest.raises(accel.InvalidArgumentError):
            wrong()
    async with opened() as other:
        y = other.xp.zeros((3, 4))
        mixed: tuple[Callable[[], Any], ...] = (lambda: x + y, lambda: x.to_device(other), lambda: xp.asarray(y + 1) + x)
        for several in mixed:
            with pytest.raises(accel.InvalidArgumentError):
                several()
        await failure(accel.evaluate(x, y), accel.InvalidArgumentError)
    await failure(accel.evaluate(x, 3), accel.InvalidArgumentError)  # type: ignore[arg-type]


_EMPTY_MASKS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
    ((0, 1), (0, 0), (0,)),
    ((3, 4), (0, 4), (0,)),
    ((3, 4), (3, 0), (0,)),
    ((3, 4, 2), (0, 0), (0, 2)),
    ((3, 4), (0,), (0, 4)),
    ((0, 4), (0,), (0, 4)),
]


@pytest.mark.parametrize(("shape", "mask", "expected"), _EMPTY_MASKS)
async def test_a_dimension_of_0_of_a_mask_fits_any_and_selects_nothing(
    device: accel.Device, shape: tuple[int, ...], mask: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    xp = device.xp
    found = xp.ones(shape)[xp.ones(mask, dtype=xp.bool)]
    assert (await found.numpy()).shape == expected
    with pytest.raises(IndexError):
        xp.ones(shape)[xp.ones((*mask[:-1], shape[len(mask) - 1] + 1), dtype=xp.bool)]


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
async def test_complex_numbers_are_summed_up_along_any_axis(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    z = (rng.standard_normal((3, 40, 5)) + 1j * rng.standard_normal((3, 40, 5))).astype(dtype)
    for axis in (0, 1, -1):
        expected = np.cumsum(z.astype(complex), axis)
        np.testing.assert_allclose(await device.xp.cumulative_sum(device.xp.asarray(z), axis=axis).numpy(), expected, rtol=1e-4, atol=1e-4)
        ref = await device.put(np.ascontiguousarray(z.T))
        shifted = await device.get(await device.scan.cumsum(ref.T, axis, exclusive=True))
        np.testing.assert_allclose(shifted, expected - z, rtol=1e-4, atol=1e-4)
    with pytest.raises(accel.UnsupportedError, match="cumprod is not offered for complex"):
        await device.scan.cumprod(await device.put(z))


async def test_random_expressions_are_numpy_s(device: accel.Device, rng: np.random.Generator) -> None:
    xp = device.xp
    for _ in range(40):
        x, y = rng.standard_normal((3, 1, 4)), rng.standard_normal((5, 4))
        got, expected = [xp.asarray(x), xp.asarray(y)], [x, y]
        for _ in range(int(rng.integers(1, 12))):
            i, j = (int(n) for n in rng.integers(0, len(got), 2))
            name = rng.choice(["add", "subtract", "multiply", "maximum", "tanh", "square", "sum", "roll", "slice"])
            if name in ("add", "subtract", "multiply", "maximum"):
                got.append(getattr(xp, name)(got[i], got[j]))
                expected.append(getattr(np, name)(expected[i], expected[j]))
            elif name in ("tanh", "square"):
                got.append(getattr(xp, name)(got[i]))
                expected.append(getattr(np, name)(expected[i]))
            elif name == "sum":
                got.append(got[i].mean(axis=-1, keepdims=True))
                expected.append(expected[i].mean(axis=-1, keepdims=True))
            elif name == "roll":
                got.append(xp.roll(got[i], 1, axis=-1))
                expected.append(np.roll(expected[i], 1, axis=-1))
            else:
                got.append(got[i][..., ::-1])
                expected.append(expected[i][..., ::-1])
        kept = sorted({int(n) for n in rng.integers(0, len(got), 3)} | {len(got) - 1})
        for each, wanted in zip(await accel.evaluate(*[got[n] for n in kept]), [expected[n] for n in kept], strict=True):
            np.testing.assert_allclose(await each.numpy(), wanted, rtol=1e-9, atol=1e-9)


async def test_expressions_run_in_a_child_process(rng: np.random.Generator) -> None:
    async with opened(host="process") as device:
        x = single(rng, 6, 4)
        xp = device.xp
        array = xp.asarray(x)
        picked = ((array @ array.T) * 2 + 1).relu()[:, 1:3]
        expected = np.maximum((x.astype(np.float64) @ x.T) * 2 + 1, 0)[:, 1:3]
        np.testing.assert_allclose(await picked.numpy(), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(await array[array > 0].numpy(), x[x > 0])
