"""The words of ranks and kernels at the controller: bounded, of this incarnation, explained with the deaths."""

from __future__ import annotations

import pytest

from keepstep.control.incidents.job_words import JobWords, cause_of, cause_of_hang
from keepstep.core.finding import Finding
from keepstep.core.incident import Culprit, Diagnosis, Link
from keepstep.wire import Said, Words

RANKS = range(4)


def said(rank: int, row: str, line: str, number: int = 1, unix_s: float = 100.0) -> Said:
    return Said(rank, row, line, "stderr.0.log", number, unix_s)


def death(rank: int, message: str) -> tuple[Finding, float]:
    return Finding("crash", rank, f"node-{rank // 2}", 0.0, 41, exit_code=1, message=message), 101.0


def test_words_of_ranks_and_kernel_tell_the_cause() -> None:
    words = JobWords(lambda now_s: now_s)
    kernel = Said(
        -1, "xid-79", "NVRM: Xid (PCI:0000:9b:00): 79", "kernel", 7, 99.0, places={"pci": "0000:9b:00"}
    )
    assert words.heard("node-1", Words(1, (said(3, "cuda-ecc", "CUDA error: uncorrectable ECC"), kernel)))
    cause = cause_of(words.failure([death(0, "RuntimeError: Connection closed by peer")], RANKS))
    assert cause is not None
    assert (cause.cause_class, cause.kind) == ("node", "gpu-off-bus")
    assert cause.first is not None
    assert (cause.first.rank, cause.first.node, cause.first.number) == (None, "node-1", 7)
    assert [one.rank for one in cause.then] == [3]
    assert (cause.following, cause.following_ranks) == (1, (0,))


def test_the_last_line_of_a_rank_counts_where_nothing_else_was_heard() -> None:
    words = JobWords(lambda now_s: now_s)
    cause = cause_of(words.failure([death(2, "KeyError: 'x'")], RANKS))
    assert cause is not None
    assert (cause.cause_class, cause.kind) == ("user", "exception")
    assert cause.first is not None
    assert (cause.first.rank, cause.first.unix_s) == (2, 101.0)


def test_nothing_is_told_without_words() -> None:
    assert cause_of(JobWords(lambda now_s: now_s).failure([death(2, "")], RANKS)) is None


def test_equal_lines_and_unknown_rows_are_not_kept() -> None:
    words = JobWords(lambda now_s: now_s)
    line = said(0, "cuda-ecc", "CUDA error: uncorrectable ECC")
    assert words.heard("node-0", Words(0, (line,)))
    assert not words.heard("node-0", Words(0, (line, said(0, "no such row", "x", 2))))


def test_words_of_the_last_incarnation_are_forgotten_and_late_ones_not_taken() -> None:
    words = JobWords(lambda now_s: now_s)
    old = said(0, "cuda-ecc", "CUDA error: uncorrectable ECC")
    assert words.heard("node-0", Words(0, (old,)))
    words.begin_again(200.0)
    assert not words.heard("node-0", Words(0, (old,)))
    assert words.failure([], RANKS).cause_class == ""
    assert words.heard("node-0", Words(0, (said(0, "cuda-ecc", "again", unix_s=201.0),)))


def test_words_of_an_incarnation_that_is_over_still_explain_its_deaths() -> None:
    words = JobWords(lambda now_s: now_s)
    xid = "NVRM: Xid (PCI:0000:9b:00): 79, pid=77, name=python"
    assert words.heard("node-1", Words(1, (Said(-1, "", xid, "kernel", 0, 99.0),)))
    over = words.begin_again(200.0)
    assert over.heard(
        "node-1", Words(1, (said(3, "cuda-ecc", "CUDA error: uncorrectable ECC", unix_s=199.5),))
    )
    assert not over.heard("node-1", Words(1, (said(3, "cuda-ecc", "that of the next", unix_s=202.0),)))
    cause = cause_of(over.failure([death(3, "RuntimeError: CUDA error")], RANKS))
    assert cause is not None
    assert cause.first is not None
    assert (cause.kind, cause.confidence, cause.first.source) == ("gpu-off-bus", "high", "kernel")
    assert [one.rank for one in cause.then] == [3]
    assert words.failure([], RANKS).cause_class == ""


def test_words_are_of_the_incarnation_of_who_wrote_them_whenever_they_are_read() -> None:
    words = JobWords(lambda now_s: now_s)
    over = words.begin_again(200.0)
    words.begins(1)

    def by(incarnation: int, line: str, unix_s: float, rank: int = 0) -> Words:
        row, source = ("xid-79", "kernel") if rank < 0 else ("py-plain", "output")
        return Words(0, (Said(rank, row, line, source, 1, unix_s),), incarnation)

    read_late = by(0, "ValueError: of the last", 200.2), by(0, "ValueError: of the last, too", 205.0)
    for message in read_late:
        assert over.heard("node-0", message)
        assert not words.heard("node-0", message)
    early = by(1, "ValueError: of the next", 200.3)
    assert not over.heard("node-0", early)
    assert words.heard("node-0", early)
    xid = "NVRM: Xid (PCI:0000:9b:00): 79"  # the next agent may be the first to read what the kernel said
    assert over.heard("node-0", by(1, xid, 200.5, rank=-1))
    assert not over.heard("node-0", by(1, xid + " again", 203.0, rank=-1))
    assert not words.heard("node-0", by(0, xid, 200.5, rank=-1))
    last = words.begin_again(300.0)
    words.begins(3)  # the controller was away for one
    assert not last.heard("node-0", by(0, "ValueError: of long ago", 299.5))
    assert last.heard("node-0", by(2, "ValueError: of the one between", 299.5))
    assert not words.heard("node-0", by(2, "ValueError: of the one between", 300.5))


def test_a_launcher_does_not_say_of_which_incarnation_the_kernel_spoke() -> None:
    words = JobWords(lambda now_s: now_s)
    over = words.begin_again(200.0)
    words.begins(1)
    xid = "NVRM: Xid (PCI:0000:9b:00): 79"
    before, since = (Words(0, (Said(-1, "xid-79", xid, "kernel", 0, at),)) for at in (190.0, 210.0))
    assert over.heard("node-0", before)
    assert not over.heard("node-0", since)
    assert not words.heard("node-0", before)
    assert words.heard("node-0", since)


def test_a_node_that_says_without_end_is_cut() -> None:
    words = JobWords(lambda now_s: now_s)
    for first in range(0, 256, 64):
        lines = tuple(said(0, "errno-econnreset", f"reset {n}", n) for n in range(first, first + 64))
        words.heard("node-0", Words(0, lines))
    failure = words.failure([], RANKS)
    assert len(failure.followers) == 64


def test_what_the_kernel_did_to_another_jobs_process_is_no_cause() -> None:
    words = JobWords(lambda now_s: now_s)
    words.heard("node-1", Words(1, (Said(-1, "oom-killer", "python invoked oom-killer", "kernel", 7, 99.0),)))
    assert words.failure([death(2, "KeyError: 'x'")], RANKS).kind == "exception"
    killed = Finding("crash", 3, "node-1", 0.0, 41, exit_code=137)
    assert words.failure([(killed, 101.0)], RANKS).kind == "host-oom"


def test_a_hang_has_a_class_without_words() -> None:
    cut = Diagnosis("hang", (Culprit(link=Link((0, 2), ("a", "b")), confidence="high"),))
    cause = cause_of_hang(cut, {})
    assert cause is not None
    assert (cause.cause_class, cause.confidence) == ("network", "high")
    cause = cause_of_hang(Diagnosis("desync", (Culprit(1, confidence="medium"),)), {})
    assert cause is not None
    assert (cause.cause_class, cause.kind, cause.confidence) == ("user", "desync", "medium")
    assert cause_of_hang(Diagnosis("hang", (Culprit(1),)), {}) is None


@pytest.mark.parametrize(
    ("moved_on_s", "kind"), [(None, "gpu-ecc"), (130.0, "gpu-ecc"), (500.0, "exception")]
)
def test_an_error_of_a_gpu_after_which_its_node_worked_on_is_no_cause(
    moved_on_s: float | None, kind: str
) -> None:
    words = JobWords(lambda now_s: now_s, {"node-1": moved_on_s}.get)
    line = "NVML: GPU 1 (PCI:0000:9b:00): 2 more uncorrected memory errors (2)"
    counted = Said(3, "nvml-uncorrected", line, "NVML", 0, 100.0, places={"pci": "0000:9b:00"})
    assert words.heard("node-1", Words(1, (counted,)))
    assert words.heard("node-0", Words(0, (said(0, "python-error", "KeyError: 'x'", unix_s=500.0),)))
    cause = cause_of(words.failure([death(0, "KeyError: 'x'")], RANKS))
    assert cause is not None
    assert cause.kind == kind
