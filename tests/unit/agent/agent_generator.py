"""Streams of records as training loops would leave them, from a small simulation of ranks that wait for each other.

Imports nothing of what it tests: the record's layout and all numbers are written out here once more. Times are made,
not measured. Each rank is a Python generator that yields the operation it waits for; ``play`` runs them to the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

RECORD = np.dtype(
    {
        "names": [
            "ticket", "start_ns", "end_ns", "wait_ns", "bytes", "seq", "peer", "thread", "site", "group", "kind", "op",
            "flags",
        ],
        "formats": ["u8", "i8", "i8", "i8", "u8", "u4", "i4", "u4", "u4", "i2", "u1", "u1", "u2"],
        "offsets": [0, 8, 16, 24, 32, 40, 44, 48, 52, 56, 58, 59, 60],
        "itemsize": 64,
    }
)  # fmt: skip

COLLECTIVE, P2P, PHASE = 1, 2, 3
ALLREDUCE, BROADCAST, ALLGATHER, REDUCE_SCATTER, SEND, RECV = 1, 2, 4, 5, 10, 11
BACKWARD, OPTIMIZER, DATA, EVALUATION, CHECKPOINT, GC = 2, 3, 4, 5, 6, 7
ASYNC, END_BY_WAIT, SYNC_KNOWN = 1, 2, 8
MS = 1_000_000
WORLD, TP, PP, DP = 0, 1, 2, 3
Key = tuple[tuple[object, ...], int]  # what is matched, and how many have to arrive


@dataclass
class Operation:
    """What a rank started: its row, when it began, and (for waits) under which key it is matched."""

    row: dict[str, int]
    key: Key
    waited_ns: int = 0


@dataclass
class Job:
    """All ranks of a job, the operations that are matched between them, and the script's own step clock."""

    world: int
    seed: int = 0
    transfer_ms: float = 2.0
    jitter: float = 0.0
    arrived: dict[Key, dict[int, int]] = field(default_factory=dict)
    ranks: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.ranks = [Rank(self, number) for number in range(self.world)]

    def play(self, program: Callable[[Rank], Iterator[Operation]]) -> Job:
        """Run ``program`` on every rank until all have ended."""
        running = {rank.number: program(rank) for rank in self.ranks}
        waiting: dict[int, Operation] = {}
        while running:
            moved = False
            for number, generator in list(running.items()):
                while number not in waiting or self.end_of(waiting[number], number) is not None:
                    if number in waiting:
                        operation = waiting.pop(number)
                        end = self.end_of(operation, number)
                        assert end is not None
                        self.ranks[number].finish_wait(operation, end)
                    moved = True
                    try:
                        waiting[number] = next(generator)
                    except StopIteration:
                        del running[number]
                        break
            assert moved or not running, "the generated job deadlocks"
        for rank in self.ranks:
            rank.settle()
        return self

    def end_of(self, operation: Operation, number: int) -> int | None:
        """When the transfer of an operation ended on rank ``number``; None while a partner has not arrived."""
        there = self.arrived[operation.key]
        if len(there) < operation.key[1]:
            return None
        if operation.row["op"] == SEND:
            return there[number] + int(self.transfer_ms * MS)
        return max(there.values()) + int(self.transfer_ms * MS)


class Rank:
    """One rank: its clock, its records, its own step clock."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.now = 1_000 * MS + number
        self.rows: list[dict[str, int]] = []
        self.open: list[Operation] = []
        self.counts: dict[tuple[int, ...], int] = {}
        self.clock: list[float] = []  # seconds of each step as the script sees it
        self.worked: list[float] = []  # seconds of each step in which it computed
        self.slow: Callable[[int], float] = lambda step: 1.0
        self.step = 0
        self._work = 0

    def compute(self, ms: float) -> None:
        spread = 1 + self.job.jitter * self.job.random.uniform(-1, 1)
        length = int(ms * MS * spread * self.slow(self.step))
        self.now += length
        self._work += length

    def record(
        self, kind: int, op: int, *, group: int = -1, peer: int = -1, size: int = 0, flags: int = 0
    ) -> dict[str, int]:
        stream = (kind, op if kind != COLLECTIVE else 0, group, peer)
        self.counts[stream] = self.counts.get(stream, 0) + 1
        row = {
            "ticket": len(self.rows), "start_ns": self.now, "end_ns": 0, "wait_ns": 0, "bytes": size,
            "seq": self.counts[stream], "peer": peer, "thread": 7, "site": 0, "group": group, "kind": kind, "op": op,
            "flags": flags,
        }  # fmt: skip
        self.rows.append(row)
        self.now += 1000
        return row

    def begin(self, phase: int) -> dict[str, int]:
        return self.record(PHASE, phase)

    def end(self, row: dict[str, int]) -> None:
        row["end_ns"] = self.now
        self.now += 1000

    def phase(self, phase: int, ms: float) -> None:
        row = self.begin(phase)
        self.compute(ms)
        self.end(row)

    def collective(
        self,
        op: int,
        members: tuple[int, ...],
        *,
        group: int,
        size: int,
        asynchronous: bool,
        known: bool = True,
    ) -> Operation:
        flags = (ASYNC if asynchronous else 0) | (SYNC_KNOWN if known else 0)
        row = self.record(COLLECTIVE, op, group=group, size=size, flags=flags)
        return self._arrive(row, ((group, members, row["seq"]), len(members)))

    def send(self, peer: int, *, size: int = 4096) -> Operation:
        row = self.record(P2P, SEND, group=PP, peer=peer, size=size, flags=ASYNC | END_BY_WAIT)
        return self._arrive(row, (("p2p", self.number, peer, row["seq"]), 1))

    def recv(self, peer: int, *, size: int = 4096) -> Operation:
        row = self.record(P2P, RECV, group=PP, peer=peer, size=size, flags=ASYNC | END_BY_WAIT)
        return self._arrive(row, (("p2p", peer, self.number, row["seq"]), 2), by_peer=peer)

    def _arrive(self, row: dict[str, int], key: Key, by_peer: int | None = None) -> Operation:
        if row["op"] == RECV:
            # A receive is over when the matching send came and it was posted itself.
            key = ((*key[0], "recv"), 2)
        self.job.arrived.setdefault(key, {})[self.number] = self.now
        if row["op"] == SEND:
            other = ((*key[0], "recv"), 2)
            self.job.arrived.setdefault(other, {})[self.number] = self.now
        operation = Operation(row, key)
        self.open.append(operation)
        return operation

    def waiting(self, operation: Operation) -> Operation:
        """Note that the script begins to wait; yield the result."""
        operation.waited_ns = self.now
        return operation

    def finish_wait(self, operation: Operation, end: int) -> None:
        self.now = max(self.now, end)
        by_wait = operation.row["flags"] & END_BY_WAIT
        operation.row["end_ns"] = self.now if by_wait else end
        if operation.waited_ns and (by_wait or end > operation.waited_ns):
            operation.row["wait_ns"] = operation.waited_ns
        self.open.remove(operation)
        self.now += 1000

    def settle(self) -> None:
        for operation in self.open:
            end = self.job.end_of(operation, self.number)
            if end is not None and not operation.row["flags"] & END_BY_WAIT:
                operation.row["end_ns"] = end

    def step_begins(self) -> None:
        self._began, self._work = self.now, 0

    def step_ends(self) -> None:
        self.clock.append((self.now - self._began) / 1e9)
        self.worked.append(self._work / 1e9)
        self.step += 1

    def table(self) -> np.ndarray:
        rows = np.zeros(len(self.rows), RECORD)
        assert RECORD.names is not None
        for name in RECORD.names:
            rows[name] = [row[name] for row in self.rows]
        return rows


def polls(rows: np.ndarray, period_ms: float = 50.0) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """What a reader that polls every ``period_ms`` gets: begun and ended records, and the time of the poll."""
    now = int(rows["start_ns"].min())
    last = int(max(rows["start_ns"].max(), rows["end_ns"].max())) + 200 * MS
    before = now - 1
    while before < last:
        now += int(period_ms * MS)
        begun = rows[(rows["start_ns"] > before) & (rows["start_ns"] <= now)].copy()
        ended = rows[(rows["end_ns"] > before) & (rows["end_ns"] <= now)].copy()
        late = begun["end_ns"] > now
        begun["end_ns"][late] = 0
        begun["wait_ns"][begun["wait_ns"] > now] = 0
        yield begun, ended, now
        before = now


# --- training loops -----------------------------------------------------------------------------------------------


def evaluation(rank: Rank, everyone: tuple[int, ...], *, marked: bool) -> Iterator[Operation]:
    row = rank.begin(EVALUATION) if marked else None
    rank.now += 300 * MS
    yield rank.collective(ALLREDUCE, everyone, group=WORLD, size=8, asynchronous=False)
    if row is not None:
        rank.end(row)


def ddp(
    steps: int,
    *,
    buckets: int = 4,
    accumulate: int = 1,
    evaluate_every: int = 0,
    marked: bool = True,
    checkpoint_every: int = 0,
    optimizers: int = 1,
    data_ms: float = 2.0,
    log_every: int = 0,
    waits_seen: bool = True,
) -> Callable[[Rank], Iterator[Operation]]:
    """Forward, backward with overlapped all-reduces of buckets, wait for all of them, optimizer."""

    def program(rank: Rank) -> Iterator[Operation]:
        everyone = tuple(range(rank.job.world))
        yield rank.collective(BROADCAST, everyone, group=WORLD, size=999, asynchronous=False)
        for step in range(steps):
            if evaluate_every and step and step % evaluate_every == 0:
                yield from evaluation(rank, everyone, marked=marked)
            if checkpoint_every and step and step % checkpoint_every == 0:
                row = rank.begin(CHECKPOINT)
                rank.now += 700 * MS
                yield rank.collective(ALLGATHER, everyone, group=WORLD, size=77, asynchronous=False)
                rank.end(row)
            rank.step_begins()
            if log_every and step and step % log_every == 0:
                yield rank.collective(ALLREDUCE, everyone, group=WORLD, size=4, asynchronous=False)
            rank.phase(DATA, data_ms)
            for micro in range(accumulate):
                rank.compute(30)
                row = rank.begin(BACKWARD)
                pending = []
                for bucket in range(buckets):
                    rank.compute(60 / buckets)
                    if micro == accumulate - 1:
                        size = 1000 + bucket
                        pending.append(
                            rank.collective(ALLREDUCE, everyone, group=DP, size=size, asynchronous=True)
                        )
                done = rank.now
                for operation in pending:
                    operation.waited_ns = done if waits_seen else 0
                    yield operation
                rank.end(row)
            for _ in range(optimizers):
                rank.phase(OPTIMIZER, 5)
            rank.step_ends()

    return program


def gan(steps: int, *, critics: int = 1) -> Callable[[Rank], Iterator[Operation]]:
    """Two networks, each with its backward pass and optimizer, one step of the script."""

    def half(rank: Rank, ms: float, size: int) -> Iterator[Operation]:
        rank.compute(ms)
        row = rank.begin(BACKWARD)
        rank.compute(ms)
        yield rank.collective(ALLREDUCE, tuple(range(rank.job.world)), group=DP, size=size, asynchronous=True)
        rank.end(row)
        rank.phase(OPTIMIZER, 3)

    def program(rank: Rank) -> Iterator[Operation]:
        for _ in range(steps):
            rank.step_begins()
            for _ in range(critics):
                yield from half(rank, 20, 500)
            yield from half(rank, 30, 900)
            rank.step_ends()

    return program


def optimizer_in_backward(steps: int, parameters: int = 5) -> Callable[[Rank], Iterator[Operation]]:
    """One optimizer step per parameter, fired inside the backward pass, after that parameter's all-reduce."""

    def program(rank: Rank) -> Iterator[Operation]:
        everyone = tuple(range(rank.job.world))
        for _ in range(steps):
            rank.step_begins()
            rank.compute(30)
            row = rank.begin(BACKWARD)
            for number in range(parameters):
                rank.compute(10)
                yield rank.collective(ALLREDUCE, everyone, group=DP, size=100 + number, asynchronous=False)
                rank.phase(OPTIMIZER, 1)
            rank.end(row)
            rank.step_ends()

    return program


def fsdp2(steps: int, layers: int = 4) -> Callable[[Rank], Iterator[Operation]]:
    """All-gathers prefetched by one layer and waited for in C++ (no wait seen), reduce-scatters overlapped."""

    def program(rank: Rank) -> Iterator[Operation]:
        everyone = tuple(range(rank.job.world))

        def gather(layer: int) -> Operation:
            return rank.collective(
                ALLGATHER, everyone, group=DP, size=2000 + layer, asynchronous=True, known=False
            )

        for _ in range(steps):
            rank.step_begins()
            following = gather(0)
            for layer in range(layers):
                yield following
                if layer + 1 < layers:
                    following = gather(layer + 1)
                rank.compute(15)
            row = rank.begin(BACKWARD)
            scattered: Operation | None = None
            following = gather(layers - 1)
            for layer in reversed(range(layers)):
                yield following
                if layer:
                    following = gather(layer - 1)
                rank.compute(30)
                if scattered is not None:
                    yield scattered
                scattered = rank.collective(
                    REDUCE_SCATTER, everyone, group=DP, size=3000 + layer, asynchronous=True, known=False
                )
            assert scattered is not None
            yield scattered
            rank.end(row)
            rank.phase(OPTIMIZER, 4)
            rank.step_ends()

    return program


def pipeline(
    steps: int, *, stages: int, micro_batches: int = 8, tensor: int = 1, data: int = 1, bare: bool = False
) -> Callable[[Rank], Iterator[Operation]]:
    """1F1B over ``stages``, ranks ordered tp fastest, then dp, then pp; ``bare``: no phases at all."""

    def program(rank: Rank) -> Iterator[Operation]:
        number = rank.number
        inner = tensor * data
        stage = number // inner
        before = number - inner if stage else None
        after = number + inner if stage + 1 < stages else None
        tp_first = number - number % tensor
        tp_group = tuple(range(tp_first, tp_first + tensor))
        dp_first = stage * inner + number % tensor
        dp_group = tuple(range(dp_first, dp_first + inner, tensor))
        sent: list[Operation] = []

        def reduce_inside() -> Iterator[Operation]:
            if tensor > 1:
                yield rank.collective(
                    ALLREDUCE, tp_group, group=TP + 10 * tp_first, size=64, asynchronous=False
                )

        def forward() -> Iterator[Operation]:
            if before is not None:
                yield rank.waiting(rank.recv(before))
            rank.compute(6)
            yield from reduce_inside()
            rank.compute(4)
            if after is not None:
                sent.append(rank.send(after))

        def backward() -> Iterator[Operation]:
            if after is not None:
                yield rank.waiting(rank.recv(after))
            row = None if bare else rank.begin(BACKWARD)
            rank.compute(12)
            yield from reduce_inside()
            rank.compute(8)
            if row is not None:
                rank.end(row)
            if before is not None:
                sent.append(rank.send(before))

        for _ in range(steps):
            rank.step_begins()
            ahead = min(stages - stage - 1, micro_batches)
            for _ in range(ahead):
                yield from forward()
            for _ in range(micro_batches - ahead):
                yield from forward()
                yield from backward()
            for _ in range(ahead):
                yield from backward()
            for operation in sent:
                yield rank.waiting(operation)
            sent.clear()
            if data > 1:
                yield rank.collective(
                    ALLREDUCE, dp_group, group=DP + 10 * dp_first, size=9000, asynchronous=False
                )
            if bare:
                rank.compute(40)
            else:
                rank.phase(OPTIMIZER, 5)
            rank.step_ends()

    return program
