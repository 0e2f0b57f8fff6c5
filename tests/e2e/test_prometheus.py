"""The shipped files on a real Prometheus and Alertmanager: what is scraped, asked for and told."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.operate.fake_runs import make_run
from tests.e2e import prometheus_bed
from tests.e2e.prometheus_bed import DEPLOY, Bed, bed, dcgm_page, eventually, http_server, panels
from tests.unit.view.fake_snapshots import (
    HOSTILE,
    ended,
    snapshot,
    story,
    with_crash,
    with_hang,
    with_slow_rank,
)

from keepstep.view.metrics import SeriesMemory, exposition
from keepstep.view.run_snapshot import RunSnapshot
from keepstep.view.run_source import open_source

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(prometheus_bed.missing()), reason=prometheus_bed.missing()),
]

FAST = {"3s": "1s", "15s": "1s"}  # intervals of the shipped files, and of the tests


class Shown:
    """What an endpoint shows: a snapshot that may be changed, as the last of a story."""

    def __init__(self, *snapshots: RunSnapshot) -> None:
        self._memory, self._left = SeriesMemory(), list(snapshots)

    def __call__(self) -> bytes:
        """The page of the next snapshot; the last one stays."""
        now = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        return exposition(replace(now, unix_s=time.time()), None, self._memory)

    def change(self, to: RunSnapshot) -> None:
        """Show another one from now on."""
        self._left = [to]


def tool(*command: str, given: bytes = b"") -> None:
    said = subprocess.run(command, input=given, capture_output=True, timeout=60)
    assert said.returncode == 0, said.stdout.decode() + said.stderr.decode()


@pytest.mark.parametrize(
    "shown",
    [
        snapshot(),
        with_hang(with_slow_rank(snapshot(name=HOSTILE))),
        ended(with_crash(snapshot())),
        with_slow_rank(snapshot(5000)),
        RunSnapshot("empty", 0.0),
    ],
    ids=["healthy", "hostile", "ended", "large", "empty"],
)
def test_promtool_finds_no_fault_in_the_metrics(shown: RunSnapshot) -> None:
    page = exposition(shown)
    tool("promtool", "check", "metrics", given=page)


def test_the_shipped_files_are_valid_and_the_rules_do_what_their_tests_say() -> None:
    rules = sorted(str(path) for path in (DEPLOY / "prometheus").glob("*.rules.yml"))
    tool("promtool", "check", "config", str(DEPLOY / "prometheus/prometheus.yml"))
    tool("promtool", "check", "rules", "--lint-fatal", *rules)
    tool("promtool", "test", "rules", str(DEPLOY / "prometheus/keepstep.tests.yml"))
    tool("amtool", "check-config", str(DEPLOY / "alertmanager/alertmanager.yml"))


def test_pods_are_found_by_their_annotation(tmp_path: Path) -> None:
    """The job that is commented out; what Kubernetes would tell of pods is in a file, as Debian's build lacks that."""
    _, mark, job = (
        (DEPLOY / "prometheus/prometheus.yml").read_text().partition("  # - job_name: keepstep-pods")
    )
    lines = [line.replace("  # ", "  ", 1) for line in (mark + job).splitlines()]
    left_out = ("authorization:", "tls_config:")  # their files are not here
    text = "\n".join(line for line in lines if not any(one in line for one in left_out))
    assert "kubernetes_sd_configs: [{role: pod}]" in text
    text = text.replace("kubernetes_sd_configs: [{role: pod}]", "file_sd_configs: [{files: [pods.json]}]")
    (tmp_path / "prometheus.yml").write_text(f"scrape_configs:\n{text}\n")
    told = {"__meta_kubernetes_pod_annotation_keepstep_metrics_port": "8642"}
    pods = [
        {"targets": [f"10.0.0.{pod}"], "labels": {"__meta_kubernetes_pod_ip": f"10.0.0.{pod}", **labels}}
        for pod, labels in ((1, told), (2, {}))
    ]
    (tmp_path / "pods.json").write_text(json.dumps(pods))
    found = subprocess.run(
        [
            "promtool",
            "check",
            "service-discovery",
            "--timeout=2s",
            str(tmp_path / "prometheus.yml"),
            "keepstep-pods",
        ],
        capture_output=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr.decode()
    labels = [one["labels"] for one in json.loads(found.stdout) if one["labels"]]
    assert [(one["__address__"], one["__scheme__"]) for one in labels] == [("10.0.0.1:8642", "https")]


def test_a_run_stays_the_run_and_ranks_meet_their_gpus(tmp_path: Path) -> None:
    """Though the target has labels of the same names, and the exporter tells nodes and GPUs in its own way."""
    job = with_slow_rank(snapshot(name="llama"))
    dcgm = dcgm_page([node.name for node in job.nodes])
    with http_server(Shown(job)) as keepstep, http_server(lambda: dcgm) as exporter:
        labels = {"run": "pod-template", "node": "somewhere"}
        with bed(tmp_path, {keepstep: labels}, exporter, intervals=FAST) as one:
            (hot,) = one.wait_for('keepstep:rank_gpu_temperature_celsius{rank="11"}')
            assert hot["metric"]["run"] == "llama"
            assert (hot["metric"]["node"], hot["metric"]["gpu"]) == ("gpu-00001", "3")
            assert hot["value"][1] == "63"
            slow = (
                "topk(1, keepstep_rank_own_ratio) * on (run, rank, node) group_left (gpu) keepstep_rank_info"
            )
            (worst,) = one.query(slow)
            assert (worst["metric"]["rank"], worst["metric"]["gpu"]) == ("3", "3")
            assert one.query(
                "count(DCGM_FI_DEV_SM_CLOCK * on (node, gpu) group_right () keepstep_rank_info)"
            )[0]["value"][1] == str(len(job.ranks or ()))
            assert not one.query('{exported_run!=""}') + one.query('{exported_node!=""}')


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bed, float]]:
    """A Prometheus that has seen whole runs: one by hand, others from their folders."""
    folder, began = tmp_path_factory.mktemp("told"), time.time()
    with ExitStack() as open_parts:
        pages = [Shown(*story("by hand"))]
        for kind in ("slow", "hang", "recovered"):
            run = make_run(folder / kind, kind, ranks=16, steps=60).folder  # type: ignore[arg-type]
            source = open_source(run, from_folder=True)
            open_parts.callback(source.close)
            pages.append(Shown(source.read_all()))
        ports = {open_parts.enter_context(http_server(page)): dict[str, str]() for page in pages}
        dcgm = dcgm_page(["gpu-00000", "gpu-00001"])
        exporter = open_parts.enter_context(http_server(lambda: dcgm))
        one = open_parts.enter_context(bed(folder / "bed", ports, exporter, intervals=FAST))
        one.wait_for('keepstep_job_exit_code{run="by hand"}')
        one.wait_for("keepstep:lost_ratio_1h")
        one.wait_for("keepstep:rank_gpu_sm_clock_hertz")
        yield one, began


@pytest.mark.parametrize("board", ["keepstep-fleet.json", "keepstep-run.json"])
def test_every_panel_shows_something(told: tuple[Bed, float], board: str) -> None:
    one, began = told
    runs = ("by hand", "slow", "hang", "recovered")
    empty = [
        (title, expression)
        for title, expression in panels(board)
        if not any(one.query_range(expression.replace("$run", run), began) for run in runs)
    ]
    assert not empty


@pytest.mark.parametrize("run", ["slow", "hang", "recovered"])
def test_a_run_from_its_folder_fills_the_main_panels(told: tuple[Bed, float], run: str) -> None:
    one, began = told
    for title, expression in panels("keepstep-run.json"):
        if title in (
            "State",
            "Step",
            "Duration of a step",
            "Own time of the ranks",
            "Worst ranks",
            "Slowdown",
        ):
            assert one.query_range(expression.replace("$run", run), began), title


def test_an_incident_is_one_notification_and_a_death_ends_the_talk_of_slowness(tmp_path: Path) -> None:
    job = snapshot(name="llama")
    shown = Shown(job)
    with http_server(shown) as port, bed(tmp_path, {port: {}}, intervals=FAST) as one:
        one.wait_for("keepstep_job_step")
        slow = with_slow_rank(job)
        shown.change(slow)
        _, first = one.webhook.wait_for(lambda came: came["groupLabels"].get("incident") == "0001")
        (alarm,) = first["alerts"]
        assert alarm["labels"]["alertname"] == "KeepstepJobSlow"
        assert alarm["annotations"]["culprit"] == "rank 3 on gpu-00000: compute in forward, confidence high"
        # Two alarms tell of the crash: the crash itself, and that the node is bad.
        shown.change(with_crash(slow, 2))
        _, second = one.webhook.wait_for(lambda came: came["groupLabels"].get("incident") == "0002")
        assert {one["labels"]["alertname"] for one in second["alerts"]} == {
            "KeepstepCrash",
            "KeepstepNodeBad",
        }
        # An incident that was left open when the job died.
        shown.change(replace(ended(slow), incidents=slow.incidents))
        died = {"run": "llama", "alertname": "KeepstepJobDied"}
        one.webhook.wait_for(lambda came: came["groupLabels"] == died)
        slow_alarms = eventually(
            lambda: [alarm for alarm in one.alarms() if alarm["labels"]["alertname"] == "KeepstepJobSlow"], 60
        )
        assert [alarm["status"]["state"] for alarm in slow_alarms] == ["suppressed"]
