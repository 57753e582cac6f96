"""P24: weights are swapped over the replicas of a service under load: requests that failed, answers of two versions, and of wrong weights.

``python benchmarks/rollouts.py [--devices cpu,cpu] [--host process] [--clients 256] [--swaps 20] [--hold 0] [--json FILE]``; needs torch. With
``--devices cuda:0,cuda:1`` on two GPUs. First nothing is swapped, for as long as the swaps take then; at the end weights come that are wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import numpy as np

import accel

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.patterns import ModelService

WIDTH = 256
WRONG = -1.0


def build() -> Any:
    """Return two layers whose answers begin with one weight and end with another: both are the number of the version."""
    import torch
    from torch import nn

    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = [nn.Parameter(torch.zeros(())) for _ in range(2)]
            self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Any) -> Any:
            hidden = self.layers(x)
            return torch.cat([self.first.expand(len(x), 1), hidden, self.last.expand(len(x), 1)], 1)

    torch.manual_seed(0)
    return Numbered()


def numbered(number: float, **others: Any) -> dict[str, Any]:
    """Return weights of a version."""
    import torch

    state = {name: tensor.detach().clone() for name, tensor in build().state_dict().items()}
    return state | {"first": torch.tensor(number), "last": torch.tensor(number)} | others


def wrong() -> dict[str, dict[str, Any]]:
    """Return weights that canaries have to find."""
    import torch

    return {
        "non-finite": numbered(WRONG, first=torch.tensor(float("nan"))),
        "other numbers": numbered(WRONG),
        "other shapes": numbered(WRONG) | {"layers.2.weight": torch.zeros(WIDTH + 1, WIDTH), "layers.2.bias": torch.zeros(WIDTH + 1)},
    }


class Clients:
    """Ask a service, each for its next answer when it has one, and count what comes.

    Attributes
    ----------
    answers, failed, mixed, wrong : int
        Of all; errors; answers of two versions; answers that are not of a version that was swapped in.
    """

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self.answers = self.failed = self.mixed = self.wrong = 0
        self.is_over = False

    async def ask(self, seed: int) -> None:
        """Ask until it is over."""
        x = np.random.default_rng(seed).standard_normal(WIDTH, np.float32)
        while not self.is_over:
            try:
                answer = await self._service.submit(x, timeout=30.0)
            except accel.AccelError as error:
                self.failed += 1
                print(f"failed: {error!r}", file=sys.stderr)
                continue
            self.answers += 1
            self.mixed += bool(answer[0] != answer[-1])
            self.wrong += not (np.isfinite(answer).all() and answer[0] > 0)


async def measured(service: ModelService, clients: int, work: Callable[[], Any]) -> tuple[float, Clients]:
    """Return requests a second while ``work`` runs, and what the clients got."""
    asking = Clients(service)
    async with asyncio.TaskGroup() as group:
        for seed in range(clients):
            group.create_task(asking.ask(seed))
        began = time.perf_counter()
        await work()
        rate = asking.answers / (time.perf_counter() - began)
        asking.is_over = True
    return rate, asking


async def compare(devices: list[str], host: Any, clients: int, swaps: int, hold: float) -> dict[str, Any]:
    """Return what was counted, and requests a second without swaps and with."""
    canaries, version, took = [np.ones(WIDTH, np.float32)], 1, list[float]()
    refused = dict[str, str]()
    async with accel.System() as system:
        models = [
            await (await system.open_device(spec, host=host)).load_model(
                "benchmarks.rollouts:build",
                weights=numbered(1.0),
                inputs={"x": accel.TensorSpec(("batch", WIDTH), "float32")},
                buckets={"batch": (1, 16, 64)},
            )
            for spec in devices
        ]
        async with accel.serve(models) as service:

            async def swap() -> None:
                nonlocal version
                for _ in range(swaps):
                    began = time.perf_counter()
                    done = await service.swap(
                        numbered(version + 1.0), canaries=canaries, compare=lambda old, new: new[0] == old[0] + 1, hold=hold
                    )
                    took.append(time.perf_counter() - began)
                    version += 1
                    assert (done.version, done.left_out) == (version, ())

            async def swap_wrong() -> None:
                for name, weights in wrong().items():
                    try:
                        await service.swap(weights, canaries=canaries, compare=lambda old, new: new[0] > old[0])
                    except accel.AccelError as error:
                        refused[name] = type(error).__name__

            await measured(service, clients, lambda: asyncio.sleep(1.0))
            during, swapped = await measured(service, clients, swap)
            without, quiet = await measured(service, clients, lambda: asyncio.sleep(sum(took)))
            _, spared = await measured(service, clients, swap_wrong)
            versions = {model.version for model in service.models}
    assert versions == {version}, versions
    assert len(refused) == len(wrong()), refused
    return {
        "devices": devices,
        "host": host,
        "clients": clients,
        "swaps": len(took),
        "seconds_a_swap": round(float(np.median(took)), 4),
        "answers": swapped.answers,
        "failed": swapped.failed + spared.failed,
        "mixed": swapped.mixed + spared.mixed,
        "wrong_answers": swapped.wrong + spared.wrong,
        "refused": refused,
        "requests_per_s": round(without),
        "requests_per_s_during_swaps": round(during),
        "ratio": round(during / without, 3),
        "must": "failed, mixed and wrong_answers are 0",
        "ok": not (swapped.failed + spared.failed + swapped.mixed + spared.mixed + swapped.wrong + spared.wrong + quiet.failed),
    }


def main() -> None:
    """Measure, and print what was found; exit with 1 if a request failed or an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="cpu,cpu", help="one for each replica (default %(default)s)")
    parser.add_argument("--host", default="process", choices=("inline", "process"))
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument(
        "--hold", type=float, default=0.0, help="seconds for which the first replica's answers are held against the old ones"
    )
    parser.add_argument("--json", help="a file for the results")
    options = parser.parse_args()
    found = asyncio.run(compare(options.devices.split(","), options.host, options.clients, options.swaps, options.hold))
    print(json.dumps(found, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(found), encoding="utf-8")
    sys.exit(not found["ok"])


if __name__ == "__main__":
    main()
