"""Strided views: where their elements are, and ops that take them as they are, or on copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import accel
from accel import dlpack, ops
from accel.testing import FaultPlan
from accel.views import restrided, share_bytes
from tests.device_support import failure, opened, used

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(params=["inline", "process"])
async def device(request: pytest.FixtureRequest) -> AsyncIterator[accel.Device]:
    async with opened(host=request.param) as device:
        yield device


@pytest.fixture
async def inline() -> AsyncIterator[accel.Device]:
    async with opened() as device:
        yield device


async def test_description_of_a_strided_view(inline: accel.Device) -> None:
    ref = await inline.put(np.arange(24, dtype=np.float32).reshape(4, 6))
    view = ref[:, 2:5]
    assert isinstance(view, accel.StridedRef)
    assert (view.shape, view.strides, view.offset, view.nbytes, view.base, view.is_strided) == ((4, 3), (6, 1), 8, 48, ref, True)
    assert "strides [6, 1]" in repr(view)
    assert (ref.strides, ref.is_strided, ref[1:].is_strided, ref.T.T.is_strided, ref.T[3].strides) == ((6, 1), False, False, False, (6,))
    assert ref.T[0].reshape(2, 2).strides == (12, 6)
    assert view.view("int32").strides == (6, 1)
    refusals: list[Callable[[], object]] = [
        lambda: ref.T.reshape(24),
        lambda: view.ravel(),
        lambda: view.view("float64"),
        lambda: ref.transpose((0, 0)),
    ]
    for refused in refusals:
        with pytest.raises(accel.InvalidArgumentError) as caught:
            refused()
        assert caught.value.remedy


def test_reshapes_are_those_that_numpy_makes_without_a_copy(rng: np.random.Generator) -> None:
    shapes = [(24,), (2, 12), (4, 6), (3, 8), (2, 3, 4), (4, 3, 2), (1, 24), (2, 2, 6), (6, 1, 4), (3, 2, 2, 2)]
    for _ in range(300):
        x = np.arange(4 * 6 * 4, dtype=np.uint8).reshape(4, 6, 4)[:, ::2, :: int(rng.choice([2, -2]))]
        x = x.reshape(shapes[rng.integers(len(shapes))]) if rng.random() < 0.3 else x
        x = x.transpose(rng.permutation(x.ndim))
        wanted = shapes[rng.integers(len(shapes))]
        found, again = restrided(x.shape, x.strides, wanted), x.view()
        try:
            again.shape = wanted
        except AttributeError:
            assert found is None, (x.shape, x.strides, wanted)
        else:
            assert found is not None, (x.shape, x.strides, wanted)
            assert all(a == b for a, b, n in zip(found, again.strides, wanted, strict=True) if n > 1), (x.shape, x.strides, wanted)


async def test_ops_write_strided_views(device: accel.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((6, 6))
    ref = await device.put(x)
    part = ref[:, 1:4]
    row = rng.standard_normal((6, 3))
    assert await device.put(row, out=part) is part
    x[:, 1:4] = row
    assert await device.elementwise.binary("mul", part, 2.0, out=part) is part
    x[:, 1:4] *= 2
    await device.blas.gemm(ref[:3, :3], ref[3:, :3], out=ref[:3, 3:])
    x[:3, 3:] = x[:3, :3] @ x[3:, :3]
    await device.blas.gemm(ref[:3, :3], ref[3:, :3], out=ref[3:, 3:].T, beta=0.5)
    x[3:, 3:] = (x[:3, :3] @ x[3:, :3] + 0.5 * x[3:, 3:].T).T
    await device.blas.scal(ref[::2, 0], -1.0)
    x[::2, 0] *= -1
    await device.reduce("sum", ref[:, :2], axis=1, out=ref[:, 2])
    x[:, 2] = x[:, :2].sum(1)
    assert await device.copy(ref[:, :2], ref[:, 4:]) is not None
    x[:, 4:] = x[:, :2]
    await device.run(ops.Fill((6,), accel.DType.FLOAT64, 7.0, out=ref[:, 3]))
    x[:, 3] = 7.0
    np.testing.assert_allclose(await device.get(ref), x)
    out = np.empty((3, 6))
    assert await device.get(ref.T[1:4], out=out) is out
    np.testing.assert_allclose(out, x.T[1:4])


@dataclass(frozen=True)
class Shifted(accel.KernelOp):
    """An op of the user's own, whose kernel knows nothing of strides, on refs in a tuple."""

    library: ClassVar[str] = "shifts"
    kind: ClassVar[str] = "shifted"

    refs: tuple[accel.AccelRef, ...]
    by: float
    out: accel.AccelRef | None = None

    def plan(self) -> ops.Plan:
        x, y = self.refs
        return ops.Plan((x, y), () if self.out is None else (self.out,), () if self.out else (ops.Spec(x.shape, x.dtype),))


class Shifts(accel.KernelLibrary):
    """Adds two arrays and a number."""

    name = "shifts"

    @accel.kernel(Shifted)
    def shifted(self, op: Shifted, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        x, y, out = (np.asarray(each) for each in (*inputs, *outputs))
        stream.submit(lambda: np.add(x + y, op.by, out=out), 1.0)


@accel.kernel_op(like="x")
def doubled(out: accel.Operand, x: accel.AccelRef) -> None:
    np.multiply(np.asarray(x), 2, out=np.asarray(out))


async def test_kernels_of_users_get_copies(device: accel.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 6))
    await device.register(Shifts)
    ref = await device.put(x)
    np.testing.assert_array_equal(await device.get(await device.run(doubled(ref.T[1:, ::2]))), 2 * x.T[1:, ::2])
    np.testing.assert_array_equal(await device.get(await device.run(Shifted((ref[:, 1], ref[:, 2]), 0.5))), x[:, 1] + x[:, 2] + 0.5)
    await device.run(Shifted((ref[:, 1], ref[:, 1]), 1.0, ref[:, 5]))
    x[:, 5] = 2 * x[:, 1] + 1
    np.testing.assert_array_equal(await device.get(ref), x)
    indices = await device.put(np.array([0, 9]))
    error = await failure(device.arrays.take(ref.T, indices, 0), accel.InvalidArgumentError)
    assert (error.op, error.op_index) == ("take", None)


async def test_elements_at_indices_of_strided_views(device: accel.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((6, 4, 10))
    ref = await device.put(x)
    rows = np.array([2, 0, -1])
    indices = await device.put(rows)
    for index, axis, is_taken in (
        (np.s_[:, 1, 2:8], 0, True),
        (np.s_[::-1, ::2], 0, False),
        (np.s_[:, :, ::-1], 2, True),
        (np.s_[:, :, 1:7], 1, True),
        (np.s_[1, :, 1:7], 0, True),
    ):
        view, there = ref[index], x[index]
        assert ops.Take(view, indices, axis).takes_strided(view) == is_taken
        np.testing.assert_array_equal(await device.get(await device.arrays.take(view, indices, axis)), there.take(rows, axis))
        values = rng.standard_normal(there.take(rows, axis).shape)
        assert await device.arrays.put_along_axis(view, indices, await device.put(values), axis) is view
        np.moveaxis(there, axis, 0)[rows] = np.moveaxis(values, axis, 0)
        await device.arrays.scatter_add(view, indices, 1.0, axis)
        np.moveaxis(there, axis, 0)[rows] += 1
        np.testing.assert_allclose(await device.get(ref), x)
    np.testing.assert_array_equal(await device.get(await device.arrays.take(ref[:, 0, ::2], indices)), x[:, 0, ::2].take(rows))


async def test_views_that_overlap_are_refused_and_interleaved_ones_are_not(inline: accel.Device) -> None:
    ref = await inline.zeros((6, 6))
    for call in (
        inline.copy(ref[:, :4], ref[:, 2:]),
        inline.copy(ref[:4, :4], ref[:4, :4].T),
        inline.elementwise.binary("add", ref[:4, :4], ref[:4, :4].T, out=ref[:4, :4]),
        inline.blas.gemm(ref[:3, :3], ref[3:, 3:], out=ref[1:4, 2:5]),
        inline.arrays.flip(ref[:, 0], out=ref[::-1, 0]),
    ):
        assert "overlap" in (await failure(call, accel.InvalidArgumentError)).message
    await inline.copy(ref[:, ::2], ref[:, 1::2])
    assert share_bytes((0, (4,), (2,), 8), (8, (4,), (4,), 4)) is False
    assert share_bytes((0, (4,), (2,), 8), (16, (4,), (3,), 8)) is True


async def test_strided_views_in_batches_and_graphs(device: accel.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 6))
    ref = await device.put(x)
    async with device.batch() as batch:
        total = batch.reduce("sum", ref[:, 1::2], axis=0)
        lower = batch.arrays.tril(ref.T[:4])
        batch.elementwise.binary("add", ref[:, 0], 1.0, out=ref[:, 5])
        batch.copy(ref[0, :4], ref[:, 4])
        assert len(batch) == 4
    np.testing.assert_allclose(await device.get(total), x[:, 1::2].sum(0))
    np.testing.assert_allclose(await device.get(lower), np.tril(x.T[:4]))
    x[:, 5], x[:, 4] = x[:, 0] + 1, x[0, :4]
    np.testing.assert_allclose(await device.get(ref), x)
    async with device.graph() as graph:
        kept = graph.arrays.triu(ref.T)
        graph.elementwise.unary("neg", ref[:, 2], out=ref[:, 3])
    for _ in range(2):
        await device.put(row := rng.standard_normal(4), out=ref[:, 2])
        await graph.replay()
        x[:, 2] = row
        np.testing.assert_allclose(await device.get(kept), np.triu(x.T))
        x[:, 3] = -row
        np.testing.assert_allclose(await device.get(ref), x)


async def test_an_error_names_the_op_that_was_given_and_not_a_copy() -> None:
    plan = FaultPlan().fail_at(1, accel.LibraryError("injected"), op="triu").fail_at(2, accel.LibraryError("injected"), op="triu")
    async with opened(plan) as device:
        ref = await device.zeros((4, 6))
        with pytest.raises(accel.LibraryError) as caught:
            async with device.batch() as batch:
                batch.arrays.tril(ref.T)
                batch.arrays.tril(ref.T)
                batch.arrays.triu(ref.T)
        assert (caught.value.op_index, caught.value.op) == (2, "triu")
        error = await failure(device.arrays.triu(ref.T), accel.LibraryError)
        assert (error.op_index, error.op) == (None, "triu")
        indices = await device.put(np.array([9]))
        async with device.graph() as graph:
            graph.arrays.tril(ref.T)
            graph.arrays.take(ref, indices, 0)
        assert (await failure(graph.replay(), accel.InvalidArgumentError)).op_index == 1
        refused = await failure(device.run(ops.Get(ref.T, np.empty((6, 4), np.float32))), accel.InvalidArgumentError)
        assert "arrays.part" in (refused.remedy or "")


async def test_copies_are_given_back(inline: accel.Device) -> None:
    ref = await inline.zeros((64, 64))
    before = used(inline)
    for _ in range(3):
        await inline.arrays.tril(ref.T)
        await inline.elementwise.unary("neg", ref[:, :9], out=ref[:, :9])
        await inline.get(ref.T)
    async with inline.batch() as batch:
        batch.arrays.tril(ref.T)
    del batch
    await inline.get(ref[:1])
    assert used(inline) == before


async def test_a_strided_view_of_a_durable_buffer_is_torn_with_it() -> None:
    plan = FaultPlan().poison_at(2)
    async with opened(plan, host="process") as device:
        ref = await device.put(np.ones((4, 4)), durable=True)
        view = ref.T
        await failure(device.elementwise.unary("neg", view, out=view), accel.ContextPoisonedError)
        error = await failure(device.get(ref[:, 1]), accel.StaleRefError)
        assert error.reason == "torn"
        await device.put(np.zeros((4, 4)), out=ref.T)
        assert not (await device.get(ref[::2])).any()


def test_dlpack_has_strides() -> None:
    capsule = dlpack.export(1 << 20, (4, 3), accel.DType.FLOAT32, (dlpack.CUDA, 0), None, strides=(-6, 2), max_version=(1, 1))
    assert (dlpack.read(capsule).strides, dlpack.read(capsule).address) == ((-6, 2), 1 << 20)
