"""How often a GPU stands still for seconds after a device-side assertion, alone and soon after that of another process.

``python benchmarks/gpu_stall.py [--rounds 8]``; needs torch and a GPU. accel opens no device here. In each round two processes compute on one GPU. The first
meets an assertion, and ends at once or stays; then, but for the first row, the second one meets one too. A third process adds one to a number every 5 ms, and
shows whether the GPU served it meanwhile. ``dmesg`` has what the driver says of a stall: ``Xid 109, CTX SWITCH TIMEOUT``.
"""

from __future__ import annotations

import argparse
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
_LONGEST = 30.0
"""Seconds after which a step, or a process that met an assertion, is not waited for."""
_MET = 3
"""How a process ends that has met its assertion."""
_FORK = multiprocessing.get_context("fork")  # torch is imported once, and CUDA is initialized in the children alone


def witness(pipe: Connection, longest: Any, steps: Any) -> None:
    """Add one to a number on the GPU, again and again, and count that; ``longest`` is the longest step of a round, in seconds."""
    import torch

    number = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    pipe.send("ready")
    parent = os.getppid()
    while os.getppid() == parent:
        began = time.monotonic()
        number += 1
        torch.cuda.synchronize()
        longest.value = max(longest.value, time.monotonic() - began)
        steps.value += 1
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
    parent = os.getppid()
    while not pipe.poll() and os.getppid() == parent:
        module(ids)
        torch.cuda.synchronize()
    ids[0, 0] = VOCABULARY
    module(ids)
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        while stays and os.getppid() == parent:
            time.sleep(0.1)
        os._exit(_MET)
    os._exit(1)


def started(target: Any, *given: Any) -> tuple[Any, Connection]:
    """Return a process, and the pipe to it."""
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=target, args=(theirs, *given), daemon=True)
    process.start()
    return process, ours


def one_round(longest: Any, steps: Any, *, stays: bool, after: float | None) -> float:
    """Return the longest that the GPU stood still: after an assertion, and after that of the other process ``after`` seconds later."""
    pair = [started(victim, stays), started(victim, False)]
    for _, pipe in pair:
        pipe.recv()
    stepped(steps)
    longest.value = 0.0
    (first, to_first), (second, to_second) = pair
    to_first.send("fault")
    if after is not None:
        time.sleep(after)
        to_second.send("fault")
    for process in [*([] if stays else [first]), *([] if after is None else [second])]:
        process.join(_LONGEST)  # it ends with the stall
        if process.exitcode != _MET:
            raise RuntimeError(f"no assertion was met: a process ended with {process.exitcode}")
    time.sleep(0.3)
    stepped(steps)  # a stall that has begun is counted at its end
    for process, _ in pair:
        process.kill()
        process.join()
    return float(longest.value)


def stepped(steps: Any) -> None:
    """Wait until the witness has begun a step after now, and ended it."""
    until, deadline = steps.value + 2, time.monotonic() + _LONGEST
    while steps.value < until:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the witness has been in one step for {_LONGEST:g} s, or has ended")
        time.sleep(0.005)


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="of each way (default %(default)s)")
    given = parser.parse_args()
    import torch  # noqa: F401 - once, and not in each child

    longest, steps = _FORK.Value("d", 0.0), _FORK.Value("q", 0)
    watching, pipe = started(witness, longest, steps)
    pipe.recv()
    print(f"{'the first process':20} {'the second one faults after':28} {'rounds with a stall':20} longest")
    for stays, after in ((False, None), (True, 0.3), (False, 0.1), (False, 0.3), (False, 1.0)):
        found = [one_round(longest, steps, stays=stays, after=after) for _ in range(given.rounds)]
        stalls = sum(each > _STALL for each in found)
        when = "-" if after is None else f"{after:g} s"
        print(f"{'stays' if stays else 'ends':20} {when:28} {f'{stalls} of {given.rounds}':20} {max(found):.2f} s", flush=True)
    watching.kill()


if __name__ == "__main__":
    main()
