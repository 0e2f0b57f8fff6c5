"""Snapshots of a training that is left by an exception, as in place: they are whole, or not there."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from tests.unit.checkpoint.trainings import alone

from keepstep.checkpoint import snapshot as module
from keepstep.checkpoint.snapshot import Snapshots, Worker


class Left(BaseException):
    """Raised by a signal handler, at any moment."""


def test_a_training_left_as_copying_begins_leaves_no_snapshot_of_other_bytes(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots(served.address, Worker(), alone)
    monkeypatch.setattr(module, "_Flight", leave)
    before: list[float] = []

    def train() -> None:
        model = torch.nn.Linear(4096, 2048)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(4096)).sum().backward()
        optimizer.step()
        before.extend(model.state_dict()["weight"][0, :3].tolist())
        before.extend(model.state_dict()["weight"][-1, -3:].tolist())
        snapshots.save({"model": model}, 1)

    try:
        train()
    except Left as left:
        traceback.clear_frames(left.__traceback__)
        left.__traceback__ = None
    instead = torch.zeros(2048, 4096)  # may take the memory of the model
    state = {"model": torch.nn.Linear(4096, 2048)}
    after = Snapshots(served.address, Worker(incarnation=1), alone)
    assert after.load(state) == 1
    weight = state["model"].weight
    assert [*weight[0, :3].tolist(), *weight[-1, -3:].tolist()] == before
    del instead
    after.close()
    snapshots.close()


def leave(*_: object) -> None:
    raise Left
