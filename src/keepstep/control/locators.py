"""The locating functions that the controller calls, as one object: tests and simulations give their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from keepstep.core.finding import Finding
from keepstep.core.incident import Diagnosis
from keepstep.core.summary import (
    ClockSample,
    GroupInfo,
    HostCause,
    IterationSummary,
    PathProbe,
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

    def hang(
        self,
        states: Sequence[RankState],
        groups: Mapping[str, GroupInfo],
        nodes: Mapping[int, str],
        silent_nodes: Collection[str],
        clocks: Any,
        traffic: Sequence[PeerTraffic],
        probes: Sequence[PathProbe],
    ) -> Diagnosis:
        """Who keeps the others waiting."""
        ...

    def probed(self, diagnosis: Diagnosis, probes: Sequence[PathProbe]) -> Diagnosis:
        """The same slowdown, with what probes of the blamed links say."""
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
        from keepstep.core.layout import ParallelLayout
        from keepstep.locate import declared_layout, locate_slow

        layout = declared_layout(ParallelLayout.declared(self._layout), groups) if self._layout else None
        return locate_slow(before, after, groups, nodes, clocks, causes, layout, traffic)

    def hang(
        self,
        states: Sequence[RankState],
        groups: Mapping[str, GroupInfo],
        nodes: Mapping[int, str],
        silent_nodes: Collection[str],
        clocks: Any,
        traffic: Sequence[PeerTraffic],
        probes: Sequence[PathProbe],
    ) -> Diagnosis:
        from keepstep.locate import locate_hang

        return locate_hang(states, groups, nodes, silent_nodes, clocks, traffic, probes)

    def probed(self, diagnosis: Diagnosis, probes: Sequence[PathProbe]) -> Diagnosis:
        from keepstep.locate import with_probes

        return with_probes(diagnosis, probes)

    def crash(
        self,
        findings: Sequence[Finding],
        states: Sequence[RankState],
        nodes: Mapping[int, str],
        clocks: Any,
    ) -> Diagnosis:
        from keepstep.locate import locate_crash

        return locate_crash(findings, states, nodes, clocks)
