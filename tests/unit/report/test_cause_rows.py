"""The rows of a verdict that tell why."""

from __future__ import annotations

from dataclasses import replace

from keepstep.core.incident import FailureCause, Incident, SpokenLine
from keepstep.report.cause_rows import cause_rows
from keepstep.report.verdict import render

FIRST = SpokenLine("OSError: [Errno 28] No space left on device", 2, "a", "stderr", 9, 1_700_000_000.25)
CAUSE = FailureCause(
    "storage",
    "no-space",
    "a disk is full",
    "high",
    "free space there",
    "errno-enospc",
    FIRST,
    (replace(FIRST, text="token=hf_" + "a" * 34, rank=1, unix_s=1_700_000_000.75),),
    3,
    (0, 1),
    path="/ckpt",
)


def test_rows_tell_cause_first_line_what_followed_and_advice() -> None:
    rows = cause_rows(CAUSE)
    assert [label for label, _ in rows] == ["cause", "path", "first", "then", "", "advice"]
    assert rows[0][1] == "storage: a disk is full   confidence high"
    assert rows[2][1].startswith("rank 2 ")
    assert rows[3][1].startswith("rank 1 +0.50 s")
    assert rows[4][1] == "ranks 0-1: 3 lines only tell of others"


def test_secrets_are_blanked() -> None:
    assert "a" * 34 not in str(cause_rows(CAUSE))


def test_without_a_first_line_and_with_followers_no_cause_is_claimed() -> None:
    echoes = replace(CAUSE, cause_class="other", kind="echo-only", first=None, then=(), path="", advice="")
    assert [label for label, _ in cause_rows(echoes)] == ["then"]


def test_a_verdict_on_storage_blames_no_rank() -> None:
    incident = Incident(1, "crash", 5, 5, None, None, (), (2,), (), (), summary="rank 2 died", cause=CAUSE)
    text = render(incident)
    assert "culprit   no rank: it is the storage" in text
    assert "victims   rank 2 stopped by it" in text
    assert text.index("cause ") < text.index("culprit") < text.index("first ")
    misfit = replace(incident, cause=replace(CAUSE, cause_class="user", kind="checkpoint-misfit"))
    assert "culprit   no rank: it is what was saved" in render(misfit)
    echoes = replace(CAUSE, cause_class="other", kind="echo-only", first=None)
    assert "victims   rank 2 lost a peer" in render(replace(incident, cause=echoes))
