"""P31: what a viewer of the status page costs an idle service, in processor time and in bytes; on the CPU backend, without a GPU.

Run: ``python benchmarks/status_page.py``. The viewer asks as a browser does: it reads each stream to its end and asks for the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import time
from pathlib import Path

import aiohttp

MUST_CPU, MUST_BYTES = 0.01, 30 * 1024
RETRY = 0.25


def seconds_of(pid: int) -> float:
    """Return the processor time of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


async def view(url: str, until: float) -> int:
    """Read streams until then, and return how many bytes came."""
    received, last = 0, ""
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < until:
            async with session.get(f"{url}/accel/events", headers={"Last-Event-ID": last}) as answer:
                received += sum(len(f"{name}: {value}\r\n") for name, value in answer.headers.items())
                async for line in answer.content:
                    received += len(line)
                    if line.startswith(b"id: "):
                        last = line[4:].strip().decode()
            await asyncio.sleep(RETRY)
    return received


async def main() -> int:
    """Measure the service alone, then with one viewer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the two parts (default: %(default)s)")
    seconds: float = parser.parse_args().seconds
    command = (sys.executable, "-m", "accel", "serve", "--device", "cpu", "--port", "0")
    service = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
    try:
        assert service.stdout is not None
        found = re.search(r"http://\S+", (await service.stdout.readline()).decode())
        assert found is not None
        costs, received = [], 0
        for is_viewed in (False, True):
            before, began = seconds_of(service.pid), time.monotonic()
            if is_viewed:
                received = await view(found[0], began + seconds)
            else:
                await asyncio.sleep(seconds)
            costs.append((seconds_of(service.pid) - before) / (time.monotonic() - began))
    finally:
        service.terminate()
        await service.wait()
    cpu, rate = costs[1] - costs[0], received / seconds
    print(
        f"P31: a viewer costs {100 * cpu:.2f} % of a core (must <= 1 %) and {rate / 1024:.1f} KiB/s (must <= 30); alone {100 * costs[0]:.2f} %"
    )
    return 0 if cpu <= MUST_CPU and rate <= MUST_BYTES else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
