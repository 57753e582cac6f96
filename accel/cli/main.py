"""The entry point: finds the command, runs it on an event loop of its own, and turns how it ended into an exit code."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from accel import AccelError, __version__, _startup
from accel.cli.extras import extra_of, install_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["COMMANDS", "Command", "main"]

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


class Command(NamedTuple):
    """A subcommand.

    Parameters
    ----------
    module
        Where its ``add_arguments`` and ``run`` are.
    summary
        What it does, in a line.
    """

    module: str
    summary: str


COMMANDS = {
    "doctor": Command("accel.cli.doctor", "say what is there, what is missing, and the command that fixes it"),
    "devices": Command("accel.cli.devices", "list the devices that can be opened"),
    "demo": Command("accel.cli.demo", "serve real digits while a request kills what computes it, beside a plain asyncio service"),
    "bench": Command("accel.cli.bench", "measure this machine beside raw twins, and hold the numbers against the budgets"),
    "node": Command("accel.cli.node", "start the children of devices that services on other machines open here"),
    "serve": Command("accel.cli.serve", "serve models, functions or an application over HTTP"),
}


def main(argv: Sequence[str] | None = None, commands: Mapping[str, Command] = COMMANDS) -> int:
    """Run a command and return the exit code.

    Parameters
    ----------
    argv
        The arguments after the program's name; ``None``: those of this process.
    commands
        Name -> command.

    Returns
    -------
    int
        0: done. 1: it failed. 2: wrong arguments, or an optional dependency is missing. 130: interrupted by Ctrl-C. A command may return
        codes of its own.
    """
    guarded = _startup.release()
    try:
        return _main(sys.argv[1:] if argv is None else list(argv), commands)
    finally:
        if guarded:
            _startup.guard_again()


def _main(words: list[str], commands: Mapping[str, Command]) -> int:
    try:
        code = _run(words, commands)
        # Here and not at the interpreter's end, where a reader that has gone could not be handled.
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone, as `head` does: not worth a word, and the interpreter's last flush must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except AccelError as error:
        return _say(str(error), FAILED)
    except ImportError as error:
        extra = extra_of(error.name)
        if extra is None:
            raise
        return _say(f"`accel {words[0]}` needs {error.name}, which is not installed. Run: {install_command(extra)}", MISUSED)
    return code


def _say(text: str, code: int) -> int:
    print(f"accel: {text}", file=sys.stderr)
    return code


def _run(words: list[str], commands: Mapping[str, Command]) -> int:
    try:
        # The command's own arguments need its module, so they are parsed in a second step.
        name = _parser(commands).parse_args(words[:1]).command
        module = importlib.import_module(commands[name].module)
        parser = argparse.ArgumentParser(
            prog=f"accel {name}", description=f"{commands[name].summary[:1].upper()}{commands[name].summary[1:]}."
        )
        module.add_arguments(parser)
        arguments = parser.parse_args(words[1:])
    except SystemExit as left:
        # argparse has said what it had to say; a main() that returns is easier to call than one that exits.
        return left.code if isinstance(left.code, int) else OK
    outcome: Any = module.run(arguments)
    if inspect.iscoroutine(outcome):
        outcome = asyncio.run(outcome)
    return int(outcome)


def _parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    width = max(map(len, commands))
    lines = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in commands.items())
    parser = argparse.ArgumentParser(
        prog="accel",
        description="Supervised actors for accelerators.",
        epilog=f"commands:\n{lines}\n\n`accel COMMAND --help` tells more of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"accel {__version__}")
    parser.add_argument("command", choices=commands, metavar="COMMAND", help="one of those below")
    return parser
