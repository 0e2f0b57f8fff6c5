"""Answers of NCCL's RAS, recorded and made up, as files and from a running service."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from keepstep.analyze import Analysis, analyze, analyze_running
from keepstep.core.errors import TraceError
from keepstep.core.layout import ParallelLayout
from keepstep.traces.ras_service import ask

RECORDED = Path(__file__).parents[2] / "recorded"
RAS = RECORDED / "ras"


def named(found: Analysis) -> list[tuple[int | None, str, str]]:
    return [
        (one.rank, one.cause, one.confidence) for incident in found.incidents for one in incident.culprits
    ]


@pytest.mark.parametrize("name", ["ras.txt", "ras.json.txt"])
def test_who_is_behind_is_named_by_a_single_answer_but_not_surely(name: str) -> None:
    found = analyze(RECORDED / "h100" / "asleep_before_backward" / name)
    assert named(found) == [(1, "never entered", "low")]
    (hang,) = found.incidents
    assert (hang.summary, hang.victims) == ("group 0x136787b2369741c6 ALLREDUCE seq 89", (0,))
    told = "communicator 0x136787b2369741c6 has launched: AllReduce 88 of rank 1, 131 of rank 0"
    assert told in hang.evidence
    assert "process 1529 on GPU 0" in hang.culprits[0].detail
    assert "a second answer, seconds later: counts that move on are no hang" in found.missing


@pytest.mark.parametrize("name", ["ras.txt", "ras.json.txt"])
def test_a_rank_in_which_nccl_failed_comes_before_counts(name: str) -> None:
    found = analyze(RECORDED / "h100" / "barrier_of_one_rank" / name)
    assert named(found) == [(1, "NCCL reports: invalid usage", "medium")]


@pytest.mark.parametrize(
    "path",
    [
        RAS / "all_alike-2.26.2.txt",
        RAS / "two_ahead-2.26.2.txt",
        RAS / "six_behind-2.24.txt",
        RECORDED / "h100" / "sizes_differ" / "ras.json.txt",
    ],
)
def test_ranks_one_collective_apart_or_none_are_no_hang(path: Path) -> None:
    assert analyze(path).incidents == ()


def test_a_rank_that_does_not_answer_is_named_despite_the_missing_comma() -> None:
    path = RAS / "no_comma-2.28.9.json"
    with pytest.raises(json.JSONDecodeError):
        json.loads(path.read_text())
    assert named(analyze(path)) == [(1, "silent", "low")]


@pytest.mark.parametrize(("name", "rank"), [("dead-2.29.1.json", 1), ("stopped_process-2.24.txt", 21)])
def test_a_process_that_ras_gave_up_is_unreachable(name: str, rank: int) -> None:
    assert named(analyze(RAS / name)) == [(rank, "unreachable", "medium")]


def test_ranks_are_numbered_as_in_the_communicator_of_the_whole_job() -> None:
    found = analyze(RAS / "three_communicators-2.28.9.json", ParallelLayout.declared("tp2-dp2"))
    assert named(found) == [(3, "never entered", "low")]
    assert found.incidents[0].victims == (2,)
    assert "dp 1" in found.incidents[0].culprits[0].detail


def test_impossible_ranks_are_left_out() -> None:
    """NCCL 2.27.3 reads memory that holds no communicator; the sound one is used."""
    found = analyze(RAS / "impossible_ranks-2.27.3.txt")
    assert named(found) == [(1, "silent", "low")]
    assert found.incidents[0].culprits[0].node == "192.0.2.13"


def answer(counts: dict[int, dict[str, int]], **status: Any) -> bytes:
    """JSON of a job of one communicator; a rank without counts does not answer."""
    ranks = [
        {"rank": rank, "host": "n0", "pid": 100 + rank, "cuda_dev": rank, "nvml_dev": rank, "collective_counts": told,
         "status": {"init_state": 0, "async_error": status.get(f"error_{rank}", 0)}}
        for rank, told in counts.items()
        if told
    ]  # fmt: skip
    gone = [
        {"rank": rank, "host": "n0", "pid": 100 + rank, "status": {"unresponsive": True}} for rank in counts
    ]
    missing = [one for one in gone if not counts[one["rank"]]]
    whole = {"hash": "0xa1", "size": len(counts), "ranks": ranks, "missing_ranks": missing}
    return json.dumps({"nccl_version": "2.29.1", "communicators": [whole]}).encode()


@contextmanager
def service(*answers: bytes, closes: bool = True) -> Iterator[tuple[str, int]]:
    """A RAS that gives these answers, one to each query, and the last one from then on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def serve() -> None:
            turn = 0
            while True:
                connection, _ = server.accept()
                with connection:
                    if done.is_set():
                        return
                    while b"STATUS\n" not in connection.recv(4096):
                        pass
                    connection.sendall(b"SERVER PROTOCOL 2\nOK\n" + answers[min(turn, len(answers) - 1)])
                    turn += 1
                    if not closes:
                        done.wait(10)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[:2]
        finally:
            done.set()
            socket.create_connection(server.getsockname()[:2]).close()
            thread.join()


def judged(*answers: bytes) -> Analysis:
    waited: list[float] = []
    with service(*answers) as address:
        found = analyze_running(address, wait=waited.append)
    assert waited == [10.0]
    return found


SKEWED = {0: {"AllReduce": 131}, 1: {"AllReduce": 88}, 2: {"AllReduce": 131}}


def test_counts_that_stand_still_between_two_answers_are_a_hang() -> None:
    found = judged(answer(SKEWED))
    assert named(found) == [(1, "never entered", "medium")]
    assert "counts stood still for 10 s" in found.incidents[0].evidence


def test_counts_that_move_on_are_none() -> None:
    found = judged(answer(SKEWED), answer(SKEWED | {1: {"AllReduce": 89}}))
    assert found.incidents == ()
    assert any(line.startswith("a hang: counts move on") for line in found.missing)


def test_equal_counts_that_stand_still_are_told_and_nobody_is_blamed() -> None:
    found = judged(answer({rank: {"AllReduce": 7} for rank in range(3)}))
    assert found.incidents == ()
    assert any("stand still" in line for line in found.missing)


def test_a_rank_that_took_another_kind_of_collective_is_in_another_operation() -> None:
    counts = {rank: {"AllReduce": 10, "AllGather": 3} for rank in range(4)} | {
        2: {"AllReduce": 9, "AllGather": 4}
    }
    found = judged(answer(counts))
    assert named(found) == [(2, "entered another operation", "medium")]
    assert found.incidents[0].kind == "desync"


def test_errors_that_tell_of_others_blame_nobody() -> None:
    found = judged(answer(SKEWED, error_0=6))
    assert named(found) == [(1, "never entered", "medium")]
    assert "rank 0: NCCL reports: remote process error" in found.incidents[0].evidence


def test_what_is_no_answer_is_told_in_one_line() -> None:
    told = "no status of NCCL's RAS: ERROR: Unknown command STATUS"
    with service(b"ERROR: Unknown command STATUS\n") as address, pytest.raises(TraceError, match=told):
        analyze_running(address, wait=lambda _: None)


def test_a_service_that_hangs_or_is_not_there_is_told_in_one_line() -> None:
    cut, told = b'{"nccl_version": "2.29.1", ', r"does not end its answer within 1 s \(\d+ bytes came\)"
    with service(cut, closes=False) as address, pytest.raises(TraceError, match=told):
        ask(*address, patience_s=0.6)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
    with pytest.raises(TraceError, match="no RAS there"):
        ask(*address)
