"""Runs one seed of ``why-live``: the failure is prepared, the job run as users run theirs, and deaths are watched."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.campaign.trial import (
    ROOT,
    Live,
    Outcome,
    Plan,
    end,
    end_left_overs,
    json_lines,
    read_incidents,
    start_launcher,
)
from benchmarks.campaign.why_draw import HOSTS, Why, truth_of
from benchmarks.campaign.why_faults import Faults
from benchmarks.campaign.why_processes import MARK, RankProcesses, promptly
from benchmarks.campaign.why_scripts import METRICS, NAME, script

_CLOCKS_S = (0, 5 * 3600)
_AFTER_VERDICT_S = 4.0  # A verdict may be sharpened so long where the job does not end by itself.
_IN_VAIN_S = 25.0  # A job that did not end is asked again after so long.
_LOOK_S = 0.02


def run_why(plan: Plan, why: Why, folder: Path) -> Outcome:
    """The seed's job in ``folder``, from the script to what was told; nothing that it made is left."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        faults = Faults(why, folder, stack)
        faults.before_hosts()
        bed = stack.enter_context(_hosts()) if why.hosts > 1 else None
        faults.on_hosts(bed)
        (folder / NAME).write_text(script(why, str(faults.storage), faults.address, faults.port))
        ranks = RankProcesses(folder, NAME)
        stack.callback(ranks.close)
        return _run(plan, why, folder, faults, ranks, bed, stack)


def _hosts() -> Any:
    from tests.e2e.testbed import four_hosts

    return four_hosts(_CLOCKS_S)


def command(plan: Plan, why: Why, folder: Path, node_rank: int) -> list[str]:
    """``keepstep run`` as it is called on a host."""
    words = ["--nproc-per-node", str(why.per_host), "--run-dir", str(folder / "run"), *plan.flags]
    if why.hosts > 1:
        port = 20000 + random.Random(str(folder)).randrange(9000)
        words += ["--nnodes", str(why.hosts), "--node-rank", str(node_rank), "--rdzv-id", "campaign"]
        words += ["--master-addr", HOSTS[0], "--master-port", str(port)]
    return [sys.executable, "-m", "keepstep.cli", "run", *words, str(folder / NAME)]


def _run(
    plan: Plan, why: Why, folder: Path, faults: Faults, ranks: RankProcesses, bed: Any, stack: ExitStack
) -> Outcome:
    began = time.monotonic()
    launchers: list[subprocess.Popen[bytes]] = []
    stack.callback(end_left_overs, folder / "run")
    stack.callback(end, launchers)
    for node_rank, host in enumerate(HOSTS[: why.hosts]):
        env = {**os.environ, MARK: str(folder), **faults.environment(host)}
        words = command(plan, why, folder, node_rank)
        if bed is not None:
            env["GLOO_SOCKET_IFNAME"] = "eth0"
            words = bed.hosts[host].command(words)
        log = stack.enter_context((folder / f"console-{node_rank}.txt").open("wb"))
        launchers.append(start_launcher(words, env, log))
    live = Live(folder, launchers)
    with promptly():
        timed_out = _watch(plan, why, live, faults, ranks, began)
    wall_s = round(time.monotonic() - began, 1)
    if faults.line:
        with (folder / "console-0.txt").open("a") as log:
            log.write(faults.line)
    (folder / "truth.json").write_text(json.dumps({**asdict(why), **asdict(truth_of(why))}, indent=1))
    consoles = [path.read_text(errors="replace") for path in sorted(folder.glob("console-*.txt"))]
    return Outcome(
        exit_code=next((one.returncode for one in launchers if one.returncode), 0),
        wall_s=wall_s,
        timed_out=timed_out,
        incidents=read_incidents(live.run),
        script={},
        lives={},
        watched={},
        ends={},
        faults=[],
        left_over=end_left_overs(live.run),
        notes={
            "failed_s": _failed_s(why, folder, faults, ranks.died),
            "died": [list(one) for one in ranks.died],
            "restarts": _restarts(live.run),
            "commit": _commit(),
        },
        console="\n".join(text[-8000:] for text in consoles),
    )


def _watch(plan: Plan, why: Why, live: Live, faults: Faults, ranks: RankProcesses, began: float) -> bool:
    """Do what is due and wait for the end; True when the job had to be ended because it did not end in its time."""
    ends_at = due_at = math.inf
    timed_out = False
    while any(launcher.poll() is None for launcher in live.launchers):
        now = time.monotonic()
        ranks.look()
        step = _steps(live.folder, why.rank) - 1
        faults.advance(step, ranks)
        if why.rules.lasts_s and due_at is math.inf and step >= why.step - 1:
            due_at = now + why.rules.lasts_s
        if due_at < math.inf and ends_at is math.inf and _has_verdict(live.run):
            ends_at = now + _AFTER_VERDICT_S
        if now > min(ends_at, due_at):
            live.interrupt()
            ends_at = due_at = now + _IN_VAIN_S
        if now > began + plan.timeout_s:
            timed_out = True
            ends_at = min(ends_at, now)  # on hosts, what was started here is not the launcher itself
        if now > began + plan.timeout_s + _IN_VAIN_S:
            end(live.launchers)
        time.sleep(_LOOK_S)
    return timed_out


def _has_verdict(run: Path) -> bool:
    return any(event["what"] == "verdict" for one in read_incidents(run) for event in one["events"])


def _steps(folder: Path, rank: int) -> int:
    """Steps that the rank has made."""
    try:
        return (folder / METRICS.format(rank=rank)).read_bytes().count(b"\n")
    except OSError:
        return 0


def _failed_s(why: Why, folder: Path, faults: Faults, died: Sequence[tuple[int, float]]) -> float | None:
    """When the faulty process ended; where nothing has to end, when the fault was there."""
    if why.rules.lasts_s:
        steps = json_lines(folder / METRICS.format(rank=why.rank))
        return max(faults.began_s, steps[-1]["unix_s"]) if steps else None
    erring = truth_of(why).erring
    return min((at for rank, at in died if rank in erring), default=min((at for _, at in died), default=None))


def _restarts(run: Path) -> int | None:
    """How often all began again; None where it is not told."""
    with suppress(OSError, ValueError):
        return json.loads((run / "status.json").read_text())["restarts"]
    return None


def _commit() -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip()
