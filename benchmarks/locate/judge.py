"""Compares who was named with who was meant. Names only: it sees no times and no traces."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.core.incident import Culprit, Diagnosis


@dataclass(frozen=True, slots=True)
class Meant:
    """Who is to be named: ``ranks`` (each), or the path between ``nodes``, or the group that it is in.

    ``felt``: None when either answer will do. ``hidden``: the evidence of it lies with silent ranks.
    """

    ranks: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()
    group: str = ""
    members: frozenset[int] = frozenset()  # of the group
    stage: str = ""  # "": none is asked for
    felt: bool | None = True
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    """``right``: every felt cause named and nobody else. ``stage_right``: None where no stage is asked for."""

    positive: bool
    named: bool
    right: bool
    stage_right: bool | None
    how: str  # "rank", "link", "group", "nobody", "silent", "wrong"


@dataclass(slots=True)
class Score:
    """Counts over cases, each right or not."""

    true: int = 0
    false_named: int = 0
    missed: int = 0
    quiet: int = 0  # nobody to be named and nobody was
    stages: int = 0
    stages_right: int = 0

    def add(self, judged: Judged) -> None:
        self.true += judged.positive and judged.right
        self.missed += judged.positive and not judged.right
        self.false_named += judged.named and not judged.right
        self.quiet += not judged.positive and judged.right
        if judged.positive and judged.stage_right is not None:
            self.stages += 1
            self.stages_right += judged.stage_right

    @property
    def precision(self) -> float:
        return self.true / (self.true + self.false_named) if self.true + self.false_named else math.nan

    @property
    def recall(self) -> float:
        return self.true / (self.true + self.missed) if self.true + self.missed else math.nan

    @property
    def f1(self) -> float:
        bad = self.false_named + self.missed
        return 2 * self.true / (2 * self.true + bad) if self.true + bad else math.nan

    @property
    def stage_share(self) -> float:
        return self.stages_right / self.stages if self.stages else math.nan


def judge(diagnosis: Diagnosis, meant: Sequence[Meant], silent: frozenset[int]) -> Judged:
    """One verdict against what was meant."""
    asked = [one for one in meant if one.felt and not one.hidden]
    allowed = [one for one in meant if one.felt is not False]
    culprits = diagnosis.culprits
    group = _group_in(diagnosis) if not culprits else ""
    fits = [next((one for one in allowed if _fits(culprit, one)), None) for culprit in culprits]
    # silent ranks may be said to be silent, that accuses nobody
    strangers = [
        c for c, fit in zip(culprits, fits, strict=True)
        if fit is None and not (c.cause == "silent" and c.rank in silent)
    ]  # fmt: skip
    named = bool(culprits) and not all(c.cause == "silent" for c in culprits)
    found = all(_found(one, culprits, group) for one in asked)
    if group and not any(one.group == group for one in allowed):
        strangers.append(Culprit())
        named = True
    right = found and not strangers
    stages = [one.stage for one in asked if one.stage]
    stage_right = None
    if stages and right:
        stage_right = all(
            any(_fits(c, one) and c.stage == one.stage for c in culprits)
            or (not culprits and group == one.group and one.stage == "transfer")
            for one in asked
            if one.stage
        )
    elif stages:
        stage_right = False
    if strangers:
        how = "wrong"
    elif group and asked:
        how = "group"
    elif not named:
        how = "silent" if culprits else "nobody"
    else:
        how = "link" if culprits[0].link is not None else "rank"
    return Judged(bool(asked), named or bool(group), right, stage_right, how)


def _fits(culprit: Culprit, one: Meant) -> bool:
    if culprit.link is None:
        return culprit.rank in one.ranks
    if one.nodes and frozenset(culprit.link.nodes) == one.nodes:
        return True
    return bool(one.members) and one.members.issuperset(culprit.link.ranks) and len(one.nodes) < 2


def _found(one: Meant, culprits: Sequence[Culprit], group: str) -> bool:
    if one.ranks:
        return one.ranks <= {culprit.rank for culprit in culprits}
    return any(_fits(culprit, one) for culprit in culprits) or bool(group and group == one.group)


def _group_in(diagnosis: Diagnosis) -> str:
    """The group whose transfer is named as slow or stuck where no culprit is."""
    match = re.match(r"transfers on (\S+) [A-Z_]+ are slow|group (\S+) [A-Z_]+ seq", diagnosis.summary)
    if match is None or any("have not entered" in line for line in diagnosis.evidence):
        return ""
    return match[1] or match[2]
