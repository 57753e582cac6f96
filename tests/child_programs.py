"""What the child processes of the tests run, and a parent to be killed: ``python -m tests.child_programs TARGET [asyncio | uvloop]``."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

PR_SET_PDEATHSIG = 1


def send(sock: socket.socket, data: bytes) -> None:
    sock.setblocking(True)
    sock.sendall(data)
    sock.setblocking(False)


async def until_end(sock: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(sock, 65536):
        pass


async def echo(sock: socket.socket) -> None:
    while data := await asyncio.get_running_loop().sock_recv(sock, 65536):
        await asyncio.get_running_loop().sock_sendall(sock, data)


async def returns(sock: socket.socket) -> None:
    pass


async def raises(sock: socket.socket) -> None:
    raise LookupError("no such thing")


async def exits(sock: socket.socket) -> None:
    sys.exit(17)


async def writes_much(sock: socket.socket) -> None:
    for number in range(100_000):
        print(f"line {number}", file=sys.stderr if number % 2 else sys.stdout)
    raise LookupError("after much")


async def sends_and_dies(sock: socket.socket) -> None:
    send(sock, b"x" * 100_000)
    os.kill(os.getpid(), signal.SIGKILL)


async def faults(sock: socket.socket) -> None:
    ctypes.string_at(0)


async def describes_itself(sock: socket.socket) -> None:
    targets = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of the listing
            continue
    with open("/proc/self/status", encoding="ascii") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    about = {
        "cwd": os.getcwd(),
        "umask": status["Umask"],
        "signals": [status["SigIgn"], status["SigCgt"]],
        "blocked": status["SigBlk"],
        "fds": targets,
        "sock": sock.fileno(),
        "sid": os.getsid(0),
        "pid": os.getpid(),
        "loop": type(asyncio.get_running_loop()).__module__,
        "modules": sorted(sys.modules),
        "path": sys.path,
        "env": dict(os.environ),
        "sigint": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "inheritable": [fd for fd in map(int, targets) if fd > 2 and os.get_inheritable(fd)],
    }
    send(sock, json.dumps(about).encode() + b"\n")
    await until_end(sock)


async def draws(sock: socket.socket) -> None:
    import random

    import numpy as np

    from tests.fork_support import IMPORTED_BY

    send(sock, json.dumps({"imported_by": IMPORTED_BY, "random": random.random(), "numpy": np.random.random()}).encode() + b"\n")
    await until_end(sock)


async def multiplies(sock: socket.socket) -> None:
    import numpy as np

    seed = int(await asyncio.get_running_loop().sock_recv(sock, 100))
    a = np.random.default_rng(seed).standard_normal((700, 700))
    total = float(np.abs(a @ a).sum())
    send(sock, json.dumps({"sum": total, "threads": len(os.listdir("/proc/self/task"))}).encode() + b"\n")
    await until_end(sock)


async def uses_accel(sock: socket.socket) -> None:
    import accel

    before = "accel.device" in sys.modules
    names = [name for name in accel.__all__ if getattr(accel, name) is None]
    try:
        missing = str(accel.no_such_name)  # type: ignore[attr-defined]
    except AttributeError as error:
        missing = str(error)
    async with accel.System() as system:
        device = await system.open_device("cpu")
        kind = type(device) is accel.Device
    send(sock, json.dumps([before, names, missing, kind]).encode() + b"\n")


async def starts_a_child(sock: socket.socket) -> None:
    import accel
    from accel.process.child import ChildProcess

    async with accel.System() as system:
        try:
            await ChildProcess.start(system, "tests.child_programs:until_end")
        except accel.AccelError as error:
            send(sock, json.dumps([type(error).__name__, str(error)]).encode() + b"\n")
    await until_end(sock)


def ready_then(sock: socket.socket) -> None:
    send(sock, b"ready\n")


async def ignores_socket(sock: socket.socket) -> None:
    ready_then(sock)
    await asyncio.Event().wait()


async def spins_in_c(sock: socket.socket) -> None:
    ready_then(sock)
    sum(itertools.repeat(1))  # keeps the GIL; no bytecode runs, so no signal handler of Python's either


async def sleeps_in_c(sock: socket.socket) -> None:
    ready_then(sock)
    time.sleep(1000)


async def unbound_sleeps_in_c(sock: socket.socket) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
    await sleeps_in_c(sock)


async def parent(target: str, *, uvloop: bool) -> None:
    from accel.actors import ActorSystem
    from accel.process.child import ChildProcess

    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"tests.child_programs:{target}", uvloop=uvloop)
        if target != "returns":
            assert await asyncio.get_running_loop().sock_recv(child.sock, 100)
        print(child.pid, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[2] == "uvloop":
        import uvloop

        uvloop.run(parent(sys.argv[1], uvloop=True))
    else:
        asyncio.run(parent(sys.argv[1], uvloop=False))
