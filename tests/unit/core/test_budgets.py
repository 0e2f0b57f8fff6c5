"""Budgets of restarts: by example, and against a twin that counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.budgets import LEFT_EARLY, Cause, Limits, as_text, comes_first, limits_of, pause_s, refusal
from keepstep.core.errors import UsageError

BOOM = "ValueError: boom at 0x7f00"


def cause(at_s: float = 0.0, rank: int = 3, step: int = 41, error: str = BOOM, node: str = "gpu-1") -> Cause:
    return Cause(at_s, node, rank, step, error)


def test_the_same_error_at_the_same_step_twice_is_enough() -> None:
    assert refusal(Limits(), [cause()]) is None
    refused = refusal(Limits(), [cause(0.0), cause(90_000.0, error="ValueError: boom at 0x9e11")])
    assert refused is not None
    assert refused.node == ""  # no other node would help
    assert refused.reason == (
        "rank 3 on node gpu-1 has failed twice at step 41 with the same error (ValueError: boom at 0x9e11): "
        "a restart would not help; mend that, or allow it with --restart-budget same=0"
    )


@pytest.mark.parametrize(
    "first",
    [
        cause(step=40),
        cause(step=-1),
        cause(error="KeyError: 'x'"),
        cause(rank=-1),
    ],
)
def test_what_differs_is_not_the_same(first: Cause) -> None:
    assert refusal(Limits(), [first, cause()]) is None


def test_one_error_at_one_step_is_the_same_whichever_rank_is_the_first() -> None:
    refused = refusal(Limits(), [cause(rank=2), cause()])
    assert refused is not None
    assert refused.reason.startswith(
        "rank 3 on node gpu-1, as another before it, has failed twice at step 41"
    )
    gone = "OSError: [Errno 5] Input/output error: '/data/train.bin'"
    assert refusal(Limits(), [cause(rank=2, step=0, error=gone), cause(step=0, error=gone)]) is None
    for error in (BOOM, "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x64 and 65x128)"):
        assert refusal(Limits(), [cause(rank=2, step=0, error=error), cause(step=0, error=error)]) is not None


@pytest.mark.parametrize(
    "twice",
    [
        cause(step=-1),
        cause(rank=-1),
        cause(error=""),
        cause(error="Gloo: Connection closed by peer [10.0.0.1]"),
        cause(error="signal 9 (SIGKILL) received by process 19380"),
        cause(error="signal 15 (SIGTERM) received by process 19380"),
        cause(error="CheckpointError: nothing is restored: it is not known what other sources have (s3://b)"),
    ],
)
def test_what_is_not_known_or_tells_of_another_is_never_the_same(twice: Cause) -> None:
    assert refusal(Limits(), [twice, twice]) is None


def test_more_equal_failures_may_be_allowed() -> None:
    assert refusal(Limits(same=3), [cause(), cause()]) is None
    refused = refusal(Limits(same=3), [cause(), cause(rank=1), cause(), cause(step=0), cause()])
    assert refused is not None
    assert "failed 3 times at step 41" in refused.reason
    assert refusal(Limits(same=0), [cause()] * 5) is None


def test_what_fails_before_its_first_step_says_so() -> None:
    refused = refusal(Limits(), [cause(step=0), cause(step=0)])
    assert refused is not None
    assert "twice before its first step" in refused.reason


def test_a_rank_may_fail_often_but_not_within_an_hour() -> None:
    hourly = [cause(at_s=number * 3600.0, step=number) for number in range(100)]
    assert refusal(Limits(), hourly) is None
    refused = refusal(Limits(rank=2), [cause(at_s=number * 60.0, step=number) for number in range(3)])
    assert refused is not None
    assert refused.node == "gpu-1"  # another node may do better
    assert refused.reason == (
        "rank 3 on node gpu-1 has failed 3 times within an hour, 2 restarts are allowed (--restart-budget rank=2)"
    )


def test_lost_nodes_count_for_the_node_and_the_hour() -> None:
    lost = [Cause(float(number), "gpu-1", error="node gpu-1 lost") for number in range(3)]
    refused = refusal(Limits(rank=1, node=2), lost)
    assert refused is not None
    assert refused.reason.startswith("node gpu-1 has failed 3 times within an hour, 2 restarts")
    refused = refusal(
        Limits(rank=1, node=1, hour=2), [Cause(0.0, f"gpu-{number}", number) for number in range(3)]
    )
    assert refused is not None
    assert (refused.reason.split(" (")[0], refused.node) == (
        "the job has failed 3 times within an hour, 2 restarts are allowed",
        "",
    )


def test_the_first_that_is_no_echo_is_to_blame() -> None:
    echo, own = cause(1.0, rank=0, error="Connection reset by peer"), cause(2.0)
    assert comes_first(echo, own) is own
    assert comes_first(own, cause(1.5)) == cause(1.5)


def test_who_left_early_explains_echoes_only() -> None:
    left = cause(5.0, rank=1, error=LEFT_EARLY)
    echo, own = cause(1.0, rank=0, error="Connection reset by peer"), cause(9.0)
    assert comes_first(echo, left) is comes_first(left, echo) is left
    assert comes_first(own, left) is comes_first(left, own) is own


def test_who_leaves_early_twice_would_do_so_again() -> None:
    left = cause(rank=1, step=50, error=LEFT_EARLY)
    assert refusal(Limits(), [left]) is None
    refused = refusal(Limits(), [left, left])
    assert refused is not None
    assert refused.reason == (
        "rank 1 on node gpu-1 has left with exit code 0 at step 50 twice while others were still training: "
        "a restart would not help; mend that, or allow it with --restart-budget same=0"
    )
    assert refusal(Limits(), [left, cause(rank=1, step=51, error=LEFT_EARLY)]) is None


def test_as_it_is_given() -> None:
    assert limits_of("") == Limits()
    assert limits_of(" rank=3, hour = 12,") == Limits(rank=3, hour=12)
    for bad in ("rank", "rank=", "rank=-1", "day=3", "rank=3;node=2", "rank=²"):
        with pytest.raises(UsageError, match="rank=N, node=N, hour=N, same=N"):
            limits_of(bad)


COUNTS = st.integers(0, 4)
LIMITS = st.builds(Limits, rank=COUNTS, node=COUNTS, hour=COUNTS, same=COUNTS)
CAUSES = st.builds(
    Cause,
    at_s=st.integers(0, 9000).map(float),
    node=st.sampled_from(["a", "b"]),
    rank=st.integers(-1, 2),
    step=st.integers(-1, 2),
    error=st.sampled_from(["", "boom", "bang 1", "bang 2", "broken pipe"]),
)


def twin(limits: Limits, causes: list[Cause]) -> bool:
    """Whether it is refused."""
    last = causes[-1]
    rank = node = hour = same = 0
    for one in causes:
        if one.at_s > last.at_s - 3600:
            hour += 1
            node += one.node == last.node
            rank += one.rank == last.rank and one.node == last.node and last.rank != -1
        kind = one.error.split()[:1]
        of_a_rank = -1 not in (one.rank, last.rank) and (one.rank == last.rank or last.step in (1, 2))
        if of_a_rank and (one.step, kind) == (last.step, last.error.split()[:1]):
            same += last.step != -1 and kind not in ([], ["broken"])
    pairs = ((rank, limits.rank), (node, limits.node), (hour, limits.hour))
    return any(limit and count > limit for count, limit in pairs) or bool(limits.same and same >= limits.same)


@given(LIMITS, st.lists(CAUSES, min_size=1, max_size=12))
def test_as_the_twin_counts(limits: Limits, causes: list[Cause]) -> None:
    causes.sort(key=lambda one: one.at_s)
    assert (refusal(limits, causes) is not None) == twin(limits, causes)
    assert limits_of(as_text(limits)) == limits


def test_what_keepstep_ended_itself_counts_in_no_budget() -> None:
    """It ends a healthy rank by mistake, at one step, again and again: the job goes on while restarts are left."""
    ended = [replace(cause(float(number), error="it hung: asleep"), by_keepstep=True) for number in range(40)]
    strict = Limits(rank=1, node=1, hour=1, same=2)
    for count in range(1, len(ended) + 1):
        assert refusal(strict, ended[:count]) is None
    own = cause(50.0)
    assert refusal(strict, [*ended, own]) is None  # the first that it caused itself
    assert refusal(strict, [*ended, own, replace(own, at_s=60.0)]) is not None


def test_who_fails_because_keepstep_ended_another_is_not_to_blame() -> None:
    ended = replace(cause(10.0, error="it hung: asleep"), by_keepstep=True)
    earlier = cause(9.0, rank=1, error="RuntimeError: something that tells of nobody")  # by its own clock
    assert comes_first(earlier, ended) is comes_first(ended, earlier) is ended


@pytest.mark.parametrize("kind", ["import", "syntax", "library-missing"])
def test_what_every_restart_meets_again_has_none(kind: str) -> None:
    vain = replace(cause(step=-1, error="ModuleNotFoundError: No module named 'apex'"), kind=kind)
    refused = refusal(Limits(), [vain])
    assert refused is not None
    assert "every restart would meet it again" in refused.reason
    assert refusal(Limits(same=0), [vain]) is None


def test_a_state_that_does_not_fit_is_met_again_by_every_restart() -> None:
    misfit = cause(step=0, error="MisfitError: the state or the number of ranks is not that of before")
    for causes in ([misfit], [cause(), misfit]):
        refused = refusal(Limits(), causes)
        assert refused is not None
        assert refused.reason.startswith("rank 3 on node gpu-1 cannot go on from what was saved")
    assert refusal(Limits(same=0), [misfit]) is None


def test_an_import_that_worked_before_may_work_again() -> None:
    vain = replace(cause(step=-1, error="ModuleNotFoundError: No module named 'apex'"), kind="import")
    assert refusal(Limits(), [cause(), vain]) is None


def test_gpu_memory_that_is_used_up_has_one_restart_within_an_hour() -> None:
    first = replace(cause(0.0, error="CUDA out of memory."), kind="gpu-oom")
    assert refusal(Limits(), [first]) is None
    again = replace(first, at_s=3000.0, rank=1, step=7)
    refused = refusal(Limits(), [first, again])
    assert refused is not None
    assert refused.reason.startswith("GPU memory was used up twice within an hour")
    assert refusal(Limits(), [first, replace(again, at_s=4000.0)]) is None


def test_restarts_for_storage_wait_longer_each_time() -> None:
    full = replace(cause(error="OSError: [Errno 28] No space left on device"), kind="no-space")
    causes = [replace(full, at_s=float(at), step=at) for at in range(10)]
    pauses = [pause_s(causes[: count + 1]) for count in range(10)]
    assert pauses[:3] == [5.0, 10.0, 20.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 300.0
    assert pause_s([cause()]) == 0.0
