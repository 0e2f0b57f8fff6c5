"""What all cases of the fault campaigns are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.campaign.chances import drawn as drawn
from benchmarks.campaign.chances import kind_of as kind_of
from benchmarks.campaign.trial import ROOT, Outcome, Plan

RANKS = 4
DP2_PP2 = ("--dp", "2", "--pp", "2", "--layers", "2", "--emulate-compute-ms", "20")
WARM_UP_STEPS = 5
HOSTS = ("node-a", "node-b", "node-c", "node-d")


@dataclass(frozen=True)
class Verdict:
    """How one seed ended. ``why`` is empty exactly when it passed."""

    why: list[str]
    measured: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A kind of trial. ``goal`` is the issue's wording."""

    name: str
    seeds: int
    goal: str
    plan: Callable[[int], Plan]
    judge: Callable[[Plan, Outcome], Verdict]
    shown: tuple[str, ...] = ()  # figures of ``measured`` to summarise
    share: float = 1.0  # of the seeds, that is to pass
    zero: tuple[str, ...] = ()  # figures of ``measured`` that are to be 0 in all seeds together
    counted: tuple[str, ...] = ()  # figures that are true or false, to count; seeds without one do not count
    lacks: Callable[[int], str] | None = None  # the package that a seed needs and that is not there, or ""
    skipped: Callable[[int], str] | None = None  # why a seed cannot be run here, or ""


def on_backend(case: Case, backend: str) -> Case:
    """The case with jobs whose Gloo groups the probe takes for those of NCCL; ``backend`` goes into its name."""

    def plan(seed: int) -> Plan:
        made = case.plan(seed)
        arguments = (str(ROOT / made.script), *made.arguments)
        return replace(made, script="benchmarks/campaign/as_nccl.py", arguments=arguments)

    return replace(case, name=f"{case.name}, {backend}", plan=plan)


def named_for_sure(incident: Mapping[str, Any]) -> bool:
    """Whether somebody is named with confidence high."""
    return any(culprit["confidence"] == "high" for culprit in incident["culprits"])


def culprit_ranks(incident: Mapping[str, Any]) -> list[int]:
    """Ranks that the incident names."""
    return [culprit["rank"] for culprit in incident["culprits"] if culprit.get("rank") is not None]


def culprit_links(incident: Mapping[str, Any]) -> list[set[str]]:
    """Pairs of nodes that the incident names."""
    return [set(culprit["link"]["nodes"]) for culprit in incident["culprits"] if culprit.get("link")]


def left_over(outcome: Outcome) -> list[str]:
    """A reason for each process that outlived its launcher."""
    return [f"left running: {line}" for line in outcome.left_over]
