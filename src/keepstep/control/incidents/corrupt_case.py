"""A rank whose state has silently turned different from that of all other ranks that hold copies of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from keepstep.control.incidents.case import Case, Desk
from keepstep.core.incident import Action, Culprit, Diagnosis, Incident
from keepstep.core.ranges import fold_ranks
from keepstep.detect.corruption import Difference

ADVICE = "advised: validate the device"
GO_BACK = "all ranks go back"
_MOST_NAMED = 3  # tensors that are named in a verdict
_MOST_KEPT = 256


class CorruptCase(Case):
    """Tensors of one rank that differ; or of two, and it is not known which of these is wrong."""

    def __init__(self, desk: Desk, incident: Incident | None = None) -> None:
        self._desk, self.incident = desk, incident
        self.odd = tuple(one.rank for one in incident.culprits if one.rank is not None) if incident else ()
        self._tensors: list[str] = []

    def differs(self, difference: Difference, incarnation: int, now_s: float) -> None:
        """Take tensors that differ now; the first ones make the incident."""
        known = bool(self._tensors)
        self.odd = difference.odd
        self._tensors += difference.tensors[: _MOST_KEPT - len(self._tensors)]
        since = self.incident.onset_step if known and self.incident else difference.since
        diagnosis = self._diagnosis(difference, since or 0)
        if self.incident is not None:
            old = self.incident.evidence
            diagnosis = replace(diagnosis, evidence=old if known else (*old, *diagnosis.evidence))
        ranks = fold_ranks(self.odd)
        advice = Action(ADVICE, None, f"keepstep validate --ranks {ranks}")
        began = {
            "onset_step": difference.since,
            "detected_step": difference.since,
            "incarnation": incarnation,
            "actions": (self._desk.register.stamped(advice),),
        }
        self._conclude(diagnosis, now_s, began)

    def mended(self, tensors: Collection[str], step: int, now_s: float) -> None:
        """Note tensors that are alike again; the case is closed when all are."""
        if not self._tensors:
            return
        self._tensors = [one for one in self._tensors if one not in tensors]
        if not self._tensors:
            self._finish("relieved", now_s, "closes", relief_step=step)

    def tick(self, now_s: float) -> None:
        """Let time pass: only another save can tell more."""

    def end(self, now_s: float) -> None:
        """Close the case, as the job has ended."""
        self._finish("ended", now_s, "")

    def _diagnosis(self, difference: Difference, since: int) -> Diagnosis:
        homes = {rank: self._desk.cluster.home(rank) for rank in self.odd}
        nodes = {rank: home.name if home is not None else "" for rank, home in homes.items()}
        alone = len(self.odd) == 1
        cause = "its state is wrong" if alone else "the state of one of them is wrong"
        told = ", ".join(self._tensors[:_MOST_NAMED])
        if len(self._tensors) > _MOST_NAMED:
            told += f" and {len(self._tensors) - _MOST_NAMED} more tensors"
        culprits = tuple(
            Culprit(
                rank,
                node=nodes[rank],
                confidence="high" if alone else "low",
                cause=cause,
                detail=f"{told} since step {since}",
            )
            for rank in self.odd
        )
        everybody = fold_ranks((*self.odd, *difference.agreeing))
        evidence = [
            f"alike on ranks {everybody} at three saves or more, the last time at step {difference.alike}"
        ]
        if difference.agreeing:
            evidence.append(
                f"still alike on ranks {fold_ranks(difference.agreeing)} at step {difference.since}"
            )
        missing = () if alone else ("a third rank with a copy, to tell which is wrong",)
        return Diagnosis("corrupt", culprits, (), tuple(evidence), missing, "replicas differ")
