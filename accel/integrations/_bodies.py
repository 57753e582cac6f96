"""The checks of a request before a handler reads it: a limit for the body, and a charset that Python knows."""

from __future__ import annotations

from email.message import Message
from encodings import normalize_encoding
from encodings.aliases import aliases

from accel.errors import InvalidArgumentError

__all__ = ["UNKNOWN_CHARSET", "check_limit", "has_known_charset"]

UNKNOWN_CHARSET = "The charset of the body is not known."

# A table and not codecs.lookup, which caches every name: clients could fill the memory with invented names.
# Codecs that are no text encodings, or not there on Linux, are left out.
_CHARSETS = {
    name
    for alias, codec in aliases.items()
    if not codec.endswith("_codec") and codec not in ("mbcs", "rot_13", "tactis")
    for name in (alias, codec)
}


def check_limit(limit: int | None) -> None:
    """Raise unless ``limit`` is a limit for bodies.

    Raises
    ------
    InvalidArgumentError
        It is neither ``None`` nor an int of at least 1.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise InvalidArgumentError(f"body_limit is {limit!r}", remedy="Give the most bytes that a body may have, at least 1, or None.")


def has_known_charset(content_type: str) -> bool:
    """Whether a content type names no charset, or one that Python knows."""
    header = Message()
    header["content-type"] = content_type
    charset = header.get_param("charset")
    # A tuple has the form of RFC 2231, which no HTTP client sends.
    return not charset or (isinstance(charset, str) and normalize_encoding(charset).lower() in _CHARSETS)
