"""The answers of a FastAPI application to bodies that it cannot take. Imported by :mod:`accel.integrations.fastapi` alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import TYPE_CHECKING, Any

from fastapi import Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers

from accel.integrations._bodies import LATE, TOO_LONG, UNKNOWN_CHARSET, has_known_charset

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["BodyMiddleware", "on_invalid"]

_DISCARD_TIMEOUT = 10.0
"""Seconds for which the rest of a refused body is read and dropped: aiohttp's own default."""

_GONE: Message = {"type": "http.disconnect"}


class BodyMiddleware:
    """Counts the bytes read of a request's body, chunked or not, and answers a body that is too long, too slow, or in an unknown charset.

    The application then receives ``http.disconnect``, which ends its reading in any place. An exception would not pass middlewares that read in
    task groups of their own.

    Parameters
    ----------
    app
        What reads the body.
    limit
        The most bytes; ``None``: any number.
    timeout
        The most seconds for which the body is waited for; ``None``: any number.
    """

    def __init__(self, app: ASGIApp, limit: int | None, timeout: float | None) -> None:
        self._app = app
        self._limit = limit
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_readable = has_known_charset(Headers(scope=scope).get("content-type", ""))
        received = 0
        is_answered = False
        refusal: Response | None = None
        left = self._timeout  # None, too, once the body is there

        async def counted() -> Message:
            nonlocal received, refusal, left
            if refusal is not None:
                return _GONE
            try:
                message, left = await _received(receive, left)
            except TimeoutError:
                refusal = JSONResponse({"detail": LATE}, 408, {"Connection": "close"})
                return _GONE
            received += len(message.get("body", b""))
            if self._limit is not None and received > self._limit:
                refusal = JSONResponse({"detail": TOO_LONG}, 413)
            elif received and not is_readable:
                refusal = JSONResponse({"detail": UNKNOWN_CHARSET}, 415)
            if refusal is None:
                return message
            await _discard(message, receive)
            return _GONE

        async def answer(message: Message) -> None:
            nonlocal is_answered
            if refusal is None or is_answered:
                is_answered = True
                await send(message)

        try:
            await self._app(scope, counted, answer)
        except Exception:
            if refusal is None or is_answered:
                raise  # otherwise the application failed because its client seemed to be gone
        if refusal is not None and not is_answered:
            await refusal(scope, receive, send)


async def _received(receive: Receive, left: float | None) -> tuple[Message, float | None]:
    """Return the next message, and how many seconds are left for those of the body.

    Raises
    ------
    TimeoutError
        It did not come in time.
    """
    if left is None:
        return await receive(), None
    loop = asyncio.get_running_loop()
    deadline = loop.time() + left
    async with asyncio.timeout_at(deadline):
        message = await receive()
    return message, max(0.0, deadline - loop.time()) if message.get("more_body", False) else None


async def _discard(message: Message, receive: Receive) -> None:
    """Read a body to its end: a client that is still sending when the connection closes sees a reset and not the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_TIMEOUT):
            while message.get("more_body", False):
                message = await receive()


_MOST_ERRORS = 8
"""Of a request, in its answer."""

_LONGEST = 200
"""Characters of a text in it, and places of a path."""


async def on_invalid(request: Request, error: Exception) -> Response:
    """Answer an invalid request as FastAPI does, without the input, which JSON may not hold, and with the first errors: there may be one for each number."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = list(itertools.islice(error.errors(), _MOST_ERRORS))
    detail = [{"type": each["type"], "loc": [*map(_bounded, each["loc"][:_LONGEST])], "msg": _bounded(each["msg"])} for each in first]
    return Response(json.dumps({"detail": detail}), 422, media_type="application/json")


def _bounded(part: Any) -> Any:
    return part if isinstance(part, int) else str(part)[:_LONGEST]
