"""Jobs on a real control plane of Kubernetes, whose nodes are stand-ins: a node is lost, a pod is evicted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e import kube_bed
from tests.e2e.kube_bed import KubeBed, until
from tests.e2e.stand_in_job import SHARED, StandInJob
from tests.e2e.test_backups import backed_up
from tests.warm.warm_fork import ROOM

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]

TRAIN = Path(__file__).parents[2] / "benchmarks/operate/job.py"
STEPS, PAUSE_S = 60, 0.1
LEFT = 75


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[KubeBed]:
    if reason := kube_bed.missing():
        pytest.skip(reason)
    warm = {name: os.environ[name] for name in (ROOM, "PYTHONPATH")}
    with kube_bed.kubernetes(tmp_path, environ=warm) as made:
        yield made


class Training:
    """Three pods and a spare, a rank each."""

    def __init__(self, bed: KubeBed) -> None:
        self.bed, self.folder = bed, bed.folder / "work"
        self.folder.mkdir()
        self.folder.chmod(0o1777)
        words = ["--nnodes=3", "--nproc-per-node=1", "--max-restarts=3", "--secret-file=/etc/keepstep/secret"]
        words += ["--run-dir=/run/keepstep/train", str(TRAIN), SHARED, str(STEPS), str(PAUSE_S)]
        self.job = StandInJob(bed.api, 4, words, self.folder)
        until(lambda: min(map(self.step, range(3))) >= 5, "all ranks train", 60)
        first = bed.kubelets.find(self.pod_on(self.nodes(0)[0]))
        run = first.container.folder / "volumes/keepstep-run/train"
        until(lambda: backed_up(run) >= 5, "each node's state is on another one, too", 60)

    def nodes(self, rank: int) -> list[str]:
        """The nodes on which a rank was, in their order."""
        path = self.folder / f"losses-{rank}"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return list(dict.fromkeys(line.split()[3] for line in lines))

    def step(self, rank: int) -> int:
        path = self.folder / f"losses-{rank}"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return int(lines[-1].split()[0]) if lines else -1

    def pod_on(self, node: str) -> str:
        return next(one["metadata"]["name"] for one in self.job.pods() if one["spec"].get("nodeName") == node)

    def ended(self, count: int) -> dict[str, int]:
        """The exit codes of all pods, once so many have ended."""
        until(lambda: len(self.job.exit_codes()) == count, f"{count} pods have ended")
        return self.job.exit_codes()


def test_a_lost_nodes_rank_goes_on_in_the_spare(bed: KubeBed) -> None:
    training = Training(bed)
    (lost,) = training.nodes(1)
    gone = training.pod_on(lost)
    bed.kubelets.lose(lost)
    codes = training.ended(3)
    assert gone not in codes, "nobody is there who could report it"
    assert set(codes.values()) == {0}
    assert training.nodes(1)[0] == lost
    assert len(training.nodes(1)) == 2
    assert training.step(1) == STEPS - 1


def test_an_evicted_pod_leaves_alone(bed: KubeBed) -> None:
    training = Training(bed)
    (drained,) = training.nodes(2)
    gone = bed.kubelets.find(training.pod_on(drained))
    bed.taint(drained, "example.com/maintenance")
    codes = training.ended(3)
    assert gone.exit_code == LEFT, gone.container.log()
    assert "this node leaves the job" in gone.container.log()
    assert gone.message.startswith("keepstep: "), gone.message
    assert gone.name not in codes, "its deletion was finished"
    assert set(codes.values()) == {0}
    assert len(training.nodes(2)) == 2
