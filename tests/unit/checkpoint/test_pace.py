"""How long a save waits for a slot, by what is known of the other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.pace import PATIENCE_S, Pace

NONE, SOME, MORE = frozenset[Key](), frozenset({Key(0, 1)}), frozenset({Key(0, 1), Key(0, 2)})


def pace(counts: Sequence[int | None]) -> Pace:
    """A save every 2 s."""
    it = iter(counts)
    found = Pace(lambda: next(it))
    for number in range(len(counts)):
        found.note(number * 2.0)
    return found


def test_who_has_saved_nothing_while_all_met_twice_is_waited_for_a_step_at_most() -> None:
    assert pace([3, 5, 7]).patience_s([MORE, NONE], []) == 2.0


def test_what_was_missing_before_is_not_waited_for_again() -> None:
    assert pace([3, 5, 7]).patience_s([MORE, SOME], [MORE, SOME]) == 0.0


def test_what_is_new_since_then_is_waited_for() -> None:
    assert pace([3, 5, 7]).patience_s([MORE, MORE], [MORE, SOME]) == PATIENCE_S


def test_ranks_that_do_not_meet_are_waited_for() -> None:
    for counts in ([3, 5, 5], [3, 3, 5], [None] * 3, [5, 7], [7, 3, 5]):
        assert pace(counts).patience_s([MORE, NONE], [MORE, NONE]) == PATIENCE_S, counts
