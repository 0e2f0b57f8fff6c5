"""What a comparison of replicas names, and what it must never name, save by save."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import numpy as np
import pytest

from keepstep.detect.corruption import PROOF, Comparison, Difference, Family, Tensor


def family(name: str, *, decays: bool = False) -> Family:
    """A parameter with its counter of steps and its average of gradients."""
    names = (name, f"{name}.step", f"{name}.average")
    return tuple(Tensor(one, "float32 (4,)", one.endswith("step"), decays) for one in names)


A, B, C = (family(name) for name in "abc")


class Job:
    """Ranks of which each holds the same families."""

    def __init__(self, ranks: int, *families: Family) -> None:
        self.ranks, self.families = ranks, families
        self._comparison, self._numbers = Comparison(), count(1)
        self.step = 0
        self.found: list[Difference] = []

    def save(
        self, odd: Mapping[tuple[str, int], int] | None = None, *, incarnation: int = 0
    ) -> list[Difference]:
        """One save in which everything has moved alike, but for ``odd``: a summand by tensor's name and rank."""
        self.step += 1
        held = self._comparison.holds(self.families)
        assert held is not None
        names = [one.name for family in self.families for one in family]
        values = {name: next(self._numbers) * 1000 for name in names}
        told = [
            ([rank], held, np.array([values[n] + (odd or {}).get((n, rank), 0) for n in names], np.uint64))
            for rank in range(self.ranks)
        ]
        seen = self._comparison.saw(incarnation, self.step, told)
        self.found += seen.differences
        return list(seen.differences)

    def saves(self, number: int) -> None:
        for _ in range(number):
            assert self.save() == []


def test_the_odd_one_of_three_is_named_with_the_steps() -> None:
    job = Job(3, A, B)
    job.saves(PROOF)
    assert job.save({("a", 2): 1}) == [Difference(4, 3, (2,), (0, 1), ("a",))]
    assert job.save({("a", 2): 1}) == []  # it is known
    assert job.save({("a", 2): 1, ("a.average", 2): 1}) == [Difference(6, 5, (2,), (0, 1), ("a.average",))]


def test_of_two_both_are_named() -> None:
    job = Job(2, A, B)
    job.saves(PROOF)
    assert job.save({("b.step", 1): 1}) == [Difference(4, 3, (0, 1), (), ("b.step",))]


def test_before_three_saves_there_is_no_proof_and_never_after() -> None:
    job = Job(3, A, B)
    job.saves(PROOF - 1)
    job.save({("a", 2): 1})
    job.saves(PROOF)
    job.save({("a", 2): 1})
    job.save({("a.average", 1): 1})  # of the same family
    assert job.found == []


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_that_begin_to_train_apart_are_not_named(ranks: int) -> None:
    job = Job(ranks, A, B, C)
    job.saves(6)
    names = [one.name for family in job.families for one in family]
    job.save({(name, rank): rank for name in names for rank in range(ranks)})
    job.saves(PROOF)
    job.save({("a", 1): 1})
    assert job.found == []


def test_a_rank_of_which_most_differs_is_not_named() -> None:
    """Such as one that saves averaged weights, or has left out a step."""
    job = Job(4, A, B, C)
    job.saves(6)
    job.save({("a", 1): 1, ("b", 1): 1})
    assert job.found == []


def test_two_odd_ranks_at_once_are_not_named() -> None:
    job = Job(4, A, B, C)
    job.saves(6)
    job.save({("a", 1): 1, ("a", 2): 2})
    job.save({("b", 1): 1, ("b", 2): 1})
    assert job.found == []


def test_a_part_that_weight_decay_moves_is_not_named_once_a_rank_uses_it() -> None:
    job = Job(3, A, B, family("idle", decays=True))
    job.saves(6)
    job.save({("idle", 1): 1, ("idle.average", 1): 1})
    assert job.found == []


def test_a_decayed_parameter_is_named_while_all_that_is_kept_for_it_moves_alike() -> None:
    job = Job(3, A, B, family("decayed", decays=True))
    job.saves(6)
    job.save({("decayed.average", 1): 1})
    assert job.found == []
    job = Job(3, A, B, family("decayed", decays=True))
    job.saves(6)
    job.save({("decayed", 1): 1})
    assert [one.odd for one in job.found] == [(1,)]


def test_after_a_restart_it_takes_a_proof_again() -> None:
    job = Job(3, A, B)
    job.saves(6)
    for _ in range(PROOF - 1):
        job.save(incarnation=1)
    job.save({("a", 1): 1}, incarnation=1)
    assert job.found == []


def test_what_does_not_move_proves_nothing() -> None:
    comparison = Comparison()
    held = comparison.holds([A, B])
    assert held is not None
    same = np.arange(6, dtype=np.uint64)
    for step in range(1, 9):
        sums = same + np.uint64(step) * np.array([0, 0, 0, 1, 1, 1], np.uint64)
        assert not comparison.saw(0, step, [(range(3), held, sums)]).differences
    other = sums.copy()
    other[0] += np.uint64(1)
    told = [([0, 1], held, sums + np.uint64(1)), ([2], held, other)]
    assert not comparison.saw(0, 9, told).differences


def test_more_than_can_be_compared_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.detect.corruption.MOST_TENSORS", 5)
    comparison = Comparison()
    assert comparison.holds([A]) is not None
    assert comparison.holds([A, B]) is None
    assert comparison.holds([A, A]) is None
