"""``python -m accel serve``: models, functions or an application over HTTP, until Ctrl-C, SIGTERM or SIGHUP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from accel._log import get_logger
from accel.cli.devices import list_devices
from accel.cli.listening import Listener, default_limit
from accel.cli.serve_config import add_file_options, buckets_of, input_of
from accel.cli.serve_log import FORMATS, LEVELS, logging_to_stderr, with_access_log
from accel.cli.servers import serve_aiohttp, serve_asgi
from accel.cli.targets import Target, find_target
from accel.errors import BackendUnavailableError, InvalidArgumentError
from accel.registry import find_device, find_specs
from accel.testing import FaultPlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["add_arguments", "run"]

logger = get_logger()

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HOST, _PORT, _HEAD_TIMEOUT = "127.0.0.1", 8000, 10.0
DIGITS = ("accel.cli.digits_service:digits", "accel.cli.digits_service:samples")

_MODEL_OPTIONS = ("max_items", "max_delay", "max_pending")
_DEVICE_OPTIONS = {"device_host": "host", "standby": "standby", "spares": "spares", "on_lost": "on_lost"}
"""Name -> the option of :func:`accel.integrations.fastapi.lifespan`."""
_LOAD_OPTIONS = ("weights", "input", "buckets")
_OPTIONS = (*_LOAD_OPTIONS, *_MODEL_OPTIONS, *_DEVICE_OPTIONS, "device", "replicas", "timeout", "body_limit", "admin_token", "fault_at")
"""What an application cannot be told."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="module:name of a model (a function that builds a torch module, or a class with open and run), of a function of `device` that "
        "returns a model or a service, of a function of a request's JSON, or of an ASGI or aiohttp application; or a model.onnx "
        "(default: the digits example)",
    )
    parser.add_argument(
        "--weights", action="append", metavar="FILE", help="weights of the model: .safetensors or of torch.save; repeatable"
    )
    parser.add_argument(
        "--input",
        action="append",
        type=input_of,
        metavar="NAME=DIM,DIM:DTYPE",
        help="an input of the model, such as image=batch,64:float32; a number after a third colon fills it up; repeatable",
    )
    parser.add_argument(
        "--buckets",
        action="append",
        type=buckets_of,
        metavar="DIM=N,N",
        help="lengths that a dimension is padded to: batch=1,8,64; repeatable",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a TOML file of these options; of a pyproject.toml, the table [tool.accel.serve], which is read without this where no TARGET is named",
    )
    parser.add_argument("--host", help=f"address to listen on (default: {_HOST})")
    parser.add_argument("--port", type=_port, help=f"port to listen on; 0 takes a free one (default: {_PORT})")
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:1, or a UUID; several with commas, or all (default: auto)")
    parser.add_argument(
        "--replicas", type=_count, metavar="N", help="serve on the first N devices of --device, or N times on the one that it names"
    )
    parser.add_argument("--device-host", metavar="HOST", help="where the context lives: auto, inline or process (default: auto)")
    parser.add_argument("--standby", metavar="WHAT", help="the spare child that takes over, as for open_device (default: none)")
    parser.add_argument("--spares", type=_count, metavar="N", help="how many spare children there are, with --standby (default: 1)")
    parser.add_argument("--on-lost", metavar="WHAT", help="when the device is lost: stay, reopen or exit (default: reopen)")
    parser.add_argument("--max-items", type=_count, metavar="N", help="items of a model's batch (default: its largest bucket)")
    parser.add_argument("--max-delay", type=_seconds, metavar="S", help="seconds that an item may wait for others (default: 0.002)")
    parser.add_argument(
        "--max-pending", type=_count, metavar="N", help="items that may wait; more are refused with 429 (default: 16 batches)"
    )
    _add_clients(parser)
    parser.add_argument("--log-format", choices=FORMATS, help="of the lines on standard error (default: console)")
    parser.add_argument("--log-level", choices=LEVELS, help="the least that is logged (default: info)")
    parser.add_argument("--access-log", action="store_true", default=None, help="log a line for each request")
    parser.add_argument(
        "--fault-at", type=_count, metavar="N", help="poison the context at the N-th op from when it serves, to watch it survive"
    )


def _add_clients(parser: argparse.ArgumentParser) -> None:
    """Declare what clients may have, and see."""
    parser.add_argument("--timeout", type=_timeout, metavar="S", help="seconds for an answer of a model (default: 30)")
    parser.add_argument("--body-limit", type=_count, metavar="N", help="the most bytes of a request (default: 1 MiB)")
    parser.add_argument(
        "--max-connections",
        type=_count,
        metavar="N",
        help="connections that are open at a time (default: half of ulimit -n, less 32, at most 4096)",
    )
    parser.add_argument(
        "--head-timeout", type=_timeout, metavar="S", help="seconds in which the head of a request must arrive (default: 10)"
    )
    parser.add_argument(
        "--admin-token",
        metavar="TOKEN",
        help="what a client must present to see the page and the metrics, which else are answered to this machine alone "
        "(default: ACCEL_ADMIN_TOKEN of the environment, which a list of processes does not show)",
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


class _Stop(asyncio.Event):
    """Set by a signal, whose name is the reason."""

    reason = "an error"


@dataclass(slots=True)
class _Place:
    """Where it listens, until when, what it says, and whether it has."""

    bound: socket.socket
    stop: _Stop
    names: str
    config: str | None
    since: float | None = None

    def say(self, where: str = "", **pairs: object) -> None:
        """Say that it serves, on standard output for people and in the log with the ``pairs``."""
        self.since = time.monotonic()
        # A full collection holds the loop while it walks through all that was imported, for some 50 ms. What is there now stays; later ones leave it out.
        gc.collect()
        gc.freeze()
        host, port = self.bound.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"Serving {self.names}{where} at http://{host}:{port} (Ctrl-C ends it)", flush=True)
        logger.info("serving_began", serves=self.names, url=f"http://{host}:{port}", config=self.config, **pairs)

    def end(self) -> None:
        """Log that it serves no more, if it did."""
        if self.since is not None:
            seconds = round(time.monotonic() - self.since, 3)
            logger.info("serving_ended", serves=self.names, reason=self.stop.reason, seconds=seconds)


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
        config = await asyncio.to_thread(add_file_options, arguments, add_arguments)
        targets = [await asyncio.to_thread(find_target, text) for text in arguments.targets or DIGITS]
        _check(targets, arguments)
    except InvalidArgumentError as error:
        print(f"accel: {error}", file=sys.stderr)
        return 2
    host, port = arguments.host or _HOST, _PORT if arguments.port is None else arguments.port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        print(f"accel: cannot listen on {host}:{port}: {error.strerror}", file=sys.stderr)
        return 1
    with (
        Listener(listening, arguments.max_connections or default_limit()) as bound,
        logging_to_stderr(arguments.log_format, arguments.log_level),
        _stop_on_signals() as stop,
    ):
        place = _Place(bound, stop, ", ".join(target.name for target in targets), config)
        serving = asyncio.create_task(_serve(targets, arguments, place), name="accel-serve-targets")
        stopping = asyncio.create_task(stop.wait(), name="accel-serve-signal")
        try:
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            if place.since is not None:
                await asyncio.wait([serving])
        finally:
            # A signal while a model is loaded ends the loading.
            for task in (serving, stopping):
                task.cancel()
            await asyncio.wait([serving, stopping])
            place.end()
        return 0 if serving.cancelled() else serving.result()


def _check(targets: Sequence[Target], arguments: argparse.Namespace) -> None:
    """Raise unless these can be served together, with these options."""
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        raise InvalidArgumentError(
            f"two of {', '.join(names)} have one name", remedy="Each is served at its name: give them different ones."
        )
    _check_models(targets, arguments)
    _place(arguments)
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


def _check_models(targets: Sequence[Target], arguments: argparse.Namespace) -> None:
    """Raise unless the options of a model are there for a model that needs them, and for nothing else; so with those of the log."""
    if arguments.access_log and arguments.log_level in ("warning", "error"):
        raise InvalidArgumentError(
            f"--access-log writes at level info, which --log-level {arguments.log_level} leaves out", remedy="Leave one of the two out."
        )
    for name in ("input", "buckets"):
        names = [name for name, _ in getattr(arguments, name) or ()]
        if len(set(names)) < len(names):
            raise InvalidArgumentError(f"--{name} is given twice for one of {', '.join(names)}", remedy="Give it once.")
    given = [f"--{name}" for name in _LOAD_OPTIONS if getattr(arguments, name)]
    other = next((target for target in targets if target.kind not in ("model", "onnx")), None)
    if given and not arguments.targets:
        raise InvalidArgumentError(f"{', '.join(given)} is for a model, and none is named", remedy="Name it: accel serve app:build.")
    if given and other is not None and not other.is_application:
        raise InvalidArgumentError(
            f"{other.text!r} is a function, which takes no {', '.join(given)}",
            remedy="Name a model: a function that builds one without a parameter, or a class with `open` and `run`.",
        )
    if given and len(targets) > 1:
        raise InvalidArgumentError(
            f"{', '.join(given)} is for one model, and {len(targets)} are named",
            remedy="Load each in a function of `device` that returns it.",
        )
    if targets[0].kind == "model" and not arguments.input:
        raise InvalidArgumentError(
            f"{targets[0].text!r} is a model, whose inputs are not known", remedy="Give each: --input image=batch,64:float32."
        )


def _place(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return which device or pool is opened: options of :func:`accel.integrations.fastapi.lifespan`.

    Raises
    ------
    InvalidArgumentError
        The number of replicas is given for a list of devices.
    """
    device, replicas = arguments.device or "auto", arguments.replicas
    if "," in device:
        if replicas is not None:
            raise InvalidArgumentError(f"--replicas {replicas} is given for {device}", remedy="Name as many devices, without --replicas.")
        return {"pool": [spec.strip() for spec in device.split(",")]}
    if device != "all" and replicas is None:
        return {"device": device}
    return {"pool": "auto" if device == "all" else device, "count": replicas}


def _load_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what :meth:`accel.Device.load_model` is given besides the model."""
    weights = arguments.weights or [None]
    inputs, buckets = (dict(pairs) if pairs else None for pairs in (arguments.input, arguments.buckets))
    return {"weights": weights[0] if len(weights) == 1 else weights, "inputs": inputs, "buckets": buckets}


def _why(spec: str) -> str:
    """Return why this device is the one that serves. May block."""
    if spec != "auto":
        return f"--device {spec}"
    lacking = [
        f"{name}: {found.message if isinstance(found, BackendUnavailableError) else 'no device'}"
        for name, found in list_devices().items()
        if not (isinstance(found, list) and found)
    ]
    return "; ".join(["auto, the best there is", *lacking])


async def _serve(targets: Sequence[Target], arguments: argparse.Namespace, place: _Place) -> int:
    first = targets[0]
    head_timeout = arguments.head_timeout or _HEAD_TIMEOUT
    logs = bool(arguments.access_log)
    if first.is_application:
        started = partial(place.say, why="the application opens its own device")
        if first.kind == "aiohttp":
            await serve_aiohttp(first.value, place.bound, place.stop, started, head_timeout=head_timeout, access_log=logs)
            return 0
        app = with_access_log(first.value) if logs else first.value
        return 0 if await serve_asgi(app, place.bound, place.stop, started, head_timeout=head_timeout, lifespan="auto") else 1
    from accel.cli.served_app import make_app

    # What may be missing is looked for first: while the device opens its absence would be a longer story.
    place_options = _place(arguments)
    pool = place_options.get("pool")
    first_spec = place_options["device"] if pool is None else (await asyncio.to_thread(find_specs, pool, place_options.get("count")))[0]
    _, description = await asyncio.to_thread(find_device, first_spec)
    why = await asyncio.to_thread(_why, arguments.device or "auto")
    faults = FaultPlan()

    def serves() -> None:
        if arguments.fault_at is not None:
            faults.poison_at(faults.count + arguments.fault_at)  # the ops that loaded and fitted are counted already
        infos = [device.info() for device in app.state.accel.devices]
        names, hosts = ", ".join(info.name for info in infos), ", ".join(sorted({info.host for info in infos}))
        place.say(f" on {names}", device=names, name=description.name, host=hosts, why=why)

    options = {name: getattr(arguments, name) for name in _MODEL_OPTIONS if getattr(arguments, name) is not None}
    own = {option: getattr(arguments, name) for name, option in _DEVICE_OPTIONS.items() if getattr(arguments, name) is not None}
    own = {"on_lost": "reopen", **own}  # nothing else would bring it back: no application is there that could
    app = make_app(
        targets,
        place_options,
        options,
        _load_options(arguments),
        timeout=arguments.timeout or 30.0,
        body_limit=arguments.body_limit or 1 << 20,
        admin_token=os.environ.get("ACCEL_ADMIN_TOKEN") if arguments.admin_token is None else arguments.admin_token,
        faults=faults,
        **own,
    )
    # Entered here and not by the server, so that what goes wrong is raised.
    async with app.router.lifespan_context(app):
        served = with_access_log(app) if logs else app
        ends = app.state.accel_page.close
        await serve_asgi(served, place.bound, place.stop, serves, head_timeout=head_timeout, lifespan="off", stopping=ends)
    return 0


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[_Stop]:
    """Turn the first signal into an event; a second SIGINT or SIGTERM ends the program the hard way.

    SIGHUP comes twice where a terminal closes, and with SIGTERM from systemd, so that it never ends it so. Where it is ignored (nohup) it stays so.
    """
    loop, stop = asyncio.get_running_loop(), _Stop()
    numbers = [number for number in SIGNALS if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]

    def heard(heard_signal: signal.Signals) -> None:
        stop.reason = heard_signal.name
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, heard, number)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
