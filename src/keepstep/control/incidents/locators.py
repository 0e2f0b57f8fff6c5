"""The locating functions that the controller calls, as one object: tests and simulations give their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from keepstep.core.finding import Finding
from keepstep.core.incident import Culprit, Diagnosis
from keepstep.core.summary import (
    BlockSummary,
    ClockSample,
    GroupInfo,
    HostCause,
    IterationSummary,
    PathProbe,
    PeerTraffic,
    RankState,
)

# Named as missing in a diagnosis where neither `Locators.waits_recorded` nor `Locators.waits_seen` holds.
NO_WAITS = (
    "what ranks wait for: the ends of their operations are not recorded (device backends, such as NCCL)"
)
_FEW_SAMPLES = 20_000  # with more clock samples, only the clocks that matter to the verdict are compared


class Locators:
    """``keepstep.locate``: evidence in, diagnosis out. It is imported when first needed, as it needs numpy.

    ``layout``: the parallel layout that the operator declared, e.g. ``tp2-dp4-pp2``; inferred when empty. The
    ``clocks`` that functions take are what ``offsets`` returned, or None.
    """

    def __init__(self, layout: str = "") -> None:
        self._layout = layout

    def offsets(self, samples: Mapping[str, Sequence[ClockSample]]) -> Any:
        """The clock offsets of the nodes, in the form that the other functions take."""
        from keepstep.locate import SampledClocks, estimate_offsets

        few = sum(map(len, samples.values())) <= _FEW_SAMPLES
        return estimate_offsets(samples) if few else SampledClocks(samples)

    def slow(
        self,
        before: Sequence[IterationSummary],
        after: Sequence[IterationSummary],
        groups: Mapping[str, GroupInfo],
        nodes: Mapping[int, str],
        clocks: Any,
        causes: Sequence[HostCause],
        traffic: Sequence[PeerTraffic],
    ) -> Diagnosis:
        """Who makes the job slower."""
        from keepstep.locate import locate_slow

        layout = self._declared(groups)
        return locate_slow(before, after, groups, nodes, clocks, causes, layout, traffic)

    def probed(self, diagnosis: Diagnosis, probes: Sequence[PathProbe]) -> Diagnosis:
        """The diagnosis of ``slow``, sharpened by probes of the blamed links."""
        from keepstep.locate import with_probes

        return with_probes(diagnosis, probes)

    def blocks_wanted(
        self,
        culprits: Sequence[Culprit],
        after: Sequence[IterationSummary],
        groups: Mapping[str, GroupInfo],
    ) -> tuple[int, ...]:
        """The ranks whose blocks would tell more about these culprits."""
        from keepstep.core.iteration_table import newest_steps
        from keepstep.locate import blocks_wanted

        few = newest_steps(after)
        return blocks_wanted(culprits, few, groups, self._layout_of(groups, few))

    def sharpen(
        self,
        diagnosis: Diagnosis,
        blocks: Sequence[BlockSummary],
        onset_step: int,
        before: Sequence[IterationSummary],
        after: Sequence[IterationSummary],
        groups: Mapping[str, GroupInfo],
        nodes: Mapping[int, str],
        clocks: Any,
    ) -> Diagnosis:
        """The diagnosis of ``slow``, sharpened by these blocks."""
        from keepstep.core.iteration_table import newest_steps
        from keepstep.locate import sharpen

        layout = self._layout_of(groups, newest_steps(after))
        return sharpen(diagnosis, blocks, onset_step, before, after, groups, layout, nodes, clocks)

    def stages(
        self, rows: Sequence[IterationSummary], groups: Mapping[str, GroupInfo]
    ) -> Mapping[int, int] | None:
        """Pipeline stages by rank; empty where there is no pipeline, None where that cannot be told."""
        from keepstep.core.iteration_table import newest_steps

        found = self._layout_of(groups, newest_steps(rows))
        pipelined = any("pp" in one.roles for one in found.roles.values())
        return found.stages if found.stage_count else None if pipelined else {}

    def waits_recorded(self, rows: Sequence[IterationSummary], groups: Mapping[str, GroupInfo]) -> bool:
        """Whether these iterations show how long ranks waited for each other."""
        from keepstep.locate import waits_recorded

        return waits_recorded(rows, groups)

    def hang(
        self,
        states: Sequence[RankState],
        groups: Mapping[str, GroupInfo],
        nodes: Mapping[int, str],
        silent_nodes: Collection[str],
        clocks: Any,
        traffic: Sequence[PeerTraffic],
        probes: Sequence[PathProbe],
        addresses: Mapping[str, str],
    ) -> Diagnosis:
        """Who keeps the others waiting."""
        from keepstep.locate import locate_hang

        return locate_hang(states, groups, nodes, silent_nodes, clocks, traffic, probes, addresses)

    def waits_seen(self, states: Sequence[RankState], groups: Mapping[str, GroupInfo]) -> bool:
        """Whether a rank is seen to wait for others now."""
        from keepstep.locate import waits_seen

        return waits_seen(states, groups)

    def crash(
        self,
        findings: Sequence[Finding],
        states: Sequence[RankState],
        nodes: Mapping[int, str],
        clocks: Any,
    ) -> Diagnosis:
        """Who died first."""
        from keepstep.locate import locate_crash

        return locate_crash(findings, states, nodes, clocks)

    def _layout_of(self, groups: Mapping[str, GroupInfo], few: Sequence[IterationSummary]) -> Any:
        from keepstep.locate import infer_layout

        return self._declared(groups) or infer_layout(groups, few)

    def _declared(self, groups: Mapping[str, GroupInfo]) -> Any:
        if not self._layout:
            return None
        from keepstep.core.layout import ParallelLayout
        from keepstep.locate import declared_layout

        return declared_layout(ParallelLayout.declared(self._layout), groups)
