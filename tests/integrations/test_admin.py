from __future__ import annotations

import base64

import pytest

import accel
from accel.integrations._admin import Admin

TOKEN = "0123456789abcdef"
HERE = {"host": "localhost:8000"}


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST"])
def test_this_machine_is_answered(peer: str, host: str) -> None:
    assert Admin(None).refusal(peer, {"host": host}) is None


@pytest.mark.parametrize(
    ("peer", "headers"),
    [
        ("10.0.0.7", HERE),
        ("::ffff:10.0.0.7", HERE),
        (None, HERE),  # a Unix socket: a proxy's
        ("testclient", HERE),
        ("127.0.0.1", {}),
        ("127.0.0.1", {"host": "accel.example"}),  # a page of another site, whose name resolves to this machine
        ("127.0.0.1", {"host": "127.0.0.1.example"}),
        ("127.0.0.1", {"host": "[::1"}),
        ("127.0.0.1", {"host": "localhost@accel.example"}),
        ("127.0.0.1", {"host": "accel.example@localhost"}),
        ("127.0.0.1", {"host": "localhost/accel.example"}),
        ("127.0.0.1", {"host": "localhost, accel.example"}),
        ("127.0.0.1", {"host": "localhost:80:80"}),
        ("127.0.0.1", {"host": "0.0.0.0:8000"}),
        ("127.0.0.1", {"host": "2130706433"}),
        ("127.0.0.1", {"host": "[::ffff:10.0.0.7]"}),
        ("127.0.0.1", {"host": "[::ffff:127.0.0.1%25eth0]"}),
        ("::ffff:127.0.0.1.example", HERE),
        ("127.0.0.1", HERE | {"x-forwarded-for": "127.0.0.1"}),
        ("127.0.0.1", HERE | {"forwarded": "for=10.0.0.7"}),
        ("127.0.0.1", HERE | {"via": "1.1 proxy"}),
        ("127.0.0.1", HERE | {"x-real-ip": "10.0.0.7"}),
        ("127.0.0.1", HERE | {"x-forwarded-host": "accel.example"}),
        ("127.0.0.6", HERE | {"x-forwarded-proto": "http"}),  # Envoy, of which a client chooses the host
        ("127.0.0.6", HERE | {"X-Envoy-Attempt-Count": "1"}),
        ("127.0.0.1", HERE | {"X-Forwarded": "for=10.0.0.7"}),
        ("127.0.0.1", HERE | {"CF-Connecting-IP": "10.0.0.7"}),
        ("127.0.0.1", HERE | {"True-Client-IP": "10.0.0.7"}),
        ("127.0.0.1", HERE | {"X-Client-IP": "10.0.0.7"}),
    ],
)
def test_others_are_refused_without_a_token(peer: str | None, headers: dict[str, str]) -> None:
    refusal = Admin(None).refusal(peer, headers)
    assert refusal is not None
    assert refusal.status == 403


@pytest.mark.parametrize(
    ("headers", "is_answered"),
    [
        ({}, True),  # no browser
        ({"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, True),  # typed
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, True),  # a link
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, True),  # the page's own stream
        ({"sec-fetch-site": "same-origin", "origin": "https://accel.example"}, True),  # behind a proxy that changes the host
        ({"origin": "http://localhost:8000"}, True),  # a browser that does not say the site
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, False),  # an image
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, False),  # another port of this machine
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "origin": "https://site.example"}, False),  # a form
        ({"origin": "https://site.example"}, False),
        ({"origin": "http://localhost:3000"}, False),
        ({"origin": "null"}, False),
        ({"origin": ""}, False),
    ],
)
@pytest.mark.parametrize("token", [None, TOKEN])
def test_pages_of_other_sites_are_refused_whatever_a_browser_presents(
    token: str | None, headers: dict[str, str], is_answered: bool
) -> None:
    refusal = Admin(token).refusal("127.0.0.1", HERE | {"authorization": f"Bearer {TOKEN}"} | headers)
    assert (refusal is None) == is_answered
    assert refusal is None or refusal.status == 403


@pytest.mark.parametrize("given", [f"Bearer {TOKEN}", f"bearer  {TOKEN}", basic(f":{TOKEN}"), basic(f"operator:{TOKEN}")])
def test_the_token_is_answered_from_anywhere(given: str) -> None:
    assert Admin(TOKEN).refusal("10.0.0.7", {"authorization": given, "via": "1.1 proxy"}) is None


@pytest.mark.parametrize(
    "given",
    [
        "",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer",
        "Basic ä",
        "Basic \udce4",
        basic(TOKEN),
        basic("a:b"),
        f"Digest {TOKEN}",
    ],
)
def test_with_a_token_everything_else_is_refused_from_this_machine_too(given: str) -> None:
    refusal = Admin(TOKEN).refusal("127.0.0.1", HERE | {"authorization": given})
    assert refusal is not None
    assert (refusal.status, refusal.headers["WWW-Authenticate"][:5]) == (401, "Basic")


@pytest.mark.parametrize("token", ["", "short", "0123456789abcdé_", "0123456789abcde\n", 1234567890123456, b"0123456789abcdef"])
def test_a_token_that_is_none_is_refused(token: object) -> None:
    with pytest.raises(accel.InvalidArgumentError, match="at least 16 printable ASCII") as caught:
        Admin(token)  # type: ignore[arg-type]
    assert "secrets.token_urlsafe" in caught.value.remedy
    assert str(token) not in str(caught.value) or not token, "a token is not repeated"
