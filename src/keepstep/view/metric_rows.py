"""Collects values of the table's metrics, and gives them to prometheus-client in the table's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from keepstep.core.log_lines import one_line
from keepstep.view.metric_table import METRICS

_LONGEST = 120  # characters of a label's value


def label_value(text: str) -> str:
    """The text as a label's value: printable, one line, short. Names come from the job and are not to be trusted."""
    shown = one_line(text)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"


def escaped(text: str) -> str:
    """The value as it stands between quotation marks in the text format."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricRows:
    """What one scrape shows of the run ``run``."""

    def __init__(self, run: str) -> None:
        self._run = label_value(run)
        self._families: dict[str, Metric] = {}
        self._add: dict[str, Callable[[list[str], float], None]] = {}

    def put(self, name: str, value: float, *labels: str) -> None:
        """One value; ``labels`` in the table's order, without the run. Values that are no numbers are left out."""
        if math.isnan(value):
            return
        metric = METRICS[name]
        values = [label_value(label) for label in labels]
        if metric.has_run:
            values.insert(0, self._run)
        assert len(values) == len(metric.label_names), name
        if name not in self._add:
            kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
            family = kinds[metric.kind](name, metric.meaning, labels=metric.label_names)
            self._families[name], self._add[name] = family, family.add_metric
        self._add[name](values, value)

    def put_histogram(self, name: str, bounds: tuple[float, ...], values: list[float]) -> None:
        """The histogram of all ``values`` so far."""
        metric = METRICS[name]
        family = HistogramMetricFamily(name, metric.meaning, labels=metric.label_names)
        buckets = [(str(bound), sum(value <= bound for value in values)) for bound in (*bounds, math.inf)]
        family.add_metric([self._run], [("+Inf" if b == "inf" else b, n) for b, n in buckets], sum(values))
        self._families[name] = family

    def families(self) -> Iterator[Metric]:
        """What was put, in the order of the table."""
        for name in METRICS:
            if name in self._families:
                yield self._families[name]
