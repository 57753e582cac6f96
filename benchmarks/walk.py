"""How long the way of an op is: Python calls of ``accel``, and the files that they are in, on the loop's thread.

``python benchmarks/walk.py [--list ROW]``: the CPU backend, one op at a time. Counts do not depend on how busy the machine is; they differ a little between
releases of Python, and the limits are for 3.11.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import itertools

import numpy as np

import accel
from accel.testing import FaultPlan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from types import FrameType

    from accel import Device

    Host = Literal["inline", "process"]

__all__ = ["LIMITS", "Limit", "Means", "Walk", "fault", "ops", "recorded", "request"]

_PACKAGE = str(Path(accel.__file__).parent) + "/"
_REPEATS = 5


class Limit(NamedTuple):
    """How long a way may be.

    Attributes
    ----------
    calls, files
        The most there may be; ``files=None`` for any number.
    beyond
        The row whose calls do not count, or empty.
    """

    calls: int
    files: int | None = None
    beyond: str = ""


GEMM = "gemm awaited, inline"
LIMITS = {
    GEMM: Limit(55, 25),
    "one op of a batch of 8, inline": Limit(36),
    "matmul awaited, inline": Limit(12, beyond=GEMM),
    "put, inline": Limit(52),
    "durable put with checksum, inline": Limit(120),
    "gemm beside a checked buffer, inline": Limit(2, beyond=GEMM),
    "gemm awaited, process": Limit(62),
    "request of a served model, inline": Limit(220, 38),
    "op that faults, to READY": Limit(320),
    "first gemm of the new generation": Limit(200),
}


class Walk(list[tuple[str, str]]):
    """The calls of one way, in order: file and qualified name of each."""

    @property
    def files(self) -> int:
        """How many files they are in."""
        return len({file for file, _ in self})

    @property
    def switches(self) -> int:
        """How often a call is in another file than the one before."""
        return sum(before[0] != after[0] for before, after in itertools.pairwise(self))


@contextlib.contextmanager
def recorded() -> Iterator[Walk]:
    """Record what this thread calls in the block. Nothing is collected meanwhile: what collecting calls is not on the way."""
    walk = Walk()

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE):
            walk.append((code.co_filename.removeprefix(_PACKAGE), getattr(code, "co_qualname", code.co_name)))

    gc.disable()
    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        gc.enable()


async def shortest(call: Callable[[], Awaitable[object]], warm_up: int, *, keep: bool = False) -> Walk:
    """Return the shortest walk of a few: a timer of the loop may fall into any of them.

    Giving back the result of the call before is on the way of the next one, unless results are kept.
    """
    kept = [await call() for _ in range(warm_up)]
    walks = []
    for _ in range(_REPEATS):
        await asyncio.sleep(0)
        if not keep:
            kept.clear()
        with recorded() as walk:
            result = await call()
        walks.append(walk)
        kept.append(result)
        del result
    return min(walks, key=len)


async def ops(host: Host) -> dict[str, Walk]:
    """Walk with one op, one of a batch, and arrays that are put."""
    found = {}
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host)
        a = await device.put(np.random.default_rng().random((8, 8)))
        found["gemm awaited"] = await shortest(lambda: device.blas.gemm(a, a), 30)

        async def batch() -> object:
            async with device.batch() as recording:
                return [recording.blas.gemm(a, a) for _ in range(8)]

        found["one op of a batch of 8"] = await shortest(batch, 3)
        found["matmul awaited"] = await shortest(lambda: device.linalg.matmul(a, a), 5)
        found["put"] = await shortest(lambda: device.put(np.zeros(16)), 3, keep=True)
        found["durable put with checksum"] = await shortest(lambda: device.put(np.zeros(16), durable=True, checksum=True), 1, keep=True)
        _checked = await device.put(np.zeros(16), durable=True, checksum=True)
        found["gemm beside a checked buffer"] = await shortest(lambda: device.blas.gemm(a, a), 5)
    return {f"{name}, {host}": walk for name, walk in found.items()}


class Means:
    """A model in numpy: the scaled mean of each row."""

    def open(self, weights: Any, description: object, stream: object) -> None:
        """Take the weights."""
        self.scale = np.asarray(weights["scale"])

    def run(self, inputs: Any) -> Any:
        """Compute a batch."""
        return self.scale * np.asarray(inputs["x"]).mean(axis=1)


async def request(host: Host) -> dict[str, Walk]:
    """Walk with one request of a served model."""
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host)
        model = await device.load_model(
            "benchmarks.walk:Means",
            weights={"scale": np.array(2.0)},
            inputs={"x": accel.TensorSpec(("batch", 64), "float64")},
            buckets={"batch": (1, 8)},
        )
        async with accel.serve(model, max_delay=0.001) as service:
            item = np.zeros(64)
            walk = await shortest(lambda: service.submit(item), 30)
    return {f"request of a served model, {host}": walk}


async def fault() -> dict[str, Walk]:
    """Walk with an op that faults, from sending it until the device is READY again, and with the next op; the shortest of a few, as above."""
    walks = [await _fault() for _ in range(_REPEATS)]
    return {row: min((walk[row] for walk in walks), key=len) for row in walks[0]}


async def _fault() -> dict[str, Walk]:
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=FaultPlan().poison_at(30, op="gemm"))
        a = await device.put(np.zeros((8, 8)), durable=True)
        for _ in range(29):
            await device.blas.gemm(a, a)
        rebuilt = await _next_generation(device)
        with recorded() as faulted:
            with contextlib.suppress(accel.AccelError):
                await device.blas.gemm(a, a)
            await rebuilt
        with recorded() as first:
            await device.blas.gemm(a, a)
    return {"op that faults, to READY": faulted, "first gemm of the new generation": first}


async def _next_generation(device: Device) -> asyncio.Future[int]:
    generations = device.generations()
    await anext(generations)
    rebuilt = asyncio.ensure_future(anext(generations))
    await asyncio.sleep(0)
    return rebuilt


def calls_of(row: str, walks: dict[str, Walk]) -> float:
    """Return the calls of a row that its limit is about."""
    limit = LIMITS.get(row, Limit(0))
    return len(walks[row]) / (8 if "of a batch" in row else 1) - (len(walks[limit.beyond]) if limit.beyond else 0)


def main(arguments: argparse.Namespace) -> None:
    """Print the table."""
    walks: dict[str, Walk] = {}
    for host in ("inline", "process"):
        walks |= asyncio.run(ops(host)) | asyncio.run(request(host))
    walks |= asyncio.run(fault())
    print(f"Python {sys.version.split()[0]}\n{'':42}{'calls':>8}{'most':>6}{'files':>7}{'most':>6}{'switches':>10}")
    for row, walk in walks.items():
        limit = LIMITS.get(row)
        most = ("", "") if limit is None else (limit.calls, "" if limit.files is None else limit.files)
        print(f"{row:42}{calls_of(row, walks):8.0f}{most[0]:>6}{walk.files:7}{most[1]:>6}{walk.switches:10}")
        if arguments.list and row.startswith(arguments.list):
            print("\n".join(f"    {file} {name}" for file, name in walk))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", default="", metavar="ROW", help="print the calls of the rows that begin like this")
    main(parser.parse_args())
