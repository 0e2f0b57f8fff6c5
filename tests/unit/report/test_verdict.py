"""The verdict's text, kind by kind, and what must hold for every incident there can be."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.core.incident import Action, Culprit, Event, Incident, Link
from keepstep.report.timeline import rows
from keepstep.report.verdict import WIDTH, render, render_action, render_closing

HANG = Incident(
    number=7,
    kind="hang",
    onset_step=18422,
    detected_step=18422,
    relief_step=None,
    job_slowdown=None,
    culprits=(
        Culprit(27, None, "gpu-114", "backward of micro-batch 5, stage 2", 0, "high", "never entered"),
    ),
    victims=tuple(rank for rank in range(2048) if rank != 27),
    evidence=("wait-for graph has one root",),
    missing=(),
    summary="group tp3  ALLGATHER seq 120049",
    stuck_s=92.4,
    ranks_reporting=2048,
    world_size=2048,
)
SLOW = Incident(
    number=1,
    kind="slow",
    onset_step=30,
    detected_step=32,
    relief_step=None,
    job_slowdown=1.48,
    culprits=(Culprit(2, None, "gpu-1", "forward", 2.0, "medium", "cpu quota", "throttled 48% of the time"),),
    victims=(0, 1, 3),
    evidence=("own time of rank 2 ×2.0", "peers wait 300 ms more"),
    missing=("clocks of gpu-2",),
    iteration_before_s=0.745,
    iteration_after_s=1.1,
    ranks_reporting=4,
    world_size=4,
)


def test_a_network_of_which_the_path_is_not_known() -> None:
    told = Culprit(None, None, "", "transfer", 0.0, "medium", "network", "nothing comes through")
    line = render(replace(HANG, culprits=(told,))).splitlines()[1]
    assert line.startswith("culprit   the network  network; nothing comes through")


def test_hang() -> None:
    assert render(HANG).splitlines() == [
        "HANG      step 18422  group tp3  ALLGATHER seq 120049  stuck 92 s",
        "culprit   rank 27  gpu-114  never entered; in backward of micro-batch 5, stage 2",
        "victims   ranks 0-26,28-2047 waiting (2047 of 2048)",
        "evidence  2048/2048 ranks reporting, wait-for graph has one root          confidence high",
        "action    none (watching only)",
        "next      keepstep report RUN 0007",
    ]


def test_slow() -> None:
    assert render(SLOW, run="20261121-train").splitlines() == [
        "SLOW      step 30  iteration 745 ms → 1.1 s (×1.48)  seen at step 32",
        "culprit   rank 2  gpu-1  cpu quota ×2.0; throttled 48% of the time; in forward",
        "victims   ranks 0-1,3 waiting (3 of 4)",
        "evidence  4/4 ranks reporting, own time of rank 2 ×2.0                    confidence medium",
        "          peers wait 300 ms more",
        "missing   clocks of gpu-2",
        "action    none (watching only)",
        "next      keepstep report 20261121-train 0001",
    ]


def test_slow_link_names_both_ends() -> None:
    link = Culprit(None, Link((1, 4), ("gpu-1", "gpu-2")), "gpu-1", "transfer", 9.7, "high", "network")
    line = render(replace(SLOW, culprits=(link,))).splitlines()[1]
    assert line == "culprit   link gpu-1 ↔ gpu-2  (rank 1 ↔ 4)  network ×9.7; in transfer"


def test_crash_with_action_and_cost() -> None:
    crash = replace(
        HANG,
        kind="crash",
        culprits=(Culprit(3, None, "gpu-1", "", 0, "high", "process died", "killed by SIGKILL"),),
        victims=(0,),
        stuck_s=None,
        summary="rank 3 died",
        actions=(Action("restart rank 3 in place (1 of 3)", 11.0),),
    )
    lines = render(crash).splitlines()
    assert lines[0] == "CRASH     step 18422  rank 3 died"
    assert lines[2] == "victims   rank 0 lost a peer (1 of 2048)"
    assert (
        lines[4]
        == "action    restart rank 3 in place (1 of 3)                                expected cost 11 s"
    )


def test_desync() -> None:
    desync = replace(
        HANG, kind="desync", summary="ranks 0,2 in ALLREDUCE, rank 1 in BROADCAST of group dp seq 7"
    )
    assert render(desync).startswith("DESYNC    step 18422  ranks 0,2 in ALLREDUCE, rank 1 in BROADCAST")


def test_cause_unknown_says_what_is_missing() -> None:
    unknown = replace(SLOW, culprits=(), missing=("profiles of gpu-[2-3]", "clocks"), job_slowdown=1.2)
    lines = render(unknown).splitlines()
    assert lines[1] == "culprit   cause unknown; missing: profiles of gpu-[2-3]; clocks"
    assert not any("confidence" in line for line in lines)
    assert not any(line.startswith("missing") for line in lines)


def test_many_culprits_one_row_each_then_folded() -> None:
    culprits = tuple(
        replace(SLOW.culprits[0], rank=rank, cause=f"cause {rank}", detail="") for rank in range(20)
    )
    lines = render(replace(SLOW, culprits=culprits)).splitlines()
    assert lines[1].startswith("culprit   rank 0 ")
    assert lines[8].startswith("          rank 7 ")
    assert lines[9] == "          and 12 more: ranks 8-19"


def test_culprits_that_share_cause_and_place_are_one_line() -> None:
    culprits = tuple(
        Culprit(
            rank,
            None,
            f"gpu-{rank // 8:02d}",
            "after its last step",
            0.0,
            "high",
            "never entered",
            f"group 0 ALLREDUCE seq 9; after its last step for {20 + rank % 3} s; [rank{rank}] at train.py:10",
        )
        for rank in range(64, 127)
    )
    incident = replace(HANG, culprits=culprits)
    lines = render(incident).splitlines()[1:4]
    assert " ".join(line[10:] for line in lines[:2]) == (
        "ranks 64-126  gpu-[08-15]  never entered; group 0 ALLREDUCE seq 9; after its last step for 20 to 22 s; "
        "[rank N] at train.py:10"
    )
    assert lines[2] == "victims   ranks 0-26,28-2047 waiting (2047 of 2048)"
    closing = render_closing(replace(incident, status="relieved", relief_step=3))
    assert closing.endswith("incident 0007 (hang, ranks 64-126 gpu-[08-15])")


def test_culprits_in_other_places_or_known_less_well_have_lines_of_their_own() -> None:
    one = Culprit(1, None, "a", "", 0.0, "high", "process died", "exit code 1; at step 4 of rank 1")
    others = (
        replace(one, rank=2, detail="exit code 1; at step 5 of rank 2"),
        replace(one, rank=3, confidence="low"),
        replace(one, rank=4, cause="stopped"),
    )
    lines = render(replace(HANG, culprits=(one, *others))).splitlines()
    assert [line[10:16] for line in lines[1:5]] == ["rank 1", "rank 2", "rank 3", "rank 4"]


def test_slow_ranks_on_one_line_say_how_slow_the_least_and_the_most_is() -> None:
    first = SLOW.culprits[0]
    also = replace(first, rank=3, slowdown=2.41, detail="throttled 52% of the time")  # the first: ×2.0, 48%
    assert render(replace(SLOW, culprits=(first, also))).splitlines()[1] == (
        "culprit   ranks 2-3  gpu-1  cpu quota ×2.0 to 2.4; throttled 48 to 52% of the time; in forward"
    )


def test_links_and_nodes_are_never_folded() -> None:
    link = Culprit(None, Link((1, 4), ("gpu-1", "gpu-2")), "gpu-1", "transfer", 9.7, "high", "network")
    lines = render(replace(SLOW, culprits=(link, link, Culprit(node="a"), Culprit(node="a")))).splitlines()
    assert [line[10:14] for line in lines[1:5]] == ["link", "link", "node", "node"]


def test_victims_that_do_not_fold_are_counted() -> None:
    scattered = replace(HANG, victims=tuple(range(0, 2048, 2)))
    assert render(scattered).splitlines()[2] == "victims   1024 ranks waiting"


@pytest.mark.parametrize(
    ("status", "relief", "line"),
    [
        ("relieved", 45, "RELIEF    step 45  over after 15 steps  incident 0001 (slow, rank 2 gpu-1)"),
        ("transient", 33, "TRANSIENT gone before it was located  incident 0001 (slow, rank 2 gpu-1)"),
        (
            "ended",
            None,
            "ENDED     over with the job, or by what came after it  incident 0001 (slow, rank 2 gpu-1)",
        ),
    ],
)
def test_closing_line(status: str, relief: int | None, line: str) -> None:
    closed = replace(SLOW, status=status, relief_step=relief)  # type: ignore[arg-type]
    assert render_closing(closed) == line
    assert line[10:].split("  incident")[0] in render(closed)


def test_a_hang_that_is_over_says_for_how_long() -> None:
    closing = render_closing(replace(HANG, status="relieved", relief_step=18423))
    assert closing.startswith("RELIEF    step 18423  over after 92 s  incident ")


def test_colors_change_nothing_but_colors() -> None:
    for incident in (HANG, SLOW):
        colored = render(incident, color=True)
        assert "\x1b[" in colored
        assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == render(incident)
        assert "\x1b" not in render(incident)
    closing = render_closing(replace(SLOW, status="relieved", relief_step=40), color=True)
    assert closing.startswith("\x1b[32;1mRELIEF")


words = st.text(st.characters(blacklist_categories=("Cs",)), max_size=200)
seconds = st.one_of(st.none(), st.floats(0, 1e6))
culprits = st.builds(
    Culprit,
    rank=st.one_of(st.none(), st.integers(0, 131_071)),
    node=words,
    stage=words,
    slowdown=st.floats(0, 1e6),
    confidence=st.sampled_from(["high", "medium", "low"]),
    cause=words,
    detail=words,
)
moments = st.one_of(st.none(), st.floats(0, 4e9))
incidents = st.builds(
    Incident,
    number=st.integers(1, 99999),
    kind=st.sampled_from(["slow", "hang", "crash", "desync"]),
    onset_step=st.one_of(st.none(), st.integers(0, 10**9)),
    detected_step=st.one_of(st.none(), st.integers(0, 10**9)),
    relief_step=st.one_of(st.none(), st.integers(0, 10**9)),
    job_slowdown=seconds,
    culprits=st.lists(culprits, max_size=12).map(tuple),
    victims=st.lists(st.integers(0, 131_071), max_size=50, unique=True).map(tuple),
    evidence=st.lists(words, max_size=8).map(tuple),
    missing=st.lists(words, max_size=4).map(tuple),
    actions=st.lists(
        st.builds(
            *(Action, words, seconds, words),
            expected_iteration_s=seconds,
            step=st.none() | st.integers(0, 10**9),
            begun_unix_s=moments,
        ),
        max_size=3,
    ).map(tuple),
    status=st.sampled_from(["open", "relieved", "transient", "ended"]),
    summary=words,
    iteration_before_s=seconds,
    iteration_after_s=seconds,
    stuck_s=seconds,
    ranks_reporting=st.integers(0, 10**6),
    world_size=st.integers(0, 10**6),
    closed_unix_s=moments,
    lost_s=seconds,
    onset_unix_s=moments,
    events=st.lists(
        st.builds(
            Event,
            st.sampled_from(["noticed", "verdict", "sharper", "validation"]),
            st.floats(0, 4e9),
            st.none() | st.integers(0, 10**9),
            words,
        ),
        max_size=4,
    ).map(tuple),
)


@given(incidents, st.booleans())
@settings(max_examples=many(300), deadline=None)
def test_never_wider_than_a_terminal_and_never_fails(incident: Incident, timeline: bool) -> None:
    lines = render(incident, timeline=timeline).split("\n")
    assert all(len(line) <= WIDTH for line in lines)
    assert all(line.isprintable() for line in lines)
    assert lines[0].split()[0] == incident.kind.upper()
    assert lines[-1] == f"next      keepstep report RUN {incident.number:04d}"
    assert len(render_closing(incident)) <= WIDTH


def test_an_action_is_said_by_itself() -> None:
    action = Action(
        "S2, micro-batches", 0.0, "9 to replicas 0-1,3, 5 to replica 2; expected 0.1 s → 0.07 s " * 2
    )
    said = render_action(replace(SLOW, actions=(Action("none"), action))).splitlines()
    assert said[0].startswith("ACTION    incident 0001  S2, micro-batches: 9 to replicas")
    assert all(len(line) <= WIDTH for line in said)
    assert "none" not in "".join(said)


@pytest.mark.parametrize(
    ("lost_s", "saved_s", "says"),
    [
        (None, 0.0, "over after 10 steps"),
        (2.0, 0.0, "over after 10 steps, 8 GPU-seconds lost"),
        (900.0, 1800.0, "over after 10 steps, 1 GPU-hour lost, 2 GPU-hours saved"),
    ],
)
def test_what_a_slowdown_cost_is_told_in_the_end(lost_s: float | None, saved_s: float, says: str) -> None:
    assert SLOW.onset_step is not None
    closed = replace(
        SLOW,
        status="relieved",
        relief_step=SLOW.onset_step + 10,
        lost_s=lost_s,
        saved_s=saved_s,
        world_size=4,
    )
    line = render_closing(closed)
    assert f"step {closed.relief_step}  {says}  incident" in line


def test_what_happens_next_is_said_with_how_soon() -> None:
    coming = replace(HANG, actions=(), next_action="ends rank 27", next_unix_s=1000.0)
    assert "action    ends rank 27 in 29 s if nothing moves" in render(coming, now_unix_s=971.5).splitlines()
    assert "action    ends rank 27 in 1 s if nothing moves" in render(coming, now_unix_s=1005.0).splitlines()
    later = next(line for line in render(coming).splitlines() if line.startswith("action"))
    assert re.fullmatch(r"action    ends rank 27 at \d\d:\d\d:\d\d if nothing moves", later)
    none = replace(coming, next_action="none: a debugger holds rank 27", next_unix_s=None)
    assert "action    none: a debugger holds rank 27" in render(none, now_unix_s=1.0).splitlines()
    done = replace(coming, actions=(Action("end the hung process"),))
    assert "action    end the hung process" in render(done, now_unix_s=1.0).splitlines()


def test_what_follows_a_hang_that_ended_in_deaths_is_up_to_the_launchers() -> None:
    event = Event("deaths", 1.0, 7, "rank 0 gave up waiting")
    incident = Incident(1, "hang", 7, 7, None, None, (), (), (), (), events=(event,))
    assert incident.has_deaths
    assert "action    the launchers end the job, or start it again" in render(incident)
    assert not replace(incident, events=()).has_deaths
    (row,) = [row for row in rows(incident) if row.step == 7]
    assert row.text == "rank 0 gave up waiting"
