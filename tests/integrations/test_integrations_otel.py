"""Traces: spans of requests and of their batches, by the SDK's exporter in memory, and through FastAPI's own instrumentation."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, ParentBased, Sampler, SamplingResult

import accel
from accel.integrations.fastapi import add_model, lifespan
from accel.integrations.otel import instrument
from accel.patterns import DynamicBatcher
from accel.patterns.requests import Request
from accel.testing import FaultPlan
from tests.device_support import cancelled, failure, task, turns
from tests.http_support import affine_service, row
from tests.model_support import Affine, X, affine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import numpy as np


class Traced:
    """A provider, and what it has exported."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        limits = SpanLimits(max_links=1000)  # not what keeps a batch to 128
        self.provider = TracerProvider(sampler=sampler, span_limits=limits)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


class Linked(Sampler):
    """Samples a root that has a link to a span that is sampled."""

    def should_sample(self, parent_context: Any, trace_id: int, name: str, *args: Any, links: Any = None, **kwargs: Any) -> SamplingResult:
        is_wanted = any(link.context.trace_flags.sampled for link in links or ())
        return SamplingResult(Decision.RECORD_AND_SAMPLE if is_wanted else Decision.DROP)

    def get_description(self) -> str:
        return "Linked"


def said(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def events(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


def context(span: ReadableSpan) -> trace.SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


@pytest.fixture
def traced() -> Traced:
    return Traced()


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cpu")


async def doubled(items: Sequence[float]) -> list[float]:
    return [2 * item for item in items]


async def test_requests_are_children_of_the_callers_spans_and_a_batch_is_a_root_with_links(traced: Traced, device: accel.Device) -> None:
    a = await device.zeros((32, 32))

    async def handler(items: Sequence[float]) -> list[float]:
        await device.blas.gemm(a, a)
        return await doubled(items)

    async def ask(item: float) -> float:
        with traced.tracer.start_as_current_span(f"handler {item}"):
            return await batcher.submit(item)

    instrument(device, tracer_provider=traced.provider)
    async with DynamicBatcher(handler, device=device) as batcher:
        assert await asyncio.gather(*[ask(n) for n in range(3)]) == [0, 2, 4]
    requests, (batch,), (on_device,) = traced.named("accel.request"), traced.named("accel.batch"), traced.named("accel.device")
    for span in requests:
        (parent,) = traced.named(f"handler {said(span)['accel.request.number'] - 1}")
        assert span.parent is not None
        assert span.parent.span_id == context(parent).span_id
        assert events(span) == ["launched"]
        assert [link.context.span_id for link in span.links] == [context(batch).span_id]
        assert (said(span)["accel.device"], said(span)["accel.generation"]) == ("cpu:0", 1)
        assert said(span)["accel.batch.device_seconds"] > 0
        assert span.status.is_unset
    assert batch.parent is None
    assert context(batch).trace_id not in {context(span).trace_id for span in requests}
    assert {link.context.span_id for link in batch.links} == {context(span).span_id for span in requests}
    assert (said(batch)["accel.batch.items"], said(batch)["accel.batch.requests"], said(batch)["accel.batch.traced"]) == (3, 3, 3)
    assert on_device.parent is not None
    assert on_device.parent.span_id == context(batch).span_id
    assert batch.start_time is not None
    assert batch.end_time is not None
    assert on_device.start_time is not None
    assert on_device.end_time == batch.end_time
    assert batch.start_time <= on_device.start_time < on_device.end_time
    (first, *_), last = requests, traced.named("handler 2")[0]
    assert first.start_time is not None
    assert last.end_time is not None
    assert first.start_time <= batch.start_time
    assert batch.end_time <= last.end_time


async def test_where_no_span_is_recorded_nothing_is_made(traced: Traced, device: accel.Device) -> None:
    unsampled = Traced(ALWAYS_OFF)
    instrument(device, tracer_provider=traced.provider)
    async with DynamicBatcher(doubled, device=device) as batcher:
        await batcher.submit(1)
        with unsampled.tracer.start_as_current_span("handler"):
            await batcher.submit(1)
    assert traced.exporter.get_finished_spans() == ()


async def test_a_request_that_is_not_traced_is_looked_at_once(
    traced: Traced, device: accel.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is not told to the probe, and no batch is searched for it."""
    ends: list[Request] = []
    real = Request.on_end

    def on_end(request: Request, told: Any) -> None:
        ends.append(request)
        real(request, told)

    monkeypatch.setattr(Request, "on_end", on_end)
    instrument(device, tracer_provider=traced.provider)
    async with DynamicBatcher(doubled, device=device) as batcher:
        await batcher.submit(1)
        assert ends == []
        with traced.tracer.start_as_current_span("handler"):
            await batcher.submit(1)
        assert [request.number for request in ends] == [2]


async def test_a_request_has_no_link_to_a_batch_that_is_not_recorded() -> None:
    traced, recorded = Traced(ParentBased(ALWAYS_OFF)), Traced()
    async with accel.System() as system:
        device = await system.open_device("cpu")
        instrument(system, tracer_provider=traced.provider)
        async with DynamicBatcher(doubled, device=device) as batcher:
            with recorded.tracer.start_as_current_span("handler"):
                await batcher.submit(1)
    (request,) = traced.named("accel.request")
    assert (events(request), list(request.links), traced.named("accel.batch")) == (["launched"], [], [])


async def test_a_sampler_may_keep_a_batch_for_its_links() -> None:
    traced = Traced(ParentBased(Linked()))
    recorded = Traced()
    async with accel.System() as system:
        device = await system.open_device("cpu")
        instrument(system, tracer_provider=traced.provider)
        async with DynamicBatcher(doubled, device=device) as batcher:
            await batcher.submit(1)
            with recorded.tracer.start_as_current_span("handler"):
                await batcher.submit(1)
    assert len(traced.named("accel.batch")) == len(traced.named("accel.request")) == 1


async def test_a_span_has_128_links_at_most_and_says_how_many_there_were(traced: Traced, device: accel.Device) -> None:
    instrument(device, tracer_provider=traced.provider)
    async with DynamicBatcher(doubled, device=device, max_items=256) as batcher:
        with traced.tracer.start_as_current_span("handler"):
            await asyncio.gather(*[batcher.submit(n) for n in range(200)])
    (batch,) = traced.named("accel.batch")
    assert len(batch.links) == 128
    assert said(batch)["accel.batch.traced"] == 200
    assert len(traced.named("accel.request")) == 200


@pytest.mark.parametrize("quarantine", [False, True])
async def test_a_fault_a_retry_and_a_quarantine_are_events(quarantine: bool, traced: Traced, rng: np.random.Generator) -> None:
    plan = FaultPlan()
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=plan)
        instrument(system, tracer_provider=traced.provider)
        async with affine_service(affine(rng), quarantine=quarantine)(device) as service:
            by_work = accel.KernelFaultError("a kernel faulted", code=700, scope=accel.FaultScope.CONTEXT)
            plan.poison_at(plan.count + 1, by_work if quarantine else None)
            with traced.tracer.start_as_current_span("handler"):
                await service.submit({"x": row(rng)})
    (request,) = traced.named("accel.request")
    told = events(request)
    assert told[:2] == ["launched", "fault"]
    assert told[2:] == (["quarantined", "retried"] if quarantine else ["retried"]), "a trial in quarantine is a retry"
    (fault,) = [event for event in request.events if event.name == "fault"]
    found = dict(fault.attributes or {})
    assert (found["accel.device"], found["accel.generation"]) == ("cpu:0", 1)
    assert "error.type" in found
    assert (said(request)["accel.device"], said(request)["accel.generation"]) == ("cpu:0", 1), "where it was launched first"
    retries = [dict(event.attributes or {}) for event in request.events if event.name == "retried"]
    assert quarantine or retries == [{"accel.device": "cpu:0", "accel.generation": 2}]
    assert request.status.is_unset
    batch = traced.named("accel.batch")[0]
    assert "fault" in events(batch)
    assert said(batch)["error.type"] == "ContextPoisonedError"
    assert batch.status.status_code is trace.StatusCode.ERROR


async def test_a_request_names_the_device_that_it_was_launched_on(traced: Traced, rng: np.random.Generator) -> None:
    weights = affine(rng)
    async with accel.System() as system:
        devices = [await system.open_device("cpu") for _ in range(2)]
        models = [await device.load_model(Affine, weights=weights, inputs=X, buckets={"batch": (1, 8)}) for device in devices]
        instrument(system, tracer_provider=traced.provider)
        async with accel.serve(models) as service:
            await service.drain(devices[0])
            with traced.tracer.start_as_current_span("handler"):
                await service.submit({"x": row(rng)})
    (request,) = traced.named("accel.request")
    assert said(request)["accel.device"] == devices[1].name


async def test_errors_have_their_class_and_not_their_text(traced: Traced, device: accel.Device) -> None:
    async def failing(items: Sequence[float]) -> list[float]:
        raise accel.ContextPoisonedError("secret of the user", executed="unknown", retryable=False)

    instrument(device, tracer_provider=traced.provider)
    async with DynamicBatcher(failing, device=device) as batcher:
        with traced.tracer.start_as_current_span("handler", record_exception=False, set_status_on_exception=False):
            await failure(batcher.submit(1), accel.ContextPoisonedError)
    for span in (*traced.named("accel.request"), *traced.named("accel.batch")):
        assert said(span)["error.type"] == "ContextPoisonedError"
        assert span.status.status_code is trace.StatusCode.ERROR
        assert "secret" not in span.to_json()
    (request,) = traced.named("accel.request")
    assert said(request)["accel.error.executed"] == "unknown"


async def test_a_caller_that_leaves_ends_its_span_without_an_error(traced: Traced, device: accel.Device) -> None:
    waits = asyncio.Event()

    async def handler(items: Sequence[float]) -> list[float]:
        await waits.wait()
        return await doubled(items)

    async def ask() -> float:
        with traced.tracer.start_as_current_span("handler"):
            return await batcher.submit(1)

    probe = instrument(device, tracer_provider=traced.provider)
    async with DynamicBatcher(handler, device=device) as batcher:
        asking = task(ask())
        await turns()
        await cancelled(asking)
        (request,) = traced.named("accel.request")
        assert (said(request)["error.type"], request.status.is_unset) == ("CancelledError", True)
        waits.set()
        device.probes.remove(probe)
        with traced.tracer.start_as_current_span("handler"):
            await batcher.submit(2)
    assert len(traced.named("accel.request")) == 1


async def test_fastapis_own_instrumentation_is_the_parent(traced: Traced, rng: np.random.Generator) -> None:
    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/affine", json={"x": row(rng)})

    opened = affine_service(affine(rng))

    def setup(device: accel.Device) -> Any:
        instrument(device, tracer_provider=traced.provider)
        return opened(device)

    app = FastAPI()
    app.router.lifespan_context = lifespan(setup, device="cpu")
    FastAPIInstrumentor.instrument_app(app, tracer_provider=traced.provider)
    async with app.router.lifespan_context(app):
        add_model(app, "/affine", app.state.accel.state)
        assert (await post()).status_code == 200
    (request,), (batch,) = traced.named("accel.request"), traced.named("accel.batch")
    (server,) = [span for span in traced.exporter.get_finished_spans() if span.kind is trace.SpanKind.SERVER]
    assert context(request).trace_id == context(server).trace_id
    assert request.parent is not None
    assert request.parent.span_id == context(server).span_id
    assert [link.context.span_id for link in batch.links] == [context(request).span_id]


def test_a_wrong_provider_is_refused() -> None:
    with pytest.raises(accel.InvalidArgumentError, match="tracer_provider"):
        instrument(accel.System(), tracer_provider=3)  # type: ignore[arg-type]


def test_without_the_api_the_error_says_what_to_install() -> None:
    program = "import sys; sys.modules['opentelemetry'] = None\nimport accel.integrations.otel"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install '.[otel]'" in ended.stderr
