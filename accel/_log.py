"""The project's logger: ``logging.getLogger("accel")`` of the standard library, called with an event and ``key=value`` pairs.

Nothing is configured, here or elsewhere: levels, handlers and formats are the application's. Each record's message is the event's name
followed by ``key=value`` pairs, on one line: what would begin another, or command a terminal, is escaped. The same pairs are on the record as
a mapping named ``accel``, as they are, for formatters that keep structure.
"""

from __future__ import annotations

import logging
from typing import Any

from accel.errors import AccelError, said

__all__ = ["Logger", "get_logger", "one_line"]

_CALLER = 3
"""Stack level of the code that logs: below it are a method of :class:`Logger` and ``_write``."""


def one_line(text: str) -> str:
    """Return ``text`` with everything escaped that is not printable: newlines of all kinds, controls, changes of direction."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


class Logger:
    """Writes events to the standard library's logger ``accel``.

    ``logger.warning("actor_failed", actor="a/b", error=error)``: ``error`` takes an exception, which becomes the record's ``exc_info`` too
    unless it is an :class:`~accel.AccelError`. Every other keyword becomes a pair.
    """

    def __init__(self) -> None:
        self._logger = logging.getLogger("accel")

    def debug(self, event: str, /, **pairs: Any) -> None:
        """Write an event at level DEBUG."""
        self._write(logging.DEBUG, event, pairs)

    def info(self, event: str, /, **pairs: Any) -> None:
        """Write an event at level INFO."""
        self._write(logging.INFO, event, pairs)

    def warning(self, event: str, /, **pairs: Any) -> None:
        """Write an event at level WARNING."""
        self._write(logging.WARNING, event, pairs)

    def error(self, event: str, /, **pairs: Any) -> None:
        """Write an event at level ERROR."""
        self._write(logging.ERROR, event, pairs)

    def exception(self, event: str, /, *, error: BaseException, **pairs: Any) -> None:
        """Write an event at level ERROR, with the traceback of any ``error``, an :class:`~accel.AccelError` too."""
        self._write(logging.ERROR, event, pairs | {"error": error}, traceback_of=error)

    def log(self, level: int, event: str, /, **pairs: Any) -> None:
        """Write an event at the level with this number."""
        self._write(level, event, pairs)

    def _write(self, level: int, event: str, pairs: dict[str, Any], *, traceback_of: BaseException | None = None) -> None:
        if not self._logger.isEnabledFor(level):
            return
        error = pairs.pop("error", None)  # a child sends the text of one
        if isinstance(error, BaseException):
            # The text of an AccelError says all; the place where it was raised, the query of an event, adds nothing.
            traceback_of = traceback_of if isinstance(error, AccelError) else error
            error = f"{type(error).__name__}: {said(error)}"
        if error is not None:
            pairs["error"] = error
        text = one_line(" ".join([event, *(f"{key}={value!r}" for key, value in pairs.items())]))
        # A percent sign in a value is not a format: with no arguments, logging leaves the text alone.
        self._logger.log(level, text, exc_info=traceback_of, extra={"accel": {"event": event, **pairs}}, stacklevel=_CALLER)


def get_logger() -> Logger:
    """Return the logger that every module of accel uses."""
    return Logger()
