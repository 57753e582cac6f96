"""The log of `accel serve`: where its lines go and what they look like, and a line for each request."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from accel._log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FORMATS", "LEVELS", "log_request", "logging_to_stderr", "with_access_log"]

FORMATS = ("console", "json")
LEVELS = ("debug", "info", "warning", "error")

logger = get_logger()


class _JsonFormatter(logging.Formatter):
    """A JSON object a line: time, level, logger, event, and the pairs of accel's events as they are."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "accel", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


@contextlib.contextmanager
def logging_to_stderr(form: Literal["console", "json"] | None, level: str | None) -> Iterator[None]:
    """Write log lines to standard error while the block runs.

    Parameters
    ----------
    form, level
        Of the lines; ``None``: console, info. Where both are and what is served has configured logging, that stays.
    """
    root, server = logging.getLogger(), logging.getLogger("uvicorn.error")
    if form is None and level is None and (root.handlers or logging.getLogger("accel").handlers):
        yield
        return
    before = root.handlers[:], root.level, server.level
    handler = logging.StreamHandler()
    console = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(_JsonFormatter() if form == "json" else console)
    root.handlers[:] = [handler]
    root.setLevel((level or "info").upper())
    server.setLevel(max(logging.WARNING, root.level))  # what else it says, the command's own lines say
    try:
        yield
    finally:
        root.handlers[:], root.level, server.level = before


def log_request(method: str, path: str, client: str | None, status: int | None, seconds: float) -> None:
    """Log a line for a request. ``status`` is ``None`` where the client left before the answer."""
    logger.info("request", method=method, path=path, status=status, ms=round(seconds * 1e3, 3), client=client)


def with_access_log(app: Any) -> Any:
    """Return an ASGI application that logs a line for each request of ``app``."""

    async def logged(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        began, status = time.perf_counter(), None

        async def send_noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, send_noting)
        finally:
            client = scope.get("client")
            log_request(scope["method"], scope["path"], client and client[0], status, time.perf_counter() - began)

    return logged
