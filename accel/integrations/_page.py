"""The page that shows a service while it runs: one HTML file, and a stream of server-sent events for it. All integrations take it from here."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import secrets
import time
from collections import deque
from dataclasses import asdict, replace
from importlib import resources
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakSet

from accel import __version__
from accel.integrations._answers import Answer, unopened_answer
from accel.telemetry import Probe, fault_code
from accel.telemetry.timeline import Timeline, trace_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence

    from accel.device import System
    from accel.errors import AccelError
    from accel.patterns import DynamicBatcher, TenantStatistics
    from accel.telemetry import ServedBatch, Service

__all__ = ["EVENTS", "PATIENCE", "PROFILE", "STREAM_HEADERS", "TRACE_HEADERS", "Page"]

EVENTS: Final = "/events"
"""Path of the stream, below the page's."""

PROFILE: Final = "/profile"
"""Path of profiles, below the page's."""

STREAM_HEADERS: Final[Mapping[str, str]] = {"Cache-Control": "no-store", "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
"""The last one tells nginx to hand on each message as it comes."""

TRACE_HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-store",
    "Content-Disposition": 'attachment; filename="trace.json"',
    "Content-Type": "application/json",
}

PATIENCE: Final = 15.0
"""Seconds after which a stream ends whose viewer does not read it, such as a computer that sleeps."""

_FULL: Final = Answer(503, {"detail": "There are as many viewers as may be."}, {"Cache-Control": "no-store", "Retry-After": "10"})

_UNOPENED: Final = unopened_answer("This application has opened no device: give it its lifespan.")
_BUSY: Final = Answer(503, {"detail": "Another profile is being made."}, {"Cache-Control": "no-store", "Retry-After": "10"})
_LONGEST: Final = 30.0
_KEPT_WORK: Final = 20_000
_NO_SUCH: Final = Answer(
    422,
    {"detail": f"Give seconds=, more than 0 and at most {_LONGEST:.0f}, and device=, the name of one that is open; both may be left out."},
)

_PERIOD: Final = 1.0
_MESSAGES: Final = 5
"""Messages of a stream; then the browser asks for the next one. A server that ends waits for streams, and tells an ASGI application nothing of it."""

_VIEWERS: Final = 16
_KEPT_EVENTS: Final = 512
_KEPT_REQUESTS: Final = 1024
_SHOWN_TENANTS: Final = 20
_RECENT: Final = 10.0
"""Seconds over which latencies are taken."""


class Recent(Probe):
    """What happened in the last minutes: faults and states, and the latencies of the last requests.

    Attributes
    ----------
    events : deque of dict
        As JSON can hold them. ``number`` counts from 1; the oldest are dropped.
    latencies : mapping
        Service -> when each of the last requests that it answered ended, and after how many seconds.
    """

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=_KEPT_EVENTS)
        self.latencies: WeakKeyDictionary[Service, deque[tuple[float, float]]] = WeakKeyDictionary()
        self._number = 0
        self._faulted_at: dict[str, float] = {}

    def state_changed(self, device: str, state: str, generation: int) -> None:
        seconds = None
        if state == "ready" and device in self._faulted_at:
            seconds = round(time.perf_counter() - self._faulted_at.pop(device), 4)
        self._add(kind="state", device=device, generation=generation, state=state, seconds=seconds)

    def fault(self, device: str, generation: int, error: AccelError) -> None:
        self._faulted_at.setdefault(device, time.perf_counter())
        # Never the error's text: it may name files, addresses and what a client sent.
        self._add(
            kind="fault",
            device=device,
            generation=generation,
            error=type(error).__name__,
            scope=error.scope.name.lower(),
            code=fault_code(error) or None,
            op=error.op,
        )

    def batch_ended(self, batch: ServedBatch) -> None:
        latencies, now = self.latencies.setdefault(batch.service, deque(maxlen=_KEPT_REQUESTS)), batch.ended_at
        latencies.extend([(now, now - request.begun_at) for request in batch.answered])

    def _add(self, **event: Any) -> None:
        self._number += 1
        self.events.append({"number": self._number, "time": round(time.time(), 3), **event})


class Page:
    """What the routes of the page answer.

    Parameters
    ----------
    names
        Returns name and service of each model that the application serves.
    """

    def __init__(self, names: Callable[[], Iterable[tuple[str, DynamicBatcher[Any, Any]]]]) -> None:
        self._names = names
        self._system: System | None = None
        self._streams: WeakSet[Any] = WeakSet()  # one that never begins drops out
        self._is_profiling = False
        self._began = time.monotonic()
        self._closing = asyncio.Event()
        self._id = secrets.token_hex(4)
        self._recent = Recent()
        html = resources.files("accel.integrations").joinpath("page.html").read_text(encoding="utf-8")
        self.html = html.encode()
        self.headers: Mapping[str, str] = {
            "Cache-Control": "no-store",
            "Content-Security-Policy": _policy(html),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

    def open(self, system: System) -> None:
        """Show a system from now on."""
        self._system = system
        system.probes.add(self._recent)
        for device in system.devices:
            self._recent.state_changed(device.name, device.state.value, device.generation)

    def close(self) -> None:
        """End the streams."""
        self._closing.set()

    def stream(self, last_id: str) -> AsyncGenerator[bytes] | Answer:
        """Return what yields the messages of a stream, or the answer to a viewer that gets none.

        Parameters
        ----------
        last_id
            Of the last message that the viewer has: the header ``Last-Event-ID``.
        """
        if self._system is None:
            return _UNOPENED
        if sum(stream.ag_frame is not None for stream in self._streams) >= _VIEWERS:  # of one that has ended it is None
            return _FULL
        stream = self._messages(last_id)
        self._streams.add(stream)
        return stream

    async def _messages(self, last_id: str) -> AsyncGenerator[bytes]:
        run, _, number = last_id.partition(".")
        seen = int(number) if run == self._id and number.isascii() and number.isdecimal() and len(number) < 16 else 0
        yield b"retry: 250\n\n"
        for _ in range(_MESSAGES):
            events = [event for event in self._recent.events if event["number"] > seen]
            message = json.dumps({**self._account(), "all": not seen, "events": events}, separators=(",", ":"))
            seen = events[-1]["number"] if events else seen
            yield f"id: {self._id}.{seen}\ndata: {message}\n\n".encode()
            if await self._closed_within(_PERIOD):
                return

    async def profile(self, seconds: str | None, device: str | None) -> bytes | Answer:
        """Return a timeline of the devices over some seconds from now, in Chrome's format, or the answer to a request that gets none.

        Parameters
        ----------
        seconds, device
            As the client sent them; ``None``: 2, and all devices.
        """
        system = self._system
        if system is None:
            return _UNOPENED
        opened = [known.name for known in system.devices]
        names = [name for name in opened if not device or name == device]
        try:
            length = 2.0 if seconds is None else float(seconds)
        except ValueError:
            length = 0.0
        if not 0 < length <= _LONGEST or not names:
            return _NO_SUCH
        if self._is_profiling:
            return _BUSY
        timelines, self._is_profiling = [Timeline(name, _KEPT_WORK // len(names)) for name in names], True
        for timeline in timelines:
            system.probes.add(timeline)
        try:
            await self._closed_within(length)
        finally:
            for timeline in timelines:
                system.probes.remove(timeline)
            self._is_profiling = False
        return await system.run_blocking(lambda: json.dumps(trace_of(timelines)).encode())

    async def _closed_within(self, seconds: float) -> bool:
        """Wait until the page is closed, ``seconds`` at most; return whether it is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        return self._closing.is_set()

    def _account(self) -> dict[str, Any]:
        system = self._system
        assert system is not None, "a stream has a system"
        now = {"version": __version__, "time": round(time.time(), 3), "uptime": round(time.monotonic() - self._began)}
        return {**now, **system.snapshot(), "services": list(self._services())}

    def _services(self) -> Iterator[dict[str, Any]]:
        """Yield what is known of each service that lives: those with a name of the application, then the others."""
        named = {batcher.service: name for name, batcher in self._names()}
        for service in dict.fromkeys((*named, *self._recent.latencies)):
            latencies = self._recent.latencies.get(service, ())
            statistics = service.statistics()
            yield {
                "name": named.get(service, service.name),
                "device": service.device,
                "latency": _quantiles([seconds for ended, seconds in latencies if ended > time.perf_counter() - _RECENT]),
                **asdict(replace(statistics, tenants=())),
                "tenants": _tenants(statistics.tenants),
            }


def _tenants(tenants: Sequence[TenantStatistics]) -> list[dict[str, Any]]:
    """Return what is shown of the tenants that were charged most, with their parts of the device time and of the weights."""
    seconds, weights = (sum(map(attrgetter(name), tenants)) for name in ("device_seconds", "weight"))
    most = sorted(tenants, key=attrgetter("device_seconds"), reverse=True)[:_SHOWN_TENANTS]
    parts = ((tenant, tenant.device_seconds / (seconds or 1.0), tenant.weight / weights) for tenant in most)
    return [{**asdict(tenant), "part": round(part, 4), "share": round(share, 4)} for tenant, part, share in parts]


def _quantiles(seconds: list[float]) -> dict[str, float]:
    """Return how many there are, and which of them half and 99 % are not above."""
    seconds.sort()
    return {"count": len(seconds), **{f"p{part}": round(seconds[(len(seconds) - 1) * part // 100], 5) for part in (50, 99) if seconds}}


def _policy(html: str) -> str:
    """Return the policy for a browser: its own script, style and host, and no frame around it."""
    digests = {
        kind: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
        )
        for kind in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {digests['script']}; style-src {digests['style']}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
