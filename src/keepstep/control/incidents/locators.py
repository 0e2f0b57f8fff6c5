"""The locating functions that the controller calls, as one object: tests and simulations give their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from keepstep.core.evidence import Evidence
from keepstep.core.incident import Culprit, Diagnosis
from keepstep.core.node_clocks import Clocks
from keepstep.core.summary import ClockSample, PathProbe

# Named as missing in a diagnosis where neither `Locators.waits_recorded` nor `Locators.waits_seen` holds.
NO_WAITS = (
    "what ranks wait for: the ends of their operations are not recorded (device backends, such as NCCL)"
)
_FEW_SAMPLES = 20_000  # with more clock samples, only clocks that matter to the verdict are compared


class Locators:
    """Pure functions of ``keepstep.locate``: evidence in, diagnosis out.

    The package is imported when it is first needed: numpy is not in the controller's start. ``layout``: the parallel
    layout that the operator declared, e.g. ``tp2-dp4-pp2``; inferred when empty.
    """

    def __init__(self, layout: str = "") -> None:
        self._layout = layout

    def offsets(self, samples: Mapping[str, Sequence[ClockSample]]) -> Clocks | None:
        """The clocks of the nodes, for ``Evidence.clocks``."""
        from keepstep.locate import SampledClocks, estimate_offsets

        few = sum(map(len, samples.values())) <= _FEW_SAMPLES
        return estimate_offsets(samples) if few else SampledClocks(samples)

    def slow(self, evidence: Evidence) -> Diagnosis:
        """Who makes the job slower."""
        from keepstep.locate import locate_slow

        return locate_slow(self._with_layout(evidence))

    def blocks_wanted(self, evidence: Evidence, culprits: Sequence[Culprit]) -> tuple[int, ...]:
        """Ranks whose blocks would tell more about these culprits."""
        from keepstep.locate import blocks_wanted

        return blocks_wanted(self._with_layout(evidence), culprits)

    def stages(self, evidence: Evidence) -> Mapping[int, int] | None:
        """Pipeline stages by rank; empty where there is no pipeline, None where that cannot be told."""
        from keepstep.locate import layout_of

        found = layout_of(self._with_layout(evidence))
        return found.stages if found.stage_count else None if found.groups_with("pp") else {}

    def sharpen(self, evidence: Evidence, diagnosis: Diagnosis) -> Diagnosis:
        """The diagnosis of ``slow``, refined by what the blocks in the evidence tell."""
        from keepstep.locate import sharpen

        return sharpen(self._with_layout(evidence), diagnosis)

    def hang(self, evidence: Evidence) -> Diagnosis:
        """Who keeps the others waiting."""
        from keepstep.locate import locate_hang

        return locate_hang(evidence)

    def waits_recorded(self, evidence: Evidence) -> bool:
        """Whether the slow iterations show how long ranks waited for each other."""
        from keepstep.locate import waits_recorded

        return waits_recorded(evidence)

    def waits_seen(self, evidence: Evidence) -> bool:
        """Whether a rank is seen to wait for others now."""
        from keepstep.locate import waits_seen

        return waits_seen(evidence)

    def probed(self, diagnosis: Diagnosis, probes: Sequence[PathProbe]) -> Diagnosis:
        """The diagnosis, sharpened by probes of the blamed links."""
        from keepstep.locate import with_probes

        return with_probes(diagnosis, probes)

    def crash(self, evidence: Evidence) -> Diagnosis:
        """Who died first."""
        from keepstep.locate import locate_crash

        return locate_crash(evidence)

    def _with_layout(self, evidence: Evidence) -> Evidence:
        return replace(evidence, layout=self._layout)
