"""OpenTelemetry: pace as gauges, notices and incidents as spans, over OTLP and HTTP.

All spans about one incident are one trace: a short one for each notice, and when it is over one from onset to end.
"""

from __future__ import annotations

import hashlib
import secrets
from importlib import import_module
from typing import Any

from keepstep.view.notify.notice import Notice
from keepstep.view.notify.pace_series import PacePoint
from keepstep.view.notify.tracker import TrackerOptions

_UNITS = {
    "iteration_s": ("keepstep.iteration.duration", "s", "median duration of the ranks' last iterations"),
    "own_s": ("keepstep.iteration.own", "s", "median time of an iteration in which a rank waits for nobody"),
    "lost_share": ("keepstep.lost.ratio", "1", "share of the time that is being lost"),
    "open_incidents": ("keepstep.incidents.open", "{incident}", "incidents that are not over"),
    "loss_now_steps": ("keepstep.loss.now", "{step}", "steps that would be lost with the worst placed node"),
}
_EXPORT_MS, _TIMEOUT_S = 10_000, 10


class _TraceOfIncident:
    """Gives the trace that was asked for, and random spans."""

    def __init__(self) -> None:
        self.trace_id = 1

    def generate_trace_id(self) -> int:
        """The trace of what is told now."""
        return self.trace_id

    def generate_span_id(self) -> int:
        """A number of 64 bits that is not 0."""
        return secrets.randbelow((1 << 64) - 1) + 1

    def is_trace_id_random(self) -> bool:
        """Whether the lower half is random: a hash is as good."""
        return True


class OtelTracker:
    """Sends to one collector."""

    def __init__(self, options: TrackerOptions) -> None:
        traces: Any = import_module("opentelemetry.sdk.trace")
        spans_out: Any = import_module("opentelemetry.sdk.trace.export")
        metrics: Any = import_module("opentelemetry.sdk.metrics")
        metrics_out: Any = import_module("opentelemetry.sdk.metrics.export")
        resources: Any = import_module("opentelemetry.sdk.resources")
        by_http = "opentelemetry.exporter.otlp.proto.http"
        span_exporter: Any = import_module(f"{by_http}.trace_exporter").OTLPSpanExporter
        metric_exporter: Any = import_module(f"{by_http}.metric_exporter").OTLPMetricExporter
        self._status: Any = import_module("opentelemetry.trace")

        resource = resources.Resource.create({"service.name": "keepstep", "keepstep.run": options.run})
        base, headers = options.uri.rstrip("/"), dict(options.headers)
        self._ids = _TraceOfIncident()
        self._traces = traces.TracerProvider(resource=resource, id_generator=self._ids)
        exporter = span_exporter(f"{base}/v1/traces", headers=headers, timeout=_TIMEOUT_S)
        self._traces.add_span_processor(spans_out.BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        exporter = metric_exporter(f"{base}/v1/metrics", headers=headers, timeout=_TIMEOUT_S)
        reader = metrics_out.PeriodicExportingMetricReader(exporter, export_interval_millis=_EXPORT_MS)
        self._metrics = metrics.MeterProvider([reader], resource=resource)
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
            span.set_status(self._status.Status(self._status.StatusCode.ERROR, notice.title))
        span.end(end_time=end_ns)

    def close(self) -> None:
        """Send what is left."""
        self._traces.shutdown()
        self._metrics.shutdown()
