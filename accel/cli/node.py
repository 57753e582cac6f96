"""``python -m accel node``: starts the children of devices that services on other machines open here."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from accel.actors import ActorSystem
from accel.cli.serve_log import FORMATS, LEVELS, logging_to_stderr
from accel.errors import BackendUnavailableError, InvalidArgumentError
from accel.node.agent import Agent
from accel.node.client import is_loopback, split_address
from accel.node.handshake import find_token

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BACKLOG = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--listen",
        required=True,
        metavar="HOST:PORT",
        help="the address of this machine that services connect to; port 0 takes a free one. The token is in ACCEL_TOKEN, or in the file that "
        "ACCEL_TOKEN_FILE names",
    )
    parser.add_argument(
        "--keep",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="for which durable memory is kept after a connection was lost (default: 30)",
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate chain of this machine (PEM)")
    parser.add_argument("--tls-key", metavar="FILE", help="its private key, where that is not in the same file")
    parser.add_argument(
        "--no-tls",
        action="store_true",
        help="listen beyond this machine without TLS: in a network that is closed to others: what is sent can be read and changed there",
    )
    parser.add_argument("--log-format", choices=FORMATS, help="how log lines are written to standard error (default: console)")
    parser.add_argument("--log-level", choices=LEVELS, help="the lowest level that is logged (default: info)")


async def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it.

    Raises
    ------
    InvalidArgumentError
        An argument, or the token, is wrong.
    BackendUnavailableError
        The address cannot be listened at.
    """
    host, port = split_address(arguments.listen)
    if not 0 <= arguments.keep < float("inf"):
        raise InvalidArgumentError(f"--keep is {arguments.keep}", remedy="Give seconds.")
    tls, certificate = _load_certificate(arguments.tls_cert, arguments.tls_key)
    if tls is None and not arguments.no_tls and not is_loopback(host):
        raise InvalidArgumentError(
            f"{host} is reached by other machines, and what is sent to it would not be encrypted",
            remedy="Give --tls-cert and --tls-key; or --no-tls, in a network that is closed to others: what is sent can be read and changed there.",
        )
    token = find_token()
    with logging_to_stderr(arguments.log_format, arguments.log_level), _listening_socket(host, port) as listening:
        bound_host, bound_port = listening.getsockname()[:2]
        print(f"accel node listens at {bound_host}:{bound_port}, {'with TLS' if tls else 'without TLS'}", flush=True)
        async with ActorSystem("node") as system:
            serving = asyncio.ensure_future(Agent(system, token, keep=arguments.keep, tls=tls, certificate=certificate).serve(listening))
            loop = asyncio.get_running_loop()
            for number in _SIGNALS:
                loop.add_signal_handler(number, serving.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
    return 0


def _load_certificate(certificate: str | None, key: str | None) -> tuple[ssl.SSLContext | None, bytes]:
    """Return how connections are encrypted, and this machine's certificate, DER; ``None``: not at all."""
    if certificate is None:
        if key is not None:
            raise InvalidArgumentError("--tls-key without --tls-cert", remedy="Give both, or none.")
        return None, b""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        for path in filter(None, (certificate, key)):
            Path(path).open("rb").close()  # whose error names the file, as that of load_cert_chain() does not
        context.load_cert_chain(certificate, key)
        pem = Path(certificate).read_text(encoding="latin-1")  # there may be comments between the certificates
        own = pem[
            pem.index(ssl.PEM_HEADER) : pem.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        ]  # the first of a chain is that of this machine
        return context, ssl.PEM_cert_to_DER_cert(own)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise InvalidArgumentError(
            f"the certificate cannot be used: {error}", remedy="Give PEM files of a certificate and its key."
        ) from error


def _listening_socket(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that listens."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket(family, kind, protocol))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            undo.pop_all()
    except OSError as error:
        raise BackendUnavailableError(
            f"{host}:{port} cannot be listened at: {error}",
            library="os",
            remedy="Give an address of this machine, with a port that is free.",
        ) from error
    return sock
