"""Jobs that hang do hang, each in its own way: (enqueued, started, completed) of NCCL's operations by rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.stand_in.faults import Fault
from benchmarks.stand_in.launch import TRAIN, Progress, start

RANKS, STEP = 3, 6


def stuck(folder: Path, fault: Fault) -> list[Progress]:
    words = ["--layout", "ddp", "--steps", "40"]
    with start(TRAIN, words, folder, ranks=RANKS, watched=False, faults=[fault], clock="virtual") as job:
        return job.wait_until_stuck()


@pytest.mark.long
def test_a_host_that_sleeps_has_called_no_more_than_it_completed(tmp_path: Path) -> None:
    first, hung, last = stuck(tmp_path, Fault("hang", rank=1, step=STEP, where="forward"))
    assert hung.enqueued == hung.started == hung.completed
    for waiting in (first, last):
        assert waiting.enqueued > waiting.started == hung.completed + 1
        assert waiting.completed == hung.completed


def test_a_host_that_sleeps_before_the_optimizer_is_passed_by_those_that_run_ahead(tmp_path: Path) -> None:
    first, hung, last = stuck(tmp_path, Fault("hang", rank=1, step=STEP, where="optimizer"))
    assert hung.enqueued == hung.started == hung.completed == first.completed == last.completed
    assert min(first.enqueued, last.enqueued) > hung.enqueued


def test_a_kernel_that_never_ends_keeps_its_rank_from_starting(tmp_path: Path) -> None:
    first, hung, last = stuck(tmp_path, Fault("never-ends", rank=1, step=STEP, where="forward"))
    assert hung.enqueued > hung.completed == hung.started
    for waiting in (first, last):
        assert waiting.started == hung.started + 1
        assert waiting.completed == hung.completed


@pytest.mark.long
def test_at_a_cut_pair_all_ranks_are_alike(tmp_path: Path) -> None:
    all_alike = stuck(tmp_path, Fault("cut", rank=2, peer=1, step=STEP))
    assert len({one.completed for one in all_alike}) == len({one.started for one in all_alike}) == 1
    assert all(one.enqueued > one.started == one.completed + 1 for one in all_alike)


def test_a_rank_that_skips_a_collective_runs_ahead(tmp_path: Path) -> None:
    first, ahead, last = stuck(tmp_path, Fault("skip", rank=1, step=STEP))
    assert first.started == ahead.started == last.started == ahead.completed + 1
    assert first.completed == ahead.completed == last.completed


@pytest.mark.long
def test_another_operation_than_the_peers_hangs_them_all(tmp_path: Path) -> None:
    all_alike = stuck(tmp_path, Fault("order", rank=1, step=STEP))
    assert len({(one.started, one.completed) for one in all_alike}) == 1
    assert all(one.started == one.completed + 1 for one in all_alike)
