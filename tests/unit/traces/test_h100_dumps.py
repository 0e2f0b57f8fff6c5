"""Dumps that torch 2.11 and NCCL 2.28.9 wrote on an H100, two ranks on it: DDP, held up at step 30 of rank 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.analyze import analyze

DATA = Path(__file__).parents[2] / "recorded" / "h100"


@pytest.mark.parametrize("case", ["asleep_before_backward", "asleep_host_waits"])
def test_who_never_came_is_named(case: str) -> None:
    """The host of rank 0 has queued 43 operations, or waits for the first."""
    (incident,) = analyze(DATA / case).incidents
    (culprit,) = incident.culprits
    assert (incident.kind, culprit.rank, culprit.cause, culprit.confidence) == (
        "hang",
        1,
        "never entered",
        "high",
    )
    assert incident.victims == (0,)


def test_a_barrier_of_one_rank_alone_is_told_with_the_users_line() -> None:
    (incident,) = analyze(DATA / "barrier_of_one_rank").incidents
    assert incident.kind == "desync"
    assert "called by rank 1 at /home/me/train.py:51 <module>" in incident.evidence
    assert all(culprit.confidence != "high" for culprit in incident.culprits)
