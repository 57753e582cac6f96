"""A torch embedding behind accel, and the programs that send it a token out of range: ``python -m tests.accel_cuda.embedding NAME``.

torch asserts on the device, sees the fault in a check of its own, and raises it from the kernel method. torch is imported where the library is opened.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import accel
from accel.ops import Plan, Spec
from accel.patterns import DynamicBatcher

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

VOCABULARY, WIDTH, TOKENS, REQUESTS = 1000, 16, 32, 64
OUT_OF_RANGE = 10_000_000
ASSERT = 710
"""The driver's code of an assertion on the device."""
PATIENCE = 240.0
"""Seconds: the quarantine takes a child, which imports torch, for each half that is found to have the input."""


@dataclass(frozen=True, eq=False, slots=True)
class Embed(accel.KernelOp):
    """The mean of the rows of some tokens."""

    library: ClassVar[str] = "embedding"
    kind: ClassVar[str] = "embed"

    tokens: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((self.tokens,), (), (Spec((self.tokens.shape[0], WIDTH), accel.DType.FLOAT32),))


class Embedding(accel.KernelLibrary):
    """Row ``n`` of the weights is all ``n``."""

    name = "embedding"

    def open(self, stream: Any) -> None:
        """Put the weights there."""
        torch = self.torch = importlib.import_module("torch")
        with self.working_in(stream):
            rows = torch.arange(VOCABULARY, dtype=torch.float32, device=f"cuda:{self.description.index}")
            self.weights = rows.repeat(WIDTH, 1).T.contiguous()
            torch.cuda.current_stream().synchronize()

    def working_in(self, stream: Any) -> Any:
        """Return the block in which torch enqueues into a stream."""
        torch = self.torch
        return torch.cuda.stream(torch.cuda.ExternalStream(stream.handle, device=self.description.index))

    @accel.kernel(Embed)
    def embed(self, op: Embed, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        """Look the rows up, and have torch look for errors, as its checks do now and then."""
        torch = self.torch
        with self.working_in(stream), torch.inference_mode():
            rows = torch.nn.functional.embedding(torch.from_dlpack(inputs[0]), self.weights)
            torch.from_dlpack(outputs[0]).copy_(rows.mean(1))
            torch.cuda.current_stream().synchronize()


async def handler_on(device: accel.Device) -> Callable[[list[Any]], Awaitable[list[Any]]]:
    """Return the handler of a batch, for a device."""

    async def handle(batch: list[Any]) -> list[Any]:
        tokens = await device.put(np.stack(batch))
        return list(await device.get(await device.run(Embed(tokens))))

    return handle


def requests() -> list[Any]:
    """Return the tokens of all requests, one of which has a token out of range."""
    random = np.random.default_rng(7)
    made: list[Any] = [random.integers(0, VOCABULARY, TOKENS) for _ in range(REQUESTS)]
    made[REQUESTS // 3][3] = OUT_OF_RANGE
    return made


async def quarantine_names_the_one() -> None:
    """64 requests behind the batcher, on a process host."""
    async with accel.System() as system:
        device = await system.open_device("cuda", host="process")
        await device.register(Embedding)
        sent = requests()
        async with DynamicBatcher(
            await handler_on(device), max_items=REQUESTS, max_pending=2 * REQUESTS, idempotent=True, device=device, quarantine=handler_on
        ) as batcher:
            async with asyncio.timeout(PATIENCE):
                answers = await asyncio.gather(*(batcher.submit(each) for each in sent), return_exceptions=True)
        poisoned = [n for n, answer in enumerate(answers) if isinstance(answer, accel.PoisonedInputError)]
        assert poisoned == [REQUESTS // 3], [repr(answer) for answer in answers if isinstance(answer, BaseException)]
        for n, answer in enumerate(answers):
            if n not in poisoned:
                assert not isinstance(answer, BaseException), repr(answer)
                np.testing.assert_allclose(answer, np.full(WIDTH, sent[n].mean()), rtol=1e-5)
        assert device.state is accel.DeviceState.READY


async def inline_fault_is_the_fault() -> None:
    """The same op, inline: the error has the driver's code, and the device goes on in a child."""
    async with accel.System() as system:
        device = await system.open_device("cuda")
        await device.register(Embedding)
        bad = await device.put(np.full((1, TOKENS), OUT_OF_RANGE))
        answer = (await asyncio.gather(asyncio.wait_for(device.run(Embed(bad)), PATIENCE), return_exceptions=True))[0]
        assert isinstance(answer, accel.ContextPoisonedError), repr(answer)
        assert answer.code == ASSERT, repr(answer.code)
        assert bad.is_stale
        async with asyncio.timeout(PATIENCE):
            good = await device.put(np.full((1, TOKENS), 3))
            np.testing.assert_allclose(await device.get(await device.run(Embed(good))), np.full((1, WIDTH), 3.0))
        assert (device.state, device.generation) == (accel.DeviceState.READY, 2)


PROGRAMS: dict[str, Callable[[], Awaitable[None]]] = {
    "quarantine": quarantine_names_the_one,
    "inline": inline_fault_is_the_fault,
}


async def _run(name: str) -> None:
    await PROGRAMS[name]()


if __name__ == "__main__":
    faulthandler.enable()
    # By its name as a module: children import what these classes are of.
    from tests.accel_cuda import embedding

    asyncio.run(embedding._run(sys.argv[1]))
