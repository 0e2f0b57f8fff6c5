"""`keepstep.Session` called in the wrong order says what to do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
        session.rank, session.world_size, session.step = rank, world_size, 0
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
    session.world_size, session.step = 4, 0
    with pytest.raises(ValueError, match="3 micro-batches for 4 replicas"):
        next(session.microbatches(3))


def test_micro_batches_are_shared_out_within_a_step() -> None:
    with pytest.raises(ValueError, match=r"in the body of: for step in session\.steps"):
        next(keepstep.Session().microbatches(3))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"count": 0}, "0 micro-batches"),
    ({"count": 1 << 31}, "2147483648 micro-batches"),
    ({"count": 4, "replica": 1}, "both replica= and replicas="),
    ({"count": 4, "replicas": 2}, "both replica= and replicas="),
    ({"count": 4, "replica": 2, "replicas": 2}, "replica 2 is none of 0 to 1"),
    ({"count": 4, "replica": 0, "replicas": 0}, "for 0 replicas"),
    ({"count": 4, "multiple_of": 0}, "a multiple of 0"),
    ({"count": 5, "multiple_of": 2}, "not a multiple of 2"),
    ({"count": 4, "at_most": 0}, "at_most is 0"),
    ({"count": 4, "at_most": 3}, "they take 3 each at most"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_what_cannot_be_shared_out_is_said(arguments: dict[str, Any], said: str) -> None:
    session = keepstep.Session()
    session.step = 0
    with pytest.raises(ValueError, match=said):
        session.share(**arguments)
    with pytest.raises(TypeError):
        session.share(4.0)  # type: ignore[arg-type]


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
    session.step = 0
    assert [(number, model.entered) for number in session.microbatches(3, model)] == [(0, 1), (1, 1), (2, 0)]
    assert model.entered == 0
