"""P30: requests a second of a served model with metrics, or with traces, beside the same service without.

``python benchmarks/observed_service.py [--host inline] [--clients 64] [--seconds 1] [--rounds 15] [--traces 0.01]``: the CPU backend.

One service is measured. The two ways take turns, in an order that changes; the median of the rounds' ratios counts. The processor time of a request says the
same on a busy machine. With ``--traces`` each request is sent below a span of its client, as a web framework makes it, both ways; this share
of them is sampled. What an exporter makes of a span is the application's cost,
and is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import numpy as np
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

import accel
from accel.integrations.metrics import Metrics
from accel.integrations.otel import instrument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from accel.patterns import ModelService

WIDTH = 256
MUST = {"metrics": 0.98, "traces": 0.97}


class Network:
    """Two layers in numpy."""

    def open(self, weights: Any, description: object, stream: object) -> None:
        """Take the weights."""
        self.layers = [np.asarray(weights[name]) for name in ("first", "second")]

    def run(self, inputs: Any) -> Any:
        """Compute a batch."""
        first, second = self.layers
        return np.maximum(np.asarray(inputs["x"]) @ first, 0.0) @ second


class Dropped(SpanExporter):
    """Drops spans. One that kept them would charge the later passes with garbage collections of all of them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Drop spans."""
        return SpanExportResult.SUCCESS


class Pass(NamedTuple):
    """One pass: requests a second, and microseconds of this process's processors for each."""

    rate: float
    cpu_us: float


@contextlib.contextmanager
def tracing(system: accel.System, provider: TracerProvider) -> Iterator[None]:
    """Trace the services of a system in the block."""
    probe = instrument(system, tracer_provider=provider)
    yield
    system.probes.remove(probe)


async def measured(service: ModelService, clients: int, seconds: float, provider: TracerProvider | None) -> Pass:
    """Send requests from ``clients`` tasks, each of which awaits an answer before its next request, below a span of ``provider``."""
    tracer = None if provider is None else provider.get_tracer("client")
    item, count, until = np.ones(WIDTH, np.float32), 0, time.perf_counter() + seconds

    async def client() -> None:
        nonlocal count
        while time.perf_counter() < until:
            with contextlib.nullcontext() if tracer is None else tracer.start_as_current_span("request"):
                await service.submit(item)
            count += 1

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*[client() for _ in range(clients)])
    return Pass(count / (time.perf_counter() - began), (time.process_time() - cpu) / count * 1e6)


async def compare(host: Any, clients: int, seconds: float, rounds: int, traces: float | None) -> dict[str, Any]:
    """Return the medians of both ways and of the rounds' ratios."""
    what, provider = "metrics" if traces is None else "traces", None
    if traces is not None:
        provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(traces)))
        provider.add_span_processor(BatchSpanProcessor(Dropped()))
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) for name in ("first", "second")}
    plain, watched = list[Pass](), list[Pass]()
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host)
        model = await device.load_model(
            "benchmarks.observed_service:Network",
            weights=weights,
            inputs={"x": accel.TensorSpec(("batch", WIDTH), "float32")},
            buckets={"batch": (1, 8, 32, 64)},
        )
        async with accel.serve(model) as service:
            metrics = Metrics(lambda: device)
            metrics.add("network", service)
            system.probes.remove(metrics)
            for number in range(rounds + 1):
                found = {}
                for is_watched in (False, True) if number % 2 else (True, False):
                    watching = metrics.watching(system) if provider is None else tracing(system, provider)
                    with watching if is_watched else contextlib.nullcontext():
                        found[is_watched] = await measured(service, clients, seconds, provider)
                if number:  # the first round warms up
                    plain.append(found[False])
                    watched.append(found[True])
            text, _ = metrics.render()
    counted = next(line for line in text.decode().splitlines() if line.startswith("accel_request_duration_seconds_count"))
    assert provider is not None or float(counted.split()[-1]) > 0, "the metrics saw the requests"
    return {
        "host": host,
        "requests_per_s": round(statistics.median(each.rate for each in plain)),
        f"with_{what}": round(statistics.median(each.rate for each in watched)),
        "ratio": round(statistics.median(b.rate / a.rate for a, b in zip(plain, watched, strict=True)), 4),
        "cpu_us": round(statistics.median(each.cpu_us for each in plain), 2),
        "cpu_ratio": round(statistics.median(a.cpu_us / b.cpu_us for a, b in zip(plain, watched, strict=True)), 4),
        "must": MUST[what],
    }


def main() -> None:
    """Measure both hosts, or one, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", choices=("inline", "process"), help="only this one")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each pass")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--traces", type=float, metavar="RATIO", help="measure traces with this share of requests sampled, instead of metrics"
    )
    parser.add_argument("--json", help="a file for the results")
    options = parser.parse_args()
    hosts = (options.host,) if options.host else ("inline", "process")
    found = [asyncio.run(compare(host, options.clients, options.seconds, options.rounds, options.traces)) for host in hosts]
    for row in found:
        print(json.dumps(row))
    if options.json:
        Path(options.json).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
