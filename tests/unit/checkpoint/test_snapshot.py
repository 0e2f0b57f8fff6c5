"""Snapshots of one rank: slots that grow, damage, and what happens without cache or agent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.checkpoint.trainings import alone

from keepstep.checkpoint import api as door
from keepstep.checkpoint.restore.restore_service import RestoreClient
from keepstep.checkpoint.snapshot import Snapshots, Worker
from keepstep.checkpoint.storage.cadence import Storing
from keepstep.core.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("copy_engine")


def test_a_growing_state_gets_larger_slots_and_keeps_the_last_snapshot(served: Any) -> None:
    snapshots = Snapshots(served.address, Worker(), alone)
    for number in range(1, 7):
        snapshots.save({"w": torch.full((number * 100_000,), float(number))}, number)
        held = {key.step for key in snapshots._cache.held() if key}
        assert held == {number, number - 1} - {0}
    state = {"w": torch.zeros(600_000)}
    assert snapshots.load(state) == 6
    assert torch.all(state["w"] == 6)
    snapshots.close()


def test_a_state_that_does_not_fit_is_said_once_and_the_last_snapshot_stays(
    served: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshots = Snapshots(served.address, Worker(), alone)
    snapshots.save({"w": torch.ones(10)}, 1)
    served.cache.limit_bytes = 1 << 20
    for step in (2, 3, 4):
        snapshots.save({"w": torch.zeros(1 << 20)}, step)
    Snapshots(served.address, Worker(rank=1, world_size=2), alone).register({"w": torch.zeros(1 << 20)})
    said = [line for line in capsys.readouterr().err.splitlines() if "whose limit is 1.00 MiB" in line]
    assert len(said) == 1, said
    assert "step 2 is not kept in memory, and training goes on" in said[0]
    assert [key and key.step for key in snapshots._cache.held()] == [1, None]
    snapshots.save({"w": torch.ones(1)}, 5)
    state = {"w": torch.zeros(1)}
    assert snapshots.load(state) == 5
    snapshots.close()


def test_steps_must_grow(served: Any) -> None:
    snapshots = Snapshots(served.address, Worker(), alone)
    snapshots.save({"a": 1}, 5)
    with pytest.raises(CheckpointError, match="step 5 after step 5: steps must grow"):
        snapshots.save({"a": 1}, 5)
    snapshots.close()


def test_a_damaged_snapshot_is_told_and_the_one_before_is_restored(
    served: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshots = Snapshots(served.address, Worker(), alone)
    for number in (1, 2):
        snapshots.save({"w": torch.full((5000,), float(number))}, number)
    snapshots._cache.slots[1].memory[8000] ^= 1
    state = {"w": torch.zeros(5000)}
    assert snapshots.load(state) == 1
    assert torch.all(state["w"] == 1)
    said = capsys.readouterr().err
    assert "the snapshot of rank 0 at step 2 is damaged, not restored" in said
    assert "resumed after step 1 from this node's cache" in said
    snapshots._cache.slots[0].memory[8000] ^= 1
    with pytest.raises(CheckpointError, match="the state is half restored, and no snapshot is left"):
        snapshots.load(state)
    snapshots.close()


def test_another_jobs_shape_is_not_restored(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    snapshots = Snapshots(served.address, Worker(), alone)
    snapshots.save({"w": 1}, 1)
    snapshots.close()
    snapshots = Snapshots(served.address, Worker(world_size=2, local_world_size=2), lambda row: [row, row])
    assert snapshots.load({"w": 0}) is None
    assert "it is of rank 0 of 1" in capsys.readouterr().err
    snapshots.close()


def test_without_an_agent_nobody_begins_as_if_storage_were_empty(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestoreClient, "_ask", lambda *_: (_ for _ in ()).throw(CheckpointError("no agent")))
    for what in (lambda s: s.load({"w": 1}), lambda s: s.save({"w": 1}, 1)):
        snapshots = Snapshots(served.address, Worker(), alone, storing=Storing("/ckpt"))
        with pytest.raises(CheckpointError, match=r"it is not known what other sources have \(no agent\)"):
            what(snapshots)
        snapshots.close()


def test_on_several_nodes_without_an_agent_the_own_cache_is_looked_at_and_that_is_said(
    served: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RestoreClient, "_ask", lambda *_: (_ for _ in ()).throw(CheckpointError("no agent")))
    snapshots = Snapshots(served.address, Worker(), alone, elsewhere=True)
    assert snapshots.load({"w": 1}) is None
    assert "no agent; only this node's cache is looked at" in capsys.readouterr().err
    snapshots.close()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("KEEPSTEP_NO_CACHE", "node-3 has no cache: too many open files", "node-3 has no cache"),
        ("KEEPSTEP_CACHE", "keepstep-cache-nobody", "the cache of this node does not answer"),
    ],
)
def test_without_a_cache_all_ranks_are_told_and_nothing_is_taken_for_a_beginning(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    gathered: list[list[int]] = []

    def gather(row: list[int]) -> list[list[int]]:
        gathered.append(row)
        return [row]

    monkeypatch.delenv("KEEPSTEP_CACHE", raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(door, "_open", [])
    monkeypatch.setattr(door, "_no_cache", [])
    monkeypatch.setattr(door, "_gather", gather)
    state = {"step": 1}
    door.register(state)
    assert gathered == []
    door.save(state, 1)  # training goes on without
    assert gathered == []
    with pytest.raises(CheckpointError, match=why):
        door.load(state)
    door.wait()
    assert len(gathered) == 1
