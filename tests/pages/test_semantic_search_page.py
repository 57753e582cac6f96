from __future__ import annotations

import os
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.browser_support import Browser, opened_browser
from tests.program_support import python, started

QUERY = "smallest eigenvalues of a sparse matrix"


async def kill_and_poison(browser: Browser) -> None:
    """Have the page kill the device's process and send poison, and see that no other search fails."""
    await browser.click("#kill")
    await browser.until("document.getElementById('timeline').textContent.includes('SIGKILL was sent to process')")
    await browser.until("document.getElementById('timeline').textContent.includes('Generation 2 became 3')")
    answered = await browser.run("return counts.answered")
    await browser.until(f"counts.answered > {answered + 2}")  # a search that two deaths cut short may fail
    await browser.run(
        "document.getElementById('timeline').replaceChildren()"
    )  # it keeps eight lines, the first poison's may be one of them
    await browser.click("#poison")
    await browser.until("document.getElementById('timeline').textContent.includes('Generation 3 became 4')")
    await browser.until("document.getElementById('timeline').textContent.includes('the request killed the device')")
    others = await browser.text("#others")
    failed = await browser.run("return [...document.querySelectorAll('#strip i.failed')].map(mark => mark.title)")
    assert failed == [], others


@pytest.mark.page
@pytest.mark.timeout(400)
async def test_the_page_searches_and_survives_a_poisonous_request(tmp_path: Path) -> None:
    service = python("-m", "examples.semantic_search.app")
    async with started(service, PORT="0", ACCEL_DEVICE="cpu") as program, opened_browser(tmp_path) as browser:
        base = f"http://127.0.0.1:{program.port}"
        await browser.open(base)
        await browser.until("document.body.dataset.phase === 'ready'")
        assert "documents, ready: numpy" in await browser.text("#corpus")
        assert not await browser.run("return document.getElementById('progress').checkVisibility()")

        await browser.type("#q", f"{QUERY}\ue007")
        await browser.until(f"document.getElementById('results').dataset.query === '{QUERY}'")
        before = await browser.text("#results")
        assert "scipy.sparse.linalg.eigsh" in before
        assert "ms in the service" in await browser.text("#latency")
        assert await browser.text("#generation") == "1"

        await browser.click("#poison")
        await browser.until("document.getElementById('timeline').textContent.includes('PoisonedInputError: the request killed')")
        await browser.until("document.getElementById('timeline').textContent.includes('Generation 1 became 2')")
        assert await browser.text("#generation") == "2"
        await browser.run("document.getElementById('results').dataset.query = ''")
        await browser.click("form button")
        await browser.until(f"document.getElementById('results').dataset.query === '{QUERY}'")
        assert await browser.text("#results") == before, "no document was lost"
        picture = await browser.screenshot()
        assert picture.startswith(b"\x89PNG")
        Path(os.environ.get("SEARCH_SCREENSHOT", tmp_path / "page.png")).write_bytes(picture)

        await kill_and_poison(browser)

        await browser.run("document.getElementById('q').value = ' '")
        await browser.click("form button")
        await browser.until("document.getElementById('latency').textContent.startsWith('Write what a function should do')")
        link = await browser.run("return document.querySelector('#results a').href")
        assert link == f"https://docs.scipy.org/doc/scipy/reference/generated/{await browser.text('#results li code')}.html"

        async with aiohttp.ClientSession(base) as session:
            new = {"name": "zork.frobnicate", "summary": "Frobnicate the quuxes of a <b>zorkmid</b>", "body": "Live."}
            async with session.post("/documents", json=new) as answer:
                assert answer.status == 201, await answer.text()
            async with session.get("/state") as answer:
                state = await answer.json()
            async with session.get("/search", params={"q": ""}) as answer:
                assert answer.status == 422
        assert (state["poisoned"], state["refused"], state["generation"]) == (2, 0, 4)
        assert state["durable_bytes"] > 16_000_000
        await browser.type("#q", "frobnicate quuxes\ue007")
        await browser.until("document.getElementById('results').dataset.query === 'frobnicate quuxes'")
        first = await browser.text("#results li")
        assert first.startswith("zork.frobnicate")
        assert "<b>zorkmid</b>" in first, "text, not HTML"

        program.process.send_signal(signal.SIGTERM)
        assert await program.ended() == 0, program.output
    assert "Traceback" not in program.output.rpartition("actor_failed")[2], program.output
    assert "Warning" not in program.output, program.output
