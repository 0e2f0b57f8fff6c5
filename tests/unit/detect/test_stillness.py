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
        ({"cpu_s": 7.4}, "moves"),  # in another thread than the training's
        ({"cpu_s": 7.4, "thread_cpu_s": 3.4}, "moves"),  # its frames could not be read
        (
            {"cpu_s": 7.4, "thread_cpu_s": 3.4, "stack": "step (train.py:3)"},
            "moves",
        ),  # where it was is not known
        ({"cpu_s": 5.05, "queued_s": 2.0}, "still"),  # Gloo's loop, which waits for a CPU each time
        ({"thread_switches": 130}, "moves"),
        ({"thread_switches": 101}, "moves"),  # its frames could not be read
        ({"thread_cpu_s": 1.001, "stack": "step (train.py:3)"}, "moves"),  # where it was before is not known
        ({"state": "T"}, "stopped"),
        ({"state": "t"}, "traced"),
        ({"state": "D"}, "kernel"),
        ({"state": "R"}, "moves"),  # it wants to run and gets no CPU
        ({"thread_queued_s": 1.0}, "moves"),
        ({"place": "waits in the kernel (request_wait_answer)"}, "kernel"),  # a file system of user space
        ({"place": "waits in the kernel (rpc_wait_bit_killable)"}, "kernel"),
        ({"place": "waits in the kernel (do_freezer_trap)"}, "kernel"),
        ({"place": "waits in the kernel (futex_wait_queue)"}, "still"),
    ],
)
def test_what_it_has_done_since_the_last_look(change: dict[str, Any], how: How) -> None:
    assert judged(START, after(2.5), after(5.0, **change))[0] == how


def test_a_thread_that_polls_keeps_to_one_place_by_its_frames() -> None:
    stack = "get (queue.py:180)\nnext_batch (train.py:9)"
    looks = [after(2.5 * number, thread_switches=100 + number, stack=stack) for number in range(1, 6)]
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


def test_the_frames_of_who_is_still_are_read_once_and_a_debuggers_prompt_is_no_hang() -> None:
    judge = StillnessJudge()
    for at_s in (0.0, 5.0, 10.0):
        assert not judge.must_read_stack(after(at_s))
        judge.take(after(at_s), 5)
    assert judge.must_read_stack(after(12.5))
    prompt = "readline (codeop.py:3)\ninteraction (/usr/lib/python3.11/pdb.py:387)\nmain (train.py:9)"
    assert judge.take(after(12.5, stack=prompt), 5).how == "traced"
    assert not judge.must_read_stack(after(15.0))
    assert judge.take(after(15.0), 5).how == "traced"
    other = StillnessJudge()
    for at_s in (0.0, 12.5, 15.0):
        other.take(after(at_s, stack="wait (train.py:14)" if at_s == 12.5 else ""), 5)
    assert other.judged is not None
    assert (other.judged.how, other.judged.since_s, other.judged.until_s) == ("still", 0.0, 15.0)


@pytest.mark.parametrize(
    ("change", "awaits"),
    [
        ({"place": "waits in the kernel (do_wait)"}, True),
        ({"place": "waits in the kernel (do_wait)", "children": frozenset[int]()}, False),
        ({"stack": "_communicate (/usr/lib/python3.11/subprocess.py:2115)\nupload (train.py:9)"}, True),
        ({"stack": "wait (train.py:14)"}, False),
        ({}, False),  # a data loader's processes are children that nobody waits for
    ],
)
def test_who_waits_for_a_child_that_lives_is_still_and_told_apart(
    change: dict[str, Any], awaits: bool
) -> None:
    judge, look = StillnessJudge(), after(0.0, **change)
    for at_s in (0.0, 5.0, 12.5):
        seen = judge.take(after(at_s, look), 5)
        assert (seen.how, seen.since_s, seen.awaits_child) == ("still", 0.0, awaits)


def test_who_was_stopped_and_ran_in_between_is_stopped_anew() -> None:
    looks = [after(2.5 * number, state="T") for number in range(3)]
    assert judged(*looks) == ("stopped", 0.0)
    assert judged(*looks, after(7.5, state="T", thread_switches=101)) == ("stopped", 7.5)


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


def computing(number: int, stack: str, **change: float) -> Activity:
    known = {"cpu_s": 5.0 + 2.4 * number, "thread_cpu_s": 1.0 + 2.4 * number} | change
    return replace(START, at_s=2.5 * number, stack=stack, **known)


def test_a_spinning_thread_keeps_to_one_function_from_the_first_look_at_its_frames() -> None:
    looks = [computing(number, f"until (train.py:{number % 3})\nmain (train.py:9)") for number in range(1, 6)]
    assert judged(START, *looks) == ("spins", 2.5)


def test_many_processes_may_share_the_cpu_of_one_that_spins() -> None:
    looks = [
        computing(
            number,
            "until (train.py:1)",
            cpu_s=5.0 + 0.2 * number,
            thread_cpu_s=1.0 + 0.2 * number,
            queued_s=1.2 * number,
        )
        for number in range(1, 6)
    ]
    assert judged(START, *looks) == ("spins", 2.5)


def test_who_computes_in_one_function_after_the_other_works() -> None:
    looks = [
        computing(number, f"linear{number % 2} (net.py:1)\nevaluate (train.py:9)") for number in range(6)
    ]
    assert judged(*looks)[0] == "moves"
