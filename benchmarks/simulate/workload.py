"""Simulated jobs: ring records, iteration summaries and rank states of any layout, schedule and list of faults.

Everything is computed, nothing measured: a step is the longest path through its dependency graph, with durations
drawn from recorded runs (`_jitter`). Small jobs give every rank's ring records (`Run.records`). For large ones these
are too many: `Run.summaries` and `Run.states` then give at once what the agents would make of them; the tests prove
on small jobs that the agents' own code makes the same of the records. This package may not use that code itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulate._faults import Fault
from benchmarks.simulate._jitter import Jitter
from benchmarks.simulate._replay import BYTES, BlockTimes, Durations, Replay, Role, Sink
from benchmarks.simulate._schedules import Schedule
from benchmarks.simulate._sinks import (
    Blocks,
    Log,
    Progress,
    RecordAt,
    StageSums,
    Stream,
    Sums,
    joined,
    per_rank,
    summary_of_row,
)
from benchmarks.simulate._traffic import address, sent_in_a_step, slower
from keepstep.core.errors import UsageError
from keepstep.core.events import Kind, Op, Phase
from keepstep.core.layout import ParallelLayout
from keepstep.core.summary import (
    BlockKind,
    BlockSummary,
    GroupInfo,
    HostCause,
    IterationSummary,
    OpInFlight,
    PeerTraffic,
    RankState,
    StreamProgress,
)
from keepstep.ring import RECORD

Floats = NDArray[np.float64]
_OUTSIDE = {  # where a rank is between phases, by the one that ended last
    int(Phase.OPTIMIZER): Phase.AFTER_STEP,
    int(Phase.BACKWARD): Phase.AFTER_BACKWARD,
}
MOST_RANKS = 131_072
_MOST_LOGGED = 1024
_BEGIN_S = 1000.0  # true time of the first step; node clocks differ
_OFFSET_S = 5000.0
_DRIFT = 2e-5
_THREAD = 1
_STUCK_S = 60.0  # after the last progress of anybody states are told
_Key = tuple[str, int, int]
_BLOCKS: Mapping[tuple[Kind, int], BlockKind] = {
    (Kind.PHASE, Phase.MODEL): "forward",
    (Kind.PHASE, Phase.BACKWARD): "backward",
    (Kind.P2P, Op.SEND): "send",
    (Kind.P2P, Op.RECV): "recv",
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A job: TP x PP x DP ranks, numbered with tp fastest, then dp, then pp.

    ``layers``: all-reduces of a tensor-parallel group in each forward and each backward block. ``recorded``: durations
    of real blocks in place of drawn ones. ``jitter`` scales what was recorded of it.

    Raises:
        UsageError: a layout with other dimensions, in another order or of more than 131,072 ranks; no micro-batch.
    """

    layout: ParallelLayout
    schedule: Schedule = "1f1b"
    micro_batches: int = 8
    layers: int = 2
    durations: Durations = field(default_factory=Durations)
    ranks_per_node: int = 8
    seed: int = 0
    jitter: float = 1.0
    recorded: BlockTimes | None = None

    def __post_init__(self) -> None:
        layout = self.layout
        inner = layout.tp * layout.dp
        if inner * layout.pp != layout.world_size or layout.group_of(0, "pp")[1:2] not in ((), (inner,)):
            raise UsageError(f"layout {layout}: simulated jobs have tp, dp and pp, dealt in this order")
        if layout.world_size > MOST_RANKS:
            raise UsageError(
                f"layout {layout}: {layout.world_size} ranks, at most {MOST_RANKS} are simulated"
            )
        if min(self.micro_batches, self.layers, self.ranks_per_node) < 1:
            raise UsageError("micro_batches, layers and ranks_per_node must be at least 1")

    @property
    def nodes(self) -> dict[int, str]:
        """Node name by rank."""
        return {rank: self._name(rank // self.ranks_per_node) for rank in range(self.layout.world_size)}

    def groups(self) -> dict[str, GroupInfo]:
        """All process groups by name."""
        found = {"world": tuple(range(self.layout.world_size))}
        for role in self._roles()[1:]:
            for number, members in enumerate(self.layout.groups(role).tolist()):
                found[f"{role}_{number}"] = tuple(members)
        return {
            name: GroupInfo(name, members, "nccl", "" if name == "world" else f"mesh_{name.split('_')[0]}")
            for name, members in found.items()
        }

    def groups_of(self, rank: int) -> list[GroupInfo]:
        """The rank's groups by the number that its ring has for them."""
        return [
            GroupInfo(
                name,
                tuple(range(self.layout.world_size)) if role == "world" else self.layout.group_of(rank, role),
                "nccl",
                "" if role == "world" else f"mesh_{role}",
            )
            for role, name in self.group_names(rank).items()
        ]

    def group_names(self, rank: int) -> dict[Role, str]:
        """Names of the rank's groups by role."""
        tp, dp = self.layout.tp, self.layout.dp
        number: dict[Role, int] = {
            "pp": rank % (tp * dp),
            "dp": rank // (tp * dp) * tp + rank % tp,
            "tp": rank // tp,
        }
        return {role: "world" if role == "world" else f"{role}_{number[role]}" for role in self._roles()}

    def run(
        self,
        steps: int,
        faults: Sequence[Fault] = (),
        *,
        log: bool = False,
        stuck: bool = False,
        blocks_of: Sequence[int] = (),
        first_step: int = 0,
        begin_s: float = _BEGIN_S,
        shares: Sequence[int] | None = None,
    ) -> Run:
        """``steps`` steps from ``first_step`` on, which begins at ``begin_s``.

        ``shares``: micro-batches of each replica in place of ``micro_batches`` of each, in a 1F1B schedule.
        ``log`` keeps the records (at most 1,024 ranks); ``stuck`` keeps where everybody is when a fault never ends,
        else every step must end; ``blocks_of`` keeps the blocks of these ranks.
        """
        if log and self.layout.world_size > _MOST_LOGGED:
            raise UsageError(
                f"records of {self.layout.world_size} ranks are too many; {_MOST_LOGGED} at most"
            )
        if shares is not None and (
            self.schedule != "1f1b" or len(shares) != self.layout.dp or min(shares) < 1
        ):
            raise UsageError("shares are one or more micro-batches for each replica, in a 1F1B schedule")
        if not stuck and any(math.isinf(fault.delay_s) or fault.skips for fault in faults):
            raise UsageError("a fault that never ends: ask for stuck=True, there are no summaries of it")
        return Run(
            self, range(first_step, first_step + steps), tuple(faults), log=log, stuck=stuck, blocks_of=blocks_of,
            begin_s=begin_s, shares=shares,
        )  # fmt: skip

    def iteration_s(
        self,
        steps: int,
        faults: Sequence[Fault] = (),
        first_step: int = 0,
        shares: Sequence[int] | None = None,
    ) -> Floats:
        """Seconds of each step, and nothing else of it: the same as of `run`, sooner."""
        return self.replay(range(first_step, first_step + steps), faults, [], shares).ends

    def replay(
        self,
        steps: range,
        faults: Sequence[Fault],
        sinks: Sequence[Sink],
        shares: Sequence[int] | None = None,
    ) -> Replay:
        """The steps, told to ``sinks``."""
        batches = self.micro_batches if shares is None else max(shares)
        return Replay(
            self.layout, self.schedule, batches, self.layers, self.durations, Jitter(self.seed, self.jitter),
            steps, faults, np.arange(self.layout.world_size) // self.ranks_per_node, self.recorded, sinks, shares,
        )  # fmt: skip

    def clock(self, node: int) -> tuple[float, float]:
        """(offset in seconds, drift) of a node's clock: it shows offset + (1 + drift) x true time."""
        spread = np.random.default_rng((self.seed, node)).uniform(-1, 1, 2)
        return _OFFSET_S * (1 + float(spread[0])), _DRIFT * float(spread[1])

    def _roles(self) -> list[Role]:
        roles: list[Role] = ["world"]
        sizes: dict[Role, int] = {"pp": self.layout.pp, "dp": self.layout.dp, "tp": self.layout.tp}
        return roles + [role for role, size in sizes.items() if size > 1]

    @staticmethod
    def _name(node: int) -> str:
        return f"gpu-{node:05d}"


class Run:
    """What happened. ``iteration_s``: shape (steps,), seconds between the ends of the steps' last collectives."""

    def __init__(
        self,
        workload: Workload,
        steps: range,
        faults: tuple[Fault, ...],
        *,
        log: bool,
        stuck: bool,
        blocks_of: Sequence[int],
        begin_s: float,
        shares: Sequence[int] | None,
    ) -> None:
        layout = workload.layout
        self.workload, self.steps, self.faults, self.shares = workload, len(steps), faults, shares
        self._first = steps.start
        self._log = Log(layout.pp) if log else None
        self._sums = None if stuck else Sums(layout.pp)
        self._progress = Progress(layout.pp, (len(steps), layout.dp, layout.tp)) if stuck else None
        self._chosen: dict[int, list[int]] = {}
        for rank in sorted(blocks_of):
            self._chosen.setdefault(self._place(rank)[0], []).append(rank)
        places = {stage: [self._place(rank)[1:] for rank in ranks] for stage, ranks in self._chosen.items()}
        self._blocks = Blocks(places) if places else None
        sinks = [sink for sink in (self._log, self._sums, self._progress, self._blocks) if sink is not None]
        self._replay = workload.replay(steps, faults, sinks, shares)
        self.iteration_s = self._replay.ends
        # when each step's predecessor was through its last collective; inf where a step is never reached
        self._origins = begin_s + np.concatenate(([0.0], np.cumsum(self._replay.ends)))

    def records(self, rank: int) -> NDArray[np.void]:
        """The rank's ring records, in ticket order, times in ns on its node's clock. Only with ``log``."""
        assert self._log is not None, "run with log=True"
        workload = self.workload
        stage, d, t = self._place(rank)
        roles = list(workload.group_names(rank))
        offset, drift = workload.clock(rank // workload.ranks_per_node)
        rows: list[tuple[int, ...]] = []
        counts: dict[_Key, int] = {}

        def ns(origin: float, time: float) -> int:
            at = offset + (1 + drift) * (origin + time)
            return round(at * 1e9) if math.isfinite(at) else 0

        for step in range(self.steps):
            origin = float(self._origins[step])
            for record in self._log.of_stage(stage):
                start, end = float(record.start[step, d, t]), float(record.end[step, d, t])
                if not math.isfinite(origin + start):
                    continue
                peer = -1 if record.peer < 0 else self._rank(record.peer, d, t)
                group = -1 if record.role is None else roles.index(record.role)
                key = (
                    f"{record.kind}",
                    record.op if record.kind != Kind.COLLECTIVE else 0,
                    group * 10**6 + peer,
                )
                counts[key] = counts.get(key, 0) + 1
                wait = 0 if record.wait is None else ns(origin, float(record.wait[step, d, t]))
                nbytes = 0 if record.role is None else BYTES[record.role]
                rows.append((
                    len(rows), ns(origin, start), ns(origin, end), wait, nbytes, counts[key], peer, _THREAD, 0,
                    group, record.kind, record.op, record.flags,
                ))  # fmt: skip
        return np.array(rows, dtype=RECORD)

    def summaries(self, first_step: int = 0) -> Iterator[list[IterationSummary]]:
        """Rank by rank the iterations from ``first_step`` on, as the agents would tell them."""
        assert self._sums is not None, "a run that is stuck has no summaries"
        for stage, sums in enumerate(self._sums.stages):
            yield from self._stage_summaries(stage, sums, first_step)

    def blocks(self) -> Iterator[BlockSummary]:
        """The blocks of the ranks in ``blocks_of``, as the agents would tell them."""
        assert self._blocks is not None, "run with blocks_of"
        for stage, ranks in self._chosen.items():
            records = self._blocks.of_stage(stage)
            for place, rank in enumerate(ranks):
                for step in range(self.steps):
                    found = [record.at(step, place) for record in records]
                    yield from self._blocks_of(rank, step, [one for one in found if math.isfinite(one.start)])

    def _blocks_of(self, rank: int, step: int, records: Sequence[RecordAt]) -> Iterator[BlockSummary]:
        _, d, t = self._place(rank)
        offset, drift = self.workload.clock(rank // self.workload.ranks_per_node)
        origin, rate = offset + (1 + drift) * float(self._origins[step]), 1 + drift
        waits = joined((one.start if one.wait is None else one.wait, one.end) for one in records if one.role)
        numbers: dict[tuple[BlockKind, int], int] = {}
        for one in records:
            kind = _BLOCKS.get((one.kind, one.op))
            if kind is None:
                continue
            peer = -1 if one.peer < 0 else self._rank(one.peer, d, t)
            numbers[kind, peer] = number = numbers.get((kind, peer), -1) + 1
            lasts = one.end - one.start
            own = lasts - sum(max(min(one.end, end) - max(one.start, start), 0.0) for start, end in waits)
            yield BlockSummary(
                rank,
                self._first + step,
                kind,
                peer,
                number,
                origin + rate * one.start,
                rate * lasts,
                rate * max(own, 0.0),
            )

    def states(self) -> Iterator[RankState]:
        """Where every rank is when nothing moves any more. Only with ``stuck``."""
        assert self._progress is not None, "run with stuck=True"
        told_s = max(float(self._newest(stage).max()) for stage in range(self.workload.layout.pp)) + _STUCK_S
        for stage in range(self.workload.layout.pp):
            yield from self._stage_states(stage, told_s)

    def causes(self) -> list[HostCause]:
        """What agents see of starved nodes."""
        per_node = self.workload.ranks_per_node
        return [
            HostCause(rank, "run queue", 1 - 1 / fault.factor)
            for fault in self.faults
            if fault.node and fault.where == "compute"
            for rank in range(fault.rank // per_node * per_node, (fault.rank // per_node + 1) * per_node)
            if rank < self.workload.layout.world_size
        ]

    def traffic(self, onset_step: int) -> dict[str, list[PeerTraffic]]:
        """By node, what its ranks sent to other nodes before and from ``onset_step`` on."""
        before_s, after_s = (float(part.sum()) for part in np.split(self.iteration_s, [onset_step]))
        counts = onset_step, self.steps - onset_step
        paths: dict[tuple[int, int], list[float]] = {}
        workload = self.workload
        per_node, batches = workload.ranks_per_node, workload.micro_batches
        sent = sent_in_a_step(workload.layout, per_node, batches, workload.durations)
        for (source, target), (nbytes, usual_s) in sent.items():
            slow = [slower(fault, source, target, per_node, batches) for fault in self.faults]
            row = paths.setdefault((source, target), [0.0] * 4)
            for place, count in enumerate(counts):
                row[2 * place] += nbytes * count
                row[2 * place + 1] += usual_s * count + (sum(slow) * count if place else 0.0)
        found: dict[str, list[PeerTraffic]] = {}
        for (source, target), (bytes0, busy0, bytes1, busy1) in paths.items():
            name = self.workload._name(source)  # pyright: ignore[reportPrivateUsage]
            one = PeerTraffic(
                name, address(source), address(target), before_s, int(bytes0), busy0, after_s, int(bytes1), busy1
            )  # fmt: skip
            found.setdefault(name, []).append(one)
        return found

    def _stage_summaries(self, stage: int, sums: StageSums, first: int) -> Iterator[list[IterationSummary]]:
        workload = self.workload
        streams = self._in_order(sums.streams)
        lead, tail = self._replay.leads[stage], self._replay.tails[stage]
        ends = self._replay.ends[:, None, None]
        duration = ends + tail - lead
        blocked = np.broadcast_to(sums.blocked, duration.shape)
        zeros = np.zeros_like(duration)
        arrays = [self._origins[:-1, None, None] + lead, duration, duration - blocked, blocked]
        arrays += [sums.phases.get(phase, zeros) for phase in (Phase.DATA, Phase.BACKWARD, Phase.OPTIMIZER)]
        for stream in streams:
            one = sums.streams[stream]
            arrays += [
                np.broadcast_to(one.count, duration.shape),
                one.start / one.count - lead,
                one.end / one.count - lead,
                one.busy,
                one.blocked,
                one.fastest,
            ]
        arrays = [array[first:] for array in arrays]
        stride = workload.layout.dp * workload.layout.tp
        for place, rows in enumerate(per_rank(arrays)):
            rank = stage * stride + place
            names = workload.group_names(rank)
            offset, drift = workload.clock(rank // workload.ranks_per_node)
            rate = 1 + drift
            heads = [
                (names[role], int(op), -1 if peer < 0 else peer * stride + place, BYTES[role])
                for role, op, peer in streams
            ]
            yield [
                summary_of_row(
                    rank,
                    self._first + first + step,
                    [offset + rate * row[0], *(rate * value for value in row[1:])],
                    heads,
                )
                for step, row in enumerate(rows)
            ]

    def _stage_states(self, stage: int, told_s: float) -> Iterator[RankState]:
        assert self._progress is not None
        workload, here = self.workload, self._progress.stages[stage]
        reached = np.isfinite(self._origins[:-1])[:, None, None]
        origins = np.where(np.isfinite(self._origins[:-1]), self._origins[:-1], 0.0)[:, None, None]

        def last(times: Floats) -> Floats:
            """The newest of all steps, true time."""
            return np.where(reached, origins + times, -np.inf).max(axis=0)

        def total(counts: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.where(reached, counts, 0).sum(axis=0)

        newest, since, ended = last(here.newest), last(here.phase_since), last(here.phase_ended)
        which = np.where(reached, origins + here.phase_since, -np.inf).argmax(axis=0)
        phase = np.take_along_axis(here.phase, which[None], axis=0)[0]
        which = np.where(reached, origins + here.phase_ended, -np.inf).argmax(axis=0)
        outside = np.take_along_axis(here.last_ended, which[None], axis=0)[0]
        done, records = total(here.steps_done), total(here.records)
        streams = self._in_order(here.streams)
        tables = {
            key: (
                total(one.started),
                total(one.completed),
                last(one.since),
                total(one.waits.astype(np.int64)),
            )
            for key, one in ((key, here.streams[key]) for key in streams)
        }
        dead = {f.rank for f in self.faults if f.dies}
        stride, tp = workload.layout.dp * workload.layout.tp, workload.layout.tp
        for place in range(stride):
            at = divmod(place, tp)
            rank = stage * stride + place
            names = workload.group_names(rank)
            offset, drift = workload.clock(rank // workload.ranks_per_node)

            def seen(true_s: float, offset: float = offset, rate: float = 1 + drift) -> float:
                return offset + rate * true_s

            flying: list[OpInFlight] = []
            progress: list[StreamProgress] = []
            for key, (started, completed, flying_since, waits) in tables.items():
                role, op, peer_stage = key
                count, through, began = int(started[at]), int(completed[at]), float(flying_since[at])
                if not count:
                    continue
                peer = -1 if peer_stage < 0 else peer_stage * stride + place
                progress.append(StreamProgress(names[role], int(op), peer, count, through))
                if math.isfinite(began):
                    flying.append(
                        OpInFlight(names[role], int(op), peer, count, seen(began), "", bool(waits[at]))
                    )
            flying.sort(key=lambda one: one.since_s)
            open_since = float(since[at])
            is_open = math.isfinite(open_since)
            yield RankState(
                rank,
                rank not in dead,
                int(done[at]) - 1,
                int(phase[at]) if is_open else int(_OUTSIDE.get(int(outside[at]), Phase.FORWARD)),
                seen(open_since if is_open else float(ended[at])),
                int(records[at]),
                seen(float(newest[at])),
                seen(told_s),
                tuple(flying),
                tuple(progress),
                "" if rank in dead else "S",
            )

    def _newest(self, stage: int) -> Floats:
        assert self._progress is not None
        origins = self._origins[:-1][:, None, None]
        reached = np.isfinite(origins)
        return np.where(
            reached, np.where(reached, origins, 0.0) + self._progress.stages[stage].newest, -np.inf
        )

    def _in_order(self, streams: Mapping[Stream, object]) -> list[Stream]:
        """As an agent tells them: by the number of the group, the operation, the peer."""
        roles = list(self.workload.group_names(0))
        return sorted(streams, key=lambda key: (roles.index(key[0]), key[1], key[2]))

    def _place(self, rank: int) -> tuple[int, int, int]:
        stage, inner = divmod(rank, self.workload.layout.dp * self.workload.layout.tp)
        d, t = divmod(inner, self.workload.layout.tp)
        return stage, d, t

    def _rank(self, stage: int, d: int, t: int) -> int:
        return (stage * self.workload.layout.dp + d) * self.workload.layout.tp + t
