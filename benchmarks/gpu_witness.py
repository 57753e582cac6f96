"""Tells when a GPU keeps another process waiting: ``python benchmarks/gpu_witness.py [--longer 0.15] & ``, beside any other benchmark; needs torch.

It adds one to a number on the GPU again and again, every 10 ms, and prints when that took long: the seconds since the epoch at which it began, as the logs of
other benchmarks have them, and how long it took. What stands still here too is no fault of the process that is measured. Ends when it is killed.
"""

from __future__ import annotations

import argparse
import time


def main() -> None:
    """Watch until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longer", type=float, default=0.15, help="seconds from which on a step is printed (default %(default)s)")
    given = parser.parse_args()
    import torch

    number = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    print(f"{time.time():.3f} watching", flush=True)
    while True:
        began = time.time()
        number += 1
        torch.cuda.synchronize()
        took = time.time() - began
        if took > given.longer:
            print(f"{began:.3f} {took:.3f} s", flush=True)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
