"""How often a GPU stands still for seconds after a device-side assertion, alone and soon after that of another process.

``python benchmarks/gpu_stall.py [--rounds 8]``; needs torch and a GPU, and nothing of accel runs. In each round two processes compute on one GPU. The first one
meets an assertion, and ends at once or stays; then the second one meets one too. A third process adds one to a number every 5 ms, and shows whether the
GPU served it meanwhile. ``dmesg`` has what the driver says of a stall: ``Xid 109, CTX SWITCH TIMEOUT``.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.model_service import LENGTH, VOCABULARY, build_half

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_STALL = 1.0
"""Seconds; a round without one lets the witness wait for some milliseconds at most."""
_FORK = multiprocessing.get_context("fork")  # torch is imported once, and CUDA is initialized in the children alone


def witness(pipe: Connection, longest: Any) -> None:
    """Add one to a number on the GPU, again and again; ``longest`` is the longest time that it took since it was set to 0."""
    import torch

    number = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    pipe.send("ready")
    while True:
        began = time.monotonic()
        number += 1
        torch.cuda.synchronize()
        longest.value = max(longest.value, time.monotonic() - began)
        time.sleep(0.005)


def victim(pipe: Connection, stays: bool) -> None:
    """Compute until told to meet an assertion; then end, or stay with the dead context until killed."""
    import torch

    torch.set_grad_enabled(False)
    module = build_half().cuda().eval()
    ids = torch.randint(0, VOCABULARY, (64, LENGTH), device="cuda")
    module(ids)
    torch.cuda.synchronize()
    pipe.send("ready")
    while not pipe.poll():
        module(ids)
        torch.cuda.synchronize()
    ids[0, 0] = VOCABULARY
    module(ids)
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
        print("no assertion was met", flush=True)
    while stays:
        time.sleep(60)
    os._exit(3)


def started(target: Any, *given: Any) -> tuple[Any, Connection]:
    """Return a process, and the pipe to it."""
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=target, args=(theirs, *given), daemon=True)
    process.start()
    return process, ours


def one_round(longest: Any, *, stays: bool, after: float | None) -> float:
    """Return the longest that the GPU stood still: after an assertion, and after that of the other process ``after`` seconds later."""
    pair = [started(victim, stays), started(victim, False)]
    for _, pipe in pair:
        pipe.recv()
    longest.value = 0.0
    (first, to_first), (second, to_second) = pair
    to_first.send("fault")
    if after is not None:
        time.sleep(after)
        to_second.send("fault")
        second.join()  # it ends with the stall
    elif not stays:
        first.join()
    time.sleep(0.3)
    for process, _ in pair:
        process.kill()
        process.join()
    return float(longest.value)


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="of each way (default %(default)s)")
    given = parser.parse_args()
    import torch  # noqa: F401 - once, and not in each child

    longest = _FORK.Value("d", 0.0)
    watching, pipe = started(witness, longest)
    pipe.recv()
    print(f"{'the first process':20} {'the second one faults after':28} {'rounds with a stall':20} longest")
    for stays, after in ((False, None), (True, 0.3), (False, 0.1), (False, 0.3), (False, 1.0)):
        found = [one_round(longest, stays=stays, after=after) for _ in range(given.rounds)]
        stalls = sum(each > _STALL for each in found)
        when = "-" if after is None else f"{after:g} s"
        print(f"{'stays' if stays else 'ends':20} {when:28} {f'{stalls} of {given.rounds}':20} {max(found):.2f} s", flush=True)
    watching.kill()


if __name__ == "__main__":
    main()
