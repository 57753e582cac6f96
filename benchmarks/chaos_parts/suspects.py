"""A device whose batcher looks for poison: among the items of its clients is one now and then whose kernel dies, and only its sender may be told."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import accel
from accel.ops import Plan, Spec
from accel.patterns import DynamicBatcher
from benchmarks.chaos_parts.clients import ask
from benchmarks.chaos_parts.oracle import WrongAnswerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.chaos_parts.oracle import Ledger
    from benchmarks.chaos_parts.subject import Subject

    Handler = Callable[[list[float]], Awaitable[list[float]]]

__all__ = ["KILLERS", "POISON", "CpuFragile", "CudaFragile", "Double", "Suspects", "died_of"]

POISON = -1.0
_FACTOR = 3.0
_ITEMS = 8
_PAUSE = 0.02
_EVERY = 4.0
"""Seconds between two poisonous items, on average: a search takes some contexts."""
_GUILTY = (11, 700)
"""What poison dies of: a signal on the CPU, the driver's code on a GPU. A child that died of something else was killed by the run."""
KILLERS = frozenset({"spare", "rebuild"})
"""Kinds of faults that hit children that serve no device yet, those in quarantine among them."""

_SOURCE = """
extern "C" __global__ void fragile(double *out, const double *x, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2.0 * (x[i] == -1.0 ? x[1ll << 45] : x[i]);
}
"""


@dataclass(frozen=True, eq=False, slots=True)
class Double(accel.KernelOp):
    """``2 * x``, if nothing in it is poison."""

    library: ClassVar[str] = "fragile"
    kind: ClassVar[str] = "double"

    x: accel.AccelRef

    def plan(self) -> Plan:
        """See :meth:`accel.KernelOp.plan`."""
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class CpuFragile(accel.KernelLibrary):
    """Writes where no memory is if an element is poison."""

    name = "fragile"

    @accel.kernel(Double)
    def double(self, op: Double, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        """Do it in the stream."""
        source, target = np.asarray(inputs[0]), np.asarray(outputs[0])

        def work() -> None:
            if (source == POISON).any():
                ctypes.memset(16, 1, 1)
            np.multiply(source, 2.0, out=target)

        stream.submit(work, 1e-6)


class CudaFragile(accel.KernelLibrary):
    """Reads where no memory is if an element is poison."""

    name = "fragile"

    def open(self, stream: Any) -> None:
        """Compile the kernel."""
        self._core: Any = importlib.import_module("cuda.core")
        device = self._device()
        program = self._core.Program(_SOURCE, "c++", self._core.ProgramOptions(arch=f"sm_{device.arch}"))
        self._kernel = program.compile("cubin").get_kernel("fragile")

    def _device(self) -> Any:
        device = self._core.Device(self.description.index)
        device.set_current()
        return device

    @accel.kernel(Double)
    def double(self, op: Double, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        """Launch it."""
        self._device()
        x, out = inputs[0], outputs[0]
        config = self._core.LaunchConfig(grid=-(-x.size // 256), block=256)
        self._core.launch(self._core.Stream.from_handle(stream.handle), config, self._kernel, out.address, x.address, np.int64(x.size))


class Suspects:
    """The clients of one such device.

    Parameters
    ----------
    subject
        The device, with a library that has :class:`Double`; its contexts are in children.
    ledger
        Where requests are entered.
    seed
        Of the run.
    faults
        Kinds of faults that the run sends to others.

    Attributes
    ----------
    batcher : DynamicBatcher
        What they ask; entered and closed by what made this.
    """

    def __init__(self, subject: Subject, ledger: Ledger, seed: int, faults: tuple[str, ...]) -> None:
        self.subject = subject
        self._ledger = ledger
        self._seed = seed
        self._is_hunted = bool(KILLERS & set(faults))
        self._poisonous_at = 0.0
        self.batcher: DynamicBatcher[float, float] = DynamicBatcher(
            _handler_on(subject.device),
            max_items=_ITEMS,
            idempotent=True,
            device=subject.device,
            quarantine=_in_quarantine,
            remember_poison=0,  # the same poison comes again and again, and each time it is to be found
        )

    async def forget(self) -> None:
        """Drop what the batcher keeps on the device."""
        del self.batcher

    async def run(self, number: int, stop: asyncio.Event) -> None:
        """Be one client, until told to stop."""
        draw, loop = random.Random(f"{self._seed} suspect {number}"), asyncio.get_running_loop()
        while not stop.is_set():
            if loop.time() >= self._poisonous_at:
                self._poisonous_at = loop.time() + _EVERY * draw.uniform(0.5, 1.5)
                self.subject.faulted()
                await ask(self._ledger, self._ledger.begin("poison", self.subject), self._poison())
            else:
                await self._clean(draw)
            await asyncio.sleep(_PAUSE * draw.random())

    async def _clean(self, draw: random.Random) -> None:
        """Send an item that is not poison; some with little time, and some are thought better of."""
        item, luck = draw.uniform(1.0, 2.0), draw.random()
        timeout = draw.choice((0.001, 0.02, 1.0)) if luck < 0.05 else None
        asking = ask(self._ledger, self._ledger.begin("suspect", self.subject, timeout=timeout), self._item(item, timeout))
        if luck < 0.95:
            await asking
            return
        task = asyncio.ensure_future(asking)
        await asyncio.sleep(0.05 * draw.random())  # a turn at least: a task that never began answers no request
        task.cancel()
        await asyncio.wait({task})

    async def _item(self, item: float, timeout: float | None = None) -> None:
        """Send an item that is not poison, whatever its neighbours are."""
        try:
            result = await self.batcher.submit(item, timeout=timeout)
        except accel.PoisonedInputError as error:
            if died_of(error) in _GUILTY:
                raise WrongAnswerError(f"{item} was taken for poison: {error}") from error
            return  # the child in which it was tried alone was killed from outside, by the run or because it was silent for too long
        except accel.ContextPoisonedError as error:
            # Not when it was on the device: then it is searched. Retried once, it may meet the next fault before it gets there.
            if error.executed != "no" and not (self._is_hunted and getattr(error, "__notes__", None)):
                raise WrongAnswerError(f"{item} failed with what its neighbour did: {error}") from error
            raise
        if not abs(result - 2 * _FACTOR * item) < 1e-9:
            raise WrongAnswerError(f"{item} gave {result}")

    async def _poison(self) -> None:
        """Send poison: the answer must be that it is."""
        try:
            result = await self.batcher.submit(POISON)
        except accel.PoisonedInputError as error:
            if error.item != POISON:
                raise WrongAnswerError(f"poison is called {error.item!r}") from error
            return
        raise WrongAnswerError(f"poison gave {result}")


async def _in_quarantine(device: accel.Device) -> Handler:
    return _handler_on(device)


def _handler_on(device: accel.Device) -> Handler:
    """Return what handles items on a device: the one that serves, or one in quarantine."""
    factor: accel.AccelRef | None = None

    async def handle(items: list[float]) -> list[float]:
        nonlocal factor
        if factor is None or factor.is_stale:
            factor = await device.put(np.array([_FACTOR]))
        doubled = await device.run(Double(await device.put(np.array(items))))
        factors = await device.full((len(items),), _FACTOR, "float64")
        (kept,) = await device.get(factor)
        return [float(each) * kept / _FACTOR for each in await device.get(await device.elementwise.binary("mul", doubled, factors))]

    return handle


def died_of(error: accel.AccelError) -> Any:
    """Return the driver's code, or the signal, of which a context died in the end."""
    cause: BaseException | None = error
    while cause is not None:
        found = getattr(cause, "signal", None) or getattr(cause, "code", None)
        if found is not None:
            return found
        cause = cause.__cause__
    return None
