"""Programs about communicators of two GPUs, each run in a process of its own: ``python -m tests.accel_cuda.nccl_programs NAME ...``."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import AccelError, DType, WorldChangedError
from accel.ops.collective import REDUCED_DTYPES, Call
from accel_cuda import CudaBackend
from accel_cuda.core.graph import _executable
from tests.accel_cuda.cuda_programs import PATIENCE, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel_cuda.core.graph import CudaGraph
    from accel_cuda.core.nccl import NcclGroup

PART = 3 * 17
"""Elements of what one rank gives another one."""
KEPT = 48 << 20
"""Bytes by which the device's memory in use may move from one loss to the next: much less than a communicator."""


class End:
    """One GPU as a rank, with a source and a target in one slab."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self.rank = rank
        self.size = size
        self.device = CudaBackend().open(rank)
        self.stream = self.device.create_stream(library="memory")
        self.slab = self.device.create_slab(2 << 20)
        self.source, self.target = self.slab.address, self.slab.address + (1 << 20)
        self.group: NcclGroup | Any = None

    def join(self, unique_id: bytes, seconds: float = PATIENCE) -> None:
        self.group = self.device.join(unique_id, self.rank, self.size, time.monotonic() + seconds, threading.Event())

    def put(self, array: Any) -> None:
        self.stream.copy_htod(self.source, array.reshape(-1).view(np.uint8).data)

    def got(self, like: Any) -> Any:
        out = np.empty_like(like)
        self.stream.copy_dtoh(out.reshape(-1).view(np.uint8).data, self.target)
        self.stream.synchronize()
        return out

    def launch(self, call: Call) -> None:
        self.group.launch(self.stream, call, self.source, self.target)

    def capture(self, call: Call) -> CudaGraph:
        context, stream = self.device, self.stream
        with context.section:
            context.call("cuStreamBeginCapture", stream.handle, context.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            stream.is_capturing = True
            try:
                self.launch(call)
            finally:
                stream.is_capturing = False
            return _executable(stream, context.call("cuStreamEndCapture", stream.handle))

    def used(self) -> int:
        with self.device.section:
            free, total = self.device.call("cuMemGetInfo")
        return int(total - free)

    def close(self) -> None:
        self.group.revoke()
        self.group.abort()
        self.slab.close()
        self.device.close()


def reduced(arrays: Sequence[Any], reduction: str) -> Any:
    """Return what a reduction gives, in a wide type."""
    is_integer = np.issubdtype(arrays[0].dtype, np.integer)
    stacked = np.stack([array.astype(np.int64 if is_integer else np.float64) for array in arrays])
    if reduction == "avg":
        total = stacked.sum(0)
        return np.fix(total / len(arrays)) if is_integer else total / len(arrays)
    return getattr(np, reduction)(stacked, axis=0)


def expected_of(call: Call, arrays: Sequence[Any]) -> list[Any]:
    """Return what each rank gets; ``None`` where it gets nothing."""
    flat, ranks = [array.reshape(-1) for array in arrays], range(len(arrays))

    def part(array: Any, rank: int) -> Any:
        return array[rank * PART : (rank + 1) * PART]

    match call.kind:
        case "all_reduce":
            return [reduced(flat, call.reduction)] * len(ranks)
        case "reduce":
            return [reduced(flat, call.reduction) if rank == call.root else None for rank in ranks]
        case "reduce_scatter":
            return [part(reduced(flat, call.reduction), rank) for rank in ranks]
        case "broadcast":
            return [flat[call.root]] * len(ranks)
        case "all_gather":
            return [np.concatenate([part(array, 0) for array in flat])] * len(ranks)
        case "gather":
            return [np.concatenate([part(array, 0) for array in flat]) if rank == call.root else None for rank in ranks]
        case "scatter":
            return [part(flat[call.root], rank) for rank in ranks]
        case "all_to_all":
            return [np.concatenate([part(array, rank) for array in flat]) for rank in ranks]
    raise AssertionError(call.kind)


def calls(dtype: DType, size: int) -> list[Call]:
    """Return every collective of one dtype but ``send``, ``receive`` and ``barrier``."""
    whole, root, kinds = size * PART, size - 1, ("all_gather", "all_to_all", "broadcast", "gather", "scatter")
    found = [Call(kind, whole if kind == "broadcast" else PART, dtype, root=root) for kind in kinds]
    if dtype in REDUCED_DTYPES:
        for reduction in ("sum", "prod", "min", "max", "avg"):
            found += [Call(kind, whole, dtype, reduction, root) for kind in ("all_reduce", "reduce")]
            found.append(Call("reduce_scatter", PART, dtype, reduction))
    return found


def random_array(rng: np.random.Generator, dtype: DType, size: int) -> Any:
    """Return numbers of which every dtype has the sums, products and averages of two."""
    lowest = 0 if dtype.kind in ("unsigned", "bool") else -2
    return rng.integers(lowest, 2 if dtype.kind == "bool" else 3, size * PART).astype(dtype.numpy)


def conformance(ranks: str) -> None:
    """Every collective of every dtype and reduction, launched and in a graph, against numpy."""
    size, seed = int(ranks), int(np.random.SeedSequence().generate_state(1)[0])
    rng, ends = np.random.default_rng(seed), [End(rank, size) for rank in range(size)]
    unique_id, numbers = ends[0].device.unique_id(), itertools.count(1)
    with ThreadPoolExecutor(size) as pool:

        def everywhere(work: Callable[[End], Any]) -> list[Any]:
            return [*pool.map(work, ends)]

        def check(call: Call, *, is_graph: bool) -> None:
            arrays = [random_array(rng, call.dtype, size) for _ in ends]
            expected, number = expected_of(call, arrays), next(numbers)

            def run(end: End) -> Any:
                graph = end.capture(call) if is_graph else None
                end.put(arrays[end.rank])
                if graph is None:
                    end.launch(call._replace(number=number))
                else:
                    end.stream.launch_graph(graph.pointer)
                wanted = expected[end.rank]
                found = None if wanted is None else end.got(np.empty(wanted.shape, call.dtype.numpy))
                end.stream.synchronize()
                if graph is not None:
                    graph.close()
                return found

            try:
                every = everywhere(run)
            except AccelError as error:
                error.add_note(f"{call} graph {is_graph} seed {seed}")
                raise
            for rank, found in enumerate(every):
                if expected[rank] is not None:
                    same = found.astype(np.float64) == expected[rank].astype(np.float64)
                    assert same.all(), f"{call} rank {rank} graph {is_graph} seed {seed}: {found[~same]} is not {expected[rank][~same]}"

        began = time.perf_counter()
        everywhere(lambda end: end.join(unique_id))
        print(f"joined after {time.perf_counter() - began:.2f} s")
        began = time.perf_counter()
        for dtype in DType:
            if dtype.kind != "complex":
                for call in calls(dtype, size):
                    check(call, is_graph=False)
        for call in (*calls(DType.FLOAT32, size), *calls(DType.BFLOAT16, size)):
            check(call, is_graph=True)
        print(f"{next(numbers)} collectives in {time.perf_counter() - began:.1f} s")

        if size == 2:
            x = rng.standard_normal(PART).astype(np.float32)
            ends[0].put(x)
            everywhere(lambda end: end.launch(Call(("send", "receive")[end.rank], PART, DType.FLOAT32, root=1 - end.rank)))
            assert np.array_equal(ends[1].got(x), x)
        everywhere(lambda end: end.launch(Call("barrier", 0, DType.UINT8, number=1 << 40)))
        everywhere(lambda end: end.stream.synchronize())
        assert [end.group.reached for end in ends] == [1 << 40] * size, "a stream has not written what it has come to"
        everywhere(End.close)


def outlived_by_a_graph() -> None:
    """A communicator is freed after the graph that has captured a collective of it, however often the world changes meanwhile."""
    end = End(0, size=1)
    used = list[int]()
    graphs = list[Any]()
    for _ in range(4):
        end.join(end.device.unique_id())
        graphs.append(end.capture(Call("all_reduce", PART, DType.FLOAT32, "sum")))
        end.stream.launch_graph(graphs[-1].pointer)
        end.group.revoke()
        end.group.abort()
        used.append(end.used())
    nccl = end.device._nccl()
    assert len(nccl._deferred) == len(graphs)
    end.stream.synchronize()
    for graph in graphs:
        graph.close()
    deadline = time.monotonic() + PATIENCE
    while any(group._graphs.are_alive() for group in nccl._deferred):
        assert time.monotonic() < deadline, "the driver keeps something of a graph that was destroyed"
    end.join(end.device.unique_id())
    assert nccl._deferred == []
    end.close()
    print(f"MiB in use {[number >> 20 for number in used]}")


def dying() -> None:
    """Join with the ids that come by standard input, as rank 1, and die in the middle of it all."""
    end = End(1)
    print("ready", flush=True)
    end.join(bytes.fromhex(sys.stdin.readline()))
    end.capture(Call("all_reduce", 1 << 10, DType.FLOAT32, "sum"))
    for _ in range(3):
        end.launch(Call("all_reduce", 1 << 18, DType.FLOAT32, "sum"))
    end.stream.synchronize()
    os.kill(os.getpid(), signal.SIGKILL)


def losses(count: str) -> None:
    """A rank dies again and again under load, with a graph that has captured a collective: the other one goes on, and keeps nothing of it."""
    end, used, left = End(0), list[int](), list[float]()
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.accel_cuda.nccl_programs", "dying"]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    spare, graph = start(), None
    for _ in range(int(count)):
        child, spare = spare, start()
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        unique_id = end.device.unique_id()
        child.stdin.write(unique_id.hex() + "\n")
        child.stdin.flush()
        end.join(unique_id)
        if graph is not None:
            graph.close()  # as a model does that is captured anew
        graph = end.capture(Call("all_reduce", 1 << 10, DType.FLOAT32, "sum"))
        for _ in range(3):
            end.launch(Call("all_reduce", 1 << 18, DType.FLOAT32, "sum"))
        assert child.wait(PATIENCE) == -signal.SIGKILL
        used.append(end.used())
        error: list[WorldChangedError] = []
        launching = threading.Thread(target=_launch_until_revoked, args=(end, error))
        launching.start()
        time.sleep(0.05)  # it is in a collective that the other rank never comes to
        began = time.perf_counter()
        end.group.revoke()
        end.stream.synchronize()
        launching.join(PATIENCE)
        assert not launching.is_alive()
        end.group.abort()
        left.append(time.perf_counter() - began)
        assert len(error) == 1
        ones = np.ones(1 << 10, np.float32)
        end.put(ones)
        end.stream.copy(end.target, end.source, ones.nbytes)
        assert np.array_equal(end.got(ones), ones), "the stream does not go on"
    spare.kill()
    spare.communicate()
    print(f"{count} losses: MiB in use {[number >> 20 for number in used]}; s to leave {[round(seconds, 2) for seconds in left]}")
    assert max(left) < 3.0
    assert max(used[2:]) - min(used[2:]) < KEPT


def _launch_until_revoked(end: End, error: list[WorldChangedError]) -> None:
    try:
        while True:
            end.launch(Call("all_reduce", 1 << 18, DType.FLOAT32, "sum"))
    except WorldChangedError as raised:
        error.append(raised)


def leaves_a_join() -> None:
    """A rank that waits for others leaves when it is told to, and when its time is up."""
    end, revoked = End(0), threading.Event()
    for seconds, limit in ((0.5, 2.0), (PATIENCE, 2.0)):
        began = time.perf_counter()
        if seconds == PATIENCE:
            threading.Timer(0.5, revoked.set).start()
        try:
            end.device.join(end.device.unique_id(), 0, end.size, time.monotonic() + seconds, revoked)
        except Exception as error:
            print(f"{type(error).__name__} after {time.perf_counter() - began:.2f} s")
        else:
            raise AssertionError("nothing was raised")
        assert time.perf_counter() - began < 0.5 + limit
    end.slab.close()
    end.device.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
