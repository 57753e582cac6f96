"""Traces of services for OpenTelemetry.

::

    instrument(system)  # the provider, its sampler and its exporter are the application's

Needs the API alone: ``pip install '.[otel]'``, in a checkout.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from accel.device import Device
from accel.errors import InvalidArgumentError
from accel.telemetry.probe import Probe

try:
    from opentelemetry import trace
    from opentelemetry.context import Context, get_current
    from opentelemetry.trace import Link, StatusCode
except ImportError as missing:
    message = "accel.integrations.otel needs opentelemetry-api. In a checkout, run: pip install '.[otel]'"
    raise ImportError(message, name=missing.name) from missing

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

    from accel.device import System
    from accel.errors import AccelError
    from accel.telemetry.probe import ServedBatch, ServedRequest, Service

__all__ = ["instrument"]

_SPAN = next(iter(trace.set_span_in_context(trace.INVALID_SPAN, Context())))
"""The key of a context's span. ``get_current_span`` looks at the type of a span too, which costs as much as all else for a request that is not traced."""

_MOST_LINKS = 128
"""The limit of OpenTelemetry's default for a span."""


def instrument(system: System | Device, *, tracer_provider: TracerProvider | None = None) -> Probe:
    """Trace the requests to all services on the devices of a system.

    A request that is submitted where a span is recorded, such as that of the web framework, gets a
    span ``accel.request``, its child. A batch that has such requests gets a span ``accel.batch``: a
    root with links to them, because it is no more the child of one than of another. Its child
    ``accel.device`` is as long as the device time that was measured. Where no span is recorded,
    nothing is made.

    Parameters
    ----------
    system
        Whose services are traced, from now on; or one of its devices.
    tracer_provider
        Makes the spans; ``None``: the global one.

    Returns
    -------
    Probe
        ``system.probes.remove(probe)`` ends it.

    Raises
    ------
    InvalidArgumentError
        ``tracer_provider`` is none.
    """
    if tracer_provider is not None and not isinstance(tracer_provider, trace.TracerProvider):
        raise InvalidArgumentError(f"tracer_provider is {tracer_provider!r}", remedy="Give a TracerProvider of OpenTelemetry, or None.")
    devices = [system] if isinstance(system, Device) else system.devices
    probe = _Traces(trace.get_tracer("accel", tracer_provider=tracer_provider), {device.name: device.generation for device in devices})
    system.probes.add(probe)
    return probe


class _Traces(Probe):
    """Makes the spans.

    Parameters
    ----------
    tracer
        Of OpenTelemetry.
    generations
        Name of a device -> the number of its context.
    """

    def __init__(self, tracer: trace.Tracer, generations: dict[str, int]) -> None:
        self._tracer = tracer
        self._generations = generations
        self._requests: dict[ServedRequest, Span] = {}
        self._batches: dict[ServedBatch, tuple[Span, list[Span]]] = {}

    def request_begun(self, request: ServedRequest) -> None:
        if (parent := get_current().get(_SPAN)) is None or not parent.is_recording():  # type: ignore[attr-defined]
            return
        said: dict[str, str | int] = {
            "accel.service": request.service.name,
            "accel.request.number": request.number,
            "accel.request.items": request.size,
        }
        self._requests[request] = self._tracer.start_span("accel.request", attributes=said)
        request.on_end(partial(self._end, request))

    def request_quarantined(self, request: ServedRequest) -> None:
        if (span := self._requests.get(request)) is not None:
            span.add_event("quarantined")

    def _end(self, request: ServedRequest, error: BaseException | None) -> None:
        span = self._requests.pop(request)
        if error is not None:
            span.set_attributes(_of_error(error))
            if not isinstance(error, asyncio.CancelledError):  # its caller left
                span.set_status(StatusCode.ERROR)
        span.end()

    def batch_launched(self, batch: ServedBatch) -> None:
        spans = self._requests
        traced = [(request, spans[request]) for request in batch.requests if request in spans] if spans else []
        if not traced:
            return
        counts = {"items": batch.items, "requests": len(batch.requests), "traced": len(traced)}
        said = self._of(batch.service, batch.device) | {f"accel.batch.{name}": count for name, count in counts.items()}
        links = [Link(span.get_span_context()) for _, span in traced[:_MOST_LINKS]]
        began_at = _nanoseconds(batch.launched_at)
        batch_span = self._tracer.start_span("accel.batch", Context(), attributes=said, links=links, start_time=began_at)
        self._batches[batch] = batch_span, [span for _, span in traced]
        place = {name: said[name] for name in ("accel.device", "accel.generation")}
        for request, span in traced:
            if request.launches > 1:
                span.add_event("retried", place)
            else:  # attributes cost less on the span than on the event
                span.set_attributes(place)
                span.add_event("launched")
            if batch_span.is_recording():
                span.add_link(batch_span.get_span_context())

    def batch_ended(self, batch: ServedBatch) -> None:
        if batch not in self._batches:
            return
        batch_span, spans = self._batches.pop(batch)
        ended_at, seconds = _nanoseconds(batch.ended_at), batch.device_seconds
        if seconds is not None:
            for span in spans:
                if span.is_recording():  # its caller may have left
                    span.set_attribute("accel.batch.device_seconds", seconds)
            if batch_span.is_recording():
                context, began_at = trace.set_span_in_context(batch_span, Context()), ended_at - round(seconds * 1e9)
                said = self._of(batch.service, batch.device)
                self._tracer.start_span("accel.device", context, attributes=said, start_time=began_at).end(ended_at)
        if batch.error:
            batch_span.set_attribute("error.type", batch.error)
            batch_span.set_status(StatusCode.ERROR)
        batch_span.end(ended_at)

    def state_changed(self, device: str, state: str, generation: int) -> None:
        self._generations[device] = generation

    def fault(self, device: str, generation: int, error: AccelError) -> None:
        said = {**_of_error(error), "accel.device": device, "accel.generation": generation, "accel.fault.scope": error.scope.name}
        for batch, (batch_span, spans) in self._batches.items():
            for span in (batch_span, *spans) if batch.device == device else ():
                if span.is_recording():
                    span.add_event("fault", said)

    def _of(self, service: Service, device: str) -> dict[str, str | int]:
        """Return the attributes that all spans have."""
        return {
            "accel.service": service.name,
            "accel.device": device,
            "accel.generation": self._generations.get(device, 0),
        }


def _nanoseconds(at: float) -> int:
    """Return nanoseconds since 1970 for a reading of ``time.perf_counter``."""
    return time.time_ns() - round((time.perf_counter() - at) * 1e9)


def _of_error(error: BaseException) -> dict[str, Any]:
    """Return what is told of an error: not its text, which may name what a request holds."""
    found: dict[str, Any] = {"error.type": type(error).__qualname__}
    for name in ("code", "executed"):
        if (value := getattr(error, name, None)) is not None:
            found[f"accel.error.{name}"] = value
    return found
