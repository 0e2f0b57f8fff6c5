"""A death: the first crash finding opens it, those of the next moments join it, the verdict names who died first."""

from __future__ import annotations

from dataclasses import replace

from keepstep.control.incidents.desk import Desk
from keepstep.control.incidents.wording import how_to_say, noted, same_culprits, unlocated
from keepstep.core.finding import Finding
from keepstep.core.incident import Action, Culprit, Diagnosis, Incident, Recovery
from keepstep.core.ranges import fold_nodes, fold_ranks
from keepstep.core.summary import RankState

GATHER_S = 0.2  # findings of one crash come together; more are needed than the first
_SHARPEN_S = 2.0
_MOST_FINDINGS = 1024
_MOST_STATES = 65_536


class CrashCase:
    """One death and what it drew with it."""

    kind = "crash"

    def __init__(self, desk: Desk, incident: Incident | None = None) -> None:
        self._desk = desk
        self.incident = incident
        self.closed = False
        self.question: int | None = None
        self._findings: dict[int, Finding] = {}
        self._lost: dict[str, tuple[int, ...]] = {}
        self._first_s: float | None = None
        self._step = -1
        self.incarnation = incident.incarnation if incident else -1  # of the job; -1: nobody told
        self._dirty = False
        self._decided_s: float | None = None

    def found(self, finding: Finding, now_s: float) -> None:
        """One more rank died."""
        if finding.rank in self._findings or len(self._findings) >= _MOST_FINDINGS:
            return
        if finding.step < 0:  # launchers do not know steps
            finding = replace(finding, step=self._desk.cluster.step_of(finding.rank) + 1)
        self._findings[finding.rank] = finding
        self.incarnation = finding.incarnation
        self._step = max(self._step, finding.step)
        self._began(now_s)

    def lost(self, node: str, ranks: tuple[int, ...], now_s: float, incarnation: int = -1) -> None:
        """A whole node is gone: neither its agent nor its launcher is connected."""
        self._lost[node] = ranks
        self.incarnation = max(self.incarnation, incarnation)
        self._began(now_s)

    @property
    def exit_code(self) -> int | None:
        """Of the rank to blame, else of the first that died; None when nobody told."""
        blamed = [culprit.rank for culprit in self.incident.culprits] if self.incident else []
        for rank in [*blamed, *self._findings]:
            finding = self._findings.get(rank) if rank is not None else None
            if finding is not None and finding.exit_code:
                return finding.exit_code
        return None

    def tick(self, now_s: float) -> None:
        """Decide when the first moment is over, and once more a little later; notice that they run again."""
        if self.closed or self._first_s is None:
            return
        if not self._dirty:
            self._watch_restart(now_s)
            return
        since_s = self._first_s if self._decided_s is None else self._decided_s
        if now_s - since_s >= (GATHER_S if self._decided_s is None else _SHARPEN_S):
            self.decide(now_s)

    def decide(self, now_s: float) -> None:
        """Verdict now, with what has come."""
        if not self._dirty:
            return
        self._dirty, self._decided_s = False, now_s
        desk = self._desk
        diagnosis = self._locate()
        old = self.incident
        if old is not None and (same_culprits(old, diagnosis) or not diagnosis.culprits):
            self.incident = replace(old, victims=diagnosis.victims or old.victims)
            desk.register.publish(self.incident, "")
            return
        step = self._step if self._step >= 0 else desk.cluster.newest_step
        first_unix_s = desk.unix_s(now_s if self._first_s is None else self._first_s)
        incident = Incident(
            number=old.number if old else desk.register.next_number(),
            kind="crash",
            onset_step=step,
            detected_step=step,
            relief_step=None,
            job_slowdown=None,
            culprits=diagnosis.culprits,
            victims=diagnosis.victims,
            evidence=diagnosis.evidence,
            missing=diagnosis.missing,
            actions=old.actions if old else (),
            summary=diagnosis.summary,
            ranks_reporting=desk.cluster.reporting_ranks,
            world_size=desk.cluster.known_ranks,
            detected_unix_s=old.detected_unix_s if old else desk.unix_s(now_s),
            incarnation=max(self.incarnation, 0),
            onset_unix_s=old.onset_unix_s if old else first_unix_s,
            events=old.events if old else (),
        )
        say = how_to_say(old, diagnosis)
        self.incident = noted(desk, incident, say, now_s)
        desk.register.publish(self.incident, say)

    def acted(self, action: Action) -> None:
        """Note what was done about it."""
        if self.incident is not None and action not in self.incident.actions:
            actions = (*self.incident.actions, self._desk.register.stamped(action))
            self.incident = replace(self.incident, actions=actions)
            self._desk.register.publish(self.incident, "")

    def end(self, now_s: float) -> None:
        """The job ended."""
        self.decide(now_s)
        self.closed = True
        if self.incident is not None:
            self.incident = replace(self.incident, status="ended", closed_unix_s=self._desk.unix_s(now_s))
            self._desk.register.publish(self.incident, "")

    def restarted(self, recovery: Recovery | None, now_s: float) -> None:
        """The job runs in a later incarnation: that is the end of this death. ``recovery`` None: it died there, too."""
        self.decide(now_s)
        self._close(recovery, now_s)

    def _close(self, recovery: Recovery | None, now_s: float) -> None:
        self.closed = True
        if self.incident is not None:
            self.incident = replace(
                self.incident,
                status="relieved",
                relief_step=self._desk.cluster.newest_step,
                closed_unix_s=self._desk.unix_s(now_s),
                recovery=recovery,
            )
            self._desk.register.publish(self.incident, "closes")

    def _began(self, now_s: float) -> None:
        self._dirty = True
        if self._first_s is None:
            self._first_s = now_s

    def _watch_restart(self, now_s: float) -> None:
        """The launchers started the workers anew: what comes after that is another incident."""
        if self.incident is None or self._decided_s is None:
            return
        nodes = self._desk.cluster.nodes.values()
        if any(node.name in self._lost and node.agent is None for node in nodes):
            return
        alive = {
            one.rank
            for node in self._desk.cluster.nodes.values()
            if node.beat is not None
            and node.heard_s is not None
            and node.heard_s > self._decided_s + _SHARPEN_S
            for one in node.beat.ranks
            if one.alive and one.step >= 0
        }
        ranks = self._desk.cluster.known_ranks  # of a job that goes on with fewer nodes, fewer
        if all(rank in alive or 0 < ranks <= rank for rank in self._findings):
            self._close(None, now_s)

    def _locate(self) -> Diagnosis:
        desk = self._desk
        if self._lost:
            return self._lost_nodes()
        try:
            return desk.locators.crash(
                list(self._findings.values()), self._states(), desk.cluster.node_of, desk.clocks()
            )
        except Exception as error:
            return unlocated("crash", error)

    def _states(self) -> list[RankState]:
        """What the heartbeats say of the ranks that did not die."""
        states: list[RankState] = []
        for one in self._desk.cluster.beats():
            if one.rank not in self._findings and len(states) < _MOST_STATES:
                states.append(
                    RankState(one.rank, one.alive, one.step, one.phase, 0.0, one.progress, 0.0, 0.0)
                )
        return states

    def _lost_nodes(self) -> Diagnosis:
        """More than a tenth of the nodes at once is the network or us: nobody is blamed."""
        cluster = self._desk.cluster
        lost_ranks = {rank for ranks in self._lost.values() for rank in ranks}
        others = tuple(sorted(set(cluster.node_of) - lost_ranks))
        told = f"agent and launcher of {fold_nodes(self._lost)} (ranks {fold_ranks(lost_ranks)}) are gone together"
        if len(self._lost) > max(1, len(cluster.nodes) // 10):
            missing = (
                f"{len(self._lost)} of {len(cluster.nodes)} nodes vanished together: network or controller"
            )
            return Diagnosis("crash", (), others, (told,), (missing,), "nodes lost")
        culprits = tuple(
            Culprit(
                node=name,
                confidence="medium",
                cause="node lost",
                detail=f"with ranks {fold_ranks(ranks)}: its host, network or launcher died",
            )
            for name, ranks in sorted(self._lost.items())
        )
        crashed = tuple(f"rank {rank} ended, too" for rank in sorted(self._findings)[:3])
        return Diagnosis("crash", culprits, others, (told, *crashed), (), "node lost")
