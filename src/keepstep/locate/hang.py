"""Who holds everybody up: the roots of the wait-for graph (MegaTrace §III-C, "Locate hang issue").

A rank in an operation waits for the members that have not entered it. The culprit waits for nobody: it is in no
operation, or its process is stopped or dead. Where all members are in and none gets out, the transfer is stuck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from keepstep.core.events import Op, Phase
from keepstep.core.incident import Culprit, Diagnosis, IncidentKind, Link
from keepstep.core.ranges import fold_nodes, fold_ranks
from keepstep.core.summary import GroupInfo, OpInFlight, PathProbe, PeerTraffic, RankState
from keepstep.locate._flows import Flow, cut_links, still_gpus
from keepstep.locate._paths import Pair, Paths, common_node, pairs_among
from keepstep.locate._waiting import Pending, pending_operations
from keepstep.locate.clocks import Clocks

_MAX_CULPRITS = 64
_LONGEST_CHAIN = 256  # pipeline stages
_FEW = 4  # more roots than this are hardly all at fault
_STOPPED = ("T", "t")
_MOST_LINKS = 4
_MOST_PATHS = 1024  # to be probed at once
_PROBERS = (
    2  # of a silent node, and as many whose data it does not take: one path alone says nothing of the node
)
UNKNOWN_PROCESS = "?"  # process state of a rank known from a trace only

Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What is known of the hang; ``blocked`` are the ranks that wait in some operation."""

    states: Mapping[int, RankState]
    pending: Sequence[Pending]
    nodes: Mapping[int, str]
    silent_nodes: frozenset[str]
    clocks: Clocks | None
    paths: Paths

    @property
    def silent(self) -> list[int]:
        return sorted(set(self.nodes) - set(self.states))

    def pairs(self, operation: Pending) -> list[Pair]:
        """The pairs of nodes between which the operation's data goes, as far as that can be told."""
        nodes = [self.nodes[rank] for rank in sorted(_members(operation)) if self.nodes.get(rank)]
        around = {self.nodes.get(rank, "") for rank in operation.waiting} if operation.through else ()
        return pairs_among(nodes, around)


@dataclass(frozen=True, slots=True)
class _Roots:
    ranks: tuple[int, ...]
    blocked: frozenset[int]
    sure: bool  # found with every wait taken as one, not by leaving some out


def locate_hang(
    states: Sequence[RankState],
    groups: Mapping[str, GroupInfo],
    nodes: Mapping[int, str],
    silent_nodes: Collection[str] = (),
    clocks: Clocks | None = None,
    traffic: Sequence[PeerTraffic] = (),
    probes: Sequence[PathProbe] = (),
    addresses: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Name who never entered, stopped, died or entered something else; a stuck transfer when all have entered.

    Args:
        states: where the ranks are; those that did not tell may be missing.
        groups: the process groups by name.
        nodes: node name by rank, of all ranks of the job.
        silent_nodes: nodes whose agent does not answer.
        clocks: of the nodes; used to order ranks that stopped, not needed.
        traffic: what nodes sent to each other over TCP before and after they stopped.
        probes: what came of probes of the paths between nodes; which are wanted, ``Diagnosis.paths`` says.
        addresses: node name by address, of nodes that told nothing.
    """
    by_rank = {state.rank: state for state in states}
    pending = pending_operations([state for state in states if state.alive], groups)
    paths = Paths(probes, traffic, addresses)
    known = _Evidence(by_rank, _with_dead(pending, by_rank), nodes, frozenset(silent_nodes), clocks, paths)
    gone = [state.rank for state in states if not state.alive or state.process_state in _STOPPED]
    if gone:
        return _gone(known, sorted(gone))
    mixed = next((p for p in known.pending if len(p.ops) > 1 and p.collective), None)
    if mixed is not None:
        return _desync(known, mixed)
    roots = _roots(known)
    if left := _left_in(known, roots.ranks):
        return _left_behind(known, roots, left)
    if roots.ranks:
        return _never_entered(known, roots)
    return _no_root(known, roots)


def _with_dead(pending: Sequence[Pending], by_rank: Mapping[int, RankState]) -> list[Pending]:
    """A dead process enters nothing: its place in ``unknown`` (its state was left out) is among the absent."""
    dead = {rank for rank, state in by_rank.items() if not state.alive}
    if not dead:
        return list(pending)
    return [
        replace(
            p,
            absent=(*p.absent, *(r for r in p.unknown if r in dead)),
            unknown=tuple(r for r in p.unknown if r not in dead),
        )
        for p in pending
    ]


def _roots(known: _Evidence) -> _Roots:
    """Ranks that others wait for and that wait for nobody themselves.

    An asynchronous operation in flight looks like a wait. When that leaves nobody to blame (everybody waits for
    somebody), the doubtful waits are left out: first sends, then what a rank entered before it went on to other things.
    """
    blocking = [p for p in known.pending if not p.entered_by_all]
    in_transfer = [p for p in known.pending if p.entered_by_all and p.through == 0]
    senders = frozenset(p.source for p in in_transfer if p.firm and _still_sends(known, p))
    awaited = {rank for p in blocking for rank in p.absent}
    told_by_all = not any(p.unknown for p in blocking)
    blocked: frozenset[int] = frozenset()
    # a silent rank or a stuck transfer explains why nobody is left: then only sends are doubted
    for level in range(3 if told_by_all and not in_transfer else 2):
        waits = [p for p in blocking if level == 0 or not p.one_sided] + in_transfer
        blocked = frozenset(rank for p in waits for rank in (p.firm if level == 2 else p.waiting)) | senders
        ranks = tuple(sorted(awaited - blocked))
        if ranks:
            return _Roots(ranks, blocked, level == 0)
    return _Roots((), blocked, False)


def _still_sends(known: _Evidence, message: Pending) -> bool:
    """The sender of a message that its receiver waits for has not seen the end of its send, either."""
    if message.collective or message.source not in known.states:
        return False
    return any(
        (flight.op, flight.group, flight.peer, flight.seq)
        == (Op.SEND, message.group, message.target, message.seq)
        for flight in known.states[message.source].in_flight
    )


def _never_entered(known: _Evidence, roots: _Roots) -> Diagnosis:
    waited_for: dict[int, int] = {}
    for p in known.pending:
        for rank in p.absent:
            waited_for[rank] = waited_for.get(rank, 0) + len(p.waiting)
    last = _last_progress(known, roots.ranks)
    order = sorted(roots.ranks, key=lambda rank: (-waited_for[rank], last[rank]))
    first = next(p for p in known.pending if order[0] in p.absent)
    if len(order) > _FEW and 2 * len(order) > len(known.states):
        return _hardly_any_entered(known, order, first)
    confidence: Confidence = "high" if roots.sure else "medium"
    if len(order) > _FEW:
        confidence = "low"
    elif known.silent:
        confidence = "medium"
    culprits = tuple(_culprit(known, rank, first, confidence) for rank in order[:_MAX_CULPRITS])
    graph = f"wait-for graph has {_roots_text(order)}"
    return _diagnosis(known, culprits, set(order), first, (graph, *_progress_lines(known, order)))


def _left_in(known: _Evidence, ranks: Sequence[int]) -> list[Pending]:
    """The operations that others are through and these ranks are not, when each of them waits in one."""
    found = [
        p
        for p in known.pending
        if p.collective and p.entered_by_all and p.through and not set(ranks).isdisjoint(p.waiting)
    ]
    flows = bool(found) and bool(cut_links(known.states, set(ranks)))
    waiting = {rank for p in found for rank in p.waiting if flows or _waits_in(known, rank, p)}
    return found if waiting.issuperset(ranks) else []


def _waits_in(known: _Evidence, rank: int, p: Pending) -> bool:
    return any(flight.waits and _is_of(flight, p) for flight in known.states[rank].in_flight)


def _left_behind(known: _Evidence, roots: _Roots, left: Sequence[Pending]) -> Diagnosis:
    """Others got what they needed and went on: a path to the last ones is bad, or these do not move themselves."""
    network = _transfer(known, left)
    if network.culprits:
        return network
    blamed = _never_entered(known, roots)
    culprits = blamed.culprits
    if not network.paths or any(known.paths.condition(pair) != "sound" for pair in network.paths):
        culprits = tuple(replace(one, confidence="medium") for one in culprits)
    evidence = (*blamed.evidence, *(line for line in network.evidence if line not in blamed.evidence))
    return replace(blamed, culprits=culprits, evidence=evidence, paths=network.paths)


def _hardly_any_entered(known: _Evidence, order: Sequence[int], first: Pending) -> Diagnosis:
    """Most ranks are on their way and a few wait: nobody is singled out."""
    phases = sorted({_phase(known.states[rank]) for rank in order} - {""})
    told = f"ranks {fold_ranks(order)} have not entered {first}; they are in {', '.join(phases) or 'no known phase'}"
    missing = ("what most ranks are busy with: none of it goes through a process group",)
    return _diagnosis(known, (), set(), first, (told,), missing)


def _gone(known: _Evidence, gone: Sequence[int]) -> Diagnosis:
    """Dead and stopped processes explain what waits for them, whatever they were in."""
    first = next((p for p in known.pending if set(gone) & {*p.absent, *p.waiting}), None)
    last = _last_progress(known, gone)
    order = sorted(gone, key=lambda rank: (last[rank], rank))
    culprits = tuple(_culprit(known, rank, first, "high") for rank in order[:_MAX_CULPRITS])
    return _diagnosis(known, culprits, set(gone), first, _progress_lines(known, order))


def _desync(known: _Evidence, mixed: Pending) -> Diagnosis:
    """Different operations under one sequence number: the fewer are the culprits."""
    entered: dict[int, list[int]] = {}
    for rank, state in known.states.items():
        for flight in state.in_flight:
            if flight.group == mixed.group and flight.peer < 0 and flight.seq == mixed.seq:
                entered.setdefault(flight.op, []).append(rank)
                break
        else:
            for stream in state.streams:
                if stream.group == mixed.group and stream.peer < 0 and stream.started == mixed.seq:
                    entered.setdefault(stream.op, []).append(rank)
    by_size = sorted(entered, key=lambda op: (len(entered[op]), op))
    tie = len(entered[by_size[0]]) == len(entered[by_size[-1]])
    odd = sorted(rank for op in (by_size if tie else by_size[:-1]) for rank in entered[op])
    told = ", ".join(
        f"ranks {fold_ranks(entered[op])} in {Op(op).name}{_called_at(known, entered[op], mixed)}"
        for op in reversed(by_size)
    )
    confidence: Confidence = "low" if tie else "high"
    culprits = tuple(_culprit(known, rank, mixed, confidence, "entered another operation") for rank in odd)
    missing = ("which of the two is meant: as many ranks entered one as the other",) if tie else ()
    return _diagnosis(known, culprits, set(odd), mixed, (told,), missing, "desync")


def _no_root(known: _Evidence, roots: _Roots) -> Diagnosis:
    stuck = [p for p in known.pending if p.entered_by_all and p.through == 0]
    certain = [p for p in stuck if p.firm == p.waiting]
    if certain:  # all of its members told that they are in it: silent ranks elsewhere do not matter
        return _transfer(known, certain)
    for p in known.pending:
        if p.unknown:
            circle = _waiting_in_circles(known)
            return _circle(known, circle) if circle else _silent(known, p)
    stuck += [p for p in known.pending if p.entered_by_all and p.through and known.paths.bad(known.pairs(p))]
    if stuck:
        return _transfer(known, stuck)
    unfinished = [p for p in known.pending if p.entered_by_all and p.through > len(p.waiting)]
    if unfinished:
        ranks = sorted({rank for p in unfinished for rank in p.waiting})
        culprits = tuple(
            _culprit(known, r, unfinished[0], "medium", "did not finish") for r in ranks[:_MAX_CULPRITS]
        )
        told = f"{unfinished[0].through} members are through {unfinished[0]}"
        return _diagnosis(known, culprits, set(ranks), unfinished[0], (told,))
    if roots.blocked:
        return _circle(known, sorted(roots.blocked))
    phases = sorted({_phase(state) for state in known.states.values()})
    told = f"no rank is in an operation; phases: {', '.join(phases) or 'none told'}"
    missing = ("what all ranks wait for: none of it goes through a process group",)
    return _diagnosis(known, (), set(), None, (told,), missing)


def _waiting_in_circles(known: _Evidence) -> list[int]:
    """Ranks that told something and wait, directly or through others, in a circle: no silent rank explains that."""
    waits = [p for p in known.pending if p.absent and not p.one_sided]
    inside = {rank for p in waits for rank in p.waiting}
    while True:
        waits = [p for p in waits if not inside.isdisjoint(p.absent)]
        left = {rank for p in waits for rank in p.waiting}
        if left == inside:
            return sorted(inside)
        inside = left


def _circle(known: _Evidence, circle: Sequence[int]) -> Diagnosis:
    """Ranks that wait for each other have left the common order of operations: who is it?"""
    open_operations = [p for p in known.pending if p.absent]
    told = f"ranks {fold_ranks(circle)} wait for each other: {'; '.join(str(p) for p in open_operations[:2])}"
    odd = _fewer_than_its_company(known, open_operations)
    suspect = odd if odd is not None else _most_missed(open_operations)
    if suspect is None:
        missing = ("which rank left the common order of operations: each of these waits for another of them",)
        return _diagnosis(known, (), set(), open_operations[0], (told,), missing, "desync")
    main = next((p for p in open_operations if suspect in p.absent), open_operations[0])
    culprit = _culprit(known, suspect, main, "medium", "skipped an operation")
    where = [f"rank {suspect} waits{_called_at(known, [suspect])}"] if _called_at(known, [suspect]) else []
    if _called_at(known, main.waiting, main):
        where.append(f"ranks {fold_ranks(main.waiting)} wait for it{_called_at(known, main.waiting, main)}")
    return _diagnosis(known, (culprit,), {suspect}, main, (told, *where), (), "desync")


def _called_at(known: _Evidence, ranks: Sequence[int], p: Pending | None = None) -> str:
    """The user's line that most of these ranks called ``p`` from (by default what each entered first)."""
    sites = Counter(
        flight.site
        for rank in ranks
        for flight in [one for one in known.states[rank].in_flight if p is None or _is_of(one, p)][:1]
        if flight.site
    )
    return f" at {sites.most_common(1)[0][0]}" if sites else ""


def _is_of(flight: OpInFlight, p: Pending) -> bool:
    return flight.group == p.group and flight.seq == p.seq and (flight.peer < 0) == p.collective


def _fewer_than_its_company(known: _Evidence, pending: Sequence[Pending]) -> int | None:
    """The only rank that has started another number of collectives than all that wait in the same one."""
    for p in pending:
        if not p.collective or len(p.waiting) < 3:
            continue
        totals: dict[int, list[int]] = {}
        for rank in p.waiting:
            total = sum(stream.started for stream in known.states[rank].streams if stream.peer < 0)
            totals.setdefault(total, []).append(rank)
        few = min(totals.values(), key=len)
        if len(totals) == 2 and len(few) == 1:
            return few[0]
    return None


def _most_missed(pending: Sequence[Pending]) -> int | None:
    """One that skipped an operation is alone absent from it, while where it went many are absent."""
    blame: dict[int, float] = {}
    for p in pending:
        for rank in p.absent:
            blame[rank] = max(blame.get(rank, 0.0), len(p.waiting) / len(p.absent))
    order = sorted(blame, key=lambda rank: -blame[rank])
    return order[0] if len(order) == 1 or blame[order[0]] >= 1.5 * blame[order[1]] else None


def _silent(known: _Evidence, p: Pending) -> Diagnosis:
    """Everybody who told something waits; only those who told nothing are left."""
    awaited = {rank for one in known.pending for rank in one.unknown}
    order = [rank for rank in known.silent if rank in awaited]
    silent = list(dict.fromkeys(known.nodes.get(rank, "") for rank in order))[:_MAX_CULPRITS]
    told = dict.fromkeys(known.nodes[rank] for rank in sorted(known.states) if known.nodes.get(rank))
    others = [node for node in told if node not in silent]
    pairs = [(other, node) for node in silent for other in _probers(known, p, node, others)]
    reached = {node for other, node in pairs if known.paths.condition((other, node)) in ("sound", "slow")}
    cut = known.paths.bad([(other, node) for other, node in pairs if node in reached])
    if cut and known.paths.condition(cut[0]) != "slow":
        found = _bad_paths(known, [one for one in known.pending if one.unknown], cut)
    else:
        culprits = tuple(_silent_rank(known, rank, p, pairs) for rank in order[:_MAX_CULPRITS])
        found = _diagnosis(known, culprits, set(order), p, ())
    missing = (f"states of ranks {fold_ranks(order)}: reach their nodes by another way",)
    evidence = (*found.evidence, *known.paths.lines(pairs))
    return replace(found, evidence=evidence, missing=missing, paths=tuple(pairs))


def _probers(known: _Evidence, p: Pending, node: str, others: Sequence[str]) -> list[str]:
    """Who is to probe a silent node: those that work with it, and two more."""
    partners = {one for pair in known.pairs(p) if node in pair for one in pair}
    near = [other for other in others if other in partners or known.paths.holds_up((other, node))]
    return near[:_MOST_LINKS] + [other for other in others if other not in near][:_PROBERS]


def _silent_rank(known: _Evidence, rank: int, p: Pending, pairs: Sequence[Pair]) -> Culprit:
    """What is known of a rank that told nothing: whether its node can be reached from others."""
    node = known.nodes.get(rank, "")
    detail = f"told nothing; all others wait, last of all for {p}"
    confidence: Confidence = "medium" if node in known.silent_nodes else "low"
    cause = "silent"
    found = [known.paths.condition(pair) for pair in pairs if pair[1] == node]
    if found and set(found) == {"broken"}:
        cause, confidence = "node unreachable", "high" if len(found) >= _PROBERS else "medium"
    elif found and set(found) <= {"sound", "slow"}:
        detail = f"its node can be reached, the path is not broken; {detail}"
    return Culprit(rank, None, node, "", 0.0, confidence, cause, detail)


def _transfer(known: _Evidence, stuck: Sequence[Pending]) -> Diagnosis:
    """All are in and nobody gets out: a path, or a member that does not move though all paths are sound."""
    pairs = list(dict.fromkeys(pair for p in stuck for pair in known.pairs(p)))[:_MOST_PATHS]
    bad = known.paths.bad(pairs)
    waiting = {rank for p in stuck for rank in p.waiting}
    if cut := cut_links(known.states, waiting):
        found = _cut_links(known, stuck, cut)
    elif bad:
        found = _bad_paths(known, stuck, bad)
    elif 0 < len(gpus := still_gpus(known.states, waiting)) <= min(_FEW, len(waiting) // 2):
        found = _still_gpus(known, stuck, gpus)
    elif readers := _not_reading(known, stuck):
        found = _software(known, stuck, readers)
    elif pairs and all(known.paths.condition(pair) == "sound" for pair in pairs):
        found = _software(known, stuck, ())
    else:
        found = _untested(known, stuck)
    return replace(found, evidence=(*found.evidence, *known.paths.lines(pairs)), paths=tuple(pairs))


def _cut_links(known: _Evidence, stuck: Sequence[Pending], cut: Sequence[Flow]) -> Diagnosis:
    """NCCL's proxies tell which sends the network does not complete: no probe is needed."""
    pairs = list(dict.fromkeys((flow.rank, flow.link.peer) for flow in cut))
    hub = common_node([_nodes_of(known, pair) for pair in pairs])
    culprits = tuple(
        Culprit(None, Link(pair, _nodes_of(known, pair)), hub, "transfer", 0.0, "high", "network", str(flow))
        for pair, flow in zip(pairs[:_MOST_LINKS], cut, strict=False)
    )
    blamed = {rank for pair in pairs for rank in pair}
    main = next((p for p in stuck if not blamed.isdisjoint(_members(p))), stuck[0])
    return _diagnosis(known, culprits, blamed, main, (_entered(main),))


def _nodes_of(known: _Evidence, ranks: tuple[int, int]) -> Pair:
    return known.nodes.get(ranks[0], ""), known.nodes.get(ranks[1], "")


def _still_gpus(known: _Evidence, stuck: Sequence[Pending], gpus: Sequence[int]) -> Diagnosis:
    """The network is done with what it was given; these ranks' GPUs give it no more, and wait for nothing."""
    main = next((p for p in stuck if not set(gpus).isdisjoint(p.waiting)), stuck[0])
    quiet_s = max(link.quiet_s for rank in gpus for link in known.states[rank].links)
    culprits = tuple(
        replace(
            _culprit(known, rank, None, "high" if len(gpus) == 1 else "medium", "its GPU stands still"),
            stage="transfer",
            detail=f"has moved no data of NCCL's for {quiet_s:.0f} s, and waits for nobody",
        )
        for rank in gpus
    )
    return _diagnosis(known, culprits, set(gpus), main, (_entered(main),))


def _bad_paths(known: _Evidence, stuck: Sequence[Pending], bad: Sequence[Pair]) -> Diagnosis:
    """The pairs of nodes between which nothing, or too little, comes through."""
    condition = known.paths.condition(bad[0])
    probed = all(known.paths.between(pair) for pair in bad)
    confidence: Confidence = "high" if condition == "broken" else "medium"
    details = {"broken": "nothing sent between them arrives", "slow": "even an empty message takes long"}
    detail = details.get(condition, "data gets stuck between them")
    if condition == "held up" and probed:
        detail += ", though empty messages pass"
    hub = common_node(bad)
    if hub:
        detail += f"; every such pair has {hub}: its own connection is the likely cause"
    cause = "path broken" if condition == "broken" else "network"
    culprits: list[Culprit] = []
    blamed: set[int] = set()
    for pair in bad[:_MOST_LINKS]:
        main = next((p for p in stuck if _goes_over(known, p, pair)), stuck[0])
        one, other = (_end_at(known, main, node) for node in pair)
        culprits.append(
            Culprit(None, Link((one, other), pair), hub, "transfer", 0.0, confidence, cause, detail)
        )
        blamed |= {one, other}
    main = next((p for p in stuck if _goes_over(known, p, bad[0])), stuck[0])
    return _diagnosis(known, tuple(culprits), blamed, main, (_entered(main),) if main.entered_by_all else ())


def _members(p: Pending) -> tuple[int, ...]:
    return p.members if p.collective else (p.source, p.target)


def _goes_over(known: _Evidence, p: Pending, pair: Pair) -> bool:
    return {known.nodes.get(rank, "") for rank in _members(p)}.issuperset(pair)


def _end_at(known: _Evidence, p: Pending, node: str) -> int:
    """A rank of the operation on that node, any rank there if it has none."""
    ranks = [rank for rank in _members(p) if known.nodes.get(rank) == node]
    return min(ranks or [rank for rank, its in known.nodes.items() if its == node])


def _not_reading(known: _Evidence, stuck: Sequence[Pending]) -> list[int]:
    """The few members for which data came that they do not read; those that are through have read theirs."""
    inside = {rank for p in stuck for rank in p.waiting}
    members = {rank for p in stuck for rank in _members(p)}
    found = sorted(rank for rank in inside if known.states[rank].unread_bytes > 0)
    return found if 2 * len(found) < len(members) else []


def _software(known: _Evidence, stuck: Sequence[Pending], readers: Sequence[int]) -> Diagnosis:
    """The paths carry messages: a member does not move, one of those that do not read where there are such."""
    first = next((p for p in stuck if not set(readers).isdisjoint(p.waiting)), stuck[0])
    pairs = {pair for p in stuck for pair in known.pairs(p)}
    sound = bool(pairs) and all(known.paths.condition(pair) == "sound" for pair in pairs)
    told = [_entered(first)]
    if sound:
        told.append("the paths are sound: a member hangs in software")
    if not readers:
        ranks = fold_ranks({rank for p in stuck for rank in p.waiting})
        missing = (f"which of ranks {ranks} hangs: their stacks, also of the threads that communicate",)
        return _diagnosis(known, (), set(), first, told, missing)
    culprits = tuple(
        replace(
            _culprit(known, rank, None, "high" if sound and len(readers) == 1 else "medium", "does not read"),
            stage="transfer",
            detail=f"{known.states[rank].unread_bytes} bytes came for it and lie unread",
        )
        for rank in readers[:_MAX_CULPRITS]
    )
    return _diagnosis(known, culprits, set(readers), first, told)


def _entered(p: Pending) -> str:
    members = len(p.waiting) + p.through if p.collective else 2
    through = (
        f"{p.through} are through" if p.through > 1 else "one is through" if p.through else "none is through"
    )
    return f"all {members} members entered {p}, {through}"


def _untested(known: _Evidence, stuck: Sequence[Pending]) -> Diagnosis:
    """Before any probe: the network, between two nodes where there are only two."""
    first = min(stuck, key=lambda p: (not p.collective, -p.stuck_s)) if stuck[0].collective else stuck[0]
    ranks = first.waiting if first.collective else (first.source, first.target)
    names = sorted({known.nodes.get(rank, "") for rank in ranks})
    told = _entered(first)
    if len(names) == 2 or len(ranks) == 2:
        one = ranks[0]
        elsewhere = [rank for rank in ranks if known.nodes.get(rank, "") != known.nodes.get(one, "")]
        other = elsewhere[0] if elsewhere else ranks[1]
        link = Link((one, other), (known.nodes.get(one, ""), known.nodes.get(other, "")))
        culprit = Culprit(
            None, link, "", "transfer", 0.0, "medium", "network", "all entered, nothing comes through"
        )
        return _diagnosis(known, (culprit,), {one, other}, first, (told,))
    missing = (f"between which of {fold_nodes(names)} nothing comes through: test them pair by pair",)
    return _diagnosis(known, (), set(), first, (told,), missing)


def _diagnosis(
    known: _Evidence,
    culprits: tuple[Culprit, ...],
    blamed: set[int],
    main: Pending | None,
    evidence: Sequence[str],
    missing: tuple[str, ...] = (),
    kind: IncidentKind = "hang",
) -> Diagnosis:
    victims = tuple(sorted({rank for p in known.pending for rank in p.waiting} - blamed))
    lines = [f"{len(known.states)}/{max(len(known.nodes), len(known.states))} ranks reporting"]
    if main is not None and blamed:
        direct = _direct(known, blamed)
        lines.append(f"{direct} ranks wait for them directly, {max(len(victims) - direct, 0)} through others")
    silent = known.silent
    if silent and not missing:
        missing = (f"states of ranks {fold_ranks(silent)}",)
    summary = str(main) if main is not None else ""
    if main is not None and any(state.process_state != UNKNOWN_PROCESS for state in known.states.values()):
        summary += f" stuck {main.stuck_s:.0f} s"
    return Diagnosis(kind, culprits, victims, (*lines, *evidence), missing, summary)


def _culprit(
    known: _Evidence, rank: int, p: Pending | None, confidence: Confidence, cause: str = ""
) -> Culprit:
    state = known.states[rank]
    phase = _phase(state)
    detail: list[str] = []
    overtaken = next((o for o in known.pending if rank in o.waiting and o.collective and o.through > 0), None)
    # of a live process more is known, and the end of an asynchronous operation only when it waits for it
    if overtaken is not None and (
        state.process_state == UNKNOWN_PROCESS or _waits_in(known, rank, overtaken)
    ):
        cause = cause or "did not finish"
        detail.append(f"has not finished {overtaken}, which {overtaken.through} members are through")
    named = cause or _cause(state, phase)
    if p is not None and rank in p.absent:
        detail.append(str(p) if named == "never entered" else f"never entered {p}")
    if state.alive and not cause and phase:
        batch = f" of micro-batch {state.microbatch}" if state.microbatch >= 0 else ""
        detail.append(f"in {phase}{batch} for {max(state.now_s - state.phase_since_s, 0):.0f} s")
    stage = _pipeline_stage(known, rank)
    if stage is not None:
        detail.append(f"pipeline stage {stage}")
    frame = _innermost_frame(state.stack)
    if frame:
        detail.append(f"at {frame}")
    return Culprit(
        rank,
        None,
        known.nodes.get(rank, ""),
        phase,
        0.0,
        confidence,
        named,
        "; ".join(detail),
    )


def _pipeline_stage(known: _Evidence, rank: int) -> int | None:
    """Its place in the chain of ranks that send to each other, lower ranks first, as frameworks number them."""
    chain: dict[int, set[int]] = {}
    todo = [rank]
    while todo and len(chain) <= _LONGEST_CHAIN:
        one = todo.pop()
        if one not in chain and one in known.states:
            streams = known.states[one].streams
            sends = {stream.peer for stream in streams if stream.op == Op.SEND}
            if sends != {stream.peer for stream in streams if stream.op == Op.RECV} or len(sends) > 2:
                return None  # a ring that sends one way, or no pipeline at all
            chain[one] = sends
            todo += sends
    return sorted(chain).index(rank) if 1 < len(chain) <= _LONGEST_CHAIN else None


def _cause(state: RankState, phase: str) -> str:
    if not state.alive:
        return "process died"
    if state.process_state in _STOPPED:
        return "stopped"
    doing = {"S": "asleep", "D": "stuck in the kernel", "R": "busy"}.get(state.process_state)
    return f"{doing} in {phase}" if doing else "never entered"


def _phase(state: RankState) -> str:
    try:
        return Phase(state.phase).title
    except ValueError:
        return ""


def _innermost_frame(stack: str) -> str:
    """The first line of a stack that names a place; py-spy and faulthandler both print the innermost first."""
    for line in stack.splitlines():
        text = line.strip()
        if ".py" in text:
            return text[:120]
    return ""


def _direct(known: _Evidence, blamed: set[int]) -> int:
    def holds_up(p: Pending) -> bool:
        return not blamed.isdisjoint(p.absent + p.unknown + (p.waiting if p.entered_by_all else ()))

    return len({rank for p in known.pending if holds_up(p) for rank in p.waiting} - blamed)


def _last_progress(known: _Evidence, ranks: Sequence[int]) -> dict[int, float]:
    """When these ranks last did something, on one clock where clocks are known."""
    states = [known.states[rank] for rank in ranks]
    offsets = known.clocks and known.clocks.among({known.nodes.get(rank, "") for rank in ranks})
    if offsets is None:
        return {state.rank: state.last_progress_s - state.now_s for state in states}
    return {
        state.rank: offsets.to_reference_s(known.nodes.get(state.rank, ""), state.last_progress_s)
        for state in states
    }


def _progress_lines(known: _Evidence, order: Sequence[int]) -> tuple[str, ...]:
    lines: list[str] = []
    for rank in order[:3]:
        state = known.states[rank]
        if state.process_state == UNKNOWN_PROCESS:
            continue  # a trace tells when operations were enqueued, not when it was written
        ago = max(state.now_s - state.last_progress_s, 0.0)
        phase, process = _phase(state), state.process_state
        told = [f"last progress {ago:.1f} s ago"]
        told += [f"in {phase}"] if phase else []
        told.append(f"process state {process}" if process else "process gone")
        lines.append(f"rank {rank}: {', '.join(told)}")
    return tuple(lines)


def _roots_text(order: Sequence[int]) -> str:
    return (
        f"one root, rank {order[0]}" if len(order) == 1 else f"{len(order)} roots, ranks {fold_ranks(order)}"
    )
