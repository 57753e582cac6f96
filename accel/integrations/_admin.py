"""What is for operators alone: it is answered to this machine, or to a client that presents a token. All integrations take it from here."""

from __future__ import annotations

import base64
import hmac
import ipaddress
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from accel.errors import InvalidArgumentError
from accel.integrations._answers import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Admin"]

_SHORTEST: Final = 16
_FORWARDED: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
"""Headers with which a proxy says that the client is another one than its peer."""

_NOT_HERE: Final = Answer(
    403,
    {
        "detail": "This is answered at a loopback address only, such as http://localhost, or to a token: admin_token= of install, --admin-token of accel serve."
    },
)
_NO_TOKEN: Final = Answer(
    401,
    {"detail": "This needs the admin token: as a bearer token, or as the password of any user."},
    {"Cache-Control": "no-store", "WWW-Authenticate": 'Basic realm="accel", charset="UTF-8"'},
)


class Admin:
    """Decides which requests for the page, the metrics and profiles are answered.

    Parameters
    ----------
    token
        What a client must present, from this machine too. ``None``: requests from this machine are answered, and no others. They come from a loopback
        address, name one as their host, which a page of another site that resolves to this machine does not, and say nothing of a proxy.

    Raises
    ------
    InvalidArgumentError
        The token is not 16 characters or more of printable ASCII.
    """

    __slots__ = ("_token",)

    def __init__(self, token: str | None) -> None:
        if token is not None and not (isinstance(token, str) and len(token) >= _SHORTEST and token.isascii() and token.isprintable()):
            raise InvalidArgumentError(
                f"admin_token is not text of at least {_SHORTEST} printable ASCII characters",
                remedy='Make one: python -c "import secrets; print(secrets.token_urlsafe())".',
            )
        self._token = None if token is None else token.encode()

    def refusal(self, peer: str | None, headers: Mapping[str, str]) -> Answer | None:
        """Return the answer to a request that is refused, else ``None``.

        Parameters
        ----------
        peer
            The address at the other end of the connection; ``None``: a Unix socket, or not known.
        headers
            The request's, by names in any case.
        """
        if self._token is None:
            return None if _is_local(peer, headers) else _NOT_HERE
        return None if hmac.compare_digest(_presented(headers.get("authorization", "")), self._token) else _NO_TOKEN


def _presented(authorization: str) -> bytes:
    """Return the token of a header, bearer's or basic's; empty if it has none."""
    scheme, _, value = authorization.partition(" ")
    given = value.strip().encode(errors="surrogateescape")
    if scheme.lower() == "bearer":
        return given
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _is_local(peer: str | None, headers: Mapping[str, str]) -> bool:
    try:
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:
        return False
    return _is_loopback(peer or "") and (host == "localhost" or _is_loopback(host)) and not any(name in headers for name in _FORWARDED)


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback
