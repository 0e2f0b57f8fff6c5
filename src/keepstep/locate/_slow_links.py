"""From transfers that grew to the pair of nodes between which the path is slow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from keepstep.core.evidence import Evidence
from keepstep.core.incident import NETWORK, Confidence, Culprit, Link
from keepstep.core.iteration_table import table_of
from keepstep.core.ranges import fold_nodes, fold_ranks
from keepstep.locate._candidates import ranks_to_look_at
from keepstep.locate._components import lowest_connected
from keepstep.locate._paths import Pair, common_node
from keepstep.locate._ports import BadPorts, bad_ports
from keepstep.locate._profile import MAD_TO_SIGMA
from keepstep.locate._traffic import slowest_path
from keepstep.locate._transfers import (
    Path,
    Taken,
    Transfer,
    collective_transfers,
    message_transfers,
    messages_now,
)
from keepstep.locate.infer import InferredLayout

MIN_RATIO = 1.3  # least ratio of a slow transfer to its healthy time
PEER_RATIO = 1.1  # least ratio of a slow transfer to those on comparable paths (GREYHOUND §4.3)
_ENOUGH_PEERS = 4  # comparable paths; fewer do not show by their spread what is usual
_SURE = 1.5  # standard errors that are entered as a transfer's error; a slow one must grow by twice that
MIN_SHARE = 0.15  # least part of the job's slowdown that a path must account for
_FAST_RATIO = 1.15  # a path this near its healthy time is not the slow one
_MAX_PAIRS_NODES = 16  # among more nodes no single pair is looked for
_SPREADS = 0.75  # half of what a collective must grow by, as a multiple of its unevenness while healthy
_MAX_LINKS = 4  # named in one diagnosis
_OWN_PORT = "only a port of {} stands out: its own connection is the likely cause"


@dataclass(frozen=True, slots=True)
class SlowLinks:
    """Links to blame, evidence, and what is missing to say more."""

    culprits: tuple[Culprit, ...] = ()
    evidence: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    summary: str = ""
    share: float = 0.0  # part of the slowdown that the links explain


def transfers_since(evidence: Evidence, slowdown_s: float) -> list[Transfer]:
    """The transfers, healthy and now, of all paths that may account for a part of the slowdown."""
    before, after = table_of(evidence.before), table_of(evidence.after)
    ranks = ranks_to_look_at(before, after, evidence.groups, evidence.nodes, _least_gain_s(slowdown_s))
    evidence = replace(evidence, before=before.of_ranks(ranks), after=after.of_ranks(ranks))
    groups = evidence.groups
    old, new = (collective_transfers(rows, groups) for rows in (evidence.before, evidence.after))
    found = [
        Transfer(
            path, groups[path.group].members, now.taken.count, now.taken.nbytes, old[path].shortest_s,
            old[path].shortest_s + now.growth_s(old[path]), _SPREADS * old[path].spread_s,
        )
        for path, now in new.items()
        if path in old
    ]  # fmt: skip
    return found + message_transfers(evidence)


def transfers_against_peers(evidence: Evidence, layout: InferredLayout) -> list[Transfer]:
    """Paths against comparable ones, for want of a healthy time; those without a peer are left out.

    Comparable are groups of the same role, size and spread over nodes, and messages between the same pipeline stages,
    with the same operation and bytes (GREYHOUND §4.3: comparable clusters).
    """
    nodes = evidence.nodes
    clusters: dict[tuple[object, ...], list[tuple[Path, tuple[int, ...], Taken]]] = {}
    for path, one in collective_transfers(evidence.after, evidence.groups).items():
        taken = one.taken
        ranks = evidence.groups[path.group].members
        roles = layout.roles.get(path.group, ())
        alike = roles, path.op, len(ranks), round(taken.nbytes), len({nodes.get(rank) for rank in ranks})
        clusters.setdefault(alike, []).append((path, ranks, taken))
    for path, taken in messages_now(evidence).items():
        ranks = path.source, path.target
        stages = tuple(map(layout.stages.get, ranks))
        alike = stages, path.op, 0, round(taken.nbytes), len({nodes.get(rank) for rank in ranks})
        clusters.setdefault(alike, []).append((path, ranks, taken))
    found: list[Transfer] = []
    for rows in clusters.values():
        if len(rows) < 2:
            continue
        usual = median_low(taken.seconds for _, _, taken in rows)
        spread = 0.0
        if len(rows) >= _ENOUGH_PEERS:
            spread = MAD_TO_SIGMA * median_low(abs(taken.seconds - usual) for _, _, taken in rows)
        error = max(spread, median_low(taken.error_s for _, _, taken in rows))
        found.extend(
            Transfer(
                path, ranks, taken.count, taken.nbytes, usual, taken.seconds,
                _SURE * math.hypot(error, taken.error_s), of_peers=True,
            )
            for path, ranks, taken in rows
        )  # fmt: skip
    return _worst_of_chains(found)


def _worst_of_chains(transfers: Sequence[Transfer]) -> list[Transfer]:
    """The transfers without the messages that are slow only because another pair of their pipeline is.

    A slow message makes the others of its pipeline late: of each chain of ranks only the slowest pair counts.
    """
    gains: dict[tuple[int, int], list[float]] = {}
    for transfer in transfers:
        if transfer.path.source >= 0:
            gains.setdefault(_pair(transfer), []).append(transfer.gain_s)
    chain = lowest_connected(gains)
    worst: dict[int, tuple[int, int]] = {}
    # A slow pair is mostly slow both ways, while lateness goes on one way: down with activations or up with gradients.
    for pair in sorted(gains, key=lambda pair: 4 * min(gains[pair]) + max(gains[pair])):
        worst[chain[pair[0]]] = pair
    left = set(worst.values())
    return [one for one in transfers if one.path.source < 0 or _pair(one) in left]


def _pair(message: Transfer) -> tuple[int, int]:
    """The two ranks of a message, in any order of sending."""
    return min(message.ranks), max(message.ranks)


def blame_links(transfers: Sequence[Transfer], evidence: Evidence, slowdown_s: float) -> SlowLinks:
    """The node pairs whose slowness explains the transfers that grew.

    A pair is named when messages or groups of just two nodes show it, or when only one pair is common to all slow
    paths and absent from the fast ones, or when the connections of one pair lost more of their speed than all others.
    Otherwise nobody is named, and ``missing`` says between whom to test.
    """
    floor, nodes = _least_gain_s(slowdown_s), evidence.nodes
    grown = [t for t in transfers if t.gain_s >= max(floor, 2 * t.error_s * t.count)]
    slow = sorted((t for t in grown if _is_slow(t, slowdown_s)), key=lambda t: -t.gain_s)
    if not slow:
        return SlowLinks()
    spans = {t.path: tuple(sorted({nodes.get(rank, "") for rank in t.ranks})) for t in transfers}
    share = min(slow[0].gain_s / slowdown_s, 9.99) if slowdown_s > 0 else 0.0
    summary = f"transfers on {slow[0].path} are slow"
    found = SlowLinks(evidence=tuple(_describe(t) for t in slow[:3]), summary=summary, share=share)
    direct = [t for t in slow if len(spans[t.path]) <= 2]
    if direct:
        return replace(found, culprits=_named(direct, slow, spans, nodes, share))
    pair, rest = _common_pair(slow, transfers, spans)
    if pair is not None:
        told = "the only pair common to all slow groups and no fast one"
        return replace(found, culprits=(_culprit(pair, slow[0], nodes, "medium", told),))
    path = slowest_path(evidence.traffic, rest)
    if path is not None:
        culprit = _culprit((path.source, path.target), slow[0], nodes, "high", "")
        return replace(found, culprits=(culprit,), evidence=(*found.evidence, str(path)))
    if (bad := bad_ports(evidence.ports, rest)) is not None:
        return replace(
            found, culprits=(_by_ports(bad, slow[0], rest, nodes),), evidence=(*found.evidence, *bad.evidence)
        )
    where = f"{slow[0].path} spans all of them; test them pair by pair"
    missing = (f"which pair of {fold_nodes(rest)} is slow: {where}",)
    group = evidence.groups.get(slow[0].path.group)
    if group is None or not group.is_communicator or slow[0].of_peers:
        return replace(found, missing=missing)
    # Devices time each other's transfers, so it is the network, though not known between whom.
    told = f"transfers of all {len(slow[0].ranks)} ranks take longer after the last arrival"
    culprit = Culprit(None, None, "", "transfer", round(slow[0].ratio, 2), "medium", NETWORK, told)
    return replace(found, culprits=(culprit,), missing=missing)


def links_by_counters(evidence: Evidence) -> SlowLinks:
    """The link that counters alone show to be slow, for want of the times of transfers, as on a device's backend."""
    first = {node: rank for rank, node in sorted(evidence.nodes.items(), reverse=True)}
    path = slowest_path(evidence.traffic, first)
    bad = None if path is not None else bad_ports(evidence.ports, first)
    if path is not None:
        pair, hub, told, slowdown = (path.source, path.target), "", (str(path),), round(path.drop, 2)
    elif bad is not None:
        hub = bad.nodes[0] if len(bad.nodes) == 1 else ""
        pair = (*bad.nodes, *(node for node in sorted(first) if node != hub))[:2]
        told, slowdown = bad.evidence, 0.0
    else:
        return SlowLinks()
    link = Link((first[pair[0]], first[pair[1]]), (pair[0], pair[1]))
    detail = _OWN_PORT.format(hub) if hub else "told by counters: transfers have no times here"
    culprit = Culprit(None, link, hub, "transfer", slowdown, "medium", "network", detail)
    return SlowLinks((culprit,), told, summary="a link is slow")


def _least_gain_s(slowdown_s: float) -> float:
    """Seconds per iteration that a slow path must cost at least."""
    return max(MIN_SHARE * slowdown_s, 1e-4)


def _is_slow(transfer: Transfer, slowdown_s: float) -> bool:
    """Whether the transfer takes so much longer than when healthy, or than its peers, that its path may be slow.

    ``slowdown_s``: how much longer an iteration takes.
    """
    if transfer.of_peers:
        return transfer.ratio > PEER_RATIO
    # A message's healthy time may be mostly waiting: then its growth counts, not the ratio.
    return transfer.ratio >= MIN_RATIO or (transfer.path.source >= 0 and transfer.gain_s >= 0.5 * slowdown_s)


def _named(
    direct: Sequence[Transfer],
    slow: Sequence[Transfer],
    spans: Mapping[Path, tuple[str, ...]],
    nodes: Mapping[int, str],
    share: float,
) -> tuple[Culprit, ...]:
    """The slow pairs of nodes, in order of the time they cost, until every slow path contains one of them."""
    cost: dict[tuple[str, ...], float] = {}
    for transfer in direct:
        cost[spans[transfer.path]] = cost.get(spans[transfer.path], 0.0) + transfer.gain_s
    chosen: list[tuple[str, ...]] = []
    open_paths = list(slow)
    greatest = max(cost.values())
    for span in sorted(cost, key=lambda s: -cost[s]):
        explained = [t for t in open_paths if set(span) <= set(spans[t.path])]
        if not explained or cost[span] < 0.25 * greatest or len(chosen) == _MAX_LINKS:
            continue
        chosen.append(span)
        open_paths = [t for t in open_paths if t not in explained]
    confidence: Confidence = "high" if share >= 0.5 and not direct[0].of_peers else "medium"
    hub = common_node(chosen)
    detail = f"every slow pair has {hub}: its own connection is the likely cause" if hub else ""
    # The transfers are sorted: the first of a pair is the one that costs most.
    worst = [next(t for t in direct if spans[t.path] == span) for span in chosen]
    return tuple(
        _culprit((span[0], span[-1]), transfer, nodes, confidence, detail, hub)
        for span, transfer in zip(chosen, worst, strict=True)
    )


def _common_pair(
    slow: Sequence[Transfer], transfers: Sequence[Transfer], spans: Mapping[Path, tuple[str, ...]]
) -> tuple[Pair | None, list[str]]:
    """The slow pair of nodes, if it can be only one; and the nodes among which it must be."""
    common = sorted(set(spans[slow[0].path]).intersection(*(spans[t.path] for t in slow[1:])))
    if len(common) < 2 or len(common) > _MAX_PAIRS_NODES:
        return None, common or list(spans[slow[0].path])
    weight = min(t.nbytes for t in slow) / 4
    cleared = {spans[t.path] for t in transfers if t.ratio <= _FAST_RATIO and t.nbytes >= weight}
    left = [pair for pair in itertools.combinations(common, 2) if pair not in cleared]
    return (left[0] if len(left) == 1 else None), sorted({node for pair in left for node in pair}) or common


def _by_ports(bad: BadPorts, transfer: Transfer, among: Sequence[str], nodes: Mapping[int, str]) -> Culprit:
    """The link between two nodes whose ports stand out; of a single one, a link of its own."""
    if len(bad.nodes) == 2:
        return _culprit(
            (bad.nodes[0], bad.nodes[1]), transfer, nodes, "high", "the ports at its ends stand out"
        )
    hub = bad.nodes[0]
    other = next(node for node in among if node != hub)
    return _culprit((hub, other), transfer, nodes, "medium", _OWN_PORT.format(hub), hub)


def _culprit(
    pair: Pair,
    transfer: Transfer,
    nodes: Mapping[int, str],
    confidence: Confidence,
    detail: str,
    node: str = "",
) -> Culprit:
    """A pair of nodes as a culprit, shown by ``transfer``. ``node``: the one node that every slow pair has."""
    first, second = _ends(pair, transfer, nodes)
    link = Link((first, second), (nodes.get(first, pair[0]), nodes.get(second, pair[1])))
    # The healthy time of a message with a smaller ratio is mostly waiting: then the ratio says little.
    told = transfer.path.source < 0 or transfer.ratio >= 2.0
    slowdown = round(transfer.ratio, 2) if told else 0.0
    cause = "network"
    if link.nodes[0] == link.nodes[1]:
        # There is no cable: whatever the two ranks share may be to blame, and other ranks share it too.
        confidence, cause = "low", "inside the node"
        detail = "both ends are on one node: its cores, memory or device links"
    return Culprit(None, link, node, "transfer", slowdown, confidence, cause, detail)


def _ends(pair: Pair, transfer: Transfer, nodes: Mapping[int, str]) -> tuple[int, int]:
    """The ranks of the transfer at the two nodes."""
    if transfer.path.source >= 0:
        return transfer.path.source, transfer.path.target
    first = next(rank for rank in transfer.ranks if nodes.get(rank, "") == pair[0])
    second = next(rank for rank in transfer.ranks if nodes.get(rank, "") == pair[1] and rank != first)
    return first, second


def _describe(transfer: Transfer) -> str:
    """A line of evidence: how much longer the transfer takes."""
    path, before_ms, after_ms = transfer.path, transfer.before_s * 1e3, transfer.after_s * 1e3
    if transfer.of_peers:
        told = f"{path}: {after_ms:.1f} ms per operation after the last arrival, "
        told += f"comparable paths {before_ms:.1f} ms"
    elif path.source >= 0:
        longer_ms = (transfer.after_s - transfer.before_s) * 1e3
        told = f"{path}: a message takes {longer_ms:+.1f} ms longer, {transfer.count:.0f} per iteration"
    else:
        told = f"{path} (ranks {fold_ranks(transfer.ranks)}): after the last arrival "
        told += f"{before_ms:.1f} -> {after_ms:.1f} ms per operation"
    return f"{told}, {transfer.nbytes / 1e6:.2g} MB each"
