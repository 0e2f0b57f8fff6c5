"""Aborts among ranks that all live, and ranks that are a step apart after one: one job, one abort after another."""

from __future__ import annotations

import pytest
from benchmarks.stand_in.aborts import ABORTED, Drawn, Gate, Running


def lose_links(layout: str, *ranks: int) -> Drawn:
    return Drawn(layout, "one", 2, "lose-links", ranks, "backward", 4)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_all_go_on_in_their_processes_with_a_step_that_all_hold(layout: str) -> None:
    with Running(layout, "one", 2, "kept") as job:
        for ranks in ((0, 1), (1,), (1,), (1,)):
            one = job.abort(lose_links(layout, *ranks))
            assert not one["failed"], one["failed"]
            assert one["aborted"], one
            # Rank 0 has made the step whose reduction did not come to rank 1: it is sealed there only, and made again.
            if one["held_by"] == [one["begun"][0] + 1, one["begun"][0]]:
                break
        else:
            pytest.fail(f"ranks were never a step apart: {one}")
        died = job.abort(Drawn(layout, "one", 2, "die", (1,), "optimizer", 4))
        assert not died["failed"], died["failed"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("gate", "in_place"),
    [("open", True), ("none", True), ("unseen", True), ("kept", False), ("none", False), ("unseen", False)],
)
def test_only_where_aborts_are_not_known_a_step_that_one_has_fed_is_gone_on_with(
    gate: Gate, in_place: bool
) -> None:
    with Running("ddp", "one", 2, gate, in_place=in_place, more=ABORTED if in_place else None) as job:
        one = job.abort(lose_links("ddp", 0, 1))
        said = job.said
    assert one["aborted"], one
    assert (one["fed"] > 0, one["mixed"] > 0) == (gate in ("none", "unseen"), gate == "none"), one
    told = "no step is kept, and training goes on without: what torch's watchdog aborts is not seen here"
    assert said.count(told) == (gate == "unseen"), said


@pytest.mark.long
def test_without_the_shim_torchs_watchdog_aborts_nothing() -> None:
    with Running("ddp", "one", 2, "unseen") as job:
        one = job.abort(lose_links("ddp", 0, 1))
    assert (one["aborted"], one["fed"], one["mixed"]) == (0, 0, 0), one
