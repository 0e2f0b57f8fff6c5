"""A recorded call log as keepstep would have met it: each rank's calls in a real ring, at the times of the log.

The probe records calls on NCCL as they are enqueued, so each ends as it begins. The log names neither groups nor peers:
they follow from the layout, tensor-parallel groups of neighbouring ranks and 1F1B pipelines over them, without
replicas. The call that ends a step follows the optimizer's. Time is the log's, and passes as fast as it is replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.recorded.watched_job import WatchedJob

from keepstep.agent.node import NodeAgent
from keepstep.agent.ranks import host_ring
from keepstep.core.events import Flag, Kind, Op, Phase
from keepstep.core.summary import SMALL_BYTES
from keepstep.core.traced_operations import Call
from keepstep.detect.period import find_period
from keepstep.locate import CallStep, boundaries, split

TICK_S = 0.5
_OPS = {
    "AllReduce": Op.ALLREDUCE,
    "AllGather": Op.ALLGATHER,
    "ReduceScatter": Op.REDUCE_SCATTER,
    "Broadcast": Op.BROADCAST,
    "Send": Op.SEND,
    "Recv": Op.RECV,
}
_ENQUEUED_BY = int(Flag.END_BY_WAIT)
_CALL_NS = 1000  # how long a call takes
_EPOCH_S = 1e6  # the clock's time when the log begins


class SetClock:
    """The module ``time`` at a time that is set."""

    def __init__(self) -> None:
        self.now_s = _EPOCH_S

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)


class _Record(NamedTuple):
    """What is written to a ring; ``group``: the name of its kind."""

    at_s: float
    kind: int
    op: int
    group: str = ""
    peer: int = -1
    nbytes: int = 0


class ReplayedCalls(WatchedJob):
    """``logs``: each rank's calls in order of time; ``tensor``: how many ranks a tensor-parallel group has."""

    def __init__(
        self, logs: Mapping[int, Sequence[Call]], folder: Path, patch: pytest.MonkeyPatch, *, tensor: int = 2
    ) -> None:
        self._times = {rank: np.zeros(2 * len(calls), np.int64) for rank, calls in logs.items()}  # by ticket
        self._written = dict.fromkeys(logs, 0)

        def poll(reader: host_ring.RingReader, apart: int, kept: int) -> Any:
            batch, others = _POLL(reader, apart, kept)
            times = self._times[reader.header.rank]
            for rows in (batch.started, batch.finished):
                starts_ns = times[rows["ticket"].astype(np.int64)]
                rows["start_ns"] = starts_ns
                rows["end_ns"] = np.where(rows["end_ns"] == 0, 0, starts_ns + _CALL_NS)
            return batch, others

        patch.setattr(host_ring.RingReader, "poll_apart", poll)
        # What this process does, and this machine, is not the log's.
        patch.setattr(NodeAgent, "_causes", lambda *_: ())
        patch.setattr("keepstep.agent.node.suspects", lambda *_: {})
        self._set = SetClock()
        super().__init__(logs, folder, patch, self._set, records=1 << 14)
        self._tensor, self._stages = tensor, len(logs) // tensor
        self._steps = _whole_steps(logs)
        first_s = min(steps[0].begin_s for steps in self._steps.values())
        self._ahead_s = _EPOCH_S + 1.0 - first_s
        made = [{_symbol(call) for call in steps[-1].calls} for steps in self._steps.values()]
        self._shared = set.intersection(*made)  # calls that all ranks make
        longest = max(self._steps.values(), key=len)
        for rank, steps in self._steps.items():
            begin_s = steps[0].begin_s
            nearest = min(range(len(longest)), key=lambda at, t=begin_s: abs(longest[at].begin_s - t))
            self.writers[rank].begins_at(nearest)
        self._groups = {rank: self._enter_groups(rank) for rank in logs}

    def run(self) -> None:
        """Let the whole log pass."""
        records = sorted(
            (record.at_s + self._ahead_s, rank, number, record)
            for rank, steps in self._steps.items()
            for number, record in enumerate(self._records(rank, steps))
        )
        next_beat_s = 0.0
        for at_s, rank, _, record in records:
            while self._set.now_s < at_s:
                self._set.now_s += TICK_S
                self.look()
                if self._set.now_s >= next_beat_s:
                    next_beat_s = self._set.now_s + 1.0
                    self.beat()
                    self.tick()
            self._write(rank, round(at_s * 1e9), record)
        self.look()

    def _write(self, rank: int, at_ns: int, one: _Record) -> None:
        group = self._groups[rank].get(one.group, -1)
        self.writers[rank].start(one.kind, one.op, group, one.peer, one.nbytes, _ENQUEUED_BY)()
        self._times[rank][self._written[rank]] = at_ns
        self._written[rank] += 1

    def _enter_groups(self, rank: int) -> dict[str, int]:
        size, tensor = self._tensor * self._stages, self._tensor
        first = rank - rank % tensor
        members = {
            "world": range(size),
            f"tp{rank // tensor}": range(first, first + tensor),
            f"pp{rank % tensor}": range(rank % tensor, size, tensor),
            f"dp{rank}": [rank],
        }
        return {
            name.rstrip("0123456789"): self.writers[rank].group(name, list(some), "cuda:nccl", name)
            for name, some in members.items()
        }

    def _records(self, rank: int, steps: Sequence[CallStep]) -> Iterator[_Record]:
        stage = rank // self._tensor
        for step in steps:
            peers = self._peers(step.calls, stage)
            for call in step.calls:
                if call is step.calls[-1]:
                    yield _Record(call.at_s - 2e-6, Kind.PHASE, Phase.OPTIMIZER)
                op = _OPS[call.function]
                if op in peers:
                    to = rank + (next(peers[op]) - stage) * self._tensor
                    yield _Record(call.at_s, Kind.P2P, op, "pp", to, call.nbytes)
                    continue
                shared = call.nbytes <= SMALL_BYTES and _symbol(call) in self._shared
                alone = op == Op.REDUCE_SCATTER or op == Op.ALLGATHER or call.nbytes <= SMALL_BYTES
                group = "world" if shared else "dp" if alone else "tp"
                yield _Record(call.at_s, Kind.COLLECTIVE, op, group, -1, call.nbytes)

    def _peers(self, calls: Sequence[Call], stage: int) -> dict[Op, Iterator[int]]:
        """The stages to which a step's messages go, and from which they come, in order (1F1B)."""
        last = self._stages - 1
        made = Counter(call.function for call in calls)
        batches = max(made["Send"], made["Recv"]) // (1 if stage in (0, last) else 2)
        ahead = min(last - stage, batches)
        passes = "F" * ahead + "FB" * (batches - ahead) + "B" * ahead
        to = [stage + 1 if one == "F" else stage - 1 for one in passes]
        of = [stage - 1 if one == "F" else stage + 1 for one in passes]
        return {
            Op.SEND: iter([one for one in to if 0 <= one <= last]),
            Op.RECV: iter([one for one in of if 0 <= one <= last]),
        }


def _symbol(call: Call) -> tuple[str, int]:
    return call.function, call.nbytes


_POLL = host_ring.RingReader.poll_apart


def _whole_steps(logs: Mapping[int, Sequence[Call]]) -> dict[int, list[CallStep]]:
    """Each rank's steps, from the last one on of which calls were lost."""
    periods: dict[int, Sequence[Call]] = {}
    for rank, calls in logs.items():
        period = find_period([_symbol(call) for call in calls])
        assert period is not None, rank
        periods[rank] = calls[-period:]
    at = boundaries(periods)
    assert at is not None
    found: dict[int, list[CallStep]] = {}
    for rank, calls in logs.items():
        steps = split(calls, at[rank])
        usual = Counter(len(step.calls) for step in steps).most_common(1)[0][0]
        lossy = [place for place, step in enumerate(steps) if len(step.calls) < usual]
        found[rank] = steps[max(lossy, default=-1) + 1 :]
    return found
