"""Plans which node backs up which other, and which snapshot is next. Pure: from what nodes hold to what each has to do.

All nodes back up the same snapshot, the *target*, or there would never be one that is whole without a lost node. Once
the target stands wherever it belongs, all nodes *keep* it, in their own caches and as backups, until the next target
does. The next target must not be overwritten by a worker before all nodes know of it. So workers are told to keep their
oldest snapshot from a *first* one on, and the snapshot that all of them then have becomes the target.

The plan may be lost with its process, because the nodes tell a new one what they keep and hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from keepstep.checkpoint.memory.slots import LAST_STEP, Key, newest_common

_MOST_SKIPPED = 20  # the next target is at most 2**20 steps ahead of the newest snapshot


@dataclass(frozen=True, slots=True)
class Stock:
    """What a node holds.

    Attributes:
        own: snapshots that all ranks of the node have sealed.
        backups: snapshots of other nodes' ranks, by node.
        keep: the snapshot that the node's workers keep.
        first: its workers also keep the oldest snapshot that is not older than this one.
        able: whether its ranks have the slots that backups need.
    """

    own: frozenset[Key] = frozenset()
    backups: Mapping[int, frozenset[Key]] = field(default_factory=dict[int, frozenset[Key]])
    keep: Key | None = None
    first: Key | None = None
    able: bool = True

    def keeps(self, key: Key) -> bool:
        """Whether the node's workers will not overwrite the snapshot, should they hold it."""
        first = self.first
        return key not in self.own or key in (
            self.keep,
            min((one for one in self.own if first and one >= first), default=None),
        )


@dataclass(frozen=True, slots=True)
class Order:
    """What a node has to do. Nodes are identified by node rank.

    Attributes:
        keep: the snapshot that the node's workers have to keep.
        first: they also have to keep the oldest snapshot that is not older than this one.
        target: the snapshot to back up next.
        pulls: nodes whose ranks' states are to be brought here, each with the nodes that have them.
        backs: nodes whose backups belong on this node.
        settled: whether the nodes of ``keep`` and all that back them up hold it.
    """

    keep: Key | None = None
    first: Key | None = None
    target: Key | None = None
    pulls: tuple[tuple[int, tuple[int, ...]], ...] = ()
    backs: tuple[int, ...] = ()
    settled: bool = False


def ring_of(nodes: Iterable[int], domains: Mapping[int, str] | None = None) -> list[int]:
    """The nodes in an order in which neighbours are in different failure domains, as far as that is possible.

    ``domains`` gives a label by node; a node without a label, or with an empty one, is a domain of its own.
    """
    by_domain: dict[str, list[int]] = {}
    for node in sorted(nodes):
        by_domain.setdefault(_domain(node, domains), []).append(node)
    if all(len(group) == 1 for group in by_domain.values()):
        return sorted(nodes)
    groups = sorted(by_domain.values(), key=lambda group: (-len(group), group))
    flat = [node for group in groups for node in group]
    # Filling every second place first keeps apart the nodes of a domain that has at most half of them.
    places = [*range(0, len(flat), 2), *range(1, len(flat), 2)]
    return [node for _, node in sorted(zip(places, flat, strict=True))]


def places_of(
    node: int,
    ring: Sequence[int],
    at: int,
    present: Collection[int],
    copies: int,
    domains: Mapping[int, str] | None = None,
) -> tuple[int, ...]:
    """The nodes where a node's snapshots belong: itself while it is present, and the next ``copies`` of the ring.

    Nodes of failure domains that are not used yet go first. When the node is absent, one more takes its place.
    """
    wanted = min(copies + 1, len(present))
    chosen = [node] if node in present else []
    used = {_domain(node, domains)}
    rest: list[int] = []
    for distance in range(1, len(ring)):
        if len(chosen) >= wanted:
            break
        other = ring[(at + distance) % len(ring)]
        if other not in present:
            continue
        if _domain(other, domains) in used:
            rest.append(other)
        else:
            chosen.append(other)
            used.add(_domain(other, domains))
    return tuple(chosen + rest[: wanted - len(chosen)])


class BackupPlan:
    """The plan of the whole job. ``keep`` is the newest snapshot known to be backed up, ``target`` the next one."""

    def __init__(self, copies: int) -> None:
        self.copies = copies
        self.keep: Key | None = None
        self.target: Key | None = None
        self.first: Key | None = None
        self.complete: Key | None = None
        """The newest snapshot that stands in ``copies`` + 1 places (or on every node, where there are fewer)."""
        self._tries = 0

    def orders(
        self, nodes: Collection[int], stocks: Mapping[int, Stock], domains: Mapping[int, str] | None = None
    ) -> dict[int, Order]:
        """What each node of ``stocks`` has to do.

        Args:
            nodes: all nodes of the job, present or not.
            stocks: what each present node holds; the caller must wait until that is known of all of them.
            domains: labels of failure domains by node.
        """
        ring = ring_of(nodes, domains)
        where = {
            node: places_of(node, ring, at, stocks, self.copies, domains) for at, node in enumerate(ring)
        }
        holders = _holders(stocks)
        whole = len(stocks) == len(where)
        recoverable = {
            key for key, homes in holders.items() if len(homes.keys() & where.keys()) == len(where)
        }
        self.complete = max(
            (
                key
                for key in recoverable
                if all(set(places) <= holders[key][home] for home, places in where.items())
                and all(stock.keeps(key) for stock in stocks.values())
            ),
            default=None,
        )
        self._choose_keep(stocks, recoverable, whole)
        self._choose_target(stocks, recoverable, holders, whole)
        backs: dict[int, list[int]] = {node: [] for node in stocks}
        for home, places in where.items():
            for node in places:
                if node != home:
                    backs[node].append(home)
        return {node: self._order(node, tuple(backs[node]), holders) for node in stocks}

    def look_again(self) -> None:
        """Choose the next target anew, from what all nodes hold now."""
        self.first, self._tries = None, 0

    def _choose_keep(self, stocks: Mapping[int, Stock], recoverable: set[Key], whole: bool) -> None:
        known = {key for key in (self.keep, *(stock.keep for stock in stocks.values())) if key}
        good = {key for key in (*(known & recoverable), self.complete) if key}
        if good or whole:
            self.keep = max(good, default=None)
        else:
            self.keep = max(known, default=None)  # a lost node may come back with this snapshot

    def _choose_target(
        self,
        stocks: Mapping[int, Stock],
        recoverable: set[Key],
        holders: Mapping[Key, Mapping[int, set[int]]],
        whole: bool,
    ) -> None:
        target = self.target
        if target and (
            target not in recoverable
            or (self.complete and target <= self.complete)
            or (whole and not _at_home(target, holders))
        ):
            self._tries = 0 if target == self.complete else self._tries + 1
            self.target = self.first = None
        if self.target or not all(stock.able for stock in stocks.values()):
            return
        if not whole:
            newest = max(recoverable, default=None)
            self.first = None
            if newest and newest != self.complete and newest >= (self.keep or newest):
                self.target = self.first = newest
        elif self.keep and self.keep != self.complete and _at_home(self.keep, holders):
            self.target = self.first = self.keep
        else:
            self._look_for_next(stocks)

    def _look_for_next(self, stocks: Mapping[int, Stock]) -> None:
        """Have all workers keep a snapshot; the one that they all have kept is the next target."""
        owns = [stock.own for stock in stocks.values()]
        newest = max((max(own) for own in owns if own), default=None)
        if newest is None:
            self.first = None
        elif self.first is None:
            common = newest_common(owns)
            start = common if common and self._tries == 0 else _after(newest, self._tries)
            self.first = start if self.keep is None or start > self.keep else _after(self.keep, 0)
        elif all(stock.first == self.first for stock in stocks.values()):
            first = self.first
            kept = {min((key for key in own if key >= first), default=None) for own in owns}
            if None in kept:
                return
            if len(kept) == 1:
                self.target = self.first = kept.pop()
            else:  # some workers had overwritten it before they were told, so choose one further ahead
                self._tries += 1
                self.first = _after(newest, self._tries)

    def _order(
        self,
        node: int,
        backs: tuple[int, ...],
        holders: Mapping[Key, Mapping[int, set[int]]],
    ) -> Order:
        pulls: list[tuple[int, tuple[int, ...]]] = []
        if self.target:
            for home in backs:
                having = holders.get(self.target, {}).get(home, set[int]())
                if having and node not in having:
                    pulls.append((home, tuple(sorted(having, key=lambda other: other != home))))
        settled = self.keep is not None and self.keep == self.complete
        return Order(self.keep, self.first, self.target, tuple(pulls), backs, settled)


def _holders(stocks: Mapping[int, Stock]) -> dict[Key, dict[int, set[int]]]:
    """The nodes that hold a snapshot, by its key and the node whose ranks it is of."""
    found: dict[Key, dict[int, set[int]]] = {}
    for node, stock in stocks.items():
        for home, keys in ((node, stock.own), *stock.backups.items()):
            for key in keys:
                found.setdefault(key, {}).setdefault(home, set()).add(node)
    return found


def _at_home(key: Key, holders: Mapping[Key, Mapping[int, set[int]]]) -> bool:
    return all(home in having for home, having in holders.get(key, {}).items())


def _after(key: Key, tries: int) -> Key:
    """The key of a later snapshot, further ahead with each try that chose one too near."""
    return Key(key.incarnation, min(key.step + (1 << min(tries, _MOST_SKIPPED)), LAST_STEP))


def _domain(node: int, domains: Mapping[int, str] | None) -> str:
    return (domains or {}).get(node) or f"node {node}"
