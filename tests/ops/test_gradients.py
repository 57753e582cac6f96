"""Gradients of ops, against finite differences of the ops themselves, and what is refused. Values are compared with formulas by the samples of the family."""

from __future__ import annotations

import secrets
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import DType
from accel.cpu.parts import PARTS as CPU_PARTS
from accel.ops import DnnOps
from accel.ops.namespace import Submitter
from accel_cuda.families import loss, pooling, training
from accel_cuda.families.dnn import PART
from accel_cuda.families.programs import program_of
from tests.cuda_support import Names
from tests.device_support import failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.usefixtures("nothing_left")

Array = np.ndarray[Any, Any]
_STEP = 1e-6


@pytest.fixture
def seeded() -> tuple[int, np.random.Generator]:
    seed = secrets.randbits(32)
    return seed, np.random.default_rng(seed)


async def check_gradient(
    device: accel.Device, seeded: Any, x: Array, forward: Callable[..., Awaitable[Any]], backward: Callable[..., Awaitable[Any]]
) -> None:
    """Compare ``backward(grad, x)`` with differences of ``sum(grad * forward(x))``, along every element and along a random direction."""
    seed, rng = seeded
    made = await device.get(await forward(await device.put(x)))
    grad = np.asarray(rng.standard_normal(made.shape))
    got = await device.get(await backward(await device.put(grad), await device.put(x)))
    assert got.shape == x.shape

    async def loss(moved: Array) -> float:
        return float((grad * await device.get(await forward(await device.put(moved)))).sum())

    directions = [rng.standard_normal(x.shape) for _ in range(2)]
    for place in rng.permutation(x.size)[:12]:
        one = np.zeros(x.size)
        one[place] = 1
        directions.append(one.reshape(x.shape))
    for direction in directions:
        slope = (await loss(x + _STEP * direction) - await loss(x - _STEP * direction)) / (2 * _STEP)
        assert abs(slope - float((got * direction).sum())) < 1e-6 * max(1.0, abs(slope)), f"seed {seed}"


CONVOLUTIONS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": (2, (2, 3, 6, 5), (4, 3, 3, 2), {}),
    "strides that leave pixels out": (2, (1, 2, 8, 9), (3, 2, 2, 3), {"stride": (3, 2)}),
    "padding of one end": (2, (1, 2, 5, 4), (2, 2, 3, 3), {"padding": ((0, 2), (1, 0)), "channels_last": True}),
    "groups and dilation": (2, (2, 4, 7, 7), (6, 2, 3, 2), {"groups": 2, "dilation": (2, 3), "padding": 2}),
    "depthwise, channels last": (2, (2, 3, 6, 6), (3, 1, 3, 3), {"groups": 3, "padding": 1, "channels_last": True}),
    "a line": (1, (2, 2, 11), (3, 2, 4), {"stride": 3, "padding": ((1, 2),)}),
    "a volume": (3, (1, 2, 4, 3, 5), (2, 2, 2, 2, 3), {"padding": 1, "stride": 2, "channels_last": True}),
    "one element": (2, (1, 1, 1, 1), (1, 1, 1, 1), {}),
}


@pytest.mark.parametrize("case", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
async def test_convolutions(device: accel.Device, seeded: Any, case: Any) -> None:
    rank, x_shape, w_shape, options = case
    x, w = seeded[1].standard_normal(x_shape), seeded[1].standard_normal(w_shape)
    if options.get("channels_last"):
        x, w = (np.ascontiguousarray(np.moveaxis(each, 1, -1)) for each in (x, w))
    image, filters = await device.put(x), await device.put(w)
    dnn: Any = device.dnn
    forward, of_input, of_filter = (getattr(dnn, f"conv{rank}d{ending}") for ending in ("", "_input_grad", "_filter_grad"))
    await check_gradient(
        device, seeded, x, lambda x: forward(x, filters, **options), lambda grad, x: of_input(grad, filters, x.shape, **options)
    )
    await check_gradient(
        device, seeded, w, lambda w: forward(image, w, **options), lambda grad, w: of_filter(image, grad, w.shape, **options)
    )


@pytest.mark.parametrize(
    ("window", "options"), [(2, {}), (3, {"stride": 2, "padding": 1}), ((2, 3), {"padding": ((1, 0), (0, 2)), "stride": (1, 2)})]
)
@pytest.mark.parametrize("last", [False, True])
async def test_pooling(device: accel.Device, seeded: Any, window: Any, options: Any, last: bool) -> None:
    x = seeded[1].permutation(2 * 7 * 3 * 6).reshape(2, 7, 3, 6) * 0.1  # no two are nearly the same
    dnn, options = device.dnn, options | {"channels_last": last}
    await check_gradient(
        device, seeded, x, lambda x: dnn.max_pool(x, window, **options), lambda grad, x: dnn.max_pool_grad(grad, x, window, **options)
    )


@pytest.mark.parametrize("counts", [False, True])
async def test_means(device: accel.Device, seeded: Any, counts: bool) -> None:
    x, dnn = seeded[1].standard_normal((2, 7, 3, 6)), device.dnn
    options: Any = {"window": (2, 3), "padding": ((1, 0), (0, 2)), "stride": (1, 2), "count_include_pad": counts}
    await check_gradient(
        device, seeded, x, lambda x: dnn.avg_pool(x, **options), lambda grad, x: dnn.avg_pool_grad(grad, x.shape, **options)
    )


async def test_cross_entropy(device: accel.Device, seeded: Any) -> None:
    labels = await device.put(np.array([[0, 4, 2], [1, -100, 3]]))
    await check_gradient(
        device,
        seeded,
        3 * seeded[1].standard_normal((2, 3, 5)),
        lambda x: device.dnn.cross_entropy(x, labels),
        lambda grad, x: device.dnn.cross_entropy_grad(grad, x, labels),
    )


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
@pytest.mark.parametrize("window", [None, 2])
async def test_attention(device: accel.Device, seeded: Any, causal: Any, window: Any) -> None:
    if window is not None and causal is False:
        pytest.skip("a window comes with causal")
    arrays = [seeded[1].standard_normal(shape) for shape in ((2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4))]
    options: Any = {"causal": causal, "window": window, "scale": 0.7}
    dnn: Any = device.dnn
    for place in range(3):

        async def operands(moved: Any, place: int = place) -> list[Any]:
            return [moved if number == place else await device.put(each) for number, each in enumerate(arrays)]

        async def forward(moved: Any, operands: Any = operands) -> Any:
            return await dnn.attention(*await operands(moved), **options)

        async def backward(grad: Any, moved: Any, operands: Any = operands, place: int = place) -> Any:
            refs = await operands(moved)
            attended, stats = await dnn.attention_with_stats(*refs, **options)
            return (await dnn.attention_grad(grad, *refs, attended, stats, **options))[place]

        await check_gradient(device, seeded, arrays[place], forward, backward)


@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
async def test_norms_of_rows(device: accel.Device, seeded: Any, kind: str, has_weight: bool) -> None:
    rng, dnn = seeded[1], device.dnn
    norm, gradient = getattr(dnn, kind), getattr(dnn, f"{kind}_grad")
    arrays = [rng.standard_normal((4, 3, 5)) + 1, rng.standard_normal((3, 5)), rng.standard_normal((3, 5))]
    x, weight, _ = [await device.put(each) for each in arrays]
    given = {"weight": weight} if has_weight else {}
    await check_gradient(
        device, seeded, arrays[0], lambda x: norm(x, (3, 5), **given, eps=0.1), lambda g, x: first(gradient(g, x, (3, 5), **given, eps=0.1))
    )
    await check_gradient(
        device, seeded, arrays[1], lambda w: norm(x, (3, 5), w, eps=0.1), lambda g, w: first(gradient(g, x, (3, 5), w, eps=0.1), 1)
    )
    if kind == "layer_norm":
        await check_gradient(
            device, seeded, arrays[2], lambda b: norm(x, (3, 5), weight, b), lambda g, b: first(gradient(g, x, (3, 5), weight), 2)
        )


@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize(
    ("groups", "shape"),
    [(groups, shape) for groups in (1, 3, None) for shape in ((3, 6, 5), (2, 6, 3, 2), (4, 6)) if groups or len(shape) > 2],
)
async def test_norms_of_channels(device: accel.Device, seeded: Any, groups: int | None, shape: tuple[int, ...], has_weight: bool) -> None:
    rng, dnn = seeded[1], device.dnn
    options: Any = {"eps": 0.1} | ({} if groups is None else {"num_groups": groups})
    norm, gradient = (dnn.instance_norm, dnn.instance_norm_grad) if groups is None else (dnn.group_norm, dnn.group_norm_grad)
    arrays = [2 * rng.standard_normal(shape) + 1, rng.standard_normal(shape[1]), rng.standard_normal(shape[1])]
    x, weight, _ = [await device.put(each) for each in arrays]
    given = {"weight": weight, **options} if has_weight else options
    await check_gradient(device, seeded, arrays[0], lambda x: norm(x, **given), lambda g, x: first(gradient(g, x, **given)))
    for place, name in ((1, "weight"), (2, "bias")):
        await check_gradient(
            device,
            seeded,
            arrays[place],
            lambda moved, name=name: norm(x, **given | {name: moved}),
            lambda g, moved, place=place: first(gradient(g, x, **given | ({"weight": moved} if place == 1 else {})), place),
        )


async def first(made: Any, place: int = 0) -> Any:
    return (await made)[place]


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
async def test_softmax(device: accel.Device, seeded: Any, kind: str, axis: int) -> None:
    softmax, gradient = getattr(device.dnn, kind), getattr(device.dnn, f"{kind}_grad")

    async def backward(grad: Any, x: Any) -> Any:
        return await gradient(grad, await softmax(x, axis), axis)

    x = 2 * seeded[1].standard_normal((3, 4, 5))
    await check_gradient(device, seeded, x, lambda x: softmax(x, axis), backward)
    y, grad = await softmax(await device.put(x), axis), await device.put(seeded[1].standard_normal(x.shape))
    expected = await device.get(await gradient(grad, y, axis))
    for out in (grad, y):
        operands = [await device.put(await device.get(each)) for each in (grad, y)]
        made = await gradient(*operands, axis, out=operands[out is y])
        np.testing.assert_array_equal(await device.get(made), expected)


@pytest.mark.parametrize("axis", [1, -1])
async def test_batch_norm(device: accel.Device, seeded: Any, axis: int) -> None:
    rng, dnn = seeded[1], device.dnn
    arrays = [3 * rng.standard_normal((4, 3, 5)) + 1, rng.standard_normal((4, 3, 5)[axis]), rng.standard_normal((4, 3, 5)[axis])]
    x, weight, bias = [await device.put(each) for each in arrays]
    options: Any = {"axis": axis, "eps": 0.1}
    for place, (forward, backward) in enumerate(
        (
            (
                lambda x: first(dnn.batch_norm_train(x, weight, bias, **options)),
                lambda g, x: first(dnn.batch_norm_grad(g, x, weight, **options)),
            ),
            (lambda w: first(dnn.batch_norm_train(x, w, bias, **options)), lambda g, w: first(dnn.batch_norm_grad(g, x, w, **options), 1)),
            (lambda b: first(dnn.batch_norm_train(x, None, b, **options)), lambda g, b: first(dnn.batch_norm_grad(g, x, **options), 2)),
        )
    ):
        await check_gradient(device, seeded, arrays[place], forward, backward)
    made, mean, var = await dnn.batch_norm_train(x, weight, bias, **options)
    again = await dnn.batch_norm(x, mean, var, weight, bias, **options)
    np.testing.assert_allclose(await device.get(made), await device.get(again), rtol=1e-12, atol=1e-12)


async def test_dropout_keeps_what_the_numbers_of_a_uniform_distribution_say(device: accel.Device, seeded: Any) -> None:
    x = seeded[1].standard_normal((40, 250))
    ref = await device.put(x)
    drawn = await device.get(await device.rng.uniform(x.shape, seed=5, offset=7))
    expected = np.where(drawn >= 0.3, x / 0.7, 0)
    np.testing.assert_allclose(await device.get(await device.dnn.dropout(ref, 0.3, seed=5, offset=7)), expected, rtol=1e-12)
    assert await device.dnn.dropout(ref, 0.3, seed=5, offset=7, out=ref) is ref
    np.testing.assert_allclose(await device.get(ref), expected, rtol=1e-12)
    nothing = await device.get(await device.dnn.dropout(await device.full(9, np.nan, "float32"), 1.0, seed=1))
    np.testing.assert_array_equal(nothing, np.zeros(9))


async def test_the_weights_of_no_rows_have_no_gradient(device: accel.Device) -> None:
    none, weight = await device.zeros((0, 4)), await device.zeros(4)
    images, no_pixels = await device.zeros((0, 4, 3)), await device.zeros((2, 4, 0))
    for x, made in (
        (none, await device.dnn.layer_norm_grad(none, none, 4, weight)),
        (none, await device.dnn.rms_norm_grad(none, none, 4)),
        (images, await device.dnn.group_norm_grad(images, images, 2, weight)),
        (no_pixels, await device.dnn.instance_norm_grad(no_pixels, no_pixels, weight)),
    ):
        assert made[0].shape == x.shape
        for each in made[1:]:
            np.testing.assert_array_equal(await device.get(each), np.zeros(4))
    no_channels = await device.zeros((2, 0, 3))
    for made in (
        await device.dnn.group_norm_grad(no_channels, no_channels, 2),
        await device.dnn.instance_norm_grad(no_channels, no_channels),
    ):
        assert [each.shape for each in made] == [(2, 0, 3), (0,), (0,)]


async def test_a_window_of_equals_gives_its_gradient_to_the_first(device: accel.Device) -> None:
    x, grad = await device.put(np.array([[[2.0, 2, 1, np.nan, np.nan, 9]]])), await device.put(np.array([[[1.0, 10, 100]]]))
    got = await device.get(await device.dnn.max_pool_grad(grad, x, 2))
    np.testing.assert_array_equal(got, [[[1, 0, 0, 10, 100, 0]]])
    hidden = await device.full((1, 1, 3), -np.inf, "float64")
    got = await device.get(await device.dnn.max_pool_grad(await device.full((1, 1, 2), 1.0, "float64"), hidden, 2, 2, 1))
    np.testing.assert_array_equal(got, [[[1, 1, 0]]], "padding is never the largest")


async def test_a_gradient_that_is_nan_spreads_to_what_it_is_of(device: accel.Device) -> None:
    grad, w = np.ones((1, 1, 4)), np.ones((1, 1, 2))
    grad[0, 0, 1] = np.nan
    got = await device.get(await device.dnn.conv1d_input_grad(await device.put(grad), await device.put(w), (1, 1, 5)))
    np.testing.assert_array_equal(np.isnan(got), [[[False, True, True, False, False]]])
    got = await device.get(await device.dnn.conv1d_filter_grad(await device.put(np.ones((1, 1, 5))), await device.put(grad), (1, 1, 2)))
    assert np.isnan(got).all()


async def test_gradients_of_nothing_are_zeros(device: accel.Device) -> None:
    dnn = device.dnn
    none, x = await device.zeros((0, 2, 3, 3)), await device.zeros((0, 3, 4, 4))
    np.testing.assert_array_equal(await device.get(await dnn.conv2d_filter_grad(x, none, (2, 3, 2, 2))), np.zeros((2, 3, 2, 2)))
    assert (await dnn.conv2d_input_grad(none, await device.zeros((2, 3, 2, 2)), x.shape)).shape == x.shape
    no_filters = await device.zeros((0, 3, 2, 2))
    out = await device.full((1, 3, 4, 4), 7.0, "float32")
    await dnn.conv2d_input_grad(await device.zeros((1, 0, 3, 3)), no_filters, out.shape, out=out)
    np.testing.assert_array_equal(await device.get(out), np.zeros(out.shape))


async def test_cross_entropy_may_overwrite_its_logits(device: accel.Device, seeded: Any) -> None:
    logits, labels = await device.put(seeded[1].standard_normal((4, 7))), await device.put(np.array([1, 2, 3, 4], np.int32))
    grad = await device.full(4, 0.25, "float64")
    expected = await device.get(await device.dnn.cross_entropy_grad(grad, logits, labels))
    await device.dnn.cross_entropy_grad(grad, logits, labels, out=logits)
    np.testing.assert_array_equal(await device.get(logits), expected)


WRONG: dict[str, Any] = {
    "grad of another shape": lambda d, r: d.conv2d_input_grad(r(1, 6, 4, 4), r(6, 4, 3, 3), (1, 4, 5, 5)),
    "an input of another rank": lambda d, r: d.conv2d_input_grad(r(1, 6, 3, 3), r(6, 4, 3, 3), (4, 5, 5)),
    "an input of other channels": lambda d, r: d.conv2d_input_grad(r(1, 6, 3, 3), r(6, 4, 3, 3), (1, 5, 5, 5)),
    "a filter that does not fit": lambda d, r: d.conv2d_filter_grad(r(1, 4, 5, 5), r(1, 6, 3, 3), (6, 4, 6, 6)),
    "a filter of negative size": lambda d, r: d.conv2d_filter_grad(r(1, 4, 5, 5), r(1, 6, 3, 3), (6, 4, -3, 3)),
    "tf32 for float64": lambda d, r: d.conv2d_filter_grad(r(1, 4, 5, 5), r(1, 6, 3, 3), (6, 4, 3, 3), allow_tf32=True),
    "groups that are not its": lambda d, r: d.conv2d_filter_grad(r(1, 4, 5, 5), r(1, 6, 3, 3), (6, 4, 3, 3), groups=2),
    "windows that do not fit": lambda d, r: d.max_pool_grad(r(1, 4, 5, 5), r(1, 4, 5, 5), 2),
    "a shape without channels": lambda d, r: d.avg_pool_grad(r(1, 4, 5), (4, 5), 1),
    "labels of floats": lambda d, r: d.cross_entropy(r(4, 5), r(4)),
    "one grad for all": lambda d, r: d.cross_entropy_grad(r(1), r(4, 5), r.labels),
    "labels of another shape": lambda d, r: d.cross_entropy(r(5, 4), r.labels),
    "statistics of another shape": lambda d, r: d.attention_grad(*[r(1, 2, 3, 4)] * 5, r(1, 6, 3, 3)),
    "gradients of other queries": lambda d, r: d.attention_grad(r(1, 2, 3), *[r(1, 2, 3, 4)] * 4, r(1, 2, 3)),
    "a gradient of another shape": lambda d, r: d.layer_norm_grad(r(5, 4), r(4, 5), 5),
    "a weight of another shape": lambda d, r: d.rms_norm_grad(r(4, 5), r(4, 5), 5, r(4)),
    "groups that do not divide the channels": lambda d, r: d.group_norm_grad(r(4, 5), r(4, 5), 2),
    "no number of groups": lambda d, r: d.group_norm_grad(r(4, 5), r(4, 5), "all"),
    "a weight of other channels": lambda d, r: d.group_norm_grad(r(5, 4), r(5, 4), 2, r(1)),
    "a gradient of other images": lambda d, r: d.instance_norm_grad(r(1, 6, 3, 3), r(1, 6, 4, 4)),
    "images without pixels' dimensions": lambda d, r: d.instance_norm_grad(r(4, 5), r(4, 5)),
    "channels without elements": lambda d, r: d.batch_norm_train(r(4, 0), axis=0),
    "a weight for other channels": lambda d, r: d.batch_norm_grad(r(4, 5), r(4, 5), r(4)),
    "a gradient of another softmax": lambda d, r: d.softmax_grad(r(5, 4), r(4, 5)),
    "no axis": lambda d, r: d.log_softmax_grad(r(4, 5), r(4, 5), 2),
    "a part of its operand": lambda d, r: d.softmax_grad(r(4, 0), r(4, 0), out=r(5, 4)),
    "a share above 1": lambda d, r: d.dropout(r(4), 1.5, seed=1),
    "a seed below 0": lambda d, r: d.dropout(r(4), seed=-1),
    "no number for a share": lambda d, r: d.dropout(r(4), "half", seed=1),
    "no classes": lambda d, r: d.cross_entropy(r(4, 0), r.labels),
}


class Refs:
    """Makes refs of zeros; ``labels`` is of 4 ints."""

    def __init__(self, made: dict[tuple[int, ...], Any], labels: Any) -> None:
        self.made, self.labels = made, labels

    def __call__(self, *shape: int) -> Any:
        return self.made[shape]


SHAPES = (
    *((1, 6, 4, 4), (6, 4, 3, 3), (1, 6, 3, 3), (1, 4, 5, 5), (1, 4, 5), (4, 5), (5, 4), (4, 0)),
    *((4,), (1,), (1, 2, 3, 4), (1, 2, 3)),
)


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
async def test_what_does_not_fit_is_refused(device: accel.Device, call: Any) -> None:
    refs = Refs({shape: await device.zeros(shape, "float64") for shape in SHAPES}, await device.zeros(4, "int64"))
    error = await failure(call(device.dnn, refs), accel.InvalidArgumentError)
    assert error.remedy != accel.InvalidArgumentError.default_remedy


def test_every_kernel_on_cuda_is_one_of_the_program_that_its_op_names() -> None:
    programs: Any = PART.program
    """The kernels are enqueued on a stream that takes down their names; those that compile are run by the GPU tests."""
    owner: Any = SimpleNamespace(dropped=deque())
    named: Any = DnnOps(Submitter(lambda op: op, lambda error: error, "device"))
    launched: list[str] = []
    stream = SimpleNamespace(
        functions=Names(),
        ready=lambda: None,
        fill=lambda *arguments: None,
        launch=lambda name, blocks, threads, *_: launched.append(name) if min(blocks, threads) else None,
        launch_wide=lambda name, grid, block, *_: launched.append(name) if min(*grid, *block) else None,
    )
    kernels, seen = {**PART.kernels, **training.WORKING}, set()
    for sample in CPU_PARTS["dnn"].samples(np.random.default_rng(1)):
        kind = sample.name.split()[0]
        if kind not in {**loss.KERNELS, **pooling.KERNELS, **training.KERNELS, **training.WORKING}:
            continue
        refs = [accel.AccelRef(owner, number, each.shape, DType.of(each.dtype), 1) for number, each in enumerate(sample.operands)]
        op = sample.call(named, *refs)
        plan, before = op.plan(), len(launched)
        kernels[kind](
            SimpleNamespace(stream=stream), op, plan, range(256, 256 * (len(plan.reads) + 1), 256), (4096,) * (len(plan.creates) + 1)
        )
        assert all(program_of(name) == programs[kind](op) for name in launched[before:]), launched[before:]
        assert len(launched) > before or not all(ref.size for ref in refs), sample.name
        assert len(launched) - before <= 8, "as many commands as the family says"
        seen |= {kind} if len(launched) > before else set()
    assert seen == {*loss.KERNELS, *pooling.KERNELS, *training.KERNELS, *training.WORKING}
