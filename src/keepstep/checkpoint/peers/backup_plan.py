"""Which node backs up whose ranks, and which snapshot next: pure, told what nodes hold, gives what each has to do.

All nodes back up the same snapshot, the *target*, or there would never be one that is whole without a lost node. When
it stands wherever it belongs it is what all *keep*, in their own caches and as backups, until the next one does.
The next target has to be one that no worker has overwritten by the time all know of it: workers are told to keep their
oldest snapshot from a *first* one on, and what they then all have becomes the target.

Nothing here must survive its process: what was kept and what stands where is told by the nodes again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from keepstep.checkpoint.memory.slots import Key

_MOST_SKIPPED = 20  # the next target is looked for at most 2**20 steps ahead
_LAST_STEP = (1 << 47) - 2  # that a key can have


@dataclass(frozen=True, slots=True)
class Stock:
    """What a node holds. ``own``: snapshots that all its ranks have sealed; ``backups``: by the node they are of."""

    own: frozenset[Key] = frozenset()
    backups: Mapping[int, frozenset[Key]] = field(default_factory=dict[int, frozenset[Key]])
    keep: Key | None = None  # what its workers keep, and from where on they keep one more
    first: Key | None = None
    able: bool = True  # its ranks have slots enough

    def keeps(self, key: Key) -> bool:
        """Whether no worker of it overwrites the snapshot before they hear of it: not all that stands is to stay."""
        first = self.first
        return key not in self.own or key in (
            self.keep,
            min((one for one in self.own if first and one >= first), default=None),
        )

    def of(self, node: int, own: int) -> frozenset[Key]:
        """The snapshots of all ranks of ``node`` that it holds, being node ``own`` itself."""
        found = self.backups.get(node, frozenset[Key]())
        return found | self.own if node == own else found


@dataclass(frozen=True, slots=True)
class Order:
    """What a node has to do. Nodes are named by node rank."""

    keep: Key | None = None
    first: Key | None = None
    target: Key | None = None
    pulls: tuple[tuple[int, tuple[int, ...]], ...] = ()  # whose ranks' states to bring, and from which nodes
    backs: tuple[int, ...] = ()  # nodes whose backups belong here
    settled: bool = False  # ``keep`` stands wherever it belongs


def ring_of(nodes: Iterable[int], domains: Mapping[int, str] | None = None) -> list[int]:
    """The nodes in an order in which neighbours are of different failure domains, as far as that is possible.

    ``domains``: a label by node; nodes without one, or an empty one, are domains of their own.
    """
    by_domain: dict[str, list[int]] = {}
    for node in sorted(nodes):
        by_domain.setdefault(_domain(node, domains), []).append(node)
    if all(len(group) == 1 for group in by_domain.values()):
        return sorted(nodes)
    groups = sorted(by_domain.values(), key=lambda group: (-len(group), group))
    flat = [node for group in groups for node in group]
    # Every second place first: a domain of at most half of the nodes never meets itself.
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
    """Where the snapshots of a node belong: itself while it is there, and the next ``copies`` nodes of the ring.

    Of other failure domains than those before, where there are any. Without the node one more takes its place.
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
    """Decides for the whole job. ``keep`` is the newest snapshot known to be backed up, ``target`` the next one."""

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
            nodes: all nodes of the job, whether they are there or not.
            stocks: of all nodes that are there; a node whose stock is not known yet must be waited for.
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
        """For the next target, from what all have now."""
        self.first, self._tries = None, 0

    def _choose_keep(self, stocks: Mapping[int, Stock], recoverable: set[Key], whole: bool) -> None:
        known = {key for key in (self.keep, *(stock.keep for stock in stocks.values())) if key}
        good = {key for key in (*(known & recoverable), self.complete) if key}
        if good or whole:
            self.keep = max(good, default=None)
        else:
            self.keep = max(known, default=None)  # who was lost may come back with it

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
        """All workers are asked to keep one; what they all have kept is the next target."""
        owns = [stock.own for stock in stocks.values()]
        newest = max((max(own) for own in owns if own), default=None)
        if newest is None:
            self.first = None
        elif self.first is None:
            common = max(owns[0].intersection(*owns[1:]), default=None)
            start = common if common and self._tries == 0 else _after(newest, self._tries)
            self.first = start if self.keep is None or start > self.keep else _after(self.keep, 0)
        elif all(stock.first == self.first for stock in stocks.values()):
            first = self.first
            kept = {min((key for key in own if key >= first), default=None) for own in owns}
            if None in kept:
                return
            if len(kept) == 1:
                self.target = self.first = kept.pop()
            else:  # some had overwritten it when they heard of it: choose one further ahead
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
    """By snapshot and node whose it is: the nodes that hold it."""
    found: dict[Key, dict[int, set[int]]] = {}
    for node, stock in stocks.items():
        for home in {node, *stock.backups}:
            for key in stock.of(home, node):
                found.setdefault(key, {}).setdefault(home, set()).add(node)
    return found


def _at_home(key: Key, holders: Mapping[Key, Mapping[int, set[int]]]) -> bool:
    return all(home in having for home, having in holders.get(key, {}).items())


def _after(key: Key, tries: int) -> Key:
    """A snapshot that comes later, the further the more often it was too near."""
    return Key(key.incarnation, min(key.step + (1 << min(tries, _MOST_SKIPPED)), _LAST_STEP))


def _domain(node: int, domains: Mapping[int, str] | None) -> str:
    return (domains or {}).get(node) or f"node {node}"
