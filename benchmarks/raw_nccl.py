"""All-reduce by NCCL's raw calls, without accel: the twin of ``worlds.py --device cuda``.

``python benchmarks/raw_nccl.py [--seconds 2]`` starts one process a GPU, for two GPUs, and prints microseconds of each size as JSON: of one
all-reduce with 8 in flight, and of one that is awaited. Communicators block, as those of PyTorch do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

SIZES = (4 << 10, 1 << 20, 256 << 20)
RANKS = 2
IN_FLIGHT = 8
_FLOAT32, _SUM = 7, 0


def main() -> None:
    """Measure, or be one rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    print(json.dumps(measure(options.seconds) if options.rank is None else of_rank(options.rank, options.seconds)))


def measure(seconds: float) -> dict[str, dict[str, float]]:
    """Start the ranks, and return the microseconds of rank 0: bytes -> ``in_flight`` and ``awaited``."""
    command = [sys.executable, __file__, "--seconds", str(seconds), "--rank"]
    ranks = [subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for rank in range(RANKS)]
    try:
        first = ranks[0].stdout
        assert first is not None
        unique_id = first.readline()
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(unique_id)
            rank.stdin.flush()
        found: dict[str, dict[str, float]] = json.loads(first.readline())
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return found


def of_rank(rank: int, seconds: float) -> dict[str, dict[str, float]]:
    """Be one rank. All ranks make the same calls, as often."""
    from cuda.bindings import driver
    from nccl.bindings import nccl

    def call(name: str, *arguments: Any) -> Any:
        status, *values = getattr(driver, name)(*arguments)
        if int(status):
            raise RuntimeError(f"{name} answered {status!r}")
        return values[0] if values else None

    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", rank)))
    if rank == 0:
        print(bytes(nccl.get_unique_id()).hex(), flush=True)
    config = nccl.Config()  # it owns the memory
    communicator = nccl.comm_init_rank_scalable(RANKS, rank, 1, bytearray.fromhex(sys.stdin.readline()), config.ptr)
    stream = call("cuStreamCreate", int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    buffers = [(int(call("cuMemAlloc", SIZES[-1])), int(call("cuMemAlloc", SIZES[-1]))) for _ in range(IN_FLIGHT)]

    def reduce(number: int, nbytes: int) -> None:
        source, target = buffers[number % IN_FLIGHT]
        nccl.all_reduce(source, target, nbytes // 4, _FLOAT32, _SUM, communicator, int(stream))

    found: dict[str, dict[str, float]] = {}
    for nbytes in SIZES:
        for number in range(2 * IN_FLIGHT):
            reduce(number, nbytes)
        call("cuStreamSynchronize", stream)
        rounds = max(3, round(seconds / (IN_FLIGHT * (60e-6 + nbytes / 280e9))))  # the same on all ranks
        events = [call("cuEventCreate", 2) for _ in range(IN_FLIGHT)]
        began = time.perf_counter()
        for number in range(rounds * IN_FLIGHT):
            event = events[number % IN_FLIGHT]
            if number >= IN_FLIGHT:
                call("cuEventSynchronize", event)
            reduce(number, nbytes)
            call("cuEventRecord", event, stream)
        call("cuStreamSynchronize", stream)
        in_flight = (time.perf_counter() - began) / (rounds * IN_FLIGHT)
        awaited = list[float]()
        for number in range(max(20, rounds)):
            begin = time.perf_counter()
            reduce(number, nbytes)
            call("cuStreamSynchronize", stream)
            awaited.append(time.perf_counter() - begin)
        found[str(nbytes)] = {"in_flight": in_flight * 1e6, "awaited": statistics.median(awaited) * 1e6}
    return found


if __name__ == "__main__":
    main()
