"""Aborts and dead peers on the stand-in, as ProcessGroupNCCL meets them."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.stand_in.launch import run

JOB = Path(__file__).with_name("failures_job.py")
LIVES_ON = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}  # torch's watchdog would end the process


def told(folder: Path, mode: str, **settings: str) -> list[str]:
    """The lines of rank 0."""
    done = run(
        JOB, [mode], folder, ranks=2, watched=False, clock="virtual", settings={**LIVES_ON, **settings}
    )
    lines = [
        line.removeprefix("rank 0: ") for line in done.console.splitlines() if line.startswith("rank 0: ")
    ]
    print(done.exit_code, done.console)
    return lines


def test_after_an_abort_nobody_is_told_and_a_new_group_works(tmp_path: Path) -> None:
    assert told(tmp_path, "abort") == ["together 3", "after the abort 5", "returned", "again 3"]


def test_an_abort_can_wait_for_the_other_ranks_as_the_real_one_may(tmp_path: Path) -> None:
    lines = told(tmp_path, "abort-waits", STAND_IN_ABORT="ranks")
    assert lines == ["together 3", "after the abort 5", "alone it returns False", "returned", "again 3"]


def test_an_abort_can_wait_for_the_stream_and_so_for_a_kernel_that_never_ends(tmp_path: Path) -> None:
    lines = told(tmp_path, "abort-behind", STAND_IN_ABORT="stream")
    assert lines == ["together 3", "it returns False"]


@pytest.mark.parametrize("noticed", [True, False])
def test_a_dead_peer_is_an_asynchronous_error_where_its_sockets_close(tmp_path: Path, noticed: bool) -> None:
    lines = told(tmp_path, "dead", STAND_IN_NOTICE_DEATH=str(int(noticed)))
    assert lines == [
        "together 3",
        *(["told of a COMM_ERROR", "the next call raises True"] if noticed else []),
    ]


def test_a_group_is_reconfigured_without_a_dead_rank_and_with_a_new_one(tmp_path: Path) -> None:
    job = Path(__file__).with_name("reconfigure_job.py")
    done = run(job, [], tmp_path, ranks=3, watched=False, clock="virtual")
    print(done.console)
    for ranks, reduced_by in ((3, (0, 1, 2)), (2, (0, 1))):
        for rank in reduced_by:
            assert f"rank {rank}: {ranks} ranks reduce to {ranks}" in done.console
    assert done.console.count("3 ranks reduce to 3") == 6  # before, and with the new one
