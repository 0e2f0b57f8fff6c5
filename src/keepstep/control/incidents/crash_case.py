"""Crashes: the first finding opens a case, those of the next moments join it, the verdict names who died first."""

from __future__ import annotations

from dataclasses import replace

from keepstep.control.incidents.case import Case, Desk, same_culprits, unlocated
from keepstep.core.finding import Finding
from keepstep.core.incident import Culprit, Diagnosis, Incident, Recovery
from keepstep.core.ranges import fold_nodes, fold_ranks
from keepstep.core.summary import RankState

GATHER_S = 0.2  # wait from the first finding to the verdict: the findings of one crash come together
_SHARPEN_S = 2.0  # wait from the verdict to a sharper one, if more ranks died meanwhile
_MOST_FINDINGS = 1024
_MOST_STATES = 65_536


class CrashCase(Case):
    """The first death of a job's incarnation, and the deaths that followed from it."""

    def __init__(self, desk: Desk, incident: Incident | None = None) -> None:
        self._desk, self.incident = desk, incident
        self._findings: dict[int, Finding] = {}
        self._lost: dict[str, tuple[int, ...]] = {}  # ranks by the name of their lost node
        self._first_s: float | None = None
        self._step = -1
        self.incarnation = incident.incarnation if incident else -1  # in which ranks died; -1: not known
        self._dirty = False  # something has come since the last decision
        self._decided_s: float | None = None

    def found(self, finding: Finding, now_s: float) -> None:
        """Take the death of one more rank into the case."""
        if finding.rank in self._findings or len(self._findings) >= _MOST_FINDINGS:
            return
        if finding.step < 0:  # launchers do not know steps
            finding = replace(finding, step=self._desk.cluster.step_of(finding.rank) + 1)
        self._findings[finding.rank] = finding
        self.incarnation = finding.incarnation
        self._step = max(self._step, finding.step)
        self._began(now_s)

    def lost(self, node: str, ranks: tuple[int, ...], now_s: float, incarnation: int = -1) -> None:
        """Take the loss of a whole node into the case: neither its agent nor its launcher is connected."""
        self._lost[node] = ranks
        self.incarnation = max(self.incarnation, incarnation)
        self._began(now_s)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the rank to blame, else of the first rank that died; None when it is not known."""
        blamed = [culprit.rank for culprit in self.incident.culprits] if self.incident else []
        for rank in [*blamed, *self._findings]:
            finding = self._findings.get(rank) if rank is not None else None
            if finding is not None and finding.exit_code:
                return finding.exit_code
        return None

    def tick(self, now_s: float) -> None:
        """Decide when the first moment is over, and once more a little later; notice when the ranks run again."""
        if self.closed or self._first_s is None:
            return
        if not self._dirty:
            self._watch_restart(now_s)
            return
        since_s = self._first_s if self._decided_s is None else self._decided_s
        if now_s - since_s >= (GATHER_S if self._decided_s is None else _SHARPEN_S):
            self.decide(now_s)

    def decide(self, now_s: float) -> None:
        """Publish a verdict on what has come so far."""
        if not self._dirty:
            return
        self._dirty, self._decided_s = False, now_s
        cluster, old = self._desk.cluster, self.incident
        diagnosis = self._locate(now_s)
        if old is not None and (same_culprits(old, diagnosis) or not diagnosis.culprits):
            self.incident = replace(old, victims=diagnosis.victims or old.victims)
            self._publish("")
            return
        step = self._step if self._step >= 0 else cluster.newest_step
        first_s = now_s if self._first_s is None else self._first_s
        self._conclude(
            diagnosis,
            now_s,
            {"onset_unix_s": self._desk.unix_s(first_s)},
            onset_step=step,
            detected_step=step,
            ranks_reporting=cluster.reporting_ranks,
            incarnation=max(self.incarnation, 0),
        )

    def end(self, now_s: float) -> None:
        """Close the case, as the job has ended."""
        self.decide(now_s)
        self._finish("ended", now_s, "")

    def restarted(self, recovery: Recovery | None, now_s: float) -> None:
        """Close the case, as the job runs in a later incarnation; ``recovery`` None: none is known."""
        self.decide(now_s)
        step = self._desk.cluster.newest_step
        self._finish("relieved", now_s, "closes", relief_step=step, recovery=recovery)

    def _began(self, now_s: float) -> None:
        self._dirty = True
        if self._first_s is None:
            self._first_s = now_s

    def _watch_restart(self, now_s: float) -> None:
        """Close the case once the workers run again: what comes after that is another incident."""
        if self.incident is None or self._decided_s is None:
            return
        nodes = self._desk.cluster.nodes.values()
        if any(node.name in self._lost and node.agent is None for node in nodes):
            return
        since_s = self._decided_s + _SHARPEN_S
        beats = [node.beat for node in nodes if node.beat is not None and (node.heard_s or 0.0) > since_s]
        alive = {one.rank for beat in beats for one in beat.ranks if one.alive and one.step >= 0}
        ranks = self._desk.cluster.known_ranks  # fewer than before, where the job goes on with fewer nodes
        if all(rank in alive or 0 < ranks <= rank for rank in self._findings):
            self.restarted(None, now_s)

    def _locate(self, now_s: float) -> Diagnosis:
        desk = self._desk
        if self._lost:
            return self._lost_nodes()
        try:
            findings = list(self._findings.values())
            return desk.locators.crash(desk.evidence(now_s, states=self._states(), findings=findings))
        except Exception as error:
            return unlocated("crash", error)

    def _states(self) -> list[RankState]:
        """The states of the ranks that did not die, by their heartbeats."""
        others = [one for one in self._desk.cluster.beats() if one.rank not in self._findings]
        return [
            RankState(one.rank, one.alive, one.step, one.phase, 0.0, one.progress, 0.0, 0.0)
            for one in others[:_MOST_STATES]
        ]

    def _lost_nodes(self) -> Diagnosis:
        """Blame the lost nodes; but where over a tenth are lost at once, the network or the controller has failed."""
        cluster = self._desk.cluster
        lost_ranks = {rank for ranks in self._lost.values() for rank in ranks}
        others = tuple(sorted(set(cluster.node_of) - lost_ranks))
        told = f"agent and launcher of {fold_nodes(self._lost)} (ranks {fold_ranks(lost_ranks)}) are gone together"
        lost, count = len(self._lost), len(cluster.nodes)
        if lost > max(1, count // 10):
            missing = f"{lost} of {count} nodes vanished together: network or controller"
            return Diagnosis("crash", (), others, (told,), (missing,), "nodes lost")
        culprits: list[Culprit] = []
        for name, ranks in sorted(self._lost.items()):
            detail = f"with ranks {fold_ranks(ranks)}: its host, network or launcher died"
            culprits.append(Culprit(node=name, confidence="medium", cause="node lost", detail=detail))
        crashed = tuple(f"rank {rank} ended, too" for rank in sorted(self._findings)[:3])
        return Diagnosis("crash", tuple(culprits), others, (told, *crashed), (), "node lost")
