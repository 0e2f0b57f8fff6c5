"""Grafana's dashboards are what their script makes, of metrics that are there; the pod for Prometheus is valid."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from keepstep.view.metric_table import METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
NAME = re.compile(r"\bkeepstep_\w+")


def test_the_dashboards_are_those_that_the_script_makes() -> None:
    """Otherwise: python deploy/grafana/make.py"""
    pytest.importorskip("grafana_foundation_sdk")
    spec = importlib.util.spec_from_file_location("make_dashboards", DEPLOY / "grafana/make.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert {path.name: path.read_text() for path in BOARDS} == script.made()


@pytest.mark.parametrize(
    "path", [*BOARDS, *(DEPLOY / "prometheus").glob("*.rules.yml")], ids=lambda path: path.name
)
def test_what_is_asked_for_is_in_the_table(path: Path) -> None:
    asked = {name.removesuffix("_bucket") for name in NAME.findall(path.read_text())}
    assert asked
    assert asked <= METRICS.keys()


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.name)
def test_panels_do_not_overlap_and_say_what_they_show(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(path.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["title"]
        assert panel["options"]


def test_the_pod_that_prometheus_finds_is_valid() -> None:
    yaml = pytest.importorskip("yaml")
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    pod = yaml.safe_load((DEPLOY / "prometheus/keepstep-pod.yml").read_text())
    kubernetes_validate.validate(pod, "1.30", strict=True)
    port = pod["metadata"]["annotations"]["keepstep/metrics-port"]
    (container,) = pod["spec"]["containers"]
    assert [str(one["containerPort"]) for one in container["ports"]] == [port]
    assert any(argument.endswith(f":{port}") for argument in container["command"])
