"""`keepstep.Session` called in the wrong order says what to do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import keepstep
from keepstep.core.errors import CheckpointError


def test_steps_need_a_state() -> None:
    with pytest.raises(CheckpointError, match=r"call session\.restore"):
        next(keepstep.Session().steps(0, 1))


def test_a_session_is_restored_once() -> None:
    session = keepstep.Session()
    assert session.restore(weight=torch.ones(1)) == 0
    with pytest.raises(CheckpointError, match="once"):
        session.restore(weight=torch.ones(1))


def test_a_resilient_function_is_called_without_its_session() -> None:
    @keepstep.resilient
    def train(session: keepstep.Session, first: int, *, second: int) -> tuple[int, int, int]:
        return session.rank, first, second

    assert train(1, second=2) == (0, 1, 2)
    assert train.__name__ == "train"


def shares(world_size: int, count: int) -> list[list[int]]:
    found: list[list[int]] = []
    for rank in range(world_size):
        session = keepstep.Session()
        session.rank, session.world_size = rank, world_size
        found.append(list(session.microbatches(count)))
        assert session.weight == world_size / count
    return found


@pytest.mark.parametrize(("world_size", "count"), [(1, 1), (1, 5), (2, 2), (3, 4), (4, 10), (7, 7), (5, 23)])
def test_every_micro_batch_is_computed_once_and_shares_are_even(world_size: int, count: int) -> None:
    found = shares(world_size, count)
    assert [number for share in found for number in share] == list(range(count))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_fewer_micro_batches_than_ranks_are_refused() -> None:
    session = keepstep.Session()
    session.world_size = 4
    with pytest.raises(ValueError, match="3 micro-batches for 4 replicas"):
        next(session.microbatches(3))


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_a_micro_batch_draws_the_same_on_whatever_rank_and_all_draw_the_same_after_it() -> None:
    def draws(world_size: int, step: int = 3, seed: int = 0) -> tuple[dict[int, object], list[object]]:
        inside: dict[int, object] = {}
        after: list[object] = []
        for rank in range(world_size):
            session = keepstep.Session()
            session.rank, session.world_size, session.step = rank, world_size, step
            for number in session.microbatches(5, seed=seed):
                inside[number] = drawn()
            after.append(drawn())
        return inside, after

    inside, after = draws(1)
    assert draws(2) == (inside, after * 2)
    assert draws(5) == (inside, after * 5)
    assert len({*inside.values(), *after}) == 6
    for other in (draws(1, step=4), draws(1, seed=1)):
        assert not {*inside.values(), *after} & {*other[0].values(), *other[1]}


def test_gradients_are_averaged_in_the_last_backward_only() -> None:
    class Model:
        entered = 0

        @contextmanager
        def no_sync(self) -> Iterator[None]:
            self.entered += 1
            yield
            self.entered -= 1

    session, model = keepstep.Session(), Model()
    assert [(number, model.entered) for number in session.microbatches(3, model)] == [(0, 1), (1, 1), (2, 0)]
    assert model.entered == 0
