"""What the controller knows of the nodes: agents, launchers, heartbeats, groups, clock samples, host causes."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from keepstep.core.finding import Finding
from keepstep.core.ranges import fold_nodes
from keepstep.core.summary import ClockSample, Endpoint, GroupInfo, HostCause
from keepstep.wire.messages import Heartbeat, KeptSteps, PathRate, RankBeat

_MOST_GROUPS = 262_144
_MOST_MEMBERS = 16_000_000  # most members in all groups together
_CLOCK_SAMPLES = 400_000  # kept of all nodes together
_CLOCK_SAMPLES_OF_NODE = 2048
_MOST_ENDPOINTS = 4  # addresses kept for probes of one node
_PLACE = re.compile(r"rank (\d{1,8}) of (\d{1,8})\b")  # what the NCCL shim says of a communicator
INSIDE_S = 3.0  # time without progress after which ranks in an operation are asked what they have called
_NOTHING_KEPT = KeptSteps()
_CAUSES_S = 30.0  # how long a host cause counts after it was reported


@dataclass(slots=True)
class Node:
    """What is known of one node from its agent and launcher."""

    rank: int
    name: str
    agent: int | None = None  # peer number of its agent
    agent_pid: int = 0
    agent_starts: int = 0
    launcher: int | None = None
    heard_s: float | None = None  # time of the agent's last heartbeat
    lost_s: float | None = None  # since when agent and launcher are gone, until the loss is reported
    lost: bool = False  # the loss was reported, and neither has come back
    left: bool = False  # it said Bye or Ended, so its silence means nothing
    parting: str = ""  # why its launcher leaves a job that goes on, in its words
    mute: bool = False  # no heartbeat for a moment
    silent: bool = False  # no heartbeat for longer
    overdue: bool = False  # all its ranks wait for others, longer than usual
    inside: bool = False  # all its ranks are in operations and have done nothing for `INSIDE_S`
    beat: Heartbeat | None = None
    ranks: tuple[int, ...] = ()
    causes_s: float = 0.0
    causes: tuple[HostCause, ...] = ()
    incarnation: int = 0  # in which the ranks play that its agent watches
    failure_domain: str = ""  # nodes of the same domain may be lost together
    endpoints: tuple[Endpoint, ...] = ()  # where its agent answers probes
    paths: tuple[PathRate, ...] = ()  # what its workers sent lately, as it told last
    kept: KeptSteps = _NOTHING_KEPT
    clock: deque[ClockSample] = field(default_factory=deque[ClockSample])

    def back(self) -> None:
        """Note that the node's agent or launcher is connected."""
        self.lost_s, self.lost, self.parting = None, False, ""

    def answers_at(self, endpoints: Sequence[Endpoint]) -> None:
        """Note where the node's agent answers probes."""
        self.endpoints = tuple(endpoints[:_MOST_ENDPOINTS])


class Cluster:
    """What is known of all nodes, within bounds. Every method is cheap, and none looks at a clock."""

    def __init__(self, expected_nodes: int = 1) -> None:
        self._expected_nodes = expected_nodes
        self.nodes: dict[int, Node] = {}
        self.groups: dict[str, GroupInfo] = {}
        self.communicators: dict[str, GroupInfo] = {}  # NCCL's, with all their members
        self._places: dict[
            str, dict[int, int]
        ] = {}  # ranks by their place in those that are not complete yet
        self.node_of: dict[int, str] = {}  # node names by rank
        self.world_size = 0  # ranks by the rank table; 0 when that is not known
        self.newest_step = -1
        self.refused_groups = 0
        self.overdue_nodes = 0  # nodes whose ranks all wait for others, longer than usual
        self.inside_nodes = 0  # nodes whose ranks all are in operations and have done nothing for a while
        self.left: dict[int, Finding] = {}  # ranks that ended with exit code 0, of one incarnation
        self._left_in = -1  # the incarnation of the ranks in ``left``
        self._members = 0
        self._home: dict[int, Node] = {}

    def node(self, rank: int, name: str) -> Node:
        """The node of this rank, which is added if it is not known yet."""
        node = self.nodes.get(rank)
        if node is None:
            node = self.nodes[rank] = Node(rank, name)
            node.clock = deque(maxlen=self._window())
            if len(self.nodes) > self._expected_nodes:
                self._expected_nodes = 2 * len(self.nodes)
                for other in self.nodes.values():
                    other.clock = deque(other.clock, maxlen=self._window())
        elif name and node.name != name:
            node.name = name
            self._claim(node)
        return node

    def wait_for_lost(self) -> tuple[str, float]:
        """The lost nodes, and how long all ranks of all other nodes have waited; 0: some do not wait, or are silent.

        Where only the controller does not hear a node, that trains on, and so do the others.
        """
        lost = [node.name for node in self.nodes.values() if node.lost and not node.left]
        if not lost:
            return "", 0.0
        others = [node for node in self.nodes.values() if not node.lost and not node.left]
        waits = [rank.overdue_s for node in others if node.beat is not None for rank in node.beat.ranks]
        are_heard = all(node.agent is not None and node.beat is not None for node in others)
        return fold_nodes(lost), min(waits, default=0.0) if are_heard else 0.0

    def heard(self, node: Node, beat: Heartbeat, now_s: float) -> None:
        """Take a heartbeat. This is the hot path: there may be 12,500 a second."""
        node.beat = beat
        node.heard_s = now_s
        node.mute = node.silent = False
        ranks = beat.ranks
        if len(ranks) != len(node.ranks):
            self.plays(node, (one.rank for one in ranks))
        if ranks and ranks[0].step > self.newest_step:
            self.newest_step = ranks[0].step
        overdue = len(ranks) > 0 and all(one.overdue_s > 0 for one in ranks)
        if overdue != node.overdue:
            node.overdue = overdue
            self.overdue_nodes += 1 if overdue else -1
        inside = len(ranks) > 0 and all(one.in_flight is not None and one.idle_s > INSIDE_S for one in ranks)
        if inside != node.inside:
            node.inside = inside
            self.inside_nodes += 1 if inside else -1
        if beat.clock:
            node.clock.extend(beat.clock)
        if beat.paths:
            node.paths = beat.paths
        if beat.kept is not None:
            node.kept = beat.kept
        if beat.causes:
            node.causes, node.causes_s = beat.causes, now_s

    def moved_on_s(self, name: str) -> float | None:
        """When the rank of a node that has stood still longest made progress; None where that is not known of each."""
        for node in self.nodes.values():
            if node.name == name and node.beat is not None and node.heard_s is not None:
                known = [
                    one.idle_s for one in node.beat.ranks if one.watched and one.step >= 0 and one.idle_s > 0
                ]
                return node.heard_s - max(known) if known and len(known) == len(node.beat.ranks) else None
        return None

    def plays(self, node: Node, ranks: Iterable[int]) -> None:
        """Note which ranks run on this node."""
        node.ranks = tuple(ranks)
        self._claim(node)

    def node_at_address(self) -> dict[str, str]:
        """Names of nodes by the addresses at which their agents answer."""
        return {end.address: node.name for node in self.nodes.values() for end in node.endpoints}

    def resize(self, world_size: int) -> None:
        """Note the number of ranks; which node plays them is told next."""
        if world_size != self.world_size:
            self.world_size = world_size
            self.node_of.clear()
            self._home.clear()

    @property
    def transfer_groups(self) -> dict[str, GroupInfo]:
        """The groups that transfers are told of: process groups, and for what GPUs transfer their communicators."""
        return {**self.groups, **self.communicators}

    def learn_groups(self, groups: Iterable[GroupInfo], rank: int = -1) -> None:
        """Keep groups that are not known yet, up to a bound; of several with one name the first is kept.

        ``rank``: who told of them. Of a communicator each member may know only its own place: it is kept once all
        places are known.
        """
        for group in groups:
            if group.is_communicator:
                self._join(group, rank)
                continue
            if group.name in self.groups:
                continue
            if len(self.groups) >= _MOST_GROUPS or self._members + len(group.members) > _MOST_MEMBERS:
                self.refused_groups += 1
                continue
            self._members += len(group.members)
            self.groups[group.name] = group

    def _join(self, group: GroupInfo, rank: int) -> None:
        known = self.communicators.get(group.name)
        if known is not None:
            if group.serves and not known.serves:
                self.communicators[group.name] = replace(known, serves=group.serves)
            return
        members, told = group.members, _PLACE.match(group.desc)
        if not members and told is not None:
            place, size = int(told[1]), int(told[2])
            if place >= size or self._members + size > _MOST_MEMBERS or len(self._places) >= _MOST_GROUPS:
                return
            if not 0 <= rank < _MOST_MEMBERS:
                return
            places = self._places.setdefault(group.name, {})
            places[place] = rank
            if len(places) == size:
                members = tuple(places[one] for one in range(size)) if max(places) < size else ()
                del self._places[group.name]
        if members and len(self.communicators) < _MOST_GROUPS:
            self._members += len(members)
            self.communicators[group.name] = replace(group, members=members)

    def leave(self, finding: Finding) -> None:
        """Note that a rank has ended with exit code 0."""
        if finding.incarnation < self._left_in:
            return  # repeated to a controller that was restarted
        if finding.incarnation > self._left_in:
            self._left_in = finding.incarnation
            self.left.clear()
        step = finding.step if finding.step >= 0 else self.step_of(finding.rank) + 1
        self.left.setdefault(finding.rank, replace(finding, step=step))

    def begin_again(self, names: Mapping[int, str]) -> None:
        """Forget what ranks do and which groups they have: the job was re-formed by the nodes with these names."""
        for rank, node in list(self.nodes.items()):
            if names and rank not in names:
                del self.nodes[rank]
            elif names.get(rank, node.name) != node.name:
                self.nodes[rank] = Node(rank, names[rank], clock=deque(maxlen=self._window()))
            else:
                node.beat, node.overdue, node.inside, node.left, node.lost_s = None, False, False, False, None
                node.paths = ()
        self.overdue_nodes = self.inside_nodes = 0
        self.left.clear()
        self.groups.clear()
        self.communicators.clear()
        self._places.clear()
        self._members = 0

    @property
    def known_ranks(self) -> int:
        """The number of ranks: by the rank table, else of those that were heard of."""
        return self.world_size or len(self.node_of)

    def home(self, rank: int) -> Node | None:
        """The node that plays a rank; None when it is not known."""
        return self._home.get(rank)

    @property
    def reporting_ranks(self) -> int:
        """The number of ranks whose agent is connected and not silent."""
        return sum(
            len(node.ranks) for node in self.nodes.values() if node.agent is not None and not node.silent
        )

    def agents(self) -> dict[int, int]:
        """Peer numbers of connected agents by node rank."""
        return {rank: node.agent for rank, node in self.nodes.items() if node.agent is not None}

    def silent_nodes(self) -> set[str]:
        """Names of nodes whose agent is silent or gone."""
        return {node.name for node in self.nodes.values() if node.silent or node.agent is None}

    def mute_nodes(self) -> set[str]:
        """Names of nodes whose answers are not waited for: not heard for a moment, and at most half of all."""
        mute = {node.name for node in self.nodes.values() if node.mute or node.silent or node.agent is None}
        return mute if 2 * len(mute) <= len(self.nodes) else set()

    def addresses(self) -> dict[str, str]:
        """Node names by the addresses at which their agents answer probes."""
        return {one.address: node.name for node in self.nodes.values() for one in node.endpoints}

    def clock_samples(self) -> dict[str, list[ClockSample]]:
        """All clock samples by node name."""
        samples: dict[str, list[ClockSample]] = {}
        for node in self.nodes.values():
            if node.clock:
                samples.setdefault(node.name, []).extend(node.clock)
        return samples

    def causes(self, now_s: float) -> list[HostCause]:
        """Causes outside the processes that agents have reported within the last half minute."""
        recent = (node.causes for node in self.nodes.values() if now_s - node.causes_s <= _CAUSES_S)
        return [cause for causes in recent for cause in causes]

    def trains(self, incarnation: int, steps_unseen: bool) -> bool:
        """Whether every rank that is watched has finished a step of this incarnation.

        With ``steps_unseen`` progress is enough. Agents of an earlier incarnation may still tell of its ranks.
        """
        ranks = 0
        for node in self.nodes.values():
            beat = node.beat if node.incarnation >= incarnation else None
            if beat is None or any(
                one.step < 0 and one.watched and not (steps_unseen and one.progress) for one in beat.ranks
            ):
                return False
            ranks += len(beat.ranks)
        return ranks >= self.known_ranks > 0

    def step_of(self, rank: int) -> int:
        """The last step that a rank is known to have finished; -1 when nothing is known."""
        node = self._home.get(rank)
        ranks = node.beat.ranks if node is not None and node.beat is not None else ()
        return next((one.step for one in ranks if one.rank == rank), -1)

    def beats(self) -> Iterable[RankBeat]:
        """The newest heartbeat of every rank."""
        for node in self.nodes.values():
            if node.beat is not None:
                yield from node.beat.ranks

    def _window(self) -> int:
        return max(16, min(_CLOCK_SAMPLES_OF_NODE, _CLOCK_SAMPLES // self._expected_nodes))

    def _claim(self, node: Node) -> None:
        for rank in node.ranks:
            self.node_of[rank] = node.name
            self._home[rank] = node
