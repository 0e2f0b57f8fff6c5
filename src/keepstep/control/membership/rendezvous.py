"""Which node plays which ranks: launchers join, are placed when all (or enough) are here, and anew when one is lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from keepstep.wire.messages import Join, Placement

MOST_NODES = 65_536
MOST_RANKS = 1 << 24


class Launcher(NamedTuple):
    """One launcher, whatever connection it speaks through: a process on a node.

    A tuple, because thousands are looked up in sets and tables: hashing a dataclass would be a call in Python each.
    """

    node: str
    pid: int


@dataclass(slots=True)
class _Joined:
    join: Join
    peer: int


@dataclass(frozen=True, slots=True)
class Placed:
    """What to answer to launchers that asked for a place, by their connections."""

    answers: tuple[tuple[int, Placement], ...] = ()
    refusals: tuple[tuple[int, str], ...] = ()
    spares: tuple[int, ...] = ()  # peers for which there is no place now
    is_new: bool = False  # the rank table was made just now


class Rendezvous:
    """Waits for ``nodes`` launchers (or their own min:max), then gives out the rank table, and repeats it when asked.

    With fewer than the maximum it waits ``last_call_s`` after the minimum was reached; ``join_s`` is the longest wait
    for the minimum, after which everybody is refused and may start anew. Launchers beyond the maximum are spares where
    the job may begin again; `next_table` gives them the places of lost ones.
    """

    def __init__(self, nodes: int, *, join_s: float = 600.0, last_call_s: float = 30.0) -> None:
        self._nodes, self._join_s, self._last_call_s = nodes, join_s, last_call_s
        # Launchers with a connection, in the order in which they joined.
        self._joined: dict[Launcher, _Joined] = {}
        self._beyond: set[Launcher] = set()  # before there is a table: those of them that wish to be spares
        self._wishes: dict[int, Launcher] = {}  # launchers that asked for a node rank
        self._range = (0, 0)  # fewest and most nodes that the launchers were started for
        self.placements: dict[Launcher, Placement] = {}  # the rank table; empty before it is made
        self._sizes: dict[int, int] = {}  # number of ranks by node rank
        # What all have to be started with alike: --max-restarts, whether they elect; and the node that said so first.
        self._agreed: tuple[int, bool, str] | None = None
        self.barred: frozenset[str] = frozenset()  # names of nodes that may not be `newcomers` now
        self._since_s = 0.0
        self._enough_since_s: float | None = None

    def unequal(self, one: Launcher, other: Launcher) -> str:
        """Why a member cannot take another's place; "": it can."""
        sizes = [self._sizes[self.placements[launcher].node_rank] for launcher in (one, other)]
        if sizes[0] == sizes[1]:
            return ""
        return f"{one.node} runs {sizes[0]} ranks and {other.node} {sizes[1]}; only nodes with as many can be exchanged"

    def irreplaceable(self, members: Collection[Launcher]) -> str:
        """Why spares cannot take these members' places; "": they can."""
        if host := next((one for one in members if self.hosts_controller(one)), None):
            return f"{host.node} hosts the controller, so it stays"
        free = [self._joined[spare].join.nproc for spare in self.spares]
        for member in members:
            size = self._sizes[self.placements[member].node_rank]
            if size not in free:
                which = f"of {size} ranks " if free else ""
                return f"no spare {which}waits to take the place of {member.node}; start one with the same command"
            free.remove(size)
        return ""

    def spare_for(self, member: Launcher) -> str:
        """The node that would take a member's place; "": there is none."""
        size = self._sizes[self.placements[member].node_rank]
        return next((one.node for one in self.spares if self._joined[one].join.nproc == size), "")

    @property
    def incarnation(self) -> int:
        """The incarnation of the rank table."""
        return next(iter(self.placements.values())).incarnation if self.placements else 0

    @property
    def pauses(self) -> int:
        """How many incarnations up to the table's were no restarts."""
        return next(iter(self.placements.values())).pauses if self.placements else 0

    @property
    def max_restarts(self) -> int:
        """How often the job may begin again, as its launchers say."""
        return self._agreed[0] if self._agreed else 0

    @property
    def spares(self) -> list[Launcher]:
        """Launchers that are here and have no place, in the order in which they came."""
        if not self.placements:
            return [launcher for launcher in self._joined if launcher in self._beyond]
        return [launcher for launcher in self._joined if launcher not in self.placements]

    @property
    def least(self) -> int:
        """Nodes without which the job does not go on, as its launchers say."""
        return self._limits[0]

    @property
    def most(self) -> int:
        """Nodes that the job may have at most."""
        return self._limits[1]

    @property
    def newcomers(self) -> list[Launcher]:
        """Spares for which there is a place more than the job has now, and that are not ``barred``."""
        free = [spare for spare in self.spares if spare.node not in self.barred] if self.placements else []
        return free[: max(0, self._limits[1] - len(self.placements))]

    @property
    def _limits(self) -> tuple[int, int]:
        """Fewest and most nodes with which the job goes on, as its launchers say."""
        joins = [one.join for launcher, one in self._joined.items() if launcher in self.placements]
        most = max((join.max_nodes for join in joins), default=0)
        if most <= 1 or not self.max_restarts:
            return len(self.placements), len(self.placements)  # a job of fixed size
        return max(join.min_nodes for join in joins), most

    def peer(self, launcher: Launcher) -> int | None:
        """The connection through which a launcher joined, while it stands."""
        joined = self._joined.get(launcher)
        return joined.peer if joined else None

    def is_here(self, node: str) -> bool:
        """Whether a launcher of the node of this name is connected."""
        return any(launcher.node == node for launcher in self._joined)

    def is_placed(self, node: str) -> bool:
        """Whether the node of this name is in the rank table."""
        return any(launcher.node == node for launcher in self.placements)

    def hosts_controller(self, launcher: Launcher) -> bool:
        """Whether the job's controller lives and dies with this launcher."""
        joined = self._joined.get(launcher)
        return joined is not None and joined.join.hosts_controller

    def restore(self, table: dict[Launcher, Placement]) -> None:
        """Continue with a table that an earlier controller of this run gave out."""
        self._set(dict(table))

    def join(self, launcher: Launcher, join: Join, peer: int, now_s: float) -> Placed:
        """A launcher asks, for the first time or again."""
        if reason := self._objection(launcher, join):
            return Placed(refusals=((peer, reason),))
        if self._agreed is None:
            self._agreed = (join.max_restarts, join.seat is not None, join.node)
        if not self._joined and not self.placements:
            self._since_s = now_s
        known = self._joined.get(launcher)
        if known is not None and known.peer > peer:
            return Placed()  # this came late, from a connection that is broken: the launcher has a newer one
        self._joined[launcher] = _Joined(join, peer)
        if self.placements:
            return self._late(launcher, peer)
        self._count(launcher, join)
        placed = self.tick(now_s)
        spare = launcher in self._beyond and not placed.is_new
        return replace(placed, spares=(peer,)) if spare else placed

    def leave(self, launcher: Launcher, peer: int) -> bool:
        """A connection has gone; True when it was a launcher's last. While it is away another may have its wish."""
        joined = self._joined.get(launcher)
        if joined is None or joined.peer != peer:
            return False
        del self._joined[launcher]
        if not self.placements:
            self._range, self._beyond = (0, 0), set()
            self._wishes.clear()
            for other, one in self._joined.items():
                self._count(other, one.join)
            if not self._joined:
                self._agreed = None
        return True

    def tick(self, now_s: float) -> Placed:
        """Time passes: place all launchers, go on waiting, or give up."""
        here = len(self._joined) - len(self._beyond)
        if self.placements or not here:
            return Placed()
        least, most = self._range
        most = max(most, least, 1)
        if self._range[1] <= 1 and self._nodes > 1:
            least = most = self._nodes
        if here < least:
            self._enough_since_s = None
            return self._give_up(here, least) if now_s - self._since_s >= self._join_s else Placed()
        if self._enough_since_s is None:
            self._enough_since_s = now_s
        if here < most and now_s - self._enough_since_s < self._last_call_s:
            return Placed()
        return self._place()

    def next_table(
        self,
        lost: Collection[Launcher],
        halted: Mapping[Launcher, int],
        incarnation: int,
        pauses: int,
        *,
        shrink: bool,
        grow: bool,
        exchange: Mapping[Launcher, Launcher],
    ) -> dict[Launcher, Placement] | None:
        """The table of ``incarnation``; None while there are not enough spares.

        Each lost node's ranks are taken by a spare with as many. Nodes that live keep their order, and their ranks
        unless the number of nodes changes: ``shrink`` leaves lost ones out for which there is no spare, down to
        `least`; ``grow`` gives `newcomers` places behind the others; ``exchange``: who takes whose place, none of them
        lost, by who has it. ``halted``: a free port of every launcher that can be placed, spares among them.
        """
        heirs = self._heirs(lost, halted)
        left = [launcher for launcher in lost if launcher not in heirs]
        if left and not (shrink and len(self.placements) - len(left) >= self.least):
            return None
        ranked = sorted(self.placements.items(), key=lambda item: item[1].node_rank)
        heirs.update(exchange)
        staying = [(launcher, self._sizes[at.node_rank]) for launcher, at in ranked if launcher not in left]
        playing = [(heirs.get(launcher, launcher), size) for launcher, size in staying]
        if grow and not left:
            free = [one for one in self.newcomers if one in halted and one not in heirs.values()]
            playing += [(one, self._joined[one].join.nproc) for one in free]
        first = playing[0][0]
        stays = first is ranked[0][0]
        address = self.placements[first].master_addr if stays else self._joined[first].join.address
        return _table_of(playing, address, halted[first], incarnation, pauses)

    def renew(self, table: dict[Launcher, Placement]) -> Placed:
        """This rank table counts now."""
        self._set(table)
        peers = ((self.peer(launcher), placement) for launcher, placement in table.items())
        answers = tuple((peer, placement) for peer, placement in peers if peer is not None)
        return Placed(answers=answers, is_new=True)

    def _heirs(self, lost: Collection[Launcher], halted: Mapping[Launcher, int]) -> dict[Launcher, Launcher]:
        """Which spare takes which lost launcher's place: one that wished for it, else the first that came."""
        free = [spare for spare in self.spares if spare in halted] if lost else []
        heirs: dict[Launcher, Launcher] = {}
        for launcher in sorted(lost, key=lambda one: self.placements[one].node_rank):
            rank = self.placements[launcher].node_rank
            fit = [spare for spare in free if self._joined[spare].join.nproc == self._sizes[rank]]
            if fit:
                wishing = [spare for spare in fit if self._joined[spare].join.node_rank == rank]
                heirs[launcher] = (wishing or fit)[0]
                free.remove(heirs[launcher])
        return heirs

    def _set(self, table: dict[Launcher, Placement]) -> None:
        self.placements = table
        ordered = sorted(table.values(), key=lambda placement: placement.first_rank)
        ends = [one.first_rank for one in ordered[1:]] + [one.world_size for one in ordered[-1:]]
        self._sizes = {one.node_rank: end - one.first_rank for one, end in zip(ordered, ends, strict=True)}
        self._beyond.clear()

    def _late(self, launcher: Launcher, peer: int) -> Placed:
        placement = self.placements.get(launcher)
        if placement is not None:
            return Placed(answers=((peer, placement),))
        join = self._joined[launcher].join
        if self.max_restarts and join.nproc in self._sizes.values():
            return Placed(spares=(peer,))
        del self._joined[launcher]
        if self.max_restarts:
            reason = f"{launcher.node} runs {join.nproc} ranks, but no node of this job does; give --nproc-per-node"
            return Placed(refusals=((peer, f"{reason} {next(iter(self._sizes.values()))}"),))
        taken = {known.node for known in self.placements}
        reason = (
            f"the job already runs with {len(self.placements)} nodes, and process {launcher.pid} on {launcher.node} is "
            f"{'not the launcher it began with there' if launcher.node in taken else 'on none of them'}; "
            f"start a new run"
        )
        return Placed(refusals=((peer, reason),))

    def _objection(self, launcher: Launcher, join: Join) -> str:
        if not 1 <= join.nproc <= MOST_RANKS or max(join.min_nodes, join.max_nodes) > MOST_NODES:
            return f"node {join.node}: {join.nproc} ranks on one of {join.max_nodes} nodes is no job"
        if self._agreed is not None and self._agreed[0] != join.max_restarts:
            return (
                f"node {join.node} was started with --max-restarts {join.max_restarts}, {self._agreed[2]} with "
                f"{self._agreed[0]}; give all nodes the same"
            )
        if self._agreed is not None and self._agreed[1] != (join.seat is not None):
            this, first = ("with", "without") if self._agreed[1] else ("without", "with")
            return (
                f"node {join.node} was started {this} --no-elect, {self._agreed[2]} {first} it; "
                "give all nodes the same"
            )
        if join.node_rank < 0 or self.placements:
            return ""
        most = max(join.max_nodes, self._nodes)
        if join.node_rank >= most and not join.max_restarts:
            return f"node {join.node} wants node rank {join.node_rank}, but there are {most} nodes: 0 to {most - 1}"
        other = self._wishes.get(join.node_rank)
        if other is not None and other != launcher:
            return (
                f"node rank {join.node_rank} is wanted twice: by {other.node} (process {other.pid}) and "
                f"{launcher.node} (process {launcher.pid}); give each node its own --node-rank"
            )
        return ""

    def _count(self, launcher: Launcher, join: Join) -> None:
        if join.node_rank >= 0:
            self._wishes[join.node_rank] = launcher
        if join.node_rank >= max(join.max_nodes, self._nodes):
            self._beyond.add(launcher)
            return
        least, most = self._range
        self._range = (max(least, join.min_nodes), max(most, join.max_nodes))

    def _give_up(self, here: int, least: int) -> Placed:
        names = ", ".join(sorted(launcher.node for launcher in self._joined)[:16])
        told = f"only {here} of {least} nodes joined within {self._join_s:g} s ({names})"
        reason = f"{told}; start the others and try again"
        refusals = tuple((joined.peer, reason) for joined in self._joined.values())
        self._joined.clear()
        self._beyond.clear()
        self._wishes.clear()
        self._range, self._agreed = (0, 0), None
        return Placed(refusals=refusals)

    def _place(self) -> Placed:
        ordered = [(one, self._joined[one].join) for one in self._ordered()]
        first = ordered[0][1]
        playing = [(launcher, join.nproc) for launcher, join in ordered]
        return self.renew(_table_of(playing, first.address, first.free_port, 0, 0))

    def _ordered(self) -> list[Launcher]:
        """Launchers by node rank as they wish; those whose wish cannot be met, or who have none, fill the gaps."""
        came = {one: joined.join.node_rank for one, joined in self._joined.items() if one not in self._beyond}
        wished = {rank: launcher for launcher, rank in came.items() if 0 <= rank < len(came)}
        rest = iter([launcher for launcher, rank in came.items() if wished.get(rank) != launcher])
        return [wished[rank] if rank in wished else next(rest) for rank in range(len(came))]


def _table_of(
    playing: Sequence[tuple[Launcher, int]], address: str, port: int, incarnation: int, pauses: int
) -> dict[Launcher, Placement]:
    """The table in which these launchers play so many ranks each, in this order; all meet at ``address``."""
    table, first_rank, world = dict[Launcher, Placement](), 0, sum(size for _, size in playing)
    for node_rank, (launcher, size) in enumerate(playing):
        place = (node_rank, first_rank, world, len(playing), address, port, incarnation, pauses)
        table[launcher] = Placement(*place)
        first_rank += size
    return table
