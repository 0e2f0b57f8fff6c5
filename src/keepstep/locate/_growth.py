"""By how much ranks' own times have grown since a healthy time, or are over their peers'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keepstep.core.summary import IterationSummary
from keepstep.locate._profile import Floats, Ints, Profile, profile
from keepstep.locate.infer import InferredLayout

MIN_RATIO = 1.08  # least growth of a slow rank's self time, beyond what all ranks share
# Part of an iteration. A link is blamed if it explains 15 % of that, which is 3 % of an iteration.
_LOST = 0.2
_MOST_HOST = 0.5  # part of the growth by which a host is further ahead, if its GPU has grown slower


@dataclass(frozen=True, slots=True)
class Growth:
    """How the times of each rank changed; arrays of shape (ranks,)."""

    before: Profile | None  # None when there is no healthy time: then peers are the measure
    after: Profile
    base_s: Floats  # the healthy self time, the rank's own or that of its peers
    gain_s: Floats  # growth of self time
    ratio: Floats  # self time now over the healthy one
    common: float  # the ratio that all ranks share
    slowdown_s: float  # how much longer an iteration of the job takes
    job_before_s: float
    job_after_s: float

    @property
    def ranks(self) -> Ints:
        return self.after.ranks

    @property
    def on_gpu(self) -> NDArray[np.bool_]:
        """Whose times are those of the rank's GPU."""
        return self.after.ahead_s >= 0

    @property
    def follows_host(self) -> NDArray[np.bool_]:
        """Which ranks' GPUs wait for their hosts, if they are slower.

        A host that is an iteration ahead keeps no GPU waiting. Else the GPU's work goes on for as long after the host
        has called all of it as the host was ahead: if that has not grown with the own time, the host has. A host whose
        CPU is shared is at times less far ahead, so that the iteration with the most shows growth, too.
        """
        after, before = self.after, self.before
        if before is None:
            slow = after.ahead_s < _MOST_HOST * after.self_s
        else:
            grown = np.maximum(
                after.ahead_s - np.minimum(before.ahead_s, before.duration_s),
                after.most_ahead_s - np.minimum(before.most_ahead_s, before.duration_s),
            )
            slow = (grown < _MOST_HOST * self.gain_s) & (before.ahead_s >= 0)
        return self.on_gpu & slow & (after.ahead_s < after.duration_s)

    @property
    def share(self) -> Floats:
        """Each rank's gain of self time over the job's slowdown."""
        return self.gain_s / max(self.slowdown_s, 1e-9)

    @property
    def lost_s(self) -> float:
        """The time of which a link must explain a part; without a healthy time, at least a fifth of an iteration."""
        return self.slowdown_s if self.before is not None else max(self.slowdown_s, _LOST * self.job_after_s)

    @property
    def share_of_all(self) -> float:
        """The part of the job's growth that is common to all ranks; 0 when there is hardly any.

        Ratios, not seconds: when all ranks take twice as long, so do the bubbles between them.
        """
        if self.common < MIN_RATIO:
            return 0.0
        return (self.common - 1.0) / max(self.job_after_s / self.job_before_s - 1.0, 1e-9)


def growth_against_peers(after: Sequence[IterationSummary], layout: InferredLayout) -> Growth:
    """The growth of each rank over its peers, for want of a healthy time."""
    now = profile(after)
    base = peer_base(now, layout)
    gain = now.self_s - base
    job = float(np.median(now.duration_s))
    slowdown = max(float(gain.max(initial=0.0)), 1e-9)
    ratio = now.self_s / np.maximum(base, 1e-9)
    return Growth(None, now, base, gain, ratio, 1.0, slowdown, job - slowdown, job)


def growth_since(before: Sequence[IterationSummary], after: Sequence[IterationSummary]) -> Growth | None:
    """The growth of the ranks that have iterations both before and after; None when there is none."""
    then, now = profile(before), profile(after)
    shared = np.intersect1d(then.ranks, now.ranks)
    if len(shared) == 0:
        return None
    then, now = then.at(shared), now.at(shared)
    ratio = now.self_s / np.maximum(then.self_s, 1e-9)
    # Victims do not grow, and up to a third of the ranks may be slow themselves: a low quantile is what all share.
    common = max(1.0, float(np.quantile(ratio, 0.3, method="lower")))
    job_before, job_after = float(np.median(then.duration_s)), float(np.median(now.duration_s))
    slowdown = max(job_after - job_before, 1e-9)
    gain = now.self_s - then.self_s
    return Growth(then, now, then.self_s, gain, ratio, common, slowdown, job_before, job_after)


def peer_base(now: Profile, layout: InferredLayout) -> Floats:
    """For each rank the lower median of self time among the ranks of its pipeline stage.

    Who has no known stage in a pipeline has no known peers, and is its own measure.
    """
    stage = np.array([layout.stages.get(int(rank), -1) for rank in now.ranks])
    base: Floats = np.zeros(len(stage))
    for index in np.unique(stage):
        here = stage == index
        alone = index < 0 and len(layout.stages) > 0
        base[here] = now.self_s[here] if alone else np.quantile(now.self_s[here], 0.5, method="lower")
    return base
