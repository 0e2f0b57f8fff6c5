"""The locating functions that the controller calls, as one object: tests and simulations give their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from keepstep.core.evidence import Evidence
from keepstep.core.incident import Culprit, Diagnosis
from keepstep.core.node_clocks import Clocks
from keepstep.core.slow_steps import SlowSteps
from keepstep.core.summary import ClockSample, GroupInfo, IterationSummary, PathProbe, RankState
from keepstep.core.told import Failure

# Named as missing in a diagnosis where neither `Locators.waits_recorded` nor `Locators.waits_seen` holds.
NO_WAITS = (
    "what ranks wait for: the ends of their operations are not recorded (device backends, such as NCCL)"
)
_FEW_SAMPLES = 20_000  # with more clock samples, only clocks that matter to the verdict are compared


class Locators:
    """Pure functions of ``keepstep.locate``: evidence in, diagnosis out.

    ``layout``: the parallel layout that the operator declared, e.g. ``tp2-dp4-pp2``; inferred when empty.
    """

    def __init__(self, layout: str = "") -> None:
        self._layout = layout

    def offsets(self, samples: Mapping[str, Sequence[ClockSample]]) -> Clocks | None:
        """The clocks of the nodes, for ``Evidence.clocks``."""
        few = sum(map(len, samples.values())) <= _FEW_SAMPLES
        return _locate().estimate_offsets(samples) if few else _locate().SampledClocks(samples)

    def slow(self, evidence: Evidence) -> Diagnosis:
        """Who makes the job slower."""
        return _locate().locate_slow(self._with_layout(evidence))

    def blocks_wanted(self, evidence: Evidence, culprits: Sequence[Culprit]) -> tuple[int, ...]:
        """Ranks whose blocks would tell more about these culprits."""
        return _locate().blocks_wanted(self._with_layout(evidence), culprits)

    def stages(self, evidence: Evidence) -> Mapping[int, int] | None:
        """Pipeline stages by rank; empty where there is no pipeline, None where that cannot be told."""
        found = _locate().layout_of(self._with_layout(evidence))
        return found.stages if found.stage_count else None if found.groups_with("pp") else {}

    def own_times(
        self, evidence: Evidence, stages: Mapping[int, int], healthy: Mapping[int, float] | None = None
    ) -> Sequence[IterationSummary]:
        """The slow iterations without waits that own times hold.

        ``stages``: pipeline stages by rank. ``healthy``: own times in seconds that ranks have while nothing is slow.
        """
        return _locate().without_hidden_waits(evidence, stages, healthy)

    def slow_steps(
        self,
        rows: Sequence[IterationSummary],
        base_s: Mapping[int, float],
        blamed: Collection[int],
        slow_s: float,
    ) -> Mapping[int, SlowSteps]:
        """In which iterations of ``slow_s`` or longer blamed ranks were clearly slower than all ranks but these.

        ``base_s``: the own times that ranks would have, in seconds.
        """
        return _locate().slow_steps(rows, base_s, blamed, slow_s)

    def sharpen(self, evidence: Evidence, diagnosis: Diagnosis) -> Diagnosis:
        """The diagnosis of ``slow``, refined by what the blocks in the evidence tell."""
        return _locate().sharpen(self._with_layout(evidence), diagnosis)

    def hang(self, evidence: Evidence) -> Diagnosis:
        """Who keeps the others waiting."""
        return _locate().locate_hang(evidence)

    def calls_differ(self, states: Sequence[RankState], groups: Mapping[str, GroupInfo]) -> bool:
        """Whether ranks have called one collective so differently that it cannot end."""
        return _locate().calls_differ(states, groups)

    def by_words(
        self,
        diagnosis: Diagnosis,
        failure: Failure,
        nodes: Mapping[int, str],
        addresses: Mapping[str, str],
        witnesses: frozenset[int],
    ) -> Diagnosis:
        """The diagnosis of a crash, with the culprits that words name."""
        return _locate().blame_by_words(diagnosis, failure, nodes, addresses, witnesses)

    def wants_launched(self, evidence: Evidence) -> bool:
        """Whether what NCCL itself counts may tell more than is known."""
        return _locate().wants_launched(evidence)

    def launched(self, evidence: Evidence) -> Diagnosis | None:
        """Who keeps the others waiting, by what NCCL itself counts; None where that tells no more than is known."""
        return _locate().locate_by_launched(evidence)

    def waits_recorded(self, evidence: Evidence) -> bool:
        """Whether the slow iterations show how long ranks waited for each other."""
        return _locate().waits_recorded(evidence)

    def waits_seen(self, evidence: Evidence) -> bool:
        """Whether a rank is seen to wait for others now."""
        return _locate().waits_seen(evidence)

    def hidden_waits(self, evidence: Evidence) -> frozenset[int]:
        """The ranks that may wait for others unseen."""
        return _locate().hidden_waits(evidence)

    def probed(self, diagnosis: Diagnosis, probes: Sequence[PathProbe]) -> Diagnosis:
        """The diagnosis, sharpened by probes of the blamed links."""
        return _locate().with_probes(diagnosis, probes)

    def crash(self, evidence: Evidence) -> Diagnosis:
        """Who died first."""
        return _locate().locate_crash(evidence)

    def _with_layout(self, evidence: Evidence) -> Evidence:
        return replace(evidence, layout=self._layout)


def _locate():
    """The package, imported when it is first needed: numpy is not in the controller's start."""
    from keepstep import locate

    return locate
