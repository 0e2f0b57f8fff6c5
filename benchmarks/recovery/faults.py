"""Seeded faults of ``keepstep run`` on several hosts: the job trains again with the losses of an undisturbed one.

    python -m benchmarks.recovery.faults --case all

Every seed is a real job over network namespaces, clocks and process numbers of their own: three nodes train (DDP over
Gloo, one rank or two on each, every step saved and backed up), up to two are spares. At a drawn moment (of forward and
backward, of a save, of its seal, of the optimizer's step, of a restore) hosts are lost with all that runs there, a rank
is killed, or a link is cut or slowed. Then the job has to train on at its full size, all ranks from one step, that had
not been promised to survive in vain: for a lost node the newest backed up one in ``status.json``, for a killed rank the
newest that all ranks had sealed. Every loss of every incarnation is compared with those of an undisturbed training, bit
by bit; every state that came back with what was saved, by checksum; and all launchers have to end with 0. A cut or slow
link must not cost anybody the place. A line of every seed is kept, of failed ones too. Needs root.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_faults.campaign import (
    JOB,
    NOT_OVER,
    ROOT,
    Campaign,
    Judged,
    ledger,
    other_losses,
    undisturbed,
    went_on,
    wrong_bytes,
)
from benchmarks.checkpoint_faults.job import Marks, Phase
from benchmarks.recovery.plans import CASES, MEMBERS, Event, Plan
from tests.e2e import testbed as beds
from tests.e2e.testbed import HOURS, Host, Testbed

from keepstep.faults import SlowLink

MOST_STEPS = 300
LATER_STEPS = 8  # of all ranks after the last recovery
PAUSE_S = 0.1
GOAL = "bit-equal losses against an undisturbed run (10 seeds each)"
_PORT = 29555
_PATIENCE_S = 400.0
_CLOCKS_S = (0, 5 * HOURS, 11 * HOURS, 30 * HOURS, 2 * HOURS)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "PYTHONFAULTHANDLER": "1",
}


class Trial:
    """One seed while it runs."""

    def __init__(self, plan: Plan, folder: Path, bed: Testbed) -> None:
        self.plan, self.folder, self.bed = plan, folder, bed
        self.hosts = list(bed.hosts.values())
        self.launchers: dict[str, subprocess.Popen[str]] = {}
        self.promised = -1  # newest backed up step that was told
        self.promises: list[
            tuple[str, int]
        ] = []  # for each event: its kind, and what had been promised before
        self.done: list[dict[str, Any]] = []
        self.codes: dict[str, int] = {}
        self._began = time.monotonic()
        self.mark = Marks(folder).get  # process, phase and step of a rank; zeros before there is any
        self._pids: dict[tuple[int, int], int] = {}

    # What can be seen.

    def look(self) -> dict[str, Any]:
        """The status; reads the promises."""
        if time.monotonic() > self._began + _PATIENCE_S:
            raise TimeoutError(f"{NOT_OVER} {_PATIENCE_S:g} s; {self._where()}")
        status: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            status = json.loads((self.folder / "run" / "status.json").read_bytes())
        self.promised = max(self.promised, (status.get("backups") or {}).get("step", -1))
        for name, launcher in self.launchers.items():
            if launcher.poll() is not None and not (self.folder / "end").exists():
                raise RuntimeError(
                    f"the launcher on {name} ended with {launcher.returncode}; {self._where()}"
                )
        return status

    def _where(self) -> str:
        ranks = [self.mark(rank) for rank in range(self.plan.world)]
        return f"{len(self.done)} of {len(self.plan.events)} faults done, ranks at {ranks}"

    def incarnation(self) -> int:
        """The newest of which all ranks have resumed; -1 before."""
        return min(
            max((n["incarnation"] for n in ledger(self.folder, rank) if n["what"] == "resumed"), default=-1)
            for rank in range(self.plan.world)
        )

    def sealed(self) -> int:
        """The newest step that all ranks have sealed."""
        return min(
            max((n["step"] for n in ledger(self.folder, rank) if n["what"] == "sealed"), default=-1)
            for rank in range(self.plan.world)
        )

    def until(self, condition: Any) -> None:
        """Wait, looking."""
        while not condition():
            self.look()
            time.sleep(0.02)

    # What is done.

    def start(self, host: Host) -> None:
        """The real launcher of a host; on those beyond the members it becomes a spare."""
        number = self.hosts.index(host)
        command = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(self.folder / "run")]
        command += ["--nnodes", str(MEMBERS), "--node-rank", str(number), "--master-addr", self.hosts[0].name]
        command += ["--master-port", str(_PORT), "--nproc-per-node", str(self.plan.per_node)]
        command += ["--max-restarts", "6", "--standbys", str(self.plan.standbys), "--no-validate"]
        command += ["--checkpoint-backups", str(self.plan.backups)]
        command += ["--restart-budget", "same=0"]
        command += [str(JOB), str(self.folder), str(MOST_STEPS), "0", "0", str(PAUSE_S)]
        console = self.folder / f"console-{host.name}"
        words = ["sh", "-c", 'exec "$@" >>"$0" 2>&1', str(console), *command]
        self.launchers[host.name] = host.start(words, _ENVIRONMENT)

    def do(self, event: Event) -> None:
        """Wait for the event's moment, and do it; back when the job trains again."""
        before = self.incarnation()
        if event.phase == Phase.RESTORE:
            # the ranks have just been told to begin again: do it while they restore
            reached = before + 1
            while self.mark(event.rank)[1:] != (Phase.RESTORE, reached) and self.incarnation() < reached:
                self.look()
        else:
            first = self.mark(event.rank)[2]
            self.until(lambda: self.mark(event.rank)[2] >= first + event.steps)
            self._outside(event.rank)
            while self.mark(event.rank)[1] != event.phase:
                self.look()
        end = time.monotonic() + event.after_s
        while time.monotonic() < end:
            pass
        self._act(event)

    def _act(self, event: Event) -> None:
        _, phase, step = self.mark(event.rank)
        told: dict[str, Any] = {
            "kind": event.kind,
            "nodes": event.nodes,
            "phase": Phase(phase).name.lower(),
            "step": step,
        }
        promised = self.sealed() if event.kind == "rank" else self.promised
        if event.kind == "rank":
            told["rank"] = event.rank
            with suppress(ProcessLookupError):
                os.kill(self._outside(event.rank), signal.SIGKILL)
        elif event.kind == "node":
            hosts = [self._playing(node) for node in event.nodes]
            told["hosts"] = [host.name for host in hosts]
            for host in hosts:
                if event.silent:
                    subprocess.run(
                        ["ip", "-netns", host.namespace, "link", "set", "eth0", "down"], check=True
                    )
                self.launchers.pop(host.name, None)
            with ThreadPoolExecutor(len(hosts)) as pool:
                list(pool.map(Host.shut_down, hosts))
            if event.returns_s >= 0:
                self._bring_back(hosts, event)
        else:
            self._harm_link(event)
        self.promises.append((event.kind, promised))
        self.done.append({**told, "promised": promised, "at_s": round(time.monotonic() - self._began, 1)})

    def _outside(self, rank: int) -> int:
        """The number that this machine knows the rank's process by; to look for it takes milliseconds."""
        pid = self.mark(rank)[0]
        key = (rank, pid)
        if key not in self._pids:
            for outer in self._playing(rank // self.plan.per_node).processes():
                with suppress(OSError):
                    status = Path(f"/proc/{outer}/status").read_text()
                    if re.search(rf"^NSpid:.*\b{pid}$", status, re.MULTILINE):
                        self._pids[key] = outer
        return self._pids[key]

    def _playing(self, node_rank: int) -> Host:
        """The host whose launcher plays a node rank."""
        for node in self.look().get("nodes", ()):
            if node["node_rank"] == node_rank:
                return self.bed.hosts[node["node"]]
        return self.hosts[node_rank]

    def _bring_back(self, hosts: Sequence[Host], event: Event) -> None:
        end = time.monotonic() + event.returns_s
        while time.monotonic() < end:
            self.look()
            time.sleep(0.02)
        for host in hosts:
            if event.silent:
                subprocess.run(["ip", "-netns", host.namespace, "link", "set", "eth0", "up"], check=True)
            host.boot()
            self.start(host)

    def _harm_link(self, event: Event) -> None:
        one, other = (self._playing(node).name for node in event.nodes)
        with ExitStack() as stack:
            if event.kind == "slow":
                stack.enter_context(self.bed.links.inject(SlowLink(one, None, "10mbit")))
            else:
                cut = self.bed.cut(one, other)
                cut.__enter__()
                stack.callback(cut.__exit__, None, None, None)
            end = time.monotonic() + event.lasts_s
            while time.monotonic() < end:
                self.look()
                time.sleep(0.02)

    def run(self) -> None:
        """The whole job."""
        for host in self.hosts[: MEMBERS + self.plan.spares]:
            self.start(host)
        self.until(lambda: self.promised >= 2 and len(self.look().get("spares", ())) == self.plan.spares)
        for event in self.plan.events:
            was = self.incarnation()
            self.do(event)
            following = self.plan.events[len(self.done) :]
            if event.kind in ("rank", "node") and not any(e.phase == Phase.RESTORE for e in following):
                self.until(lambda was=was: self.incarnation() > was)
        at = [self.mark(rank)[2] for rank in range(self.plan.world)]
        self.until(lambda: all(self.mark(r)[2] >= at[r] + LATER_STEPS for r in range(self.plan.world)))
        newest = max(at)
        self.until(lambda: (self.look().get("backups") or {}).get("step", -1) > newest)
        (self.folder / "end").touch()
        for name, launcher in self.launchers.items():
            while launcher.poll() is None:
                self.look()
                time.sleep(0.05)
            self.codes[name] = launcher.returncode


def carry_out(plan: Plan, folder: Path) -> Judged:
    """The plan on new hosts, judged."""
    undisturbed(plan.world, MOST_STEPS)
    with beds.four_hosts(_CLOCKS_S[: MEMBERS + plan.spares]) as bed:
        trial = Trial(plan, folder, bed)
        try:
            trial.run()
            why, measured = judge(trial)
        except (RuntimeError, TimeoutError) as error:
            why, measured = [str(error)], {}
    paths = sorted(folder.glob("console-*"))
    said = "".join(f"{path.name}:\n{path.read_text(errors='replace')[-900:]}" for path in paths)
    return Judged(why, measured, trial.done, said)


def judge(trial: Trial) -> tuple[list[str], dict[str, Any]]:
    """What is wrong, a line each; and figures. Looks at ledgers, promises, losses and exit codes only."""
    why = [f"{name} ended with {code}" for name, code in trial.codes.items() if code]
    notes = {rank: ledger(trial.folder, rank) for rank in range(trial.plan.world)}
    last = max(note["incarnation"] for own in notes.values() for note in own)
    found: dict[str, Any] = {}
    promised = max((step for kind, step in trial.promises if kind in ("rank", "node")), default=-1)
    if {kind for kind, _ in trial.promises} == {"rank", "node"}:
        promised = min(step for _, step in trial.promises)  # what a killed rank had sealed went with the node
    if last:
        why += went_on(notes, lambda note: note["incarnation"] == last, promised, found)
    harmless = all(kind in ("cut", "slow") for kind, _ in trial.promises)
    if harmless and {node["node"] for node in trial.look().get("nodes", ())} - {
        host.name for host in trial.hosts[:MEMBERS]
    }:
        why.append("a link cost a node its place")
    ends = {note["step"] for own in notes.values() for note in own if note["what"] == "ended"}
    if len(ends) != 1:
        why.append(f"the ranks ended at steps {sorted(ends)}")
    for rank, own in notes.items():
        why += wrong_bytes(rank, own)
    why += other_losses(trial.folder, undisturbed(trial.plan.world, MOST_STEPS), max(ends, default=0))
    return why, {
        **found,
        "incarnations": last,
        "steps": max(ends, default=0),
        "recoveries": _recoveries(notes),
    }


def _recoveries(notes: dict[int, list[dict[str, Any]]]) -> list[float]:
    """Seconds from the last thing that any rank of an incarnation noted until all had resumed in the next."""
    found: list[float] = []
    for incarnation in range(1, max(n["incarnation"] for own in notes.values() for n in own) + 1):
        of = [n for own in notes.values() for n in own if n["incarnation"] == incarnation]
        earlier = [n for own in notes.values() for n in own if n["incarnation"] < incarnation]
        resumed = [n["unix_s"] for n in of if n["what"] == "resumed"]
        if resumed and earlier:
            found.append(round(max(resumed) - max(n["unix_s"] for n in earlier), 2))
    return found


CAMPAIGN = Campaign(
    "recovery.faults",
    __doc__,
    CASES,
    carry_out,
    lambda: undisturbed(MEMBERS, MOST_STEPS),
    "summary.json",
    "network namespaces of one machine, 3 or 6 ranks, DDP, Gloo; keepstep run, its agents and its controller are real",
    goal=GOAL,
    results="recovery-faults",
    seeds=10,
)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    reason = beds.missing()
    if reason:
        print(f"no seed can be run: {reason}", file=sys.stderr)
        return 2
    return CAMPAIGN.main(argv)


if __name__ == "__main__":
    sys.exit(main())
