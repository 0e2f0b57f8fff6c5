"""Ranks of a running job move: nodes exchange theirs for a slow link (S3), a spare takes those of a slow node (S4)."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import testbed as beds
from tests.e2e.test_backups import read, until
from tests.e2e.testbed import HOURS

from keepstep.faults import SlowLink

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.quiet, pytest.mark.timeout(900)]

TRAIN = Path(__file__).with_name("exchange_train.py")
STEPS = 100_000
PATIENCE_S = 300


def rows(folder: Path, rank: int) -> list[tuple[int, str, float]]:
    found: list[tuple[int, str, float]] = []
    path = folder / f"losses-{rank}"
    for line in path.read_text().splitlines() if path.exists() else []:
        step, loss, seconds, _ = line.split()
        found.append((int(step), loss, float(seconds)))
    return found


def actions(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_bytes()) for path in (run / "incidents").glob("[0-9]*.json")]
    return [action for one in found for action in one["actions"]]


def pace_s(folder: Path, steps: int = 10) -> float:
    """Of the newest steps."""
    found = rows(folder, 0)[-steps:]
    return statistics.median(one[2] for one in found) if found else 1.0


def losses_are_equal(folder: Path) -> None:
    """Every step gave what it gave before: no byte of a state was lost on the way."""
    for rank in range(4):
        values: dict[int, set[str]] = {}
        for step, loss, _ in rows(folder, rank):
            values.setdefault(step, set()).add(loss)
        assert {len(one) for one in values.values()} == {1}
        assert sorted(values) == list(range(len(values)))


@pytest.mark.long
def test_a_slow_link_is_left_to_those_who_send_little_for_as_long_as_it_is_slow(tmp_path: Path) -> None:
    if reason := beds.missing():
        pytest.skip(reason)
    run = tmp_path / "run"
    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS, 30 * HOURS)) as bed:
        hosts = list(bed.hosts.values())

        def start(number: int) -> subprocess.Popen[str]:
            command = [
                *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(run)),
                *("--nnodes", "4", "--node-rank", str(number), "--master-addr", "node-a"),
                *("--master-port", "29555", "--nproc-per-node", "1", "--max-restarts", "1"),
                *("--standbys", "1", "--no-validate", str(TRAIN), str(tmp_path), str(STEPS)),
            ]
            return hosts[number].start(command, {"OMP_NUM_THREADS": "1"})

        running = {host.name: start(number) for number, host in enumerate(hosts)}
        until(lambda: len(rows(tmp_path, 0)) > 120)
        healthy_s = pace_s(tmp_path)
        with bed.links.inject(SlowLink("node-a", "node-c", "20mbit")):
            until(lambda: read(run / "status.json").get("incarnation") == 1)
            begun = len(rows(tmp_path, 0))
            until(lambda: len(rows(tmp_path, 0)) > begun + 60)
            treated_s = pace_s(tmp_path)
            moved = [node["node"] for node in read(run / "status.json")["nodes"]]
            until(lambda: any(one["measured_iteration_s"] for one in actions(run)))
        until(lambda: read(run / "status.json").get("incarnation") == 2)
        begun = len(rows(tmp_path, 0))
        until(lambda: len(rows(tmp_path, 0)) > begun + 60)
        reverted_s = pace_s(tmp_path)
        back = [node["node"] for node in read(run / "status.json")["nodes"]]
        (tmp_path / "enough").touch()
        results = beds.collect(running, PATIENCE_S)
    said = results["node-a"].stderr
    assert [one.returncode for one in results.values()] == [0] * 4, results
    places = {node: place for place, node in enumerate(moved)}
    assert places["node-a"] % 2 != places["node-c"] % 2, moved
    assert "S3, exchange of nodes" in said
    assert "exchanged their ranks; all nodes begin again" in said
    assert treated_s < 2 * healthy_s + 0.05, (healthy_s, treated_s)
    assert "S3 is taken back" in said
    assert back == ["node-a", "node-b", "node-c", "node-d"]
    assert reverted_s < 2 * healthy_s + 0.05, (healthy_s, reverted_s)
    losses_are_equal(tmp_path)


@pytest.mark.long
def test_a_spare_takes_the_ranks_of_a_node_that_turned_slow(tmp_path: Path) -> None:
    if reason := beds.missing():
        pytest.skip(reason)
    run = tmp_path / "run"
    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS, 30 * HOURS)) as bed:
        hosts = list(bed.hosts.values())[:3]

        def start(number: int) -> subprocess.Popen[str]:
            command = [
                *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(run)),
                *("--nnodes", "2", "--node-rank", str(number), "--master-addr", "node-a"),
                *("--master-port", "29555", "--nproc-per-node", "2", "--max-restarts", "1"),
                *("--standbys", "2", "--no-validate", str(TRAIN), str(tmp_path), str(STEPS)),
            ]
            return hosts[number].start(command, {"OMP_NUM_THREADS": "1"})

        running = {host.name: start(number) for number, host in enumerate(hosts)}
        until(lambda: len(rows(tmp_path, 0)) > 120)
        healthy_s = pace_s(tmp_path)
        (tmp_path / "slow-node-b").touch()
        until(lambda: read(run / "status.json").get("incarnation") == 1)
        begun = len(rows(tmp_path, 0))
        until(lambda: len(rows(tmp_path, 0)) > begun + 60)
        treated_s = pace_s(tmp_path)
        until(lambda: any(one["measured_iteration_s"] for one in actions(run)))
        (tmp_path / "enough").touch()
        results = beds.collect(running, PATIENCE_S)
    said = results["node-a"].stderr
    assert [results[f"node-{name}"].returncode for name in "abc"] == [0, 75, 0], results
    assert "S4, replacement of nodes" in said
    assert "node node-b replaced; all nodes begin again" in said
    assert "node node-b is excluded: rank" in results["node-b"].stderr
    assert treated_s < 2 * healthy_s + 0.02, (healthy_s, treated_s)
    losses_are_equal(tmp_path)
