"""What `keepstep slurm` has Slurm do about a bad node: drain it, start the job elsewhere, say why.

By default it only says what would be done. Each order is one call of scontrol, without a shell, given up after a while.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from keepstep.core.log_lines import one_line
from keepstep.core.own_folders import real_path, write_whole
from keepstep.core.regular_files import read_regular
from keepstep.detect.secrets import blanked
from keepstep.launch.fault_news import FaultNews
from keepstep.launch.schedulers.node_faults import DrainBudget, NodeFault
from keepstep.report.ended_run import End, verdict_line

DRAINS = "drains.json"
"""In the run's folder: when nodes were drained. A later start of the job finds it, as no run moves it aside."""
DRAIN = ("scontrol", "update", "NodeName={node}", "State=DRAIN", "Reason={reason}")
NodeRemedy = Literal["off", "advise", "auto"]
_LOOK_S = 0.5
_COMMAND_S = 10.0
_REACH_S = 1.0
_TRIES = 3  # how often a lost node is tried to be reached, and how many others to compare
_SLURMD_PORT = 6818
_RUNS = re.compile(r"\bJobState=RUNNING\b")
_STATE = re.compile(r"\bState=(\S+)")
"""The first match is the node's state; others may be words of a reason."""
_REASON = re.compile(r"^\s*Reason=(.*?)(?:\s*\[[^\[\]]*\])?\s*$", re.MULTILINE)
"""The reason of a node's state, without who gave it and when."""
_SLURMS_OWN = frozenset({"", "none", "Not responding"})
"""Reasons that nobody gave: Slurm does not hear the node."""
_COMMENT = re.compile(r"^\s*Comment=(.*)$", re.MULTILINE)
_OWN_COMMENT = re.compile(r"(?:^|; )\[(?:node_problem\] keepstep|keepstep\]) .*")
_MOST_COMMENT = 200  # characters
_MOST_BYTES = 1 << 20
_AGAIN_S = 15.0  # until Slurm is asked again about a node of which it has told nothing
_PROVEN_S = 60.0  # for so long a node's daemon that is away shows that the node was lost
_START = "StartTime=now+15seconds"
"""When a requeued job may start.

A time that has come by the time all its steps have ended is put off by Slurm, by two minutes where nothing is set.
"""
_AWAY_S = 60.0  # how long slurmctld may be away when a job is to be requeued


class SlurmOrders:
    """Watches a run's incidents in its folder, and orders what they call for."""

    def __init__(
        self,
        job: str,
        nodes: Sequence[str],
        folder: Path,
        remedy: NodeRemedy,
        say: Callable[[str], None],
        drain: Sequence[str] = DRAIN,
    ) -> None:
        """
        Args:
            job: the job as Slurm's commands are told it, which has these nodes.
            folder: the run's folder.
            remedy: whether faults are looked for, said, or acted upon.
            say: tells the user one line.
            drain: the command that drains a node; ``{node}`` and ``{reason}`` stand for what they say.
        """
        self._drain = tuple(drain)
        self._job, self._nodes, self._remedy, self._say = job, list(nodes), remedy, say
        self._kept = folder / DRAINS
        self._budget = DrainBudget(len(nodes), self._earlier_drains() if remedy == "auto" else ())
        self._news = FaultNews(folder, nodes, self._budget.most, heeds_incidents=remedy != "off")
        self._heard_s: dict[NodeFault, float] = {}  # all faults, by when they were first heard of
        self._waiting: list[NodeFault] = []  # those of nodes whose state Slurm has not told yet
        self._again_s = 0.0  # when Slurm is asked about these
        self._done: set[str] = set()  # nodes about which something was done or said
        self._drained: list[str] = []  # nodes that Slurm may have back once nothing of the job runs there
        self.left: set[str] = set()  # nodes on which the job's launcher has ended for good
        self.bad: list[str] = []  # nodes that the job should not be started on again

    def possible(self, *, requeues: bool) -> list[str]:
        """The orders that may be given, a line each; braces stand around what is not known before."""
        job = f"scontrol update JobId={self._job}"
        again = f"scontrol requeue {self._job}; {job} ExcNodeList={{bad nodes}} {_START}"
        return [
            f"a bad node, with --node-remedy=auto, or one drained by hand: {shlex.join(self._drain)}",
            f"a drained node, once nothing of the job runs there: {job} NodeList={{other nodes}}",
            f"a bad node, or a job that fails: {job} Comment={{verdict}}",
            *([f"a job that ends with 75: {again}"] if requeues else []),
        ]

    async def watch(self, has_ended: Callable[[], bool]) -> None:
        """Look for faults until the job has ended, and once more then."""
        while not has_ended():
            await self.look()
            await asyncio.sleep(_LOOK_S)
        self._again_s = 0.0
        await self.look()

    async def look(self) -> None:
        """Look for new faults once, and do what is to be done about them."""
        again = self._waiting if time.monotonic() >= self._again_s else ()
        for fault in (*again, *self._news.read()):
            if fault.kind == "told" or (fault.node not in self._done and self._is_fresh(fault)):
                await self._handle(fault)
        for node in [one for one in self._drained if one in self.left]:
            await self._give_back(node)

    def _is_fresh(self, fault: NodeFault) -> bool:
        """Whether Slurm's own view of a node may still prove this fault: a later restart of slurmd proves nothing."""
        now_s = time.monotonic()
        return fault.kind != "lost" or now_s - self._heard_s.setdefault(fault, now_s) < _PROVEN_S

    async def _give_back(self, node: str) -> None:
        """Have the job end on a drained node on which nothing of it runs: it may be repaired and costs nothing then."""
        words = ("--noheader", f"--jobs={self._job}", "--steps", f"--nodelist={node}", "--format=%i")
        steps = (await output_of("squeue", *words)).split()
        if any(not one.endswith((".batch", ".extern")) for one in steps):
            return  # somebody has started one there by hand, which would be ended
        self._drained.remove(node)
        rest = [one for one in self._nodes if one != node]
        with tempfile.TemporaryDirectory(
            prefix="keepstep-"
        ) as folder:  # scontrol writes two scripts where it is
            order = ("scontrol", "update", f"JobId={self._job}", f"NodeList={','.join(rest)}")
            refused = (await _run(*order, cwd=folder))[1]
        if refused:
            self._say(f"{node} stays in the job, as Slurm does not take it back: {refused}")
        else:
            self._nodes = rest
            self._say(f"{node} is given back to Slurm: nothing of the job runs there")

    async def tell_end(self, end: End) -> None:
        """Have the job's comment say how it ended, unless it finished."""
        if self._remedy == "off" or not end.exit_code:
            return
        why = (verdict_line(self._kept.parent, end.incident) if end.incident else "") or end.reason
        incident = f"incident={end.incident} " if end.incident else ""
        said = f"[keepstep] run={self._job} exit={end.exit_code} ({end.category}) {incident}{blanked(why)}"
        await self._comment(one_line(said).replace('"', "'")[:_MOST_COMMENT])

    async def _comment(self, text: str) -> None:
        """Set the job's comment. What somebody else has written there stays in front, what we have said before goes."""
        shown, silent = await _run("scontrol", "show", "job", self._job)
        if silent is not None:
            return
        found = _COMMENT.search(shown)
        theirs = _OWN_COMMENT.sub("", found[1].strip()) if found else ""
        whole = f"{theirs}; {text}" if theirs not in ("", "(null)") else text
        await _scontrol("update", f"JobId={self._job}", f"Comment={whole}")

    def _earlier_drains(self) -> list[float]:
        """When earlier starts of the job have drained nodes (Unix seconds)."""
        try:
            found = json.loads(read_regular(self._kept, _MOST_BYTES))["drained_unix_s"]
            return [min(float(one), time.time()) for one in found]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or "is not of keepstep's form"
            self._say(f"{self._kept}: {why}: what earlier starts of the job have drained is not counted")
            return []

    def _keep_drains(self) -> None:
        kept = {"drained_unix_s": self._budget.taken_s}
        try:
            write_whole(real_path(self._kept.parent) / DRAINS, f"{json.dumps(kept)}\n".encode())
        except OSError as error:
            self._say(
                f"{self._kept} cannot be written ({error.strerror or error}): a later start will not count this drain"
            )

    async def requeue(self) -> bool:
        """Have Slurm start the job again, on other nodes than the bad ones; whether it takes that.

        One that Slurm is ending already, as it was cancelled, stays ended.
        """
        asking = ("scontrol", "show", "job", self._job)
        until_s = time.monotonic() + _AWAY_S
        while (told := await _run(*asking))[1] is not None and time.monotonic() < until_s:
            await asyncio.sleep(0.5)
        if told[1] is not None:
            self._say(
                f"`{' '.join(asking)}` fails ({told[1]}): the job is not requeued; "
                f"say `scontrol requeue {self._job}` once Slurm answers"
            )
            return False
        if not _RUNS.search(told[0]):
            self._say("the job is not requeued: it was cancelled, or Slurm has ended it")
            return False
        job = f"JobId={self._job}"
        elsewhere = [f"ExcNodeList={','.join(self.bad)}"] if self.bad else []
        # Slurm ends this process, too, some seconds after the first order.
        for order in (("requeue", self._job), ("update", job, *elsewhere, _START)):
            if (refused := await self._patiently(*order)) is not None:
                self._say(f"Slurm refuses `scontrol {' '.join(order)}`: {refused}")
                if order[0] == "requeue":
                    return False
        return True

    async def _patiently(self, *order: str) -> str | None:
        """Give an order about a job that is being requeued, which Slurm refuses until its steps have ended."""
        until_s = time.monotonic() + _COMMAND_S
        while (refused := await _scontrol(*order)) is not None and time.monotonic() < until_s:
            await asyncio.sleep(0.5)
        return refused

    async def _handle(self, fault: NodeFault) -> None:
        shown, silent = await _run("scontrol", "show", "node", fault.node)
        if silent is not None:
            self._ask_later(fault, silent)
            return
        if fault in self._waiting:
            self._waiting.remove(fault)
        if fault.kind == "lost" and not (
            await is_unreachable(shown) and await self._reaches_another(fault.node)
        ):
            return
        self._done.add(fault.node)
        if fault.node not in self.bad:
            self.bad.append(fault.node)
        reason = fault.reason(self._job)
        drain = [one.replace("{node}", fault.node).replace("{reason}", reason) for one in self._drain]
        if _is_somebody_elses(shown):
            self._say(f"{fault.node} is drained or down already; {reason}")
        elif self._remedy == "advise" and fault.kind != "told":
            self._say(f"{fault.node} should be drained: {reason} (--node-remedy=auto does it)")
        elif fault.kind != "told" and not self._may_drain():
            self._say(f"{fault.node} is left as it is, as other nodes were drained within the hour: {reason}")
        elif refused := (await _run(*drain))[1]:
            self._say(f"Slurm does not drain {fault.node} ({refused}): tell who runs the cluster; {reason}")
        else:
            self._say(f"drained {fault.node}: {reason}")
            self._drained += (
                [fault.node] if fault.node != self._nodes[0] else []
            )  # the first has the batch script
        await self._comment(reason)

    def _may_drain(self) -> bool:
        """Whether one more node may be drained; it counts then, also for later starts of the job."""
        if not self._budget.take(time.time()):
            return False
        self._keep_drains()
        return True

    def _ask_later(self, fault: NodeFault, why: str) -> None:
        """Note a fault about which nothing can be done yet, as Slurm does not answer; say so once."""
        if fault not in self._waiting:
            self._waiting.append(fault)
            self._say(
                f"`scontrol show node {fault.node}` fails ({why}): "
                f"the node is left as it is until it answers; {fault.reason(self._job)}"
            )
        self._again_s = time.monotonic() + _AGAIN_S
        if fault.kind != "lost" and fault.node not in self.bad:
            self.bad.append(fault.node)

    async def _reaches_another(self, lost: str) -> bool:
        """Whether this host reaches another node of the job, as a firewall may keep it from all.

        The last ones are tried, as the batch host is the first and always reaches itself.
        """
        for node in [one for one in reversed(self._nodes) if one not in (lost, *self.bad)][:_TRIES]:
            shown = await output_of("scontrol", "show", "node", node)
            if shown and not await is_unreachable(shown):
                return True
        return False


def _is_somebody_elses(shown: str) -> bool:
    """Whether a node is drained, or down for a reason that somebody gave. ``shown``: as `is_unreachable` has it.

    A node that is only down comes back to other jobs once it answers (ReturnToService of slurm.conf).
    """
    state = _STATE.search(shown)
    words: list[str] = re.findall(r"[A-Z_]+", state[1]) if state else []
    if not words or any(one.startswith("DRAIN") for one in words):
        return True
    reason = _REASON.search(shown)
    return "DOWN" in words and reason is not None and reason[1] not in _SLURMS_OWN


async def is_unreachable(shown: str) -> bool:
    """Whether a node's daemon of Slurm's cannot be reached. ``shown``: what ``scontrol show node`` says."""
    address = re.search(r"\bNodeAddr=(\S+)", shown)
    port = re.search(r"\bPort=(\d+)", shown)
    if address is None:
        return False
    for _ in range(_TRIES):
        opening = asyncio.open_connection(address[1], int(port[1]) if port else _SLURMD_PORT)
        try:
            _, writer = await asyncio.wait_for(opening, _REACH_S)
        except (OSError, asyncio.TimeoutError):
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return False
    return True


async def _scontrol(*order: str) -> str | None:
    """Give an order; why Slurm refuses it, None where it does not."""
    return (await _run("scontrol", *order))[1]


async def output_of(*command: str) -> str:
    """What a program of Slurm's prints; empty where it is not there, fails, or takes too long."""
    return (await _run(*command))[0]


async def _run(*command: str, cwd: str | None = None) -> tuple[str, str | None]:
    """What a program of Slurm's prints, and why it failed; None where it did not."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            cwd=cwd,
            # Its children end with it where it is given up, and a terminal's Ctrl-C ends neither.
            start_new_session=True,
        )
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    reading = asyncio.ensure_future(process.communicate())
    await asyncio.wait([reading], timeout=_COMMAND_S)
    if not reading.done():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await reading
        return "", f"no answer for {_COMMAND_S:.0f} s"
    out, err = (text.decode(errors="replace") for text in await reading)
    if process.returncode == 0:
        return out, None
    last = ["", *err.strip().splitlines()][-1]  # lines before it tell of what failed on the way
    return "", one_line(last) or f"exit code {process.returncode}"
