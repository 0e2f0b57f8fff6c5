"""Stretches of kept logs, whatever these hold: bounded, in order, as the files have them, and no exception."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.core.incident import Culprit, FailureCause, Incident, SpokenLine
from keepstep.detect.failure_rows import RowMatcher, shipped_rows
from keepstep.report.shown_stretches import shown, stretches_as_json
from keepstep.traces.log_stretches import AFTER, BEFORE, MOST_LINES, MOST_LOGS, around, stretches_of_run

MATCHER = RowMatcher(shipped_rows())
ERROR = b"OSError: [Errno 28] No space left on device"
LINES = st.one_of(
    st.sampled_from([
        b"step 1 loss 2.0", b"Traceback (most recent call last):", b'  File "t.py", line 9, in <module>', ERROR,
        b"RuntimeError: Connection closed by peer [10.0.0.1]:4711", b"", b"\x1b[31mred\x1b[0m", b"a\rb",
    ]),
    st.binary(max_size=60),
)  # fmt: skip
TEXTS = st.lists(LINES, max_size=120).map(b"\n".join)
FILES = st.dictionaries(
    st.tuples(
        st.integers(0, 15),
        st.sampled_from(
            ["stderr.0.log", "stderr.0.end.log", "output.0.log", "stderr.1.log", "stdout.log", "x.log"]
        ),
    ),
    TEXTS,
    max_size=6,
)


@settings(max_examples=many(100))
@given(
    files=FILES,
    first=st.one_of(st.none(), st.integers(0, 15)),
    blamed=st.lists(st.integers(0, 15), max_size=16),
)
def test_stretches_of_any_run_are_bounded_and_show_what_is_there(
    tmp_path_factory: pytest.TempPathFactory,
    files: dict[tuple[int, str], bytes],
    first: int | None,
    blamed: list[int],
) -> None:
    run = tmp_path_factory.mktemp("run")
    for (rank, name), text in files.items():
        folder = run / "logs" / f"rank-{rank:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    said = None if first is None else SpokenLine(ERROR.decode(), first, "n", "stderr", 1, 1.0)
    cause = FailureCause("storage", "no-space", "a disk is full", "high", first=said, following_ranks=(3, 4))
    culprits = tuple(Culprit(rank) for rank in blamed)
    incident = Incident(1, "crash", 5, 5, None, None, culprits, (), (), (), cause=cause)
    found, missing = stretches_of_run(run, incident, MATCHER)
    assert len(found) <= MOST_LOGS
    assert len({one.rank for one in found}) == len(found)
    wanted = list(dict.fromkeys([rank for rank in (first, *blamed, 3, 4) if rank is not None]))
    shown_ranks = [one.rank for one in found]
    assert shown_ranks == [rank for rank in wanted[:MOST_LOGS] if rank in shown_ranks]
    assert bool(missing) == (len(found) < min(len(wanted), MOST_LOGS) or len(wanted) > MOST_LOGS)
    for one in found:
        text = (run / one.log).read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        there = [line.decode(errors="replace") for line in text.split(b"\n")]
        assert 0 < len(one.lines) <= MOST_LINES
        assert list(one.lines) == there[one.first - 1 : one.first - 1 + len(one.lines)]
        assert all(0 <= at < len(one.lines) for at in one.marked)
        assert ".1." not in one.log
        assert "x.log" not in one.log
    assert all(line.isprintable() for line in shown(found).split("\n"))
    assert len(stretches_as_json(found)) == len(found)


@given(count=st.integers(1, 300), marks=st.sets(st.integers(0, 299), min_size=1), begins=st.integers(0, 299))
def test_a_stretch_is_around_its_first_mark(count: int, marks: set[int], begins: int) -> None:
    marks = {mark % count for mark in marks}
    lines = [str(at) for at in range(count)]
    begin, found, marked = around(lines, marks, min(begins, min(marks)))
    first = min(marks)
    assert begin <= max(first - BEFORE, 0)
    assert found == tuple(lines[begin : begin + len(found)])
    assert len(found) <= MOST_LINES
    assert begin + len(found) == min(first + 1 + AFTER, count)
    assert {begin + at for at in marked} == {at for at in marks if at < begin + len(found)}


def test_the_end_of_a_long_file_is_shown_without_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "rank-00000"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_bytes(b"step\n" * 200_000 + ERROR + b"\n")
    incident = Incident(1, "crash", 5, 5, None, None, (Culprit(0),), (), (), ())
    (one,), _ = stretches_of_run(tmp_path, incident, MATCHER)
    assert (one.first, one.lines[-1], one.marked) == (0, ERROR.decode(), frozenset({BEFORE}))
