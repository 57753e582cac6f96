"""Metrics of services and of their device for Prometheus: :data:`METRICS` has all of them.

Counters are read when they are scraped, from what services and devices count anyway. The others are counted by :class:`Metrics`, which is a probe.

Needs prometheus_client: ``pip install '.[metrics]'``, in a checkout.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
from bisect import bisect_left, bisect_right
from itertools import accumulate, chain
from operator import itemgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from accel.device import DeviceState, Pool, World
from accel.errors import ClosedError, InvalidArgumentError
from accel.patterns.shares import OUTCOMES
from accel.telemetry import Probe, fault_code

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
    from prometheus_client.utils import floatToGoString
except ImportError as missing:
    message = "accel.integrations.metrics needs prometheus_client. In a checkout, run: pip install '.[metrics]'"
    raise ImportError(message, name=missing.name) from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from accel.device import Device, System
    from accel.errors import AccelError
    from accel.patterns import DynamicBatcher
    from accel.telemetry import DeviceWork, ServedBatch, Service

__all__ = ["METRICS", "MetricSpec", "Metrics"]


class MetricSpec(NamedTuple):
    """One metric.

    Attributes
    ----------
    name
        Without the suffix ``_total`` that counters have.
    kind
        Its type.
    labels
        Names of its labels.
    text
        What it is.
    bounds
        Upper bounds of a histogram's buckets.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    text: str
    bounds: tuple[float, ...] = ()


_SERVICE = ("device", "model")
_TENANT = (*_SERVICE, "tenant")
_DEVICE = ("device",)
_LATENCY = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""From a small batch on an idle GPU to a recovery without a spare."""

METRICS = (
    MetricSpec(
        "accel_request_duration_seconds",
        "histogram",
        _SERVICE,
        "Seconds from the submission of a request to its answer. Those without an answer are in accel_requests_total alone.",
        _LATENCY,
    ),
    MetricSpec(
        "accel_request_queue_seconds",
        "histogram",
        _SERVICE,
        "Seconds from the submission of a request to the first batch that it is in.",
        (0.0001, 0.0005, *_LATENCY),
    ),
    MetricSpec(
        "accel_requests",
        "counter",
        (*_SERVICE, "outcome"),
        "Requests by how they ended: answered, failed, expired (their timeout), dropped or abandoned (by their callers), rejected (no room), "
        "refused (known poison).",
    ),
    MetricSpec("accel_requests_retried", "counter", _SERVICE, "Times that a request was run again."),
    MetricSpec("accel_requests_isolated", "counter", _SERVICE, "Requests that were on the device at a fault, and went to quarantine."),
    MetricSpec("accel_requests_poisoned", "counter", _SERVICE, "Requests that were found to fault the context by themselves."),
    MetricSpec("accel_requests_isolating", "gauge", _SERVICE, "Requests in quarantine."),
    MetricSpec("accel_queue_items", "gauge", _SERVICE, "Items in the queue."),
    MetricSpec("accel_queue_waiting_items", "gauge", _SERVICE, "Items that wait for room in the queue."),
    MetricSpec("accel_batches_in_flight", "gauge", _SERVICE, "Batches that run."),
    MetricSpec("accel_batch_items", "histogram", _SERVICE, "Items in a batch.", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
    MetricSpec("accel_batch_device_seconds", "counter", _SERVICE, "Device time of batches."),
    MetricSpec("accel_replica_batches", "counter", _SERVICE, "Batches that a device has taken from the queue of a service."),
    MetricSpec("accel_replica_items", "counter", _SERVICE, "Items in them."),
    MetricSpec("accel_replica_device_seconds", "counter", _SERVICE, "Device time of them."),
    MetricSpec("accel_replica_batches_in_flight", "gauge", _SERVICE, "Batches that a device runs for a service."),
    MetricSpec("accel_replica_draining", "gauge", _SERVICE, "1 while a device takes no more batches, because it is drained."),
    MetricSpec("accel_tenant_device_seconds", "counter", _TENANT, "Device time that a tenant was charged; only of services with shares."),
    MetricSpec("accel_tenant_requests", "counter", (*_TENANT, "outcome"), "Requests of a tenant by how they ended."),
    MetricSpec("accel_tenant_queue_items", "gauge", _TENANT, "Items in the queue of a tenant."),
    MetricSpec("accel_tenant_queue_waiting_items", "gauge", _TENANT, "Items that wait for room in the queue of a tenant."),
    MetricSpec("accel_model_version", "gauge", _SERVICE, "Number of the weights that serve, from 1."),
    MetricSpec(
        "accel_model_forwards",
        "counter",
        (*_SERVICE, "bucket"),
        "Runs of the model, by the bucket that its inputs were padded to: batch=8,length=32.",
    ),
    MetricSpec("accel_model_graph_replays", "counter", _SERVICE, "Runs of the model that replayed a CUDA graph."),
    MetricSpec("accel_ops", "counter", ("device", "library", "kind"), "Ops that have ended on a device, batches' ops too."),
    MetricSpec(
        "accel_device_seconds",
        "counter",
        _DEVICE,
        "Device time that was measured: of batches of services, and of what asked for it. Streams overlap, so it may grow faster than the clock.",
    ),
    MetricSpec("accel_device_state", "gauge", ("device", "state"), "1 for the state that the device is in, 0 for the others."),
    MetricSpec("accel_device_ready", "gauge", _DEVICE, "1 while the device serves, else 0."),
    MetricSpec("accel_device_stalled", "gauge", _DEVICE, "1 while an op does not end or a child process does not answer, else 0."),
    MetricSpec("accel_device_generation", "gauge", _DEVICE, "Number of the device's context, from 1."),
    MetricSpec(
        "accel_device_faults",
        "counter",
        ("device", "code", "scope"),
        "Faults of contexts, by scope and code: the driver's, or how a child ended.",
    ),
    MetricSpec("accel_device_restarts", "counter", _DEVICE, "Contexts that were made after a fault."),
    MetricSpec(
        "accel_device_rebuild_seconds", "histogram", _DEVICE, "Seconds from a fault to the next context.", (0.05, *_LATENCY[6:], 60.0)
    ),
    MetricSpec("accel_world_ready", "gauge", ("world",), "1 while the ranks of a world that serves a model have joined, else 0."),
    MetricSpec("accel_world_epoch", "gauge", ("world",), "Number of their communicator, from 1."),
    MetricSpec("accel_device_spare_ready", "gauge", _DEVICE, "1 while a spare child is ready, else 0; only with standby=."),
    MetricSpec("accel_device_queued_ops", "gauge", _DEVICE, "Ops and batches in the device's queue."),
    MetricSpec("accel_device_in_flight_ops", "gauge", _DEVICE, "Ops that were sent to the device and have not ended."),
    MetricSpec("accel_device_memory_used_bytes", "gauge", _DEVICE, "Device memory of live buffers."),
    MetricSpec("accel_device_memory_durable_bytes", "gauge", _DEVICE, "The part of the used memory that outlives faults."),
    MetricSpec("accel_device_memory_reserved_bytes", "gauge", _DEVICE, "Device memory taken from the driver."),
    MetricSpec("accel_device_memory_peak_bytes", "gauge", _DEVICE, "Most device memory that this context has reserved at once."),
    MetricSpec("accel_device_memory_limit_bytes", "gauge", _DEVICE, "Most device memory that may be reserved; only with memory_limit=."),
    MetricSpec("accel_hardware_age_seconds", "gauge", _DEVICE, "Seconds since the hardware was read; stale values of it are not shown."),
    MetricSpec("accel_hardware_utilization_ratio", "gauge", _DEVICE, "Part of the last sampling period in which the hardware worked."),
    MetricSpec("accel_hardware_memory_used_bytes", "gauge", _DEVICE, "Memory of the hardware that is in use, by all processes."),
    MetricSpec("accel_hardware_memory_total_bytes", "gauge", _DEVICE, "Memory of the hardware."),
    MetricSpec("accel_hardware_power_watts", "gauge", _DEVICE, "Power that the hardware draws."),
    MetricSpec("accel_hardware_temperature_celsius", "gauge", _DEVICE, "Temperature of the hardware."),
    MetricSpec(
        "accel_hardware_uncorrected_errors", "gauge", _DEVICE, "Memory errors that ECC could not correct, since the driver was loaded."
    ),
    MetricSpec("accel_hardware_remapped_rows", "gauge", _DEVICE, "Rows of memory that were replaced after errors."),
    MetricSpec(
        "accel_hardware_remap_pending", "gauge", _DEVICE, "1 while a row of memory waits for a reset of the hardware to be replaced."
    ),
    MetricSpec("accel_hardware_remap_failed", "gauge", _DEVICE, "1 if a row of memory could not be replaced."),
    MetricSpec("accel_hardware_xid_errors", "counter", ("device", "xid"), "Xid errors of the NVIDIA driver, by number."),
    MetricSpec(
        "accel_loop_lag_seconds",
        "histogram",
        (),
        "Seconds that a timer of the event loop was late, twice a second.",
        (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    ),
)
"""All metrics, in the order in which they are shown."""

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
_BOUNDS = {spec.name: spec.bounds for spec in METRICS}

_MOST_KINDS = 1000
"""Kinds of ops, and of faults, that are told apart; later ones count as ``other``."""

_LAG_PERIOD = 0.5
"""Seconds between two readings of the loop's lag."""

# Name of a metric -> field of the statistics of a service, a replica and a tenant, and of the hardware.
_OF_SERVICE = {
    "accel_requests_retried": "retried",
    "accel_requests_isolated": "isolated",
    "accel_requests_poisoned": "poisoned",
    "accel_requests_isolating": "isolating",
    "accel_queue_items": "queued",
    "accel_queue_waiting_items": "waiting",
    "accel_batches_in_flight": "in_flight",
    "accel_batch_device_seconds": "device_seconds",
}
_OF_REPLICA = {
    "accel_replica_batches": "batches",
    "accel_replica_items": "items",
    "accel_replica_device_seconds": "device_seconds",
    "accel_replica_batches_in_flight": "in_flight",
    "accel_replica_draining": "is_draining",
}
_OF_TENANT = {
    "accel_tenant_device_seconds": "device_seconds",
    "accel_tenant_queue_items": "queued",
    "accel_tenant_queue_waiting_items": "waiting",
}
_OF_HARDWARE = {
    "accel_hardware_utilization_ratio": "utilization",
    "accel_hardware_memory_used_bytes": "memory_used",
    "accel_hardware_memory_total_bytes": "memory_total",
    "accel_hardware_power_watts": "power",
    "accel_hardware_temperature_celsius": "temperature",
    "accel_hardware_uncorrected_errors": "uncorrected_errors",
    "accel_hardware_remapped_rows": "remapped_rows",
    "accel_hardware_remap_pending": "remap_pending",
    "accel_hardware_remap_failed": "remap_failed",
}


class _Counts:
    """The observations of one histogram with one set of labels.

    Those of a batch are counted together: one by one, as prometheus_client does, they would cost as much as a small request.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, values: list[float]) -> None:
        if not values:
            return
        values.sort()
        self._sum += sum(values)
        counts, bounds, before = self._counts, self._bounds, 0
        last = bisect_left(bounds, values[-1])
        for bucket in range(bisect_left(bounds, values[0]), last):
            after = bisect_right(values, bounds[bucket], before)
            counts[bucket] += after - before
            before = after
        counts[last] += len(values) - before

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...]) -> None:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


class _Shown(NamedTuple):
    """A service, under the labels that it is shown with, and its histograms."""

    labels: tuple[str, str]
    batcher: DynamicBatcher[Any, Any]
    latency: _Counts
    queue: _Counts
    items: _Counts


class Metrics(Probe):
    """The metrics of one application. ``install(app, metrics="/metrics")`` makes them, and the route that shows them.

    Parameters
    ----------
    device
        Returns the device when asked, or the pool; ``None`` while there is none.
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
        self,
        device: Callable[[], Device | Pool | None],
        *,
        registry: CollectorRegistry | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        if registry is not None and not callable(getattr(registry, "collect", None)):
            raise InvalidArgumentError(f"metrics_registry is {registry!r}", remedy="Give a CollectorRegistry of prometheus_client.")
        self._other = registry
        self._constant = _checked(labels)
        self._device = device
        self._shown: dict[str, _Shown] = {}
        self._services: dict[Service, _Shown] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], _Counts] = {}
        self._ops: dict[tuple[str, str, str], int] = {}
        self._faults: dict[tuple[str, str, str], int] = {}
        self._rebuilding: dict[str, float] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)

    @contextlib.contextmanager
    def watching(self, system: System) -> Iterator[None]:
        """Count in the block what the devices of a system do, and how late timers of the running loop are."""
        loop, timers = asyncio.get_running_loop(), contextlib.ExitStack()

        def arm() -> None:
            timers.pop_all()  # the last one has run
            timers.callback(loop.call_later(_LAG_PERIOD, read_lag, loop.time() + _LAG_PERIOD).cancel)

        def read_lag(due: float) -> None:
            self._counts("accel_loop_lag_seconds", ()).observe([max(0.0, loop.time() - due)])
            arm()

        with timers:
            arm()
            system.probes.add(self)
            try:
                yield
            finally:
                system.probes.remove(self)

    def add(self, name: str, service: DynamicBatcher[Any, Any]) -> None:
        """Show a service, or any batcher, under a name: the label ``model``. One of the same name is replaced.

        Raises
        ------
        InvalidArgumentError
            It is no batcher, or the name is no text that UTF-8 has.
        """
        if not isinstance(name, str) or name != name.encode(errors="replace").decode():
            raise InvalidArgumentError(f"name is {name!r}", remedy="Give a text: a lone surrogate is part of none.")
        if not callable(getattr(service, "statistics", None)):
            raise InvalidArgumentError(f"service is {service!r}", remedy="Give a ModelService, or a DynamicBatcher.")
        if name in self._shown:
            self._services.pop(self._shown[name].batcher.service, None)
        labels = service.service.device or next((device.name for device in self._devices()), ""), name
        counts = [
            self._counts(metric, labels)
            for metric in ("accel_request_duration_seconds", "accel_request_queue_seconds", "accel_batch_items")
        ]
        self._shown[name] = self._services[service.service] = _Shown(labels, service, *counts)
        service.service.probes.add(self)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics as text, and its content type.

        Parameters
        ----------
        accept
            The request's header: the format may be OpenMetrics.
        """
        try:
            encode, content_type = choose_encoder(accept if accept.isascii() else "")
        except (TypeError, ValueError):  # of a version that is no number
            encode, content_type = choose_encoder("")
        return encode(_Rendered(self.registry, self._other, self._constant)), content_type

    def _devices(self) -> tuple[Device, ...]:
        found = self._device()
        if found is None:
            return ()
        return tuple(found) if isinstance(found, Pool) else (found,)

    # -- what is counted as it happens

    def _counts(self, name: str, labels: tuple[str, ...]) -> _Counts:
        found = self._histograms.get((name, labels))
        if found is None:
            found = self._histograms[name, labels] = _Counts(_BOUNDS[name])
        return found

    def batch_launched(self, batch: ServedBatch) -> None:
        """See :meth:`accel.Probe.batch_launched`."""
        shown = self._services.get(batch.service)
        if shown is not None:
            launched_at = batch.launched_at
            shown.items.observe([batch.items])
            shown.queue.observe([launched_at - request.begun_at for request in batch.requests if request.launches == 1])

    def batch_ended(self, batch: ServedBatch) -> None:
        """See :meth:`accel.Probe.batch_ended`."""
        shown = self._services.get(batch.service)
        if shown is not None:
            ended_at = batch.ended_at
            shown.latency.observe([ended_at - request.begun_at for request in batch.answered])

    def op_ended(self, work: DeviceWork) -> None:
        """See :meth:`accel.Probe.op_ended`."""
        for library, kind in work.ops:
            # Each set of weights of a model is a library of its own.
            _count(self._ops, (work.device, "model" if library.startswith("model-") else library, kind))

    def state_changed(self, device: str, state: str, generation: int) -> None:
        """See :meth:`accel.Probe.state_changed`."""
        began = self._rebuilding.pop(device, None)
        if state == "rebuilding":
            self._rebuilding[device] = perf_counter() if began is None else began
        elif state == "ready" and began is not None:
            self._counts("accel_device_rebuild_seconds", (device,)).observe([perf_counter() - began])

    def fault(self, device: str, generation: int, error: AccelError) -> None:
        """See :meth:`accel.Probe.fault`."""
        _count(self._faults, (device, fault_code(error), error.scope.name.lower()))

    # -- what is read at the scrape

    def collect(self) -> Iterator[Metric]:
        """Yield what can be read now; called by the registry."""
        families: dict[str, Any] = {spec.name: _FAMILIES[spec.kind](spec.name, spec.text, labels=spec.labels) for spec in METRICS}

        def add(name: str, labels: tuple[str, ...], value: float) -> None:
            families[name].add_metric(labels, value)

        for shown in self._shown.values():
            _read_service(add, shown.labels, shown.batcher)
        for (name, labels), counts in sorted(self._histograms.items(), key=itemgetter(0)):
            counts.add_to(families[name], labels)
        for key, count in sorted(self._ops.items()):
            add("accel_ops", key, count)
        for key, count in sorted(self._faults.items()):
            add("accel_device_faults", key, count)
        homes = [home for shown in self._shown.values() for home in getattr(shown.batcher, "devices", ())]
        worlds = {home: home.devices for home in homes if isinstance(home, World)}
        for world in worlds:
            add("accel_world_ready", (world.name,), world.state is DeviceState.READY)
            add("accel_world_epoch", (world.name,), world.epoch)
        for device in dict.fromkeys((*self._devices(), *chain.from_iterable(worlds.get(home, (home,)) for home in homes))):
            _read_device(add, device)
            _read_hardware(add, device)
        yield from [family for family in families.values() if family.samples]


def _count(counts: dict[tuple[str, str, str], int], key: tuple[str, str, str]) -> None:
    if key not in counts and len(counts) >= _MOST_KINDS:
        key = key[0], "other", "other"
    counts[key] = counts.get(key, 0) + 1


def _read(add: Callable[[str, tuple[str, ...], float], None], fields: Mapping[str, str], labels: tuple[str, ...], source: object) -> None:
    """Add those fields that are known."""
    for name, field in fields.items():
        if (value := getattr(source, field)) is not None:
            add(name, labels, value)


def _read_service(add: Callable[[str, tuple[str, ...], float], None], labels: tuple[str, str], batcher: DynamicBatcher[Any, Any]) -> None:
    statistics = batcher.statistics()
    for outcome in (*OUTCOMES, "refused"):
        add("accel_requests", (*labels, outcome), getattr(statistics, outcome))
    _read(add, _OF_SERVICE, labels, statistics)
    for replica in statistics.replicas:
        _read(add, _OF_REPLICA, (replica.device or labels[0], labels[1]), replica)
    for tenant in statistics.tenants:
        named = *labels, tenant.tenant
        _read(add, _OF_TENANT, named, tenant)
        for outcome in OUTCOMES:
            add("accel_tenant_requests", (*named, outcome), getattr(tenant, outcome))
    for model in getattr(batcher, "models", ()):
        own = model.device.name, labels[1]
        add("accel_model_graph_replays", own, model.replays)
        with contextlib.suppress(ClosedError):  # the model, and its weights with it
            add("accel_model_version", own, model.version)
        for lengths, count in model.forwards.items():
            bucket = ",".join(f"{dim}={length}" for dim, length in zip(model.buckets.lengths, lengths, strict=True))
            add("accel_model_forwards", (*own, bucket), count)


def _read_device(add: Callable[[str, tuple[str, ...], float], None], device: Device) -> None:
    info, health = device.info(), device.health()
    for state in DeviceState:
        add("accel_device_state", (info.name, state.value), info.state is state)
    memory = info.memory
    values = {
        "seconds": info.device_seconds,
        "ready": health.is_ready,
        "stalled": health.is_stalled,
        "generation": info.generation,
        "restarts": info.restarts,
        "spare_ready": None if info.standby == "none" else info.standby == "ready",
        "queued_ops": info.queued,
        "in_flight_ops": info.in_flight,
        "memory_used_bytes": memory.used,
        "memory_durable_bytes": memory.durable,
        "memory_reserved_bytes": memory.reserved,
        "memory_peak_bytes": memory.peak,
        "memory_limit_bytes": memory.limit,
    }
    for name, value in values.items():
        if value is not None:
            add(f"accel_device_{name}", (info.name,), value)


def _read_hardware(add: Callable[[str, tuple[str, ...], float], None], device: Device) -> None:
    """Add what the hardware told last; of stale values only their age."""
    info = device.hardware()
    if info is None:
        return
    add("accel_hardware_age_seconds", (device.name,), info.age)
    if info.is_stale:
        return
    _read(add, _OF_HARDWARE, (device.name,), info)
    for xid, count in info.xid_errors.items():
        add("accel_hardware_xid_errors", (device.name, str(xid)), count)


_OWN_LABELS = {*(label for spec in METRICS for label in spec.labels), "le", "quantile"}


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
