"""What a process has done from look to look, and whether it will go on by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keepstep.core.summary import How
from keepstep.detect import Activity, StillnessJudge

START = Activity(0.0, "S", 1.0, 100, 5.0, frozenset({9}), 1.0, 1000, "waits in the kernel (futex)")


def after(seconds: float, last: Activity = START, **change: Any) -> Activity:
    return replace(last, at_s=last.at_s + seconds, **change)


def judged(*looks: Activity, progress: int = 5) -> tuple[How, float]:
    judge = StillnessJudge()
    for look in looks:
        judge.take(look, progress)
    assert judge.judged is not None
    return judge.judged.how, judge.judged.since_s


def test_who_does_nothing_is_still_from_the_first_look() -> None:
    # Gloo's loop: a hundred switches a second of its own thread, which only cost CPU time.
    looks = [after(2.5 * number, cpu_s=5.0 + 0.005 * number) for number in range(8)]
    assert judged(*looks) == ("still", 0.0)


@pytest.mark.parametrize(
    ("change", "how"),
    [
        ({"children_cpu_s": 2.0}, "moves"),  # a compiler
        ({"children": frozenset({9, 10})}, "moves"),
        ({"children": frozenset[int]()}, "moves"),
        ({"moved_bytes": 6000}, "moves"),
        ({"cpu_s": 5.2}, "moves"),
        ({"cpu_s": 7.4}, "spins"),
        ({"cpu_s": 5.2, "queued_s": 1.5}, "spins"),  # many processes share the CPU
        ({"cpu_s": 5.05, "queued_s": 2.0}, "still"),  # Gloo's loop, which waits for a CPU each time
        ({"thread_switches": 130}, "moves"),
        ({"thread_switches": 101}, "moves"),  # its frames could not be read
        ({"thread_cpu_s": 1.001, "stack": "step (train.py:3)"}, "moves"),  # where it was before is not known
        ({"state": "T"}, "stopped"),
        ({"state": "t"}, "traced"),
        ({"state": "D"}, "kernel"),
    ],
)
def test_what_it_has_done_since_the_last_look(change: dict[str, Any], how: How) -> None:
    assert judged(START, after(2.5), after(5.0, **change))[0] == how


def test_a_thread_that_polls_keeps_to_one_place_by_its_frames() -> None:
    stack = "get (queue.py:180)\nnext_batch (train.py:9)"
    looks = [after(2.5 * number, thread_switches=100 + number, stack=stack) for number in range(6)]
    assert judged(START, *looks) == ("still", 2.5)  # the first frames were read at 2.5
    moved = after(20.0, thread_switches=120, stack="step (train.py:3)")
    assert judged(START, *looks, moved)[0] == "moves"


def test_a_look_without_a_switch_keeps_the_frames_that_are_known() -> None:
    stack = "get (queue.py:180)"
    polls = [100, 101, 101, 102, 102, 103]
    looks = [
        after(2.5 * number, thread_switches=count, stack=stack if count != polls[number - 1] else "")
        for number, count in enumerate(polls)
        if number
    ]
    assert judged(START, *looks)[0] == "still"


def test_work_begins_a_new_time() -> None:
    looks = [START, after(10.0), after(20.0, moved_bytes=50_000), after(30.0, moved_bytes=50_000)]
    assert judged(*looks) == ("still", 20.0)


def test_progress_a_long_gap_and_what_cannot_be_read_begin_a_new_time() -> None:
    judge = StillnessJudge()
    judge.take(START, 5)
    judge.take(after(10.0), 5)
    assert judge.take(after(20.0), 6).since_s == 20.0
    assert judge.take(after(30.0), 6).since_s == 20.0
    assert judge.take(after(90.0), 6).since_s == 90.0
    assert judge.unread(95.0, "late").how == "unread"
    assert judge.take(after(100.0), 6) == judge.judged
    assert judge.judged is not None
    assert (judge.judged.how, judge.judged.since_s) == ("still", 100.0)


def test_a_spinning_thread_spins_from_its_first_look() -> None:
    looks = [after(2.5 * number, cpu_s=5.0 + 2.4 * number, thread_cpu_s=1.0 + number) for number in range(6)]
    assert judged(*looks) == ("spins", 0.0)
