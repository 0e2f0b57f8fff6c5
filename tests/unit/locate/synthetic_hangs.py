"""Runs the programs of a made-up job until nobody can go on, and tells where every rank is then. Simulated."""

from __future__ import annotations

from collections import defaultdict

from keepstep.core.events import Op, Phase
from keepstep.core.summary import OpInFlight, RankState, StreamProgress

PHASES = {
    "data": Phase.DATA,
    "forward": Phase.FORWARD,
    "backward": Phase.BACKWARD,
    "optimizer": Phase.OPTIMIZER,
}


class Stuck:
    """``asleep``: rank -> how many instructions it still executes. ``broken``: (group, seq) whose transfer never ends.

    ``skips``: rank -> index of an instruction that it leaves out. Sends are buffered unless ``rendezvous``.
    """

    def __init__(self, job, asleep=None, broken=(), skips=None, rendezvous=False, iterations=2, late_ends=()):
        self.job, self.broken, self.rendezvous = job, set(broken), rendezvous
        self.late_ends = set(late_ends)  # ranks whose asynchronous ends are told only when they wait for them
        asleep, skips = asleep or {}, skips or {}
        self.programs = []
        for rank in range(job.world):
            program = list(job.programs[rank]) * iterations
            if rank in skips:
                del program[skips[rank]]
            self.programs.append(program[: asleep[rank]] if rank in asleep else program)
        self.now = 1000.0
        self.pc = [0] * job.world
        self.phase = [Phase.FORWARD] * job.world
        self.progress = [self.now] * job.world
        self.started = [defaultdict(int) for _ in range(job.world)]  # stream -> count
        self.completed = [defaultdict(int) for _ in range(job.world)]
        self.op_of = [{} for _ in range(job.world)]
        self.flying = [{} for _ in range(job.world)]  # (stream, seq) -> (op, since)
        self.entered = defaultdict(set)
        moved = True
        while moved:
            moved = False
            for rank in range(job.world):
                while self.pc[rank] < len(self.programs[rank]) and self.step(rank):
                    moved = True
        self.stopped_s = self.now

    def step(self, rank):
        kind, *args = self.programs[rank][self.pc[rank]]
        if not getattr(self, f"do_{kind}")(rank, *args):
            return False
        self.pc[rank] += 1
        return True

    def tick(self, rank):
        self.now += 0.001
        self.progress[rank] = self.now

    def start(self, rank, stream, op):
        self.tick(rank)
        self.started[rank][stream] += 1
        seq = self.started[rank][stream]
        self.op_of[rank][stream] = op
        self.flying[rank][stream, seq] = (op, self.now)
        return seq

    def end(self, rank, stream, seq):
        if (stream, seq) in self.flying[rank]:
            del self.flying[rank][stream, seq]
            self.completed[rank][stream] += 1
            self.tick(rank)

    def do_compute(self, rank, phase, seconds):
        self.phase[rank] = PHASES[phase]
        return True

    def do_send(self, rank, group, peer, nbytes):
        stream = (group, "p2p", rank, peer)
        seq = self.start(rank, stream, Op.SEND)
        self.entered["send", stream, seq].add(rank)
        if not self.rendezvous or self.entered["recv", stream, seq]:
            self.end(rank, stream, seq)
        return True

    def do_recv(self, rank, group, peer, nbytes):
        stream = (group, "p2p", peer, rank)
        pending = [seq for key, seq in self.flying[rank] if key == stream]
        seq = pending[0] if pending else self.start(rank, stream, Op.RECV)
        self.entered["recv", stream, seq].add(rank)
        if not self.entered["send", stream, seq] or (stream[0], seq) in self.broken:
            return False
        self.end(peer, stream, seq)
        self.end(rank, stream, seq)
        return True

    def do_coll(self, rank, group, op, nbytes):
        stream = (group, "coll")
        current = self.started[rank][stream]
        mine = (stream, current) in self.flying[rank] and self.flying[rank][stream, current][0] is op
        seq = current if mine else self.start(rank, stream, op)
        self.entered[stream, seq].add(rank)
        if not self.complete(stream, seq):
            return False
        self.end(rank, stream, seq)
        return True

    def do_async(self, rank, group, op, nbytes):
        stream = (group, "coll")
        seq = self.start(rank, stream, op)
        self.entered[stream, seq].add(rank)
        if self.complete(stream, seq):
            for member in self.job.groups[group]:
                if member not in self.late_ends:
                    self.end(member, stream, seq)
        return True

    def do_join(self, rank):
        waiting = [(stream, seq) for stream, seq in self.flying[rank] if stream[1] == "coll"]
        if not all(self.complete(stream, seq) for stream, seq in waiting):
            return False
        for stream, seq in waiting:
            self.end(rank, stream, seq)
        return True

    def complete(self, stream, seq):
        everybody = len(self.entered[stream, seq]) == len(self.job.groups[stream[0]])
        return everybody and (stream[0], seq) not in self.broken

    def states(self, dead=(), process="S", stopped=(), hours=0.0, seen_after_s=20.0):
        found = []
        for rank in range(self.job.world):
            shift = hours * 3600 * int(self.job.nodes[rank][1:])
            flights = [
                OpInFlight(stream[0], int(op), self.peer(stream, rank), seq, since + shift)
                for (stream, seq), (op, since) in self.flying[rank].items()
            ]
            streams = tuple(
                StreamProgress(
                    stream[0],
                    int(self.op_of[rank][stream]),
                    self.peer(stream, rank),
                    count,
                    self.completed[rank][stream],
                )
                for stream, count in self.started[rank].items()
            )
            state = "" if rank in dead else "T" if rank in stopped else process
            found.append(
                RankState(
                    rank, rank not in dead, 1, int(self.phase[rank]), self.progress[rank] + shift, 100,
                    self.progress[rank] + shift, self.stopped_s + seen_after_s + shift,
                    tuple(flights), streams, state,
                )
            )  # fmt: skip
        return found

    @staticmethod
    def peer(stream, rank):
        if stream[1] == "coll":
            return -1
        return stream[3] if stream[2] == rank else stream[2]
