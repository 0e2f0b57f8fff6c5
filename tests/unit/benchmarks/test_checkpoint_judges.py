"""The judge of the checkpoint campaign over hosts, given what ranks wrote by hand: what passes, and what does not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.checkpoint_faults import nodes as campaign
from benchmarks.checkpoint_faults.nodes import Trial, judge
from benchmarks.checkpoint_faults.plans import CASES, NODES, Loss, Plan
from benchmarks.checkpoint_faults.promises import Promises

PLAN = Plan((Loss((1,), "phase", 0.0, 0.0, silent=False),))


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """Six steps; step 3 was told to be backed up, rank 1's node was lost, all resumed after step 4."""
    expected = {rank: {step: {f"loss-{step}"} for step in range(6)} for rank in range(NODES)}
    monkeypatch.setattr(campaign, "undisturbed", lambda world, steps: expected)
    for rank in range(NODES):
        notes = [note("saved", 0, step, sum=step) for step in range(1, 5)]
        notes += [note("resumed", 1, 4, found=True, sum=4), note("saved", 1, 5, sum=5), note("ended", 1, 6)]
        (tmp_path / f"ledger-{rank}").write_text("".join(json.dumps(one) + "\n" for one in notes))
        (tmp_path / f"loss-{rank}").write_text("".join(f"{step} loss-{step}\n" for step in range(6)))
        (tmp_path / f"console-{rank}").write_text("")
    said = "keepstep: resumed after step 4 from this node's cache; ranks 1 from elsewhere\n"
    (tmp_path / "console-0").write_text(said)
    (tmp_path / "console-1").write_text("keepstep: rank 1 resumed after step 4 from the backup on node-c\n")
    made = Trial(PLAN, tmp_path, SimpleNamespace(hosts={}))  # pyright: ignore[reportArgumentType]
    made.promises.told = [(1, 0, 2), (1, 0, 3), (2, 1, 5)]
    made.incarnation = 1
    return made


def note(what: str, incarnation: int, step: int, **more: Any) -> dict[str, Any]:
    return {"what": what, "run": 0, "incarnation": incarnation, "step": step, "unix_s": 0.0, **more}


def edited(path: Path, edit: Callable[[str], str]) -> None:
    path.write_text(edit(path.read_text()))


def test_what_was_promised_came_back(trial: Trial) -> None:
    why, measured = judge(trial)
    assert why == []
    assert measured["resumes"] == [{"resumed": [4], "promised": 3}]
    assert measured["sources"] == {"0": "this node's cache", "1": "the backup on node-c"}


def test_a_lost_promise(trial: Trial) -> None:
    trial.promises.told.append((1, 0, 5))
    assert judge(trial)[0] == ["step 5 was promised, the job went on from 4"]


@pytest.mark.parametrize(
    ("name", "old", "new", "why"),
    [
        ("ledger-2", '"found": true, "sum": 4', '"found": true, "sum": 3', "what came back as step 4 is not"),
        ("ledger-2", '"incarnation": 1, "step": 4', '"incarnation": 1, "step": 3', "from steps [3, 4]"),
        ("loss-3", "4 loss-4\n", "", "rank 3: its losses are not"),
        ("loss-3", "5 loss-5", "5 loss-6", "rank 3: its losses are not"),
        ("loss-3", "5 loss-5\n", "7 loss-7", "rank 3: its losses are not"),
        ("console-0", "step 4", "step 3", "no message says where"),
        ("console-1", "rank 1", "rank 2", "rank 1 did not say where"),
    ],
)
def test_what_is_wrong_is_named(trial: Trial, name: str, old: str, new: str, why: str) -> None:
    edited(trial.folder / name, lambda text: text.replace(old, new))
    assert why in "; ".join(judge(trial)[0])


def test_ranks_that_end_apart(trial: Trial) -> None:
    edited(
        trial.folder / "ledger-1",
        lambda text: text.replace(
            '"ended", "run": 0, "incarnation": 1, "step": 6', '"ended", "run": 0, "incarnation": 1, "step": 5'
        ),
    )
    assert judge(trial)[0] == ["the ranks ended at steps [5, 6]"]


def test_nothing_backed_up_after_the_return(trial: Trial) -> None:
    trial.promises.told.remove((2, 1, 5))
    assert "no later step was backed up" in judge(trial)[0][0]


def test_promises_of_the_status_and_of_all_agents_logs(tmp_path: Path) -> None:
    promises = Promises(tmp_path, NODES)
    run = tmp_path / "run"
    logs = [run / "nodes" / str(node) / "agent.log" for node in range(NODES)]
    for node, log in enumerate(logs):
        log.parent.mkdir(parents=True)
        log.write_text(f"… INFO step 7 (incarnation 0) of rank {node} stands on another node\n")
    logs[3].write_text("")
    (run / "status.json").write_text(json.dumps({"backups": {"incarnation": 0, "step": 5}}))
    promises.look()
    assert promises.told == [(0, 0, 5)]
    logs[3].write_text("step 7 (incarnation 0) of rank 3 stands on anoth")
    promises.look()
    assert promises.newest(0) == 5  # a line that is not whole yet
    logs[3].write_text("step 7 (incarnation 0) of rank 3 stands on another node\n")
    promises.look()
    assert promises.newest(0) == 7
    assert promises.newest(-1) == -1


def test_what_agents_told_before_a_loss_does_not_add_up_with_what_they_tell_later(tmp_path: Path) -> None:
    promises = Promises(tmp_path, NODES)
    for rank in range(NODES):
        log = tmp_path / "run" / "nodes" / str(rank) / "agent.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"step 7 (incarnation 0) of rank {rank} stands on another node\n")
        promises.look()
        if rank == 1:
            promises.lost()
    assert promises.told == []


@pytest.mark.parametrize("name", CASES)
def test_plans_depend_on_the_seed_alone(name: str) -> None:
    for seed in range(20):
        plan = CASES[name](random.Random(f"{name}:{seed}"))
        assert plan == CASES[name](random.Random(f"{name}:{seed}"))
        for loss in plan.losses:
            assert all(0 <= node < NODES for node in loss.nodes)
            assert not {(node + 1) % NODES for node in loss.nodes} & set(loss.nodes)  # no neighbours
