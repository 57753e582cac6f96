"""What clients ask, and what numpy says that the answer is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from benchmarks.chaos_parts.oracle import WrongAnswerError

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from benchmarks.chaos_parts.subject import Subject

__all__ = ["KINDS", "Asker", "check"]

Array = np.ndarray[Any, Any]


def check(given: Array, wanted: Array, what: str) -> None:
    """Raise unless an answer is right, to what the element type can hold."""
    if given.shape != wanted.shape:
        raise WrongAnswerError(f"{what}: shape {given.shape}, not {wanted.shape}")
    scale = float(np.abs(wanted).max(initial=1.0))
    error = float(np.abs(given.astype(np.float64) - wanted).max(initial=0.0))
    limit = 1e-4 if given.dtype == np.float32 else 1e-9
    if not error <= limit * scale:
        raise WrongAnswerError(f"{what}: off by {error:g} of {scale:g}")


class _Kept:
    """What a client keeps on a device from one request to the next, as long as its generation lives."""

    def __init__(self) -> None:
        self.generation = 0
        self.weights: accel.AccelRef | None = None
        self.counter: accel.AccelRef | None = None
        self.count = 0
        self.unsure = 0
        self.graph: accel.Graph | None = None
        self.input: accel.AccelRef | None = None
        self.output: accel.AccelRef | None = None


class Asker:
    """The requests of one client. Each method is one; it raises what the device raises, or :class:`WrongAnswerError`.

    Parameters
    ----------
    number
        Of the client.
    seed
        Of the run.
    draw
        The client's own random numbers.
    tamper
        Called with each array that was read; returns what is checked.
    """

    def __init__(self, number: int, seed: int, draw: random.Random, tamper: Callable[[Array], Array] = lambda array: array) -> None:
        self.draw = draw
        self._rng = np.random.default_rng([seed, number])
        self._tamper = tamper
        self._size = 4 + int(self._rng.integers(0, 29))
        self._weights = self._rng.standard_normal((self._size, self._size)).astype(np.float32)
        self._kept: dict[str, _Kept] = {}
        self._pinned: dict[str, tuple[Array, Array]] = {}

    def forget(self) -> None:
        """Drop everything that is kept on devices."""
        self._kept.clear()
        self._pinned.clear()

    def _fresh(self, *shape: int, dtype: Any = np.float32) -> Array:
        made: Array = self._rng.standard_normal(shape).astype(dtype)
        return made

    async def _read(self, device: accel.Device, ref: accel.AccelRef, out: Array | None = None) -> Array:
        return self._tamper(await device.get(ref, out=out))

    def _keep(self, subject: Subject) -> _Kept:
        kept = self._kept.get(subject.label)
        if kept is None or kept.generation != subject.device.generation:
            kept = self._kept[subject.label] = _Kept()
            kept.generation = subject.device.generation
        return kept

    # -- the requests

    async def gemm(self, subject: Subject) -> None:
        """Multiply by weights that stay on the device."""
        device, kept = subject.device, self._keep(subject)
        if kept.weights is None:
            kept.weights = await device.put(self._weights)
        x = self._fresh(self._size, self._size)
        y = await device.blas.gemm(await device.put(x), kept.weights)
        check(await self._read(device, y), x.astype(np.float64) @ self._weights, "gemm")

    async def elementwise(self, subject: Subject) -> None:
        """Apply a few functions to elements, one after the other."""
        device, n = subject.device, self.draw.randrange(1, 5000)
        a, b = self._fresh(n, dtype=np.float64), self._fresh(n, dtype=np.float64)
        x, y = await asyncio.gather(device.put(a), device.put(b))
        x = await device.elementwise.binary("mul", x, y)
        x = await device.elementwise.unary("tanh", x)
        total = await device.reduce("sum", x)
        check(await self._read(device, x), np.tanh(a * b), "elementwise")
        check(await self._read(device, total), np.tanh(a * b).sum(), "sum")

    async def batch(self, subject: Subject) -> None:
        """Many ops, sent as one message."""
        device, n, rounds = subject.device, self.draw.randrange(2, 40), self.draw.randrange(6)
        a, b = self._fresh(n, n), self._fresh(n, n)
        async with device.batch() as batch:
            x, y = batch.put(a), batch.put(b)
            h = batch.elementwise.unary("relu", batch.blas.gemm(x, y))
            for _ in range(rounds):
                h = batch.elementwise.binary("add", h, x)
        wanted = np.maximum(a.astype(np.float64) @ b, 0) + rounds * a.astype(np.float64)
        check(await self._read(device, h), wanted, "batch")

    async def graph(self, subject: Subject) -> None:
        """Replay what was recorded once in a generation, with another input."""
        device, kept, x = subject.device, self._keep(subject), self._fresh(64)
        if kept.graph is None:
            kept.input = await device.put(x)
            async with device.graph() as graph:
                kept.output = graph.elementwise.unary("neg", graph.elementwise.binary("mul", kept.input, kept.input))
            kept.graph = graph
        await device.put(x, out=kept.input)
        await kept.graph.replay()
        assert kept.output is not None, "it was recorded"
        check(await self._read(device, kept.output), -(x.astype(np.float64) ** 2), "graph")

    async def pinned(self, subject: Subject) -> None:
        """Move an array without a copy on the host; both ends outlive every fault."""
        device = subject.device
        pair = self._pinned.get(subject.label)
        if pair is None:
            n = self.draw.choice((1000, 30_000, 200_000))
            pair = await device.pinned((n,), "float32"), await device.pinned((n,), "float32")
            self._pinned[subject.label] = pair
            pair[0][:] = self._fresh(n)
        source, target = pair
        before = float(source[0])
        target[:] = np.nan
        ref = await device.put(source)
        check(await self._read(device, ref, target), source.astype(np.float64), "pinned")
        if float(source[0]) != before:
            raise WrongAnswerError("a pinned array changed by itself")

    async def large(self, subject: Subject) -> None:
        """Move an ordinary array that is copied off the loop."""
        device, n = subject.device, self.draw.randrange(1 << 17, 1 << 19)
        source = self._rng.integers(0, 256, n, np.uint8)
        back = await self._read(device, await device.put(source))
        if not np.array_equal(back, source):
            raise WrongAnswerError(f"{np.count_nonzero(back != source)} of {n} bytes differ")

    async def counter(self, subject: Subject) -> None:
        """Count in place: each addition that was answered has been made once, others at most once."""
        device, kept = subject.device, self._keep(subject)
        if kept.counter is None:
            kept.counter, kept.count, kept.unsure = await device.zeros((4,), "float64"), 0, 0
        counter, one = kept.counter, await device.full((4,), 1.0, "float64")
        for _ in range(self.draw.randrange(1, 6)):
            kept.unsure += 1
            await device.elementwise.binary("add", counter, one, out=counter)
            kept.unsure -= 1
            kept.count += 1
        value = await self._read(device, counter)
        if not (np.all(value == value[0]) and kept.count <= value[0] <= kept.count + kept.unsure):
            raise WrongAnswerError(f"counted {value}, after {kept.count} answers and {kept.unsure} that were not told")

    async def drop(self, subject: Subject) -> None:
        """Make buffers and let most of them go."""
        device = subject.device
        refs = await asyncio.gather(*(device.full((100 * n + 1,), float(n), "float64") for n in range(8)))
        last = refs.pop()
        del refs
        check(await self._read(device, last), np.full((701,), 7.0), "full")

    async def freed(self, subject: Subject) -> None:
        """Use what was freed: that must be refused."""
        device = subject.device
        ref = await device.zeros((10,))
        await device.free(ref)
        await device.get(ref)
        raise WrongAnswerError("a freed buffer was read")

    async def too_large(self, subject: Subject) -> None:
        """Ask for more memory than there is."""
        await subject.device.empty((1 << 44,), "float32")
        raise WrongAnswerError("there was room for 64 TiB")

    async def mistaken(self, subject: Subject) -> None:
        """Ask for what makes no sense."""
        device = subject.device
        a, b = await device.zeros((3, 4)), await device.zeros((3, 4))
        try:
            await device.blas.gemm(a, b)
        except accel.InvalidArgumentError:
            return
        raise WrongAnswerError("matrices were multiplied that do not fit")

    async def corrupt(self, subject: Subject) -> None:
        """Give an op indices of which one is out of range: it must be refused, and touch no memory of others."""
        device, n = subject.device, self._size
        indices = np.arange(n, dtype=np.int32)
        indices[self.draw.randrange(n)] = self.draw.choice((n, 100_000_000, 2**31 - 1, -n - 1, -100_000_000, -(2**31)))
        x, wrong = await device.put(self._fresh(n, n)), await device.put(indices)
        call: Awaitable[object]
        match self.draw.randrange(3):
            case 0:
                call = device.arrays.take(x, wrong, axis=0)
            case 1:
                call = device.arrays.put_along_axis(x, wrong, 0.0, 0)
            case _:
                marks = await device.put(np.arange(n + 1, dtype=np.int32))
                call = device.sparse.todense(accel.SparseRef("csr", x[0], wrong, marks, (n, n)))
        try:
            await call
        except accel.InvalidArgumentError:
            return
        raise WrongAnswerError("an index out of range was used")


KINDS: dict[str, tuple[float, Callable[[Asker, Subject], Awaitable[None]], frozenset[str]]] = {
    "gemm": (5.0, Asker.gemm, frozenset()),
    "elementwise": (3.0, Asker.elementwise, frozenset()),
    "batch": (4.0, Asker.batch, frozenset()),
    "graph": (3.0, Asker.graph, frozenset()),
    "pinned": (1.5, Asker.pinned, frozenset()),
    "large": (0.5, Asker.large, frozenset()),
    "counter": (2.0, Asker.counter, frozenset()),
    "drop": (1.0, Asker.drop, frozenset()),
    "freed": (0.5, Asker.freed, frozenset({"freed"})),
    "too_large": (0.5, Asker.too_large, frozenset({"oom"})),
    "mistaken": (0.5, Asker.mistaken, frozenset()),
    "corrupt": (0.5, Asker.corrupt, frozenset()),
}
"""Kind of request -> how often it is drawn, how it is asked, and what it may be answered besides."""
