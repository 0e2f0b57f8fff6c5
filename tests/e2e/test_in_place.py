"""Re-forming a job in its processes: who did not fail stays, and losses are those of an undisturbed run, bit by bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.test_reforming import Nodes
from tests.e2e.test_session import losses

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.xdist_group("in_place"),
    pytest.mark.soak,
    pytest.mark.timeout(900),
]

JOB = Path(__file__).with_name("in_place_train.py")
STEPS = 12
PATIENCE_S = 400


class Result:
    """What a run has left: losses by rank and step, processes by rank, what was said."""

    def __init__(self, folder: Path, ranks: int, said: str) -> None:
        self.said = said
        self.losses: list[dict[int, set[str]]] = [{} for _ in range(ranks)]
        self.pids: list[list[int]] = [[] for _ in range(ranks)]
        for rank in range(ranks):
            for line in (folder / f"losses-{rank}").read_text().splitlines():
                step, loss, pid = line.split()
                self.losses[rank].setdefault(int(step), set()).add(loss)
                if int(pid) not in self.pids[rank]:
                    self.pids[rank].append(int(pid))

    @property
    def starts(self) -> list[int]:
        """Where each incarnation's rank 0 started."""
        return [int(found) for found in re.findall(r"rank 0 incarnation \d+ starts at (\d+)", self.said)]

    @property
    def processes(self) -> list[int]:
        """How many played each rank."""
        return [len(pids) for pids in self.pids]


def job(folder: Path, kind: str, deaths: str, *flags: str, ranks: int = 2, **environ: str) -> Result:
    """Run it to its end."""
    folder.mkdir()
    command = [sys.executable, "-m", "keepstep.cli", "run", "-v", "--run-dir", str(folder / "run"), *flags]
    done = subprocess.run(
        [*command, "--nproc-per-node", str(ranks), str(JOB), str(folder), kind, str(STEPS), deaths],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "KEEPSTEP_LEAVE_S": "60", **environ},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Result(folder, ranks, done.stderr)


UNWATCHED = ("--in-place", "--no-watch", "--standbys", "0", "--max-restarts", "3")


class Undisturbed(dict[str, Result]):
    """A run in which nobody dies, by kind; made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, kind: str) -> Result:
        self[kind] = job(self._folder / kind, kind, "", "--no-watch")
        return self[kind]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_deaths_cost_no_bit_and_only_the_dead_are_replaced(
    tmp_path: Path, undisturbed: Undisturbed, kind: str
) -> None:
    found = job(tmp_path / "in-place", kind, "1:4:backward:kill,0:8:optimizer:kill", *UNWATCHED)
    assert found.losses == undisturbed[kind].losses
    assert found.processes == [2, 2]
    assert "does not leave" not in found.said
    assert "begins anew" not in found.said


@pytest.mark.parametrize("kind", ["ddp", "own"])
@pytest.mark.parametrize("moment", ["forward", "backward", "optimizer", "save"])
def test_no_step_is_lost_or_made_twice_wherever_it_dies(
    tmp_path: Path, undisturbed: Undisturbed, kind: str, moment: str
) -> None:
    found = job(tmp_path / "in-place", kind, f"1:5:{moment}:kill", *UNWATCHED)
    assert found.losses == undisturbed[kind].losses
    assert found.processes == [1, 2]
    assert found.starts[0] == 0
    assert found.starts[1] in (4, 5)  # 4: the copy of step 5's state had not ended when it died


def test_connections_that_are_lost_while_all_live_cost_no_process(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    found = job(tmp_path / "cut", "ddp", "1:4:backward:cut", *UNWATCHED)
    assert found.losses == undisturbed["ddp"].losses
    assert found.processes == [1, 1]
    assert len(found.starts) == 2


def test_the_reference_path_gives_the_same(tmp_path: Path, undisturbed: Undisturbed) -> None:
    found = job(tmp_path / "replaced", "ddp", "1:4:backward:kill", *UNWATCHED[1:])
    assert found.losses == undisturbed["ddp"].losses
    assert found.processes == [2, 2]


@pytest.mark.parametrize(("example", "ranks"), [("train.py", 2), ("fsdp2.py", 2), ("tp_pp_dp.py", 8)])
def test_the_shipped_examples_whose_default_group_is_made_before_the_training(
    tmp_path: Path, example: str, ranks: int
) -> None:
    undisturbed, _ = losses(tmp_path / "undisturbed", example=example, ranks=ranks)
    flags = "-v", "--in-place", "--standbys", "0", "--max-restarts", "1"
    environment = {"DIES": "1", "KEEPSTEP_LEAVE_S": "60"}
    found, said = losses(tmp_path / "killed", *flags, example=example, ranks=ranks, **environment)
    assert "begins anew" not in said
    assert found == undisturbed
    played = [len(list((tmp_path / "killed").glob(f"process-{rank}-*"))) for rank in range(ranks)]
    assert played == [2 if rank == 1 else 1 for rank in range(ranks)]


def test_an_exception_in_one_rank_leaves_the_others_in_place(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    found = job(tmp_path / "raises", "ddp", "1:4:backward:raise", *UNWATCHED)
    assert found.losses == undisturbed["ddp"].losses
    assert found.processes == [1, 2]
    assert "rank 1: ValueError: boom" in found.said or "rank 1: exit code 1" in found.said


@pytest.mark.usefixtures("cold")  # else the few steps are over before the agent is there
def test_a_watched_run_is_recorded_on_in_the_same_process(tmp_path: Path, undisturbed: Undisturbed) -> None:
    folder = tmp_path / "watched"
    found = job(folder, "ddp", "1:5:backward:kill", "--in-place", "--standbys", "0", "--max-restarts", "3")
    assert found.losses == undisturbed["ddp"].losses
    assert found.processes == [1, 2]
    incident = json.loads((folder / "run/incidents/0001.json").read_text())
    assert (incident["kind"], incident["culprits"][0]["rank"]) == ("crash", 1)
    assert (incident["recovery"]["survived"], incident["recovery"]["ranks"]) == (1, 2)
    recorded = (folder / "run/nodes/0/iterations.jsonl").read_text().splitlines()
    steps = [(one["step"], sorted(one["ranks"])) for one in map(json.loads, recorded)]
    assert [step for step, _ in steps] == list(range(STEPS))
    assert all(ranks == ["0", "1"] for _, ranks in steps)


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_several_nodes_keep_their_processes(
    tmp_path: Path, undisturbed: Undisturbed, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_LEAVE_S", "60")
    nodes = Nodes(tmp_path / "nodes")
    try:
        for _ in range(2):
            words = str(JOB), str(nodes.folder), "ddp", str(STEPS), f"1:5:backward:{how}"
            nodes.start(*words, flags=("-v", "--in-place"))
        assert nodes.codes() == [0, 0], nodes.said()
    finally:
        nodes.end()
    found = Result(nodes.folder, 2, nodes.said())
    assert found.losses == undisturbed["ddp"].losses
    assert found.processes == [1, 2]
    assert found.starts[1] in (4, 5)


def test_a_training_that_does_not_let_itself_be_left_is_replaced(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    found = job(
        tmp_path / "swallows", "ddp", "1:4:backward:kill", *UNWATCHED, SWALLOWS="1", KEEPSTEP_LEAVE_S="3"
    )
    assert found.losses == undisturbed["ddp"].losses
    assert found.processes == [2, 2]
    assert found.said.count("rank 0 does not leave its training: it is ended") == 1
