"""Models of torch on the GPU: eager and by CUDA graphs, beside other work, swapped, and there again after a fault."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import accel
from accel.models.library import Forward
from accel.models.outputs import Follows
from tests.accel_cuda.model_builders import WIDTH, WORDS, classifier, encoder, normalizing, patches, version, waiting

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150), pytest.mark.filterwarnings("ignore")]

HOSTS = ("inline", "process")
IDS = {"ids": accel.TensorSpec(("batch", "length"), "int64", pad=0)}
IMAGES = {"image": accel.TensorSpec(("batch", 3, 16, 16), "float32")}
ROWS = {"x": accel.TensorSpec(("batch", WIDTH), "float32")}
BUCKETS = {"batch": (1, 4, 16), "length": (8, 32)}


def state(build: Callable[[], torch.nn.Module], rng: np.random.Generator) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a module in double precision on the host, and its weights with what no state dict has."""
    torch.manual_seed(int(rng.integers(1 << 31)))
    module = build().eval()
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    weights |= {f"leftover:{name}": tensor.clone() for name, tensor in module.named_buffers() if name not in weights}
    return module.double(), weights


def answers(module: torch.nn.Module, *inputs: np.ndarray[Any, Any]) -> Any:
    with torch.inference_mode():
        found = module(*[torch.from_numpy(each) for each in inputs])
    return {name: each.numpy() for name, each in found.items()} if isinstance(found, dict) else found.numpy()


def sentences(rng: np.random.Generator, rows: int, length: int) -> np.ndarray[Any, Any]:
    return rng.integers(1, WORDS, (rows, length))


def check_vectors(found: Any, module: torch.nn.Module, ids: np.ndarray[Any, Any]) -> None:
    expected = answers(module, ids)
    np.testing.assert_allclose(found["vector"], expected["vector"], rtol=2e-3, atol=2e-4)
    np.testing.assert_array_equal(found["words"], expected["words"])


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("host", HOSTS)
async def test_answers_are_those_of_the_module_in_every_bucket(host: Any, graphs: Any, rng: np.random.Generator) -> None:
    module, weights = state(classifier, rng)
    async with accel.System() as system:
        device = await system.open_device("cuda", host=host)
        model = await device.load_model(classifier, weights=weights, inputs=IMAGES, buckets={"batch": (1, 4, 16)}, graphs=graphs)
        assert model.outputs.is_captured is (graphs == "auto")
        for rows in (1, 3, 16, 37, 4):
            images = rng.standard_normal((rows, 3, 16, 16), np.float32)
            found = await model.numpy(images)
            np.testing.assert_allclose(
                found, answers(module, images.astype(float)), rtol=5e-3, atol=5e-3
            )  # cuDNN uses TF32, as torch has it


@pytest.mark.parametrize("host", HOSTS)
async def test_lengths_are_padded_and_clients_are_batched(host: Any, rng: np.random.Generator) -> None:
    module, weights = state(encoder, rng)
    async with accel.System() as system:
        device = await system.open_device("cuda", host=host)
        model = await device.load_model(encoder, weights=weights, inputs=IDS, buckets=BUCKETS)
        assert model.outputs.is_captured
        given = [sentences(rng, 1, int(length))[0] for length in rng.choice((8, 32), 64)]
        async with accel.serve(model) as service:
            for each, found in zip(given, await asyncio.gather(*map(service.submit, given)), strict=True):
                expected = answers(module, each[None])
                assert found["words"] == expected["words"][0]
        for length in (8, 32):
            ids = sentences(rng, 7, length)
            check_vectors(await model.numpy(ids), module, ids)


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("host", HOSTS)
async def test_each_request_gets_its_own_part_of_any_output(host: Any, graphs: Any, rng: np.random.Generator) -> None:
    """With the batch in the middle, several places for a row, another length, and a table; what no row has alone is refused."""
    module, weights = state(patches, rng)
    steps = {"steps": accel.TensorSpec(("batch", "length", 8), "float32")}
    async with accel.System() as system:
        device = await system.open_device("cuda", host=host)
        model = await device.load_model(patches, weights=weights, inputs=steps, buckets={"batch": (1, 4), "length": (6, 12)}, graphs=graphs)
        halves = ("batch", Follows("length", 1, 1, 2), 16)
        assert model.outputs.shapes == ((2, "batch", 16), (Follows("batch", 3), 4), halves, (2, 3))
        items = [rng.standard_normal((n, 8), np.float32) for n in (12, 6, 12, 12, 6)]
        async with accel.serve(model, max_delay=0.05) as service, asyncio.timeout(60):
            found = await asyncio.gather(*map(service.submit, items))
        for item, answer in zip(items, found, strict=True):
            expected = answers(module, item[None].astype(float))
            np.testing.assert_allclose(answer["halves"], expected["halves"][0], rtol=5e-3, atol=5e-3)
            np.testing.assert_array_equal(answer["table"], expected["table"])
            if len(item) == 12:  # the state after a padded sequence is that of the padding
                np.testing.assert_allclose(answer["state"], expected["state"][:, 0], rtol=5e-3, atol=5e-3)
                np.testing.assert_allclose(answer["patches"], expected["patches"], rtol=5e-3, atol=5e-3)
        with pytest.raises(accel.InvalidArgumentError, match="'0'"):
            await device.load_model(normalizing, inputs=ROWS, buckets={"batch": (4,)}, graphs=graphs)


async def test_replays_in_two_streams_do_not_overwrite_each_other(rng: np.random.Generator) -> None:
    """A batch has another stream than calls, and graphs of one pool share memory."""
    module, weights = state(encoder, rng)
    async with accel.System() as system:
        device = await system.open_device("cuda", host="inline")
        model = await device.load_model(encoder, weights=weights, inputs=IDS, buckets={"batch": (4, 16), "length": (32,)})
        serving: Any = model._versions.serving

        async def called(ids: np.ndarray[Any, Any]) -> Any:
            return await model.numpy(ids)

        async def batched(ids: np.ndarray[Any, Any]) -> Any:
            ref = await device.put(ids)
            async with device.batch() as batch:
                specs = serving.outputs.specs({"batch": len(ids), "length": 32})
                refs = batch.run(Forward(serving.runner._library, (ref,), specs, serving.outputs.names))
            return dict(zip(serving.outputs.names, [await device.get(each) for each in refs], strict=True))

        given = [sentences(rng, int(rows), 32) for rows in rng.choice((4, 16), 60)]
        found = await asyncio.gather(*[(called, batched)[index % 2](each) for index, each in enumerate(given)])
        for each, ids in zip(found, given, strict=True):
            check_vectors(each, module, ids)


@pytest.mark.parametrize("host", HOSTS)
async def test_what_cannot_be_captured_runs_eagerly_and_the_log_says_why(
    host: Any, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    module, weights = state(waiting, rng)
    other, other_weights = state(classifier, rng)
    async with accel.System() as system:
        device = await system.open_device("cuda", host=host)
        model = await device.load_model(waiting, weights=weights, inputs=ROWS, buckets={"batch": (1, 8)})
        assert caplog.text.count("model_not_captured") == 1
        assert not model.outputs.is_captured
        for _ in range(5):
            x = rng.standard_normal((8, WIDTH), np.float32)
            np.testing.assert_allclose(await model.numpy(x), answers(module, x.astype(float)), rtol=2e-3, atol=2e-4)
        captured = await device.load_model(classifier, weights=other_weights, inputs=IMAGES, buckets={"batch": (4,)})
        assert captured.outputs.is_captured, "a capture that failed leaves nothing behind"
        images = rng.standard_normal((3, 3, 16, 16), np.float32)
        np.testing.assert_allclose(await captured.numpy(images), answers(other, images.astype(float)), rtol=5e-3, atol=5e-3)


async def test_a_failed_capture_leaves_torch_s_allocator_as_it_was(rng: np.random.Generator) -> None:
    _, weights = state(waiting, rng)
    async with accel.System() as system:
        device = await system.open_device("cuda", host="inline")
        await device.load_model(waiting, weights=weights, inputs=ROWS, buckets={"batch": (8,)})

        def cross_stream() -> bool:
            """Whether memory that another stream has used is given out again, which an allocator does not do during a capture."""
            side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            before = set()
            for _ in range(20):
                tensor = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
                before.add(tensor.data_ptr())
                tensor.record_stream(side)
                side.synchronize()
                del tensor
            return len(before) < 20

        assert await asyncio.to_thread(cross_stream)


async def test_graphs_are_captured_beside_work_of_the_same_process(rng: np.random.Generator) -> None:
    """Torch in its default stream on another thread, ops of the device, and a model that serves while its weights are swapped."""
    _, weights = state(version, rng)
    stop, failures, rounds = threading.Event(), list[BaseException](), 0

    def beside() -> None:
        nonlocal rounds
        try:
            x = torch.ones(256, 256, device="cuda")
            while not stop.is_set():
                y = torch.empty_like(x).copy_(x) @ x
                assert float(y[0, 0]) == 256.0
                rounds += 1
        except BaseException as error:
            failures.append(error)

    async with accel.System() as system:
        device = await system.open_device("cuda", host="inline")
        model = await device.load_model(version, weights=weights, inputs=ROWS, buckets={"batch": (1, 8)})
        thread = threading.Thread(target=beside)
        thread.start()
        ended, seen = asyncio.Event(), set[float]()

        async def client() -> None:
            while not ended.is_set():
                row = await service.submit(rng.standard_normal(WIDTH, np.float32))
                assert row[0] == row[1], "an answer of two versions"
                seen.add(float(row[0]))
                a = rng.standard_normal((64, 64), np.float32)
                np.testing.assert_allclose(
                    await device.get(await device.blas.gemm(*[await device.put(a)] * 2)), a @ a, rtol=1e-3, atol=1e-3
                )

        try:
            async with accel.serve(model) as service, asyncio.timeout(100), asyncio.TaskGroup() as group:
                for _ in range(16):
                    group.create_task(client())
                for number in range(1, 6):
                    await model.swap({**weights, "number": torch.tensor(float(number))})
                    assert model.outputs.is_captured
                    while float(number) not in seen:
                        await asyncio.sleep(0)
                ended.set()
        finally:
            stop.set()
            thread.join()
    assert not failures
    assert rounds > 0
    assert seen == {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}


@pytest.mark.parametrize("standby", ["none", "model"])
async def test_a_token_out_of_range_is_named_and_the_model_is_there_again(standby: Any, rng: np.random.Generator) -> None:
    module, weights = state(encoder, rng)
    async with accel.System() as system:
        device = await system.open_device("cuda", host="process", standby=standby)
        model = await device.load_model(encoder, weights=weights, inputs=IDS, buckets=BUCKETS)
        ids = sentences(rng, 12, 32)
        before = await model.numpy(ids)
        async with accel.serve(model) as service, asyncio.timeout(120):
            bad = ids[5].copy()
            bad[7] = WORDS * 1000
            found = await asyncio.gather(*map(service.submit, [*ids, bad]), return_exceptions=True)
            poison = found.pop()
            assert isinstance(poison, accel.PoisonedInputError), poison
            for row, each in enumerate(found):
                assert not isinstance(each, BaseException), each
                np.testing.assert_allclose(each["vector"], before["vector"][row], rtol=1e-3, atol=1e-4)
            again = (await asyncio.gather(service.submit(bad), return_exceptions=True))[0]
            assert isinstance(again, accel.PoisonedInputError)
            assert again.remembered
        after = await model.numpy(ids)
        assert device.generation >= 2
        np.testing.assert_array_equal(after["vector"], before["vector"])
        check_vectors(after, module, ids)
