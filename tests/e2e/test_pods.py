"""Pods: begun in any order, ended one by one, and taken in again by their index; no folder is shared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e import testbed as beds
from tests.e2e.test_backups import backed_up, read
from tests.e2e.test_reforming import TRAIN, until
from tests.e2e.testbed import HOURS

from keepstep import wire

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(900)]

STEPS = 12
PATIENCE_S = 400


class Pods:
    """Pods of an indexed Job of three, of which the first is known by its name only."""

    def __init__(self, bed: beds.Testbed, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        wire.write_secret(folder / "secret")
        self.running: dict[int, subprocess.Popen[str]] = {}
        self.count = 0

    def name_first(self, host: str) -> None:
        """The name server knows the first pod from now on, at this host."""
        for one in self.bed.hosts.values():
            hosts = Path("/etc/netns") / one.namespace / "hosts"
            lines = [line for line in hosts.read_text().splitlines() if "train-0" not in line]
            hosts.write_text("\n".join([*lines, f"{self.bed.hosts[host].address} train-0.train"]) + "\n")

    def start(self, index: int, host: str) -> Path:
        """Start a pod on a host; returns its run folder."""
        self.count += 1
        run = self.folder / f"run-{self.count}"
        command = [
            *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(run), "--nnodes", "3"),
            *("--node-rank", str(index), "--master-addr", "train-0.train", "--master-port", "29400"),
            *("--secret-file", str(self.folder / "secret"), "--max-restarts", "3", "--rdzv-id", "train"),
            *("--standbys", "0", "--no-validate", str(TRAIN), str(self.folder), str(STEPS)),
        ]
        pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "OMP_NUM_THREADS": "1", "PAUSE_AT": "8"}
        self.running[index] = self.bed.hosts[host].start(command, pod)
        return run

    def leader(self) -> str:
        """The host of the job's controller, once it has moved."""
        runs = [run for run in self.folder.glob("run-*") if read(run / "run.json").get("term", 0) > 1]
        return read(runs[0] / "run.json")["host"] if runs else ""

    def status(self, host: str) -> beds.Result:
        """The job's status as a host tells that has no folder of it."""
        command = [sys.executable, "-m", "keepstep.cli", "status", "train@train-0.train:29400"]
        secret = {"KEEPSTEP_SECRET_FILE": str(self.folder / "secret")}
        return beds.collect({host: self.bed.hosts[host].start(command, secret)}, PATIENCE_S)[host]

    def end(self, index: int, host: str) -> beds.Result:
        """End a pod as the kubelet does, from outside of its container."""
        pod = self.running.pop(index)
        (launcher,) = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
        os.kill(int(launcher), signal.SIGTERM)
        return beds.collect({host: pod}, PATIENCE_S)[host]


def test_the_first_pod_comes_again_and_shows_others_the_way(tmp_path: Path) -> None:
    """Nobody has the folder in which the moved controller's address is."""
    if reason := beds.missing():
        pytest.skip(reason)
    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS, 30 * HOURS, HOURS)) as bed:
        pods = Pods(bed, tmp_path)
        pods.name_first("node-a")
        first = pods.start(0, "node-a")
        for index, host in ((1, "node-b"), (2, "node-c")):
            pods.start(index, host)
        until(lambda: backed_up(first) >= 6)
        drained = pods.end(0, "node-a")
        pods.name_first("node-d")
        pods.start(0, "node-d")
        until((tmp_path / "start-0-1").exists)
        leader = until(pods.leader)
        run = next(one for one in tmp_path.glob("run-*") if read(one / "run.json").get("host") == leader)
        until(lambda: backed_up(run) >= 6)
        told = pods.status("node-e")
        index, host = (2, "node-c") if leader == "node-b" else (1, "node-b")
        left = pods.end(index, host)
        pods.start(index, "node-e")
        until((tmp_path / f"start-{index}-2").exists)
        (tmp_path / "go").touch()
        results = beds.collect({str(index): one for index, one in pods.running.items()}, PATIENCE_S)
    assert [one.returncode for one in (drained, left)] == [75, 75], (drained, left)
    assert [one.returncode for one in results.values()] == [0, 0, 0], results
    assert "the controller is at" in results["0"].stderr
    assert (told.returncode, told.stdout.count("RANKS")) == (0, 1), told
    assert "node-d" in told.stdout
    assert all(int((tmp_path / f"start-{rank}-2").read_text()) >= 6 for rank in range(3))
    assert read(run / "end.json")["exit_code"] == 0


@pytest.mark.long
def test_pods_come_late_and_come_again(tmp_path: Path) -> None:
    if reason := beds.missing():
        pytest.skip(reason)
    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS, 30 * HOURS)) as bed:
        pods = Pods(bed, tmp_path)
        for index, host in ((2, "node-c"), (1, "node-b")):
            pods.start(index, host)
        waiting = [pods.running[index].stderr.readline() for index in (1, 2)]  # type: ignore[union-attr]
        pods.name_first("node-a")
        first = pods.start(0, "node-a")
        until(lambda: backed_up(first) >= 6)
        left = pods.end(2, "node-c")
        pods.start(2, "node-d")
        until((tmp_path / "start-2-1").exists)
        until(lambda: backed_up(first) >= 6)
        (tmp_path / "go").touch()
        results = beds.collect({str(index): one for index, one in pods.running.items()}, PATIENCE_S)
    assert left.returncode == 75, left
    assert "this node leaves the job" in left.stderr
    told = "keepstep: train-0.train is not known yet: its pod is waited for, 600 s at most\n"
    assert waiting == [told, told]
    assert [one.returncode for one in results.values()] == [0, 0, 0], results
    said = results["0"].stderr
    assert "node node-c lost; node node-c replaced; all nodes begin again, restart 1 of 3" in said
    assert "the launcher of node-c said that it leaves: the pod is ended" in " ".join(said.split())
    assert int((tmp_path / "start-2-1").read_text()) >= 6, "from a backup in the memory of another node"
    assert read(first / "end.json")["exit_code"] == 0
