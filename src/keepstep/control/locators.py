"""The locating functions that the controller calls, as one object: tests and simulations give their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from keepstep.core.finding import Finding
from keepstep.core.incident import Culprit, Diagnosis
from keepstep.core.summary import (
    BlockSummary,
    ClockSample,
    GroupInfo,
    HostCause,
    IterationSummary,
    PeerTraffic,
    RankState,
)


class Locators(Protocol):
    """Pure functions: evidence in, diagnosis out. ``clocks`` is what ``offsets`` returned, or None."""

    def offsets(self, samples: Mapping[str, Sequence[ClockSample]]) -> Any:
        """Clock offsets between the nodes."""
        ...

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
        ...

    def blocks_wanted(
        self, culprits: Sequence[Culprit], after: Sequence[IterationSummary]
    ) -> tuple[int, ...]:
        """Ranks whose blocks would tell more of these culprits."""
        ...

    def sharpen(
        self,
        diagnosis: Diagnosis,
        blocks: Sequence[BlockSummary],
        onset_step: int,
        after: Sequence[IterationSummary],
        groups: Mapping[str, GroupInfo],
        nodes: Mapping[int, str],
        clocks: Any,
    ) -> Diagnosis:
        """The diagnosis of ``slow`` with what these blocks tell."""
        ...

    def hang(
        self,
        states: Sequence[RankState],
        groups: Mapping[str, GroupInfo],
        nodes: Mapping[int, str],
        silent_nodes: Collection[str],
        clocks: Any,
    ) -> Diagnosis:
        """Who keeps the others waiting."""
        ...

    def crash(
        self,
        findings: Sequence[Finding],
        states: Sequence[RankState],
        nodes: Mapping[int, str],
        clocks: Any,
    ) -> Diagnosis:
        """Who died first."""
        ...


class LibraryLocators:
    """``keepstep.locate``, imported when first needed: numpy is not in the controller's start.

    ``layout``: the parallel layout that the operator declared, e.g. ``tp2-dp4-pp2``; inferred when empty.
    """

    def __init__(self, layout: str = "") -> None:
        self._layout = layout

    def offsets(self, samples: Mapping[str, Sequence[ClockSample]]) -> Any:
        from keepstep.locate import estimate_offsets

        return estimate_offsets(samples)

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
        from keepstep.locate import locate_slow

        layout = self._declared(groups)
        return locate_slow(before, after, groups, nodes, clocks, causes, layout, traffic)

    def blocks_wanted(
        self, culprits: Sequence[Culprit], after: Sequence[IterationSummary]
    ) -> tuple[int, ...]:
        from keepstep.locate import blocks_wanted

        return blocks_wanted(culprits, after)

    def sharpen(
        self,
        diagnosis: Diagnosis,
        blocks: Sequence[BlockSummary],
        onset_step: int,
        after: Sequence[IterationSummary],
        groups: Mapping[str, GroupInfo],
        nodes: Mapping[int, str],
        clocks: Any,
    ) -> Diagnosis:
        from keepstep.locate import infer_layout, sharpen

        last = max((one.step for one in after), default=0)
        layout = self._declared(groups) or infer_layout(
            groups, [one for one in after if one.step >= last - 1]
        )
        return sharpen(diagnosis, blocks, onset_step, after, layout.stages, nodes, clocks)

    def _declared(self, groups: Mapping[str, GroupInfo]) -> Any:
        if not self._layout:
            return None
        from keepstep.core.layout import ParallelLayout
        from keepstep.locate import declared_layout

        return declared_layout(ParallelLayout.declared(self._layout), groups)

    def hang(
        self,
        states: Sequence[RankState],
        groups: Mapping[str, GroupInfo],
        nodes: Mapping[int, str],
        silent_nodes: Collection[str],
        clocks: Any,
    ) -> Diagnosis:
        from keepstep.locate import locate_hang

        return locate_hang(states, groups, nodes, silent_nodes, clocks)

    def crash(
        self,
        findings: Sequence[Finding],
        states: Sequence[RankState],
        nodes: Mapping[int, str],
        clocks: Any,
    ) -> Diagnosis:
        from keepstep.locate import locate_crash

        return locate_crash(findings, states, nodes, clocks)
