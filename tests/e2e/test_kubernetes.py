"""Jobs on a real control plane of Kubernetes, whose nodes are stand-ins: a node is lost, a pod is evicted.

What the Job's controller does then, by the rules of ``deploy/kubernetes/job.yaml``, a stand-in does.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e import kube_bed
from tests.e2e.kube_bed import KubeBed, until
from tests.e2e.stand_in_job import SHARED, StandInJob
from tests.e2e.stand_in_pod import Container
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
    """Three ranks, each in a pod of its own; the other pods are spares."""

    def __init__(self, bed: KubeBed, *flags: str, pods: int = 4, steps: int = STEPS) -> None:
        self.bed, self.folder = bed, bed.folder / "work"
        self.folder.mkdir()
        self.folder.chmod(0o1777)
        words = ["--nnodes=3", "--nproc-per-node=1", "--max-restarts=3", "--secret-file=/etc/keepstep/secret"]
        words += [*flags, "--run-dir=/run/keepstep/train", str(TRAIN), SHARED, str(steps), str(PAUSE_S)]
        self.job = StandInJob(bed.api, pods, words, self.folder)
        until(lambda: min(map(self.step, range(3))) >= 5, "all ranks train", 60)
        first = bed.kubelets.find(self.pod_on(self.nodes(0)[0]))
        run = first.container.folder / "volumes/keepstep-run/train"
        until(lambda: backed_up(run) >= 5, "each node's state is on another one, too", 60)

    def nodes(self, rank: int) -> list[str]:
        """The nodes on which a rank was, in their order."""
        return list(dict.fromkeys(line.split()[3] for line in self._lines(rank)))

    def steps(self, rank: int) -> list[int]:
        """All steps that a rank has made, in their order."""
        return [int(line.split()[0]) for line in self._lines(rank)]

    def step(self, rank: int) -> int:
        return (self.steps(rank) or [-1])[-1]

    def container(self, rank: int) -> Container:
        """That in which a rank is now."""
        return self.bed.kubelets.find(self.pod_on(self.nodes(rank)[-1])).container

    def _lines(self, rank: int) -> list[str]:
        path = self.folder / f"losses-{rank}"
        return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []

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


def test_a_job_that_ends_with_75_begins_again_once_and_never_after_it_has_finished(bed: KubeBed) -> None:
    """A pod leaves, no spare is there, and who makes pods is away for longer than the others wait."""
    flags = ("--rdzv-conf=join_timeout=30", f"--checkpoint-dir={SHARED}/checkpoints", "--checkpoint-every=5")
    training = Training(bed, *flags, pods=3)
    training.container(2).kill(signal.SIGTERM)
    assert set(training.ended(3).values()) == {LEFT}
    before = training.steps(1)
    training.job.follow()
    codes = training.ended(6)
    training.job.stop()
    assert Counter(codes.values()) == {LEFT: 3, 0: 3}
    training.job.look()
    assert len(training.job.pods()) == 6, "one pod for each index, and none for one that has finished"
    begun = training.steps(1)[len(before)]
    assert 0 < begun <= before[-1] + 1, "from storage: no memory is left"
    assert training.step(1) == STEPS - 1


def test_a_killed_launchers_pod_alone_comes_again_and_none_once_the_script_has_failed(bed: KubeBed) -> None:
    training = Training(bed, steps=2000)
    training.job.follow()
    made = {one["metadata"]["uid"] for one in training.job.pods()}
    training.container(1).kill(signal.SIGKILL)
    until(lambda: len(training.job.pods()) == 5, "its pod is made again", 60)
    assert made < {one["metadata"]["uid"] for one in training.job.pods()}
    until(lambda: len(training.nodes(1)) == 2, "the spare has its rank", 60)
    (training.folder / "raise-0").touch()
    codes = training.ended(5)
    training.job.stop()
    training.job.look()
    assert Counter(codes.values()) == {137: 1, 1: 3, 0: 1}, "a spare has not failed with the job"
    assert (training.job.has_failed, len(training.job.pods())) == (True, 5)
