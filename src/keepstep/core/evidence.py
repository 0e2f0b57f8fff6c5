"""What is known about an incident when it is to be found out who caused it: the input of every locator."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from keepstep.core.finding import Finding
from keepstep.core.node_clocks import ClockOffsets, Clocks
from keepstep.core.port_counters import PortTraffic
from keepstep.core.summary import (
    BlockSummary,
    GroupInfo,
    HostCause,
    IterationSummary,
    PathProbe,
    PeerTraffic,
    RankState,
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about one incident. A locator reads the fields that matter to its kind of incident.

    Attributes:
        groups: the job's process groups by name.
        nodes: node name by rank, of all ranks of the job, whether they reported or not. Empty when an incident is
            looked into without a job, from a log alone.
        clocks: the clocks of the nodes. They put events on different nodes in order and sharpen the times of messages;
            without them (None) the locators still have durations.
        layout: the parallel layout that the operator declared, e.g. ``tp2-dp4-pp2``. When empty, the roles of groups
            and the pipeline stages of ranks are inferred from traffic, and only when they are needed.
        before: iterations of all ranks from healthy steps. Empty when the job was slow from its first step.
        after: iterations of all ranks from slow steps; ranks that did not answer are missing.
        onset_step: the first slow step; ``blocks`` from earlier steps show what is usual.
        blocks: forward and backward passes and messages of the ranks in ``locate.blocks_wanted``, before and since the
            onset.
        causes: what agents saw outside the training processes: quotas, contention, slow GPU clocks.
        traffic: what nodes sent to each other over TCP before and after the onset. It tells pairs of nodes apart inside
            a collective.
        ports: what the nodes' InfiniBand and RoCE ports counted before and after the onset, or the latest progress.
        states: where each rank is right now: operations in flight, phase, process state. Ranks that did not answer are
            missing.
        silent_nodes: nodes whose agent does not answer.
        probes: outcomes of probes between nodes; ``Diagnosis.paths`` says which ones to make.
        addresses: node name by address, of nodes that reported no traffic of their own.
        findings: deaths of processes, and ranks that ended with exit code 0, as agents and launchers reported them;
            other findings are ignored.
    """

    groups: Mapping[str, GroupInfo]
    nodes: Mapping[int, str]
    clocks: Clocks | None = None
    layout: str = ""
    before: Sequence[IterationSummary] = ()
    after: Sequence[IterationSummary] = ()
    onset_step: int = 0
    blocks: Sequence[BlockSummary] = ()
    causes: Sequence[HostCause] = ()
    traffic: Sequence[PeerTraffic] = ()
    ports: Sequence[PortTraffic] = ()
    states: Sequence[RankState] = ()
    silent_nodes: Collection[str] = ()
    probes: Sequence[PathProbe] = ()
    addresses: Mapping[str, str] = field(default_factory=dict[str, str])
    findings: Sequence[Finding] = ()

    def offsets_among(self, nodes: Collection[str]) -> ClockOffsets | None:
        """Offsets of these nodes' clocks; None where they are not known."""
        return None if self.clocks is None else self.clocks.among(nodes)
