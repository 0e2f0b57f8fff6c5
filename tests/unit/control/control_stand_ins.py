"""Stand-ins around the controller's core: simple locators, virtual nodes, and effects as readable lines.

The locators here are deliberately plain: they blame who plainly differs. They stand for ``keepstep.locate``, which has
tests of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from keepstep.control.effects import (
    Disconnect,
    Effect,
    Exit,
    Say,
    Send,
    StorePlacement,
    StoreStop,
    WriteIncident,
)
from keepstep.control.incidents.locators import Locators
from keepstep.core.deaths import testimony
from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Culprit, Diagnosis, Link
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import (
    ClockSample,
    GroupInfo,
    IterationSummary,
    OpInFlight,
    PathProbe,
    RankState,
    Stillness,
)
from keepstep.core.validation import DeviceFigure, LinkFigure, RankFigures, RankTests
from keepstep.report.verdict import render, render_closing
from keepstep.wire.messages import (
    Hold,
    Kill,
    Message,
    Placement,
    ProbeRequest,
    ProfileRequest,
    Refused,
    Release,
    RunTests,
    SaveRings,
    StateRequest,
    Stop,
    Validated,
    Welcome,
)


class PlainLocators(Locators):
    """Slow: the largest growth of own time. Hang: who waits in nothing. Crash: the earliest, else as a hang."""

    def offsets(self, samples: Mapping[str, Sequence[ClockSample]]) -> None:
        return None

    def slow(self, evidence: Evidence) -> Diagnosis:
        before, after, nodes = evidence.before, evidence.after, evidence.nodes
        old = {rank: mean(r.self_s for r in before if r.rank == rank) for rank in {r.rank for r in before}}
        new = {rank: mean(r.self_s for r in after if r.rank == rank) for rank in {r.rank for r in after}}
        growth = {rank: new[rank] / old[rank] for rank in old if rank in new and old[rank] > 0}
        worst = max(growth, key=lambda rank: (growth[rank], -rank), default=None)
        if worst is None or growth[worst] < 1.2:
            return Diagnosis("slow", (), tuple(sorted(nodes)), (), ("own times of ranks that differ",))
        blamed = Culprit(worst, None, nodes[worst], "forward", growth[worst], "high", "compute")
        others = tuple(sorted(set(nodes) - {worst}))
        return Diagnosis("slow", (blamed,), others, (f"own time of rank {worst} ×{growth[worst]:.1f}",), ())

    def blocks_wanted(self, evidence: Evidence, culprits: Sequence[Culprit]) -> tuple[int, ...]:
        return ()

    def stages(self, evidence: Evidence) -> dict[int, int]:
        return {}

    def sharpen(self, evidence: Evidence, diagnosis: Diagnosis) -> Diagnosis:
        return diagnosis

    def hang(self, evidence: Evidence) -> Diagnosis:
        states, nodes, probes = evidence.states, evidence.nodes, evidence.probes
        idle = [state.rank for state in states if not state.in_flight]
        waiting = tuple(state.rank for state in states if state.in_flight)
        names = tuple(dict.fromkeys(nodes[rank] for rank in waiting))
        silent = [rank for rank in nodes if rank not in {*idle, *waiting}]
        if self.calls_differ(states, evidence.groups):
            odd = [state.rank for state in states if any(one.op != Op.ALLREDUCE for one in state.in_flight)]
            blamed = tuple(
                Culprit(rank, None, nodes[rank], "", 0, "high", "another operation") for rank in odd
            )
            victims = tuple(rank for rank in waiting if rank not in odd)
            return Diagnosis("desync", blamed, victims, (), (), "group dp seq 7: operations differ")
        if not idle and silent:
            return self.silence(waiting, silent, nodes, probes)
        if not idle and len(names) > 2:
            return self.transfer(waiting, nodes, names, probes)
        if not idle:
            return Diagnosis("hang", (), waiting, (), ("the state of a rank that waits for nobody",))
        blamed = tuple(
            Culprit(rank, None, nodes[rank], "backward", 0, "high", "never entered") for rank in idle
        )
        return Diagnosis("hang", blamed, waiting, ("one root",), (), "group dp ALLREDUCE seq 7")

    def silence(
        self,
        waiting: tuple[int, ...],
        silent: Sequence[int],
        nodes: Mapping[int, str],
        probes: Sequence[PathProbe],
    ) -> Diagnosis:
        pairs = tuple((nodes[a], nodes[b]) for a in waiting for b in silent)
        lost = {(p.source, p.target): p for p in probes if not p.arrived}
        if lost and len(lost) < len(probes):
            link = next(
                Link((a, b), (nodes[a], nodes[b]))
                for a in waiting
                for b in silent
                if (nodes[a], nodes[b]) in lost
            )
            blamed = (Culprit(None, link, "", "transfer", 0, "high", "path broken"),)
        else:
            cause = "node unreachable" if lost else "silent"
            blamed = tuple(Culprit(rank, None, nodes[rank], "", 0, "medium", cause) for rank in silent)
        return Diagnosis(
            "hang", blamed, waiting, (f"{len(probes)} probes",), (), "group dp ALLREDUCE seq 7", pairs
        )

    def transfer(
        self,
        waiting: tuple[int, ...],
        nodes: Mapping[int, str],
        names: tuple[str, ...],
        probes: Sequence[PathProbe],
    ) -> Diagnosis:
        pairs = tuple((one, other) for one in names for other in names if one < other)
        lost = [pair for pair in pairs if any(p.outcome == "timeout" and p.source == pair[0] for p in probes)]
        first = {node: rank for rank, node in reversed([*nodes.items()])}
        blamed = tuple(
            Culprit(None, Link((first[a], first[b]), (a, b)), "", "transfer", 0, "high", "path broken")
            for a, b in lost
        )
        missing = () if blamed else ("the path on which nothing comes through",)
        told = (f"{len(probes)} probes",)
        return Diagnosis("hang", blamed, waiting, told, missing, "group dp ALLREDUCE seq 7", pairs)

    def calls_differ(self, states: Sequence[RankState], groups: Mapping[str, GroupInfo]) -> bool:
        return len({flight.op for state in states for flight in state.in_flight}) > 1

    def waits_recorded(self, evidence: Evidence) -> bool:
        return True

    def waits_seen(self, evidence: Evidence) -> bool:
        return True

    def hidden_waits(self, evidence: Evidence) -> frozenset[int]:
        return frozenset()

    def probed(self, diagnosis: Diagnosis, probes: Sequence[PathProbe]) -> Diagnosis:
        return diagnosis

    def crash(self, evidence: Evidence) -> Diagnosis:
        findings = [finding for finding in evidence.findings if finding.kind == "crash"]
        own = [finding for finding in findings if testimony(finding) != "echo"]
        if not own:
            left = [finding.rank for finding in evidence.findings if finding.kind == "exit"]
            return self.echoes(evidence, [finding.rank for finding in findings], left)
        first = min(own, key=lambda finding: finding.time_s)
        victims = tuple(finding.rank for finding in findings if finding.rank != first.rank)
        blamed = Culprit(first.rank, None, first.node, "", 0, "high", "process died", first.message)
        return Diagnosis("crash", (blamed,), victims, (f"{len(findings)} deaths",), ())

    def echoes(self, evidence: Evidence, died: Sequence[int], left: Sequence[int]) -> Diagnosis:
        idle = [state.rank for state in evidence.states if not state.in_flight]
        cause = "left with exit code 0" if left else "never entered"
        blamed = tuple(
            Culprit(rank, None, evidence.nodes[rank], "", 0, "high", cause) for rank in left or idle
        )
        victims = tuple(rank for rank in died if rank not in (left or idle))
        missing = () if blamed else ("whom they waited for",)
        return Diagnosis("crash", blamed, victims, (f"{len(died)} deaths of waiting",), missing)


def iterations(
    ranks: Sequence[int],
    first: int,
    last: int,
    *,
    onset: int,
    until: int,
    slow_rank: int,
    before_s: float,
    after_s: float,
    own_s: float | None = None,
) -> tuple[IterationSummary, ...]:
    """All ranks take ``after_s`` from ``onset`` to ``until``; only the slow rank's own time grows, to ``own_s``."""
    slow_own_s = 0.8 * after_s if own_s is None else own_s
    rows: list[IterationSummary] = []
    for step in range(max(first, 0), last + 1):
        slow = onset <= step < until
        for rank in ranks:
            own = slow_own_s if slow and rank == slow_rank else before_s * 0.8
            total = after_s if slow else before_s
            rows.append(IterationSummary(rank, step, step * before_s, total, own, total - own))
    return tuple(rows)


def all_reduce(since_s: float, op: Op = Op.ALLREDUCE) -> OpInFlight:
    """The operation that ranks are in."""
    return OpInFlight("dp", int(op), -1, 7, since_s)


def state(
    rank: int, now_s: float, *, step: int, idle_s: float, waits: bool, op: Op = Op.ALLREDUCE
) -> RankState:
    """A rank of which nothing moves (``waits`` False) or in an all-reduce, or another operation."""
    since_s = now_s - idle_s
    flying = (all_reduce(since_s, op),) if waits else ()
    known = (rank, True, step, 2, since_s, 100, since_s, now_s, flying, (), "S")
    stillness = None if waits else Stillness("still", since_s, "wait (train.py:14)", now_s)
    return RankState(*known, process=1000 + rank, stillness=stillness)


def figures(tests: RankTests, *, slow_rank: int = -1, slow_link: tuple[int, int] = (-1, -1)) -> RankFigures:
    """What a held rank would measure: half the figure on a slow device, a tenth on a slow link."""
    received = [one for one in tests.transfers if one.target == tests.rank]
    links = tuple(
        LinkFigure(
            one.source,
            one.target,
            one.topology,
            1 << 20,
            1e8 if (one.source, one.target) == slow_link else 1e9,
        )
        for one in received
    )
    return RankFigures(
        tests.rank, (DeviceFigure(tests.rank, "fp32", 1.0 if tests.rank == slow_rank else 2.0),), links
    )


def describe(effect: Effect, names: Mapping[int, str], now_unix_s: float | None = None) -> list[str]:
    """One effect for people, verdicts in full."""
    if isinstance(effect, Send):
        to = " ".join(names.get(peer, str(peer)) for peer in effect.peers)
        return [f"-> {to}: {describe_message(effect.message)}"]
    if isinstance(effect, WriteIncident):
        return [f"write {effect.incident.number:04d} {effect.incident.kind} {effect.incident.status}"]
    if isinstance(effect, Say):
        if effect.what == "closes":
            return [f"  | {render_closing(effect.incident)}"]
        text = [f"  | {line}" for line in render(effect.incident, now_unix_s=now_unix_s).splitlines()]
        return [f"say {effect.what}", *text]
    if isinstance(effect, StorePlacement):
        return [f"store the placement of {len(effect.placements)} nodes"]
    if isinstance(effect, StoreStop):
        return ["store what the job ends with"]
    if isinstance(effect, Disconnect):
        return [f"close {names.get(effect.peer, effect.peer)}"]
    assert isinstance(effect, Exit)
    return [f"exit {effect.exit_code}: {effect.reason}"]


def describe_message(message: Message) -> str:
    """The parts of a message that a reader of a scenario wants to see."""
    if isinstance(message, Welcome):
        return "Welcome"
    if isinstance(message, Placement):
        last = f"of {message.node_count}, ranks from {message.first_rank} of {message.world_size}"
        return (
            f"Placement node {message.node_rank} {last}, master {message.master_addr}:{message.master_port}"
        )
    if isinstance(message, ProfileRequest):
        return f"ProfileRequest {message.request} steps {message.first_step}-{message.last_step}"
    if isinstance(message, StateRequest):
        return f"StateRequest {message.request}{' with stacks' if message.stacks else ''}"
    if isinstance(message, ProbeRequest):
        return f"ProbeRequest {message.request} to {' '.join(target.node for target in message.targets)}"
    if isinstance(message, Hold):
        return f"Hold at the end of step {message.step}"
    if isinstance(message, RunTests):
        sends = sum(len(one.endpoints) for one in message.ranks)
        return f"RunTests ranks {fold_ranks(one.rank for one in message.ranks)}, {sends} peers to send to"
    if isinstance(message, Release):
        return "Release"
    if isinstance(message, Validated):
        if message.outcome is None:
            return f"Validated: {message.refused}"
        slow = [f"rank {one.figure.rank}" for one in message.outcome.devices]
        slow += [f"link {one.source}-{one.target}" for one in message.outcome.links]
        missing = f", {len(message.outcome.missing)} missing" if message.outcome.missing else ""
        return f"Validated: {', '.join(slow) or 'alike'}{missing}"
    if isinstance(message, Kill):
        return f"Kill rank {message.rank}, process {message.process}: {message.reason}"
    if isinstance(message, SaveRings):
        return f"SaveRings {message.incident}"
    if isinstance(message, Stop):
        return f"Stop {message.exit_code}: {message.reason}"
    assert isinstance(message, Refused)
    return f"Refused: {message.reason}"
