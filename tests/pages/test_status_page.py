from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.browser_support import Browser, opened_browser
from tests.program_support import python, started

if TYPE_CHECKING:
    from pathlib import Path

PHONE = {"width": 360, "height": 780, "deviceScaleFactor": 1, "mobile": True}
DESK = {"width": 1100, "height": 900, "deviceScaleFactor": 1, "mobile": False}
TAB, LEFT, RIGHT, SPACE = "\ue004", "\ue012", "\ue014", " "


async def focused(browser: Browser) -> str:
    return str(await browser.run("const at = document.activeElement; return at.id || at.name || at.tagName"))


async def kill(browser: Browser, generation: int) -> None:
    """Kill the process that the page names, and see on the page that the service recovers from it."""
    said = await browser.text("#cards section")
    process = re.search(r"child process (\d+)", said)
    assert process, said
    os.kill(int(process[1]), signal.SIGKILL)
    await browser.until("document.getElementById('log').textContent.includes('HostDiedError')")
    await browser.until(f"document.getElementById('cards').textContent.includes('generation{generation}')")
    log = await browser.text("#log")
    assert re.search(rf"is ready, generation {generation}, after [\d.]+ m?s", log), log
    assert f"ended generation {generation - 1} (SIGKILL, scope context)" in log, log


@pytest.mark.page
@pytest.mark.timeout(240)
async def test_the_page_shows_a_fault_and_the_recovery_from_it(tmp_path: Path) -> None:
    async with (
        started(python("examples/watched_service.py"), PORT="0") as program,
        opened_browser(tmp_path) as browser,
    ):
        base = f"http://127.0.0.1:{program.port}"
        await browser.emulate("Emulation.setDeviceMetricsOverride", PHONE)
        await browser.open(f"{base}/accel")
        await browser.until("document.getElementById('cards').textContent.includes('ready, process')")
        await browser.until("document.getElementById('cards').textContent.includes('p99')")

        await kill(browser, generation=2)
        await browser.until("document.querySelector('#timeline .fault')")
        await browser.until("document.getElementById('cards').textContent.includes('ready, process')")
        await kill(browser, generation=3)

        wide = "return [...document.querySelectorAll('*')].filter(at => at.getBoundingClientRect().right > innerWidth + 1).map(at => at.outerHTML)"
        assert await browser.run(wide) == [], "nothing leaves the screen of a phone"
        await use_the_keyboard(browser)
        entries: list[str] = await browser.run(
            "return performance.getEntries().filter(entry => entry.name.includes('://')).map(entry => entry.name)"
        )
        assert {entry for entry in entries if not entry.startswith(f"{base}/accel")} == set(), "another host, or another path"

        (service,) = await browser.run("return data.services.map(service => service.replicas.map(replica => replica.device))")
        assert service == ["cpu:0", "cpu:0#2"]
        assert re.search(r"cpu:0#2\s*ready, [\d,]+ batches", await browser.text("#cards"))
        failed = await browser.run("return data.services.map(service => service.failed + service.expired)")
        assert failed == [0]
        await browser.run("source.close(); heard = -9999")
        await browser.until("document.getElementById('link').textContent === 'live'")
        program.process.send_signal(signal.SIGINT)
        await browser.until("document.getElementById('link').textContent === 'reconnecting'")
        assert await program.ended() in (0, -signal.SIGINT), program.output
    assert "Traceback" not in program.output, program.output


async def use_the_keyboard(browser: Browser) -> None:
    await browser.run("document.activeElement.blur()")
    reached = []
    for _ in range(5):
        await browser.press(TAB)
        reached.append(await focused(browser))
    assert reached == ["pause", "span", "timeline", "log", "SUMMARY"], reached
    await browser.run("document.getElementById('timeline').focus()")
    for _ in range(12):
        await browser.press(LEFT)
    for _ in range(2):  # of each device, in any order
        assert re.search(r"cpu:0(#2)? is ready, generation 1", await browser.text("#chosen"))
        await browser.press(RIGHT)
    assert "HostDiedError ended generation 1" in await browser.text("#chosen")
    await browser.run("document.querySelector('#span input:checked').focus()")
    await browser.press(RIGHT)
    assert await browser.run("return span") == 900
    await browser.run("document.getElementById('pause').focus()")
    await browser.press(SPACE)
    await browser.until("document.getElementById('link').textContent === 'paused'")
    await browser.press(SPACE)
    await browser.until("document.getElementById('link').textContent === 'live'")


async def texts_are_texts(browser: Browser) -> None:
    """Put what would be HTML into every text of a message: names of devices, services, tenants, actors, states, codes and ops."""
    elements = "return document.querySelectorAll('*').length"
    await browser.run("source.close(); at('pause').click()")
    before = await browser.run(elements)
    await browser.run("""
        const mark = `"'></b><img src=x onerror="window.attacked = true"><script>window.attacked = true</` + "script>";
        const taint = value => typeof value === "string" ? value + mark : Array.isArray(value) ? value.map(taint)
          : value && typeof value === "object" ? Object.fromEntries(Object.entries(value).map(([key, part]) => [key, taint(part)])) : value;
        const fault = { kind: "fault", device: "cpu:0", generation: 1, error: mark, scope: mark, code: mark, op: mark, time: data.time, number: 99 };
        const tenants = ["queue", "queue=", mark].map(tenant => ({ tenant, part: 0, share: 1, answered: 1, failed: 0, expired: 0, rejected: 0, queued: 0 }));
        const services = taint(data.services).map(service => ({ ...service, tenants }));
        const events = data.events.map(taint);
        receive({ ...taint(data), services, events: [...events, { ...fault, device: `cpu:0${mark}` }] });
        showAll();
        for (let again = 0; again < 20; again++) showAll();
    """)
    assert "<img src=x" in await browser.text("#cards")
    assert "<img src=x" in await browser.text("#log")
    assert await browser.run("return document.querySelectorAll('img, main script').length") == 0
    assert await browser.run("return window.attacked ?? null") is None
    assert await browser.run(elements) < before + 60, "the fault has a line and marks, tenants have facts, and there are no more each time"


@pytest.mark.page
@pytest.mark.timeout(240)
async def test_accel_serve_shows_its_page_in_light_and_dark(tmp_path: Path) -> None:
    served = python("-m", "accel", "serve", "--device", "cpu", "--port", "0")
    async with started(served) as program, opened_browser(tmp_path) as browser:
        base = f"http://127.0.0.1:{program.port}"
        await browser.emulate("Emulation.setDeviceMetricsOverride", DESK)
        await browser.open(base)
        assert await browser.run("return location.pathname") == "/accel"
        async with aiohttp.ClientSession(base) as session:
            async with session.post("/samples", json=7) as answer:
                image = await answer.json()
            for _ in range(20):
                async with session.post("/digits", json={"pixels": image["pixels"]}) as answer:
                    assert answer.status == 200
        await browser.until("document.getElementById('cards').textContent.includes('answered20,')")
        grounds: dict[str, Any] = {}
        for scheme in ("light", "dark"):
            await browser.emulate("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
            grounds[scheme] = await browser.run("return getComputedStyle(document.body).backgroundColor")
        assert grounds == {"light": "rgb(244, 246, 249)", "dark": "rgb(16, 20, 26)"}
        await texts_are_texts(browser)
        program.process.send_signal(signal.SIGTERM)
        assert await program.ended() == 0, program.output
