"""What `accel serve` is told besides its options: inputs and buckets as words, and options from a TOML file."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from accel.errors import InvalidArgumentError
from accel.models import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["add_file_options", "buckets_of", "input_of"]

PROJECT = Path("pyproject.toml")
"""The file whose table ``[tool.accel.serve]`` is read where neither a target nor a file is named."""


def input_of(text: str) -> tuple[str, TensorSpec]:
    """Return the name and the spec of ``"image=batch,64:float32"``, or with what fills it up: ``"tokens=batch,length:int64:0"``."""
    name, _, spec = text.partition("=")
    dims, *rest = spec.split(":")
    try:
        if not name.isidentifier() or not dims or len(rest) > 2:
            raise InvalidArgumentError(f"{text!r} is no input")
        shape = [int(dim) if dim.isdecimal() else dim for dim in map(str.strip, dims.split(","))]
        dtype = rest[0] if rest else "float32"
        return name, TensorSpec(shape, dtype, pad=float(rest[1]) if rest[1:] else 0)
    except ValueError as error:
        why = error.message if isinstance(error, InvalidArgumentError) else str(error)
        raise argparse.ArgumentTypeError(f"{why.rstrip('.')}. Write NAME=DIM,DIM:DTYPE, such as image=batch,64:float32") from error


def buckets_of(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the dimension and the lengths of ``"batch=1,8,64"``."""
    name, _, lengths = text.partition("=")
    words = lengths.split(",")
    if not name.isidentifier() or not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} are no buckets. Write DIM=LENGTH,LENGTH, such as batch=1,8,64")
    return name, tuple(map(int, words))


def add_file_options(arguments: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]) -> str | None:
    """Set the options that were not given from the file that was named with ``--config``, or from the project's.

    Parameters
    ----------
    arguments
        As they were given. What is ``None``, or an empty list, was not.
    add_arguments
        Declares the options. The file's are read by the same parser.

    Returns
    -------
    str or None
        The file that was read.

    Raises
    ------
    InvalidArgumentError
        There is no such file, or its table has what is no option, or not in this form.
    """
    if arguments.config is None and (arguments.targets or not PROJECT.is_file()):
        return None
    path = PROJECT if arguments.config is None else Path(arguments.config)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from error
    if path.name == PROJECT.name:
        table = table.get("tool", {}).get("accel", {}).get("serve", {})
        if not table and arguments.config is None:
            return None
    if arguments.targets and "targets" in table:
        raise InvalidArgumentError(f"{path} names what is served, and the command line too", remedy="Name it in one place.")
    parser = _Parser(str(path))
    add_arguments(parser)
    found = parser.parse_args(_words(table))
    if found.config is not None:
        raise InvalidArgumentError(f"{path}: config is no option of a file")
    for name, value in vars(found).items():
        if getattr(arguments, name) in (None, []):
            setattr(arguments, name, value)
    return str(path)


class _Parser(argparse.ArgumentParser):
    """Raises what it would print.

    Parameters
    ----------
    path
        The file that the words are of.
    """

    def __init__(self, path: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self._path = path

    def error(self, message: str) -> NoReturn:
        raise InvalidArgumentError(f"{self._path}: {message}")


def _words(table: dict[str, Any]) -> list[str]:
    """Return a table as words of a command line: ``buckets = {batch = [1, 8]}`` is ``--buckets batch=1,8``."""
    words: list[str] = []
    targets: list[str] = []
    for key, value in table.items():
        option = f"--{key.replace('_', '-')}"
        if key == "targets":
            targets = [str(target) for target in (value if isinstance(value, list) else [value])]
        elif value is True:
            words.append(option)
        elif value is False and key.replace("_", "-") == "access-log":
            continue
        elif isinstance(value, dict):
            for name, entry in value.items():
                text = ",".join(map(str, entry)) if isinstance(entry, list) else entry
                words.append(f"{option}={name}={text}")
        elif isinstance(value, list):
            words += [f"{option}={entry}" for entry in value]
        else:
            words.append(f"{option}={value}")
    return [*words, "--", *targets] if targets else words
