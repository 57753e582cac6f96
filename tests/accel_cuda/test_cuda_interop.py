"""Memory shared with torch, CuPy and numba in both directions, on streams of theirs and ours. Slow kernels prove the order: without it, data is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import accel
from tests.device_support import until

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # what the other libraries warn of is theirs

LIBRARIES = ("elementwise", "blas")

ROOT = Path(__file__).resolve().parents[2]
SLOW = 200_000_000  # clock cycles: about 0.1 s
SPIN = 'extern "C" __global__ void spin(long long cycles) { long long start = clock64(); while (clock64() - start < cycles) {} }'


def library(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def torch() -> Any:
    return library("torch")


@pytest.fixture(scope="module")
def cupy() -> Any:
    return library("cupy")


@pytest.fixture(scope="module")
def numba_cuda() -> Any:
    library("numba")
    return importlib.import_module("numba.cuda")


def address(ref: accel.AccelRef) -> int:
    return int(ref.owner.sharing._context.buffers.blocks[ref.buffer].address) + ref.offset


# -- ours to theirs


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32", "uint8", "bool", "complex64", "complex128"])
async def test_torch_sees_the_same_memory(device: accel.Device, torch: Any, dtype: str, rng: np.random.Generator) -> None:
    source = (rng.standard_normal((4, 6)) * 5).astype(accel.DType.of(dtype).numpy)
    ref = await device.put(source)
    tensor = torch.from_dlpack(ref)
    assert (tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype), tensor.is_cuda) == (address(ref), (4, 6), f"torch.{dtype}", True)
    back = tensor.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16) if dtype == "bfloat16" else tensor.cpu().numpy()
    assert np.array_equal(back, source)
    tensor[1].zero_()
    source[1] = 0
    assert np.array_equal(await device.get(ref), source)
    part = torch.from_dlpack(ref[2:4])
    assert (part.data_ptr(), tuple(part.shape)) == (address(ref) + ref.nbytes // 2, (2, 6))


async def test_cupy_and_numba_see_the_same_memory(device: accel.Device, cupy: Any, numba_cuda: Any, rng: np.random.Generator) -> None:
    source = rng.standard_normal((5, 7)).astype(np.float32)
    ref = await device.put(source)
    for array in (cupy.from_dlpack(ref), cupy.asarray(ref)):
        assert array.data.ptr == address(ref)
        assert np.array_equal(cupy.asnumpy(array), source)
        array += 1
        source += 1
        assert np.array_equal(await device.get(ref), source)
    found = numba_cuda.as_cuda_array(ref[1:3])
    assert np.array_equal(found.copy_to_host(), source[1:3])


@pytest.mark.parametrize("ordered", [True, False])
async def test_their_stream_waits_for_our_writes(device: accel.Device, torch: Any, ordered: bool) -> None:
    """Without the protocol (stream -1) torch reads before our product is there: the test can fail."""
    n = 8192
    a = await device.full((n, n), 1.0)
    out = await device.zeros((n, n))
    await device.blas.gemm(a, a, out=out)  # loads the kernel: the next one is enqueued at once
    await device.run(accel.ops.Fill((n, n), accel.DType.FLOAT32, 0.0, out=out))
    stream = torch.cuda.Stream()
    sums = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    work = asyncio.ensure_future(device.blas.gemm(a, a, out=out))
    await until(lambda: device.info().in_flight == 1, "the product is enqueued")
    with torch.cuda.stream(stream):
        capsule = out.__dlpack__(stream=stream.cuda_stream if ordered else -1)
        tensor = torch.utils.dlpack.from_dlpack(capsule)
        sums.copy_(tensor[-1, -1:])
    assert not work.done(), "the product was too fast to prove anything"
    stream.synchronize()
    assert (float(sums) == n) == ordered
    await work


async def test_cuda_array_interface_names_a_stream_that_waits(device: accel.Device, torch: Any, cupy: Any) -> None:
    n = 8192
    a = await device.full((n, n), 1.0)
    out = await device.zeros((n, n))
    assert out.__cuda_array_interface__["stream"] is None
    out = await device.blas.gemm(a, a, out=await device.zeros((n, n)))
    await device.run(accel.ops.Fill((n, n), accel.DType.FLOAT32, 0.0, out=out))
    work = asyncio.ensure_future(device.blas.gemm(a, a, out=out))
    await until(lambda: device.info().in_flight == 1, "the product is enqueued")
    assert out.__cuda_array_interface__["stream"] > 2
    found = cupy.asarray(out)
    assert float(found[-1, -1]) == n
    await work
    assert float(torch.as_tensor(out, device="cuda")[0, 0]) == n


@pytest.mark.parametrize("told", [True, False])
async def test_our_ops_wait_for_their_writes(device: accel.Device, cupy: Any, told: bool) -> None:
    """A write behind a slow kernel on a stream of CuPy's. Where accel does not know that CuPy has the memory, it reads too early: the test can fail."""
    spin = cupy.RawKernel(SPIN, "spin")
    spin((1,), (1,), (1,))
    ref = await device.zeros(1024)
    if told:
        array = cupy.from_dlpack(ref)
    else:
        memory = cupy.cuda.UnownedMemory(address(ref), ref.nbytes, ref)
        array = cupy.ndarray((1024,), "float32", cupy.cuda.MemoryPointer(memory, 0))
    array.fill(1.0)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        spin((1,), (1,), (SLOW,))
        array.fill(2.0)
        expected = 2.0 if told else 1.0
        assert np.array_equal(await device.get(ref), np.full(1024, expected, np.float32))
        assert float(np.sum(await device.get(await device.elementwise.unary("neg", ref)))) == -expected * 1024
    cupy.cuda.Device().synchronize()
    async with device.batch() as batch:
        doubled = batch.elementwise.binary("add", ref, ref)
    assert np.array_equal(await device.get(doubled), np.full(1024, 4.0, np.float32))


async def test_results_of_a_graph_are_shared(device: accel.Device, torch: Any) -> None:
    """Replays know of the graph's buffers by one number; torch has one of them."""
    source = await device.full(1 << 20, 1.0)
    async with device.graph() as graph:
        doubled = graph.elementwise.binary("add", source, source)
        result = graph.elementwise.binary("add", doubled[: 1 << 19], doubled[1 << 19 :])
    await graph.replay()
    tensor, copy = torch.from_dlpack(result), torch.zeros(1 << 19, device="cuda")
    assert float(tensor[0]) == 4.0
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW)
        copy.copy_(tensor)
    await device.put(np.full(1 << 20, 3.0, np.float32), out=source)
    await graph.replay()
    assert float(tensor.sum()) == 12.0 * (1 << 19)
    stream.synchronize()
    assert float(copy.sum()) == 4.0 * (1 << 19), "a replay overwrote what torch had yet to read"


# -- theirs to ours


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool", "complex64"])
async def test_torch_tensors_are_taken_without_a_copy(device: accel.Device, torch: Any, dtype: str) -> None:
    tensor = torch.arange(24, device="cuda").reshape(4, 6).to(getattr(torch, dtype))
    ref = await device.wrap(tensor)
    assert (address(ref), ref.shape, ref.dtype.value, ref.is_foreign) == (tensor.data_ptr(), (4, 6), dtype, True)
    expected = np.arange(24).reshape(4, 6).astype(ref.dtype.numpy)
    assert np.array_equal(await device.get(ref), expected)
    tensor.zero_()
    assert not (await device.get(ref)).astype(np.float32).any()
    await device.put(expected, out=ref)
    assert torch.equal(tensor.cpu(), torch.arange(24).reshape(4, 6).to(tensor.dtype))
    part = await device.wrap(tensor[1:3])
    assert np.array_equal(await device.get(part), expected[1:3])


@pytest.mark.parametrize("name", ["torch", "cupy", "numba"])
async def test_slow_writes_of_theirs_come_first(device: accel.Device, torch: Any, cupy: Any, numba_cuda: Any, name: str) -> None:
    """Before the array is taken, and after."""
    spin = cupy.RawKernel(SPIN, "spin")
    spin((1,), (1,), (1,))
    stream = torch.cuda.Stream()
    array: Any = torch.zeros(4096, device="cuda") if name == "torch" else cupy.zeros(4096, "float32")
    if name == "numba":
        array = numba_cuda.as_cuda_array(array)
    shown: Any = cupy.asarray(array)
    torch.cuda.synchronize()
    ref = None
    with cupy.cuda.ExternalStream(stream.cuda_stream), torch.cuda.stream(stream):
        for value in (1.0, 2.0):
            spin((1,), (1,), (SLOW,))
            shown.fill(value)
            ref = ref or await device.wrap(array)
            result = await device.elementwise.unary("neg", ref)
            assert np.array_equal(await device.get(result), np.full(4096, -value, np.float32))
    assert ref is not None
    await device.elementwise.binary("add", ref, ref, out=ref)
    assert float(shown.sum()) == 4.0 * 4096


async def test_what_is_not_a_cuda_array_of_this_device_is_refused(device: accel.Device, torch: Any) -> None:
    square = torch.zeros((4, 4), device="cuda")
    for array in (
        square.T[1:],
        square[:, 1:],
        torch.zeros(3),
        np.zeros(3),
        [1.0],
        await device.zeros(3),
        torch.zeros(3, device="cuda").conj,
    ):
        with pytest.raises(accel.InvalidArgumentError) as caught:
            await device.wrap(array)
        assert caught.value.remedy
    with pytest.raises(accel.InvalidArgumentError, match="cannot be read") as caught:
        await device.put(square)
    assert "device.wrap" in (caught.value.remedy or "")


# -- how long


async def test_memory_that_torch_has_is_kept_and_reused_after_its_work(torch: Any) -> None:
    """In a slab that is full, so that what is given back is what is had next."""
    n = 4 << 20
    async with accel.System() as system:
        device = await system.open_device("cuda", memory_limit=64 << 20)
        ref = await device.full(n, 1.0)
        where = address(ref)
        tensor = torch.from_dlpack(ref)
        with pytest.raises(accel.InvalidArgumentError, match="tensor"):
            await device.free(ref)
        del ref
        gc.collect()
        others = [await device.full(n, 9.0) for _ in range(3)]
        assert where not in map(address, others), "memory was reused that torch still has"
        with pytest.raises(accel.OutOfMemoryError):
            await device.full(n, 9.0)
        assert float(tensor.sum()) == n
        stream = torch.cuda.Stream()
        copy = torch.zeros(n, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLOW)
            copy.copy_(tensor)
        del tensor
        gc.collect()
        again = await device.full(n, 7.0)
        assert address(again) == where, "the memory did not come back"
        stream.synchronize()
        assert float(copy.sum()) == n, "memory was overwritten that torch had yet to read"
        assert np.array_equal(await device.get(again), np.full(n, 7.0, np.float32))


async def test_tensor_is_kept_until_our_last_use_is_over(device: accel.Device, torch: Any) -> None:
    n = 1 << 20
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    tensor = torch.full((n,), 3.0, device="cuda")
    where = tensor.data_ptr()
    ref = await device.wrap(tensor)
    out = await device.zeros(n)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW)  # our op waits for it
    work = asyncio.ensure_future(device.elementwise.unary("neg", ref, out=out))
    await until(lambda: device.info().in_flight == 1, "the op is enqueued")
    del tensor, ref
    gc.collect()
    device.info()
    assert not work.done()
    other = torch.full((n,), 5.0, device="cuda")
    assert other.data_ptr() != where, "torch reused memory that an op of ours has yet to read"
    assert torch.cuda.memory_allocated() == before + 2 * 4 * n
    await work
    await until(lambda: torch.cuda.memory_allocated() == before + 4 * n, "torch has its memory back")
    assert np.array_equal(await device.get(out), np.full(n, -3.0, np.float32))


async def test_a_capture_that_is_in_the_way_fails_the_op_alone(device: accel.Device, torch: Any) -> None:
    shared, plain, out = await device.full(8, 2.0), await device.full(8, 3.0), await device.zeros(8)
    tensor = torch.from_dlpack(shared)
    still = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        still.add_(1)
        await device.elementwise.unary("neg", plain, out=out)  # is in nobody's way
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        still.add_(1)
        with pytest.raises(accel.DriverError, match="CAPTURE") as caught:
            await device.elementwise.unary("neg", shared, out=out)
        assert "captures" in (caught.value.remedy or "")
    assert device.state is accel.DeviceState.READY
    assert np.array_equal(await device.get(out), np.full(8, -3.0, np.float32))
    await device.elementwise.unary("neg", shared, out=out)
    assert np.array_equal(await device.get(out), np.full(8, -2.0, np.float32))
    assert float(tensor.sum()) == 16.0


async def test_stale_refs_are_not_shared(device: accel.Device, torch: Any) -> None:
    ref = await device.zeros(3)
    await device.free(ref)
    with pytest.raises(accel.StaleRefError):
        torch.from_dlpack(ref)
    with pytest.raises(accel.StaleRefError):
        _ = ref.__cuda_array_interface__
    other = await device.zeros(3)
    for stream in (0, -2, "1", True):
        with pytest.raises(BufferError):
            other.__dlpack__(stream=stream)  # type: ignore[arg-type]
    with pytest.raises(BufferError, match="copy"):
        other.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="device"):
        other.__dlpack__(dl_device=(1, 0))


async def test_streams_speak_the_protocol(device: accel.Device, torch: Any) -> None:
    stream = device._host.context.lanes.all[0].stream
    version, handle = stream.__cuda_stream__()
    assert (version, handle) == (0, stream.handle)
    with torch.cuda.stream(torch.cuda.ExternalStream(handle)), contextlib.suppress(NotImplementedError):
        assert float(torch.ones(3, device="cuda").sum()) == 3.0


def test_the_example_runs(torch: Any) -> None:
    done = subprocess.run([sys.executable, "examples/cuda_torch.py"], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("256 inputs, 256 classes as torch has them, on cuda:0"), done.stdout
