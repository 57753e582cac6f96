"""What a device computes and keeps, asked for as users ask."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING

import numpy as np

from accel import ops
from accel.dtype import DType
from accel.errors import InvalidArgumentError, OutOfMemoryError, StaleRefError, UnsupportedError
from accel.testing.conformance.device_harness import close_to, failure, opened, until

if TYPE_CHECKING:
    from accel.device import Device
    from accel.testing.conformance.harness import Array, Harness

__all__ = [
    "check_batch_computes",
    "check_large_copies",
    "check_libraries_compute",
    "check_memory_runs_out_and_comes_back",
    "check_put_and_get_keep_everything",
    "check_refs_own_their_memory",
    "check_results_go_where_they_are_sent",
    "check_wrong_operands_are_refused",
]

_MIB = 1 << 20


async def check_put_and_get_keep_everything(harness: Harness) -> None:
    """Check that every dtype comes back as it was put, 0-d, empty and non-contiguous arrays too."""
    async with opened(harness) as device:
        for dtype in DType:
            for shape in ((), (0,), (3, 0), (5,), (2, 3, 4)):
                array = harness.random(shape, dtype)
                got = await device.get(await device.put(array))
                assert (got.dtype, got.shape) == (array.dtype, array.shape), (
                    f"{dtype.value}{list(shape)} came back as {got.dtype}{got.shape}"
                )
                assert got.tobytes() == array.tobytes(), f"{dtype.value}{list(shape)} came back changed (seed {harness.seed})"
        large = harness.random((700, 600), DType.FLOAT32)
        for view in (large.T, large[::2, ::-3], large.astype(">f4")):
            got = await device.get(await device.put(view))
            assert np.array_equal(got, view), f"a rearranged array came back changed (seed {harness.seed})"


async def check_large_copies(harness: Harness) -> None:
    """Check copies of many megabytes to the device, on it, and back."""
    array = harness.random(9 * _MIB + 13, DType.UINT8)
    async with opened(harness) as device:
        source = await device.put(array)
        copy = await device.copy(source, await device.empty(array.shape, "uint8"))
        target = np.zeros_like(array)
        assert await device.get(copy, out=target) is target
        assert np.array_equal(target, array), f"a large copy changed (seed {harness.seed})"


async def check_libraries_compute(harness: Harness) -> None:
    """Check one op of each library against numpy."""
    x, y = harness.random((2, 24, 24), DType.FLOAT32)
    async with opened(harness) as device:
        a, b = await device.put(x), await device.put(y)
        wide = x.astype(np.float64)
        close_to(harness, await device.get(await device.blas.gemm(a, b)), wide @ y, "gemm")
        close_to(
            harness, await device.get(await device.blas.gemm(a, b, transpose_a=True, alpha=0.5)), 0.5 * wide.T @ y, "gemm of a transpose"
        )
        close_to(harness, await device.get(await device.elementwise.unary("tanh", a)), np.tanh(wide), "tanh")
        close_to(harness, await device.get(await device.elementwise.binary("max", a, b)), np.maximum(wide, y), "max")
        close_to(harness, await device.get(await device.reduce("sum", a, axis=1)), wide.sum(axis=1), "sum")
        q = await device.put(x.reshape(1, 2, 12, 24))
        close_to(harness, await device.get(await device.dnn.attention(q, q, q)), _attention(wide.reshape(1, 2, 12, 24)), "attention")


def _attention(q: Array) -> Array:
    scores = q @ q.swapaxes(2, 3) / np.sqrt(q.shape[3])
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    result: Array = weights / weights.sum(axis=3, keepdims=True) @ q
    return result


async def check_results_go_where_they_are_sent(harness: Harness) -> None:
    """Check ``out=`` of every library, accumulation, and ops in place."""
    x, y = harness.random((2, 16, 16), DType.FLOAT32)
    async with opened(harness) as device:
        a, b, out = await device.put(x), await device.put(y), await device.full((16, 16), np.nan)
        assert await device.blas.gemm(a, b, out=out) is out, "out= is not what the op returned"
        await device.blas.gemm(a, b, out=out, beta=1.0)
        expected = 2 * (x.astype(np.float64) @ y)
        close_to(harness, await device.get(out), expected, "gemm into out, twice")
        await device.elementwise.binary("add", out, a, out=out)
        await device.blas.axpy(b, out, alpha=-2.0)
        await device.blas.scal(out, 0.5)
        close_to(harness, await device.get(out), (expected + x - 2 * y) / 2, "ops in place")


async def check_batch_computes(harness: Harness) -> None:
    """Check that a batch over several libraries gives what the ops alone give."""
    x = harness.random((12, 12), DType.FLOAT32)
    async with opened(harness) as device:
        a = await device.put(x)
        async with device.batch() as batch:
            h = batch.blas.gemm(a, batch.put(x.T))
            h = batch.elementwise.unary("relu", h)
            t = batch.reduce("sum", h, axis=0)
            c = batch.copy(t, batch.empty(12))
        expected = np.maximum(x.astype(np.float64) @ x.T, 0).sum(axis=0)
        close_to(harness, await device.get(t), expected, "a batch's result")
        close_to(harness, await device.get(c), expected, "a batch's copy")


async def check_wrong_operands_are_refused(harness: Harness) -> None:
    """Check that what does not fit fails before it reaches the device, which goes on."""
    async with opened(harness) as device:
        a, v = await device.zeros((2, 3)), await device.zeros(4)
        await failure(device.blas.gemm(a, a), InvalidArgumentError)
        await failure(device.elementwise.binary("add", a, v), InvalidArgumentError)
        await failure(device.get(a, out=np.zeros((3, 2), np.float32)), InvalidArgumentError)
        await failure(device.put(np.zeros(4), out=v), InvalidArgumentError)
        text = await device.zeros((2, 2), "bool")
        await failure(device.blas.gemm(text, text), UnsupportedError)
        async with opened(harness) as other:
            await failure(other.get(a), InvalidArgumentError)
        assert (await device.get(a)).shape == (2, 3)


async def check_refs_own_their_memory(harness: Harness) -> None:
    """Check that memory is held by refs alone: dropping, freeing, tokens."""
    async with opened(harness) as device:
        base = device.info().memory.used
        a, b = await device.zeros(1000), await device.zeros(1000)
        assert device.info().memory.used >= base + 8000, "live buffers are not counted"
        token = pickle.loads(pickle.dumps(a))
        assert device.resolve(token) is a, "a token does not give its ref back"
        assert np.array_equal(await device.get(await device.run(pickle.loads(pickle.dumps(ops.Copy(a, b))))), np.zeros(1000))
        await device.free(b)
        assert (await failure(device.get(b), StaleRefError)).reason == "freed"
        del a, b
        await until("all memory is given back", lambda: device.info().memory.used == base)


async def check_memory_runs_out_and_comes_back(harness: Harness) -> None:
    """Check ``memory_limit``: it fails one op, and is recovered from by dropping refs."""
    async with opened(harness, memory_limit=64 * _MIB) as device:
        kept = [await device.zeros(16 * _MIB, "uint8") for _ in range(2)]
        error = await failure(device.zeros(48 * _MIB, "uint8"), OutOfMemoryError)
        assert (error.requested, error.limit) == (48 * _MIB, 64 * _MIB), f"{error!r} does not tell the numbers"
        assert device.info().memory.reserved <= 64 * _MIB
        kept.clear()
        await asyncio.sleep(0)
        await _fill_and_compare(device, 48 * _MIB)


async def _fill_and_compare(device: Device, nbytes: int) -> None:
    got = await device.get(await device.full(nbytes, 7, "uint8"))
    assert int(got.min()) == int(got.max()) == 7, "a buffer in memory that was used before has other contents"
