"""What ``/metrics`` says, that it says it in few series, and that the page about it is made from the table."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tests.unit.view.fake_snapshots import (
    HOSTILE,
    incident,
    rank_table,
    snapshot,
    story,
    with_crash,
    with_hang,
    with_slow_rank,
)

from keepstep.control.membership.transitions import JobState
from keepstep.core.incident import Culprit
from keepstep.view.metric_table import METRICS, MOST_INCIDENTS, PERCENTILES, SECTIONS
from keepstep.view.metrics import STATES, SeriesMemory, exposition
from keepstep.view.named_series import NamedSeries
from keepstep.view.run_snapshot import NodeView, RunEnd, RunSnapshot
from keepstep.view.samples import SampleStore

PAGE = Path(__file__).parents[3] / "docs/reference/metrics.md"
SUFFIXES = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("",), "gauge": ("",)}


def samples_of(page: bytes) -> list[Sample]:
    return [one for family in text_string_to_metric_families(page.decode()) for one in family.samples]


def value(page: bytes, name: str, **labels: str) -> float:
    """The value of the one series with these labels."""
    (found,) = [
        one.value for one in samples_of(page) if one.name == name and labels.items() <= one.labels.items()
    ]
    return found


def labels_of(page: bytes, name: str) -> list[dict[str, str]]:
    return [one.labels for one in samples_of(page) if one.name == name]


def test_the_page_is_made_from_the_table() -> None:
    """``KEEPSTEP_REWRITE=1`` makes it anew."""
    made = "\n".join(reference())
    if os.environ.get("KEEPSTEP_REWRITE"):
        PAGE.write_text(made)
    assert PAGE.read_text() == made


def wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 100, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def reference() -> Iterator[str]:
    about = (
        "Made from `src/keepstep/view/metric_table.py`. `keepstep serve` exposes these under `/metrics`; "
        "[how to scrape them](../howto/see.md#metrics-and-alarms). Units are base units. All but "
        "`keepstep_build_info` have the label `run`, the name of the run's folder."
    )
    yield from ("# Metrics", "", *wrapped(about), "")
    for section in SECTIONS:
        yield from (f"## {section.title}", "", *(wrapped(section.about) and [*wrapped(section.about), ""]))
        for metric in section.metrics:
            labels = f"; by {', '.join(f'`{label}`' for label in metric.labels)}" if metric.labels else ""
            unit = f", {metric.unit}" if metric.unit else ""
            text = f"- `{metric.name}` ({metric.kind}{unit}{labels}): {metric.meaning}"
            yield from wrapped(text, "  ")
        yield ""


def test_the_table_and_the_metrics_are_the_same() -> None:
    """In the course of a run every metric of the table has a value, of its kind and with its labels."""
    missing = set(METRICS)
    for shown in story():
        for family in text_string_to_metric_families(exposition(shown).decode()):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            metric = METRICS[name]
            missing.discard(name)
            assert (family.type, family.documentation) == (metric.kind, metric.meaning)
            for one in family.samples:
                assert one.name in {name + suffix for suffix in SUFFIXES[metric.kind]}
                assert set(one.labels) - {"le"} == set(metric.label_names)
    assert not missing


def test_names_follow_the_conventions() -> None:
    for name, metric in METRICS.items():
        assert name.startswith("keepstep_")
        assert name.endswith("_total") == (metric.kind == "counter")
        assert name.endswith("_info") == (metric.unit == "1")
        if metric.unit == "seconds":
            assert name.removesuffix("_total").endswith("_seconds")
        if metric.unit == "ratio":
            assert name.endswith("_ratio")
        assert metric.meaning.endswith(".")


@pytest.mark.parametrize("state", [*(state.value for state in JobState), "ended", "silent", "", "<b>"])
def test_one_state_is_true(state: str) -> None:
    page = exposition(replace(snapshot(), state=state))
    true = [one.labels["state"] for one in samples_of(page) if one.name == "keepstep_job_state" and one.value]
    assert true == [state.replace(" ", "_") if state and state != "<b>" else "unknown"]
    assert len(labels_of(page, "keepstep_job_state")) == len(STATES)


def test_a_slow_rank_is_told_with_its_price() -> None:
    job = snapshot(64)
    page = exposition(with_slow_rank(job, 13))
    assert value(page, "keepstep_slowdown_ratio") == pytest.approx(1.8, abs=0.05)
    assert value(page, "keepstep_iteration_healthy_seconds") == 1.0
    assert value(page, "keepstep_lost_seconds_total", kind="slow") == 12
    assert value(page, "keepstep_saved_seconds_total") == 3
    assert value(page, "keepstep_incidents_open", kind="slow", confidence="high") == 1
    (told,) = labels_of(page, "keepstep_incident_info")
    assert (told["blames"], told["rank"], told["node"], told["stage"]) == (
        "rank",
        "13",
        "gpu-00001",
        "forward",
    )
    assert value(page, "keepstep_rank_own_ratio", rank="13") == pytest.approx(2, abs=0.1)
    assert value(page, "keepstep_rank_info", rank="13", node="gpu-00001", gpu="5") == 1
    assert value(page, "keepstep_link_rate_ratio", source="gpu-00000", target="gpu-00007") == pytest.approx(
        0.1
    )
    assert value(exposition(job), "keepstep_slowdown_ratio") == 1


def test_without_an_incident_the_pace_is_compared_with_the_best_of_the_run() -> None:
    samples, ranks = SampleStore(), np.arange(16, dtype=np.int32)
    for step in range(40):
        taken = np.full(16, 0.5 if step < 20 else 1.0, np.float32)
        samples.take(ranks, np.full(16, step, np.int64), (taken * 0.5).astype(np.float32), taken)
    page = exposition(snapshot(), samples)
    assert value(page, "keepstep_iteration_healthy_seconds") == pytest.approx(0.5, rel=0.01)
    assert value(page, "keepstep_slowdown_ratio") == pytest.approx(2, rel=0.05)
    page = exposition(with_slow_rank(snapshot()), samples)
    assert value(page, "keepstep_iteration_healthy_seconds") == 1.0


def test_a_hang_and_a_recovery() -> None:
    page = exposition(with_hang(snapshot()))
    assert value(page, "keepstep_incident_open", kind="hang", incident="0002") == 1
    (told,) = labels_of(page, "keepstep_incident_info")
    assert (told["blames"], told["link"]) == ("link", "gpu-00000 - gpu-00001")
    assert value(page, "keepstep_ranks", condition="overdue") == 16
    assert value(page, "keepstep_ranks", condition="unwatched") == 1
    assert value(page, "keepstep_ranks_idle_seconds", percentile="50") == 90
    assert value(page, "keepstep_node_silent_seconds", node="gpu-00001") == 75
    page = exposition(with_crash(with_hang(snapshot())))
    assert value(page, "keepstep_recovery_last_seconds") == 2.5
    assert value(page, "keepstep_recovery_seconds_bucket", le="2.5") == 1
    assert value(page, "keepstep_recovery_seconds_bucket", le="1.0") == 0
    assert value(page, "keepstep_recovery_last_phase_seconds", phase="placed") == 1.5
    assert value(page, "keepstep_lost_seconds_total", kind="crash") == 2.5


def test_what_is_not_known_has_no_series() -> None:
    page = exposition(RunSnapshot("new", 0.0))
    names = {one.name for one in samples_of(page)}
    assert not names & {
        "keepstep_iteration_seconds",
        "keepstep_slowdown_ratio",
        "keepstep_loss_now_steps",
        "keepstep_links_worst_ratio",
        "keepstep_job_exit_code",
        "keepstep_ranks",
    }
    assert value(page, "keepstep_job_state", state="unknown") == 1


def test_ranks_that_have_made_no_step_have_no_pace() -> None:
    ranks = rank_table(8)
    none = np.zeros(8, np.float32)
    page = exposition(replace(snapshot(8), ranks=replace(ranks, iteration_s=none, self_s=none)))
    assert not [one for one in samples_of(page) if "own_ratio" in one.name or "iteration" in one.name]


def test_numbers_that_are_none_are_left_out() -> None:
    ranks = rank_table(8)
    ranks.self_s[:3] = np.nan, np.inf, -np.inf
    ranks.idle_s[0] = np.nan
    page = exposition(replace(snapshot(8), ranks=ranks, unix_s=float("nan")))
    assert all(np.isfinite(one.value) for one in samples_of(page))


def test_hostile_names_are_values_and_nothing_else() -> None:
    job = with_hang(with_slow_rank(snapshot(name=HOSTILE)))
    nodes = tuple(replace(node, name=f"{HOSTILE}{node.node_rank}") for node in job.nodes)
    culprit = Culprit(3, None, HOSTILE * 100, HOSTILE, 2.0, "high", "\ud800")
    slow = replace(job.incidents[0], culprits=(culprit,))
    job = replace(job, nodes=nodes, incidents=(slow, *job.incidents[1:]), end=RunEnd(1, HOSTILE, HOSTILE))
    page = exposition(job)
    told = samples_of(page)
    assert {one.name for one in told if not one.name.startswith("keepstep_")} == set()
    assert {one.labels.get("run") for one in told} == {
        None,
        HOSTILE.replace("\n", "\\n").replace("\x1b", "\\x1b"),
    }
    texts = [text for one in told for text in one.labels.values()]
    assert all(text.isprintable() and len(text) <= 120 for text in texts)
    assert len(labels_of(page, "keepstep_rank_info")) == len(job.ranks or ())


def test_a_large_job_shows_its_worst_ranks_only_and_a_healthy_one_none() -> None:
    job = snapshot(131_072)
    healthy = exposition(job)
    assert not labels_of(healthy, "keepstep_rank_own_ratio")
    slow = with_slow_rank(job, 100_003)
    assert slow.ranks is not None
    slow.ranks.step[7] -= 50
    blamed = incident(2, "hang", culprits=(Culprit(99, None, "gpu-00012", "", 0.0, "high", "stopped"),))
    page = exposition(replace(slow, incidents=(*slow.incidents, blamed)))
    assert {one["rank"] for one in labels_of(page, "keepstep_rank_own_ratio")} == {"7", "99", "100003"}
    assert value(page, "keepstep_rank_lag_steps", rank="7") >= 50
    assert value(page, "keepstep_ranks_lag_steps", percentile="100") >= 50
    assert len(labels_of(page, "keepstep_ranks_own_seconds")) == len(PERCENTILES)
    assert max(map(len, (healthy, page))) < 50_000


def test_ranks_of_unlike_stages_are_compared_with_their_own_stage() -> None:
    job = snapshot(16)
    assert job.layout is not None
    assert job.ranks is not None
    last = job.layout.all_coordinates()["pp"] == 1
    own_s = np.where(last, 0.8, 0.4).astype(np.float32)
    page = exposition(replace(job, ranks=replace(job.ranks, self_s=own_s)))
    assert {one.value for one in samples_of(page) if one.name == "keepstep_rank_own_ratio"} == {1.0}


def test_ten_thousand_incidents_make_few_series() -> None:
    memory, seen = SeriesMemory(clock=lambda: 0.0), set[str]()
    job = snapshot()
    hangs = [
        incident(
            number, "hang", culprits=(Culprit(None, None, f"node {number}", "", 0.0, "high", f"{number}"),)
        )
        for number in range(10_000)
    ]
    for last in [*range(20, 1_000, 20), 5_000, 10_000]:
        page = exposition(replace(job, incidents=hangs[:last]), None, memory)
        seen |= {line.rpartition(" ")[0] for line in page.decode().splitlines() if "incident" in line}
        assert page.count(b"keepstep_incident_open{") <= MOST_INCIDENTS + 1
    assert len(seen) < 1_200
    # Those without a name of their own still raise an alarm.
    assert value(page, "keepstep_incident_open", incident="", kind="hang") == 1
    assert value(page, "keepstep_incidents_total", kind="hang") == 10_000
    assert value(page, "keepstep_unnamed_series") > 0


@pytest.mark.parametrize("ranks", [64, 8_192])
def test_ranks_that_move_among_nodes_make_few_series(ranks: int) -> None:
    memory, seen = SeriesMemory(clock=lambda: 0.0), set[str]()
    memory.ranks = NamedSeries(300)
    job = snapshot(ranks)
    assert job.ranks is not None
    random = np.random.default_rng(0)
    own_s = np.linspace(0.1, 4, ranks, dtype=np.float32)
    for move in range(60):
        nodes = tuple(NodeView(at, f"node-{move}-{at}") for at in range(len(job.nodes)))
        table = replace(job.ranks, node=random.permutation(job.ranks.node), self_s=random.permutation(own_s))
        page = exposition(replace(job, nodes=nodes, ranks=table), None, memory)
        seen |= {line.rpartition(" ")[0] for line in page.decode().splitlines() if "keepstep_rank_" in line}
    kinds, comments = 4, 8
    assert len(seen) <= kinds * (300 + 64) + comments
    if ranks == 64:  # all are shown still, without a node
        assert {one["node"] for one in labels_of(page, "keepstep_rank_own_ratio")} == {""}


def test_counters_do_not_fall_when_an_estimate_is_corrected() -> None:
    memory = SeriesMemory()
    job = with_slow_rank(snapshot())
    before = exposition(job, None, memory)
    less = replace(job, incidents=(replace(job.incidents[0], lost_s=7.0),))
    after = exposition(less, None, memory)
    assert value(before, "keepstep_lost_seconds_total", kind="slow") == 12
    assert value(after, "keepstep_lost_seconds_total", kind="slow") == 12
