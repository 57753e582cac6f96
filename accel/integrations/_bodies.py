"""What a client sends, before a handler has it: a limit for the body, a charset that Python knows, JSON."""

from __future__ import annotations

import json
from encodings import normalize_encoding
from encodings.aliases import aliases
from typing import Any

from accel.errors import InvalidArgumentError
from accel.values import check_count, check_seconds

__all__ = ["LATE", "TOO_LONG", "UNKNOWN_CHARSET", "check_limits", "has_known_charset", "parsed"]

TOO_LONG = "The body is too long."
LATE = "The body did not arrive in time."
UNKNOWN_CHARSET = "The charset of the body is not known."

# A table and not codecs.lookup, which caches every name: clients could fill the memory with invented names.
# Codecs that are no text encodings, or not there on Linux, are left out.
_CHARSETS = {
    name
    for alias, codec in aliases.items()
    if not codec.endswith("_codec") and codec not in ("mbcs", "rot_13", "tactis")
    for name in (alias, codec)
}


def check_limits(limit: int | None, timeout: float | None) -> None:
    """Raise unless these are limits for bodies.

    Raises
    ------
    InvalidArgumentError
        ``limit`` is neither ``None`` nor an int of at least 1, or ``timeout`` neither ``None`` nor seconds.
    """
    if limit is not None:
        check_count("body_limit", limit, remedy="Give the most bytes that a body may have, at least 1, or None.")
    if timeout is not None:
        check_seconds("body_timeout", timeout, or_zero=False)


_LONGEST_CONTENT_TYPE = 1024
"""Characters. Parsers of the frameworks take a time that grows with the square of the length."""


def has_known_charset(content_type: str) -> bool:
    """Whether a content type names no charset, or one that Python knows. One that is too long for a content type has none."""
    if len(content_type) > _LONGEST_CONTENT_TYPE:
        return False
    for parameter in content_type.split(";")[1:]:
        name, _, value = parameter.partition("=")
        # A name with a star has the form of RFC 2231, which no HTTP client sends.
        if name.strip().lower().startswith("charset"):
            charset = value.strip().strip('"')
            return not charset or (name.strip().lower() == "charset" and normalize_encoding(charset).lower() in _CHARSETS)
    return True


def parsed(body: bytes) -> Any:
    """Return a body of JSON: in UTF-8, as JSON is, whatever charset the client names.

    Raises
    ------
    InvalidArgumentError
        It is not JSON, nested too deeply, or has an integer of more digits than Python takes. ``argument`` is ``"body"``.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidArgumentError("the body is not JSON, or more deeply nested than Python takes", argument="body") from None
