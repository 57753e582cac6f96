"""Kernels of the user's own on the GPU: compiled by NVRTC, kept on disk, launched like any op."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import ops
from accel_cuda.core.compiler import architecture, compile_source
from accel_cuda.core.driver import load_driver
from tests.accel_cuda.compute_support import longest_gap, opened
from tests.accel_cuda.cuda_programs import ROOT, failure

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

AXPY = """
template <class T> __global__ void axpy(T *y, const T *x, long long n, T a) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
"""
SLOW = """
extern "C" __global__ void slow_copy(float *out, const float *x, int n, long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles);
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i];
}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "accel" / "programs"


def entries(folder: Path) -> set[str]:
    return {str(path) for path in (folder / "entries").rglob("*") if path.is_file()}


@pytest.mark.parametrize(("name", "dtype"), [("axpy<float>", "float32"), ("axpy<double>", "float64"), ("axpy<int>", "int32")])
async def test_a_template_computes_what_numpy_does(device: accel.Device, name: str, dtype: str, rng: np.random.Generator) -> None:
    n = int(rng.integers(1, 100_000))
    x, y = (np.asarray(rng.integers(-100, 100, n), dtype) for _ in range(2))
    kernel = await device.compiler.compile(AXPY, name, parameters=(f"{dtype}*", f"const {dtype}*", "int64", dtype))
    ry, rx = await device.put(y), await device.put(x)
    result = await kernel.launch(-(-n // 256), 256, (ry, rx, n, 3))
    assert result is ry, "the written ref is the result"
    assert np.array_equal(await device.get(ry), y + 3 * x)
    assert np.array_equal(await device.get(rx), x)
    again = await device.compiler.launch(kernel, (-(-n // 64),), (64, 1, 1), (ry, rx, np.int64(n), -3))
    assert np.array_equal(await device.get(again), y)


async def test_untyped_arguments_must_have_the_parameters_sizes(device: accel.Device, rng: np.random.Generator) -> None:
    x, y = (rng.standard_normal(1000).astype(np.float32) for _ in range(2))
    kernel = await device.compiler.compile(AXPY, "axpy<float>")
    assert kernel.program.layout is not None
    assert kernel.program.layout.sizes == (8, 8, 8, 4)
    rx, ry = await device.put(x), await device.put(y)
    wrote = await kernel.launch(4, 256, (ry, rx, 1000, np.float32(0.5)))
    assert wrote == (ry, rx), "without types, every ref counts as written"
    np.testing.assert_allclose(await device.get(ry), y + 0.5 * x, rtol=1e-6)
    for args, words in {
        (ry, rx, 1000, 0.5): "np.float32",
        (ry, rx, 1000): "takes 4 argument",
        (ry, 8, 1000, np.float32(1), 1): "takes 4",
        (ry, rx, np.int32(1000), np.float32(1)): "np.int64",
        (ry, rx, 1000, rx): "is a ref",
    }.items():
        error = await failure(kernel.launch(4, 256, args), accel.InvalidArgumentError)
        assert words in str(error), str(error)


async def test_arguments_and_shapes_that_do_not_fit_are_refused_before_the_driver_sees_them(device: accel.Device) -> None:
    types = ("float32*", "const float32*", "int64", "float32")
    kernel = await device.compiler.compile(AXPY, "axpy<float>", parameters=types)
    x, y, wide = await device.zeros(16), await device.zeros(16), await device.zeros(16, "float64")
    good = (y, x, 16, 1.0)
    for grid, block, args, shared in (
        (1, 1025, good, 0),
        (1, (32, 32, 2), good, 0),
        (1, (1, 1, 65), good, 0),
        ((1, 65536), 1, good, 0),
        (0, 1, good, 0),
        (1, 0, good, 0),
        ((1, 1, 1, 1), 1, good, 0),
        (1, 1, good, 1 << 20),
        (1, 1, good, -1),
        (1, 1, (y, wide, 16, 1.0), 0),
        (1, 1, (y, x, 1 << 63, 1.0), 0),
        (1, 1, (y, x, 16.5, 1.0), 0),
        (1, 1, (y, x, 16, 1e300), 0),
        (1, 1, (y, x, 16, None), 0),
        (1, 1, (0, x, 16, 1.0), 0),
    ):
        await failure(kernel.launch(grid, block, args, shared_bytes=shared), accel.InvalidArgumentError)
    await device.free(x)
    await failure(kernel.launch(1, 16, good), accel.StaleRefError)
    await failure(device.compiler.compile(AXPY, "axpy<float>", parameters=types[:3]), accel.InvalidArgumentError)
    await failure(device.compiler.compile(AXPY, "axpy<float>", parameters=(*types[:3], "float64")), accel.InvalidArgumentError)
    assert np.array_equal(await device.get(y), np.zeros(16, np.float32)), "something was launched"


async def test_what_does_not_compile_says_where_and_why(device: accel.Device) -> None:
    error = await failure(device.compiler.compile("__global__ void f(float *x) {\n  x[0] = nothing;\n}", "f"), accel.CompileError)
    assert "f.cu(2)" in error.log
    assert "nothing" in error.log
    assert "f.cu(2)" in error.message
    assert pickle.loads(pickle.dumps(error)).log == error.log
    error = await failure(device.compiler.compile(AXPY, "no_such_kernel"), accel.CompileError)
    assert "no_such_kernel" in error.message
    error = await failure(device.compiler.compile(AXPY, "axpy<float>", ("--no-such-option",)), accel.CompileError)
    assert "no-such-option" in error.log
    for option in ("-arch=sm_80", "--gpu-architecture=compute_90", "-rdc=true", "--pch", "-dlto", "--time=x.csv"):
        await failure(device.compiler.compile(AXPY, "axpy<float>", (option,)), accel.InvalidArgumentError)


async def test_headers_and_options_make_other_programs(device: accel.Device, cache: Path) -> None:
    source = '#include "value.h"\nextern "C" __global__ void give(int *out) { out[0] = VALUE + N; out[1] = __cplusplus ; }'
    seen = set()
    for value, n in ((1, 10), (2, 10), (2, 20)):
        headers = {"value.h": f"#define VALUE {value}"}
        kernel = await device.compiler.compile(source, "give", (f"-DN={n}", "-std=c++20"), headers=headers, parameters=("int32*",))
        out = await device.full(2, -1, "int32")
        got = await device.get(await kernel.launch(1, 1, (out,)))
        assert got[0] == value + n
        assert got[1] == 202002, "-std=c++20 was not honoured"
        seen.add(kernel.program.key)
        assert len(entries(cache)) >= 2 * len(seen)
    assert len(seen) == 3


async def test_dynamic_shared_memory_up_to_the_limit(device: accel.Device, rng: np.random.Generator) -> None:
    source = """extern "C" __global__ void reverse(int *x, int n) {
        extern __shared__ int turned[];
        for (int i = threadIdx.x; i < n; i += blockDim.x) turned[n - 1 - i] = x[i];
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = turned[i];
    }"""
    kernel = await device.compiler.compile(source, "reverse", parameters=("int32*", "int32"))
    assert kernel.program.layout is not None
    limit = kernel.program.layout.max_shared
    assert limit > 48 << 10, "the device's larger limit was not asked for"
    x = rng.integers(0, 1 << 30, limit // 4, np.int32)
    assert np.array_equal(await device.get(await kernel.launch(1, 1024, (await device.put(x), x.size), limit)), x[::-1])


async def test_a_batch_launches_in_order(device: accel.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((64, 64)).astype(np.float32)
    kernel = await device.compiler.compile(AXPY, "axpy<float>", parameters=("float32*", "const float32*", "int64", "float32"))
    rx = await device.put(x)
    async with device.batch() as batch:
        y = batch.zeros((64, 64))
        for _ in range(10):
            y = batch.compiler.launch(kernel, 16, 256, (y, rx, 4096, 0.5))
        z = batch.blas.gemm(y, rx)
    np.testing.assert_allclose(await device.get(y), 5 * x, rtol=1e-5)
    np.testing.assert_allclose(await device.get(z), 5.0 * x.astype(np.float64) @ x, rtol=1e-3, atol=1e-3)


async def test_a_graph_replays_launches(rng: np.random.Generator) -> None:
    x = rng.standard_normal(4096).astype(np.float32)
    types = ("float32*", "const float32*", "int64", "float32")
    async with opened() as device:
        program = (await device.compiler.compile(AXPY, "axpy<float>", parameters=types)).program
    async with opened() as device:  # nothing is loaded here yet: neither the kernel nor what elementwise needs
        rx = await device.put(x)
        async with device.graph() as graph:
            y = graph.compiler.launch(program, 16, 256, (graph.zeros(4096), rx, 4096, 0.5))
            z = graph.elementwise.unary("neg", y)
        for factor in (1, 3):
            await device.put(factor * x, out=rx)
            await graph.replay()
            np.testing.assert_allclose(await device.get(z), -0.5 * factor * x, rtol=1e-6)


@pytest.mark.parametrize("streams", [8, 1])
async def test_a_slow_kernel_is_waited_for_by_other_libraries(streams: int, rng: np.random.Generator) -> None:
    n = 256
    x = rng.standard_normal((n, n)).astype(np.float32)
    async with opened(streams=streams) as device:
        types = ("float32*", "const float32*", "int32", "int64")
        kernel = await device.compiler.compile(SLOW, "slow_copy", parameters=types)
        rx, out = await device.put(x), await device.full((n, n), np.nan)
        await device.blas.gemm(rx, rx)
        writing = asyncio.ensure_future(kernel.launch(n * n // 256, 256, (out, rx, n * n, 20_000_000)))
        reading = asyncio.ensure_future(device.blas.gemm(out, rx))
        overwriting = asyncio.ensure_future(device.put(np.zeros_like(x), out=rx))
        product = await reading
        assert writing.done(), "the product came before what it reads"
        await overwriting
        np.testing.assert_allclose(await device.get(product), x.astype(np.float64) @ x, rtol=1e-3, atol=1e-3)
        assert np.array_equal(await device.get(out), x)


async def test_a_kernel_from_elsewhere_is_loaded_at_its_first_launch(rng: np.random.Generator) -> None:
    x = rng.standard_normal(100).astype(np.float32)
    async with opened() as device:
        made = await device.compiler.compile(AXPY, "axpy<float>", parameters=("float32*", "const float32*", "int64", "float32"))
        token = pickle.dumps(made.program)
    async with opened() as device:
        kernel = pickle.loads(token)
        rx, ry = await device.put(x), await device.put(x)
        op = pickle.loads(pickle.dumps(ops.Launch(kernel, 1, 128, (ry, rx, 100, 1.0))))
        np.testing.assert_allclose(await device.get(await device.run(op)), 2 * x, rtol=1e-6)
        by_hand = ops.CompiledKernel(AXPY, "axpy<float>")
        await device.run(ops.Launch(by_hand, 1, 128, (ry, rx, 100, np.float32(1))))
        np.testing.assert_allclose(await device.get(ry), 3 * x, rtol=1e-6)
        await failure(device.run(ops.Launch(by_hand, 1, 128, (ry, rx, 100, 1.0))), accel.InvalidArgumentError)
        await failure(device.run(ops.Launch(by_hand, 1, 2048, (ry, rx, 100, np.float32(1)))), accel.InvalidArgumentError)


COMPILE = """
import sys, accel
from accel_cuda.core.compiler import Nvrtc
cubin = Nvrtc("sm_90", 13000).cubin(sys.stdin.read(), ("axpy<float>",))
print(len(cubin.code), cubin.symbols[0], cubin.is_cached)
"""


def compilers(count: int) -> list[str]:
    running = [subprocess.Popen([sys.executable, "-c", COMPILE], cwd=ROOT, stdin=-1, stdout=-1, stderr=-1, text=True) for _ in range(count)]
    answers = []
    for process in running:
        assert process.stdin is not None
        process.stdin.write(AXPY)
        process.stdin.close()
        process.stdin = None
    for process in running:
        out, error = process.communicate(timeout=50)
        assert process.returncode == 0, error
        answers.append(out.strip())
    return answers


def test_processes_that_compile_at_once_share_the_cache(cache: Path) -> None:
    made = compilers(4)
    assert len({answer.rpartition(" ")[0] for answer in made}) == 1, made
    assert len(entries(cache)) == 2
    assert compilers(1)[0].endswith("True"), "a later process compiled again"


async def test_a_spoilt_cache_and_none_at_all_cost_a_compilation(
    cache: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    x = rng.standard_normal(64).astype(np.float32)

    async def use() -> None:
        async with opened(libraries=("elementwise",)) as device:
            kernel = await device.compiler.compile(AXPY, "axpy<float>", parameters=("float32*", "const float32*", "int64", "float32"))
            rx, ry = await device.put(x), await device.put(x)
            np.testing.assert_allclose(await device.get(await kernel.launch(1, 64, (ry, rx, 64, 1.0))), 2 * x, rtol=1e-6)

    await use()
    for path in (cache / "entries").rglob("*"):
        if path.is_file() and path.read_bytes().startswith(b"\x7fELF"):
            path.write_bytes(b"not a cubin")
    await use()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no-such-folder")
    await use()


async def test_ops_run_while_their_programs_are_compiled(device: accel.Device, rng: np.random.Generator) -> None:
    """With a cold cache the loop goes on while the first op of a library waits for its kernels."""
    x = rng.standard_normal(1000).astype(np.float32)
    rx = await device.put(x)
    first, longest = await longest_gap(asyncio.gather(device.reduce("max", rx), device.elementwise.unary("neg", rx)))
    assert longest < 0.25, f"the loop stood still for {longest:.3f} s"
    assert (await device.get(first[0])).item() == x.max()
    assert np.array_equal(await device.get(first[1]), -x)


def test_the_example_runs() -> None:
    command = [sys.executable, "-X", "faulthandler", "examples/cuda_custom_kernel.py"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert "largest error" in done.stdout
    assert "broken.cu(1)" in done.stdout


PTX = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry shift(.param .u64 y, .param .s32 n, .param .f32 a)
{
    .reg .pred %p; .reg .b32 %r<5>; .reg .f32 %f<3>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [y];
    ld.param.s32 %r1, [n];
    ld.param.f32 %f1, [a];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r2, %r2, %r3, %r4;
    setp.ge.s32 %p, %r2, %r1;
    @%p bra DONE;
    cvta.to.global.u64 %rd1, %rd1;
    mul.wide.s32 %rd2, %r2, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.f32 %f2, [%rd3];
    add.f32 %f2, %f2, %f1;
    st.global.f32 [%rd3], %f2;
DONE:
    ret;
}
"""
SHIFT = (
    'extern "C" __global__ void shift(float *y, int n, float a) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] += a; }'
)
MEET = """
extern "C" __global__ void meet(unsigned *count, unsigned *out) {
    if (threadIdx.x == 0) { atomicAdd(count, 1); while (atomicAdd(count, 0) < gridDim.x); }
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = atomicAdd(count, 0);
}
"""


def cubin(arch: str | None = None) -> bytes:
    """Return ``shift`` for an architecture: that of the device, where none is given."""
    if arch is None:
        driver = load_driver()
        device = driver.call("cuDeviceGet", 0)
        arch = architecture(*[driver.device_attribute(device, f"COMPUTE_CAPABILITY_{each}") for each in ("MAJOR", "MINOR")])
    return compile_source(SHIFT, arch)


@pytest.mark.parametrize("host", ["inline", "process"])
@pytest.mark.parametrize("kind", ["ptx", "ptx bytes", "cubin"])
async def test_ptx_and_cubins_are_loaded_and_launched(kind: str, host: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal(1000).astype(np.float32)
    code: Any = cubin() if kind == "cubin" else PTX if kind == "ptx" else PTX.encode()
    async with opened(host=host) as device:
        kernel = await device.compiler.load(code, "shift", parameters=("float32*", "int32", "float32"))
        assert kernel.program.layout is not None
        assert kernel.program.layout.sizes == (8, 4, 4)
        ref = await device.put(x)
        assert await kernel.launch(4, 256, (ref, 1000, 1.5)) is ref
        async with device.graph() as graph:
            graph.compiler.launch(kernel, 4, 256, (ref, 1000, -1.0))
        await graph.replay()
        assert np.array_equal(await device.get(ref), (x + np.float32(1.5)) - np.float32(1.0))
        await graph.aclose()


async def test_code_that_cannot_be_loaded_is_refused_with_what_the_driver_says(device: accel.Device) -> None:
    wrong = await failure(device.compiler.load(PTX.replace("add.f32", "odd.f32"), "shift"), accel.CompileError)
    assert "odd" in wrong.log, wrong
    assert wrong.op == "load"
    await failure(device.compiler.load(PTX.replace(".version 7.0", ".version 99.0"), "shift"), accel.CompileError)
    await failure(device.compiler.load(compile_source(SHIFT, "sm_80"), "shift"), accel.CompileError)
    await failure(device.compiler.load(PTX.encode()[:20], "shift"), accel.CompileError)
    for code in (cubin()[:-100], b"\x7fELF", b"hello"):
        await failure(device.compiler.load(code, "shift"), accel.InvalidArgumentError)
    error = await failure(device.compiler.load(PTX, "nothing"), accel.InvalidArgumentError)
    assert "nothing is not a kernel" in str(error)
    await failure(device.compiler.load(PTX, "shift", parameters=("float32*", "int64", "float32")), accel.InvalidArgumentError)
    assert (await device.get(await device.zeros(3))).sum() == 0, "the device goes on"


async def test_blocks_of_a_cooperative_launch_meet_and_too_many_are_refused(device: accel.Device) -> None:
    kernel = await device.compiler.compile(MEET, "meet", parameters=("uint32*", "uint32*"))
    out = await device.zeros(1 << 16, "uint32")
    error = await failure(kernel.launch(1 << 16, 256, (await device.zeros(1, "uint32"), out), cooperative=True), accel.InvalidArgumentError)
    most = int(re.findall(r"(\d+) blocks of meet", str(error))[0])
    assert 0 < most < 1 << 16
    for shared in (0, 64 << 10):
        if shared:
            error = await failure(
                kernel.launch(1 << 16, 256, (await device.zeros(1, "uint32"), out), shared, cooperative=True),
                accel.InvalidArgumentError,
            )
            fewer = int(re.findall(r"(\d+) blocks of meet", str(error))[0])
            assert fewer < most
            most = fewer
        for _ in range(3):
            await kernel.launch(most, 256, (await device.zeros(1, "uint32"), out), shared, cooperative=True)
            assert (await device.get(out[:most])).tolist() == [most] * most
    await kernel.launch(3, 256, (await device.zeros(1, "uint32"), out))
    async with device.graph() as graph:
        graph.compiler.launch(kernel, most, 256, (graph.zeros(1, "uint32"), out), 64 << 10, cooperative=True)
    for _ in range(2):
        await device.put(np.zeros(1 << 16, np.uint32), out=out)
        await graph.replay()
        assert (await device.get(out[:most])).tolist() == [most] * most
    await graph.aclose()


async def test_an_address_is_lent_to_other_libraries() -> None:
    cupy: Any = pytest.importorskip("cupy")
    spin = cupy.RawKernel('extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n); }', "spin")
    async with opened() as device:
        ref = await device.full((4096,), 2.0)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:  # compiled before it is timed
            spin((1,), (1,), (1,))
            warm = cupy.zeros(8, "float32")
            warm += 1
        with ref[1024:].address(stream=stream.ptr) as pointer, stream:
            array = cupy.ndarray((3072,), "float32", cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, 4 * 3072, None), 0))
            spin((1,), (1,), (100_000_000,))
            array += 1
            with pytest.raises(accel.InvalidArgumentError):
                await device.free(ref)
        assert not stream.done, "the kernel was too fast to prove anything"
        found = await device.get(await device.elementwise.unary("neg", ref))
        assert np.array_equal(found, np.concatenate([np.full(1024, -2.0), np.full(3072, -3.0)]))
        await device.free(ref)
    async with opened(host="process") as device:
        ref = await device.zeros(4)
        with pytest.raises(accel.UnsupportedError), ref.address():
            pass
