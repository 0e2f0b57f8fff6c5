"""How many optimizer steps make an iteration, where operations come in some iterations only."""

from __future__ import annotations

import random
from array import array

import pytest

from keepstep.agent.ranks.markers import StepMarkers


def content(*symbols: int) -> bytes:
    return array("Q", symbols).tobytes()


GRADIENTS, WITH_ANOTHER = content(1, 2, 3), content(7, 1, 2, 3)


def learned(kinds: list[bytes]) -> list[int]:
    """The iteration's length as it is known after each marker."""
    markers, found = StepMarkers(), list[int]()
    for number, kind in enumerate(kinds):
        markers.add(number, kind, True)
        markers.learn()
        found.append(markers.per_step)
    return found


@pytest.mark.parametrize("seed", range(300))
def test_operations_that_come_now_and_then_do_not_make_iterations_longer(seed: int) -> None:
    chance = random.Random(seed)
    share = chance.choice((0.05, 0.2, 0.5, 0.77, 0.95))
    kinds = [WITH_ANOTHER if chance.random() < share else GRADIENTS for _ in range(200)]
    found = learned(kinds)
    assert set(found) <= {0, 1}
    assert found[100] == 1


@pytest.mark.parametrize("steps", range(2, 8))
def test_one_optimizer_among_others_that_has_only_some_of_their_operations(steps: int) -> None:
    kinds = [WITH_ANOTHER if number % steps else GRADIENTS for number in range(600)]
    assert learned(kinds)[-1] == steps


@pytest.mark.parametrize("steps", range(2, 9))
def test_optimizers_with_operations_of_their_own_are_told_apart_at_once(steps: int) -> None:
    kinds = [content(number % steps + 1) for number in range(40)]
    found = learned(kinds)
    assert set(found) <= {0, steps}
    assert found[2 * steps + 4] == steps
