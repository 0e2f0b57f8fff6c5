"""Runs one real job of a fault campaign and gathers what keepstep wrote about it.

What was injected, and when, stays outside of the run's folder: in the plan and in the fault log beside it.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from benchmarks.campaign.why_draw import Why

ROOT = Path(__file__).resolve().parents[2]
_NODE_RANK = "<node rank>"  # in the command that all hosts share


@dataclass(frozen=True)
class StandIn:
    """The stand-in GPU that a job runs on, as ``benchmarks.stand_in.launch.environment`` makes it."""

    faults: Sequence[Any]  # benchmarks.stand_in.faults.Fault
    clock: Literal["real", "virtual"]
    kernel_us: float
    values: bool
    settings: Mapping[str, str]
    nodes: int  # on this machine, each with its own name and agent
    with_ports: bool = (
        False  # nodes have ports of InfiniBand, which count what the only fault does to its pair
    )


@dataclass(frozen=True)
class Plan:
    """One seed of one case: what to run and what is then true."""

    arguments: Sequence[str]  # of the script, without --fault and --step-times; {folder}: that of the trial
    truth: Mapping[str, Any] = field(
        default_factory=dict
    )  # rank, onset, relief, ... as the case's judge needs it
    fault: str = ""
    nproc: int = 4
    script: str = "examples/gpt/train.py"  # below the repository's root
    flags: Sequence[str] = ()  # of ``keepstep run``
    stop: tuple[int, int, float] | None = (
        None  # rank, step, seconds: stopped there for so long, then it goes on
    )
    timeout_s: float = 150.0
    end_on: str = ""  # the job is ended (SIGTERM) after an incident of this kind, or of one of "KIND or KIND"
    end_when_named: bool = False  # only after an incident that names somebody
    end_after_s: float = 2.0
    end_after_truth_s: float = 0.0  # the job is ended so long after it told its truth; 0: it ends by itself
    kill: str = ""  # "agent" or "controller": killed at step truth["kill_step"]
    slow_link: tuple[str, str, str] | None = None  # host, host, rate: on the namespace testbed
    cut_path: tuple[str, str] | None = None  # host, host: there nothing passes from truth["onset"] on
    stand_in: StandIn | None = None  # the script is one for the stand-in GPU; ``nproc``: ranks a node
    why: Why | None = None  # a failure that the driver prepares, in a script of its own; ``nproc``: all ranks

    @property
    def on_hosts(self) -> bool:
        """Whether it runs on the testbed's four hosts."""
        return self.slow_link is not None or self.cut_path is not None


@dataclass
class Outcome:
    """What happened, and what keepstep made of it."""

    exit_code: int
    wall_s: float
    timed_out: bool
    incidents: list[dict[str, Any]]
    script: dict[int, list[float]]  # rank to the script's own step times
    lives: dict[int, list[str]]  # rank to what it noted of its beginning and end, where the script does
    watched: dict[int, dict[int, float]]  # rank to {step: keepstep's iteration time}
    ends: dict[int, float]  # step to the Unix time when its last rank had finished it, by keepstep
    faults: list[dict[str, Any]]  # what the injector did
    left_over: list[str]  # processes that outlived the launcher
    notes: dict[str, Any]
    console: str
    truths: list[dict[str, Any]] = field(default_factory=list)  # what the job itself told of what it did


class Live:
    """The run while it runs: where it stands, and ways to disturb it."""

    def __init__(self, folder: Path, launchers: Sequence[subprocess.Popen[bytes]]) -> None:
        self.run, self.folder, self.launchers = folder / "run", folder, launchers
        self.notes: dict[str, Any] = {}

    def steps(self) -> int:
        """Steps that rank 0 has finished, by its own clock."""
        with suppress(OSError):
            return (self.folder / "steps-0.jsonl").read_bytes().count(b"\n")
        return 0

    def incidents(self, kind: str, named: bool = False) -> bool:
        """Whether there is an incident of this kind, or of "KIND or KIND"; who was accused meanwhile is noted.

        ``named``: whether only those count that name somebody.
        """
        found = [
            incident for incident in read_incidents(self.run) if incident.get("kind") in kind.split(" or ")
        ]
        accused: list[Any] = self.notes.setdefault("accused", [])
        for incident in found:
            if incident["culprits"] and (not accused or accused[-1]["culprits"] != incident["culprits"]):
                accused.append({"unix_s": time.time(), "culprits": incident["culprits"]})
        return any(incident["culprits"] or not named for incident in found)

    def companion(self, program: str) -> int:
        """The process number of this run's agent or controller; 0 when there is none."""
        for pid, line in processes_of(self.run).items():
            if f"keepstep.{program}" in line:
                return pid
        return 0

    def kill(self, program: str) -> None:
        pid = self.companion(program)
        if pid:
            os.kill(pid, signal.SIGKILL)
        self.notes["killed"] = pid

    def stop(self, rank: int, step: int, seconds: float) -> None:
        """Stop a rank for some seconds once it has made this step; it waits until then."""
        lives = lives_in(self.folder).get(rank)
        if not lives or self.steps() <= step:
            return
        pid = int(lives[-1].split()[1])
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        self.notes["stopped"] = pid

    def look_at_lives(self) -> None:
        """Note when each process that a rank has told of was gone."""
        gone: dict[int, float] = self.notes.setdefault("gone", {})
        for lives in lives_in(self.folder).values():
            for line in lives:
                word, pid = line.split()
                if word == "began" and int(pid) not in gone and not _lives(int(pid)):
                    gone[int(pid)] = time.time()

    def interrupt(self) -> None:
        for pid, line in processes_of(self.run).items():
            if "keepstep.cli run" in line and not line.startswith("nsenter"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)


def read_incidents(run: Path) -> list[dict[str, Any]]:
    """All incidents of a run, in their order; one that is just being written is left out."""
    found: list[dict[str, Any]] = []
    for path in sorted((run / "incidents").glob("[0-9]*.json")):
        with suppress(OSError, json.JSONDecodeError):
            found.append(json.loads(path.read_text()))
    return found


def _lives(pid: int) -> bool:
    """Whether the process is there, and no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def processes_of(run: Path) -> dict[int, str]:
    """Processes that name the run's folder in their command line or environment, zombies left out."""
    wanted = str(run).encode()
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with suppress(OSError):
            line = (folder / "cmdline").read_bytes()
            if line and (wanted in line or wanted in (folder / "environ").read_bytes()):
                found[int(folder.name)] = line.replace(b"\0", b" ").decode(errors="replace")
    return found


def run_trial(plan: Plan, folder: Path) -> Outcome:
    """Run the plan's job in ``folder`` (its run folder is ``folder/run``) to its end and gather the outcome."""
    if plan.stand_in is not None:
        return _run_on_stand_in(plan, plan.stand_in, folder)
    if not plan.on_hosts:
        return _run(plan, folder, lambda command, env, log: [start_launcher(command, env, log)])
    from tests.e2e.testbed import four_hosts

    with four_hosts(rate=str(plan.truth["healthy_rate"])) as bed:

        def start(command: list[str], env: dict[str, str], log: Any) -> list[subprocess.Popen[bytes]]:
            env["GLOO_SOCKET_IFNAME"] = "eth0"
            # The ranks lie on the hosts in order: the plan knows which pairs of hosts carry traffic.
            commands = (
                [str(place) if word == _NODE_RANK else word for word in command]
                for place in range(len(bed.hosts))
            )
            return [
                start_launcher(each.command(own), env, log)
                for each, own in zip(bed.hosts.values(), commands, strict=True)
            ]

        from keepstep.faults import SlowLink

        if plan.cut_path is not None:
            return _run(plan, folder, start, bed.cut(*plan.cut_path))
        assert plan.slow_link is not None
        return _run(plan, folder, start, bed.links.inject(SlowLink(*plan.slow_link)))


def _run_on_stand_in(plan: Plan, device: StandIn, folder: Path) -> Outcome:
    from benchmarks.stand_in.launch import PYTHON, VENV, environment, read_log
    from benchmarks.stand_in.ports import PairPorts

    ranks = plan.nproc * device.nodes
    ports: PairPorts | None = None
    if device.with_ports:
        ends = device.faults[0].rank, device.faults[0].peer
        ports = PairPorts(folder, device.nodes, ranks, ends)

    def start(command: list[str], env: dict[str, str], log: Any) -> list[subprocess.Popen[bytes]]:
        made = environment(
            folder,
            faults=device.faults,
            clock=device.clock,
            kernel_us=device.kernel_us,
            values=device.values,
            settings={"STAND_IN_NOTES": str(folder), "NCCL_RAS_ENABLE": "0", **device.settings},
        )
        started: list[subprocess.Popen[bytes]] = []
        for number in range(device.nodes):
            words = [str(PYTHON), *(str(number) if word == _NODE_RANK else word for word in command[1:])]
            name = {"KEEPSTEP_NODE_NAME": f"node-{number}"} if device.nodes > 1 else {}
            words = words if ports is None else ports.command(number, words)
            started.append(start_launcher(words, {**env, **made, **name}, log))
        return started

    outcome = _run(plan, folder, start, ports=ports)
    marks = [read_log(folder / "devices" / f"rank-{rank}").periods_ns() for rank in range(ranks)]
    outcome.notes["periods_ns"] = marks
    outcome.console = outcome.console.replace(f"{VENV}/", "")
    return outcome


def start_launcher(command: Sequence[str], env: Mapping[str, str], log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _command(plan: Plan, folder: Path) -> list[str]:
    where = ["--nproc-per-node", str(plan.nproc), "--run-dir", str(folder / "run"), *plan.flags]
    nodes = 4 if plan.on_hosts else plan.stand_in.nodes if plan.stand_in is not None else 1
    if nodes > 1:
        port, address = (
            20000 + random.Random(str(folder)).randrange(9000),
            "node-a" if plan.on_hosts else "127.0.0.1",
        )
        where += ["--nnodes", str(nodes), "--node-rank", _NODE_RANK]
        where += ["--master-addr", address, "--master-port", str(port), "--rdzv-id", "campaign"]
    arguments = [word.replace("{folder}", str(folder)) for word in plan.arguments]
    script = [str(ROOT / plan.script), *arguments]
    if plan.stand_in is None:
        script += ["--step-times", str(folder / "steps-{rank}.jsonl")]
    if plan.fault:
        script += ["--fault", plan.fault]
    return [sys.executable, "-m", "keepstep.cli", "run", *where, *script]


def _run(
    plan: Plan,
    folder: Path,
    start: Callable[..., list[subprocess.Popen[bytes]]],
    disturbance: Any = None,
    ports: Any = None,
) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "KEEPSTEP_FAULT_LOG": str(folder / "faults.jsonl"), "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = str(ROOT)  # jobs are started by their path
    began = time.monotonic()
    with open(folder / "console.txt", "wb") as log:
        launchers = start(_command(plan, folder), env, log)
        live = Live(folder, launchers)
        timed_out = _watch(plan, live, began + plan.timeout_s, disturbance, ports)
    wall_s = time.monotonic() - began
    left_over = end_left_overs(live.run)
    codes = [launcher.returncode for launcher in launchers]
    return Outcome(
        exit_code=next((code for code in codes if code), 0),
        wall_s=round(wall_s, 1),
        timed_out=timed_out,
        incidents=read_incidents(live.run),
        script=_script_times(folder),
        lives=lives_in(folder),
        **_watched(live.run),
        faults=json_lines(folder / "faults.jsonl"),
        left_over=left_over,
        notes=live.notes,
        console=(folder / "console.txt").read_text(errors="replace")[-4000:],
        truths=truths_in(folder),
    )


def _watch(plan: Plan, live: Live, deadline: float, disturbance: Any, ports: Any) -> bool:
    """Disturb the run as planned and wait for its end; True when it had to be ended."""
    interrupt_at = math.inf
    told = true = False  # two events: the incident that is waited for, and the truth
    while any(launcher.poll() is None for launcher in live.launchers):
        now = time.monotonic()
        if plan.kill and "killed" not in live.notes and live.steps() >= plan.truth["kill_step"]:
            live.kill(plan.kill)
        if "killed" in live.notes and not live.notes.get("successor"):
            found = live.companion(plan.kill)
            live.notes["successor"] = found if found != live.notes["killed"] else 0
        if disturbance is not None:
            _disturb_as_planned(plan, live, disturbance)
        if plan.stop and "stopped" not in live.notes:
            live.stop(*plan.stop)
        live.look_at_lives()
        if ports is not None:
            ports.advance(now)
        if plan.end_on and not told and live.incidents(plan.end_on, plan.end_when_named):
            told, interrupt_at = True, min(interrupt_at, now + plan.end_after_s)
        if plan.end_after_truth_s and not true and truths_in(live.folder):
            true, interrupt_at = True, min(interrupt_at, now + plan.end_after_truth_s)
        if now > interrupt_at:
            live.interrupt()
            interrupt_at = now + 15
        if now > deadline:
            end(live.launchers)
            return True
        time.sleep(0.05)
    live.look_at_lives()
    return False


def _disturb_as_planned(plan: Plan, live: Live, disturbance: Any) -> None:
    steps = live.steps()
    if "onset" not in live.notes and steps >= plan.truth["onset"]:
        live.notes["onset_unix_s"] = time.time()
        disturbance.__enter__()
        live.notes["onset"] = live.steps()
    elif "onset" in live.notes and "relief" not in live.notes and steps >= plan.truth.get("relief", math.inf):
        disturbance.__exit__(None, None, None)
        live.notes["relief"] = live.steps()


def end(launchers: Sequence[subprocess.Popen[bytes]]) -> None:
    for number, seconds in ((signal.SIGINT, 10), (signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            for launcher in launchers:
                launcher.wait(seconds)
            return


def end_left_overs(run: Path) -> list[str]:
    """Processes that are still there 2 s after their launcher; they are named, then killed."""
    for _ in range(20):
        found = processes_of(run)
        if not found:
            return []
        time.sleep(0.1)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [line[:200] for line in found.values()]


def json_lines(path: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    with suppress(OSError):
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
    return lines


def lives_in(folder: Path) -> dict[int, list[str]]:
    """What each rank of a job has noted of its lives: ``began PID``, ``done PID``."""
    return {int(path.name.split("-")[1]): path.read_text().splitlines() for path in folder.glob("lives-*")}


def truths_in(folder: Path) -> list[dict[str, Any]]:
    """What each rank of a job has told, when it did it, of what it did wrong."""
    return [line for path in sorted(folder.glob("truth-*.jsonl")) for line in json_lines(path)]


def _script_times(folder: Path) -> dict[int, list[float]]:
    return {
        int(path.stem.split("-")[1]): [line["seconds"] for line in json_lines(path)]
        for path in sorted(folder.glob("steps-*.jsonl"))
    }


def _watched(run: Path) -> dict[str, Any]:
    watched: dict[int, dict[int, float]] = {}
    ends: dict[int, float] = {}
    for path in sorted(run.glob("nodes/*/iterations*.jsonl")):
        for line in json_lines(path):
            step = int(line["step"])
            for rank, cells in line["ranks"].items():
                watched.setdefault(int(rank), {})[step] = float(cells["d"])
                end = float(cells["t"]) + float(cells["d"]) + cells.get("eval", 0.0) + cells.get("ckpt", 0.0)
                ends[step] = max(ends.get(step, 0.0), end)
    return {"watched": watched, "ends": ends}
