"""Views of refs: where they lie, what they keep alive, and how ops take them."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import accel
from accel import InvalidArgumentError, ops
from accel.dtype import DType
from accel.ref import AccelRef, overlap
from accel.testing import FaultPlan
from tests.device_support import failure, generation, opened, used

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_view_describes_its_part(device: accel.Device) -> None:
    ref = await device.put(np.arange(24, dtype=np.float32).reshape(4, 6))
    view = ref[1:3]
    assert isinstance(view, accel.RefView)
    assert (view.shape, view.dtype, view.nbytes, view.offset, view.base) == ((2, 6), accel.DType.FLOAT32, 48, 24, ref)
    assert (view.device, view.generation, view.buffer, view.is_stale, len(view), view.size) == (device, 1, ref.buffer, False, 2, 12)
    assert view[1].base is ref
    assert view[1].offset == 48
    assert "view at 24" in repr(view)
    assert (ref.offset, ref.is_foreign, ref.is_managed, view.is_foreign, view.is_managed) == (0, False, False, False, False)


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (4, "out of range"),
        (-5, "out of range"),
        (np.s_[0, 0, 0], "3 indices"),
        (np.s_[..., ...], "one `...`"),
        (None, "not an index"),
        (True, "not an index"),
        ([0, 1], "not an index"),
        (1.0, "not an index"),
        (np.s_["a":], "no slice"),
        (np.s_[::0], "no slice"),
    ],
)
async def test_what_is_no_view_is_refused_with_a_remedy(device: accel.Device, index: object, told: str) -> None:
    ref = await device.zeros((4, 6))
    with pytest.raises(accel.InvalidArgumentError, match=told) as caught:
        ref[index]
    assert caught.value.remedy


async def test_a_shape_has_as_many_dimensions_as_an_array_of_numpy_at_most(device: accel.Device) -> None:
    ref = await device.zeros((1,) * 64)
    assert ref.reshape(1).reshape((1,) * 64).shape == (await device.get(ref)).shape
    for call in (device.zeros((1,) * 65), device.zeros((0,) * 65), device.empty((1,) * 65), device.pinned((1,) * 65, "int8")):
        error = await failure(call, accel.InvalidArgumentError)
        assert "65 dimensions" in error.message
    for wanted in ((1,) * 65, (1,) * 64 + (-1,)):
        with pytest.raises(accel.InvalidArgumentError, match="65 dimensions"):
            ref.reshape(wanted)


async def test_shapes_that_do_not_fit_are_refused(device: accel.Device) -> None:
    ref = await device.zeros((4, 6))
    uses: list[Callable[[], object]] = [
        lambda: ref.reshape((5, 5)),
        lambda: ref.reshape((-1, -1)),
        lambda: ref.reshape((-1, 5)),
        lambda: ref.reshape((-2, -12)),
        lambda: ref.reshape("24"),
        lambda: ref.reshape((0, -1)),
        lambda: ref[:, :1].view("float64"),
        lambda: ref[0, :3].view("float64"),
        lambda: ref[0, 0].view("float64"),
        lambda: ref.ravel()[1:3].view("float64"),
        lambda: ref.view("what"),
    ]
    for number, use in enumerate(uses):
        with pytest.raises(accel.InvalidArgumentError):
            pytest.fail(f"{number} gave {use()!r}")
    with pytest.raises(TypeError):
        list(ref)  # type: ignore[call-overload]


async def test_views_work_in_every_place(device: accel.Device, rng: np.random.Generator) -> None:
    a = rng.standard_normal((6, 4))
    ref = await device.put(a)
    assert np.array_equal(await device.get(ref[2:5]), a[2:5])
    out = np.empty((2, 8))
    assert np.array_equal(await device.get(ref[:4].reshape((2, -1)), out=out), a[:4].reshape(2, 8))
    product = await device.blas.gemm(ref[1:3], ref[2:6])
    np.testing.assert_allclose(await device.get(product), a[1:3] @ a[2:6])
    row = rng.standard_normal(4)
    assert await device.put(row, out=ref[3]) is not None
    a[3] = row
    await device.elementwise.unary("neg", ref[0], out=ref[0])
    a[0] = -a[0]
    await device.elementwise.binary("add", ref[0], ref[1], out=ref[5])
    a[5] = a[0] + a[1]
    await device.copy(ref[0:2], ref[2:4])
    a[2:4] = a[0:2]
    await device.blas.axpy(ref[0], ref[4], alpha=3.0)
    a[4] += 3.0 * a[0]
    await device.reduce("sum", ref[1:3], axis=0, out=ref[5])
    a[5] = a[1:3].sum(0)
    await device.run(ops.Fill((4,), accel.DType.FLOAT64, 7.0, out=ref[1]))
    a[1] = 7.0
    np.testing.assert_allclose(await device.get(ref), a)
    bits = await device.get(ref.view("uint8")[1])
    assert bits.tobytes() == np.ascontiguousarray((await device.get(ref))[1]).tobytes()
    narrow = await device.put(a.astype(ml_dtypes.bfloat16))
    assert np.array_equal(await device.get(narrow[1:3].view("uint16")), a.astype(ml_dtypes.bfloat16)[1:3].view(np.uint16))


async def test_views_in_a_graph(device: accel.Device, rng: np.random.Generator) -> None:
    a = rng.standard_normal((4, 4))
    whole = await device.put(a)
    async with device.graph() as graph:
        negated = graph.elementwise.unary("neg", whole[1:3])
        graph.copy(negated[1], whole[3])
        total = graph.reduce("sum", negated[0])
    for _ in range(2):
        await device.put(row := rng.standard_normal(4), out=whole[1])
        await graph.replay()
        a[1], a[3] = row, -a[2]
        np.testing.assert_allclose(await device.get(whole), a)
        np.testing.assert_allclose(await device.get(total), -row.sum())


async def test_out_that_overlaps_an_operand_is_refused(device: accel.Device) -> None:
    ref = await device.zeros((8, 4))
    square = ref[:4]
    awaited = [
        device.blas.gemm(square, ref[4:8], out=ref[2:6]),
        device.blas.gemm(square, ref[4:8], out=ref[0:4]),
        device.blas.gemv(square, ref[5], out=ref[2]),
        device.blas.axpy(ref[0:4], ref[3:7]),
        device.blas.dot(ref[0], ref[1], out=ref[1, 2]),
        device.elementwise.unary("neg", ref[0:4], out=ref[1:5]),
        device.elementwise.binary("add", ref[0:4], ref[4:8], out=ref[3:7]),
        device.reduce("sum", ref, axis=0, out=ref[3]),
        device.fft.rfft(ref[0:4], axes=(0,), out=ref[1:7].view("complex64").reshape((3, 4))),
        device.copy(ref[0:4], ref[3:7]),
        device.copy(ref, ref.reshape((8, 4))),
    ]
    for call in awaited:
        error = await failure(call, accel.InvalidArgumentError)
        assert "overlap" in error.message, error
        assert error.remedy
    await device.elementwise.unary("neg", ref[0:4], out=ref[0:4])
    await device.elementwise.binary("add", ref, ref, out=ref.reshape((8, 4)))
    await device.blas.gemm(square, square, out=ref[4:8])
    await device.elementwise.unary("neg", ref[0:4], out=ref[4:8])
    assert (await device.elementwise.unary("neg", ref[0:0], out=ref[4:4])).shape == (0, 4)


async def test_view_keeps_its_base_and_owns_nothing(device: accel.Device) -> None:
    ref = await device.put(np.arange(8.0))
    before = used(device)
    view = ref[2:4]
    view[1:].ravel()
    gc.collect()
    assert used(device) == before, "dropping a view freed something"
    del ref
    assert used(device) == before
    assert np.array_equal(await device.get(view), [2.0, 3.0])
    error = await failure(device.free(view), accel.InvalidArgumentError)
    assert "ref.base" in (error.remedy or "")
    await device.free(view.base)
    assert view.is_stale
    assert (await failure(device.get(view), accel.StaleRefError)).reason == "freed"
    assert used(device) < before


async def test_view_is_stale_after_a_rebuild() -> None:
    plan = FaultPlan().poison_at(2)
    async with opened(plan) as device:
        view = (await device.zeros(4))[1:]
        await failure(device.get(view), accel.ContextPoisonedError)
        await generation(device, 2)
        assert (await failure(device.get(view), accel.StaleRefError)).reason == "generation"


async def test_pickled_view_comes_back(device: accel.Device) -> None:
    ref = await device.put(np.arange(12, dtype=np.int32).reshape(3, 4))
    view = ref[1:].view("int16")
    token = pickle.loads(pickle.dumps(view))
    assert type(token) is accel.ViewToken
    found = device.resolve(token)
    assert isinstance(found, accel.RefView)
    assert (found.base, found.offset, found.shape, found.dtype) == (ref, view.offset, view.shape, view.dtype)
    op = pickle.loads(pickle.dumps(ops.Unary(accel.UnaryOp.NEG, ref[2].view("float32"))))
    assert (await device.run(op)).shape == (4,)
    assert copy.copy(view) is view
    assert copy.deepcopy(view) is view
    del view, found, ref
    gc.collect()
    with pytest.raises(accel.StaleRefError):
        device.resolve(token)


async def test_ops_on_views_of_one_buffer_are_ordered_across_streams(device: accel.Device, rng: np.random.Generator) -> None:
    a = rng.standard_normal((512, 256)).astype(np.float32)
    ref = await device.put(a)
    result = await device.zeros((256, 256))
    async with device.batch() as batch:
        batch.blas.gemm(ref[:256], ref[256:], out=result)
    work = [
        device.blas.gemm(ref[:256], ref[256:], out=result),
        device.elementwise.unary("abs", result[:128], out=result[:128]),
        device.reduce("sum", result[:128].ravel()),
    ]
    pending = [device.run(ops.Empty((1,), accel.DType.UINT8)), *work]
    *_, total = [await each for each in pending]
    expected = np.abs(a[:256].astype(np.float64) @ a[256:])[:128].sum()
    assert abs(float(await device.get(total)) - expected) < 1e-3 * expected


SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)
DTYPES = st.sampled_from(["int8", "int16", "float32", "float64", "complex128", "bool"])
BOUND = st.none() | st.integers(-6, 6)
ENTRIES = st.integers(-4, 4) | st.builds(slice, BOUND, BOUND, st.sampled_from([None, 1, 1, 2, -1])) | st.just(Ellipsis)
INDICES = ENTRIES | st.lists(ENTRIES, max_size=4).map(tuple)
STEPS = st.lists(
    st.tuples(st.just("index"), INDICES)
    | st.tuples(st.just("reshape"), st.lists(st.integers(-1, 8), max_size=3).map(tuple))
    | st.tuples(st.just("ravel"), st.none())
    | st.tuples(st.just("view"), DTYPES),
    max_size=6,
)


class Owner:
    """A device, as far as refs need one."""

    name = "none"
    is_closing = False
    live_generation = 1

    def __init__(self) -> None:
        self.dropped: list[int] = []


def stepped(array: np.ndarray[Any, Any], kind: str, value: Any) -> np.ndarray[Any, Any] | None:
    """Return what numpy makes of a step; ``None`` where it cannot, or copies."""
    try:
        if kind == "index":
            entries = value if isinstance(value, tuple) else (value,)
            # With an ellipsis numpy gives a 0-d view, and not a scalar.
            found = array[entries if Ellipsis in entries else (*entries, Ellipsis)]
        elif kind == "view":
            found = array.view(DType.of(value).numpy)
        else:
            found = array.reshape(-1 if kind == "ravel" else value)
    except (IndexError, ValueError, TypeError):
        return None
    return found if np.shares_memory(found, array) or not found.size else None


def place(array: np.ndarray[Any, Any], base: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0] - base.__array_interface__["data"][0])


def aligned(nbytes: int) -> np.ndarray[Any, Any]:
    """Return bytes that start at a multiple of 256, as buffers do."""
    room = np.zeros(nbytes + 256, np.uint8)
    start = -room.__array_interface__["data"][0] % 256
    return room[start : start + nbytes]


def step(ref: AccelRef, kind: str, value: Any) -> AccelRef:
    if kind == "index":
        return ref[value]
    if kind == "reshape":
        return ref.reshape(value)
    return ref.ravel() if kind == "ravel" else ref.view(value)


@example((2,), "int8", [("index", np.s_[1:]), ("index", np.s_[:0])])  # nothing, in the middle
@example((2,), "int8", [("index", np.s_[::-1])])
@given(SHAPES, DTYPES, STEPS)
def test_chains_of_views_are_numpys(shape: tuple[int, ...], dtype: str, steps: list[tuple[str, Any]]) -> None:
    owner: Any = Owner()
    ref: AccelRef = AccelRef(owner, 1, shape, DType.of(dtype), 1)
    nbytes = ref.nbytes
    base = aligned(nbytes).view(ref.dtype.numpy).reshape(shape)
    array = base
    root = found = ref
    for kind, value in steps:
        expected = stepped(array, kind, value)
        try:
            found = step(ref, kind, value)
        except InvalidArgumentError:
            # A new element type may need an alignment that numpy does not ask for, and elements that are one run.
            misaligned = kind == "view" and (ref.offset % DType.of(value).itemsize != 0 or ref.is_strided)
            assert expected is None or misaligned or expected.size == 0, (kind, value, array.shape)
            continue
        assert expected is not None, (kind, value, array.shape, found)
        assert (found.shape, found.dtype.numpy, found.nbytes) == (expected.shape, expected.dtype, expected.nbytes)
        if expected.size:
            assert found.offset == place(expected, base)
            steps_there = [stride for length, stride in zip(expected.shape, expected.strides, strict=True) if length > 1]
            assert [n * found.dtype.itemsize for length, n in zip(found.shape, found.strides, strict=True) if length > 1] == steps_there
        assert found.is_strided or 0 <= found.offset <= nbytes - found.nbytes
        ref, array = found, expected
    assert overlap(ref, root) == bool(ref.nbytes) or ref is root
    ref, found = root, root
    del ref, found
    assert owner.dropped == []
    del root
    assert owner.dropped == [1]


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_overlap_is_having_elements_in_common(a: int, b: int, c: int, d: int) -> None:
    owner: Any = Owner()
    ref = AccelRef(owner, 1, (12,), DType.FLOAT32, 1)
    first, second = ref[a:b], ref[c:d]
    assert overlap(first, second) == bool(set(range(a, b)) & set(range(c, d)))
    assert not overlap(first, AccelRef(owner, 2, (12,), DType.FLOAT32, 1))
