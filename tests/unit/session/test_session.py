"""`keepstep.Session` called in the wrong order says what to do."""

from __future__ import annotations

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
