"""Whether blamed ranks still are the slow ones, iteration by iteration, before their nodes are moved or excluded.

A verdict is given after a few iterations. Where the work differs from step to step, whoever had the most to do in these
is blamed, and another rank is the slow one soon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import TYPE_CHECKING

from keepstep.core.slow_steps import SlowSteps
from keepstep.core.summary import IterationSummary

if TYPE_CHECKING:
    from keepstep.control.incidents.case import Desk
    from keepstep.control.remedies.device_speeds import HealthyRanks, Look
    from keepstep.core.microbatch_shares import Split


class Steadiness:
    """What is known of the blamed ranks of one job, from look to look. It starts anew when the job is re-formed."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._seen: dict[int, SlowSteps] = {}

    def look(
        self, rows: Sequence[IterationSummary], look: Look, healthy: HealthyRanks
    ) -> Mapping[int, SlowSteps]:
        """The blamed ranks with the iterations since their verdicts. ``rows``: the newest ones, own times sharpened."""
        since: dict[int, int] = {}
        before_s: list[float] = []
        for incident in (case.incident for case in look.cases):
            if incident is None:
                continue
            before_s += [incident.iteration_before_s] if incident.iteration_before_s else []
            for one in incident.culprits:
                if one.rank is not None:
                    since[one.rank] = min(since.get(one.rank, 1 << 62), (incident.detected_step or 0) + 1)
        if not since:
            self._seen = {}
            return self._seen
        slow_s = (min(before_s) + look.iteration_s) / 2 if before_s else 0.0
        base_s = healthy.own_s(look.splits)
        if not since.keys() <= base_s.keys():
            base_s = _of_peers(rows, healthy.stages or {}, look.splits)
        seen = self._desk.locators.slow_steps(rows, base_s, since, slow_s)
        found = {rank: _from_step(seen.get(rank, SlowSteps()), first) for rank, first in since.items()}
        self._seen = {rank: self._seen.get(rank, SlowSteps()).then(one) for rank, one in found.items()}
        return self._seen


def _of_peers(
    rows: Sequence[IterationSummary], stages: Mapping[int, int], splits: Mapping[int, Split]
) -> dict[int, float]:
    """What ranks would take if they took as long for a micro-batch as the middle one of their pipeline stage."""
    from keepstep.core.iteration_table import medians

    own_s = medians(rows, "self_s")
    share = {rank: splits[rank].share if rank in splits else 1 for rank in own_s}
    by_stage: dict[int, list[float]] = {}
    for rank, seconds in own_s.items():
        by_stage.setdefault(stages.get(rank, -1), []).append(seconds / share[rank])
    return {rank: median_low(by_stage[stages.get(rank, -1)]) * share[rank] for rank in own_s}


def _from_step(one: SlowSteps, first: int) -> SlowSteps:
    return SlowSteps({step: slow for step, slow in one.by_step.items() if step >= first}, one.times)
