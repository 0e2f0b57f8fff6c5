"""Runs one seed: a cluster of six nodes, a job of ``keepstep slurm``, the fault, and what Slurm says of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.e2e.slurm_bed import SlurmBed, slurm, until

from benchmarks.operate.judge import Losses, Seen, faults
from benchmarks.operate.plans import Plan
from benchmarks.operate.rows import row_of
from keepstep.core.incident import REPLACEMENT

JOB = Path(__file__).with_name("job.py")
STEPS = 2000  # at most: a trial has the job end soon after it trains again
PAUSE_S = 0.1
QUEUED = 20
_JOIN_S = 20  # longer than a killed launcher takes to be started again
_PATIENCE_S = 150.0
_NOBODY = 65534
_REPLACED = re.compile(r"^keepstep: .* replaced\b", re.MULTILINE)


def keepstep(*words: str) -> list[str]:
    return [sys.executable, "-m", "keepstep.cli", *words]


def losses_of(folder: Path) -> Losses:
    """All losses that ranks noted."""
    found: Losses = {}
    for rank, line in _lines(folder):
        step, loss, *_ = line
        found.setdefault((rank, int(step)), set()).add(loss)
    return found


def undisturbed(world: int, folder: Path) -> Losses:
    """The losses of so many ranks on this host, made once in a folder."""
    if not folder.exists():
        folder.mkdir(parents=True)
        command = keepstep(
            "run", "--no-watch", "--run-dir", str(folder / "run"), "--nproc-per-node", str(world)
        )
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, str(JOB), str(folder), str(STEPS), "0"], env=environ, check=True, capture_output=True
        )
    return losses_of(folder)


def run_seed(plan: Plan, folder: Path, reference: Losses) -> dict[str, Any]:
    """Run and judge a seed; its line for the results."""
    began_s = time.monotonic()
    node, seen, wrong = "", None, list[str]()
    with slurm(folder) as bed:
        trial = Trial(plan, bed, reference)
        try:
            trial.run()
        except (AssertionError, subprocess.SubprocessError) as error:
            wrong.append(f"the trial did not come to its end: {error}")
        node, seen = trial.node, trial.seen()
        wrong += faults(plan, node, seen)
    return row_of(plan, node, seen, wrong, began_s)


class Trial:
    """One seed while it runs. ``node``: the one that is hurt."""

    def __init__(self, plan: Plan, bed: SlurmBed, reference: Losses) -> None:
        self.plan, self.bed, self.reference = plan, bed, reference
        self.work = bed.folder / "work"
        self.work.mkdir()
        if plan.user == "nobody":
            os.chown(self.work, _NOBODY, _NOBODY)
        self.job, self.node = "", ""
        self._told_unix_s: float | None = None
        self._proven_unix_s: float | None = None

    @property
    def run_folder(self) -> Path:
        return self.work / "runs" / self.job

    def run(self) -> None:
        """Submit the job, hurt it, and wait until it is over."""
        self._submit()
        until(lambda: self._step() >= self.plan.at_step, "the job trains", _PATIENCE_S)
        until(self._is_warm, "standbys are warm, as in a job that is older than a minute", _PATIENCE_S)
        self._hurt()
        if self.plan.is_replaced:
            until(self._told, "a replacement is told", _PATIENCE_S)
        if self.plan.is_replaced and self.plan.fault == "slow-node":
            until(self._proven, "the job was measured to be faster with the spare", _PATIENCE_S)
        if self.plan.fault == "slow-node" and not self.plan.spare:
            until(lambda: self._named("slow"), "the slow node is named", _PATIENCE_S)
        step = self._step() + 10
        until(lambda: self._step() >= step or self._has_ended(), "the job trains on", _PATIENCE_S)
        if self.plan.is_drained:
            until(lambda: self.node in self._reasons(), "the node is drained")
            self.bed.start_node(self.node)  # without the drain it would be given to other jobs again
        (self.work / "enough").touch()
        until(self._is_over, "the job is over", _PATIENCE_S)
        if self.plan.is_drained:
            self._queue()  # now, as the job's own nodes are free, and for the jobs not to slow its recovery
            with suppress(AssertionError):
                until(lambda: len(self._queued_on()) == QUEUED, "the queued jobs")

    def seen(self) -> Seen:
        """What is to be judged."""
        shown = self._shown()
        folders = [*sorted(self.run_folder.glob("previous/*")), self.run_folder]
        ends = [json.loads(path.read_text()) for one in folders if (path := one / "end.json").exists()]
        kind = {"node-lost": "crash", "slow-node": "slow"}.get(self.plan.fault, "")
        named = self._named(kind) if kind else None
        later = [float(line[2]) for _, line in _lines(self.work)]
        told = self._told_unix_s
        again = min((at for at in later if told is not None and at > told), default=None)
        # A slow node is drained once the job is faster with a spare in its place, which the incident says.
        verdict = self._proven_unix_s if kind == "slow" else named and named[1]
        reason = self._reason_unix_s()
        return Seen(
            slurm_exit=_word(shown, "ExitCode"),
            ends=[
                {key: one.get(key) for key in ("exit_code", "category", "nodes")}
                | {"reason": str(one.get("reason")).replace(f"{self.bed.folder}/", "")}
                for one in ends
            ],
            starts_again=int(_word(shown, "Restarts") or 0),
            excluded=_word(shown, "ExcNodeList"),
            reasons=self._reasons(),
            named_node=named[0] if named else "",
            reason_s=None if reason is None or verdict is None else round(reason - verdict, 2),
            proven_s=None
            if told is None or self._proven_unix_s is None
            else round(self._proven_unix_s - told, 2),
            replaced=told is not None,
            again_s=None if again is None or told is None else round(again - told, 2),
            queued_on=self._queued_on(),
            losses=losses_of(self.work),
            reference=self.reference,
        )

    def _submit(self) -> None:
        plan, work = self.plan, self.work
        flags = [
            "--verbose",
            "--nnodes",
            str(plan.nodes),
            "--nproc-per-node",
            str(plan.ranks),
            "--max-restarts",
            "2",
        ]
        flags += ["--rdzv-conf", f"join_timeout={_JOIN_S}"]
        flags += ["--checkpoint-dir", str(work / "checkpoints"), "--checkpoint-every", "3"]
        own = ["--node-remedy=auto", "--requeue", f"--nodes={plan.nodes + plan.spare}", "--exclusive"]
        own += [f"--chdir={work}", f"--output={work}/slurm.out"]
        user = (
            ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
            if plan.user == "nobody"
            else []
        )
        words = keepstep("slurm", *own, "--", *flags, str(JOB), str(work), str(STEPS), str(PAUSE_S))
        # The nodes share one host's CPUs, of which none is idle while the standbys of all are warmed.
        environ = {"HOME": str(work), "KEEPSTEP_STANDBY_IDLE_S": "1"}
        done = self.bed.run(*user, *words, environ=environ)
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.split()[-1]

    def _hurt(self) -> None:
        plan = self.plan
        rank = plan.victim * plan.ranks
        self.node = next(line[3] for number, line in _lines(self.work) if number == rank)
        if plan.fault == "rank-killed":
            ranks = [
                pid
                for pid, line in self.bed.processes(self.node).items()
                if f"{JOB} {self.work}" in line
                and f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                and " keepstep.cli " not in line
            ]
            assert ranks, f"no process of rank {rank}"
            os.kill(ranks[0], signal.SIGKILL)
        elif plan.fault == "launcher-killed":
            self.bed.kill_launcher(self.node)
        elif plan.fault == "node-lost":
            self.bed.lose_node(self.node)
        elif plan.fault == "slow-node":
            (self.work / f"slow-{self.node}").touch()
        elif plan.fault == "python-error":
            (self.work / f"raise-{rank}").touch()

    def _queue(self) -> None:
        script = f"#!/bin/sh\necho $SLURMD_NODENAME >> {self.bed.folder}/queued\nsleep 0.5\n"
        (self.bed.folder / "short.sh").write_text(script)
        made = self.bed.run(
            *("sbatch", f"--array=1-{QUEUED}", "--nodes=1", "--exclusive", "--output=/dev/null"),
            str(self.bed.folder / "short.sh"),
        )
        assert made.returncode == 0, made.stderr

    def _queued_on(self) -> list[str]:
        path = self.bed.folder / "queued"
        return path.read_text().split() if path.exists() else []

    def _told(self) -> bool:
        """Whether the job has told of a replacement; it is noted when."""
        if self._told_unix_s is None and _REPLACED.search(self._console()):
            self._told_unix_s = time.time()
        return self._told_unix_s is not None

    def _proven(self) -> bool:
        """Whether an incident tells what the replacement did; it is noted when."""
        for path in (self.run_folder / "incidents").glob("[0-9]*.json"):
            acted = json.loads(path.read_text())["actions"]
            if any(one["name"] == REPLACEMENT and one["measured_iteration_s"] for one in acted):
                self._proven_unix_s = self._proven_unix_s or time.time()
        return self._proven_unix_s is not None

    def _is_warm(self) -> bool:
        """Whether all nodes, spares too, have said that their standbys are warm."""
        return self._console().count("standbys are warm") >= self.plan.nodes + self.plan.spare

    def _console(self) -> str:
        path = self.work / "slurm.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def _has_ended(self) -> bool:
        return (self.run_folder / "end.json").exists()

    def _is_over(self) -> bool:
        time.sleep(0.5)
        state = _word(self._shown(), "JobState")
        going = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
        again = not self.plan.is_requeued or (self.run_folder / "previous").exists()
        return bool(state) and state not in going and again

    def _shown(self) -> str:
        return self.bed.run("scontrol", "show", "job", self.job).stdout if self.job else ""

    def _reasons(self) -> dict[str, str]:
        shown = self.bed.run("sinfo", "--noheader", "--list-reasons", "--format=%N|%E").stdout
        found = dict(line.split("|", 1) for line in shown.splitlines())
        return {node: why.strip() for node, why in found.items() if "Not responding" not in why}

    def _reason_unix_s(self) -> float | None:
        """When Slurm has the reason: of the drain; of an ordinary user in the job's comment.

        Slurm takes an ``ExcNodeList`` of no job that runs, so that it is set only once the job is requeued.
        """
        order = rf"update_node: node {self.node} reason set to: \[node_problem\]"
        if not self.plan.is_drained:
            order = r"_update_job: setting comment to \[node_problem\]"
        log = (self.bed.folder / "slurmctld.log").read_text(errors="replace")
        found = re.search(rf"\[(\S+)\] {order}", log)
        return None if found is None else _unix_s(found[1])

    def _named(self, kind: str) -> tuple[str, float] | None:
        """The node that an incident of this kind names as lost or slow, and when."""
        folders = [*sorted(self.run_folder.glob("previous/*")), self.run_folder]
        for path in (one for folder in folders for one in sorted(folder.glob("incidents/[0-9]*.json"))):
            incident = json.loads(path.read_text())
            for one in incident["culprits"]:
                if incident["kind"] == kind == "slow" or one.get("cause") == "node lost":
                    return one["node"], incident["detected_unix_s"]
        return None

    def _step(self) -> int:
        return max((int(line[0]) for _, line in _lines(self.work)), default=-1)


def _lines(folder: Path) -> list[tuple[int, list[str]]]:
    """The complete lines of all ranks."""
    return [
        (int(path.name.partition("-")[2]), line.split())
        for path in sorted(folder.glob("losses-*"))
        for line in path.read_text().rpartition("\n")[0].splitlines()
    ]


def _word(shown: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\S*)", shown)
    return found[1] if found else ""


def _unix_s(text: str) -> float:
    """Seconds of a time in Slurm's log, which is local time."""
    whole, _, fraction = text.partition(".")
    return time.mktime(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) + float(f"0.{fraction or 0}")
