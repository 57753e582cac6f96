"""``python -m accel serve``: models, functions or an application over HTTP, until Ctrl-C, SIGTERM or SIGHUP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import signal
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel.cli.listening import Listener, default_limit
from accel.cli.servers import serve_aiohttp, serve_asgi
from accel.cli.targets import Target, find_target
from accel.errors import InvalidArgumentError
from accel.registry import find_device
from accel.testing import FaultPlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["add_arguments", "run"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DIGITS = ("accel.cli.digits_service:digits", "accel.cli.digits_service:samples")

_MODEL_OPTIONS = ("max_items", "max_delay", "max_pending")
_DEVICE_OPTIONS = {"device_host": "host", "standby": "standby", "spares": "spares", "on_lost": "on_lost"}
"""Name -> the option of :func:`accel.integrations.fastapi.lifespan`."""
_OPTIONS = (*_MODEL_OPTIONS, *_DEVICE_OPTIONS, "device", "timeout", "body_limit", "fault_at")
"""What an application cannot be told."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="module:name of a function of `device` that returns a model or a service, of a function of a request's JSON, or of an ASGI or aiohttp "
        "application; or a model.onnx (default: the digits example)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen on; 0 takes a free one (default: %(default)s)")
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:1, or a UUID (default: auto)")
    parser.add_argument("--device-host", metavar="HOST", help="where the context lives: auto, inline or process (default: auto)")
    parser.add_argument("--standby", metavar="WHAT", help="the spare child that takes over, as for open_device (default: none)")
    parser.add_argument("--spares", type=_count, metavar="N", help="how many spare children there are, with --standby (default: 1)")
    parser.add_argument("--on-lost", metavar="WHAT", help="when the device is lost: stay, reopen or exit (default: reopen)")
    parser.add_argument("--max-items", type=_count, metavar="N", help="items of a model's batch (default: its largest bucket)")
    parser.add_argument("--max-delay", type=_seconds, metavar="S", help="seconds that an item may wait for others (default: 0.002)")
    parser.add_argument(
        "--max-pending", type=_count, metavar="N", help="items that may wait; more are refused with 429 (default: 16 batches)"
    )
    parser.add_argument("--timeout", type=_timeout, metavar="S", help="seconds for an answer of a model (default: 30)")
    parser.add_argument("--body-limit", type=_count, metavar="N", help="the most bytes of a request (default: 1 MiB)")
    parser.add_argument(
        "--max-connections",
        type=_count,
        metavar="N",
        help="connections that are open at a time (default: half of ulimit -n, less 32, at most 4096)",
    )
    parser.add_argument(
        "--head-timeout", type=_timeout, default=10.0, metavar="S", help="seconds in which the head of a request must arrive (default: 10)"
    )
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


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds, at least 0, not {text!r}")
    return value


def _timeout(text: str) -> float:
    value = _seconds(text)
    if not value:
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return value


@dataclass(slots=True)
class _Place:
    """Where it listens, until when, what it says, and whether it has."""

    bound: socket.socket
    stop: asyncio.Event
    names: str
    serves: bool = False

    def say(self, device: str = "") -> None:
        """Say that it serves."""
        self.serves = True
        # A full collection holds the loop while it walks through all that was imported, for some 50 ms. What is there now stays; later ones leave it out.
        gc.collect()
        gc.freeze()
        host, port = self.bound.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"Serving {self.names}{device} at http://{host}:{port} (Ctrl-C ends it)", flush=True)


async def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP; requests in flight are then answered.

    Returns
    -------
    int
        0: it was asked to end. 1: it could not listen, or the application did not start. 2: what is named cannot be served, or not with these options.

    Raises
    ------
    AccelError
        The device is not there, or cannot be opened, or the model cannot be loaded.
    ImportError
        The framework, or its server, is not installed.
    """
    try:
        targets = [await asyncio.to_thread(find_target, text) for text in arguments.targets or DIGITS]
        _check(targets, arguments)
    except InvalidArgumentError as error:
        print(f"accel: {error}", file=sys.stderr)
        return 2
    try:
        family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
        listening = socket.create_server((arguments.host, arguments.port), family=family, backlog=512)
    except OSError as error:
        print(f"accel: cannot listen on {arguments.host}:{arguments.port}: {error.strerror}", file=sys.stderr)
        return 1
    with Listener(listening, arguments.max_connections or default_limit()) as bound, _stop_on_signals() as stop:
        place = _Place(bound, stop, ", ".join(target.name for target in targets))
        serving = asyncio.create_task(_serve(targets, arguments, place), name="accel-serve-targets")
        stopping = asyncio.create_task(stop.wait(), name="accel-serve-signal")
        try:
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            if place.serves:
                await asyncio.wait([serving])
        finally:
            # A signal while a model is loaded ends the loading.
            for task in (serving, stopping):
                task.cancel()
            await asyncio.wait([serving, stopping])
        return 0 if serving.cancelled() else serving.result()


def _check(targets: Sequence[Target], arguments: argparse.Namespace) -> None:
    """Raise unless these can be served together, with these options."""
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        raise InvalidArgumentError(
            f"two of {', '.join(names)} have one name", remedy="Each is served at its name: give them different ones."
        )
    application = next((target for target in targets if target.is_application), None)
    if application is None:
        return
    if len(targets) > 1:
        raise InvalidArgumentError(f"{application.text!r} is an application, which is served alone", remedy="Serve the others elsewhere.")
    given = [f"--{name.replace('_', '-')}" for name in _OPTIONS if getattr(arguments, name) is not None]
    if given:
        raise InvalidArgumentError(
            f"{application.text!r} is an application, which opens its own device and takes no {', '.join(given)}",
            remedy="Set them where the application is made.",
        )


async def _serve(targets: Sequence[Target], arguments: argparse.Namespace, place: _Place) -> int:
    first = targets[0]
    if first.kind == "asgi":
        return (
            0
            if await serve_asgi(first.value, place.bound, place.stop, place.say, head_timeout=arguments.head_timeout, lifespan="auto")
            else 1
        )
    if first.kind == "aiohttp":
        await serve_aiohttp(first.value, place.bound, place.stop, place.say, head_timeout=arguments.head_timeout)
        return 0
    from accel.cli.served_app import make_app

    # What may be missing is looked for first: while the device opens its absence would be a longer story.
    spec = arguments.device or "auto"
    _, description = await asyncio.to_thread(find_device, spec)
    faults = FaultPlan()

    def started() -> None:
        if arguments.fault_at is not None:
            faults.poison_at(faults.count + arguments.fault_at)  # the ops that loaded and fitted are counted already
        place.say(f" on {description.spec}")

    options = {name: getattr(arguments, name) for name in _MODEL_OPTIONS if getattr(arguments, name) is not None}
    own = {option: getattr(arguments, name) for name, option in _DEVICE_OPTIONS.items() if getattr(arguments, name) is not None}
    own = {"on_lost": "reopen", **own}  # nothing else would bring it back: no application is there that could
    app = make_app(
        targets, spec, options, timeout=arguments.timeout or 30.0, body_limit=arguments.body_limit or 1 << 20, faults=faults, **own
    )
    # Entered here and not by the server, so that what goes wrong is raised.
    async with app.router.lifespan_context(app):
        await serve_asgi(app, place.bound, place.stop, started, head_timeout=arguments.head_timeout, lifespan="off")
    return 0


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[asyncio.Event]:
    """Turn the first signal into an event; a second SIGINT or SIGTERM ends the program the hard way.

    SIGHUP comes twice where a terminal closes, and with SIGTERM from systemd, so that it never ends it so. Where it is ignored (nohup) it stays so.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    numbers = [number for number in SIGNALS if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]

    def heard() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, heard)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
