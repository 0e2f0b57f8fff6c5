"""Links between the devices of held ranks: measured over a communicator of their own, which leaves nothing behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.stand_in.launch import run

from keepstep.core.events import Kind
from keepstep.ring import RingReader

JOB = Path(__file__).with_name("held_links_job.py")


def found(folder: Path, case: str, ranks: int = 2, **settings: str) -> list[dict[str, Any]]:
    """What each rank told; all have trained on and ended well, and no trace of the tests is left."""
    done = run(JOB, [case], folder, ranks=ranks, settings=settings)
    assert done.exit_code == 0, done.console
    told = sorted(map(json.loads, re.findall(r"found (.*)", done.console)), key=lambda one: one["rank"])
    assert [one["rank"] for one in told] == list(range(ranks)), done.console
    assert {(one["groups"], one["threads"]) for one in told} == {(0, 0)}
    for rank in range(ranks):
        rows = RingReader(folder / "run" / "rings" / f"rank-{rank:05d}.ring").snapshot()
        assert (rows["kind"] != int(Kind.P2P)).all()
        calls = rows[rows["kind"] == int(Kind.COMMUNICATOR)]["op"].tolist()
        assert len(calls) == len(set(calls)), "the shim has recorded a second communicator"
    return told


def speeds(told: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    best: dict[tuple[int, int], float] = {}
    for link in (link for one in told for link in one["links"]):
        assert link["transport"] == "nccl"
        pair = link["source"], link["target"]
        best[pair] = max(best.get(pair, 0.0), link["bytes_per_s"])
    return best


def test_links_are_measured_on_the_device_and_a_slow_one_has_its_figure(tmp_path: Path) -> None:
    told = found(tmp_path, "slow")
    assert [one["missing"] for one in told] == [[], []]
    known = speeds(told)
    assert known[0, 1] == pytest.approx(known[1, 0] / 2, rel=0.01)


@pytest.mark.parametrize("abort", ["quick", pytest.param("ranks", marks=pytest.mark.long)])
def test_a_pair_over_which_nothing_comes_costs_that_link_only(tmp_path: Path, abort: str) -> None:
    known = speeds(found(tmp_path, "cut", STAND_IN_ABORT=abort))
    assert known[0, 1] == 0.0
    assert known[1, 0] > 0


@pytest.mark.long
def test_tests_that_are_stopped_leave_the_link_and_accuse_nobody(tmp_path: Path) -> None:
    told = found(tmp_path, "stopped")
    assert 0.0 not in speeds(told).values()
    assert ["link 0 → 1: no time left"] in [one["missing"] for one in told]


@pytest.mark.long
def test_without_free_memory_links_are_tested_over_tcp(tmp_path: Path) -> None:
    told = found(tmp_path, "full")
    assert "tested over TCP: no free memory for the test of links" in told[0]["missing"]
    assert {link["transport"] for one in told for link in one["links"]} == {"tcp"}
    assert {(link["source"], link["target"]) for one in told for link in one["links"]} == {(0, 1), (1, 0)}
