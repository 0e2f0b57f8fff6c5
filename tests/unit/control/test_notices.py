"""What nodes have the operator told: once, and again an hour after it was over; few lines where many nodes have it."""

from __future__ import annotations

from keepstep.control.notices import Notices


def test_what_holds_is_told_once() -> None:
    notices = Notices()
    told = [(second, *notices.fresh(["a"], second)) for second in range(10_000)]
    assert [one for one in told if len(one) > 1] == [(0, "a")]
    assert list(notices.fresh(["a", "b"], 12_000.0)) == ["b"]
    assert list(notices.fresh(["a"], 15_600.0)) == ["a"]


def test_what_all_nodes_have_takes_few_lines() -> None:
    notices = Notices()
    told = [line for node in range(10_000) for line in notices.fresh([f"gpu-{node}: full"], 1.0)]
    assert told == [*(f"gpu-{node}: full" for node in range(8)), "more such lines are in `keepstep status`"]
    assert list(notices.fresh(["gpu-3: full"], 2.0)) == []
    assert list(notices.fresh(["other"], 3700.0)) == ["other"]
