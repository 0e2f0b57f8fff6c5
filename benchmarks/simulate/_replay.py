"""Longest paths through the steps of a pipeline: all steps, replicas and tensor-parallel ranks of a stage at once.

Times are arrays of shape (steps, dp, tp), seconds from the moment the step's predecessor was through its last
collective. What never ends has the end ``inf``; what is never reached has the start ``inf``, as has what a replica
with fewer micro-batches than others leaves out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulate._faults import Fault
from benchmarks.simulate._jitter import Jitter
from benchmarks.simulate._schedules import CHUNKS, Block, Schedule, blocks_of
from keepstep.core.events import Flag, Op, Phase
from keepstep.core.layout import ParallelLayout

Floats = NDArray[np.float64]
Role = Literal["world", "pp", "dp", "tp"]
_BY_WAIT, _SYNC = int(Flag.END_BY_WAIT), int(Flag.SYNC_KNOWN)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTimes:
    """Recorded durations of blocks, seconds; arrays of shape (steps, pp, dp, micro-batches). Steps are repeated."""

    forward: Floats
    backward: Floats


@dataclass(frozen=True, slots=True)
class Durations:
    """Usual seconds. Forward and backward are those of one micro-batch through all of a rank's layers."""

    forward_s: float = 0.040
    backward_s: float = 0.080
    data_s: float = 0.002
    optimizer_s: float = 0.010
    message_s: float = 0.002
    tp_s: float = 0.0005
    dp_s: float = 0.020
    world_s: float = 0.0005


BYTES: dict[Role, int] = {"world": 8, "pp": 1 << 24, "dp": 1 << 28, "tp": 1 << 22}


class Sink(Protocol):
    """Takes what happened. ``ticket`` numbers a stage's records in the order in which they began."""

    def operation(
        self, stage: int, ticket: int, role: Role, op: Op, peer: int, flags: int,
        start: Floats, wait: Floats | None, end: Floats,
    ) -> None:  # fmt: skip
        """``peer`` is a stage, -1 for collectives; ``wait``: when the wait began, where that is not the start."""
        ...

    def phase(self, stage: int, ticket: int, phase: Phase, start: Floats, end: Floats, own: Floats) -> None:
        """``own``: seconds of it in which the rank waited for nobody."""
        ...


class Replay:
    """One run. ``ends``: shape (steps,), when each step's last collective was through; ``leads`` and ``tails``, per
    stage: the optimizer step before and at the end of each step.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        schedule: Schedule,
        micro_batches: int,
        layers: int,
        durations: Durations,
        jitter: Jitter,
        steps: range,
        faults: Sequence[Fault],
        nodes: NDArray[np.int64],  # of every rank
        recorded: BlockTimes | None,
        sinks: Sequence[Sink],
        shares: Sequence[int] | None = None,  # micro-batches of each replica, at most ``micro_batches``
    ) -> None:
        self._shares = None if shares is None else np.reshape(np.array(shares), (1, -1, 1))
        self._pp, self._dp, self._tp = layout.pp, layout.dp, layout.tp
        self._schedule: Schedule = schedule
        self._batches, self._layers, self._usual = micro_batches, layers, durations
        self._jitter, self._steps, self._faults, self._recorded = jitter, steps, faults, recorded
        self._sinks = sinks
        self._shape = (len(steps), self._dp, self._tp)
        self._nodes, self._node = nodes, np.reshape(nodes, (self._pp, self._dp, self._tp))
        self._pace = [jitter.pace(self._shape) for _ in range(self._pp)]
        self._stretch = [self._stretches(stage) for stage in range(self._pp)]
        self._tickets = [0] * self._pp
        self._mail: dict[tuple[str, int, int], Floats] = {}
        self._sent: dict[tuple[int, int], tuple[int, Floats, Floats, NDArray[np.bool_] | None]] = {}
        self._has: NDArray[np.bool_] | None = None  # replicas that have the micro-batch under way; None: all
        self.leads = [self._optimizer(stage, before=True) for stage in range(self._pp)]
        self.tails = [self._optimizer(stage, before=False) for stage in range(self._pp)]
        for lead, tail in zip(self.leads, self.tails, strict=True):
            lead[1:] = tail[:-1]
        self._now = list(self.leads)
        self.ends = self._run()

    def _run(self) -> Floats:
        for stage in range(self._pp):
            ticket, start = self._ticket(stage), self._now[stage]
            spent = self._own(stage, self._usual.data_s, "data", -1, 1)
            self._now[stage] = start + spent
            self._phase(stage, ticket, Phase.DATA, start, spent)
        orders = [
            deque(blocks_of(self._schedule, stage, self._pp, self._batches)) for stage in range(self._pp)
        ]
        while any(orders):
            moved = False
            for stage, order in enumerate(orders):
                while order and self._block(stage, order[0]):
                    order.popleft()
                    moved = True
            assert moved, "the schedule waits for itself"
        self._has = None
        for stage, peer in list(self._sent):
            self._sent_by_now(stage, peer)
        for stage in range(self._pp):
            if self._dp > 1:
                self._collective(stage, "dp", self._usual.dp_s, self._group_delay("dp", stage), axis=1)
        return self._world()

    def _world(self) -> Floats:
        """The step's last collective, and every rank's optimizer step after it."""
        arrived = np.max([now.max(axis=(1, 2)) for now in self._now], axis=0)
        ends = arrived + self._usual.world_s * self._jitter.blocks((self._shape[0],))
        for stage in range(self._pp):
            end = np.broadcast_to(ends[:, None, None], self._shape)
            if self._pp * self._dp * self._tp > 1:
                self._operation(
                    stage, self._ticket(stage), "world", Op.ALLREDUCE, -1, _SYNC, self._now[stage], None, end
                )
            self._phase(stage, self._ticket(stage), Phase.OPTIMIZER, end, self.tails[stage])
        return ends

    def _block(self, stage: int, block: Block) -> bool:
        """Run a block; False while its input is not known."""
        forward = block.part == "forward"
        virtual = block.chunk * self._pp + stage
        self._has = None if self._shares is None else block.micro_batch < self._shares
        last = self._pp * (CHUNKS if self._schedule == "interleaved" else 1) - 1
        source, target = (virtual - 1, virtual + 1) if forward else (virtual + 1, virtual - 1)
        if block.part != "weights" and 0 <= source <= last:
            arrival = self._mail.pop((block.part, virtual, block.micro_batch), None)
            if arrival is None:
                return False
            start = self._now[stage]
            self._now[stage] = end = np.maximum(start, arrival)
            peer = source % self._pp
            self._operation(stage, self._ticket(stage), "pp", Op.RECV, peer, _BY_WAIT, start, start, end)
        self._compute(stage, block)
        if block.part != "weights" and 0 <= target <= last:
            self._send(stage, target, block)
        return True

    def _compute(self, stage: int, block: Block) -> None:
        forward = block.part == "forward"
        ticket, began = self._ticket(stage), self._now[stage]
        pieces = self._layers if self._tp > 1 and block.part != "weights" else 1
        own = np.zeros(self._shape)
        for piece in range(pieces):
            spent = self._part(self._block_time(stage, block, pieces, piece == 0))
            self._now[stage] = self._now[stage] + spent
            own += spent
            if self._tp > 1 and block.part != "weights":
                # a rank that leaves out a collective meets the others' last with none: numbers are matched in order
                last = not forward and block.chunk == 0 and block.micro_batch == self._batches - 1
                last = last and piece == pieces - 1
                delay = self._tp_delay(stage, block, piece)
                self._collective(stage, "tp", self._usual.tp_s, delay, axis=2, skippable=last)
        phase = Phase.MODEL if forward else Phase.BACKWARD
        began, ended = self._seen(began), self._seen(self._now[stage])
        for sink in self._sinks:
            sink.phase(stage, ticket, phase, began, ended, own)

    def _block_time(self, stage: int, block: Block, pieces: int, first: bool) -> Floats:
        usual = self._usual.forward_s if block.part == "forward" else self._usual.backward_s
        if self._schedule == "interleaved":
            usual /= CHUNKS
        elif self._schedule == "zero-bubble" and block.part != "forward":
            usual /= 2
        batch = block.micro_batch if block.chunk == 0 else -2
        if self._recorded is not None:
            return self._recorded_time(stage, block, pieces, batch if first else -3)
        return self._own(stage, usual / pieces, block.part, batch if first else -3, 2)

    def _recorded_time(self, stage: int, block: Block, pieces: int, batch: int) -> Floats:
        assert self._recorded is not None
        table = self._recorded.forward if block.part == "forward" else self._recorded.backward
        rows = np.array([step % len(table) for step in self._steps])
        lasts = table[rows, stage, :, block.micro_batch % table.shape[3]] / pieces
        return self._with_faults(stage, np.repeat(lasts[:, :, None], self._tp, axis=2), block.part, batch)

    def _own(self, stage: int, usual_s: float, part: str, batch: int, paced: int) -> Floats:
        spent = usual_s * self._jitter.blocks(self._shape)
        if paced > 1:
            spent *= self._pace[stage]
        return self._with_faults(stage, spent, part, batch)

    def _with_faults(self, stage: int, spent: Floats, part: str, batch: int) -> Floats:
        """``batch``: -3 for what is not the beginning of a block, which no delay hits again."""
        stretch = self._stretch[stage]
        if stretch is not None:
            spent *= stretch
        for fault in self._faults:
            if fault.where != part or batch == -3:
                continue
            if part in ("forward", "backward") and fault.micro_batch not in (-1, batch):
                continue
            for step, d, t in self._hit(fault, stage):
                spent[step, d, t] = spent[step, d, t] * fault.factor + fault.delay_s
        return spent

    def _optimizer(self, stage: int, *, before: bool) -> Floats:
        spent = self._usual.optimizer_s * self._jitter.blocks(self._shape)
        return spent if before else self._with_faults(stage, spent, "optimizer", -1)

    def _send(self, stage: int, target: int, block: Block) -> None:
        """The sender waits for its last message to this peer before the next; transfers need no receiver."""
        peer = target % self._pp
        self._sent_by_now(stage, peer)
        ticket, start = self._ticket(stage), self._now[stage]
        takes = self._usual.message_s * self._jitter.blocks(self._shape)
        for fault in self._faults:
            if fault.where == "message" and fault.micro_batch in (-1, block.micro_batch):
                if self._stage_of(fault.peer) == peer:
                    for step, d, t in self._hit(fault, stage):
                        takes[step, d, t] = takes[step, d, t] * fault.factor + fault.delay_s
            elif fault.where == "link":
                crossing = self._crossing(fault, self._node[stage], self._node[peer])
                if crossing.any():
                    hit = self._when(fault)[:, None, None] & crossing
                    takes[hit] = takes[hit] * fault.factor + fault.delay_s
        arrival = start + takes if self._has is None else np.where(self._has, start + takes, -np.inf)
        self._sent[stage, peer] = ticket, start, arrival, self._has
        self._mail[block.part, target, block.micro_batch] = arrival

    def _sent_by_now(self, stage: int, peer: int) -> None:
        """Wait for what was sent last."""
        sent = self._sent.pop((stage, peer), None)
        if sent is None:
            return
        ticket, start, arrival, has = sent
        wait = self._now[stage]
        self._now[stage] = end = np.maximum(wait, arrival)
        self._has, now = has, self._has
        self._operation(stage, ticket, "pp", Op.SEND, peer, _BY_WAIT, start, wait, end)
        self._has = now

    def _collective(
        self,
        stage: int,
        role: Role,
        usual_s: float,
        delay: Floats | None,
        axis: int,
        *,
        skippable: bool = True,
    ) -> None:
        start = self._now[stage]
        shape = list(self._shape)
        shape[axis] = 1
        skips = [f for f in self._faults if f.skips and f.where == role] if skippable else []
        came = start
        for fault in skips:
            came = np.array(came)
            for place in self._hit(fault, stage):
                came[place] = np.inf
        takes = usual_s * self._jitter.blocks(tuple(shape))
        if delay is not None:
            takes = takes + delay
        takes = self._part(takes)
        end = np.broadcast_to(came.max(axis=axis, keepdims=True) + takes, self._shape)
        ticket, begun = self._ticket(stage), start
        if skips:
            left_out = np.isinf(came) & np.isfinite(start)
            begun, now = np.where(left_out, np.inf, start), np.where(left_out, start, end)
        else:
            now = end
        self._operation(stage, ticket, role, Op.ALLREDUCE, -1, _SYNC, begun, None, end)
        self._now[stage] = now

    def _tp_delay(self, stage: int, block: Block, piece: int) -> Floats | None:
        delay = None
        for fault in self._faults:
            if fault.where != "tp" or fault.skips:
                continue
            once = block.part == "forward" and piece == 0 and block.chunk == 0
            if fault.micro_batch == -1 or (once and fault.micro_batch == block.micro_batch):
                delay = np.zeros((self._shape[0], self._dp, 1)) if delay is None else delay
                for step, d, _ in self._hit(fault, stage):
                    delay[step, d, 0] += fault.delay_s
        return delay

    def _group_delay(self, role: Role, stage: int) -> Floats | None:
        """What the gradient reduction takes longer: its own fault, or a slow link between neighbours in its ring."""
        delay = None
        for fault in self._faults:
            if fault.skips or fault.where not in (role, "link"):
                continue
            delay = np.zeros((self._shape[0], 1, self._tp)) if delay is None else delay
            if fault.where == role:
                for step, _, t in self._hit(fault, stage):
                    delay[step, 0, t] += fault.delay_s
            else:
                here = self._node[stage]
                crossing = self._crossing(fault, here, np.roll(here, -1, axis=0)).any(axis=0)
                longer = fault.delay_s + (fault.factor - 1) * self._usual.dp_s
                for t in np.flatnonzero(crossing).tolist():
                    delay[self._when(fault), 0, t] += longer
        return delay

    def _crossing(self, fault: Fault, here: NDArray[np.int64], there: NDArray[np.int64]) -> NDArray[np.bool_]:
        one, other = self._nodes[fault.rank], self._nodes[fault.peer]
        return ((here == one) & (there == other)) | ((here == other) & (there == one))

    def _stretches(self, stage: int) -> Floats | None:
        stretch = None
        for fault in self._faults:
            if fault.where == "compute":
                stretch = np.ones(self._shape) if stretch is None else stretch
                for place in self._hit(fault, stage):
                    stretch[place] *= fault.factor
        return stretch

    def _hit(self, fault: Fault, stage: int) -> list[tuple[int, int, int]]:
        """(step, dp, tp) places of a stage that a fault hits."""
        if fault.node:
            places = np.argwhere(self._node[stage] == self._nodes[fault.rank]).tolist()
        else:
            places = [divmod(fault.rank % (self._dp * self._tp), self._tp)]
            if self._stage_of(fault.rank) != stage:
                return []
        steps = np.flatnonzero(self._when(fault)).tolist()
        return [(step, d, t) for step in steps for d, t in places]

    def _when(self, fault: Fault) -> NDArray[np.bool_]:
        steps = np.array(self._steps)
        return (steps >= fault.first_step) & (steps <= fault.last_step)

    def _stage_of(self, rank: int) -> int:
        return rank // (self._dp * self._tp)

    def _part(self, takes: Floats) -> Floats:
        """Nothing, where a replica has no such micro-batch."""
        return takes if self._has is None else takes * self._has

    def _seen(self, times: Floats) -> Floats:
        """Never, where a replica has no such micro-batch."""
        return times if self._has is None else np.where(self._has, times, np.inf)

    def _ticket(self, stage: int) -> int:
        self._tickets[stage] += 1
        return self._tickets[stage] - 1

    def _phase(self, stage: int, ticket: int, phase: Phase, start: Floats, own: Floats) -> None:
        for sink in self._sinks:
            sink.phase(stage, ticket, phase, start, start + own, own)

    def _operation(
        self, stage: int, ticket: int, role: Role, op: Op, peer: int, flags: int,
        start: Floats, wait: Floats | None, end: Floats,
    ) -> None:  # fmt: skip
        start, end = self._seen(start), self._seen(end)
        for sink in self._sinks:
            sink.operation(stage, ticket, role, op, peer, flags, start, wait, end)
