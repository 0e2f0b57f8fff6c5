"""Diagnoses stuck transfers, where all members are in and nobody gets out, and silent ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from keepstep.core.incident import NETWORK, Confidence, Culprit, Diagnosis, Link
from keepstep.core.ranges import fold_nodes, fold_ranks
from keepstep.core.summary import LinkState, RankState
from keepstep.locate._calls import ranks_of
from keepstep.locate._hang_graph import FEW, MAX_CULPRITS, UNKNOWN_PROCESS, HangEvidence, is_of
from keepstep.locate._paths import Pair, common_node
from keepstep.locate._ports import are_quiet, bad_ports, port_lines, ports_down
from keepstep.locate._waiting import Pending

_LEAST_QUIET_S = 0.5  # a transfer without progress for longer stands still (MegaTrace §IV)
_MOST_LINKS = 4  # links that are named in one diagnosis
_MOST_PATHS = 1024  # paths that are probed at once
# Further nodes that probe a silent node: a single bad path would not prove that the node is at fault.
_PROBERS = 2
_FABRIC = "whether the fabric carries messages: probes go over TCP"


Flow = tuple[int, LinkState]  # a rank, and where its transfers to a peer stand still


def diagnose_silent(known: HangEvidence, p: Pending) -> Diagnosis:
    """Diagnose a hang in which all ranks that reported are waiting: the culprit is among those that did not."""
    awaited = {rank for one in known.pending for rank in one.unknown}
    order = [rank for rank in known.silent if rank in awaited]
    silent = list(dict.fromkeys(known.nodes.get(rank, "") for rank in order))[:MAX_CULPRITS]
    told = dict.fromkeys(known.nodes[rank] for rank in sorted(known.states) if known.nodes.get(rank))
    others = [node for node in told if node not in silent]
    pairs = [(other, node) for node in silent for other in _probers(known, p, node, others)]
    reached = {node for other, node in pairs if known.paths.condition((other, node)) in ("sound", "slow")}
    cut = known.paths.bad([(other, node) for other, node in pairs if node in reached])
    if cut and known.paths.condition(cut[0]) != "slow":
        found = _diagnose_bad_paths(known, [one for one in known.pending if one.unknown], cut)
    else:
        culprits = tuple(_silent_culprit(known, rank, p, pairs) for rank in order[:MAX_CULPRITS])
        culprits += _idle_partners(known, order)
        found = known.diagnosis(culprits, {one.rank for one in culprits if one.rank is not None}, p, ())
    missing = (f"states of ranks {fold_ranks(order)}: reach their nodes by another way",)
    evidence = (*found.evidence, *known.paths.lines(pairs))
    return replace(found, evidence=evidence, missing=missing, paths=tuple(pairs))


def _probers(known: HangEvidence, p: Pending, node: str, others: Sequence[str]) -> list[str]:
    """Nodes that should probe a silent node: the nodes that exchange data with it, and `_PROBERS` more."""
    partners = {one for pair in known.pairs(p) if node in pair for one in pair}
    near = [other for other in others if other in partners or known.paths.holds_up((other, node))]
    return near[:_MOST_LINKS] + [other for other in others if other not in near][:_PROBERS]


def _silent_culprit(known: HangEvidence, rank: int, p: Pending, pairs: Sequence[Pair]) -> Culprit:
    """A rank that did not report, as a culprit; what matters is whether other nodes reach its node."""
    node = known.nodes.get(rank, "")
    detail = f"told nothing; all others wait, last of all for {p}"
    confidence: Confidence = "medium" if node in known.given.silent_nodes else "low"
    cause = "silent"
    found = [known.paths.condition(pair) for pair in pairs if pair[1] == node]
    if found and set(found) == {"broken"}:
        cause, confidence = "node unreachable", "high" if len(found) >= _PROBERS else "medium"
    elif found and set(found) <= {"sound", "slow"}:
        detail = f"its node can be reached, the path is not broken; {detail}"
    return Culprit(rank, None, node, "", 0.0, confidence, cause, detail)


def _idle_partners(known: HangEvidence, silent: Sequence[int]) -> tuple[Culprit, ...]:
    """Ranks of a trace that are in no operation, and with which a silent rank has messages.

    The silent rank may wait for such a one, which only its own trace would tell.
    """
    found: list[Culprit] = []
    for rank, state in sorted(known.states.items()):
        partners = sorted({stream.peer for stream in state.streams}.intersection(silent))
        if partners and not state.in_flight and state.process_state == UNKNOWN_PROCESS:
            detail = f"is in no operation; {ranks_of(partners)}, of which nothing is known, may wait for it"
            found.append(replace(known.culprit(rank, None, "low", "never entered"), detail=detail))
    return tuple(found[:FEW])


def diagnose_transfer(known: HangEvidence, stuck: Sequence[Pending]) -> Diagnosis:
    """Diagnose operations that all members have entered and none leaves: a path is bad, or a member hangs."""
    pairs = list(dict.fromkeys(pair for p in stuck for pair in known.pairs(p)))[:_MOST_PATHS]
    bad = known.paths.bad(pairs)
    waiting = {rank for p in stuck for rank in p.waiting}
    nodes, ports = {node for pair in pairs for node in pair}, known.given.ports
    down = ports_down(ports, nodes)
    fallen = sorted({port.node for port in down})
    if cut := cut_links(known.states, waiting):
        found = _diagnose_cut_links(known, stuck, cut)
    elif 0 < len(fallen) <= 2:
        names = " and ".join(f"{port.port} of {port.node}" for port in down[:_MOST_LINKS])
        found = _diagnose_ports(known, stuck, pairs, fallen, f"port {names} went down", "link down", "high")
    elif bad:
        found = _diagnose_bad_paths(known, stuck, bad)
    elif (lossy := bad_ports(ports, nodes)) is not None:
        found = _diagnose_ports(known, stuck, pairs, lossy.nodes, "; ".join(lossy.evidence[:2]))
    elif 0 < len(gpus := _still_gpus(known.states, waiting)) <= min(FEW, len(waiting) // 2):
        found = _diagnose_still_gpus(known, stuck, gpus)
    elif (readers := _not_reading(known, stuck)) or _is_quiet(known, waiting, nodes):
        found = _diagnose_software(known, stuck, readers)
    elif (begun := next((p for p in stuck if _all_have_begun(known, p)), None)) is not None:
        found = _diagnose_begun(known, begun, sound=known.paths.all_sound(pairs))
    elif known.paths.all_sound(pairs):
        found = _diagnose_software(known, stuck, readers)
    elif not_seen := [p for p in stuck if _may_not_have_begun(known, p)]:
        found = _diagnose_not_seen_to_begin(known, not_seen[0])
    else:
        found = _diagnose_untested(known, stuck)
    lines, missing = (*known.paths.lines(pairs), *port_lines(ports, nodes)), found.missing
    if are_quiet(ports, nodes):
        lines = (*lines, f"ports of {fold_nodes(sorted(nodes))} lost nothing, and none went down")
    if _FABRIC not in missing and any(port.node in nodes for port in ports):
        missing = (*missing, _FABRIC)
    return replace(found, evidence=(*found.evidence, *lines), missing=missing, paths=tuple(pairs))


def _diagnose_ports(
    known: HangEvidence,
    stuck: Sequence[Pending],
    pairs: Sequence[Pair],
    nodes: Sequence[str],
    detail: str,
    cause: str = "network",
    sure: Confidence = "medium",
) -> Diagnosis:
    """The ports of one of these nodes, or at both ends of a link, went down or lose data."""
    both = next((pair for pair in pairs if set(pair) == set(nodes)), None)
    pair = both or next(pair for pair in pairs if nodes[0] in pair)
    main = next((p for p in stuck if _goes_over(known, p, pair)), stuck[0])
    ends = _end_at(known, main, pair[0]), _end_at(known, main, pair[1])
    culprit = _link(known, ends, sure, cause, detail, "" if both else nodes[0])
    told = (_entered(main),) if main.entered_by_all else ()
    return known.diagnosis((culprit,), set(ends), main, told)


def _diagnose_cut_links(known: HangEvidence, stuck: Sequence[Pending], cut: Sequence[Flow]) -> Diagnosis:
    """NCCL's proxy threads know which sends the network does not complete, so no probe is needed."""
    pairs = list(dict.fromkeys((rank, link.peer) for rank, link in cut))
    hub = common_node([_nodes_of(known, pair) for pair in pairs])
    told = [
        f"rank {rank} to rank {link.peer}: {link.in_flight} steps in flight, "
        f"none completed for {link.quiet_s:.0f} s"
        for rank, link in cut
    ]
    named = zip(pairs[:_MOST_LINKS], told, strict=False)
    culprits = tuple(_link(known, pair, "high", "network", detail, hub) for pair, detail in named)
    blamed = {rank for pair in pairs for rank in pair}
    main = next((p for p in stuck if not blamed.isdisjoint(p.members)), stuck[0])
    return known.diagnosis(culprits, blamed, main, (_entered(main),))


def _nodes_of(known: HangEvidence, ranks: tuple[int, int]) -> Pair:
    return known.nodes.get(ranks[0], ""), known.nodes.get(ranks[1], "")


def _link(
    known: HangEvidence, ranks: tuple[int, int], sure: Confidence, cause: str, detail: str, hub: str = ""
) -> Culprit:
    """The link between two ranks as a culprit. ``hub``: the one node that all bad links have."""
    link = Link(ranks, _nodes_of(known, ranks))
    return Culprit(None, link, hub, "transfer", 0.0, sure, cause, detail)


def _rank(known: HangEvidence, rank: int, sure: Confidence, cause: str, detail: str) -> Culprit:
    """A rank that holds up a transfer as a culprit."""
    return Culprit(rank, None, known.nodes.get(rank, ""), "transfer", 0.0, sure, cause, detail)


def _diagnose_still_gpus(known: HangEvidence, stuck: Sequence[Pending], gpus: Sequence[int]) -> Diagnosis:
    """The network has sent all it was given; these ranks' GPUs give it no more and wait for nobody."""
    main = next((p for p in stuck if not set(gpus).isdisjoint(p.waiting)), stuck[0])
    quiet_s = max(link.quiet_s for rank in gpus for link in known.states[rank].links)
    sure: Confidence = "high" if len(gpus) == 1 else "medium"
    detail = f"has moved no data of NCCL's for {quiet_s:.0f} s, and waits for nobody"
    culprits = tuple(_rank(known, rank, sure, "its GPU stands still", detail) for rank in gpus)
    return known.diagnosis(culprits, set(gpus), main, (_entered(main),))


def _may_not_have_begun(known: HangEvidence, p: Pending) -> bool:
    """Whether the device of a rank may be in something before the operation, by what its recorder tells."""
    if p.group not in known.device.names or known.device.told.isdisjoint(p.waiting):
        return False
    return not all(one.begun for one in known.parts_of(p))


def _all_have_begun(known: HangEvidence, p: Pending) -> bool:
    """Whether the devices of all members are seen to be in the operation, and none is through."""
    parts = known.parts_of(p)
    return (
        p.group in known.device.names
        and p.collective
        and set(p.waiting) == set(p.members)
        and len(p.waiting) > 1
        and all(one.begun for one in parts)
    )


def _diagnose_begun(known: HangEvidence, p: Pending, *, sound: bool) -> Diagnosis:
    """All devices are in the operation and none gets out: no rank differs from the others, so it is the network.

    ``sound``: probes came back. They go over TCP, which the fabric need not be.
    """
    names = sorted({known.nodes.get(rank, "") for rank in p.waiting})
    sure: Confidence = "low" if sound else "medium"
    detail = "the devices of all members are in it, and nothing comes through"
    if len(names) == 2 or len(p.waiting) == 2:
        one = p.waiting[0]
        others = [rank for rank in p.waiting if known.nodes.get(rank, "") != known.nodes.get(one, "")]
        culprit = _link(known, (one, (others or p.waiting[1:])[0]), sure, NETWORK, detail)
        missing = ()
    else:
        culprit = Culprit(None, None, "", "transfer", 0.0, sure, NETWORK, detail)
        where = f"of {fold_nodes(names)}" if len(names) > 1 else f"of ranks {fold_ranks(p.waiting)}"
        missing = (f"between which {where} nothing comes through: test them pair by pair",)
    if sound:
        missing = (*missing, _FABRIC)
    blamed = set(culprit.link.ranks) if culprit.link is not None else set[int]()
    return known.diagnosis((culprit,), blamed, p, (_entered(p),), missing)


def _diagnose_not_seen_to_begin(known: HangEvidence, p: Pending) -> Diagnosis:
    """All have called the operation; whether a device has not come to it yet, or the network is to blame, is open."""
    missing = (f"whether the devices of all members have begun {p}: one may be in a kernel that never ends",)
    return known.diagnosis((), set(), p, (_entered(p),), missing)


def diagnose_still_devices(known: HangEvidence) -> Diagnosis | None:
    """Few devices that have not begun what is next on them, while those of all others are in something; None: not so.

    They are in a kernel before it, and wait for nobody. All ranks must have called something that is not finished: else
    one hangs on its host, and the others wait for that.
    """
    # What follows from counts alone, as that a peer has yet to take a message, says nothing of the device.
    calls = {rank: state.in_flight for rank, state in known.states.items()}
    begun = {rank: [one.begun for one in its if one.begun is not None] for rank, its in calls.items()}
    if not all(begun.values()):
        return None
    still = sorted(rank for rank, its in begun.items() if not any(its))
    if not 0 < len(still) <= min(FEW, len(begun) // 2):
        return None
    if any(one.begun is None for rank in still for one in calls[rank]):
        return None  # its device may be in that
    its_own = [p for p in known.pending if not set(still).isdisjoint(p.members)]
    awaited = [p for p in its_own if any(is_of(one, p) for rank in still for one in calls[rank])]
    if not awaited:
        return None
    p = next((p for p in awaited if not set(still).issuperset(p.waiting)), awaited[0])
    detail = f"its device has not begun {p}, those of the others have"
    culprits = tuple(_rank(known, rank, "medium", "its GPU stands still", detail) for rank in still)
    told = (_entered(p),) if p.entered_by_all else ()
    return known.diagnosis(culprits, set(still), p, told)


def _diagnose_bad_paths(known: HangEvidence, stuck: Sequence[Pending], bad: Sequence[Pair]) -> Diagnosis:
    """Pairs of nodes between which nothing, or too little, comes through."""
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
    mains = [next((p for p in stuck if _goes_over(known, p, pair)), stuck[0]) for pair in bad[:_MOST_LINKS]]
    both = zip(mains, bad, strict=False)
    ends = [(_end_at(known, main, pair[0]), _end_at(known, main, pair[1])) for main, pair in both]
    culprits = tuple(_link(known, pair, confidence, cause, detail, hub) for pair in ends)
    told = (_entered(mains[0]),) if mains[0].entered_by_all else ()
    return known.diagnosis(culprits, {rank for pair in ends for rank in pair}, mains[0], told)


def _goes_over(known: HangEvidence, p: Pending, pair: Pair) -> bool:
    """Whether the operation has members on both nodes of the pair."""
    return {known.nodes.get(rank, "") for rank in p.members}.issuperset(pair)


def _end_at(known: HangEvidence, p: Pending, node: str) -> int:
    """The lowest rank on the node that is in the operation, or the lowest on the node if none is."""
    ranks = [rank for rank in p.members if known.nodes.get(rank) == node]
    return min(ranks or [rank for rank, its in known.nodes.items() if its == node])


def _not_reading(known: HangEvidence, stuck: Sequence[Pending]) -> list[int]:
    """Members that leave received data unread, if they are a minority; none otherwise."""
    inside = {rank for p in stuck for rank in p.waiting}
    members = {rank for p in stuck for rank in p.members}
    found = sorted(rank for rank in inside if known.states[rank].unread_bytes > 0)
    return found if 2 * len(found) < len(members) else []


def _diagnose_software(known: HangEvidence, stuck: Sequence[Pending], readers: Sequence[int]) -> Diagnosis:
    """The paths carry messages, so a member hangs: one of ``readers``, which do not read, if any."""
    first = next((p for p in stuck if not set(readers).isdisjoint(p.waiting)), stuck[0])
    sound = known.paths.all_sound({pair for p in stuck for pair in known.pairs(p)})
    told = [_entered(first)]
    if sound:
        told.append("the paths are sound: a member hangs in software")
    if not readers:
        ranks = fold_ranks({rank for p in stuck for rank in p.waiting})
        missing = (f"which of ranks {ranks} hangs: their stacks, also of the threads that communicate",)
        return known.diagnosis((), set(), first, told, missing)
    sure: Confidence = "high" if sound and len(readers) == 1 else "medium"
    culprits = tuple(
        _rank(
            known,
            r,
            sure,
            "does not read",
            f"{known.states[r].unread_bytes} bytes came for it and lie unread",
        )
        for r in readers[:MAX_CULPRITS]
    )
    return known.diagnosis(culprits, set(readers), first, told)


def _entered(p: Pending) -> str:
    """A line of evidence: all members are in, and how many are through."""
    members = len(p.waiting) + p.through if p.collective else 2
    through = {0: "none is", 1: "one is"}.get(p.through, f"{p.through} are")
    return f"all {members} members entered {p}, {through} through"


def _diagnose_untested(known: HangEvidence, stuck: Sequence[Pending]) -> Diagnosis:
    """Nothing was probed yet: suspect the network, and the link if only two nodes or ranks are involved."""
    first = min(stuck, key=lambda p: (not p.collective, -p.stuck_s)) if stuck[0].collective else stuck[0]
    ranks = first.waiting if first.collective else (first.source, first.target)
    names = sorted({known.nodes.get(rank, "") for rank in ranks})
    told = _entered(first)
    if len(names) == 2 or len(ranks) == 2:
        one = ranks[0]
        elsewhere = [rank for rank in ranks if known.nodes.get(rank, "") != known.nodes.get(one, "")]
        other = elsewhere[0] if elsewhere else ranks[1]
        culprit = _link(known, (one, other), "medium", "network", "all entered, nothing comes through")
        return known.diagnosis((culprit,), {one, other}, first, (told,))
    missing = (f"between which of {fold_nodes(names)} nothing comes through: test them pair by pair",)
    if names == [""]:
        waiting = fold_ranks(ranks)
        missing = (
            f"which of ranks {waiting} holds up the others: their stacks, and on which nodes they are",
        )
    return known.diagnosis((), set(), first, (told,), missing)


def _is_quiet(known: HangEvidence, waiting: Collection[int], nodes: Collection[str]) -> bool:
    """Whether NCCL has handed the network nothing that it has not completed, and no port lost anything."""
    counted = all(known.states[rank].links for rank in waiting)
    return counted and are_quiet(known.given.ports, nodes)


def cut_links(states: Mapping[int, RankState], ranks: Collection[int]) -> list[Flow]:
    """Links on which the network has data and completes none, the longest first: all other ranks wait for these."""
    found = [
        (rank, link)
        for rank in sorted(set(ranks) & set(states))
        for link in states[rank].links
        if link.at == "network" and link.quiet_s >= _LEAST_QUIET_S
    ]
    return sorted(found, key=lambda flow: -flow[1].quiet_s)


def _still_gpus(states: Mapping[int, RankState], ranks: Collection[int]) -> list[int]:
    """Ranks whose GPU neither fills nor empties a buffer, though it waits for no data."""
    still: list[int] = []
    for rank in sorted(set(ranks) & set(states)):
        stands = {link.at for link in states[rank].links if link.quiet_s >= _LEAST_QUIET_S}
        if "gpu" in stands and not stands & {"sender", "network"}:
            still.append(rank)
    return still
