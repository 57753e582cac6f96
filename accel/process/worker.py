"""The program of a child process.

``python -m accel.process.worker FD PARENT_PID MODULE:FUNCTION [--uvloop | --forkserver]``

It binds its life to its parent's (see ``accel._child``, which runs first), imports ``MODULE`` and
runs the coroutine function ``FUNCTION(sock)`` on an event loop of its own. ``sock`` is the
non-blocking stream socket that was inherited as descriptor ``FD``; the function should return at
its end of file. Started by :class:`accel.process.child.ChildProcess`.

With ``--forkserver`` the process answers requests to fork, and ``FUNCTION(data)``, a plain
function, imports what the forks need; see :mod:`accel.process.forkserver`. A fork returns to this
module and goes on as a started process does.

Exit codes
----------
0
    The function returned.
1
    The function raised; the traceback is on stderr.
64
    The command line, or the descriptor that it names, is wrong.
65
    The function cannot be imported; the traceback is on stderr.
66
    The parent had ended before the child could bind its life to it.

``SystemExit`` in the function ends the process with its own code. SIGTERM ends it at once. SIGINT
is ignored: Ctrl-C is for the parent.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import importlib
import os
import socket
import sys
import traceback
from typing import TYPE_CHECKING, Any

from accel import _child

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from accel.process.forkserver import ForkedTarget

__all__ = ["main"]


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the command line; exits as argparse does if they are wrong."""
    parser = argparse.ArgumentParser(prog=f"python -m {_child.WORKER}", description="A child process of accel; not for use by hand.")
    parser.add_argument("fd", type=int, help="the inherited socket")
    parser.add_argument("parent", type=int, help="process id of the parent")
    parser.add_argument("target", help="MODULE:FUNCTION to run")
    parser.add_argument("--uvloop", action="store_true", help="run on uvloop's event loop")
    parser.add_argument("--forkserver", action="store_true", help="fork children that run other functions")
    parser.add_argument("--python-path", help="the parent's own PYTHONPATH")
    return parser.parse_args(arguments)


def _restore_path(python_path: str | None) -> None:
    """Set PYTHONPATH to what it is in the parent.

    The parent passes its sys.path in it, which processes that this one starts must not inherit.
    """
    sys.path[:] = dict.fromkeys(sys.path)  # each folder once
    os.environ.pop("PYTHONPATH", None)
    if python_path is not None:
        os.environ["PYTHONPATH"] = python_path


def _import_function(target: str) -> Callable[..., Any]:
    """Import ``"MODULE:FUNCTION"``. Raises what the import raises."""
    module, _, path = target.partition(":")
    gc.disable()  # objects made by imports live on; collections would only traverse them
    try:
        target_object: Any = importlib.import_module(module)
    finally:
        gc.enable()
    for name in path.split("."):
        target_object = getattr(target_object, name)
    if not callable(target_object):
        raise TypeError(f"{target} is no function")
    function: Callable[..., Any] = target_object
    return function


async def _run_target(function: Callable[[socket.socket], Coroutine[Any, Any, None]], sock: socket.socket) -> int:
    """Run the target, and return the process's exit code."""
    try:
        await function(sock)
    except Exception:
        traceback.print_exc()
        return 1
    else:
        return 0


def _run(options: argparse.Namespace | ForkedTarget, sock: socket.socket) -> int:
    """Import the target, run it on a loop of its own, and return the process's exit code.

    What it raises is printed to stderr, which the parent reads.
    """
    try:
        function = _import_function(options.target)
    except Exception:
        traceback.print_exc()
        return _child.TARGET
    factory = None
    if options.uvloop:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_run_target(function, sock))


def main(arguments: list[str]) -> int:
    """Run a child process and return its exit code.

    Parameters
    ----------
    arguments
        The command line without the program.
    """
    try:
        options = _parse(arguments)
    except SystemExit as end:
        return _child.USAGE if end.code else 0
    faulthandler.enable()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    _restore_path(options.python_path)
    try:
        os.set_inheritable(options.fd, False)
        sock = socket.socket(fileno=options.fd)
    except OSError as error:
        print(f"descriptor {options.fd} is not the socket of a child process: {error}", file=sys.stderr)
        return _child.USAGE
    target: argparse.Namespace | ForkedTarget = options
    if options.forkserver:
        from accel.process.forkserver import Forkserver

        # This returns in the children that are forked, which go on as started ones do.
        target = Forkserver(sock, _import_function(options.target)).serve()
        sock = socket.socket(fileno=target.fd)
    with sock:
        sock.setblocking(False)
        return _run(target, sock)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
