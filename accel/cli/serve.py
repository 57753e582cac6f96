"""``python -m accel serve``: the example service, digits over HTTP, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import signal
import socket
import sys
from typing import TYPE_CHECKING

from accel.cli.digits import load_digits
from accel.registry import find_device
from accel.testing import FaultPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["add_arguments", "run"]

FRAMEWORKS = ("fastapi", "aiohttp")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--framework", choices=FRAMEWORKS, default="fastapi", help="what serves (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen on; 0 takes a free one (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, or a UUID (default: %(default)s)")
    parser.add_argument(
        "--fault-at", type=_count, metavar="N", help="poison the context at the N-th op from when it serves, to watch it survive"
    )


def _port(text: str) -> int:
    return _number(text, 0, (1 << 16) - 1)


def _count(text: str) -> int:
    return _number(text, 1)


def _number(text: str, least: int, most: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"must be a whole number {limits}, not {text!r}")
    return value


async def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; requests in flight are then answered.

    Returns
    -------
    int
        0: it was asked to end. 1: it could not listen.

    Raises
    ------
    AccelError
        The device is not there, or cannot be opened.
    ImportError
        The framework, or its server, is not installed.
    """
    service = importlib.import_module(f"accel.cli.digits_service_{arguments.framework}")
    faults = FaultPlan()
    # What may be missing is looked for first: inside a server's start its absence would be a traceback in that server's log.
    _, description = await asyncio.to_thread(find_device, arguments.device)
    digits = await asyncio.to_thread(load_digits)
    try:
        family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
        bound = socket.create_server((arguments.host, arguments.port), family=family, backlog=512)
    except OSError as error:
        print(f"accel: cannot listen on {arguments.host}:{arguments.port}: {error.strerror}", file=sys.stderr)
        return 1
    port = bound.getsockname()[1]
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host

    def started() -> None:
        if arguments.fault_at is not None:
            faults.poison_at(faults.count + arguments.fault_at)  # the ops that fitted the model are counted already
        print(f"Serving digits with {arguments.framework} on {description.spec} at http://{host}:{port} (Ctrl-C ends it)", flush=True)

    app = service.make_app(digits, arguments.device, faults=faults)
    with bound, _stop_on_signals() as stop:
        await service.serve(app, bound, stop, started)
    return 0


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[asyncio.Event]:
    """Turn the first signal into an event; a second one ends the program the hard way."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def heard() -> None:
        stop.set()
        restore()

    def restore() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    for number in SIGNALS:
        loop.add_signal_handler(number, heard)
    try:
        yield stop
    finally:
        restore()
