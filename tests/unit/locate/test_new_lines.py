"""A cause that no row knows, by comparison with healthy stretches, other ranks and the phase of the job."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.cli.why import failure_in
from keepstep.core.told import Failure
from keepstep.detect.failure_rows import RowMatcher, shipped_rows
from keepstep.detect.listener import Listener
from keepstep.locate.failure import explain
from keepstep.locate.new_lines import to_compare

MATCHER = RowMatcher(shipped_rows())
RANKS = range(4)
STARTED = "".join(f"[rank{rank}]: starting worker of group {rank}\n" for rank in RANKS)


def steps(count: int, ranks: tuple[int, ...] = tuple(RANKS)) -> str:
    return "".join(
        f"[rank{rank}]: step {at} loss {2 / (at + 1):.4f}\n" for at in range(count) for rank in ranks
    )


def timed_out(rank: int) -> str:
    return (
        f"[rank{rank}]:[E1 P.cpp:6] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(x)\n"
    )


WAITED = "".join(map(timed_out, RANKS))
ODD = "[rank{}]: the frobnicator of shard {} went odd\n"
SAVED = "".join(f"[rank{rank}]: Saving checkpoint of step 9\n" for rank in RANKS)


def why(folder: Path, log: str, *healthy: str) -> Failure:
    (folder / "job.log").write_text(log)
    others: list[Path] = []
    for at, text in enumerate(healthy):
        others.append(folder / f"healthy-{at}.log")
        others[-1].write_text(text)
    return failure_in(folder / "job.log", MATCHER, others)[0]


@pytest.mark.parametrize(
    ("log", "named"),
    [
        (steps(60) + ODD.format(3, 7) + WAITED, "rank 3"),
        # several ranks say it, or said it before
        (steps(60) + ODD.format(3, 7) + ODD.format(1, 5) + WAITED, None),
        (ODD.format(1, 5) + steps(60) + ODD.format(3, 7) + WAITED, None),
        # two ranks each have a line of their own
        (steps(60) + ODD.format(3, 7) + "[rank1]: tiles of the cache were flushed\n" + WAITED, None),
        # the job went on after it
        (steps(60) + ODD.format(3, 7) + steps(60) + WAITED, None),
        # no healthy stretch before it, or one in which each line is new
        (steps(3) + ODD.format(3, 7) + WAITED, None),
        (
            "".join(f"{steps(1)}[rank1]: prompt {'x' * at} was taken\n" for at in range(60))
            + ODD.format(3, 7)
            + WAITED,
            None,
        ),
        # it comes after the others have lost patience, tells of another rank, or is a notice or a warning
        (steps(60) + timed_out(0) + ODD.format(3, 7) + WAITED, None),
        (
            steps(60) + "[rank3]: the store was waiting for key: timed out waiting for clients\n" + WAITED,
            None,
        ),
        (steps(60) + ODD.format(3, 7).replace("the", "INFO: the") + WAITED, None),
        (steps(60) + ODD.format(3, 7).replace("the", "WARNING: the") + WAITED, None),
        # the first checkpoint has lines of its own; the second has none that are new
        (steps(60) + SAVED + ODD.format(3, 7) + WAITED, None),
        (steps(60) + SAVED + steps(1) + SAVED + ODD.format(3, 7) + WAITED, "rank 3"),
        (steps(60) + "[rank3]: running validation of step 60\n" + WAITED, None),
        # rank 0 writes for all of them
        (steps(400, (0,)) + steps(30) + ODD.format(0, 7) + WAITED, None),
        # a row knows the cause
        (
            steps(60)
            + ODD.format(3, 7)
            + "[rank1]: RuntimeError: CUDA error: uncorrectable ECC error\n"
            + WAITED,
            None,
        ),
    ],
)
def test_a_line_that_one_rank_alone_said_near_the_end(tmp_path: Path, log: str, named: str | None) -> None:
    found = why(tmp_path, STARTED + log)
    assert (found.kind == "new-line") == (named is not None)
    if named is not None:
        assert (found.cause_class, found.confidence, *map(str, found.culprits)) == ("other", "low", named)
        assert found.title.startswith("no known message; first said only by rank 3, new against 2")
        assert found.root is not None
        assert found.root.line == ODD.format(3, 7).strip()


def test_without_labels_only_a_line_that_sounds_wrong_is_told_and_nobody_is_named(tmp_path: Path) -> None:
    log = steps(250, (0,)).replace("[rank0]: ", "")
    found = why(tmp_path, log + "frobnicator error: shard 7 went odd\n" + WAITED)
    assert (found.kind, found.culprits, found.title) == (
        "new-line", (), "no known message; new against 250 healthy lines",
    )  # fmt: skip
    assert why(tmp_path, log + "the frobnicator is at shard 7\n" + WAITED).kind == "timeout-only"


def test_what_an_earlier_run_said_too_is_no_cause(tmp_path: Path) -> None:
    log = steps(60) + ODD.format(3, 7) + WAITED
    assert why(tmp_path, log, steps(60)).kind == "new-line"
    assert why(tmp_path, log, steps(60), ODD.format(0, 123) + steps(60)).kind == "timeout-only"
    short = why(tmp_path, steps(6) + ODD.format(3, 7) + WAITED, steps(100))
    assert short.title == "no known message; first said only by rank 3, new against 400 healthy lines"


def test_logs_of_ranks_in_a_folder_are_compared(tmp_path: Path) -> None:
    for rank in RANKS:
        odd = "the frobnicator of shard 7 went odd\n" if rank == 2 else ""
        log = steps(250, (rank,)).replace(f"[rank{rank}]: ", "")
        (tmp_path / f"rank{rank}.log").write_text(log + odd + timed_out(rank))
    found, _ = failure_in(tmp_path, MATCHER)
    assert (found.kind, *map(str, found.culprits)) == ("new-line", "rank 2")


LINES = st.sampled_from(
    [
        steps(1),
        steps(30),
        SAVED,
        WAITED,
        ODD.format(1, 2),
        ODD.format(3, 4),
        "tiles were flushed\n",
        "an error of it\n",
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(LINES, max_size=12))
def test_logs_without_a_failure_have_nothing_to_compare(parts: list[str]) -> None:
    listener = Listener(MATCHER)
    listener.take("".join(part for part in parts if part != WAITED).encode())
    words = [listener.words()]
    assert to_compare(explain(words), words) == ()


@settings(max_examples=60, deadline=None)
@given(st.lists(LINES, max_size=12), st.integers(0, 3))
def test_what_is_compared_is_new_and_of_the_end(parts: list[str], rank: int) -> None:
    log = "".join(parts)
    listener = Listener(MATCHER)
    listener.take((log + timed_out(rank)).encode())
    words = [listener.words()]
    lines = log.splitlines()
    for one in to_compare(explain(words), words):
        assert lines[one.number - 1] == one.line
        before, after = lines[: one.number - 1], lines[one.number :]
        assert one.line not in before
        assert sum("loss" in line for line in after) <= 5 * 4
