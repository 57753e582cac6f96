"""Metrics: what is scraped is what services and devices count, before and after a fault, in the format of Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx
import numpy as np
import pytest
from aiohttp import test_utils, web
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

import accel
from accel.integrations import aiohttp as with_aiohttp
from accel.integrations.fastapi import add_model, install, lifespan
from accel.integrations.metrics import Metrics
from accel.patterns import DynamicBatcher, ModelService
from accel.telemetry import DeviceWork, ServedBatch
from accel.testing import FaultPlan
from tests import sharded_models
from tests.batcher_support import Handler
from tests.device_support import bounded
from tests.http_support import affine_service, on_aiohttp, on_fastapi, row
from tests.model_support import affine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

M = {"device": "cpu:0", "model": "m"}


class Scrape:
    """The samples of one scrape."""

    def __init__(self, text: bytes) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text.decode())}
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value for family in self.families.values() for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self._samples[name, frozenset(labels.items())]


@pytest.fixture(params=[on_fastapi, on_aiohttp], ids=["fastapi", "aiohttp"])
def serving(request: pytest.FixtureRequest) -> Any:
    return request.param


async def test_a_scrape_has_what_happened_before_and_after_a_fault(serving: Any, rng: np.random.Generator) -> None:
    plan = FaultPlan()
    async with serving(affine_service(affine(rng), max_items=4), {}, faults=plan, memory_limit=1 << 26) as client:
        status, body, headers = await client.get("/metrics")
        first = Scrape(body)
        assert (status, headers["Content-Type"].partition(";")[0], headers["Cache-Control"]) == (200, "text/plain", "no-store")
        assert first("accel_requests_total", outcome="answered", **M) == first("accel_request_duration_seconds_count", **M) == 0
        assert first("accel_device_generation", device="cpu:0") == 1
        assert "accel_device_faults" not in first.families

        plan.poison_at(plan.count + 5)
        await asyncio.gather(*(client.post({"x": row(rng)}) for _ in range(20)))
        assert (await client.post({"x": []}))[0] == 422
        later = Scrape((await client.get("/metrics"))[1])
        statistics, info = client.service.statistics(), client.device.info()
    assert statistics.retried >= 1
    assert later("accel_requests_total", outcome="answered", **M) == later("accel_request_duration_seconds_count", **M) == 20
    assert later("accel_request_duration_seconds_bucket", le="+Inf", **M) == 20
    assert later("accel_request_duration_seconds_sum", **M) > 0
    assert later("accel_requests_retried_total", **M) == statistics.retried
    assert later("accel_batch_items_count", **M) == statistics.batches
    assert later("accel_batch_items_sum", **M) == pytest.approx(statistics.batches * statistics.mean_batch)
    assert later("accel_model_version", **M) == 1
    forwards = client.service.model.forwards
    assert set(forwards) <= {(1,), (4,)}
    assert sum(forwards.values()) >= 5, "20 items, and 4 in a batch at most; a batch may meet the fault before its forward"
    assert [later("accel_model_forwards_total", bucket=f"batch={n}", **M) for (n,) in forwards] == list(forwards.values())
    assert later("accel_model_graph_replays_total", **M) == 0, "on the CPU"
    assert (later("accel_device_generation", device="cpu:0"), later("accel_device_restarts_total", device="cpu:0")) == (2, 1)
    assert later("accel_device_faults_total", code="INJECTED_FAULT", scope="context", device="cpu:0") == 1
    assert later("accel_device_rebuild_seconds_count", device="cpu:0") == 1
    assert 0 < later("accel_device_rebuild_seconds_sum", device="cpu:0") < 10
    assert later("accel_request_queue_seconds_count", **M) == 20, "retries wait no second time"
    assert later("accel_batch_device_seconds_total", **M) == statistics.device_seconds > 0
    assert later("accel_device_seconds_total", device="cpu:0") == info.device_seconds >= statistics.device_seconds
    assert later("accel_ops_total", device="cpu:0", library="model", kind="forward") >= statistics.batches
    assert later("accel_device_memory_peak_bytes", device="cpu:0") == info.memory.peak >= info.memory.reserved
    assert later("accel_device_state", device="cpu:0", state="ready") == 1
    assert later("accel_device_state", device="cpu:0", state="rebuilding") == 0
    for name in ("used", "durable", "reserved", "limit"):
        assert later(f"accel_device_memory_{name}_bytes", device="cpu:0") == getattr(info.memory, name)


async def test_openmetrics_is_given_to_a_scraper_that_asks_for_it() -> None:
    metrics = Metrics(lambda: None)
    metrics.op_ended(work("memory", "put"))
    text, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    families = parse_openmetrics(text.decode())  # type: ignore[no-untyped-call]
    assert [family.name for family in families] == ["accel_ops"]


async def test_a_model_that_is_closed_has_no_version(rng: np.random.Generator) -> None:
    async with on_fastapi(affine_service(affine(rng)), {}) as client:
        await client.service.model.aclose()
        scrape = Scrape((await client.get("/metrics"))[1])
    assert "accel_model_version" not in scrape.families


async def test_a_device_that_is_lost_says_so(rng: np.random.Generator) -> None:
    plan = FaultPlan()
    async with on_fastapi(affine_service(affine(rng)), {}, faults=plan, restart=accel.RestartStrategy(max_restarts=0)) as client:
        plan.poison_at(plan.count + 1)
        await client.post({"x": row(rng)})
        scrape = Scrape((await client.get("/metrics"))[1])
    assert scrape("accel_device_state", device="cpu:0", state="lost") == 1
    assert scrape("accel_device_faults_total", code="INJECTED_FAULT", scope="context", device="cpu:0") == 1
    assert scrape("accel_device_ready", device="cpu:0") == 0


async def test_any_batcher_can_be_shown_and_each_application_has_its_own_metrics() -> None:
    async def double(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    @contextlib.asynccontextmanager
    async def setup(device: accel.Device) -> Any:
        async with DynamicBatcher(double, device=device) as batcher:
            app.state.accel_metrics.add("double", batcher)
            yield batcher

    app, other = FastAPI(lifespan=lifespan(setup, device="cpu")), FastAPI()
    install(app, metrics="/m")
    install(other, metrics="/m")
    async with app.router.lifespan_context(app):
        await bounded(app.state.accel.state.submit(1))
        texts = []
        for each in (app, other):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(each), base_url="http://localhost") as client:
                texts.append((await client.get("/m")).content)
        assert Scrape(texts[0])("accel_requests_total", outcome="answered", device="cpu:0", model="double") == 1
        assert not Scrape(texts[1]).families
    with pytest.raises(accel.InvalidArgumentError, match="DynamicBatcher"):
        app.state.accel_metrics.add("none", object())


def a_part(whole: web.Application) -> web.Application:
    """Return an application of aiohttp with a model, of which a service opens as it starts."""
    service = web.AppKey("part", ModelService)

    async def opened(app: web.Application) -> AsyncIterator[None]:
        async with affine_service(affine(np.random.default_rng(1)))(whole[with_aiohttp.DEVICE]) as app[service]:
            yield

    part = web.Application()
    part.cleanup_ctx.append(opened)
    with_aiohttp.add_model(part, "/m", service, name="part")
    return part


@pytest.mark.parametrize("is_installed_first", [True, False])
async def test_models_of_a_sub_application_are_in_the_metrics_of_the_whole_on_aiohttp(
    is_installed_first: bool, rng: np.random.Generator
) -> None:
    app, between = web.Application(), web.Application()
    part = a_part(app)

    def nested() -> None:
        between.add_subapp("/b", part)
        app.add_subapp("/a", between)

    if is_installed_first:
        with_aiohttp.install(app, "cpu", metrics="/metrics")
        nested()
    else:
        nested()
        with_aiohttp.install(app, "cpu", metrics="/metrics")
    async with test_utils.TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as session:
        labels = {"device": "cpu:0", "model": "part"}
        async with session.get("/metrics") as answer:
            assert Scrape(await answer.read())("accel_requests_total", outcome="answered", **labels) == 0
        async with session.post("/a/b/m", json={"x": row(rng)}) as answer:
            assert answer.status == 200
        async with session.get("/metrics") as answer:
            scrape = Scrape(await answer.read())
    assert scrape("accel_requests_total", outcome="answered", **labels) == scrape("accel_request_duration_seconds_count", **labels) == 1


async def test_models_of_a_mounted_application_are_in_the_metrics_of_the_whole_on_fastapi(rng: np.random.Generator) -> None:
    app, part, own = FastAPI(), FastAPI(), FastAPI()

    @contextlib.asynccontextmanager
    async def setup(device: accel.Device) -> AsyncIterator[None]:
        async with affine_service(affine(rng))(device) as service, affine_service(affine(rng))(device) as other:
            add_model(part, "/m", service, name="part")
            add_model(own, "/m", other, name="own")
            yield

    app.router.lifespan_context = lifespan(setup, device="cpu")
    install(app, metrics="/metrics")
    install(part)
    install(own, metrics="/metrics")
    app.mount("/a", part)
    app.mount("/b", own)
    labels = {"device": "cpu:0", "model": "part"}
    for round_ in (1, 2):  # entered again, it has other services
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
        ):
            for path in ("/a/m", "/b/m"):
                assert (await client.post(path, json={"x": row(rng)})).status_code == 200
            scrape = Scrape((await client.get("/metrics")).content)
            assert scrape("accel_requests_total", outcome="answered", **labels) == 1
            assert scrape("accel_request_duration_seconds_count", **labels) == round_
            assert {sample.labels["model"] for sample in scrape.families["accel_requests"].samples} == {"part"}
            theirs = Scrape((await client.get("/b/metrics")).content)
            assert {sample.labels["model"] for sample in theirs.families["accel_requests"].samples} == {"own"}


def test_metrics_of_the_application_and_of_the_process_are_served_too_with_the_workers_label() -> None:
    mine, label = CollectorRegistry(), {"worker": "7"}
    ProcessCollector(registry=mine)
    Counter("my_requests", "Mine.", ["kind"], registry=mine).labels("a").inc(3)
    text, _ = Metrics(lambda: None, registry=mine, labels=label).render()
    scrape = Scrape(text)
    assert scrape("my_requests_total", kind="a", **label) == 3
    assert scrape("process_resident_memory_bytes", **label) > 0
    assert "worker" not in generate_latest(mine).decode(), "the application's own are as they were"
    parsed = parse_openmetrics(Metrics(lambda: None, registry=mine).render("application/openmetrics-text; version=1.0.0")[0].decode())  # type: ignore[no-untyped-call]
    assert {family.name for family in parsed} >= {"my_requests", "process_resident_memory_bytes"}


VALUE = re.compile(r" [-+.e0-9]+$", re.MULTILINE)
GOLDEN = Path(__file__).with_name("metrics.golden.txt")


async def test_the_text_is_as_it_was(rng: np.random.Generator) -> None:
    """Names, types, texts and labels are an interface: dashboards and alerts have them. ``ACCEL_GOLDEN=1`` writes the file anew."""
    plan = FaultPlan()
    service = affine_service(affine(rng), max_items=1, shares={"gold": 3, "free": 1})
    async with on_fastapi(service, {"name": "m"}, tenant=lambda _: "gold", faults=plan, memory_limit=1 << 26) as client:
        await client.post({"x": row(rng)})
        plan.poison_at(plan.count + 1)
        await client.post({"x": row(rng)})
        text = VALUE.sub(" V", (await client.get("/metrics"))[1].decode())
    if os.environ.get("ACCEL_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_the_table_in_the_docs_has_every_metric() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    table = runpy.run_path(str(docs / "metric_table.py"))["table"]()
    assert table in (docs / "telemetry.md").read_text(encoding="utf-8"), "write it anew: python docs/metric_table.py"


def test_kinds_of_ops_are_bounded() -> None:
    metrics = Metrics(lambda: None)
    for n in range(5000):
        metrics.op_ended(work("mine", f"kind-{n}"))
        metrics.op_ended(work(f"model-{n}", "forward"))
    samples = Scrape(metrics.render()[0]).families["accel_ops"].samples
    assert len(samples) <= 1002
    assert sum(sample.value for sample in samples) == 10_000
    assert {(s.labels["library"], s.labels["kind"]): s.value for s in samples}["model", "forward"] == 5000


def test_codes_of_faults_are_bounded_and_no_texts() -> None:
    metrics = Metrics(lambda: None)
    for n in range(1500):
        metrics.fault("cpu:0", 1, accel.DriverError("x", code=n, scope=accel.FaultScope.CONTEXT))
    samples = Scrape(metrics.render()[0]).families["accel_device_faults"].samples
    assert (len(samples), sum(sample.value for sample in samples)) == (1001, 1500)


async def test_a_name_of_any_text_is_one_label_and_what_is_none_is_refused() -> None:
    metrics, name = Metrics(lambda: None), 'a"b\\n\n# HELP accel_ops x\naccel_ops{x="\u2028é'
    async with DynamicBatcher(Handler()) as batcher:
        metrics.add(name, batcher)
        for wrong in ("\ud800", 7, None):
            with pytest.raises(accel.InvalidArgumentError, match="name is"):
                metrics.add(wrong, batcher)  # type: ignore[arg-type]
        scrape = Scrape(metrics.render()[0])
        parse_openmetrics(metrics.render("application/openmetrics-text")[0].decode())  # type: ignore[no-untyped-call]
    assert scrape("accel_queue_items", device="", model=name) == 0
    assert "accel_ops" not in scrape.families


def work(library: str, kind: str) -> DeviceWork:
    made = DeviceWork(kind, ((library, kind),), None, is_timed=False)
    made.device = "cpu:0"
    return made


async def test_a_loop_that_was_blocked_shows_its_lag() -> None:
    metrics = Metrics(lambda: None)
    async with accel.System() as system:
        with metrics.watching(system):
            assert [*system.probes.all] == [metrics]
            time.sleep(0.8)  # beyond the first reading
            await asyncio.sleep(0.01)
        assert not system.probes.all
        scrape = Scrape(metrics.render()[0])
        await asyncio.sleep(0.6)
    assert scrape("accel_loop_lag_seconds_count") == Scrape(metrics.render()[0])("accel_loop_lag_seconds_count") == 1
    assert scrape("accel_loop_lag_seconds_sum") >= 0.2
    assert scrape("accel_loop_lag_seconds_bucket", le="0.1") == 0


async def test_a_spare_child_is_shown_where_there_is_one() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="imports")
        assert await bounded(device.spare_ready())
        scrape = Scrape(Metrics(lambda: device).render()[0])
    assert scrape("accel_device_spare_ready", device="cpu:0") == 1


async def test_the_latency_is_that_of_requests_with_answers() -> None:
    handler = Handler(is_open=False)
    metrics = Metrics(lambda: None)
    async with DynamicBatcher(handler) as batcher:
        metrics.add("m", batcher)
        answered = asyncio.ensure_future(batcher.submit(3))
        leaving = asyncio.ensure_future(batcher.submit(1))
        staying = asyncio.ensure_future(batcher.submit(2, timeout=0.01))
        await handler.until_called(1)
        leaving.cancel()
        with pytest.raises(accel.DeadlineExceededError):
            await staying
        handler.release()
        await answered
    scrape, labels = Scrape(metrics.render()[0]), {"device": "", "model": "m"}
    assert scrape("accel_request_duration_seconds_count", **labels) == 1
    assert scrape("accel_request_duration_seconds_bucket", le="0.005", **labels) == 0
    assert scrape("accel_request_duration_seconds_bucket", le="10.0", **labels) == 1
    assert scrape("accel_request_queue_seconds_count", **labels) == 3
    assert scrape("accel_batch_items_bucket", le="2.0", **labels) == 0
    assert scrape("accel_batch_items_bucket", le="4.0", **labels) == scrape("accel_batch_items_count", **labels) == 1
    assert scrape("accel_batch_items_sum", **labels) == 3


@pytest.mark.parametrize("seed", range(5))
def test_histograms_count_as_those_of_prometheus_client_do(seed: int) -> None:
    rng, metrics, batcher = random.Random(seed), Metrics(lambda: None), DynamicBatcher(Handler())
    metrics.add("m", batcher)
    registry = CollectorRegistry()
    theirs = Histogram("theirs", "Theirs.", registry=registry, buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
    for _ in range(200):
        items = rng.choice([1, 2, 3, 512, 513, rng.randrange(1, 2000)])
        metrics.batch_launched(ServedBatch(batcher.service, [], items))
        theirs.observe(items)
    mine = Scrape(metrics.render()[0]).families["accel_batch_items"].samples
    expected = {(s.name.removeprefix("theirs"), s.labels.get("le")): s.value for s in next(iter(registry.collect())).samples}
    expected = {key: value for key, value in expected.items() if key[0] != "_created"}
    assert {(s.name.removeprefix("accel_batch_items"), s.labels.get("le")): s.value for s in mine} == expected


WRONG_METRICS: list[dict[str, Any]] = [
    {"metrics": "/m", "metrics_registry": 3},
    *({"metrics": "/m", "metrics_labels": each} for each in ({"model": "a"}, {"a-b": "c"}, {"__a": "b"}, {"worker": 3}, {3: "a"})),
    {"metrics_registry": CollectorRegistry()},
    {"metrics_labels": {"a": "b"}},
]


@pytest.mark.parametrize("wrong", WRONG_METRICS)
def test_options_of_metrics_are_honoured_or_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(accel.InvalidArgumentError, match="metrics_"):
        install(FastAPI(), **wrong)
    with pytest.raises(accel.InvalidArgumentError, match="metrics_"):
        with_aiohttp.install(web.Application(), "cpu", **wrong)


def test_without_prometheus_client_the_error_says_what_to_install() -> None:
    program = """
import sys
sys.modules["prometheus_client"] = None
from fastapi import FastAPI
from accel.integrations.fastapi import install
install(FastAPI())
try:
    install(FastAPI(), metrics="/metrics")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install '.[metrics]'" in done.stdout


async def test_each_device_of_a_service_has_rows_of_its_own(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        devices = [await system.open_device("cpu") for _ in range(2)]
        inputs = {"x": accel.TensorSpec(("batch", 5), "float32")}
        models = [await device.load_model("tests.model_support:Affine", weights=affine(rng), inputs=inputs) for device in devices]
        metrics = Metrics(lambda: devices[0])
        async with accel.serve(models, max_items=1) as service:
            metrics.add("m", service)
            await asyncio.gather(*[service.submit(rng.standard_normal(5, np.float32)) for _ in range(20)])
            scrape, replicas = Scrape(metrics.render()[0]), service.statistics().replicas
        assert sum(replica.batches for replica in replicas) == 20
        for replica in replicas:
            assert scrape("accel_replica_batches_total", device=replica.device, model="m") == replica.batches > 0
            assert scrape("accel_model_version", device=replica.device, model="m") == 1
            assert scrape("accel_device_ready", device=replica.device) == 1


async def test_a_world_has_rows_and_so_has_each_rank(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        world = await system.open_world("cpu", ranks=2)
        inputs = {"x": accel.TensorSpec(("batch", 5), "float64")}
        model = await world.load_model(
            "tests.sharded_models:Mlp", weights=sharded_models.weights(), inputs=inputs, split=sharded_models.SPLIT
        )
        metrics = Metrics(lambda: None)
        async with accel.serve(model) as service:
            metrics.add("m", service)
            await service.submit(rng.standard_normal(5))
            scrape = Scrape(metrics.render()[0])
    assert scrape("accel_replica_batches_total", device="world:1", model="m") == 1
    assert scrape("accel_model_version", device="world:1", model="m") == 1
    assert (scrape("accel_world_ready", world="world:1"), scrape("accel_world_epoch", world="world:1")) == (1, 1)
    assert [scrape("accel_device_ready", device=name) for name in ("cpu:0", "cpu:0#2")] == [1, 1]
