"""Made-up jobs for the tests of locate: programs of ranks, run in virtual time with true dependencies.

Everything here is simulated. It knows the shared types of core and nothing of what it is used to test.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from keepstep.core.events import Op
from keepstep.core.summary import ClockSample, GroupInfo, IterationSummary, StreamSummary


@dataclass
class Conditions:
    """What is wrong in an iteration. Factors stretch times."""

    slow: dict[tuple[int, str], float] = field(default_factory=dict)  # (rank, phase) -> factor
    links: dict[frozenset[str], float] = field(default_factory=dict)  # {node, node} -> factor
    everybody: float = 1.0


def slow_rank(rank, factor, phases=("forward", "backward")):
    return {(rank, phase): factor for phase in phases}


@dataclass
class Job:
    """Programs are lists of instructions, see the builders below."""

    programs: list[list[tuple]]
    groups: dict[str, tuple[int, ...]]
    per_node: int = 2
    noise: float = 0.02
    seed: int = 0
    bandwidth: float = 1e9  # bytes per second between nodes, ten times that within one
    buffered_sends: bool = False
    overlap_unknown: bool = True  # in-flight time of asynchronous operations counts as waiting
    clock: dict[str, tuple[float, float]] = field(default_factory=dict)  # node -> offset, drift

    @property
    def world(self):
        return len(self.programs)

    @property
    def nodes(self):
        return {rank: f"n{rank // self.per_node}" for rank in range(self.world)}

    @property
    def infos(self):
        return {name: GroupInfo(name, members, "gloo") for name, members in self.groups.items()}

    def run(self, steps, conditions=None, first_step=0, begin_s=100.0):
        """Iteration summaries of all ranks for ``steps`` iterations, and clock samples by node."""
        run = _Run(self, conditions or Conditions(), first_step, begin_s)
        for _ in range(steps):
            run.iteration()
        return run.summaries, run.samples

    def healthy_then(self, conditions, before=12, after=6):
        """(before, after, samples by node): ``after`` comes at once after ``before``."""
        healthy, samples = self.run(before)
        end = max(s.start_s - self.offset(s.rank, s.start_s) + s.duration_s for s in healthy)
        slow, later = self.run(after, conditions, first_step=before, begin_s=end)
        return healthy, slow, {node: [*samples[node], *later[node]] for node in samples}

    def offset(self, rank, true_s):
        offset, drift = self.clock.get(self.nodes[rank], (0.0, 0.0))
        return offset + drift * true_s


class _Run:
    def __init__(self, job, conditions, first_step, begin_s):
        self.job, self.conditions, self.step = job, conditions, first_step
        self.rng = random.Random(job.seed * 7919 + first_step)
        self.now = [begin_s] * job.world
        self.summaries, self.samples = [], {node: [] for node in set(job.nodes.values())}
        self.sequence = defaultdict(lambda: first_step * 1000)
        self.wire_free = defaultdict(float)

    def transfer(self, ranks, nbytes):
        nodes = self.job.nodes
        worst = 0.0
        for a, b in zip(ranks, ranks[1:] + ranks[:1], strict=True):
            local = nodes[a] == nodes[b]
            factor = self.conditions.links.get(frozenset((nodes[a], nodes[b])), 1.0)
            worst = max(worst, (2e-4 + nbytes / self.job.bandwidth / (10 if local else 1)) * factor)
        return worst * self.rng.uniform(0.95, 1.1)

    def iteration(self):
        world = self.job.world
        self.begin = list(self.now)
        self.pc = [0] * world
        self.events = [[] for _ in range(world)]  # group, op, peer, seq, start, end, bytes
        self.waits = [[] for _ in range(world)]
        self.pending = [[] for _ in range(world)]
        self.phases = [defaultdict(list) for _ in range(world)]  # when the rank was in them, waits included
        self.entered = {}
        self.sent = {}
        counters = dict(self.sequence)
        self.counters = [defaultdict(int, {}) for _ in range(world)]
        self.base = counters
        moved = True
        while moved:
            moved = False
            for rank in range(world):
                while self.pc[rank] < len(self.job.programs[rank]) and self.execute(rank):
                    self.pc[rank] += 1
                    moved = True
        assert all(pc == len(p) for pc, p in zip(self.pc, self.job.programs, strict=True)), "deadlock"
        for rank in range(world):
            self.summarise(rank)
        for key in {key for counter in self.counters for key in counter}:
            self.sequence[key] += max(counter[key] for counter in self.counters)
        self.step += 1

    def number(self, rank, key):
        return self.base.get(key, self.step * 1000) + self.counters[rank][key]

    def execute(self, rank):
        kind, *args = self.job.programs[rank][self.pc[rank]]
        return getattr(self, f"do_{kind}")(rank, *args)

    def do_compute(self, rank, phase, seconds):
        factor = self.conditions.slow.get((rank, phase), 1.0) * self.conditions.everybody
        spent = seconds * factor * max(0.3, self.rng.gauss(1.0, self.job.noise))
        self.phases[rank][phase].append((self.now[rank], self.now[rank] + spent))
        self.now[rank] += spent
        return True

    def do_send(self, rank, group, peer, nbytes):
        key = (group, rank, peer)
        seq = self.number(rank, key)
        start = max(self.now[rank], self.wire_free[key])
        self.wire_free[key] = arrival = start + self.transfer([rank, peer], nbytes)
        self.sent[key, seq] = arrival
        end = self.now[rank] + 1e-5 if self.job.buffered_sends else arrival
        self.events[rank].append((group, Op.SEND, peer, seq, self.now[rank], end, nbytes))
        self.counters[rank][key] += 1
        self.now[rank] += 1e-5
        return True

    def do_recv(self, rank, group, peer, nbytes):
        key = (group, peer, rank)
        seq = self.number(rank, key)
        if (key, seq) not in self.sent:
            return False
        start = self.now[rank]
        end = max(start + 1e-5, self.sent[key, seq])
        self.events[rank].append((group, Op.RECV, peer, seq, start, end, nbytes))
        self.waits[rank].append((start, end))
        self.counters[rank][key] += 1
        self.now[rank] = end
        return True

    def do_coll(self, rank, group, op, nbytes):
        seq = self.number(rank, group)
        starts = self.entered.setdefault((group, seq), {})
        starts.setdefault(rank, self.now[rank])
        if len(starts) < len(self.job.groups[group]):
            return False
        start = starts[rank]
        end = self.finish(group, seq, nbytes)
        self.events[rank].append((group, op, -1, seq, start, end, nbytes))
        self.waits[rank].append((start, end))
        self.counters[rank][group] += 1
        self.now[rank] = end
        return True

    def do_async(self, rank, group, op, nbytes):
        seq = self.number(rank, group)
        self.entered.setdefault((group, seq), {})[rank] = self.now[rank]
        self.pending[rank].append((group, op, seq, self.now[rank], nbytes))
        self.counters[rank][group] += 1
        if len(self.entered[group, seq]) == len(self.job.groups[group]):
            self.finish(group, seq, nbytes)
        return True

    def do_join(self, rank):
        if any(("end", group, seq) not in self.entered for group, _, seq, _, _ in self.pending[rank]):
            return False
        began = self.now[rank]
        for group, op, seq, start, nbytes in self.pending[rank]:
            end = self.finish(group, seq, nbytes)
            self.events[rank].append((group, op, -1, seq, start, end, nbytes))
            wait_start = start if self.job.overlap_unknown else max(start, began)
            if end > wait_start:
                self.waits[rank].append((wait_start, end))
            self.now[rank] = max(self.now[rank], end)
        self.pending[rank].clear()
        return True

    def finish(self, group, seq, nbytes):
        key = ("end", group, seq)
        if key not in self.entered:
            ready = max(max(self.entered[group, seq].values()), self.wire_free[group])
            self.entered[key] = ready + self.transfer(list(self.job.groups[group]), nbytes)
            self.wire_free[group] = self.entered[key]
        return self.entered[key]

    def summarise(self, rank):
        begin, duration = self.begin[rank], self.now[rank] - self.begin[rank]
        blocked = _union(self.waits[rank])
        streams = defaultdict(list)
        node = self.job.nodes[rank]
        for event in self.events[rank]:
            group, op, peer, seq, start, end, _ = event
            streams[group, op, peer].append(event)
            if seq % 3 == 0:
                shift = self.job.offset(rank, start)
                self.samples[node].append(
                    ClockSample(group, int(op), peer, seq, rank, start + shift, end + shift)
                )
        waits = self.waits[rank]
        own = {name: _union(spans + waits) - blocked for name, spans in self.phases[rank].items()}
        self.summaries.append(
            IterationSummary(
                rank, self.step, begin + self.job.offset(rank, begin), duration, duration - blocked, blocked,
                data_s=own.get("data", 0.0), backward_s=own.get("backward", 0.0), gc_s=own.get("gc", 0.0),
                optimizer_s=own.get("optimizer", 0.0),
                streams=tuple(_stream(key, rows, begin) for key, rows in streams.items()),
            )
        )  # fmt: skip


def _stream(key, rows, begin):
    group, op, peer = key
    lengths = [end - start for *_, start, end, _ in rows]
    waited = sum(lengths) if op != Op.SEND else 0.0
    return StreamSummary(
        group, int(op), peer, len(rows), sum(row[6] for row in rows), rows[0][3],
        sum(row[4] - begin for row in rows) / len(rows), sum(row[5] - begin for row in rows) / len(rows),
        sum(lengths), waited, min(lengths),
    )  # fmt: skip


def _union(intervals):
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


MB = 1 << 20


def dp_pp(dp, pp, micro=4, forward=0.02, backward=0.04, own_groups=False, **options):
    """1F1B pipelines, gradients reduced in one piece at the end; rank = dp index + dp * stage."""
    groups = {"world": tuple(range(dp * pp))}
    for stage in range(pp):
        groups[f"g{stage}"] = tuple(range(stage * dp, (stage + 1) * dp))
    if own_groups:
        groups |= {f"p{d}": tuple(range(d, dp * pp, dp)) for d in range(dp)}
    programs = []
    for rank in range(dp * pp):
        stage, replica = divmod(rank, dp)
        wire = f"p{replica}" if own_groups else "world"
        before = (rank - dp) if stage > 0 else None
        after = (rank + dp) if stage < pp - 1 else None

        def block(phase, seconds, source, target, wire=wire):
            parts: list[tuple] = [("recv", wire, source, MB)] if source is not None else []
            parts.append(("compute", phase, seconds))
            return parts + ([("send", wire, target, MB)] if target is not None else [])

        fwd, bwd = block("forward", forward, before, after), block("backward", backward, after, before)
        warmup = min(pp - stage - 1, micro)
        program = [("compute", "data", 0.002)] + fwd * warmup
        program += (fwd + bwd) * (micro - warmup) + bwd * warmup
        program += [("coll", f"g{stage}", Op.ALLREDUCE, 8 * MB), ("compute", "optimizer", 0.004)]
        programs.append(program)
    return Job(programs, groups, **options)


def dp_tp(dp, tp, layers=4, forward=0.01, backward=0.02, **options):
    """Tensor parallel within ``tp`` neighbours, an all-reduce per layer both ways; gradients at the end."""
    groups = {"world": tuple(range(dp * tp))}
    groups |= {f"t{d}": tuple(range(d * tp, (d + 1) * tp)) for d in range(dp)}
    groups |= {f"d{t}": tuple(range(t, dp * tp, tp)) for t in range(tp)}
    programs = []
    for rank in range(dp * tp):
        d, t = divmod(rank, tp)
        program = [("compute", "data", 0.002)]
        for _ in range(layers):
            program += [("compute", "forward", forward), ("coll", f"t{d}", Op.ALLREDUCE, MB // 4)]
        for _ in range(layers):
            program += [
                ("compute", "backward", backward),
                ("coll", f"t{d}", Op.ALLREDUCE, MB // 4),
            ]
        program += [("coll", f"d{t}", Op.ALLREDUCE, 8 * MB), ("compute", "optimizer", 0.003)]
        program += [("coll", "world", Op.ALLREDUCE, 4)]
        programs.append(program)
    return Job(programs, groups, **options)


def ddp(world, buckets=4, forward=0.04, backward=0.08, group="world", **options):
    """Data parallel with gradient buckets reduced while backward goes on."""
    program = [("compute", "data", 0.003), ("compute", "forward", forward)]
    for _ in range(buckets):
        program += [("compute", "backward", backward / buckets), ("async", group, Op.ALLREDUCE, 4 * MB)]
    program += [("join",), ("compute", "optimizer", 0.005)]
    return Job([list(program) for _ in range(world)], {group: tuple(range(world))}, **options)


def fsdp(world, layers=4, forward=0.01, backward=0.02, group="world", **options):
    """Parameters gathered per layer both ways, gradients scattered in backward."""
    program = [("compute", "data", 0.003)]
    for _ in range(layers):
        program += [("coll", group, Op.ALLGATHER, 2 * MB), ("compute", "forward", forward)]
    for _ in range(layers):
        program += [("coll", group, Op.ALLGATHER, 2 * MB), ("compute", "backward", backward)]
        program += [("async", group, Op.REDUCE_SCATTER, 2 * MB)]
    program += [("join",), ("compute", "optimizer", 0.005)]
    return Job([list(program) for _ in range(world)], {group: tuple(range(world))}, **options)
