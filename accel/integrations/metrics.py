"""Metrics of services and of their device for Prometheus.

Counters are read when they are scraped, from what services and devices count anyway. Only the latency of requests is observed as they end.

Needs prometheus_client: ``pip install '.[metrics]'``, in a checkout.
"""

from __future__ import annotations

import contextlib
import copy
import re
from typing import TYPE_CHECKING, Any

from accel.device import DeviceState
from accel.errors import ClosedError, InvalidArgumentError

try:
    from prometheus_client import CollectorRegistry, Histogram
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
    from prometheus_client.registry import Collector
except ImportError as missing:
    message = "accel.integrations.metrics needs prometheus_client. In a checkout, run: pip install '.[metrics]'"
    raise ImportError(message, name=missing.name) from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from accel.device import Device
    from accel.patterns import BatcherStatistics, DynamicBatcher

__all__ = ["Metrics"]

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Upper bounds of the latency histogram, in seconds: from a small batch on an idle GPU to a recovery without a spare."""

_LABELS = ("device", "model")
"""Of everything that a service counts."""


class Metrics:
    """The metrics of one application. ``install(app, metrics="/metrics")`` makes them, and the route that shows them.

    Parameters
    ----------
    device
        Returns the device when asked, or ``None`` while there is none.
    registry
        Another registry, whose metrics are rendered with these.
    labels
        Labels that every sample gets.

    Attributes
    ----------
    registry : prometheus_client.CollectorRegistry
        The application's own; metrics of the application may be added to it.

    Raises
    ------
    InvalidArgumentError
        ``registry`` is none, or ``labels`` are not names that these metrics have not, each with a text.
    """

    def __init__(
        self, device: Callable[[], Device | None], *, registry: CollectorRegistry | None = None, labels: Mapping[str, str] | None = None
    ) -> None:
        if registry is not None and not callable(getattr(registry, "collect", None)):
            raise InvalidArgumentError(f"metrics_registry is {registry!r}", remedy="Give a CollectorRegistry of prometheus_client.")
        self._other = registry
        self._constant = _checked(labels)
        self._device = device
        self._services: dict[str, tuple[DynamicBatcher[Any, Any], Any]] = {}
        self.registry = CollectorRegistry()
        self._latency = Histogram(
            "accel_request_duration_seconds",
            "Seconds from the submission of a request that had room to its answer or error.",
            _LABELS,
            registry=self.registry,
            buckets=_BUCKETS,
        )
        self.registry.register(self)

    def add(self, name: str, service: DynamicBatcher[Any, Any]) -> None:
        """Show a service, or any batcher, under a name: the label ``model``. One of the same name is replaced.

        Raises
        ------
        InvalidArgumentError
            It has no statistics.
        """
        if not callable(getattr(service, "statistics", None)):
            raise InvalidArgumentError(f"service is {service!r}", remedy="Give a ModelService, or a DynamicBatcher.")
        self._services[name] = (service, self._latency.labels(self._device_name(service), name))

    def observe(self, name: str, seconds: float) -> None:
        """Count the latency of a request to the service of this name; does nothing if there is none."""
        found = self._services.get(name)
        if found is not None:
            found[1].observe(seconds)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics as text, and its content type.

        Parameters
        ----------
        accept
            The request's header: the format may be OpenMetrics.
        """
        encode, content_type = choose_encoder(accept)
        return encode(_Rendered(self.registry, self._other, self._constant)), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield what can be read now; called by the registry."""
        device = self._device()
        if device is not None:
            yield from _of_device(device)
            yield from _of_hardware(device)
        if self._services:
            yield from self._of_services()

    def _device_name(self, service: Any) -> str:
        """Return the name of a service's device, or of the application's."""
        model = getattr(service, "model", None)
        device = self._device() if model is None else model.device
        return "" if device is None else str(device.name)

    def _of_services(self) -> Iterator[Metric]:
        read = [((self._device_name(service), name), service, service.statistics()) for name, (service, _) in self._services.items()]

        requests = CounterMetricFamily("accel_requests", "Requests, by how they ended.", labels=(*_LABELS, "outcome"))
        for labels, _, statistics in read:
            for outcome in _OUTCOMES:
                requests.add_metric((*labels, outcome), getattr(statistics, outcome))
        yield requests

        sizes = SummaryMetricFamily("accel_batch_items", "Batches, and the items in them.", labels=_LABELS)
        for labels, _, statistics in read:
            sizes.add_metric(labels, statistics.batches, round(statistics.batches * statistics.mean_batch))
        yield sizes

        for field, (name, text) in _COUNTED.items():
            yield _filled(CounterMetricFamily(name, text, labels=_LABELS), read, field)
        for field, (name, text) in _GAUGES.items():
            yield _filled(GaugeMetricFamily(name, text, labels=_LABELS), read, field)

        models = [(labels, service.model) for labels, service, _ in read if hasattr(service, "model")]
        versions = GaugeMetricFamily("accel_model_version", "Number of the weights that serve, from 1.", labels=_LABELS)
        forwards = CounterMetricFamily(
            "accel_model_forwards", "Runs of the model, by the bucket that its inputs were padded to.", labels=(*_LABELS, "bucket")
        )
        replays = CounterMetricFamily("accel_model_graph_replays", "Runs of the model that replayed a CUDA graph.", labels=_LABELS)
        for labels, model in models:
            replays.add_metric(labels, model.replays)
            with contextlib.suppress(ClosedError):  # the model, and its weights with it
                versions.add_metric(labels, model.version)
            for lengths, count in model.forwards.items():
                bucket = ",".join(f"{dim}={length}" for dim, length in zip(model.buckets.lengths, lengths, strict=True))
                forwards.add_metric((*labels, bucket), count)
        yield from (versions, forwards, replays)


_OWN_LABELS = {*_LABELS, "outcome", "bucket", "state", "xid", "le", "quantile"}


def _checked(labels: Mapping[str, str] | None) -> dict[str, str]:
    found = dict(labels or {})
    for name, value in found.items():
        if (
            not isinstance(name, str)
            or not re.fullmatch(r"(?!__)[a-zA-Z_]\w*", name, re.ASCII)
            or name in _OWN_LABELS
            or not isinstance(value, str)
        ):
            raise InvalidArgumentError(
                f"metrics_labels has {value!r} for {name!r}",
                remedy=f"Give texts for names of labels other than {', '.join(sorted(_OWN_LABELS))}.",
            )
    return found


class _Rendered(Collector):
    """The metrics of two registries, with labels that all of them get."""

    def __init__(self, own: Collector, other: Collector | None, labels: Mapping[str, str]) -> None:
        self._parts = (own,) if other is None or other is own else (own, other)
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for part in self._parts:
            for metric in part.collect():
                labelled = copy.copy(metric)
                labelled.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in metric.samples]
                yield labelled


_OUTCOMES = ("answered", "failed", "expired", "dropped", "abandoned", "rejected", "refused")
"""Fields of the statistics."""

_COUNTED = {
    "retried": ("accel_requests_retried", "Times that a request was run again."),
    "isolated": ("accel_requests_isolated", "Requests that were on the device at a fault, and went to quarantine."),
    "poisoned": ("accel_requests_poisoned", "Requests that were found to fault the context by themselves."),
}
"""Field of the statistics -> name and description of a counter."""

_GAUGES = {
    "queued": ("accel_queue_items", "Items in the queue."),
    "waiting": ("accel_queue_waiting_items", "Items that wait for room in the queue."),
    "in_flight": ("accel_batches_in_flight", "Batches that run."),
    "isolating": ("accel_requests_isolating", "Requests in quarantine."),
}
"""Field of the statistics -> name and description of a gauge."""


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, read: list[tuple[tuple[str, str], Any, BatcherStatistics]], field: str
) -> Metric:
    for labels, _, statistics in read:
        family.add_metric(labels, getattr(statistics, field))
    return family


def _of_device(device: Device) -> Iterator[Metric]:
    info, health = device.info(), device.health()

    def metric(name: str, text: str, value: float, kind: type[CounterMetricFamily | GaugeMetricFamily] = GaugeMetricFamily) -> Metric:
        family = kind(f"accel_device_{name}", text, labels=("device",))
        family.add_metric((info.name,), value)
        return family

    states = GaugeMetricFamily("accel_device_state", "1 for the state that the device is in.", labels=("device", "state"))
    for state in DeviceState:
        states.add_metric((info.name, state.value), info.state is state)
    yield states
    yield metric("ready", "Whether the device serves.", health.is_ready)
    yield metric("stalled", "Whether an op does not end, or a child process does not answer.", health.is_stalled)
    yield metric("generation", "Number of the device's context, from 1.", info.generation)
    # Every generation has ended by a fault but this one, and this one if it is over.
    faults = max(0, info.generation - (info.state not in (DeviceState.REBUILDING, DeviceState.LOST)))
    yield metric("faults", "Faults that ended a context.", faults, CounterMetricFamily)
    yield metric("restarts", "Contexts that were made after a fault.", info.restarts, CounterMetricFamily)
    yield metric("queued_ops", "Ops and batches in the device's queue.", info.queued)
    yield metric("in_flight_ops", "Ops that were sent to the device and have not ended.", info.in_flight)
    memory = info.memory
    yield metric("memory_used_bytes", "Device memory of live buffers.", memory.used)
    yield metric("memory_durable_bytes", "The part of the used memory that outlives faults.", memory.durable)
    yield metric("memory_reserved_bytes", "Device memory taken from the driver.", memory.reserved)
    if memory.limit is not None:
        yield metric("memory_limit_bytes", "Most device memory that may be reserved.", memory.limit)


_HARDWARE = {
    "utilization": ("utilization_ratio", "Part of the last sampling period in which the hardware worked."),
    "memory_used": ("memory_used_bytes", "Memory of the hardware that is in use, by all processes."),
    "memory_total": ("memory_total_bytes", "Memory of the hardware."),
    "power": ("power_watts", "Power that the hardware draws."),
    "temperature": ("temperature_celsius", "Temperature of the hardware."),
    "uncorrected_errors": ("uncorrected_errors", "Memory errors that ECC could not correct, since the driver was loaded."),
    "remapped_rows": ("remapped_rows", "Rows of memory that were replaced after errors."),
    "remap_pending": ("remap_pending", "Whether a row of memory waits for a reset of the hardware to be replaced."),
    "remap_failed": ("remap_failed", "Whether a row of memory could not be replaced."),
}
"""Field of :class:`~accel.HardwareInfo` -> name and description of a gauge."""


def _of_hardware(device: Device) -> Iterator[Metric]:
    """Yield what the hardware told last; of stale values only their age."""
    info = device.hardware()
    if info is None:
        return
    age = GaugeMetricFamily("accel_hardware_age_seconds", "Seconds since the hardware was read.", labels=("device",))
    age.add_metric((device.name,), info.age)
    yield age
    if info.is_stale:
        return
    for field, (name, text) in _HARDWARE.items():
        if (value := getattr(info, field)) is not None:
            gauge = GaugeMetricFamily(f"accel_hardware_{name}", text, labels=("device",))
            gauge.add_metric((device.name,), value)
            yield gauge
    xids = CounterMetricFamily("accel_hardware_xid_errors", "Xid errors of the NVIDIA driver, by number.", labels=("device", "xid"))
    for xid, count in info.xid_errors.items():
        xids.add_metric((device.name, str(xid)), count)
    yield xids
