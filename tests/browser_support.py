"""A headless Chromium, driven through Debian's chromedriver by the W3C WebDriver protocol."""

from __future__ import annotations

import base64
import contextlib
import shutil
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.program_support import started

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1100,900"),
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
SECONDS = 150.0
"""How long a page may take to come to a state that is waited for."""


class Browser:
    """One window."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def open(self, url: str) -> None:
        await self._post("url", url=url)

    async def click(self, selector: str) -> None:
        await self._post(f"element/{await self._find(selector)}/click")

    async def type(self, selector: str, text: str) -> None:
        """Replace the text of a field; ``\\ue007`` is the Enter key."""
        found = await self._find(selector)
        await self._post(f"element/{found}/clear")
        await self._post(f"element/{found}/value", text=text)

    async def press(self, key: str) -> None:
        """Press a key, in whatever has the focus."""
        both = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        await self._post("actions", actions=[{"type": "key", "id": "keys", "actions": both}])

    async def emulate(self, command: str, parameters: dict[str, Any]) -> None:
        """Change the screen, or what the user prefers, by a command of Chromium's own protocol."""
        await self._post("goog/cdp/execute", cmd=command, params=parameters)

    async def text(self, selector: str) -> str:
        return str(await self.run(f"return document.querySelector({selector!r}).innerText"))

    async def run(self, script: str) -> Any:
        return await self._post("execute/sync", script=script, args=[])

    async def until(self, condition: str) -> None:
        """Wait until an expression of JavaScript is true in the page."""
        script = f"const end = arguments[0], look = () => ({condition}) ? end(true) : setTimeout(look, 20); look()"
        await self._post("execute/async", script=script, args=[])

    async def screenshot(self) -> bytes:
        async with self._session.get("screenshot") as answer:
            return base64.b64decode((await answer.json())["value"])

    async def _find(self, selector: str) -> str:
        found = await self._post("element", using="css selector", value=selector)
        return str(found[ELEMENT])

    async def _post(self, command: str, **parameters: Any) -> Any:
        async with self._session.post(command, json=parameters) as answer:
            body = await answer.json()
            assert answer.status == 200, body
            return body["value"]


@contextlib.asynccontextmanager
async def opened_browser(profile: Path) -> AsyncIterator[Browser]:
    """Open a browser with a profile of its own, and close it at the end of the block."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        pytest.fail("Debian's chromium and chromium-driver are missing: apt-get install chromium chromium-driver")
    options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
    asked = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options, "timeouts": {"script": 1000 * SECONDS}}}}
    async with started([driver, "--port=0"], pattern=r"successfully on port (\d+)") as program, aiohttp.ClientSession() as session:
        base = f"http://127.0.0.1:{program.port}/session"
        async with session.post(base, json=asked) as answer:
            body = await answer.json()
            assert answer.status == 200, body
        own = f"{base}/{body['value']['sessionId']}"
        try:
            async with aiohttp.ClientSession(f"{own}/") as window:
                yield Browser(window)
        finally:
            async with session.delete(own):
                pass
