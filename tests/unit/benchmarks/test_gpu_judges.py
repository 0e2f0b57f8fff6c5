"""What `benchmarks.gpu` makes of records and of profiler output, with made-up ones."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from benchmarks._report import Report
from benchmarks.gpu import __main__ as bench_of_gpu
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.judge import (
    COLLECTIVE,
    ENQUEUED,
    FAILED,
    TIMED,
    Look,
    Told,
    added,
    beside,
    collectives,
    freed,
    goings_back,
    incomplete,
    last_words,
    measuring_adds,
    synchronisations,
    until_new_step,
    until_next_step,
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


def test_what_the_first_of_each_pair_takes_more():
    mean, low, high = added([(3.0, 1.0), (5.0, 3.0), (4.0, 2.0)])
    assert (mean, low, high) == (2.0, 2.0, 2.0)
    mean, low, high = added([(2.0, 1.0), (4.0, 1.0)])
    assert low < 1 < mean == 2 < 3 < high


def wait(kind, stream, awaited=None):
    args = {"cuda_sync_kind": kind, "stream": stream, "wait_on_stream": awaited}
    return {"cat": "cuda_sync", "args": args}


def test_only_waits_that_concern_streams_with_kernels_hold_up_the_training():
    trace = [
        {"cat": "kernel", "args": {"stream": 7}},
        {"cat": "gpu_memcpy", "args": {"stream": 20}},
        {"cat": "cpu_op"},
        wait("Stream Wait Event", 20, 7),  # a copy's stream waits for the training's
        wait("Event Sync", -1, 20),
        wait("Stream Sync", 20),
    ]
    ours = (
        "waits put on the training's streams",
        "the host's waits for them",
        "the host's waits for events of unknown streams",
    )
    assert synchronisations(trace) == dict.fromkeys(ours, 0)
    trace += [wait("Stream Wait Event", 7, 20), wait("Event Sync", -1, 7), wait("Stream Sync", 7)]
    trace += [wait("Context Sync", -1), wait("Event Sync", -1, -1)]
    assert synchronisations(trace) == dict(zip(ours, (1, 3, 1), strict=True))


def test_when_a_killed_process_has_left_the_gpu():
    looks = [
        Look(9.0, 100, frozenset({1, 2})),
        Look(10.1, 100, frozenset({1, 2})),
        Look(10.2, 100, frozenset({2})),
        Look(10.3, 190, frozenset({2})),
        Look(10.4, 120, frozenset({2, 3})),  # its successor
    ]
    found = freed(looks, 1, 10.0, 100)
    assert found == {"not listed (s)": pytest.approx(0.2), "memory free (s)": pytest.approx(0.3)}
    assert freed(looks, 5, 10.0, 100) == {"memory free (s)": pytest.approx(0.3)}
    assert freed(looks, 1, 10.0, 200) == {"not listed (s)": pytest.approx(0.2)}
    assert freed([], 1, 10.0, 1) == {}


def test_a_job_has_recovered_when_all_ranks_have_made_a_step_of_one_incarnation():
    trained = [{0: 1.0, 1: 12.0}, {0: 1.5, 1: 11.5, 2: 20.0}]
    assert until_next_step(10.0, trained) == 2.0
    assert until_next_step(11.8, trained) is None
    assert until_next_step(13.0, trained) is None
    assert until_next_step(13.0, [{**trained[0], 2: 19.0}, trained[1]]) == 7.0


def test_a_new_step_is_one_that_no_rank_had_made_before():
    noted = [(9.0, 40), (9.9, 41), (12.4, 40)]
    first = [Told(0, 1, 1.0, 0), Told(1, 1, 12.0, 40), Told(1, 1, 12.2, 41), Told(1, 1, 12.5, 42)]
    second = [Told(0, 2, 1.0, 0), Told(1, 3, 12.1, 40), Told(1, 3, 12.3, 41)]
    assert until_new_step(10.0, [first, second], noted) is None
    assert until_new_step(10.0, [first, [*second, Told(1, 3, 12.7, 42)]], noted) == pytest.approx(2.7)
    assert until_new_step(10.0, [first, second], noted[:1]) == pytest.approx(2.3)
    assert until_new_step(10.0, [first, second[:1]], noted) is None
    # Of two incarnations since, the one that all have begun.
    assert until_new_step(10.0, [[*first, Told(2, 1, 20.0, 42)], second], noted[:1]) == pytest.approx(2.3)


def left_for_parts(monkeypatch, folder, seconds):
    """What each of two parts has left of the time, and which are left out; the second is due 300 s of 490."""
    seen = {}
    shares = {"first": 200, "second": 300}

    def part(name):
        return bench_of_gpu.Part(lambda bench: seen.update({name: round(bench.left_s())}), shares[name])

    monkeypatch.setattr(bench_of_gpu, "PARTS", {name: part(name) for name in shares})
    bench = Bench(Report("gpu", quick=True), folder, device="cuda", quick=True, seconds=seconds)
    bench_of_gpu.run_parts(bench, list(shares), bench_of_gpu.WHOLE_S)
    return seen, [one["name"] for one in bench.report.left_out]


def test_the_whole_bench_has_time_for_the_shares_of_all_parts():
    assert sum(part.share_s for part in bench_of_gpu.PARTS.values()) <= bench_of_gpu.WHOLE_S


def test_a_part_has_what_is_left_but_for_the_shares_of_those_after_it(monkeypatch, tmp_path):
    assert left_for_parts(monkeypatch, tmp_path, 520) == ({"first": 220, "second": 520}, [])


def test_a_part_for_which_too_little_is_left_is_left_out(monkeypatch, tmp_path):
    assert left_for_parts(monkeypatch, tmp_path, 440) == ({"second": 440}, ["first"])
