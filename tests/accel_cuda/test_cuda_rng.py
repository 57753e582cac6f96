"""Random numbers on the GPU: the same as on the CPU, the laws of the stream, and statistics."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.ops import sobol_directions
from accel_cuda.core.libraries import load_library, load_module
from tests.rng_support import EXACT, IDS, KINDS, check_distribution, check_pieces, drawn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]


@contextlib.asynccontextmanager
async def opened(*specs: str) -> AsyncIterator[list[accel.Device]]:
    async with accel.System() as system:
        yield [await system.open_device(spec) for spec in specs]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
async def test_the_numbers_are_those_of_the_cpu(kind: str, options: dict[str, Any], rng: np.random.Generator) -> None:
    seed, count = int(rng.integers(2**64, dtype=np.uint64)), int(rng.integers(1_200_000))
    offset = int(rng.choice([0, int(rng.integers(1 << 22)), 2**41 + 77]))
    async with opened("cuda", "cpu") as devices:
        gpu, cpu = [await drawn(device, kind, count, seed=seed, offset=offset, **options) for device in devices]
    if kind in EXACT:
        np.testing.assert_array_equal(gpu, cpu)
    else:
        tolerance = 2e-6 if gpu.dtype == np.float32 else 1e-14
        if kind in ("lognormal", "gamma", "beta"):
            # A power of a fraction is as uncertain as its logarithm, times the exponent.
            np.testing.assert_allclose(gpu, cpu, rtol=(5 if kind == "lognormal" else 40) * tolerance)
        else:
            np.testing.assert_allclose(gpu, cpu, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
async def test_a_stream_is_the_same_in_any_pieces(kind: str, options: dict[str, Any], rng: np.random.Generator) -> None:
    async with opened("cuda") as (device,):
        await check_pieces(device, kind, options, rng)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
async def test_the_numbers_are_of_their_distribution(kind: str, options: dict[str, Any], rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**63))
    async with opened("cuda") as (device,):
        check_distribution(kind, options, await drawn(device, kind, 1_000_000, seed=seed, **options))


async def test_points_of_sobols_sequence_are_those_of_the_cpu(rng: np.random.Generator) -> None:
    directions = sobol_directions(int(rng.integers(1, 50)), scramble=True)
    n, offset = int(rng.integers(1, 50_000)), int(rng.integers(1 << 31))
    async with opened("cuda", "cpu") as devices:
        for dtype in ("float32", "float64"):
            gpu, cpu = [
                await device.get(await device.rng.sobol(await device.put(directions), n, dtype, offset=offset)) for device in devices
            ]
            np.testing.assert_array_equal(gpu, cpu)


async def test_permutations_and_choices_are_those_of_the_cpu(rng: np.random.Generator) -> None:
    seed, n = int(rng.integers(2**63)), int(rng.integers(100_000, 2_000_000))
    x, weights = rng.standard_normal((n, 3)), rng.integers(0, 9, n).astype(np.float32)
    found = []
    async with opened("cuda", "cpu") as devices:
        for device in devices:
            ref, p = await device.put(x), await device.put(weights)
            made = (
                await device.rng.permutation(n, seed=seed),
                await device.rng.permutation(ref, seed=seed, offset=5),
                await device.rng.choice(ref, (n // 2, 2), seed=seed),
                await device.rng.choice(n, n, p=p, seed=seed),
                await device.rng.choice(n, n // 4, replace=False, p=p, seed=seed),
            )
            found.append([await device.get(each) for each in made])
    for number, (gpu, cpu) in enumerate(zip(*found, strict=True)):
        assert np.mean(gpu != cpu) < (1e-5 if number == 4 else 1e-300), (seed, n, number)


async def test_weights_that_are_wrong_are_found_on_the_device_which_goes_on(rng: np.random.Generator) -> None:
    async with opened("cuda") as (device,):
        wrong: tuple[tuple[list[float], dict[str, Any]], ...] = (
            ([1.0, -1.0, 1.0], {}),
            ([0.0] * 3, {}),
            ([1.0, 0.0, np.nan], {"replace": False}),
            ([1.0, 0.0, 0.0], {"replace": False}),
        )
        for weights, options in wrong:
            with pytest.raises(accel.InvalidArgumentError):
                await device.rng.choice(3, 2, p=await device.put(np.array(weights)), **options)
        graph_p = await device.put(np.ones(100))
        async with device.graph() as graph:
            chosen = graph.rng.choice(100, 30, replace=False, p=graph_p, seed=5)
            order = graph.rng.permutation(100, seed=6)
        for _ in range(2):
            await graph.replay()
            assert len(set((await device.get(chosen)).tolist())) == 30
            assert sorted((await device.get(order)).tolist()) == list(range(100))


@pytest.mark.parametrize(("generator", "number"), [("curand_philox", 161), ("curand_mrg32k3a", 121)])
async def test_numbers_of_curands_generators_are_those_of_its_host_interface(generator: Any, number: int, rng: np.random.Generator) -> None:
    torch: Any = pytest.importorskip("torch")
    load_library("curand", "nvidia-curand")
    curand = load_module("nvmath.bindings.curand", "nvmath-python")
    seed, offset, n = int(rng.integers(2**63)), int(rng.integers(1000)) * 4, int(rng.integers(1, 50_000)) * 2
    calls: tuple[tuple[str, str, str, dict[str, float]], ...] = (
        ("uniform", "float32", "generate_uniform", {}),
        ("uniform", "float64", "generate_uniform_double", {}),
        ("normal", "float32", "generate_normal", {"mean": 1.0, "std": 2.0}),
        ("normal", "float64", "generate_normal_double", {"mean": 0.0, "std": 0.5}),
    )
    async with opened("cuda") as (device,):
        for kind, dtype, call, parameters in calls:
            handle = curand.create_generator(number)
            curand.set_stream(handle, torch.cuda.current_stream().cuda_stream)
            curand.set_pseudo_random_generator_seed(handle, seed)
            curand.set_generator_offset(handle, offset)
            expected = torch.zeros(n, dtype=getattr(torch, dtype), device="cuda")
            getattr(curand, call)(handle, expected.data_ptr(), n, *parameters.values())
            torch.cuda.synchronize()
            curand.destroy_generator(handle)
            for _ in range(2):
                got = await drawn(device, kind, n, dtype=dtype, seed=seed, offset=offset, generator=generator, **parameters)
                np.testing.assert_array_equal(got, expected.cpu().numpy(), err_msg=f"{kind} {dtype} {seed} {offset} {n}")
        with pytest.raises(accel.UnsupportedError):
            async with device.graph() as graph:
                graph.rng.uniform(10, generator=generator)
        assert (await drawn(device, "uniform", 10, seed=1)).max() < 1


async def test_nothing_is_written_beside_the_result(rng: np.random.Generator) -> None:
    async with opened("cuda") as (device,):
        for n in (0, 1, 3, 257, 4099):
            # One slab is cut for small buffers of one size class: neighbours would show what is written past an end.
            before, out, after = [await device.full(n or 1, -1.0) for _ in range(3)]
            if n:
                await device.rng.uniform(n, seed=1, offset=int(rng.integers(9)), out=out)
                assert (await device.get(out)).min() >= 0
            assert (await device.get(before)).max() == (await device.get(after)).max() == -1
