"""Folders of runs that never were: a stand-in for real ones, for tests, pictures and figures of what viewers cost.

    python -m benchmarks.operate.fake_runs DIR --kind slow [--ranks 64 --steps 400 --live 60]

Files are written by keepstep's own types; their times are drawn, and the incidents are made up after real ones. With
``--live S`` the run goes on for S seconds, a step each second or ``--every`` so many.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np

from keepstep.control.run_status import BackupStatus, NodeStatus, Status
from keepstep.core.events import Phase
from keepstep.core.incident import Action, Culprit, Event, Incident, Link, Recovery
from keepstep.core.layout import ParallelLayout
from keepstep.core.process_mark import process_mark
from keepstep.report.incidents import incident_to_json
from keepstep.report.verdict import render
from keepstep.traces.runs import RANKS_FILE
from keepstep.wire.messages import PathRate, RankBeat

Kind = Literal["healthy", "slow", "hang", "recovered", "exchange", "ended", "failed", "silent"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_ITERATION_S, _SLOW = 0.6, 1.8
_AGES = {"silent": 600.0, "ended": 3600.0, "failed": 3600.0}  # seconds since the last news
_FEW_NODES = 1024  # with more nodes rows of ranks are in a file of their own
_PHASES = (
    ("ended", 0.07), ("standbys", 0.02), ("rendezvous", 0.05), ("state", 0.09), ("first step", 0.06),
)  # fmt: skip


@dataclass(slots=True)
class FakeRun:
    """A run of ``ranks`` ranks in ``folder``, which `go_on` makes longer.

    ``kind``: what happens to it, at two thirds of the first ``steps`` steps. ``now``: Unix seconds of its newest step.
    """

    folder: Path
    kind: Kind = "healthy"
    ranks: int = 8
    steps: int = 120
    per_node: int = 8
    layout: str = ""
    seed: int = 0
    now: float = 0.0
    step: int = 0  # steps so far
    incarnation: int = 0
    incidents: list[Incident] = field(default_factory=list[Incident])
    _rng: np.random.Generator = field(init=False)
    _base: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.now = self.now or time.time() - _AGES.get(self.kind, 0.0)
        self._rng = np.random.default_rng(self.seed)
        stage = ParallelLayout.declared(self.layout).all_coordinates()["pp"] if self.layout else 0
        spread = 1 + 0.03 * self._rng.random(self.ranks)
        self._base = _ITERATION_S * (0.72 + 0.02 * np.asarray(stage) % 0.2) * spread
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "incidents").mkdir(exist_ok=True)
        for node in range(self.nodes):
            (self.folder / "nodes" / str(node)).mkdir(parents=True, exist_ok=True)
        began = self.now - self.steps * _ITERATION_S * 1.2
        self._write(
            "run.json",
            {
                "id": self.folder.name, "run_id": "fake", "argv": ["train.py"], "script": "train.py",
                "nodes": self.nodes, "nproc": self.per_node, "world_size": self.ranks, "started_unix_s": began,
                "version": "0", "controller": None, "host": os.uname().nodename,
                "launcher": process_mark(os.getpid()), "rings": {},
                **({"layout": self.layout} if self.layout else {}),
            },
        )  # fmt: skip

    @property
    def nodes(self) -> int:
        """How many nodes it has."""
        return math.ceil(self.ranks / self.per_node)

    @property
    def onset(self) -> int:
        """The step at which it happens."""
        return self.steps * 2 // 3

    @property
    def culprit(self) -> int:
        """The rank that is to blame."""
        return self.ranks * 3 // 8

    def make(self) -> FakeRun:
        """Write the run up to its ``steps`` steps, its incident, its status, and its end where it has one."""
        if self.kind == "recovered":
            self.write_steps(0, self.onset + 3)
            self.incarnation = 1
            self.write_steps(self.onset, self.steps)
        else:
            last = self.onset if self.kind == "hang" else self.steps
            self.write_steps(0, last)
        found = incident_of(self)
        if found is not None:
            self.add_incident(found)
        self.write_status()
        if self.nodes <= _FEW_NODES:
            self.write_links()
        if self.kind in ("ended", "failed"):
            code = int(self.kind == "failed")
            self._write(
                "end.json",
                {
                    "exit_code": code, "category": "failed" if code else "ok", "nodes": [], "incident": "0001" * code,
                    "reason": "rank 3 failed: CUDA error" if code else "all workers have finished",
                    "ended_unix_s": self.now,
                },
            )  # fmt: skip
        return self

    def go_on(self, steps: int = 1) -> None:
        """Train on: more iterations, a new status. A hang stays where it is."""
        self.now += steps * _ITERATION_S
        if self.kind != "hang":
            self.write_steps(self.step, self.step + steps)
        self.write_status()

    def own_s(self, step: int) -> np.ndarray:
        """Own times of all ranks in a step."""
        own_s = self._base * (1 + 0.02 * self._rng.standard_normal(self.ranks)).clip(0.9, 1.2)
        last = self.onset + max(self.steps // 9, 1) if self.kind == "exchange" else math.inf
        if self.kind in ("slow", "exchange") and self.onset <= step < last:
            own_s[self.culprit] *= _SLOW
        if step == 0:
            own_s *= 3  # the first step compiles
        return own_s

    def write_steps(self, first: int, until: int) -> None:
        """Add the iterations of these steps to the files of all nodes."""
        start = self.now - (self.steps - first) * _ITERATION_S
        lines: list[list[str]] = [[] for _ in range(self.nodes)]
        inc = f',"inc":{self.incarnation}' if self.incarnation else ""
        for step in range(first, until):
            own_s = self.own_s(step)
            iteration_s = float(own_s.max()) * 1.05
            cells = [
                f'"{rank}":{{"t":{start:.6f},"d":{iteration_s:.6f},"self":{own:.6f},'
                f'"blocked":{iteration_s - own:.6f},"eval":0.0,"ckpt":0.0}}'
                for rank, own in enumerate(own_s.tolist())
            ]
            for node, text in enumerate(lines):
                here = ",".join(cells[node * self.per_node : (node + 1) * self.per_node])
                text.append(f'{{"step":{step}{inc},"ranks":{{{here}}}}}\n')
            start += iteration_s
        for node, text in enumerate(lines):
            with (self.folder / "nodes" / str(node) / "iterations.jsonl").open("a") as file:
                file.writelines(text)
        self.step = until

    def add_incident(self, incident: Incident) -> None:
        """Add an incident, or replace the one with its number."""
        self.incidents = [one for one in self.incidents if one.number != incident.number] + [incident]
        path = self.folder / "incidents" / f"{incident.number:04d}.json"
        path.write_bytes(incident_to_json(incident))
        path.with_suffix(".txt").write_text(render(incident, run=self.folder.name, timeline=True) + "\n")

    def write_status(self) -> None:
        """Write the status as it is at ``now``, and which steps are kept where."""
        own_s = self.own_s(self.step)
        iteration_s = float(own_s.max()) * 1.05
        hangs = self.kind == "hang"
        rows: list[tuple[RankBeat, ...]] = []
        for node in range(self.nodes):
            ranks = range(node * self.per_node, min((node + 1) * self.per_node, self.ranks))
            rows.append(
                tuple(
                    RankBeat(
                        rank, self.step - 1, int(Phase.BACKWARD), self.step * 400, iteration_s, float(own_s[rank]),
                        41.0 if hangs else 0.05, True, None,
                        40.0 if hangs and rank != self.culprit else 0.0,
                    )
                    for rank in ranks
                )
            )  # fmt: skip
        apart = self.nodes > _FEW_NODES
        kept = self.step - 1
        nodes = tuple(
            NodeStatus(
                node, f"gpu-{node:05d}", "ok", "ok", 0.2, 1, 0, () if apart else rows[node], (),
                kept, kept - 1, kept // 50 * 50 - 1 if kept >= 50 else -1, (),
            )
            for node in range(self.nodes)
        )  # fmt: skip
        status = Status(
            1, self.now, "running", self.ranks, self.step - 1,
            tuple(one.number for one in self.incidents if one.status == "open"), nodes,
            RankBeat.__struct_fields__, {"bytes_in": 0}, BackupStatus(1, kept - 1, self.incarnation, kept, ""),
            incarnation=self.incarnation, restarts=self.incarnation, max_restarts=3, state_s=60.0,
            most_nodes=self.nodes, ranks_file=RANKS_FILE if apart else "",
        )  # fmt: skip
        if apart:
            self._replace(RANKS_FILE, msgspec.msgpack.encode(list(enumerate(rows))))
        self._replace("status.json", msgspec.json.encode(status))

    def write_links(self) -> None:
        """Write what nodes lately sent each other: everything goes round a ring, at a gigabyte a second."""
        for node in range(self.nodes):
            others = sorted({(node + 1) % self.nodes, (node - 1) % self.nodes} - {node})
            paths = [
                PathRate(
                    _address(node),
                    _address(other),
                    "TCP",
                    1e9,
                    1.0 if not self._is_slow(node, other) else 2.4,
                    1e9,
                )
                for other in others
            ]
            self._replace(
                f"nodes/{node}/links.json", msgspec.json.encode({"unix_s": self.now, "paths": paths})
            )

    def _is_slow(self, node: int, other: int) -> bool:
        ends = sorted((self.culprit // self.per_node, min(self.culprit // self.per_node + 1, self.nodes - 1)))
        return self.kind == "exchange" and sorted((node, other)) == ends

    def _write(self, name: str, content: dict[str, object]) -> None:
        self._replace(name, json.dumps(content).encode())

    def _replace(self, name: str, content: bytes) -> None:
        draft = self.folder / f"{name}.draft"
        draft.write_bytes(content)
        draft.rename(self.folder / name)


def _address(node: int) -> str:
    return f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}"


def incident_of(run: FakeRun, number: int = 1) -> Incident | None:
    """The incident that a run of this kind has; None: none."""
    node = run.culprit // run.per_node
    seen = run.now - (run.steps - run.onset - 2) * _ITERATION_S
    others = tuple(rank for rank in range(run.ranks) if rank != run.culprit)
    common = Incident(
        number, "slow", run.onset, run.onset + 2, None, _SLOW, (), others,
        (f"{run.ranks}/{run.ranks} ranks reporting",), (), world_size=run.ranks, ranks_reporting=run.ranks,
        detected_unix_s=seen, onset_unix_s=seen - 2 * _ITERATION_S,
        events=(Event("noticed", seen - 0.8, run.onset + 1), Event("verdict", seen, run.onset + 2)),
        iteration_before_s=_ITERATION_S, iteration_after_s=_ITERATION_S * _SLOW,
    )  # fmt: skip
    slow = Culprit(run.culprit, None, f"gpu-{node:05d}", "forward", _SLOW, "high", "compute")
    if run.kind == "slow":
        return replace(common, culprits=(slow,), lost_s=(run.steps - run.onset) * _ITERATION_S * (_SLOW - 1))
    if run.kind == "hang":
        return replace(
            common, kind="hang", job_slowdown=None, stuck_s=41.0, summary="ALLREDUCE in world seq 4711",
            culprits=(replace(slow, slowdown=0.0, cause="stopped", detail="process state T", stage="backward"),),
            evidence=(*common.evidence, "wait-for graph has one root"),
            next_action="the process is ended", next_unix_s=run.now + 20,
        )  # fmt: skip
    if run.kind in ("recovered", "failed"):
        recovery = Recovery(
            1,
            run.culprit,
            "was killed",
            sum(seconds for _, seconds in _PHASES),
            _PHASES,
            run.ranks,
            run.ranks,
        )
        return replace(
            common, kind="crash", job_slowdown=None, status="relieved" if run.kind == "recovered" else "ended",
            relief_step=run.onset + 3, closed_unix_s=seen + 0.3, recovery=recovery if run.kind == "recovered" else None,
            culprits=(replace(slow, slowdown=0.0, stage="", cause="killed", detail="signal 9"),), victims=(),
        )  # fmt: skip
    if run.kind == "exchange":
        far = min(run.culprit + run.per_node, run.ranks - 1)
        link = Link((run.culprit, far), (f"gpu-{node:05d}", f"gpu-{far // run.per_node:05d}"))
        relief = run.onset + max(run.steps // 9, 1)
        action = Action(
            "S3, exchange of nodes", 4.0, f"node {link.nodes[1]} takes the ranks of another", _ITERATION_S * _SLOW,
            _ITERATION_S, _ITERATION_S * 1.01, relief - 1, seen + 4.0,
        )  # fmt: skip
        return replace(
            common, culprits=(Culprit(None, link, "", "transfer", 2.4, "high", "network"),), actions=(action,),
            status="relieved", relief_step=relief, closed_unix_s=seen + 9.0, lost_s=21.0, saved_s=180.0,
        )  # fmt: skip
    return None


def make_run(
    folder: Path, kind: Kind = "healthy", ranks: int = 8, steps: int = 120, **more: object
) -> FakeRun:
    """A run in ``folder``; ``more``: other fields of `FakeRun`."""
    return FakeRun(folder, kind, ranks, steps, **more).make()  # pyright: ignore[reportArgumentType]


def main() -> None:
    """Make one run, or one of each kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--layout", default="", help="such as tp2-dp8-pp4")
    parser.add_argument("--live", type=int, default=0, metavar="SECONDS")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="time between two steps")
    given = parser.parse_args()
    kinds = KINDS if given.kind == "all" else (given.kind,)
    runs = [
        make_run(given.folder / kind if given.kind == "all" else given.folder, kind, given.ranks, given.steps,
                 layout=given.layout)
        for kind in kinds
    ]  # fmt: skip
    for _ in range(int(given.live / given.every)):
        time.sleep(given.every)
        for run in runs:
            if run.kind not in ("ended", "failed", "silent"):
                run.go_on()


if __name__ == "__main__":
    main()
