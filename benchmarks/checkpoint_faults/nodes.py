"""Seeded fault campaigns of the checkpoint engine on four hosts: nodes lost with their memory, links cut and slowed.

    python -m benchmarks.checkpoint_faults.nodes --case all

Every seed trains over four network namespaces (DDP over Gloo, one rank or two on each), saves every step, loses nodes
at drawn moments (everything on the host is killed at once, its cache too; in some seeds without a last packet) and goes
on when they are back, empty. Compared are: the losses of every step with those of an undisturbed training, bit by bit;
the state that came back with what was saved, by checksum; the step that all ranks went on from with the newest that had
been told to be backed up before the loss, in the controller's ``status.json`` or, rank by rank, in the agents' logs;
with storage, with the newest that is whole there. A line of every seed is kept, of failed ones too.

``node-at-persist`` is ``keepstep run`` on every host: the job ends with the lost node, and a second one goes on from
storage. In the other cases a stand-in holds the place of the launcher (see ``node.py``): it has the nodes that
stay wait for the one that returns empty, and forks its workers, which makes a seed cheap; agents, controller and
workers are the real ones. Needs root.
"""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

from benchmarks.checkpoint_faults.agent_sockets import CONTROLLER_PORT, Sockets, states_slowed
from benchmarks.checkpoint_faults.campaign import (
    JOB,
    NOT_OVER,
    ROOT,
    Campaign,
    Judged,
    Note,
    ledger,
    other_losses,
    steps_on,
    undisturbed,
    went_on,
    whole_steps,
    wrong_bytes,
)
from benchmarks.checkpoint_faults.job import Marks, Phase
from benchmarks.checkpoint_faults.plans import CASES, NODES, LinkFault, Loss, Plan
from benchmarks.checkpoint_faults.promises import Promises
from benchmarks.checkpoint_faults.warm import Warm
from tests.e2e import testbed as beds
from tests.e2e.testbed import HOURS, Host, Testbed

from keepstep.faults import SlowLink

MOST_STEPS = 300
EVERY = 3  # steps between those that are to be on storage
PAUSE_S = 0.25  # after each step: backups take longer than these small steps, and several seeds run at once
_MASTER_PORT = 29600
_PATIENCE_S = 400.0  # for all of a seed: 30 to 60 s where it has two cores to itself
_AGAIN_S = 30.0  # for a later step to be backed up after the last return
_LATER_STEPS = 8  # of a second run
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "KEEPSTEP_CHECKPOINT_WAIT_S": "2",
    "KEEPSTEP_LINGER_S": "3",
}
_RESUMED = re.compile(
    r"keepstep: (?:rank (\d+) )?resumed after step (\d+) from (.*?)(?:; ranks (.*) from elsewhere)?$"
)


class Trial:
    """One seed while it runs."""

    def __init__(self, plan: Plan, folder: Path, bed: Testbed) -> None:
        self.plan, self.folder, self.bed = plan, folder, bed
        self.hosts = list(bed.hosts.values())
        self.incarnation = 0
        self.promises = Promises(folder, plan.world)
        self.kills: list[dict[str, Any]] = []
        self.codes: dict[str, int] = {}  # of the first run's launchers
        self.whole = -1  # newest step that stood whole on storage when the first run was over
        self.mark = Marks(folder).get  # process, phase and step of a rank; zeros before there is any
        self._began = time.monotonic()
        self.link_told: list[int] = []  # newest step backed up when the link's fault began, and when it ended
        self._link = ExitStack()
        self._link_from = self._link_until = float("inf")
        self._first_step = -1  # at which a rank was when the first step was backed up

    def look(self) -> None:
        """What has to be looked at all the time."""
        self.promises.look()
        if time.monotonic() > self._began + _PATIENCE_S:
            raise TimeoutError(f"{NOT_OVER} {_PATIENCE_S:g} s")
        if self.promises.told and self._first_step < 0:
            self._first_step = self.mark(0)[2]
        fault, now = self.plan.link, time.monotonic()
        if fault and self._link_from == float("inf") and self._steps() >= fault.steps:
            self._link.enter_context(self._faulty_link(fault))
            self._link_from, self._link_until = now, now + fault.lasts_s
            self.link_told.append(self.promises.newest(self.incarnation + 1))
        if now >= self._link_until:
            self.mend_link()

    def mend_link(self) -> None:
        """End the fault of the link."""
        if self._link_until < float("inf"):
            self.link_told.append(self.promises.newest(self.incarnation + 1))
        self._link.close()
        self._link_until = float("inf")

    def lose(self, loss: Loss) -> None:
        """Wait for the moment, and have the nodes lost."""
        has_come = self._moment_of(loss)
        while not has_come():
            self.look()
            self._check_workers()
            time.sleep(0.004 if loss.when == "ring" else 0.001)
        end = time.monotonic() + loss.after_s
        while time.monotonic() < end - 0.02:
            self.look()
            time.sleep(0.002)
        self.promises.look()
        while time.monotonic() < end:
            pass
        self._kill(loss)

    def _kill(self, loss: Loss) -> None:
        hosts = [self.hosts[node] for node in loss.nodes]
        ranks = [loss.nodes[0] * self.plan.per_node + local for local in range(self.plan.per_node)]
        found = [Phase(self.mark(rank)[1]).name.lower() for rank in ranks]
        in_transfer = loss.when != "transfer" or Sockets(hosts[0]).in_transfer
        if loss.silent:
            for host in hosts:
                subprocess.run(["ip", "-netns", host.namespace, "link", "set", "eth0", "down"], check=True)
        threads = [Thread(target=host.shut_down) for host in hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.promises.lost()
        self.kills.append(
            {
                "nodes": loss.nodes,
                "phases": found,
                "step": self.mark(ranks[0])[2],
                "promised": self.promises.newest(self.incarnation + 1),
                "in_transfer": in_transfer,
                "at_s": round(time.monotonic() - self._began, 1),
            }
        )

    def _moment_of(self, loss: Loss) -> Callable[[], bool]:
        if loss.when == "phase":
            if loss.phase == Phase.RESTORE:  # there the mark's number is the incarnation
                incarnation = self.incarnation
                return lambda: self.mark(loss.rank)[1:] == (loss.phase, incarnation)
            return lambda: self._steps() >= loss.steps and self.mark(loss.rank)[1] == loss.phase
        if loss.when == "transfer":
            sockets: list[Sockets] = []

            def begun() -> bool:
                if self._first_step < 0:
                    return False
                sockets[:] = sockets or [Sockets(self.hosts[loss.nodes[0]])]
                return sockets[0].in_transfer

            return begun
        if loss.when == "link":
            return lambda: self._link_from < float("inf")
        if loss.when == "storage":
            return lambda: len(steps_on(self.folder / "storage")) >= loss.steps
        promised = self.promises.newest(self.incarnation + 1)
        return lambda: self._is_good_again(promised)

    def _is_good_again(self, promised: int) -> bool:
        """All ranks have resumed, and the controller has told since then what is backed up, on all nodes."""
        resumed_s = self.resumed_unix_s()
        status = self.promises.status
        agents = {node["agent"] for node in status.get("nodes", ())}
        newest = (status.get("backups") or {}).get("step", -1)
        return (
            bool(resumed_s)
            and status.get("unix_s", 0) > resumed_s + 0.5
            and agents == {"ok"}
            and newest >= promised
        )

    def resumed_unix_s(self) -> float:
        """When the last rank of this incarnation had resumed; 0: not all have."""
        times = [
            note["unix_s"]
            for rank in range(self.plan.world)
            for note in ledger(self.folder, rank)
            if note["what"] == "resumed" and note["incarnation"] == self.incarnation
        ]
        return max(times) if len(times) == self.plan.world else 0.0

    def _steps(self) -> int:
        """Since the first step was backed up."""
        return self.mark(0)[2] - self._first_step if self._first_step >= 0 else -1

    def bring_back(self, loss: Loss) -> list[Host]:
        """After a while the lost hosts are there again, empty; these."""
        end = time.monotonic() + loss.away_s
        while time.monotonic() < end:
            self.look()
            time.sleep(0.01)
        self.mend_link()
        back = [self.hosts[node] for node in loss.nodes]
        for host in back:
            if loss.silent:
                subprocess.run(["ip", "-netns", host.namespace, "link", "set", "eth0", "up"], check=True)
            host.boot()
        return back

    def order(self, incarnation: int) -> None:
        """Have the workers of all stand-ins start (again)."""
        draft = self.folder / ".incarnation"
        draft.write_text(str(incarnation))
        draft.rename(self.folder / "incarnation")
        self.incarnation, self.promises.begun = incarnation, incarnation + 1

    def start(self, host: Host) -> None:
        """The stand-in for the launcher of a host."""
        node = self.hosts.index(host)
        words = [str(self.folder), str(node), str(_MASTER_PORT), *self.words(node)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **_ENVIRONMENT}
        warm().start(host.init_pid, self.folder / f"console-{host.name}", environment, words)

    def start_run(self, host: Host, number: int) -> subprocess.Popen[str]:
        """The real launcher of a host."""
        command = [sys.executable, "-m", "keepstep.cli", "run", *self.words(self.hosts.index(host), number)]
        return self._start(host, command)

    def words(self, node: int, number: int = 0) -> list[str]:
        """What ``keepstep run`` is given on a node."""
        words = ["--run-dir", str(self.folder / "run"), "--nnodes", str(NODES), "--node-rank", str(node)]
        words += ["--master-addr", self.hosts[0].name, "--master-port", str(CONTROLLER_PORT)]
        words += ["--nproc-per-node", str(self.plan.per_node), "--no-validate"]
        words += ["--checkpoint-backup-rate", str(self.plan.rate)] if self.plan.rate else []
        every = EVERY if self.plan.storage else 0
        if self.plan.storage:
            words += ["--checkpoint-dir", str(self.folder / "storage"), "--checkpoint-every", str(every)]
        return [*words, str(JOB), str(self.folder), str(MOST_STEPS), str(number), str(every), str(PAUSE_S)]

    def _start(self, host: Host, command: Sequence[str]) -> subprocess.Popen[str]:
        console = self.folder / f"console-{host.name}"
        return host.start(["sh", "-c", 'exec "$@" >>"$0" 2>&1', str(console), *command], _ENVIRONMENT)

    @contextmanager
    def _faulty_link(self, fault: LinkFault) -> Generator[None]:
        host, other = self.hosts[fault.node], self.hosts[(fault.node + 1) % NODES]
        if not fault.all_traffic:
            with states_slowed(host, fault.rate):
                yield
        elif fault.rate:
            with self.bed.links.inject(SlowLink(host.name, other.name, fault.rate)):
                yield
        else:
            with ExitStack() as stack:
                cut = self.bed.cut(host.name, other.name)
                cut.__enter__()
                stack.callback(cut.__exit__, None, None, None)
                yield

    def ended(self, node: int) -> list[int]:
        """Exit codes of a node's workers of this incarnation; none while some run."""
        with suppress(OSError):
            text = (self.folder / f"ended-{node}-{self.incarnation}").read_text()
            return [int(word) for word in text.split()]
        return []

    def _check_workers(self) -> None:
        """None may end by itself."""
        for node in range(NODES):
            if codes := self.ended(node):
                raise RuntimeError(f"the workers of node {node} ended with {codes}")

    def finish(self) -> None:
        """Let the training go on until another step is backed up, and then to its end."""
        deadline = float("inf")
        while time.monotonic() < deadline:
            self.look()
            self._check_workers()
            if deadline == float("inf") and self.resumed_unix_s():
                deadline = time.monotonic() + _AGAIN_S
            if deadline < float("inf") and self.backed_up_again():
                break
            time.sleep(0.02)
        (self.folder / "end").touch()
        while any(not self.ended(node) for node in range(NODES)):
            self.look()
            time.sleep(0.02)

    def backed_up_again(self) -> bool:
        """Whether a step that was saved after the last return has been told to be backed up."""
        starts = [
            note["step"]
            for note in ledger(self.folder, 0)
            if note["what"] == "resumed" and note["incarnation"] == self.incarnation
        ]
        told = [step for _, incarnation, step in self.promises.told if incarnation >= self.incarnation]
        return bool(starts) and max(told, default=-1) > max(starts)


def _over_hosts(trial: Trial) -> None:
    trial.order(0)
    for host in trial.hosts:
        trial.start(host)
    for number, loss in enumerate(trial.plan.losses, 1):
        trial.lose(loss)
        back = trial.bring_back(loss)
        trial.order(number)
        for host in back:
            trial.start(host)
    trial.finish()


def _by_runs(trial: Trial) -> None:
    """Two ``keepstep run``: the first loses a node and ends, the second goes on from storage."""
    storage, (loss,) = trial.folder / "storage", trial.plan.losses
    first = {host.name: trial.start_run(host, 0) for host in trial.hosts}
    trial.lose(loss)
    lost = {trial.hosts[node].name for node in loss.nodes}
    while any(one.poll() is None for name, one in first.items() if name not in lost):
        trial.look()
        time.sleep(0.02)
    trial.codes = {name: one.returncode for name, one in first.items() if name not in lost}
    trial.whole = max(whole_steps(storage), default=-1)
    trial.bring_back(loss)
    for host in trial.hosts:
        trial.start_run(host, 1)
    while not _second_run_got_on(trial):
        trial.look()
        time.sleep(0.05)
    (trial.folder / "end").touch()
    while not all(_last(trial, rank, "ended") for rank in range(trial.plan.world)):
        trial.look()
        time.sleep(0.05)


def _last(trial: Trial, rank: int, what: str) -> Note | None:
    found = [note for note in ledger(trial.folder, rank) if note["what"] == what and note["run"] == 1]
    return found[-1] if found else None


def _second_run_got_on(trial: Trial) -> bool:
    start, saved = _last(trial, 0, "resumed"), _last(trial, 0, "saved")
    return bool(start and saved and saved["step"] >= start["step"] + _LATER_STEPS)


@cache
def warm() -> Warm:
    """What starts the stand-ins."""
    started = Warm()
    atexit.register(started.close)
    return started


def carry_out(plan: Plan, folder: Path) -> Judged:
    """The plan on four new hosts, judged."""
    undisturbed(plan.world, MOST_STEPS)
    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS, 30 * HOURS)) as bed:
        trial = Trial(plan, folder, bed)
        try:
            (_by_runs if plan.storage else _over_hosts)(trial)
            why, measured = judge(trial)
        except (RuntimeError, TimeoutError) as error:
            why, measured = [str(error)], {}
        trial.mend_link()
    if plan.link:
        measured["link"] = trial.link_told
    paths = sorted(folder.glob("console-*"))
    said = "".join(f"{path.name}:\n{path.read_text(errors='replace')[-900:]}" for path in paths)
    return Judged(why, measured, trial.kills, said)


def judge(trial: Trial) -> tuple[list[str], dict[str, Any]]:
    """What is wrong, a line each; and figures. Looks at ledgers, promises and bytes only."""
    why: list[str] = []
    measured: dict[str, Any] = {"resumes": []}
    notes = {rank: ledger(trial.folder, rank) for rank in range(trial.plan.world)}
    runs = {note["run"] for own in notes.values() for note in own}
    last = max(note["incarnation"] for own in notes.values() for note in own)
    if runs == {0, 1}:
        found: dict[str, Any] = {}
        why += went_on(notes, lambda note: note["run"] == 1, trial.whole, found)
        measured["resumes"].append(found)
        why += [f"{name} ended with 0" for name, code in trial.codes.items() if code == 0]
    else:
        for incarnation in range(1, last + 1):
            found = {}
            promised = trial.promises.newest(incarnation)
            wrong = went_on(notes, lambda note, n=incarnation: note["incarnation"] == n, promised, found)
            why += (
                wrong if incarnation == last or found["resumed"] else []
            )  # else lost before it could say so
            measured["resumes"].append(found)
        if not trial.backed_up_again():
            why.append(f"no later step was backed up within {_AGAIN_S:g} s after the return")
    ends = {note["step"] for own in notes.values() for note in own if note["what"] == "ended"}
    if len(ends) != 1:
        why.append(f"the ranks ended at steps {sorted(ends)}")
    why += _told_sources(trial, measured)
    for rank, own in notes.items():
        why += wrong_bytes(rank, own)
    why += other_losses(trial.folder, undisturbed(trial.plan.world, MOST_STEPS), max(ends, default=0))
    return why, measured


def _told_sources(trial: Trial, measured: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the messages of the last restore: rank 0, and who did not have its own, say the source."""
    starts = measured["resumes"][-1]["resumed"]
    said: dict[int, str] = {}
    elsewhere = ""
    for rank in range(trial.plan.world):
        path = trial.folder / f"console-{trial.hosts[0].name if trial.plan.storage else rank}"
        for line in path.read_text(errors="replace").splitlines():
            if (found := _RESUMED.search(line)) and [int(found[2])] == starts:
                said[int(found[1] or 0)] = found[3]
                elsewhere = found[4] or elsewhere
    measured["sources"] = {
        str(rank): source.replace(str(trial.folder), "FOLDER") for rank, source in sorted(said.items())
    }
    if 0 not in said and starts != [0]:
        yield f"no message says where step {starts} came from"
    named = {rank for rank in range(trial.plan.world) if elsewhere and _is_in(rank, elsewhere)}
    for rank in sorted(named - said.keys()):
        yield f"rank {rank} did not say where its state came from"


def _is_in(rank: int, folded: str) -> bool:
    """Whether a rank is in a list like ``0-3,7``."""
    for part in folded.replace(" ", "").split(","):
        low, _, high = part.partition("-")
        if int(low) <= rank <= int(high or low):
            return True
    return False


CAMPAIGN = Campaign(
    "checkpoint_faults.nodes",
    __doc__,
    CASES,
    carry_out,
    lambda: (undisturbed(NODES, MOST_STEPS), warm()),
    "summary-nodes.json",
    "4 namespaces of one machine, 4 or 8 ranks, DDP, Gloo; a stand-in for the launcher but in node-at-persist",
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
