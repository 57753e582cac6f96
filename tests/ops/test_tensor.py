"""Sums of products of any indices: against numpy in higher precision, what is copied for them, and what becomes of them in batches and graphs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

import accel
from accel import DType, ops
from accel.cpu import backend
from accel.cpu.backend import CpuDevice
from accel.cpu.views import array
from accel.enums import CAPABILITIES
from accel.ops.contraction import Matrices, Products, Sums, contraction, parsed
from accel.views import steps_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.usefixtures("nothing_left")


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cpu", **options)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]]]:
    """Return subscripts with shapes: repeated and broadcast indices, an ellipsis, axes of 0 and 1, any order of the result."""
    sizes = {letter: draw(st.integers(0, 4)) for letter in "abcdef"}
    hidden = draw(st.lists(st.integers(1, 3), max_size=2))
    words: list[str] = []
    shapes: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 4))):
        letters: list[str] = draw(st.lists(st.sampled_from("abcdef"), max_size=4))
        # numpy refuses a diagonal of a length of 1 and another.
        shape = [1 if letters.count(letter) == 1 and not draw(st.integers(0, 9)) else sizes[letter] for letter in letters]
        word = "".join(letters)
        has_dots: bool = draw(st.booleans())
        if hidden and has_dots:
            at, count = draw(st.integers(0, len(letters))), draw(st.integers(0, len(hidden)))
            word = word[:at] + "..." + word[at:]
            shape[at:at] = [draw(st.sampled_from((1, length))) for length in hidden[len(hidden) - count :]]
        words.append(word)
        shapes.append(tuple(shape))
    every = sorted(set("".join(words)) - {"."})
    subscripts = ",".join(words)
    if draw(st.booleans()):
        output = draw(st.permutations(every))[: draw(st.integers(0, len(every)))]
        subscripts += "->" + ("..." if "..." in subscripts else "") + "".join(output)
    return subscripts, shapes


_DTYPES = {"float32": 1e-4, "float64": 1e-11, "complex64": 1e-4, "complex128": 1e-11, "float16": 0.04, "bfloat16": 0.3}


class Contracting(CpuDevice):
    """A context with a library of contractions, numpy's, that takes down the steps it is given."""

    capabilities = MappingProxyType({**CAPABILITIES, "contract": frozenset(map(DType.of, _DTYPES))})
    taken: ClassVar[list[Any]] = []

    def kernels(self, library: str) -> Any:
        return {"contract": self._contract} if library == "tensor" else super().kernels(library)

    def _contract(self, lane: Any, op: Any, plan: Any, inputs: Any, outputs: Any) -> None:
        step = op.step
        self.taken.append(step)
        numbers = {label: n for n, label in enumerate(dict.fromkeys([label for term in step.terms for label in term.labels]))}
        operands: list[Any] = []
        for address, term, ref in zip(inputs, step.terms, op.operands, strict=True):
            assert all(length > 1 for length in term.lengths)
            strides = tuple([stride * ref.dtype.itemsize for stride in term.strides])
            operands += array(address, term.lengths, ref.dtype.numpy, strides), [numbers[label] for label in term.labels]
            if not plan.dtype.is_complex:  # numpy sums no bfloat16
                operands[-2] = operands[-2].astype(np.float64)
        out = array(outputs[0], step.result.lengths, plan.dtype.numpy)
        kept = [numbers[label] for label, length in zip(step.result.labels, step.result.lengths, strict=True) if length > 1]
        lane.stream.submit(lambda: np.copyto(out, np.einsum(*operands, kept).reshape(out.shape), casting="unsafe"), 0.0)


@pytest.fixture
def contracting(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let the CPU have a library of contractions; return the steps that it takes."""
    monkeypatch.setattr(backend, "CpuDevice", Contracting)
    Contracting.taken.clear()
    return Contracting.taken


@pytest.mark.parametrize("way", ["", "contracting"])
async def test_random_subscripts_are_those_of_numpy(request: pytest.FixtureRequest, way: str) -> None:
    taken: list[Any] = request.getfixturevalue(way) if way else []
    async with opened() as device:
        loop = asyncio.get_running_loop()

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(call=calls(), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(sorted(_DTYPES)))
        @example(call=("iaj,jak->ik", [(2, 3, 4), (4, 3, 2)]), seed=0, dtype="float32")  # a sum that the library takes
        @example(call=("bij,bjk->kbi", [(2, 3, 4), (2, 4, 5)]), seed=0, dtype="float32")  # and a product of matrices
        def check(call: tuple[str, list[tuple[int, ...]]], seed: int, dtype: str) -> None:
            asyncio.run_coroutine_threadsafe(compare(device, *call, seed, dtype), loop).result(60)

        await asyncio.to_thread(check)
    assert not way or {type(step) for step in taken} >= {Sums, Matrices}


async def compare(device: accel.Device, subscripts: str, shapes: list[tuple[int, ...]], seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    numpy = DType.of(dtype).numpy
    arrays, refs = [], []
    for shape in shapes:
        values = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if numpy.kind == "c" else 0)
        arrays.append(np.asarray(values).astype(numpy))
        order = [int(axis) for axis in rng.permutation(len(shape))]
        whole = await device.put(np.array(arrays[-1].transpose(order), order="C"))  # a view with its axes in any order
        refs.append(whole.transpose([int(axis) for axis in np.argsort(order)]))
    wide = [each.astype(np.complex128 if numpy.kind == "c" else np.float64) for each in arrays]
    expected = np.asarray(np.einsum(subscripts, *wide))
    out = await device.full(expected.shape, np.nan, dtype)
    made = await device.tensor.einsum(subscripts, *refs, out=out)
    assert made is out
    found = (await device.get(out)).astype(expected.dtype)
    most = max(1.0, float(np.einsum(subscripts, *[np.abs(each) for each in wide]).max(initial=0.0)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=_DTYPES[dtype] * most, err_msg=f"{subscripts} {shapes} {dtype} seed {seed}")


def steps(subscripts: str, *shapes: tuple[int, ...], strides: Any = None) -> list[Any]:
    terms, output = parsed(subscripts, shapes)
    found = contraction(terms, shapes, strides or tuple([steps_of(shape) for shape in shapes]), output, "auto")
    return list(found.steps)


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("ij,jk->ik", ((7, 5), (5, 3))),
        ("ji,kj->ik", ((5, 7), (3, 5))),
        ("ij,jk->ki", ((7, 5), (5, 3))),
        ("bij,bkj->bik", ((4, 3, 5), (4, 6, 5))),
        ("ij,bjk->bik", ((6, 5), (3, 5, 4))),
        ("bji,jk->bik", ((3, 5, 4), (5, 6))),
        ("abcd,cdef->abef", ((2, 3, 4, 5), (4, 5, 6, 7))),
        ("abcd,cdef->efab", ((2, 3, 4, 5), (4, 5, 6, 7))),
        ("i,ij->j", ((6,), (6, 4))),
    ],
)
def test_what_lies_as_matrices_do_is_one_product_and_no_copy(subscripts: str, shapes: Any) -> None:
    (step,) = steps(subscripts, *shapes)
    assert isinstance(step, Matrices)
    assert step.copied == (False, False)
    assert step.turned is None


async def test_a_library_takes_what_moves_elements(contracting: list[Any], device: accel.Device, rng: np.random.Generator) -> None:
    a, b = await device.put(rng.standard_normal((4, 5))), await device.put(rng.standard_normal((5, 4)))
    for subscripts, refs in (("ij->ji", (a,)), ("ij->j", (a,)), ("ij,ji->ij", (a, b)), ("ji,ij->ij", (b, a))):
        await device.tensor.einsum(subscripts, *refs)
        assert [sorted(step.of) for step in contracting] == [list(range(len(refs)))], subscripts
        contracting.clear()
    for subscripts, refs in (
        ("ij->ij", (a,)),
        ("ij->i", (a,)),
        ("ij,ij->ij", (a, a)),
        ("ij,j->ij", (a, b[:, 0])),
        ("i,j->ij", (a[0], b[0])),
    ):
        await device.tensor.einsum(subscripts, *refs)
        assert not contracting, f"{subscripts} reads elements in their order"
    for view in (a[::-1], a[:, :0]):  # strides backward, and no elements
        await device.tensor.einsum("ij->ji", view)
    assert not contracting
    async with device.graph() as graph:
        made = graph.tensor.einsum("ij,jk,kl->li", a, b, a)
    await graph.replay()
    x, y = await device.get(a), await device.get(b)
    np.testing.assert_allclose(await device.get(made), (x @ y @ x).T, atol=1e-12)
    await graph.aclose()


@pytest.mark.parametrize("has_library", [False, True])
async def test_real_and_complex_operands_of_one_precision_are_mixed(
    rng: np.random.Generator, request: pytest.FixtureRequest, *, has_library: bool
) -> None:
    taken = request.getfixturevalue("contracting") if has_library else None
    a, b = rng.standard_normal((4, 6)), rng.standard_normal((6, 5)) + 1j * rng.standard_normal((6, 5))
    async with opened() as device:
        x, y = await device.put(a), await device.put(b)
        for subscripts, operands in (
            ("ij,jk->ik", (x, y)),
            ("jk,ij->ki", (y, x)),
            ("ij,jk,kl->il", (x.transpose(), x, y)),
            ("ij,jk->ijk", (x, y)),
            ("ij,jk->i", (x[:, ::-1], y)),
        ):
            made = await device.tensor.einsum(subscripts, *operands)
            assert made.dtype is DType.COMPLEX128
            expected = np.einsum(subscripts, *[await device.get(ref) for ref in operands])
            np.testing.assert_allclose(await device.get(made), expected, atol=1e-12)
        assert taken is None or taken
        with pytest.raises(accel.InvalidArgumentError, match="differ in dtype"):
            await device.tensor.einsum("ij,jk->ik", await device.zeros((2, 2)), await device.zeros((2, 2), "complex64"))


async def test_options_are_honoured_or_rejected(device: accel.Device) -> None:
    x = await device.full((3, 3), 1.0, "float32")
    made = await device.tensor.einsum("ij,jk->ik", x, x, autotune=True, allow_tf32=True)
    np.testing.assert_array_equal(await device.get(made), np.full((3, 3), 3, np.float32))
    with pytest.raises(accel.InvalidArgumentError, match="autotune is 3"):
        await device.tensor.tensordot(x, x, autotune=3)  # type: ignore[arg-type]


async def test_a_library_contracts_where_copies_are_more_than_the_product(
    contracting: list[Any], device: accel.Device, rng: np.random.Generator
) -> None:
    q, k = [await device.put(rng.standard_normal((2, length, 3, 8))) for length in (300, 320)]
    thin, wide = [await device.put(rng.standard_normal(shape)) for shape in ((40, 30, 2), (2, 30, 40))]
    await device.tensor.einsum("bqhd,bkhd->bhqk", q, k)
    assert [type(step) for step in contracting] == [Sums, Sums], "heads between: both are copied, and the product takes longer"
    contracting.clear()
    await device.tensor.einsum("abk,kcd->dbca", thin, wide)
    assert [type(step) for step in contracting] == [Matrices], "a large result of short sums would be copied"


def test_the_smaller_of_two_copies_is_made() -> None:
    (step,) = steps("bqhd,bkhd->bhqk", (2, 50, 3, 4), (2, 60, 3, 4))
    assert step.copied == (True, True)  # heads are between: both are copied, and the larger result is not
    assert step.turned is None
    (step,) = steps("ajb,jc->abc", (40, 3, 40), (3, 2))
    assert step.copied == (False, False)  # a stack of transposed matrices, and one for all
    assert (step.transposed, step.shapes) == ((True, False), ((40, 3, 40), (3, 2)))


def test_copies_read_neighbours_and_matrices_are_read_once() -> None:
    (step,) = steps("abcd,dcbe->ea", (20, 20, 20, 20), (20, 20, 20, 20))
    copied = [layout for layout, is_copied in zip(step.layouts, step.copied, strict=True) if is_copied]
    assert [layout.strides[-1] for layout in copied] == [1]
    assert [len(shape) for shape in step.shapes] == [2, 2]  # a stack of vectors would read the other operand for each
    assert step.turned is None


def test_products_without_sums_are_no_products_of_matrices() -> None:
    assert [type(step) for step in steps("i,j->ij", (3,), (4,))] == [Products]
    assert [type(step) for step in steps("ij,ij->ji", (3, 4), (3, 4))] == [Products]
    assert [type(step) for step in steps("ijk->ki", (2, 3, 4))] == [Sums]
    assert [type(step) for step in steps("ij,jk->k", (3, 4), (4, 5))] == [Sums, Matrices]  # rows are summed first: less is multiplied


def test_the_order_of_contractions_is_the_cheapest() -> None:
    first, second = steps("ij,jk,kl->il", (1000, 2), (2, 1000), (1000, 3))
    assert set(first.of) == {1, 2}
    assert 3 in second.of
    many = ",".join(f"{a}{b}" for a, b in zip("abcdefgh", "bcdefghi", strict=True)) + "->ai"
    assert len(steps(many, *[(3, 3)] * 8)) == 7


async def test_a_path_is_followed(device: accel.Device, rng: np.random.Generator) -> None:
    arrays = [rng.standard_normal(shape) for shape in ((2, 3), (3, 4), (4, 5))]
    expected = np.einsum("ij,jk,kl->il", *arrays)
    refs = [await device.put(each) for each in arrays]
    paths: list[Any] = ["greedy", "optimal", [(1, 2), (0, 1)], ["einsum_path", (0, 2), (0, 1)], [(0, 1, 2)]]
    for optimize in paths:
        made = await device.tensor.einsum("ij,jk,kl->il", *refs, optimize=optimize)
        np.testing.assert_allclose(await device.get(made), expected, atol=1e-12)
    for wrong in ("best", 3, [(0, 1)], [(0, 3), (0, 1)], [(0, 0), (0, 1)], [(0,), (0, 1), (0, 1)], [0, 1]):
        with pytest.raises(accel.InvalidArgumentError, match="optimize"):
            await device.tensor.einsum("ij,jk,kl->il", *refs, optimize=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("subscripts", "shapes", "message"),
    [
        ("ij,jk->ik", ((2, 3),), "has 2 operand"),
        ("ij->ij", ((2, 3, 4),), "dimension"),
        ("i...j", ((2,),), "dimension"),
        ("ij,jk->ik", ((2, 3), (2, 3)), "axes of one index have"),
        ("ii", ((1, 3),), "axes of one index have"),
        ("i->ii", ((2,),), "twice"),
        ("i->j", ((2,),), "of no operand"),
        ("...i->i", ((2, 3),), "no '...'"),
        ("i1", ((2, 3),), "other than letters"),
        ("..i", ((2, 3),), "other than letters"),
        ("i->i->i", ((2,),), "other than letters"),
        (3, ((2,),), "subscripts is 3"),
    ],
)
async def test_wrong_subscripts_are_refused(device: accel.Device, subscripts: Any, shapes: Any, message: str) -> None:
    refs = [await device.zeros(shape) for shape in shapes]
    with pytest.raises(accel.InvalidArgumentError, match=message) as caught:
        await device.tensor.einsum(subscripts, *refs)
    assert caught.value.op == "einsum"


async def test_operands_and_out_are_checked(device: accel.Device) -> None:
    x, y = await device.zeros((2, 3)), await device.zeros((3, 2), "float64")
    with pytest.raises(accel.InvalidArgumentError, match="differ in dtype"):
        await device.tensor.einsum("ij,jk->ik", x, y)
    with pytest.raises(accel.UnsupportedError, match="int32"):
        await device.tensor.einsum("ij->ji", await device.zeros((2, 3), "int32"))
    with pytest.raises(accel.InvalidArgumentError, match="out"):
        await device.tensor.einsum("ij->ji", x, out=x)
    with pytest.raises(accel.InvalidArgumentError, match="out"):
        await device.tensor.einsum("ij->ji", x, out=await device.zeros((2, 3)))
    with pytest.raises(accel.InvalidArgumentError, match="TF32"):
        await device.tensor.einsum("ij->ji", y, allow_tf32=True)
    with pytest.raises(accel.InvalidArgumentError, match="no operands"):
        await device.tensor.einsum("")
    with pytest.raises(TypeError, match=r"device\.tensor\.einsum\(\) .*optimise.*Did you mean 'optimize'"):
        await device.tensor.einsum("ij->ji", x, optimise=True)  # type: ignore[call-arg]
    for axes in (3, -1, ((0,), (0, 1)), ((5,), (0,)), ((0, 0), (0, 1)), (1,), ((0,), (0,))):
        with pytest.raises(accel.InvalidArgumentError):
            await device.tensor.tensordot(x, await device.zeros((3, 2)), axes)


async def test_it_writes_into_strided_views_and_reads_them(device: accel.Device, rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((4, 6)), rng.standard_normal((6, 5))
    whole = await device.full((8, 10), -1.0, "float64")
    x, y = await device.put(a), await device.put(b)
    out = whole[::2, ::2]
    assert await device.tensor.einsum("ij,jk->ik", x[:, ::-1], y[::-1], out=out) is out
    found = await device.get(whole)
    np.testing.assert_allclose(found[::2, ::2], a @ b, atol=1e-12)
    assert (found[1::2] == -1).all()
    assert (found[:, 1::2] == -1).all()


async def test_batches_and_graphs_record_it_as_one_op(device: accel.Device, rng: np.random.Generator) -> None:
    arrays = [rng.standard_normal(shape) for shape in ((4, 3, 5), (5, 4, 2), (2, 7))]
    expected = np.einsum("aij,jak,kl->lia", *arrays)
    refs = [await device.put(each) for each in arrays]
    async with device.batch() as batch:
        x = batch.elementwise.unary("neg", refs[0])
        made = batch.elementwise.unary("neg", batch.tensor.einsum("aij,jak,kl->lia", x, *refs[1:]))
        assert len(batch) == 3
    np.testing.assert_allclose(await device.get(made), expected, atol=1e-12)
    async with device.graph() as graph:
        made = graph.tensor.tensordot(graph.tensor.einsum("aij,jak->ik", *refs[:2]), refs[2], 1)
    for _ in range(2):
        await device.put(a := rng.standard_normal((4, 3, 5)), out=refs[0])
        await graph.replay()
        np.testing.assert_allclose(await device.get(made), np.einsum("aij,jak,kl->il", a, *arrays[1:]), atol=1e-12)
    await graph.aclose()


async def test_an_op_of_it_that_fails_is_its_own_place_in_a_batch() -> None:
    faults = accel.testing.FaultPlan().fail_at(2, accel.LibraryError("not today", library="blas"), op="matmul")
    async with opened(faults=faults) as device:
        x = await device.zeros((3, 3))
        with pytest.raises(accel.LibraryError) as caught:
            async with device.batch() as batch:
                y = batch.elementwise.unary("neg", x)
                z = batch.tensor.einsum("ij,jk,kl->il", y, y, x)
                batch.elementwise.unary("neg", z)
        assert caught.value.op_index == 1
        await device.get(y)
        assert z.is_stale
        faults.fail_at(4, accel.LibraryError("not now", library="blas"), op="matmul")
        with pytest.raises(accel.LibraryError) as caught:
            await device.tensor.einsum("ij,jk,kl->il", x, x, x)
        assert caught.value.op_index is None


async def test_buffers_in_between_are_freed_and_a_deadline_holds(device: accel.Device, rng: np.random.Generator) -> None:
    x = await device.put(rng.standard_normal((16, 16)))
    before = device.info().memory.used
    made = await device.tensor.einsum("ij,jk,kl->li", x, x, x)
    gc.collect()
    await device.get(x)
    assert device.info().memory.used == before + made.nbytes
    assert made.shape == (16, 16)
    await device.free(made)
    with pytest.raises(accel.DeadlineExceededError):
        await device.tensor.einsum("ij,jk,kl->li", x, x, x, timeout=0)
    op = pickle.loads(pickle.dumps(ops.Einsum("ij,jk->ik", (x, x))))  # refs travel as tokens
    np.testing.assert_allclose(await device.get(await device.run(op)), (a := await device.get(x)) @ a, atol=1e-12)


async def test_expressions_have_it(device: accel.Device, rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((4, 5)).astype(np.float32), rng.standard_normal((6, 5))
    xp = device.xp
    x, y = xp.asarray(await device.put(a)), xp.asarray(await device.put(b))
    z = xp.einsum("ij,kj->ki", x + 1, y) * 2
    assert (z.shape, z.dtype) == ((6, 4), xp.float64)
    found = await device.get((await z).ref)
    np.testing.assert_allclose(found, 2 * b @ (a.astype(np.float64) + 1).T, atol=1e-6)
    assert xp.einsum("ii", xp.asarray(await device.zeros((3, 3)))).shape == ()
    with pytest.raises(accel.InvalidArgumentError, match="int32"):
        xp.einsum("i->", xp.ones(3, dtype=xp.int32))
    with pytest.raises(accel.InvalidArgumentError, match="has 1 operand"):
        xp.einsum("i->", x, y)


async def test_the_families_that_compute_it_are_made_ready() -> None:
    async with opened(libraries=("tensor", "blas")) as device:
        assert device._core.options.libraries == ("tensor", "linalg", "elementwise", "reduce", "arrays", "blas")
        await device.tensor.einsum("ij->", await device.zeros((2, 2)))
