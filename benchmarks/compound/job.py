"""The compound run's job in virtual time, with the real controller's core, launchers' core and change detectors.

What runs of keepstep: `Controller` and everything behind it, each launcher's `Member`, each rank's `RankWatch`.
Simulated are the 256 ranks, what their agents measure (iterations, traffic, clock samples), time, and the network.
Nothing of keepstep is told what is slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from benchmarks.compound import schedule as given
from benchmarks.simulate import Workload

from keepstep import wire
from keepstep.agent.ranks.iterations import WARM_UP_STEPS
from keepstep.agent.ranks.track import HISTORY
from keepstep.agent.ranks.watch import RankWatch
from keepstep.control.controller import Controller
from keepstep.control.effects import Effect, Send, WriteIncident
from keepstep.control.settings import Settings
from keepstep.core.events import Phase
from keepstep.core.incident import Incident
from keepstep.core.microbatch_shares import Split, equal_shares, fits
from keepstep.core.port_counters import PortCounts, PortTraffic
from keepstep.core.summary import ClockSample, IterationSummary, PeerTraffic
from keepstep.launch.controller.member import Member

NODES = given.DP * given.PP
COUNT = given.DP * given.MICRO_BATCHES
_TOGETHER = 8  # steps that are simulated at once; what an order changes is simulated anew
_TICK_S = 0.1
_LOOKS_S = 32.0  # for which an agent remembers what was sent to whom
_DELAY_STEPS = 2  # from an order of shares to the first step with them: rank 0 tells all in the next
_RESTARTS = 100
_AGENTS = 1000  # peer numbers of agents begin here

# What an exchange of nodes takes, from what was measured of keepstep (benchmarks/results) and the paper's model:
# a rank's share of 40 billion parameters as bfloat16 with float32 master weights and two moments, not sharded.
STATE_BYTES = 40e9 / (given.TP * given.PP) * (2 + 3 * 4)
FETCH_BYTES_PER_S = (
    1.78e9 / 1.44
)  # checkpoint.json, "fetch from another node": raw TCP ÷ its ratio; each rank its own
RESTORE_BYTES_PER_S = 1.07e9 / (0.144 * 1.024)  # checkpoint.json, "restore from own cache", two at once
REFORM_S = 0.283  # recovery.json, kill to the next step of all, warm standbys
EXCHANGE_S = STATE_BYTES / FETCH_BYTES_PER_S + STATE_BYTES / RESTORE_BYTES_PER_S + REFORM_S
BEGIN_S = 1000.0  # virtual time of the first iteration

Telemetry = Literal["gloo", "nccl"]
"""What agents measure of the network: the kernel's counters of TCP connections, or those of InfiniBand and RoCE ports.
Iterations are the same in both: on NCCL the device's times of operations stand where on Gloo the host's do, and show
waits as these do. Agents have no word for that yet but to leave the backend of a group out."""
_BACKENDS = {"gloo": "gloo", "nccl": ""}
CNP_S = 50e-6  # a sender that is held back is told so once in this time (DCQCN)
CHANCE_MARKS = 20.0  # notifications a second that every port has without a cause


@dataclass(frozen=True, slots=True)
class Told:
    """An incident as it was published when iteration ``step`` was the last that had ended."""

    step: int
    now_s: float
    incident: Incident
    place_of: tuple[int, ...]  # of every node, then


@dataclass(slots=True)
class Log:
    """What happened."""

    seconds: list[float] = field(default_factory=list[float])  # of each iteration, pauses before it included
    shares: list[tuple[int, tuple[int, ...]]] = field(default_factory=list[tuple[int, tuple[int, ...]]])
    exchanges: list[tuple[int, tuple[int, ...]]] = field(default_factory=list[tuple[int, tuple[int, ...]]])
    told: list[Told] = field(default_factory=list[Told])


@dataclass(slots=True)
class _Sent:
    """What went from node to node in one step: bytes, seconds with data under way; how long paths were held back."""

    step: int
    seconds: float
    paths: dict[tuple[int, int], tuple[float, float]]
    held_back: dict[tuple[int, int], float]


def name_of(node: int) -> str:
    """A node's host name, whatever it plays."""
    return f"gpu-{node:05d}"


class Cluster:
    """The machines and what runs on them: which node plays which place, the shares in force, how long it takes."""

    def __init__(self, schedule: given.Schedule, seed: int, jitter: float = 1.0) -> None:
        self.schedule, self._seed, self._jitter = schedule, seed, jitter
        self.place_of = list(range(NODES))  # by node
        self.shares = equal_shares(COUNT, given.DP)
        self._runs = 0

    def exchange(self, place_of: Sequence[int]) -> None:
        """Nodes play other places."""
        assert sorted(place_of) == list(range(NODES))
        self.place_of = list(place_of)

    def job(self) -> Workload:
        """The job with durations not drawn before."""
        self._runs += 1
        return given.workload(self._seed * 100_003 + self._runs, self._jitter)

    def iterations_s(self, first: int, last: int) -> list[float]:
        """Seconds of the iterations from ``first`` to ``last``, not included, as things are."""
        faults = given.faults(self.schedule.events, self.place_of)
        return self.job().iteration_s(last - first, faults, first, self.shares).tolist()

    def rows(self, first: int, last: int, begin_s: float) -> list[tuple[float, list[IterationSummary]]]:
        """The same, and what the agents make of each rank's iteration, step by step."""
        faults = given.faults(self.schedule.events, self.place_of)
        run = self.job().run(last - first, faults, first_step=first, begin_s=begin_s, shares=self.shares)
        ranks = list(run.summaries())
        seconds = run.iteration_s.tolist()
        return [(seconds[step], [rows[step] for rows in ranks]) for step in range(last - first)]

    def sent(self, step: int, seconds: float) -> _Sent:
        """Rings of gradients among the replicas of a stage, messages between the stages of a replica."""
        usual, paths = given.DURATIONS, dict[tuple[int, int], tuple[float, float]]()
        for stage in range(given.PP):
            for replica in range(given.DP):
                here, share = stage * given.DP + replica, self.shares[replica]
                there = stage * given.DP + (replica + 1) % given.DP
                paths[here, there] = given.TP * 2.0 * (1 << 28), given.TP * usual.dp_s
                for other in (here - given.DP, here + given.DP):
                    if 0 <= other < NODES:
                        paths[here, other] = (
                            given.TP * share * float(1 << 24),
                            given.TP * share * usual.message_s,
                        )
        held_back = dict[tuple[int, int], float]()
        for event in self.schedule.at(step):
            if event.kind == "link":
                one = self.place_of[event.stage * given.DP + event.replica]
                other = self.place_of[event.to_stage * given.DP + event.to_replica]
                for way in ((one, other), (other, one)):
                    if way in paths:
                        held_back[way] = paths[way][1] * (event.times - 1)
                        paths[way] = paths[way][0], paths[way][1] * event.times
        return _Sent(step, seconds, paths, held_back)


class Treated:
    """The job with keepstep. ``run()``, then look at ``log``."""

    def __init__(
        self,
        schedule: given.Schedule,
        seed: int,
        exchange_s: float = EXCHANGE_S,
        telemetry: Telemetry = "gloo",
    ) -> None:
        self.log = Log()
        self._telemetry, self._chance = telemetry, np.random.default_rng(seed)
        self._cluster, self._exchange_s = Cluster(schedule, seed), exchange_s
        self._iterations = schedule.iterations
        self._now_s, self._ticks, self._beats = BEGIN_S, round(BEGIN_S / _TICK_S), round(BEGIN_S)
        self._step = self._first = 0  # the next one; the incarnation's first
        self._number, self._in_force_from = 0, 0
        self._ordered: wire.Shares | None = None
        self._ordered_from = 0
        self._ahead: deque[tuple[float, list[IterationSummary]]] = deque()
        self._mail: deque[tuple[int, wire.Message]] = deque()
        self._seal_at: int | None = None
        self._halted_s: float | None = None
        self._began_s = self._now_s  # the iteration that is under way, pauses before it included
        self._names = [name_of(node) for node in range(NODES)]
        self._tracks: list[deque[IterationSummary]] = []
        self._watches: list[RankWatch] = []
        self._sent: deque[_Sent] = deque()
        self._clock: list[list[ClockSample]] = []
        self.controller = Controller(Settings(nodes=NODES, backups=1, validate=False))
        self._agent_of = [_AGENTS + node for node in range(NODES)]
        self._members = [
            Member(
                wire.Join(
                    *(name, f"10.0.0.{node}", given.TP, 29500, node, NODES, NODES, _RESTARTS),
                ),
                100 + node,
                lambda: 29500,
            )
            for node, name in enumerate(self._names)
        ]
        for node, member in enumerate(self._members):
            self.controller.connected(node, "launcher")
            for message in member.greet():
                self._say(node, message)
        self._begin()

    @property
    def now_s(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def run(self) -> Log:
        """All iterations."""
        while self._step < self._iterations:
            self._iterate()
        assert abs(sum(self.log.seconds) - (self._now_s - BEGIN_S)) < 1e-6, "time was lost count of"
        return self.log

    # --- training -------------------------------------------------------------------------------------------------

    def _iterate(self) -> None:
        order = self._ordered
        if order is not None and self._step >= self._ordered_from:
            self._ordered = None
            if order.number > self._number and order.incarnation == self._incarnation:
                assert fits(order.shares, COUNT, given.DP)
                self._cluster.shares, self._number = list(order.shares), order.number
                self._in_force_from = self._step
                self._ahead.clear()
                self.log.shares.append((self._step, tuple(order.shares)))
                self._tell_splits()
        if not self._ahead:
            last = min(self._step + _TOGETHER, self._iterations)
            self._ahead.extend(self._cluster.rows(self._step, last, self._now_s))
        seconds, rows = self._ahead.popleft()
        if not self._pass(self._now_s + seconds):
            self._reform()
            return
        self._ended(seconds, rows)

    def _ended(self, seconds: float, rows: Sequence[IterationSummary]) -> None:
        self.log.seconds.append(self._now_s - self._began_s)
        self._began_s = self._now_s
        step, self._step = self._step, self._step + 1
        for row in rows:
            self._tracks[row.rank].append(row)
            if row.rank % given.TP == 0:
                self._clock[row.rank // given.TP] += [
                    ClockSample(
                        *(one.group, one.op, -1, one.first_seq, row.rank),
                        *(row.start_s + one.start_s, row.start_s + one.end_s),
                    )
                    for one in row.streams
                    if one.peer < 0 and one.count == 1
                ]
        self._sent.append(self._cluster.sent(step, seconds))
        while sum(one.seconds for one in self._sent) > _LOOKS_S:
            self._sent.popleft()
        if step >= self._first + WARM_UP_STEPS:
            for row in rows:
                finding = self._watches[row.rank].iteration(step, row.duration_s, row.self_s, self._now_s)
                if finding is not None:
                    self._say(self._agent_at(row.rank // given.TP), wire.Found(finding))
        if self._seal_at is not None and step > self._seal_at:  # it was copied away while the next one ran
            sealed, self._seal_at = self._seal_at, None
            for node in range(NODES):
                self._say(node, wire.Sealed(self._incarnation, sealed))
            if self._halted_s is not None:  # what was done since is lost
                redone = self._step - (sealed + 1)
                self._step = sealed + 1
                lost = [self.log.seconds.pop() for _ in range(redone)]
                self._began_s -= sum(lost)

    def _pass(self, until_s: float) -> bool:
        """Time passes; False when the job was halted meanwhile."""
        while (self._ticks + 1) * _TICK_S <= until_s:
            if self._halted_s is not None:
                return False
            self._ticks += 1
            self._now_s = max(self._now_s, self._ticks * _TICK_S)
            self._tick()
        if self._halted_s is not None:
            return False
        self._now_s = until_s
        return True

    def _tick(self) -> None:
        for _ in range(len(self._mail)):
            self._say(*self._mail.popleft())
        if self._now_s >= self._beats + 1:
            self._beats += 1
            for node in range(NODES):
                self._beat(node)
        self._carry_out(self.controller.tick(self._now_s))

    # --- beginning again ------------------------------------------------------------------------------------------

    def _reform(self) -> None:
        """All workers are ended, nodes get their places, states are brought, all begin again."""
        assert self._halted_s is not None
        until_s = self._halted_s + self._exchange_s
        for node in range(NODES):
            self.controller.disconnected(self._agent_of[node], self._now_s)
        for node, member in enumerate(self._members):
            for message in member.halted():
                self._say(node, message)
        self._halted_s = None
        while any(member.to_run is None for member in self._members):
            self._idle()
            assert self._now_s < until_s, "the launchers were given no places"
        for node in range(NODES):
            self._agent_of[node] += NODES
        self._begin()
        while self._now_s < until_s:
            self._idle()
        self.log.exchanges.append((self._step, tuple(self._cluster.place_of)))

    def _idle(self) -> None:
        self._ticks += 1
        self._now_s = self._ticks * _TICK_S
        self._tick()

    def _begin(self) -> None:
        """Workers of a new incarnation, and their agents."""
        place_of, incarnation = [-1] * NODES, 0
        for node, member in enumerate(self._members):
            placement = member.to_run
            assert placement is not None
            incarnation = placement.incarnation
            place_of[node] = placement.node_rank
            assert placement.first_rank == placement.node_rank * given.TP
            member.started()
        self._cluster.exchange(place_of)
        self._cluster.shares = equal_shares(COUNT, given.DP)
        self._number, self._in_force_from, self._ordered = 0, self._step, None
        self._first = self._step
        self._ahead.clear()
        self._mail.clear()
        self._sent.clear()
        world = range(NODES * given.TP)
        names = [self._names[self._node_at(rank // given.TP)] for rank in world]
        self._tracks = [deque(maxlen=HISTORY) for _ in world]
        self._watches = [RankWatch(rank, names[rank]) for rank in world]
        self._clock = [[] for _ in range(NODES)]
        backend = _BACKENDS[self._telemetry]
        groups = tuple(replace(one, backend=backend) for one in self._cluster.job().groups().values())
        for node, name in enumerate(self._names):
            peer, place = self._agent_of[node], place_of[node]
            self.controller.connected(peer, "agent")
            self._say(peer, wire.Hello("agent", name, place, peer, incarnation, launcher=100 + node))
            own = set(range(place * given.TP, (place + 1) * given.TP))
            self._say(
                peer, wire.Groups(place * given.TP, tuple(one for one in groups if own & set(one.members)))
            )
        self._tell_splits()

    # --- agents ---------------------------------------------------------------------------------------------------

    @property
    def _incarnation(self) -> int:
        return self._members[0].incarnation

    def _node_at(self, place: int) -> int:
        return self._cluster.place_of.index(place)

    def _agent_at(self, place: int) -> int:
        return self._agent_of[self._node_at(place)]

    def _beat(self, node: int) -> None:
        place = self._cluster.place_of[node]
        beats: list[wire.RankBeat] = []
        for rank in range(place * given.TP, (place + 1) * given.TP):
            row = self._tracks[rank][-1] if self._tracks[rank] else None
            figures = (
                (row.step, int(Phase.FORWARD), row.step + 1, row.duration_s, row.self_s)
                if row
                else (-1, 0, 1, 0.0, 0.0)
            )
            beats.append(wire.RankBeat(rank, *figures))
        samples, self._clock[place] = tuple(self._clock[place]), []
        beat = wire.Heartbeat(place, self._beats, self._now_s, tuple(beats), samples)
        self._say(self._agent_of[node], beat)

    def _tell_splits(self) -> None:
        for node in range(NODES):
            place = self._cluster.place_of[node]
            replica = place % given.DP
            told = tuple(
                Split(
                    *(rank, self._incarnation, COUNT, replica, given.DP),
                    number=self._number,
                    step=self._in_force_from,
                    share=self._cluster.shares[replica],
                )
                for rank in range(place * given.TP, (place + 1) * given.TP)
            )
            self._mail.append((self._agent_of[node], wire.Splits(place, told)))

    def _profile(self, node: int, request: wire.ProfileRequest) -> wire.Profile:
        place = self._cluster.place_of[node]
        rows = [
            row
            for rank in range(place * given.TP, (place + 1) * given.TP)
            for row in self._tracks[rank]
            if request.first_step <= row.step <= request.last_step
        ]
        rows.sort(key=lambda row: (row.step, row.rank))
        if self._telemetry == "gloo":
            traffic = self._traffic(place, request.onset_step)
            return wire.Profile(request.request, place, tuple(rows), traffic=traffic)
        return wire.Profile(request.request, place, tuple(rows), ports=self._ports(place, request.onset_step))

    def _traffic(self, place: int, onset_step: int) -> tuple[PeerTraffic, ...]:
        if onset_step < 0:
            return ()
        spans = [0.0, 0.0]
        sums: dict[int, list[float]] = {}
        for one in self._sent:
            after = one.step >= onset_step
            spans[after] += one.seconds
            for (source, target), (nbytes, busy_s) in one.paths.items():
                if source == place:
                    row = sums.setdefault(target, [0.0] * 4)
                    row[2 * after] += nbytes
                    row[2 * after + 1] += busy_s
        name, address = self._names[self._node_at(place)], self._address(place)
        return tuple(
            PeerTraffic(
                *(name, address, self._address(target)),
                *(spans[0], int(row[0]), row[1]),
                *(spans[1], int(row[2]), row[3]),
            )
            for target, row in sums.items()
        )

    def _ports(self, place: int, onset_step: int) -> tuple[PortTraffic, ...]:
        """The node's port: bytes, and notifications of congestion at both ends of a path that is held back."""
        if onset_step < 0:
            return ()
        spans = [PortCounts(), PortCounts()]
        for one in self._sent:
            sent = sum(nbytes for (source, _), (nbytes, _) in one.paths.items() if source == place)
            received = sum(nbytes for (_, target), (nbytes, _) in one.paths.items() if target == place)
            held_s = sum(held_s for path, held_s in one.held_back.items() if place in path)
            marks = int(self._chance.poisson(CHANCE_MARKS * one.seconds + held_s / CNP_S))
            counts = PortCounts(one.seconds, int(sent), int(received), marked=marks)
            after = one.step >= onset_step
            spans[after] = spans[after].plus(counts)
        return (PortTraffic(self._names[self._node_at(place)], "mlx5_0/1", spans[0], spans[1]),)

    def _address(self, place: int) -> str:
        return f"10.0.0.{self._node_at(place)}"

    # --- the controller -------------------------------------------------------------------------------------------

    def _say(self, peer: int, message: wire.Message) -> None:
        self._carry_out(self.controller.message(peer, message, self._now_s))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, WriteIncident):
                told = Told(self._step - 1, self._now_s, effect.incident, tuple(self._cluster.place_of))
                self.log.told.append(told)
            elif isinstance(effect, Send):
                for peer in effect.peers:
                    if peer >= _AGENTS:
                        self._to_agent(peer, effect.message)
                    else:
                        self._to_launcher(peer, effect.message)

    def _to_agent(self, peer: int, message: wire.Message) -> None:
        if peer not in self._agent_of:
            return
        node = self._agent_of.index(peer)
        if isinstance(message, wire.ProfileRequest):
            self._mail.append((peer, self._profile(node, message)))
        elif isinstance(message, wire.Shares) and message != self._ordered:  # it is said until it is obeyed
            self._ordered, self._ordered_from = message, self._step + _DELAY_STEPS

    def _to_launcher(self, node: int, message: wire.Message) -> None:
        member = self._members[node]
        for answer in member.received(message):
            self._say(node, answer)
        if member.seal is not None:
            member.seal, self._seal_at = None, self._step
        if member.must_halt and self._halted_s is None:
            self._halted_s = self._now_s


def untreated(schedule: given.Schedule, seed: int) -> list[float]:
    """Seconds of each iteration of the same job without keepstep."""
    return Cluster(schedule, seed).iterations_s(0, schedule.iterations)


def healthy(schedule: given.Schedule, seed: int) -> list[float]:
    """The same where nothing is slow."""
    return Cluster(replace(schedule, events=()), seed).iterations_s(0, schedule.iterations)
