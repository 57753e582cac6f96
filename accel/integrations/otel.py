"""Traces of services for OpenTelemetry.

::

    instrument(system)  # the provider, its sampler and its exporter are the application's

Needs the API alone: ``pip install '.[otel]'``, in a checkout.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from accel.device import Device
from accel.errors import InvalidArgumentError
from accel.telemetry.probe import Probe

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, StatusCode
except ImportError as missing:
    message = "accel.integrations.otel needs opentelemetry-api. In a checkout, run: pip install '.[otel]'"
    raise ImportError(message, name=missing.name) from missing

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

    from accel.device import System
    from accel.errors import AccelError
    from accel.telemetry.probe import ServedBatch, ServedRequest

__all__ = ["instrument"]

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
        self._batches: dict[ServedBatch, Span] = {}
        self._epoch = time.time_ns() - time.perf_counter_ns()

    def request_begun(self, request: ServedRequest) -> None:
        if not trace.get_current_span().is_recording():
            return
        said: dict[str, str | int] = {
            "accel.service": request.service.name,
            "accel.request.number": request.number,
            "accel.request.items": request.size,
        }
        span = self._requests[request] = self._tracer.start_span("accel.request", attributes=said)
        span.add_event("queued")

    def request_quarantined(self, request: ServedRequest) -> None:
        if (span := self._requests.get(request)) is not None:
            span.add_event("quarantined")

    def request_ended(self, request: ServedRequest, error: BaseException | None) -> None:
        if (span := self._requests.pop(request, None)) is None:
            return
        if error is not None:
            span.set_attributes(_of_error(error))
            if not isinstance(error, asyncio.CancelledError):  # its caller left
                span.set_status(StatusCode.ERROR)
        span.end()

    def batch_launched(self, batch: ServedBatch) -> None:
        traced = self._traced(batch)
        if not traced:
            return
        said: dict[str, str | int] = {
            **self._of_device(batch.service.device),
            "accel.service": batch.service.name,
            "accel.batch.items": batch.items,
            "accel.batch.requests": len(batch.requests),
            "accel.batch.traced": len(traced),
        }
        links = [Link(span.get_span_context()) for span in [*traced.values()][:_MOST_LINKS]]
        span = self._tracer.start_span("accel.batch", Context(), attributes=said, links=links, start_time=self._at(batch.launched_at))
        self._batches[batch] = span
        for request, its_span in traced.items():
            its_span.set_attributes(self._of_device(batch.service.device))
            its_span.add_event("retried" if request.launches > 1 else "launched", {"accel.batch.items": batch.items})
            its_span.add_link(span.get_span_context())

    def batch_ended(self, batch: ServedBatch) -> None:
        if (span := self._batches.pop(batch, None)) is None:
            return
        ended_at, seconds = self._at(batch.ended_at), batch.device_seconds
        if seconds is not None:
            context, said = trace.set_span_in_context(span, Context()), self._of_device(batch.service.device)
            device = self._tracer.start_span("accel.device", context, attributes=said, start_time=ended_at - round(seconds * 1e9))
            device.end(ended_at)
            for its_span in self._traced(batch).values():
                its_span.set_attribute("accel.batch.device_seconds", seconds)
        if batch.error:
            span.set_attribute("error.type", batch.error)
            span.set_status(StatusCode.ERROR)
        span.end(ended_at)

    def state_changed(self, device: str, state: str, generation: int) -> None:
        self._generations[device] = generation

    def fault(self, device: str, generation: int, error: AccelError) -> None:
        said = {**_of_error(error), "accel.device": device, "accel.generation": generation, "accel.fault.scope": error.scope.name}
        for batch, span in self._batches.items():
            if batch.service.device == device:
                for each in (span, *self._traced(batch).values()):
                    each.add_event("fault", said)

    def _traced(self, batch: ServedBatch) -> dict[ServedRequest, Span]:
        """Return the spans of the requests in a batch that have one."""
        spans = self._requests
        return {request: spans[request] for request in batch.requests if request in spans} if spans else {}

    def _of_device(self, device: str) -> dict[str, str | int]:
        return {"accel.device": device, "accel.generation": self._generations.get(device, 0)} if device else {}

    def _at(self, seconds: float) -> int:
        """Return nanoseconds since 1970 for a reading of ``time.perf_counter``."""
        return self._epoch + round(seconds * 1e9)


def _of_error(error: BaseException) -> dict[str, Any]:
    """Return what is told of an error: not its text, which may name what a request holds."""
    found: dict[str, Any] = {"error.type": type(error).__qualname__}
    for name in ("code", "executed"):
        if (value := getattr(error, name, None)) is not None:
            found[f"accel.error.{name}"] = value
    return found
