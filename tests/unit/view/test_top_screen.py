"""What `keepstep top` shows, in terminals of any size: golden pictures, hostile names, no line too wide."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many
from tests.unit.view.example_runs import CRASH, HANG, NOW_S, SLOW, SLOW_LINK, run, table

from keepstep.core.incident import Culprit
from keepstep.view.run_snapshot import NodeView, RunEnd, RunSnapshot
from keepstep.view.terminal_text import columns_of
from keepstep.view.top_screen import Heat, Look, screen
from keepstep.view.words import answer

PACE = [0.62] * 300 + [1.1] * 112


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def look(snapshot: RunSnapshot) -> Look:
    usual = np.full(4, 0.31, np.float32)
    ratios = np.array([[1.0] * 20, [1.0] * 10 + [2.5] * 10], np.float32)
    return Look(snapshot, answer(snapshot), PACE, 0.43, 0.2, usual, Heat(("0-1", "2-3"), ratios, 0, 511))


def picture(
    snapshot: RunSnapshot, width: int, height: int, scroll: int = 0, *, plain: bool = False
) -> list[str]:
    shown = screen(look(snapshot), width, height, scroll, ascii_only=plain)
    return ["".join(piece.text for piece in line).rstrip() for line in shown.lines]


GOLDEN = Path(__file__).parent / "golden"
OVER = replace(HANG, status="relieved", relief_step=501, closed_unix_s=NOW_S)


@pytest.mark.parametrize(
    ("name", "snapshot", "width", "height"),
    [
        ("slow-80x24", run(SLOW, SLOW_LINK), 80, 24),
        ("hang-80x24", run(HANG), 80, 24),
        ("healthy-80x24", run(), 80, 24),
        ("recovering-100x30", run(CRASH, state="recovering"), 100, 30),
        ("slow-200x60", run(OVER, SLOW, SLOW_LINK), 200, 60),
    ],
)
def test_as_it_was_looked_at(name: str, snapshot: RunSnapshot, width: int, height: int) -> None:
    lines = picture(snapshot, width, height)
    assert len(lines) == height
    assert lines == (GOLDEN / f"top-{name}.txt").read_text().splitlines()


def test_a_run_that_has_ended() -> None:
    ended = replace(run(), state="ended", end=RunEnd(0, "finished", "finished"), state_s=0.0)
    assert picture(ended, 80, 24)[:3] == [
        " keepstep  train-7b   ended   step 512   4 ranks, 2 nodes              08:00:00",
        "finished after step 512",
        "since 2027-01-15 08:00:00 UTC, 2 h after its start",
    ]


def test_a_first_step_that_compiles_does_not_hide_a_slowdown() -> None:
    paced = replace(look(run()), pace_s=[30.0, float("nan"), *[0.6] * 40, *[1.1] * 8])
    line = next(line for line in screen(paced, 120, 24).lines if line[0].text.startswith("pace"))
    assert line[-1].text == "█ " + "▁" * 40 + "█" * 8


def test_scrolling_shows_every_line_and_stops_at_the_ends() -> None:
    snapshot = run(SLOW)
    whole = picture(snapshot, 80, 60)[1:-1]
    seen = [line for scroll in range(12) for line in picture(snapshot, 80, 10, scroll)[1:-1]]
    low = screen(look(snapshot), 80, 10, 1000)
    assert low.scroll == low.most_scroll > 0
    assert screen(look(snapshot), 80, 10, -5).scroll == 0
    assert picture(snapshot, 80, 10, 1000)[-1].endswith(f"of {low.most_scroll + 8}")
    ranks = [line for line in whole if line.lstrip().startswith(("0 ", "1 ", "2 ", "3 "))]
    assert len(ranks) == 4
    assert set(ranks) <= set(seen)


def test_a_terminal_that_is_too_small_says_so() -> None:
    assert picture(run(SLOW), 20, 5) == ["at least 40 x 8 is", "needed; q quits", "", "", ""]
    assert len(picture(run(SLOW), 1, 1)) == 1


def test_a_terminal_that_knows_ascii_only() -> None:
    lines = picture(run(SLOW, SLOW_LINK), 80, 24, plain=True)
    assert all(line.isascii() and len(line) <= 80 for line in lines)
    assert "link gpu-0 <-> gpu-1" in lines[10] + lines[11]


def test_nothing_is_known_yet() -> None:
    told = picture(RunSnapshot("a", 0.0), 80, 24)[1]
    assert told == "no status yet: the controller writes it within a second of the job's start"


def test_the_worst_ranks_come_first() -> None:
    ranks = table(10, per_node=5)
    ranks.is_alive[7] = False
    ranks.step[4] = 500
    ranks.overdue_s[2] = 3.0
    shown = picture(replace(run(replace(SLOW, culprits=(Culprit(5),))), ranks=ranks), 120, 60)
    begin = next(place for place, line in enumerate(shown) if line.startswith("  RANK"))
    assert [line.split()[0] for line in shown[begin + 1 : begin + 6]] == ["5", "7", "4", "2", "9"]
    assert "ended" in shown[begin + 2]


def test_a_job_of_131072_ranks() -> None:
    snapshot = replace(run(SLOW), ranks=table(131_072, per_node=8))
    assert picture(snapshot, 80, 24, 10_000)[-2] == "130972 more ranks: keepstep status"


@given(st.text(max_size=40), st.integers(1, 220), st.integers(1, 70), st.booleans(), st.integers(0, 30))
@settings(max_examples=many(60), deadline=None)
def test_no_name_moves_the_cursor(name: str, width: int, height: int, plain: bool, scroll: int) -> None:
    evil = f"\x1b[2J{name}\n节点"
    incident = replace(SLOW, culprits=(Culprit(3, None, evil, evil, 2.0, "low", evil, evil),), summary=evil)
    nodes = tuple(NodeView(node, evil, storage_troubles=(evil,), notices=(evil,)) for node in range(2))
    snapshot = replace(run(incident), name=evil, nodes=nodes, state=evil, backup_trouble=evil)
    shown = screen(look(snapshot), width, height, scroll, ascii_only=plain)
    assert len(shown.lines) == height
    for line in shown.lines:
        text = "".join(piece.text for piece in line)
        assert columns_of(text) <= width
        assert text.isprintable()
