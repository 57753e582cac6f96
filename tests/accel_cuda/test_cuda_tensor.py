"""Sums of products on the GPU, by cuTENSOR and without it.

Results are numpy's in higher precision, in graphs too; plans are bounded, and memory comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import accel
from accel.ops.tensor import FAMILY
from accel.testing import conformance
from accel_cuda import CudaBackend
from accel_cuda.core.libraries import version_of
from accel_cuda.families import tensor
from accel_cuda.families.tensor import CUTENSOR, KEPT
from tests.ops.test_tensor import calls, compare

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.gpu

_DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


@pytest.fixture
def cutensor() -> None:
    """Skip what is about cuTENSOR where its wheel is not installed."""
    if version_of(CUTENSOR.wheel) is None:
        pytest.skip("cuTENSOR is not installed: pip install '.[tensor]'")


@pytest.fixture(params=["cutensor", "without"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let contractions be cuTENSOR's, or products of matrices as without its wheel."""
    if request.param == "cutensor":
        request.getfixturevalue("cutensor")
    else:
        monkeypatch.setattr(tensor, "version_of", lambda distribution: None)
    return str(request.param)


@contextlib.asynccontextmanager
async def opened(host: Any = "inline", **options: Any) -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cuda", host=host, **options)


def library_of(device: accel.Device) -> Any:
    """Return what the family has in the device's context."""
    host: Any = device._host
    return host.context.device.families.states["tensor"]


_LARGE: list[tuple[str, tuple[tuple[int, ...], ...]]] = [
    ("bqhd,bkhd->bhqk", ((2, 128, 8, 64), (2, 96, 8, 64))),
    ("ij,bjk->bik", ((300, 200), (5, 200, 70))),
    ("abcd,cdbe->ea", ((33, 8, 16, 20), (16, 20, 8, 45))),
    ("ij,jk,kl,lm->im", ((200, 10), (10, 300), (300, 20), (20, 100))),
    ("...ij,...jk->...ik", ((3, 1, 64, 65), (4, 65, 66))),
    ("bi,bi->b", ((4097, 33), (4097, 33))),
    ("ijk,k->ji", ((65, 66, 67), (67,))),
    ("iij->ji", ((129, 129, 33),)),
]


@pytest.mark.parametrize("check", conformance.checks("families", families=(FAMILY,)), ids=lambda check: check.name)
async def test_all_samples(check: conformance.Check, way: str) -> None:
    await check.run(conformance.Harness(CudaBackend()))


async def test_random_subscripts_of_views_are_those_of_numpy(way: str) -> None:
    async with opened() as device:
        loop = asyncio.get_running_loop()

        @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
        @given(call=calls(), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(_DTYPES))
        def check(call: tuple[str, list[tuple[int, ...]]], seed: int, dtype: str) -> None:
            asyncio.run_coroutine_threadsafe(compare(device, *call, seed, dtype), loop).result(60)

        await asyncio.to_thread(check)
        assert (library_of(device).library is not None) is (way == "cutensor")


@pytest.mark.parametrize("dtype", _DTYPES)
async def test_large_sums_are_those_of_numpy(dtype: str, way: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    kind = accel.DType.of(dtype)
    error = {2: 2.0**-7, 4: 1e-5, 8: 1e-12 if kind.is_floating else 1e-5, 16: 1e-12}[kind.itemsize]
    async with opened() as device:
        for subscripts, shapes in _LARGE:
            arrays: list[Any] = []
            for shape in shapes:
                values = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if kind.is_complex else 0)
                arrays.append((values / 4).astype(kind.numpy))
            wide = [each.astype(np.complex128 if kind.is_complex else np.float64) for each in arrays]
            expected = np.einsum(subscripts, *wide, optimize=True)
            refs = [await device.put(each) for each in arrays]
            out = await device.full(expected.shape, np.nan, dtype)
            await device.tensor.einsum(subscripts, *refs, out=out)
            found = (await device.get(out)).astype(expected.dtype)
            sizes = np.einsum(subscripts, *[np.abs(each) for each in wide], optimize=True)
            wrong = float((np.abs(found - expected) / np.maximum(sizes, sizes.max() / 100)).max())
            assert wrong < error, f"{subscripts} {dtype}: {wrong} (seed {seed})"


async def test_a_chain_is_recorded_and_replayed(way: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape) for shape in ((40, 30, 50), (50, 40, 20), (20, 70))]
    async with opened() as device:
        refs = [await device.put(each) for each in arrays]
        async with device.graph() as graph:
            made = graph.tensor.einsum("aij,jak,kl->lia", *refs)
        for _ in range(3):
            a = rng.standard_normal((40, 30, 50))
            await device.put(a, out=refs[0])
            await graph.replay()
            expected = np.einsum("aij,jak,kl->lia", a, *arrays[1:], optimize=True)
            np.testing.assert_allclose(await device.get(made), expected, rtol=0, atol=1e-9 * np.abs(expected).max(), err_msg=f"seed {seed}")
        await graph.aclose()


async def test_real_and_complex_operands_are_mixed(way: str, rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((33, 20, 17)), rng.standard_normal((20, 45)) + 1j * rng.standard_normal((20, 45))
    async with opened() as device:
        x, y = await device.put(a), await device.put(b)
        for subscripts, refs, operands in (
            ("ijk,jl->kil", (x, y), (a, b)),
            ("jl,ijk->lk", (y, x), (b, a)),
            ("ijk,jl->ijl", (x, y), (a, b)),
            ("ijk,jl->jlk", (x[:1], y), (a[:1], b)),
        ):
            found = await device.get(await device.tensor.einsum(subscripts, *refs))
            np.testing.assert_allclose(found, np.einsum(subscripts, *operands), rtol=0, atol=1e-10)


@pytest.mark.usefixtures("cutensor")
async def test_what_cutensor_works_in_is_the_device_s_and_is_given_back(rng: np.random.Generator) -> None:
    async with opened(libraries=("tensor",)) as device:
        library = library_of(device)
        assert library.library is not None, "it was loaded when the device was opened"
        x = await device.put(rng.standard_normal((2048, 64, 64)).astype(np.float32))
        worked_in = 0
        for subscripts in ("abc,cba->", "abc,dbc->da", "abc->b", "abc->cab", "abc,abd->dc"):
            operands = (x,) if "," not in subscripts else (x, x.transpose((2, 1, 0)) if "cba" in subscripts else x)
            before = device.info().memory.used
            made = await device.tensor.einsum(subscripts, *operands)
            worked_in = max((worked_in, *library.library.sizes.values()))
            await device.get(made)
            await device.free(made)
            assert device.info().memory.used == before
        assert worked_in > 0, "none of them works in memory: take other calls"


@pytest.mark.usefixtures("cutensor")
async def test_a_bounded_number_of_plans_is_kept_and_those_of_graphs_stay(rng: np.random.Generator) -> None:
    async with opened() as device:
        a = rng.standard_normal((3, 40))
        x = await device.put(a)
        async with device.graph() as graph:
            made = graph.tensor.einsum("ij->ji", x)
        y = await device.put(rng.standard_normal((2, KEPT + 40)))
        for n in range(2, KEPT + 40):
            await device.tensor.einsum("ij->ji", y[:, :n])
        assert len(library_of(device).library.cache) <= KEPT
        await graph.replay()
        np.testing.assert_array_equal(await device.get(made), a.T)
        await graph.aclose()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_options_are_honoured(way: str, dtype: str, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(shape).astype(accel.DType.of(dtype).numpy) for shape in ((64, 40, 16), (16, 40, 64)))
    expected = np.einsum("abk,kcd->dbca", a.astype(np.float64), b.astype(np.float64))
    wrong: dict[str, float] = {}
    every: dict[str, dict[str, Any]] = {"plain": {}, "tuned": {"autotune": True}, "again": {"autotune": True}, "tf32": {"allow_tf32": True}}
    async with opened() as device:
        x, y = await device.put(a), await device.put(b)
        for name, options in every.items():
            if name == "tf32" and dtype == "bfloat16":
                continue
            made = await device.tensor.einsum("abk,kcd->dbca", x, y, **options)
            wrong[name] = float(np.abs((await device.get(made)).astype(np.float64) - expected).max())
        if way == "cutensor":
            plans = library_of(device).library
            assert len(plans._tuned) == 1
        moved = await device.tensor.einsum("abk->kb", x, **every["tf32" if dtype == "float32" else "tuned"])
        np.testing.assert_allclose(await device.get(moved), a.astype(np.float64).sum(0).T, rtol=2e-2, atol=0.1)
    exact = 1e-4 if dtype == "float32" else 0.5
    assert max(wrong["plain"], wrong["tuned"], wrong["again"]) < exact, wrong
    assert dtype == "bfloat16" or exact < wrong["tf32"] < 0.5, wrong


@pytest.mark.usefixtures("cutensor")
async def test_a_child_has_it_too(rng: np.random.Generator) -> None:
    a = rng.standard_normal((5, 6, 7))
    async with opened(host="process") as device:
        x = await device.put(a)
        found = await device.get(await device.tensor.einsum("ijk,ljk->lij", x, x))
        np.testing.assert_allclose(found, np.einsum("ijk,ljk->lij", a, a), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("cutensor")
async def test_a_status_is_an_error_of_its_op_and_the_device_goes_on(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(libraries=("tensor",)) as device:
        x = await device.put(rng.standard_normal((3, 4)))
        types: Any = tensor._TYPES
        monkeypatch.setitem(types, accel.DType.FLOAT64, ("CUDA_R_64F", "COMPUTE_16F", accel.DType.FLOAT64))
        with pytest.raises(accel.AccelError) as caught:
            await device.tensor.einsum("ij->ji", x)
        monkeypatch.undo()
        assert caught.value.library == "cutensor"
        await device.tensor.einsum("ij->ji", x)
