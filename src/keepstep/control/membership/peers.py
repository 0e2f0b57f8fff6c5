"""Who is connected: what each peer said it is, whether that may be, which nodes are heard, and whether they fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from keepstep.control.cluster import Cluster, Node
from keepstep.control.effects import Disconnect, Effect, Send
from keepstep.control.membership.rendezvous import MOST_NODES, MOST_RANKS, Launcher, Rendezvous
from keepstep.control.settings import Settings
from keepstep.validate.judge_nodes import differences
from keepstep.wire.messages import PROTOCOL, Heartbeat, Hello, Join, Refused, Stop, Welcome

MOST_SKEW_S = 10.0  # with a larger skew logs, files on storage and certificates of two nodes would contradict
_MOST_DIFFERENCES = 8  # lines about software that is not the same on all nodes, of one table
_STALL_S = 1.0  # when a tick is this late, the controller slept, not the agents


@dataclass(slots=True)
class Peer:
    """One connection. ``node`` and ``launcher`` are known once it has said Hello, or has been placed."""

    number: int
    role: str
    hello: Hello | None = None
    node: Node | None = None
    launcher: Launcher | None = None


class Peers:
    """All connections. ``effects``: what the controller is about to do; ``pid``: its process ID."""

    def __init__(
        self, settings: Settings, cluster: Cluster, rendezvous: Rendezvous, effects: list[Effect], pid: int
    ) -> None:
        self.connected: dict[int, Peer] = {}  # by the number of the connection
        self.ignored = 0  # number of messages that made no sense when they came
        self.settings, self._cluster, self._rendezvous = settings, cluster, rendezvous
        self._effects, self._pid = effects, pid
        self._ticked_s: float | None = None
        self.quiet_until_s = 0.0  # until then no agent counts as silent, as the controller slept

    def refuse(self, peer: int, reason: str) -> None:
        """Tell a peer why it is refused, and close the connection."""
        self.ignored += 1
        self._effects += [Send((peer,), Refused(reason)), Disconnect(peer, reason)]

    def tell_launchers(self, stop: Stop) -> None:
        """Tell all launchers what the job ends with."""
        peers = tuple(number for number, peer in self.connected.items() if peer.launcher is not None)
        self._effects.append(Send(peers, stop))

    def hello(self, sender: Peer, hello: Hello, now_s: float) -> Node | None:
        """A peer says what it is. Returns the node whose agent it is from now on, if it is one."""
        peer, protocol = sender.number, hello.protocol
        if protocol != PROTOCOL:
            self.refuse(peer, f"this controller speaks protocol {PROTOCOL}, {hello.node} speaks {protocol}")
            return None
        launcher = Launcher(hello.node, hello.launcher)
        if sender.role == "agent" and hello.launcher and not self._plays(launcher, hello.node_rank):
            # One that was cut off may have been replaced.
            self.refuse(peer, f"another launcher plays node {hello.node_rank} now")
            return None
        if hello.role != sender.role or hello.node_rank >= MOST_NODES:
            self.refuse(peer, f"{hello.node} said role {hello.role!r} and node rank {hello.node_rank}")
            return None
        sender.hello = hello
        if sender.role == "launcher":
            sender.launcher = Launcher(hello.node, hello.pid)
        welcome = Welcome(self._pid, self.settings.heartbeat_s, term=self.settings.term)
        self._effects.append(Send((peer,), welcome))
        if hello.node_rank < 0 or sender.role == "client":
            return None
        if sender.launcher is not None and not self._plays(sender.launcher, hello.node_rank):
            return None
        node = sender.node = self._cluster.node(hello.node_rank, hello.node)
        node.back()
        if sender.role == "launcher":
            node.launcher = max(peer, node.launcher or 0)
            return None
        if node.agent_pid != hello.pid:
            node.agent_pid, node.agent_starts = hello.pid, node.agent_starts + 1
        node.agent, node.left, node.failure_domain = peer, False, hello.failure_domain
        node.incarnation = hello.incarnation
        node.heard_s, node.mute, node.silent = now_s, False, False
        return node

    def heartbeat(self, sender: Peer, beat: Heartbeat, now_s: float) -> Node | None:
        """An agent's heartbeat. Returns its node, or None where the heartbeat does not count."""
        node = sender.node
        if node is None:
            self.refuse(sender.number, "say Hello first")
            return None
        is_agent = node.agent == sender.number and self._cluster.nodes.get(node.rank) is node
        if not is_agent or (beat.ranks and not 0 <= beat.ranks[0].rank < MOST_RANKS):
            self.ignored += 1
            return None
        self._cluster.heard(node, beat, now_s)
        return node

    def gone(self, peer: int, since_s: float) -> Peer | None:
        """A connection has gone. ``since_s``: from when on its node is away, if it has no other connection."""
        gone = self.connected.pop(peer, None)
        node = gone.node if gone is not None else None
        if node is not None:
            if node.agent == peer:
                node.agent = None
            if node.launcher == peer:
                node.launcher = None
            if node.agent is None and node.launcher is None:
                node.lost_s = since_s
        return gone

    def slept_s(self, now_s: float) -> float:
        """Seconds for which this process did not run before this tick; no agent counts as silent for a while then."""
        before_s, self._ticked_s = self._ticked_s, now_s
        if before_s is None or now_s - before_s <= _STALL_S:
            return 0.0
        self.quiet_until_s = now_s + self.settings.silent_s
        return now_s - before_s

    def watch(self, now_s: float) -> Iterator[Node]:
        """Note which agents are silent; yield the nodes that have had neither agent nor launcher for too long."""
        settings = self.settings
        for node in self._cluster.nodes.values():
            if node.left:
                continue
            if node.heard_s is not None:
                node.mute = now_s - node.heard_s > settings.mute_s
                node.silent = node.silent or now_s - node.heard_s > settings.silent_s
            if node.lost_s is not None and now_s - node.lost_s > settings.lost_s:
                yield node

    def is_heard(self, node_rank: int, now_s: float) -> bool:
        """Whether the node's agent has sent a heartbeat a short while ago."""
        node = self._cluster.nodes.get(node_rank)
        if node is None or node.agent is None or node.heard_s is None:
            return False
        return now_s - node.heard_s <= self.settings.silent_s

    def _plays(self, launcher: Launcher, node_rank: int) -> bool:
        placements = self._rendezvous.placements
        placement = placements.get(launcher)
        return not placements or (placement is not None and placement.node_rank == node_rank)


class Admission:
    """Whether the nodes of a job fit each other, by the versions and clocks that launchers tell when they join.

    ``clock_s``: Unix time now, as the clock beside the controller is set now; None: clocks are not compared.
    """

    def __init__(self, clock_s: Callable[[], float] | None) -> None:
        self._clock_s = clock_s
        self._first: Join | None = None
        self.found: dict[str, tuple[str, ...]] = {}  # problems that each node's checks found, by its name
        self._alike: dict[str, tuple[str, ...]] = {}
        self._told: set[str] = set()

    def objection(self, join: Join) -> str:
        """Why this launcher cannot take part; "": it can. One that has a place already is not asked."""
        if join.incarnation >= 0:
            return ""
        skew_s = join.unix_s - self._clock_s() if join.unix_s and self._clock_s else 0.0
        if abs(skew_s) > MOST_SKEW_S:
            return (
                f"the clock of node {join.node} is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the "
                f"controller's, at most {MOST_SKEW_S:g} are allowed; set both by NTP (--no-check joins anyway)"
            )
        first = self._first
        if first is not None and first.versions and join.versions and first.versions != join.versions:
            here = ", ".join(sorted(set(join.versions) - set(first.versions)))
            there = ", ".join(sorted(set(first.versions) - set(join.versions)))
            return (
                f"node {join.node} has {here or 'less'}, {first.node} has {there or 'less'}; "
                "install the same on all nodes (--no-check joins anyway)"
            )
        if first is None or not first.versions:
            self._first = join
        self.found[join.node], self._alike[join.node] = join.checks, join.alike
        return ""

    def differences(self, nodes: Iterable[str]) -> list[str]:
        """What is new of software that should be the same on these nodes and is not; also added to ``found``."""
        have = {node: alike for node in nodes if (alike := self._alike.get(node))}
        lines = [(line, odd) for line, odd in differences(have).items() if line not in self._told]
        for line, odd in lines[:_MOST_DIFFERENCES]:
            self._told.add(line)
            for node in odd:
                self.found[node] = (*self.found.get(node, ()), line)
        return [line for line, _ in lines[:_MOST_DIFFERENCES]]
