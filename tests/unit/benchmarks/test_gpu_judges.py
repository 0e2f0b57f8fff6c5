"""What `benchmarks.gpu` makes of records and of profiler output, with made-up ones."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from benchmarks.gpu.judge import (
    COLLECTIVE,
    ENQUEUED,
    FAILED,
    TIMED,
    beside,
    collectives,
    goings_back,
    incomplete,
    last_words,
    measuring_adds,
)

from keepstep.core.events import Flag, Kind


def row(number, wait=0, end=1, *, group="nccl-1", stream="0x7", kind=COLLECTIVE, flags=ENQUEUED):
    """A record as a job gives it."""
    return [group, number, stream, number, 10 * number, wait, end, 4, kind, flags | (TIMED if wait else 0)]


def test_the_numbers_are_the_rings():
    assert (Kind.COLLECTIVE, Flag.FAILED, Flag.ENQUEUED, Flag.TIMED) == (COLLECTIVE, FAILED, ENQUEUED, TIMED)


def test_only_the_shims_collectives_count_in_the_order_of_the_calls():
    found = collectives([row(3), row(1), row(2, flags=0), row(4, kind=4)])
    assert [call.seq for call in found] == [1, 3]


def test_complete():
    calls = collectives([row(5), row(6), row(7), row(1, group="nccl-2")])
    assert incomplete(calls, 4) == {}
    assert incomplete(calls, 5) == {"missing": 1}


def test_incomplete():
    calls = collectives([row(5), row(7), row(8, end=0), row(9, flags=ENQUEUED | FAILED)])
    assert incomplete(calls, 5) == {"missing": 1, "gaps": 1, "without end": 1, "failed": 1}


def test_times_that_go_back_on_a_stream():
    calls = [row(1, 100, 200), row(2, 200, 300), row(3, 290, 400), row(4, 50, 60, stream="0x8"), row(5)]
    assert goings_back(collectives(calls)) == [10]
    assert goings_back(collectives([row(1, 100, 90)])) == [10]


def test_calls_are_laid_beside_what_the_profiler_saw_of_nccl():
    calls = collectives([row(1, 1000, 2010), row(2, 3000, 4020)])
    copy = "Memcpy DtoD (Device -> Device)"
    seen = [[copy, 3005, 1000], ["spin_kernel", 0, 900], [copy, 1004, 1000], [copy, 10, 1]]
    assert beside(calls, seen, 2) == [(1010, 1000, 4), (1020, 1000, 5)]


def test_what_cannot_be_laid_side_by_side_says_what_was_seen():
    calls = collectives([row(1, 1000, 2010)])
    with pytest.raises(
        ValueError, match=r"1 calls: 1 timed, 0 of the profiler's, in all \{'spin_kernel': 1\}"
    ):
        beside(calls, [["spin_kernel", 0, 900]], 1)


def test_the_line_that_tells_most():
    assert last_words("RuntimeError: x\nkeepstep: ended\n") == "RuntimeError: x"
    assert last_words("a\nb\n\n") == "b"
    assert last_words("") == "it said nothing"


def test_without_a_gpu_it_says_why_and_ends_well(tmp_path):
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--json", str(path)]
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "left out: everything: " in done.stdout
    report = json.loads(path.read_text())
    assert report["lines"] == []
    assert [entry["name"] for entry in report["left_out"]] == ["everything"]


def test_measured_steps_are_laid_beside_those_around_them():
    times = [1.0] * 4 + [9.0, 1.1, 1.1, 9.0] + [1.0] * 4 + [1.2] * 4 + [1.0] * 2
    measured = [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4 + [False] * 2
    assert measuring_adds(times, measured) == pytest.approx([0.1, 0.2])
    assert measuring_adds(times, [True] * len(times)) == []
