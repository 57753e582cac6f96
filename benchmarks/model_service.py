"""P15: an encoder of MiniLM's shape as a service of 256 clients, numpy in and out: accel's hosts beside a batcher written by hand.

``python benchmarks/model_service.py [--backend cpu] [--clients 256] [--seconds 4] [--rounds 3] [--json FILE]``; needs torch. The subjects take turns, in one
process; a round that does not count comes first. On a GPU the hand-written batcher has a twin with a CUDA graph for each batch size, and accel runs with
graphs and without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import numpy as np

import accel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Submit = Callable[[np.ndarray[Any, Any]], Awaitable[Any]]

HIDDEN, LAYERS, HEADS, VOCABULARY, LENGTH = 384, 6, 12, 30522, 32
BATCHES = (1, 8, 16, 32, 64)
HAND, GRAPHS = "by hand, eager", "by hand, graphs"


def build() -> Any:
    """Return the encoder with random weights: token ids to vectors of length 1."""
    import torch
    from torch import nn

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
            self.places = nn.Embedding(LENGTH, HIDDEN)
            self.register_buffer("order", torch.arange(LENGTH), persistent=False)
            layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, 0.0, "gelu", batch_first=True)
            self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

        def forward(self, input_ids: Any) -> Any:
            hidden = self.layers(self.tokens(input_ids) + self.places(self.order))
            return nn.functional.normalize(hidden.mean(1).float(), dim=1)

    torch.manual_seed(0)
    return Encoder()


def build_half() -> Any:
    """Return the encoder in float16, for a GPU."""
    return build().half()


class ByHand:
    """What a careful user writes: a queue, and a task that hands batches to a thread.

    Parameters
    ----------
    run
        Takes a batch of ids in an array, and returns the vectors in one.
    """

    def __init__(self, run: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
        self._run = run
        self._queue: asyncio.Queue[tuple[np.ndarray[Any, Any], asyncio.Future[Any]]] = asyncio.Queue()

    async def serve(self) -> None:
        """Answer requests until cancelled."""
        while True:
            batch = [await self._queue.get()]
            while len(batch) < BATCHES[-1] and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            try:
                vectors = await asyncio.to_thread(self._run, np.stack([ids for ids, _ in batch]))
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), vector in zip(batch, vectors, strict=True):
                if not future.done():
                    future.set_result(vector)

    async def submit(self, ids: np.ndarray[Any, Any]) -> Any:
        """Return the vector of one request."""
        future = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((ids, future))
        return await future


def eager(module: Any, device: str) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Return a function that runs the module as it is."""
    import torch

    def run(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            found: np.ndarray[Any, Any] = module(torch.from_numpy(ids).to(device, non_blocking=True)).cpu().numpy()
            return found

    return run


def captured(module: Any, device: str) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Return a function that replays a CUDA graph of the smallest batch size with room."""
    import torch

    graphs = {}
    with torch.inference_mode():
        for size in BATCHES:
            ids = torch.zeros((size, LENGTH), dtype=torch.int64, device=device)
            module(ids)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                vectors = module(ids)
            graphs[size] = graph, ids, vectors

    def run(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        graph, taken, vectors = graphs[next(size for size in BATCHES if size >= len(ids))]
        with torch.inference_mode():
            taken[: len(ids)].copy_(torch.from_numpy(ids), non_blocking=True)
            graph.replay()
            found: np.ndarray[Any, Any] = vectors[: len(ids)].cpu().numpy()
            return found

    return run


@contextlib.asynccontextmanager
async def by_hand(run: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> AsyncIterator[Submit]:
    """Serve with the batcher written by hand."""
    batcher = ByHand(run)
    task = asyncio.create_task(batcher.serve())
    try:
        yield batcher.submit
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def by_accel(backend: str, host: Any, weights: dict[str, Any], graphs: Any, in_flight: int) -> AsyncIterator[Submit]:
    """Serve with accel."""
    builder = "build_half" if backend == "cuda" else "build"
    async with accel.System() as system:
        device = await system.open_device(backend, host=host)
        model = await device.load_model(
            f"benchmarks.model_service:{builder}",
            weights=weights,
            inputs={"input_ids": accel.TensorSpec(("batch", LENGTH), "int64")},
            buckets={"batch": BATCHES},
            graphs=graphs,
        )
        async with accel.serve(model, max_in_flight=in_flight) as service:
            yield service.submit


async def measured(submit: Submit, clients: int, seconds: float) -> dict[str, float]:
    """Return requests a second, latencies and the loop's lag in milliseconds, and the CPU of this process in cores."""
    loop = asyncio.get_running_loop()
    end, latencies, lags = loop.time() + seconds, list[float](), list[float]()

    async def client(number: int) -> None:
        rng = np.random.default_rng(number)
        while loop.time() < end:
            began = time.perf_counter()
            vector = await submit(rng.integers(0, VOCABULARY, LENGTH))
            latencies.append(time.perf_counter() - began)
            assert abs(float(np.linalg.norm(vector)) - 1) < 1e-2

    async def ticks() -> None:
        while loop.time() < end:
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            lags.append(time.perf_counter() - began - 0.005)

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(ticks(), *(client(number) for number in range(clients)))
    took = time.perf_counter() - began
    return {
        "requests_per_s": len(latencies) / took,
        "p50_ms": 1e3 * float(np.percentile(latencies, 50)),
        "p99_ms": 1e3 * float(np.percentile(latencies, 99)),
        "lag_p99_ms": 1e3 * float(np.percentile(lags, 99)),
        "cores": (time.process_time() - cpu) / took,
    }


async def compare(backend: str, clients: int, seconds: float, rounds: int, hosts: list[str], in_flight: int) -> dict[str, dict[str, float]]:
    """Return the medians of the rounds, by subject."""
    module = (build_half() if backend == "cuda" else build()).eval()
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module = module.to(backend)
    hands = {HAND: eager, **({GRAPHS: captured} if backend == "cuda" else {})}
    found: dict[str, list[dict[str, float]]] = {}
    async with contextlib.AsyncExitStack() as stack:
        subjects = {name: await stack.enter_async_context(by_hand(make(module, backend))) for name, make in hands.items()}
        for host in hosts:
            for graphs in ("off", "auto") if backend == "cuda" else ("off",):
                name = f"accel {host}, {'graphs' if graphs == 'auto' else 'eager'}"
                subjects[name] = await stack.enter_async_context(by_accel(backend, host, weights, graphs, in_flight))
        for number in range(rounds + 1):
            for name, submit in subjects.items():
                row = await measured(submit, clients, seconds if number else min(seconds, 1.0))
                if number:
                    found.setdefault(name, []).append(row)
                    print(f"{name:22}", *(f"{key} {value:9.2f}" for key, value in row.items()), flush=True)
    return {name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()}


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one block of a subject")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", default="inline,process,auto", help="of accel (default %(default)s)")
    parser.add_argument("--in-flight", type=int, default=2, help="accel's max_in_flight (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write the medians there")
    given = parser.parse_args()
    medians = asyncio.run(compare(given.backend, given.clients, given.seconds, given.rounds, given.hosts.split(","), given.in_flight))
    first = medians[HAND]["requests_per_s"]
    print()
    for name, row in medians.items():
        print(f"{name:22}", *(f"{key} {value:9.2f}" for key, value in row.items()), f"{row['requests_per_s'] / first:6.2f}x")
    if given.json is not None:
        given.json.write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
