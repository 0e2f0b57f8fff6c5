"""A listener on a log that grows: what is new is told once, and again only after it was forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.told import FEW_STEPS
from keepstep.detect.failure_rows import RowMatcher, shipped_rows
from keepstep.detect.listener import Bounds, Listener

MATCHER = RowMatcher(shipped_rows())
FULL = b"OSError: [Errno 28] No space left on device: '/data/%s'\n"


def told(listener: Listener, *, last: bool = False) -> list[str]:
    return [one.line for one in listener.fresh(last=last)]


def test_what_is_new_is_told_once() -> None:
    listener = Listener(MATCHER, "stderr", 3)
    assert told(listener) == []
    listener.take(b"step 1 loss 2.0\n" + FULL % b"a" + b"step 2 loss 1.9\nRuntimeErr")
    (found,) = listener.fresh()
    assert (found.row.kind, found.number, found.speaker.rank, found.went_on) == ("no-space", 2, 3, 1)
    assert told(listener) == []
    listener.take(b"or: odd\n" + FULL % b"a" + FULL % b"b")
    assert told(listener) == ["RuntimeError: odd", "OSError: [Errno 28] No space left on device: '/data/b'"]
    assert [one.count for one in listener.words().told] == [2, 1, 1]


def test_a_line_without_its_end_counts_at_the_last() -> None:
    listener = Listener(MATCHER)
    listener.take(b"RuntimeError: odd")
    assert told(listener) == []
    assert told(listener, last=True) == ["RuntimeError: odd"]
    assert told(listener, last=True) == []


def test_what_was_forgotten_is_told_again() -> None:
    listener = Listener(MATCHER)
    listener.take(FULL % b"a")
    assert len(told(listener)) == 1
    listener.forget()
    assert listener.words().told == ()
    listener.take(b"step 9 loss 2.0\n" + FULL % b"a")
    (found,) = listener.fresh()
    assert found.number == 3


def test_beyond_its_bounds_a_row_is_told_once() -> None:
    listener = Listener(MATCHER, bounds=Bounds(line_bytes=60, told=5))
    for number in range(1000):
        letters = bytes(97 + int(digit) for digit in str(number))
        listener.take(FULL % letters + b"x" * 100_000)
        listener.take(b"\n")
    found = told(listener)
    assert len(found) == 6
    assert all(len(line) <= 60 for line in found)
    assert told(listener) == []


ERRORS = ("OSError: [Errno 5] Input/output error: '/d/x'", "ValueError: odd", "KeyError: 'x'")
EVENTS = st.lists(st.one_of(st.integers(1, 12), st.sampled_from(ERRORS)), max_size=40)


@given(EVENTS)
def test_how_often_the_job_went_on_after_an_error(events: list[int | str]) -> None:
    """Against a dumb twin: for each error, how many steps were made before each of its lines."""
    listener = Listener(MATCHER)
    steps, number = 0, 0
    before: dict[str, list[tuple[int, int]]] = {}
    for event in events:
        lines = [f"step {steps + at} loss 1" for at in range(event)] if isinstance(event, int) else [event]
        listener.take("".join(line + "\n" for line in lines).encode())
        number += len(lines)
        if isinstance(event, int):
            steps += event
        else:
            before.setdefault(event, []).append((steps, number))
    expected: dict[str, tuple[int, int, int, int, int]] = {}
    for line, at in before.items():
        begins = [n for n, (made, _) in enumerate(at) if n == 0 or made - at[n - 1][0] > FEW_STEPS]
        first = begins[-1]
        expected[line] = (
            at[first][1], steps - at[first][0], len(at), len(begins) - 1, len(at) - first,
        )  # fmt: skip
    assert {
        one.line: (one.number, one.went_on, one.count, one.survived, one.recent)
        for one in listener.words().told
    } == expected
