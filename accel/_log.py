"""The project's logger: structlog's interface over the standard library's ``logging.getLogger("accel")``.

Nothing is configured, here or elsewhere: levels, handlers and formats are the application's. Each record's message is the event's name
followed by ``key=value`` pairs, on one line: what would begin another, or command a terminal, is escaped. The same pairs are on the record as
a mapping named ``accel``, as they are, for formatters that keep structure.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from accel import _child
from accel.errors import AccelError, said

if TYPE_CHECKING:
    import structlog
    from structlog.typing import EventDict, WrappedLogger

__all__ = ["get_logger", "one_line"]

_IN_CHILD = _child.is_deferred()

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "exception": logging.ERROR,
    "critical": logging.CRITICAL,
}


def one_line(text: str) -> str:
    """Return ``text`` with everything escaped that is not printable: newlines of all kinds, controls, changes of direction."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _render(_logger: WrappedLogger, _method: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    error = event.pop("error", None)
    raised = error if isinstance(error, BaseException) else None  # a child tells of one by its text
    # A fault of the tree says all in its text; where it was raised (the query of an event) adds nothing.
    exc_info = event.pop("exc_info", None) if raised is None or isinstance(raised, AccelError) else raised
    name = str(event.pop("event"))
    pairs = dict(event)
    if error is not None:
        pairs["error"] = error if raised is None else f"{type(raised).__name__}: {said(raised)}"
    text = one_line(" ".join([name, *[f"{key}={value!r}" for key, value in pairs.items()]]))
    # A percent sign in a value is not a format: with no arguments, logging leaves the text alone.
    return (text,), {"exc_info": exc_info, "extra": {"accel": {"event": name, **pairs}}}


class _Logger:
    """structlog's logger. A child process imports structlog with the first event that it logs, other processes at once.

    Most children log nothing, and structlog, with rich where that is installed, is a sixth of what they would import. In a service the first event may
    be of a fault, whose handling must not wait for an import on the loop.
    """

    __slots__ = ("_bound",)

    def __init__(self) -> None:
        self._bound = None if _IN_CHILD else _bind()

    def __getattr__(self, method: str) -> Any:
        if not logging.getLogger("accel").isEnabledFor(_LEVELS.get(method, logging.CRITICAL)):
            return _drop
        if self._bound is None:
            self._bound = _bind()
        return getattr(self._bound, method)


def _drop(*args: object, **pairs: object) -> None:
    """Log nothing: the level of the event is not enabled."""


def _bind() -> structlog.stdlib.BoundLogger:
    import structlog

    proxy = structlog.wrap_logger(
        logging.getLogger("accel"),
        processors=[_render],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return cast("structlog.stdlib.BoundLogger", proxy.bind())


def get_logger() -> structlog.stdlib.BoundLogger:
    """Return the logger that every module of accel uses.

    Returns
    -------
    structlog.stdlib.BoundLogger
        ``logger.warning("actor_failed", actor="a/b", error=error)``: ``error`` takes an exception, which
        becomes the record's ``exc_info`` too unless it is an :class:`~accel.AccelError`; every other keyword becomes a pair.

    Notes
    -----
    All parts are given explicitly, so an application's ``structlog.configure`` changes nothing here, and an unconfigured structlog
    (which prints to standard output) is never reached.
    """
    return cast("structlog.stdlib.BoundLogger", _Logger())
