"""Which node plays which ranks: launchers join, and are placed once, when all (or enough) are here."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.wire.messages import Join, Placement

MOST_NODES = 65_536
MOST_RANKS = 1 << 24


@dataclass(frozen=True, slots=True)
class Launcher:
    """One launcher, whatever connection it speaks through: a process on a node."""

    node: str
    pid: int


@dataclass(slots=True)
class _Waiting:
    join: Join
    peer: int
    order: int


@dataclass(frozen=True, slots=True)
class Placed:
    """Placements to send, by peer."""

    answers: tuple[tuple[int, Placement], ...] = ()
    refusals: tuple[tuple[int, str], ...] = ()
    is_new: bool = False  # the rank table was made just now


class Rendezvous:
    """Waits for ``nodes`` launchers (or their own min:max), then gives out the rank table, and repeats it when asked.

    With fewer than the maximum it waits ``last_call_s`` after the minimum was reached; ``join_s`` is the longest wait
    for the minimum, after which everybody is refused and may start anew.
    """

    def __init__(self, nodes: int, *, join_s: float = 600.0, last_call_s: float = 30.0) -> None:
        self._nodes = nodes
        self._join_s = join_s
        self._last_call_s = last_call_s
        self._waiting: dict[Launcher, _Waiting] = {}
        self._table: dict[Launcher, Placement] = {}
        self._orders = 0
        self._since_s = 0.0
        self._enough_since_s: float | None = None

    @property
    def placements(self) -> dict[Launcher, Placement]:
        """The rank table; empty before it is made."""
        return self._table

    @property
    def waiting(self) -> int:
        """Launchers that have joined and wait."""
        return len(self._waiting)

    def restore(self, table: dict[Launcher, Placement]) -> None:
        """Continue with a table that an earlier controller of this run gave out."""
        self._table = dict(table)

    def join(self, launcher: Launcher, join: Join, peer: int, now_s: float) -> Placed:
        """A launcher asks, for the first time or again."""
        if self._table:
            return self._late(launcher, join, peer)
        if reason := self._objection(launcher, join):
            return Placed(refusals=((peer, reason),))
        if not self._waiting:
            self._since_s = now_s
        known = self._waiting.get(launcher)
        if known is None:
            self._orders += 1
        self._waiting[launcher] = _Waiting(join, peer, known.order if known else self._orders)
        return self.tick(now_s)

    def leave(self, launcher: Launcher, peer: int) -> None:
        """The connection of a launcher that waits has gone; another may take its wish."""
        waiting = self._waiting.get(launcher)
        if waiting is not None and waiting.peer == peer:
            del self._waiting[launcher]

    def tick(self, now_s: float) -> Placed:
        """Place, go on waiting, or give up."""
        if self._table or not self._waiting:
            return Placed()
        joins = [waiting.join for waiting in self._waiting.values()]
        least = max(join.min_nodes for join in joins)
        most = max(*(join.max_nodes for join in joins), least, 1)
        if max(join.max_nodes for join in joins) <= 1 and self._nodes > 1:
            least = most = self._nodes
        if len(joins) < least:
            self._enough_since_s = None
            return self._give_up(len(joins), least) if now_s - self._since_s >= self._join_s else Placed()
        if self._enough_since_s is None:
            self._enough_since_s = now_s
        if len(joins) < most and now_s - self._enough_since_s < self._last_call_s:
            return Placed()
        return self._place()

    def _late(self, launcher: Launcher, join: Join, peer: int) -> Placed:
        placement = self._table.get(launcher)
        if placement is None:
            taken = {known.node for known in self._table}
            reason = (
                f"the job already runs with {len(self._table)} nodes, and process {launcher.pid} on {launcher.node} is "
                f"{'not the launcher it began with there' if launcher.node in taken else 'on none of them'}; "
                f"start a new run"
            )
            return Placed(refusals=((peer, reason),))
        return Placed(answers=((peer, placement),))

    def _objection(self, launcher: Launcher, join: Join) -> str:
        if (
            join.nproc < 1
            or join.nproc > MOST_RANKS
            or join.min_nodes > MOST_NODES
            or join.max_nodes > MOST_NODES
        ):
            return f"node {join.node}: {join.nproc} ranks on one of {join.max_nodes} nodes is no job"
        if join.node_rank < 0:
            return ""
        most = max(join.max_nodes, self._nodes)
        if join.node_rank >= most:
            return f"node {join.node} wants node rank {join.node_rank}, but there are {most} nodes: 0 to {most - 1}"
        for other, waiting in self._waiting.items():
            if other != launcher and waiting.join.node_rank == join.node_rank:
                return (
                    f"node rank {join.node_rank} is wanted twice: by {other.node} (process {other.pid}) and "
                    f"{launcher.node} (process {launcher.pid}); give each node its own --node-rank"
                )
        return ""

    def _give_up(self, here: int, least: int) -> Placed:
        names = ", ".join(sorted(launcher.node for launcher in self._waiting)[:16])
        told = f"only {here} of {least} nodes joined within {self._join_s:g} s ({names})"
        reason = f"{told}; start the others and try again"
        refusals = tuple((waiting.peer, reason) for waiting in self._waiting.values())
        self._waiting.clear()
        return Placed(refusals=refusals)

    def _place(self) -> Placed:
        ordered = self._ordered()
        first = ordered[0][1].join
        world = sum(waiting.join.nproc for _, waiting in ordered)
        names = tuple(launcher.node for launcher, _ in ordered)
        answers: list[tuple[int, Placement]] = []
        first_rank = 0
        for node_rank, (launcher, waiting) in enumerate(ordered):
            placement = Placement(
                node_rank, first_rank, world, len(ordered), first.address, first.free_port, nodes=names
            )
            self._table[launcher] = placement
            answers.append((waiting.peer, placement))
            first_rank += waiting.join.nproc
        self._waiting.clear()
        return Placed(answers=tuple(answers), is_new=True)

    def _ordered(self) -> list[tuple[Launcher, _Waiting]]:
        """By wish; launchers without one (or whose wish lies beyond those who came) fill the gaps as they came."""
        count = len(self._waiting)
        slots: list[tuple[Launcher, _Waiting] | None] = [None] * count
        rest: list[tuple[Launcher, _Waiting]] = []
        for launcher, waiting in sorted(self._waiting.items(), key=lambda item: item[1].order):
            wish = waiting.join.node_rank
            if 0 <= wish < count:
                slots[wish] = (launcher, waiting)
            else:
                rest.append((launcher, waiting))
        following = iter(rest)
        return [slot if slot is not None else next(following) for slot in slots]
