"""What is for operators alone: it is answered to this machine, or to a client that presents a token. All integrations take it from here."""

from __future__ import annotations

import base64
import hmac
import ipaddress
import re
from typing import TYPE_CHECKING, Final

from accel.errors import InvalidArgumentError
from accel.integrations._answers import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Admin"]

_SHORTEST: Final = 16
_FORWARDED: Final = ("forwarded", "via", "x-forwarded", "x-real-ip", "x-client-ip", "x-envoy-", "true-client-ip", "cf-")
"""What the names of headers begin with by which proxies say that the client is another one than their peer."""

_HOST: Final = re.compile(r"(?:\[([\da-f:.]+)\]|([\w.-]+))(?::\d+)?", re.ASCII | re.IGNORECASE)
"""An address of version 6, or another one or a name; and a port."""

_NOT_HERE: Final = Answer(
    403,
    {
        "detail": "This is answered at a loopback address only, such as http://localhost, or to a token: admin_token= of install, --admin-token of accel serve."
    },
)
_OTHER_SITE: Final = Answer(403, {"detail": "This is not answered to pages of other sites."})
_NO_TOKEN: Final = Answer(
    401,
    {"detail": "This needs the admin token: as a bearer token, or as the password of any user."},
    {"Cache-Control": "no-store", "WWW-Authenticate": 'Basic realm="accel", charset="UTF-8"'},
)


class Admin:
    """Decides which requests for the page, the metrics and profiles are answered.

    A browser's requests for a page of another site are not, whatever they present: that browser may be on this machine, or know the token.

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
        if _is_of_other_site(headers):
            return _OTHER_SITE
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


def _is_of_other_site(headers: Mapping[str, str]) -> bool:
    """Whether a browser sends it for a page of another site, and not because its user follows a link."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site in ("same-origin", "none"):
        return False
    if origin is not None:  # which browsers send with each POST, and wherever the page of the other site would read the answer
        return origin.partition("://")[2] != headers.get("host")
    return site is not None and headers.get("sec-fetch-mode") != "navigate"


def _is_local(peer: str | None, headers: Mapping[str, str]) -> bool:
    named = _HOST.fullmatch(headers.get("host", ""))
    host = "" if named is None else named[1] or named[2].lower()
    is_here = _is_loopback(peer or "") and (host == "localhost" or _is_loopback(host))
    return is_here and not any(name.lower().startswith(_FORWARDED) for name in headers)


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback
