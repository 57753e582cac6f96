"""A served model under load: some requests kill, hang or spoil it, its child is killed, its weights are swapped, and loads fail meanwhile."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import random
import signal
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from benchmarks.chaos_parts.bad_loads import BadLoads
from benchmarks.chaos_parts.clients import ask
from benchmarks.chaos_parts.oracle import WrongAnswerError
from benchmarks.chaos_parts.processes import send_signal
from benchmarks.chaos_parts.requests import check
from benchmarks.chaos_parts.suspects import KILLERS, died_of
from benchmarks.model_poison import ASSERT, HANG, ILLEGAL, NAN, RAISE, meet, poisonable
from benchmarks.model_service import LENGTH, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.chaos_parts.oracle import Ledger
    from benchmarks.chaos_parts.subject import Subject

__all__ = ["OUTPUTS", "CpuModel", "Modelled", "build", "expected", "is_possible", "weights"]

Array = np.ndarray[Any, Any]

_WIDTH, OUTPUTS = 4, 8
_BATCHES = (1, 8, 64)
_PAUSE = 0.02
_POISON_EVERY = 4.0
"""Seconds between two poisonous requests, on average."""
_SWAP_EVERY = 5.0
_KEPT = 8
"""Versions of the weights whose answers are still recognized; each takes half a megabyte."""
_REPEATED = 0.2
"""Part of the poisonous requests that was sent before, and is refused."""
_GUILTY = (signal.SIGSEGV, 700, 710)
"""What poison dies of: a signal on the CPU, the driver's code on a GPU. A child that died of something else was killed by the run."""


def weights(seed: int, version: int) -> dict[str, Array]:
    """Return the weights of a version, which is one of them."""
    rng = np.random.default_rng([seed, 1 << 22, version])
    table, mix = rng.standard_normal((VOCABULARY, _WIDTH), np.float32), rng.standard_normal((_WIDTH, OUTPUTS), np.float32)
    return {"encoder.table": table, "encoder.mix": mix, "encoder.version": np.full((1, 1), version, np.float32)}


def expected(given: Mapping[str, Array], ids: Array) -> Array:
    """Return the answer to one request, in double precision."""
    row: Array = given["encoder.table"][ids].astype(np.float64).mean(0) @ given["encoder.mix"]
    return row


class CpuModel:
    """The mean of some rows of a table, mixed, and the version of the weights; the first token of a request chooses what goes wrong."""

    def open(self, weights: Mapping[str, accel.Operand], *_: Any) -> None:
        """Look at the weights."""
        self._weights = {name: np.asarray(each) for name, each in weights.items()}

    def run(self, inputs: Mapping[str, accel.Operand]) -> Array:
        """Compute it."""
        ids = np.asarray(inputs["input_ids"])
        tokens = set(ids[:, 0].tolist())
        if ASSERT in tokens:
            ctypes.memset(16, 1, 1)
        meet(tokens, is_cpu=True)
        table, mix, version = self._weights.values()
        made: Array = np.concatenate([table[np.where(ids > ASSERT, 0, ids)].mean(1) @ mix, np.repeat(version, len(ids), 0)], 1)
        made[ids[:, 0] == NAN] = np.nan
        return made


def build() -> Any:
    """Return the same as a module of torch, for a GPU."""
    import torch
    from torch import nn

    class Mixed(nn.Module):
        table: torch.Tensor
        mix: torch.Tensor
        version: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            for name, each in weights(0, 0).items():
                self.register_parameter(name.removeprefix("encoder."), nn.Parameter(torch.from_numpy(each)))

        def forward(self, ids: Any) -> Any:
            rows = nn.functional.embedding(ids, self.table).mean(1) @ self.mix
            return torch.cat([rows, self.version.expand(len(rows), 1)], 1)

    return poisonable(Mixed(), reads=False)


def is_possible(device: str) -> bool:
    """Return whether there is what the model of a backend is made with."""
    return device == "cpu" or importlib.util.find_spec("torch") is not None


class Modelled:
    """The clients of one served model.

    Parameters
    ----------
    subject
        The device; its contexts are in children.
    ledger
        Where requests are entered.
    seed
        Of the run.
    faults
        Kinds of faults that the run sends to others.
    hangs
        Whether the device finds out what hangs, so that it may be sent.

    Attributes
    ----------
    batcher : ModelService
        What they ask; entered and closed by what made this.
    bad_loads : BadLoads
        What is loaded beside the model, and refused.
    """

    batcher: accel.ModelService
    bad_loads: BadLoads

    def __init__(self, subject: Subject, ledger: Ledger, seed: int, faults: tuple[str, ...], *, hangs: bool) -> None:
        self.subject = subject
        self._ledger = ledger
        self._seed = seed
        self._faults = faults
        self._on_gpu = subject.device.name.startswith("cuda")
        self._kinds = [ASSERT, NAN, *([ILLEGAL] if self._on_gpu else [RAISE]), *([HANG] if hangs else [])]
        self._versions: dict[int, Mapping[str, Array]] = {}
        self._poisonous_at = 0.0
        self._model: accel.Model

    async def load(self) -> None:
        """Load the model, and make what serves it."""
        target = build if self._on_gpu else CpuModel
        takes: dict[str, Any] = {"inputs": {"input_ids": accel.TensorSpec(("batch", LENGTH), "int64")}, "buckets": {"batch": _BATCHES}}
        self._model = await self.subject.device.load_model(target, weights=self._made(1), **takes)
        self.bad_loads = BadLoads(self.subject, self._ledger, self._seed, target, **takes)
        self.batcher = accel.serve(self._model, check_finite=True)

    def _made(self, version: int) -> Mapping[str, Array]:
        made = self._versions[version] = weights(self._seed, version)
        if len(self._versions) > _KEPT:
            del self._versions[min(self._versions)]
        return made

    async def forget(self) -> None:
        """Give back what the model has on the device."""
        await self._model.aclose()

    # -- the tasks

    async def run(self, number: int, stop: asyncio.Event) -> None:
        """Be one client, until told to stop."""
        draw, loop = random.Random(f"{self._seed} model {number}"), asyncio.get_running_loop()
        rng, sent = np.random.default_rng([self._seed, 1 << 23, number]), list[Array]()
        while not stop.is_set():
            ids = rng.integers(0, VOCABULARY, LENGTH)
            if loop.time() >= self._poisonous_at:
                self._poisonous_at = loop.time() + _POISON_EVERY * draw.uniform(0.5, 1.5)
                if sent and draw.random() < _REPEATED:
                    ids = draw.choice(sent)
                else:
                    ids[0] = draw.choice(self._kinds)
                    sent = [*sent, ids][-_KEPT:]
                self.subject.faulted()
                await ask(self._ledger, self._ledger.begin("poison", self.subject), self._poison(ids))
            else:
                await ask(self._ledger, self._ledger.begin("model", self.subject), self._clean(ids))
            await asyncio.sleep(_PAUSE * draw.random())

    async def change(self, stop: asyncio.Event) -> None:
        """Swap the weights, and kill the child that serves, now and then, until told to stop."""
        draw, version = random.Random(f"{self._seed} swaps"), 1
        rng = np.random.default_rng([self._seed, 1 << 24])
        while not await _is_set(stop, _SWAP_EVERY * draw.uniform(0.5, 1.5)):
            version += 1
            if draw.random() < 0.2 and (pid := self.subject.device.info().pid) is not None:
                self.subject.faulted()
                send_signal(pid, signal.SIGKILL)
            await ask(self._ledger, self._ledger.begin("swap", self.subject), self._swap(version, rng.integers(0, VOCABULARY, LENGTH)))

    async def _swap(self, version: int, canary: Array) -> None:
        """Serve another version; a fault meanwhile leaves the old one in service."""
        try:
            await self._model.swap(self._made(version), canaries=[canary])
        except BaseException:
            del self._versions[version]  # it never served; the one that does must stay known
            raise
        await self._model.release()

    async def _clean(self, ids: Array) -> None:
        """Send a request that is not poison, whatever its neighbours are."""
        try:
            answer = await self.batcher.submit(ids)
        except accel.PoisonedInputError as error:
            if died_of(error) in _GUILTY or not self._is_hunted:
                raise WrongAnswerError(f"a clean request was taken for poison: {error}") from error
            return  # the children in which it was tried alone were killed from outside
        except accel.ContextPoisonedError as error:
            if not self._is_hunted:
                raise WrongAnswerError(f"a clean request failed with what its neighbour did: {error}") from error
            raise
        version = int(answer[OUTPUTS])
        if version not in self._versions:
            raise WrongAnswerError(f"the answer is of version {answer[OUTPUTS]}; there are {sorted(self._versions)}")
        check(answer[:OUTPUTS], expected(self._versions[version], ids), f"version {version}")

    async def _poison(self, ids: Array) -> None:
        """Send poison: the error must be the one of its kind."""
        kind = int(ids[0])
        try:
            answer = await self.batcher.submit(ids)
        except accel.PoisonedInputError as error:
            wanted = {ASSERT: "fault", ILLEGAL: "fault", HANG: "hang"}.get(kind)
            if error.kind != wanted and not self._is_hunted:
                raise WrongAnswerError(f"poison {kind - ASSERT} is called {error.kind}: {error}") from error
        except (accel.NonFiniteError, accel.LibraryError) as error:
            if type(error) is not {NAN: accel.NonFiniteError, RAISE: accel.LibraryError}.get(kind):
                raise WrongAnswerError(f"poison {kind - ASSERT} gave {error!r}") from error
        else:
            raise WrongAnswerError(f"poison {kind - ASSERT} gave {answer}")

    @property
    def _is_hunted(self) -> bool:
        """Whether the run kills children of which nothing is known yet, those in quarantine among them."""
        return bool(KILLERS & set(self._faults))


async def _is_set(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event for some seconds, and return whether it came."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
