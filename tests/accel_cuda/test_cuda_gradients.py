"""Gradients on the GPU: large forms against the CPU in float64, at any alignment, in batches and graphs; the samples of the family have small ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from tests.accel_cuda.compute_support import close, unaligned, wide
from tests.examples.test_examples import run_example

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

# cuDNN may add up a filter's gradient in parts, which is as exact as one sum over all terms.
ERRORS = {"float16": 4e-3, "bfloat16": 2e-2, "float32": 2e-5, "float64": 1e-12}
LENGTHS = (1, 5, 64, 127, 1000, 1024, 4096, 4097, 50_257, 131_072)

Array = np.ndarray[Any, Any]


@pytest.fixture
async def cpu() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cpu")


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    return np.asarray(rng.standard_normal(shape), accel.DType.of(dtype).numpy)


async def expected(cpu: accel.Device, call: Any, *arrays: Array) -> Any:
    """Return what the CPU makes of the same numbers in float64."""
    refs = [await cpu.put(each if each.dtype.kind == "i" else each.astype(np.float64)) for each in arrays]
    return await cpu.get(await call(cpu.dnn, *refs))


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("last", [False, True])
async def test_convolutions(device: accel.Device, cpu: accel.Device, rng: np.random.Generator, dtype: str, last: bool) -> None:
    for x_shape, w_shape, y_size, options in (
        ((4, 32, 28, 28), (64, 32, 3, 3), (28, 28), {"padding": 1}),
        ((4, 1, 28, 28), (16, 1, 3, 3), (28, 28), {"padding": 1}),
        ((2, 3, 65, 33), (24, 3, 7, 7), (33, 17), {"padding": 3, "stride": 2}),
        ((2, 32, 20, 24), (32, 1, 3, 3), (20, 24), {"padding": 1, "groups": 32}),
        ((2, 16, 21, 17), (12, 8, 3, 2), (10, 9), {"padding": ((0, 1), (2, 1)), "groups": 2, "stride": (2, 2), "dilation": (1, 3)}),
    ):
        x, w, grad = (random(rng, shape, dtype) for shape in (x_shape, w_shape, (x_shape[0], w_shape[0], *y_size)))
        if last:
            x, w, grad = (np.ascontiguousarray(np.moveaxis(each, 1, -1)) for each in (x, w, grad))
        given: Any = {**options, "channels_last": last}
        case = f"{x_shape} {w_shape} {given}"

        def of_input(dnn: Any, grad: Any, w: Any, shape: Any = x.shape, given: Any = given) -> Any:
            return dnn.conv2d_input_grad(grad, w, shape, **given)

        def of_filter(dnn: Any, x: Any, grad: Any, shape: Any = w.shape, given: Any = given) -> Any:
            return dnn.conv2d_filter_grad(x, grad, shape, **given)

        for call, arrays in ((of_input, (grad, w)), (of_filter, (x, grad))):
            made = await expected(cpu, call, *arrays)
            for skipped in (0, 1):
                refs = [await unaligned(device, each, skipped) for each in arrays]
                close(await device.get(await call(device.dnn, *refs)), made, ERRORS[dtype], f"{case} {call.__name__} {skipped}")


async def test_tf32_only_where_it_is_allowed(device: accel.Device, cpu: accel.Device, rng: np.random.Generator) -> None:
    x, grad = random(rng, (8, 32, 28, 28), "float32"), random(rng, (8, 64, 26, 26), "float32")
    made = await expected(cpu, lambda dnn, x, grad: dnn.conv2d_filter_grad(x, grad, (64, 32, 3, 3)), x, grad)
    refs = await device.put(x), await device.put(grad)
    scale = np.abs(made).max()
    exact = np.abs(await device.get(await device.dnn.conv2d_filter_grad(*refs, (64, 32, 3, 3))) - made).max() / scale
    rough = np.abs(await device.get(await device.dnn.conv2d_filter_grad(*refs, (64, 32, 3, 3), allow_tf32=True)) - made).max() / scale
    assert exact < 5e-6
    assert rough < 5e-3


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
async def test_pooling(device: accel.Device, cpu: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    for shape, window, stride, padding in (
        ((4, 32, 56, 56), 3, 2, 1),
        ((2, 8, 33, 20), (2, 3), (1, 2), ((1, 0), (0, 2))),
        ((2, 64, 1001), 5, 3, 2),
        ((1, 16, 9, 20, 17), (3, 2, 2), 2, (1, 0, 1)),
        ((3, 24, 7, 7), 7, None, 0),
    ):
        for last in (False, True):
            x = random(rng, (shape[0], *shape[2:], shape[1]) if last else shape, dtype)
            x.flat[x.size // 2] = np.nan
            options: Any = {"window": window, "stride": stride, "padding": padding, "channels_last": last}
            ref = await device.put(x)
            grad = random(rng, (await device.dnn.max_pool(ref, **options)).shape, dtype)
            for skipped in (0, 1):
                ref, of_result = await unaligned(device, x, skipped), await unaligned(device, grad, skipped)
                case = f"{shape} {options} {skipped}"
                made = await expected(cpu, lambda dnn, grad, x, options=options: dnn.max_pool_grad(grad, x, **options), grad, x)
                close(await device.get(await device.dnn.max_pool_grad(of_result, ref, **options)), made, ERRORS[dtype], case)
                for counts in (False, True):
                    given: Any = {**options, "count_include_pad": counts, "shape": x.shape}
                    made = await expected(cpu, lambda dnn, grad, given=given: dnn.avg_pool_grad(grad, **given), grad)
                    close(await device.get(await device.dnn.avg_pool_grad(of_result, **given)), made, ERRORS[dtype], f"{case} {counts}")


@pytest.mark.parametrize("dtype", ERRORS)
async def test_cross_entropy_of_rows_of_any_length_and_alignment(
    device: accel.Device, cpu: accel.Device, rng: np.random.Generator, dtype: str
) -> None:
    for number, length in enumerate(LENGTHS):
        logits, grad = random(rng, (9, length), dtype) * 4, random(rng, (9,), dtype)
        logits = logits.astype(grad.dtype)
        labels = rng.integers(0, length, 9).astype(np.int32 if number % 2 else np.int64)
        labels[1:4] = -100, -1, length
        losses = await expected(cpu, lambda dnn, x, t: dnn.cross_entropy(x, t), logits, labels)
        grads = await expected(cpu, lambda dnn, g, x, t: dnn.cross_entropy_grad(g, x, t), grad, logits, labels)
        for skipped in (0, 1):
            ref, of_loss, numbers = (
                await unaligned(device, logits, skipped),
                await unaligned(device, grad, skipped),
                await device.put(labels),
            )
            is_finite, case = np.isfinite(losses), f"{length} {skipped}"
            got = wide(await device.get(await device.dnn.cross_entropy(ref, numbers)))
            np.testing.assert_array_equal(np.isfinite(got), is_finite)
            close(got[is_finite], losses[is_finite], ERRORS[dtype], case)
            got = wide(await device.get(await device.dnn.cross_entropy_grad(of_loss, ref, numbers, out=ref)))
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(grads))
            close(got[is_finite], grads[is_finite], ERRORS[dtype], case)


@pytest.mark.parametrize("dtype", ERRORS)
async def test_norms(device: accel.Device, cpu: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    rows: Any = ((5, 1), 1), ((700, 33), 33), ((3000, 256), 256), ((40, 1025), 1025), ((9, 5000), 5000), ((4, 3, 70), (3, 70))
    for shape, trailing in rows:
        x, grad = random(rng, shape, dtype) * 2 + 1, random(rng, shape, dtype)
        x, weight = x.astype(grad.dtype), random(rng, shape[-2:] if isinstance(trailing, tuple) else shape[-1:], dtype)
        for kind in ("layer_norm_grad", "rms_norm_grad"):

            def gradients(dnn: Any, g: Any, x: Any, w: Any, kind: str = kind, trailing: Any = trailing) -> Any:
                return getattr(dnn, kind)(g, x, trailing, w, eps=0.01)

            await _check_all(device, cpu, gradients, (grad, x, weight), ERRORS[dtype] * 4, f"{kind} {shape}")
    images: Any = (
        ((16, 32, 28, 28), 8),
        ((4, 64, 7, 7), 32),
        ((3, 6, 9), 2),
        ((1, 8, 65, 33), 1),
        ((300, 24, 3), 4),
        ((600, 32), 4),
        ((2, 3, 1), 3),
    )
    for shape, groups in images:
        x, grad = random(rng, shape, dtype) * 2 + 1, random(rng, shape, dtype)
        x, weight = x.astype(grad.dtype), random(rng, (shape[1],), dtype)

        def of_groups(dnn: Any, g: Any, x: Any, *w: Any, groups: int = groups) -> Any:
            return dnn.group_norm_grad(g, x, groups, *w, eps=0.01)

        def of_instances(dnn: Any, g: Any, x: Any, *w: Any) -> Any:
            return dnn.instance_norm_grad(g, x, *w, eps=0.01)

        for call in (of_groups, of_instances)[: len(shape) - 1]:
            for arrays in ((grad, x, weight), (grad, x)):
                await _check_all(device, cpu, call, arrays, ERRORS[dtype] * 4, f"{call.__name__} {shape} {groups} {len(arrays)}")
    for shape, axis in (
        ((16, 32, 28, 28), 1),
        ((16, 28, 28, 32), -1),
        ((3, 7, 9), 1),
        ((1, 1000, 70), 1),
        ((5000, 3), 1),
        ((2, 600, 5), 1),
    ):
        x, grad = random(rng, shape, dtype) * 2 + 1, random(rng, shape, dtype)
        x, weight, bias = x.astype(grad.dtype), random(rng, (shape[axis],), dtype), random(rng, (shape[axis],), dtype)

        def normalized(dnn: Any, x: Any, w: Any, b: Any, axis: int = axis) -> Any:
            return dnn.batch_norm_train(x, w, b, axis=axis)

        def backward(dnn: Any, g: Any, x: Any, w: Any, axis: int = axis) -> Any:
            return dnn.batch_norm_grad(g, x, w, axis=axis)

        await _check_all(device, cpu, normalized, (x, weight, bias), ERRORS[dtype] * 4, f"batch {shape} {axis}")
        await _check_all(device, cpu, backward, (grad, x, weight), ERRORS[dtype] * 4, f"batch gradient {shape} {axis}")


async def _check_all(device: accel.Device, cpu: accel.Device, call: Any, arrays: tuple[Array, ...], error: float, case: str) -> None:
    """Compare all results of a call with the CPU's in float64."""
    right = [await cpu.get(each) for each in await call(cpu.dnn, *[await cpu.put(each.astype(np.float64)) for each in arrays])]
    for skipped in (0, 1):
        made = await call(device.dnn, *[await unaligned(device, each, skipped) for each in arrays])
        for number, (one, other) in enumerate(zip(made, right, strict=True)):
            # Sums whose terms cancel, as in the gradient of a norm of one element, are as wrong as their terms, which are about 1.
            scale = max(1.0, float(np.max(np.abs(other), initial=0.0)))
            np.testing.assert_allclose(
                wide(await device.get(one)), other, rtol=error, atol=error * scale, err_msg=f"{case} {skipped} result {number}"
            )


@pytest.mark.parametrize("dtype", ERRORS)
async def test_dropout_drops_what_the_cpu_does(device: accel.Device, cpu: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    for size, offset in ((1, 0), (100_003, 0), (100_000, 4), (1001, 2**40 + 3)):
        x = random(rng, (size,), dtype)
        right = await expected(cpu, lambda dnn, x, offset=offset: dnn.dropout(x, 0.4, seed=11, offset=offset), x)
        for skipped in (0, 1):
            ref = await unaligned(device, x, skipped)
            got = wide(await device.get(await device.dnn.dropout(ref, 0.4, seed=11, offset=offset, out=ref)))
            np.testing.assert_array_equal(got == 0, right == 0)
            close(got, right, ERRORS[dtype], f"{size} {offset} {skipped}")


def test_the_training_example_learns_through_a_fault() -> None:
    done = run_example("train_digits.py")
    assert done.returncode == 0, done
    fault, learnt, *_ = done.stdout.splitlines()
    assert fault.startswith("a fault in step 100"), done.stdout
    assert learnt.startswith("cuda:0"), done.stdout
