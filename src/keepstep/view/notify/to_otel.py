"""OpenTelemetry: pace as gauges, notices and incidents as spans, over OTLP and HTTP.

All spans about one incident are one trace: a short one for each notice, and when it is over one from onset to end.
"""

from __future__ import annotations

import hashlib
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Status, StatusCode

from keepstep.view.notify.notice import Notice
from keepstep.view.notify.pace import PacePoint
from keepstep.view.notify.tracker import TrackerOptions

_UNITS = {
    "iteration_s": ("keepstep.iteration.duration", "s", "median duration of the ranks' last iterations"),
    "own_s": ("keepstep.iteration.own", "s", "median time of an iteration in which a rank waits for nobody"),
    "lost_share": ("keepstep.lost.ratio", "1", "share of the time that is being lost"),
    "open_incidents": ("keepstep.incidents.open", "{incident}", "incidents that are not over"),
    "loss_now_steps": ("keepstep.loss.now", "{step}", "steps that would be lost with the worst placed node"),
}
_EXPORT_MS, _TIMEOUT_S = 10_000, 10


class _TraceOfIncident(RandomIdGenerator):
    """Gives the trace that was asked for."""

    trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id or super().generate_trace_id()


class OtelTracker:
    """Sends to one collector."""

    def __init__(self, options: TrackerOptions) -> None:
        resource = Resource.create({"service.name": "keepstep", "keepstep.run": options.run})
        base, headers = options.uri.rstrip("/"), dict(options.headers)
        self._ids = _TraceOfIncident()
        self._traces = TracerProvider(resource=resource, id_generator=self._ids)
        spans = OTLPSpanExporter(f"{base}/v1/traces", headers=headers, timeout=_TIMEOUT_S)
        self._traces.add_span_processor(BatchSpanProcessor(spans, schedule_delay_millis=1000))
        metrics = OTLPMetricExporter(f"{base}/v1/metrics", headers=headers, timeout=_TIMEOUT_S)
        reader = PeriodicExportingMetricReader(metrics, export_interval_millis=_EXPORT_MS)
        self._metrics = MeterProvider([reader], resource=resource)
        meter = self._metrics.get_meter("keepstep")
        self._tracer = self._traces.get_tracer("keepstep")
        self._gauges = {
            name: meter.create_gauge(metric, unit, text) for name, (metric, unit, text) in _UNITS.items()
        }
        self._step = meter.create_gauge("keepstep.step", "{step}", "newest step")

    def pace(self, point: PacePoint) -> None:
        """Set the gauges."""
        self._step.set(point.step)
        for name, value in point.series.items():
            self._gauges[name].set(value)

    def notice(self, notice: Notice) -> None:
        """Add a span of no length, and the incident's own once it is over."""
        about = notice.id.rsplit("/", 2)[0]
        self._ids.trace_id = int.from_bytes(hashlib.sha256(about.encode()).digest()[:16], "big") or 1
        at_ns = int(notice.unix_s * 1e9)
        self._span(f"keepstep {notice.what}", at_ns, at_ns, notice)
        found = notice.incident
        if found is not None and found.closed_unix_s is not None:
            begin_ns, end_ns = int(found.detected_unix_s * 1e9), int(found.closed_unix_s * 1e9)
            self._span(f"incident {found.kind}", begin_ns, max(begin_ns, end_ns), notice)

    def _span(self, name: str, begin_ns: int, end_ns: int, notice: Notice) -> None:
        found = notice.incident
        known: dict[str, Any] = {
            "keepstep.title": notice.title,
            "keepstep.text": "\n".join(notice.lines),
            "keepstep.severity": notice.severity,
            "keepstep.step": notice.job.newest_step,
        }
        if found is not None:
            known |= {
                "keepstep.incident": found.number,
                "keepstep.kind": found.kind,
                "keepstep.status": found.status,
                "keepstep.culprits": [one.name for one in found.culprits],
                "keepstep.actions": list(found.actions),
            }
        span = self._tracer.start_span(name, attributes=known, start_time=begin_ns)
        if notice.severity == "critical":
            span.set_status(Status(StatusCode.ERROR, notice.title))
        span.end(end_time=end_ns)

    def close(self) -> None:
        """Send what is left."""
        self._traces.shutdown()
        self._metrics.shutdown()
