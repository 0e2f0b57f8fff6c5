"""Why a job failed, told by a live run: its class and who is to blame, of failures that the seed draws.

The job is a plain script that trains with DDP on Gloo, started as users start theirs. What failed is in the script, or
is done to it from outside; the verdict is read from the incidents first, and compared with the truth afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.campaign.case import Case, Verdict, culprit_links, culprit_ranks, left_over
from benchmarks.campaign.trial import Outcome, Plan
from benchmarks.campaign.why_draw import (
    ANY_NODE,
    LIVE,
    VAIN,
    VAIN_KINDS,
    Truth,
    Why,
    draw,
    draw_vain,
    truth_of,
)
from benchmarks.campaign.why_faults import lacking

_OBSERVED = re.compile(
    r"Root Cause \(first observed failure\):\n\[0\]:\n\s*time\s*: (\S+)\n(?:.*\n)*?\s*rank\s*: (\d+)"
)
_PATH = re.compile(r"(?:/[\w.-]+){2,}")
_STREAMS = {"console": (), "files": ("--redirects", "3")}
TIMEOUT_S = 150.0


@dataclass(frozen=True)
class Told:
    """What keepstep told of a run's failure; of the cause, what the last incident says that has one.

    A job that became slower has not failed: on a machine with other work that may well be, and is counted apart.

    Attributes:
        incident: kind of the last incident, "" without one.
        ranks: culprits of the last incident; ``links`` and ``nodes``: likewise.
        all_ranks: culprits of all incidents.
        verdict_s: Unix time of the first verdict.
        path: whether the path of a file stands in what was told.
        slow: ranks that were called slow, by the way.
    """

    incident: str = ""
    cause_class: str = ""
    cause_kind: str = ""
    title: str = ""
    ranks: tuple[int, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
    nodes: tuple[str, ...] = ()
    all_ranks: tuple[int, ...] = ()
    verdict_s: float | None = None
    path: bool = False
    slow: tuple[int, ...] = ()

    @property
    def nobody(self) -> bool:
        return not (self.ranks or self.links or self.nodes)


def told(incidents: Sequence[Mapping[str, Any]]) -> Told:
    """What a run's incidents tell. ``cause`` is there only where a cause is known."""
    slow = tuple(sorted({rank for one in incidents if one["kind"] == "slow" for rank in culprit_ranks(one)}))
    incidents = [one for one in incidents if one["kind"] != "slow"]
    if not incidents:
        return Told(slow=slow)
    last = incidents[-1]
    causes = [cause for one in incidents if (cause := one.get("cause"))]
    cause = causes[-1] if causes else {}
    verdicts = [event["unix_s"] for one in incidents for event in one["events"] if event["what"] == "verdict"]
    nodes = {
        one["node"]
        for one in last["culprits"]
        if one.get("node") and one.get("rank") is None and not one.get("link")
    }
    words = json.dumps([cause, last["culprits"], last.get("evidence"), last.get("summary")])
    return Told(
        incident=last["kind"],
        cause_class=cause.get("cause_class") or "",
        cause_kind=cause.get("kind") or "",
        title=cause.get("title") or "",
        ranks=tuple(sorted(culprit_ranks(last))),
        links=tuple(sorted(tuple(sorted(link)) for link in culprit_links(last))),
        nodes=tuple(sorted(nodes)),
        all_ranks=tuple(sorted({rank for one in incidents for rank in culprit_ranks(one)})),
        verdict_s=min(verdicts, default=None),
        path=bool(_PATH.search(words)),
        slow=slow,
    )


def first_observed(console: str) -> int | None:
    """The rank that torchrun's form of the report calls the root cause; of several reports, the earliest."""
    found = [(when, int(rank)) for when, rank in _OBSERVED.findall(console)]
    return min(found, key=lambda one: one[0])[1] if found else None


def compare(truth: Truth, said: Told) -> tuple[list[str], dict[str, bool]]:
    """What is wrong with the verdict, and each part of it."""
    if not said.incident and truth.silent:
        return [], {"class_right": True, "kind_right": True, "culprit_right": True}
    links_fit = all(link == truth.link for link in said.links)
    nodes_fit = truth.node == ANY_NODE or all(node in (truth.node, *truth.link) for node in said.nodes)
    parts = {
        "class_right": said.cause_class in truth.classes,
        "kind_right": not truth.kinds or said.cause_kind in truth.kinds,
        "culprit_right": _ranks_fit(truth, said) and links_fit and nodes_fit,
    }
    why = [] if said.incident else ["silent: no incident"]
    if not parts["class_right"]:
        why.append(f"class {said.cause_class or 'not told'}, true {' or '.join(truth.classes)}")
    if not parts["culprit_right"]:
        true = " or ".join(str(list(ranks)) for ranks in truth.culprits)
        why.append(f"named {[*said.ranks, *said.links, *said.nodes]}, true {true}")
    return why, parts


def _ranks_fit(truth: Truth, said: Told) -> bool:
    in_place_of_rank = bool(truth.node and said.nodes) and not said.ranks
    return said.ranks in truth.culprits or in_place_of_rank


def _measured(why: Why, outcome: Outcome) -> tuple[list[str], dict[str, Any]]:
    said, truth = told(outcome.incidents), truth_of(why)
    wrong, parts = compare(truth, said)
    victims = sorted(set(said.all_ranks) - set(truth.erring))
    observed, failed_s = first_observed(outcome.console), outcome.notes.get("failed_s")
    page_s = None if said.verdict_s is None or failed_s is None else round(said.verdict_s - failed_s, 2)
    if victims:
        wrong.append(f"victims {victims} named")
    return wrong, {
        "kind": why.kind,
        "way": why.way,
        "ranks": why.ranks,
        "hosts": why.hosts,
        "stream": why.stream,
        "incident": said.incident,
        "class": said.cause_class,
        "cause_kind": said.cause_kind,
        "title": said.title,
        "culprits": [*said.ranks, *said.links, *said.nodes],
        "right": not wrong,
        **parts,
        "path_told": said.path if truth.path else None,
        "victim_named": len(victims),
        "slow_named": list(said.slow),
        "no_culprit": said.nobody,
        "page_s": page_s,
        "first_observed": observed,
        "first_observed_right": _observed_right(truth, observed),
        "restarts": outcome.notes.get("restarts"),
        "commit": outcome.notes.get("commit", ""),
    }


def _observed_right(truth: Truth, observed: int | None) -> bool | None:
    """Whether torchrun's report points at the culprit; None where no rank is to blame, so that it cannot."""
    ranks = {rank for one in truth.culprits for rank in one}
    return observed in ranks if ranks else None


def _plan(why: Why) -> Plan:
    return Plan(
        arguments=(),
        truth={"kind": why.kind},
        nproc=why.ranks,
        flags=("--max-restarts", str(why.max_restarts), *_STREAMS[why.stream]),
        timeout_s=TIMEOUT_S,
        why=why,
    )


def plan_live(seed: int) -> Plan:
    return _plan(draw(seed))


def judge_live(plan: Plan, outcome: Outcome) -> Verdict:
    """The class fits, the culprits fit, and no incident names a victim."""
    assert plan.why is not None
    wrong, measured = _measured(plan.why, outcome)
    return Verdict([*_went_wrong(outcome), *wrong], measured)


def _went_wrong(outcome: Outcome) -> list[str]:
    return [*left_over(outcome), *(["the job did not end in time"] if outcome.timed_out else [])]


def plan_vain(seed: int) -> Plan:
    return _plan(draw_vain(seed))


def judge_vain(plan: Plan, outcome: Outcome) -> Verdict:
    """No more restarts were made than the kind allows; what was told is measured alone."""
    assert plan.why is not None
    why, (_, measured) = _went_wrong(outcome), _measured(plan.why, outcome)
    most = VAIN_KINDS[plan.why.kind]
    if measured["restarts"] is None:
        why.append("restarts are not told")
    elif measured["restarts"] > most:
        why.append(f"{measured['restarts']} restarts, at most {most} may help")
    return Verdict(why, measured)


def skipped(why: Why) -> str:
    """Why a seed cannot be run here; empty where it can."""
    needs = (*why.rules.needs, *(("hosts",) if why.hosts > 1 else ()))
    return next((reason for need in needs if (reason := lacking(need))), "")


_COUNTED = ("class_right", "kind_right", "culprit_right", "no_culprit", "path_told", "first_observed_right")
WHY = (
    Case(
        LIVE,
        140,
        "class and culprit right >= 97 %, a victim as culprit 0 (kind, way, ranks, hosts, stream, rank, step drawn)",
        plan_live,
        judge_live,
        ("page_s", "restarts"),
        share=0.97,
        zero=("victim_named",),
        counted=_COUNTED,
        skipped=lambda seed: skipped(draw(seed)),
    ),
    Case(
        VAIN,
        20,
        "no restart for errors of import and syntax, at most one for other errors of the program (--max-restarts 5)",
        plan_vain,
        judge_vain,
        ("restarts", "page_s"),
        counted=_COUNTED,
        skipped=lambda seed: skipped(draw_vain(seed)),
    ),
)
