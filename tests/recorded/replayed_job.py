"""A recorded hang as keepstep would have met it: its calls in real rings, its agents, and the controller's core.

Each rank's ring gets some healthy iterations and then the calls of its flight-recorder dump, as the probe records calls
on NCCL; the ranks stand still from then on, while the time of the agents and the controller goes on. Asked what torch's
recorder holds, a rank answers with its dump.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.recorded.watched_job import WatchedJob

from keepstep.agent.sensors.flight_recorder import Answer
from keepstep.core.events import MESSAGES, Flag, Kind, Op, Phase
from keepstep.traces.flight_recorder import parse_newest, torchs_name

STEPS = 12
TICK_S = 0.5
_ENQUEUED_BY = int(Flag.END_BY_WAIT)


class LaterTime:
    """The module ``time``, ahead of it by as much as was let pass."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + int(self.ahead_s * 1e9)


class ReplayedJob(WatchedJob):
    """``dumps``: each rank's dump as plain data; ``mute``: ranks that do not answer; ``recorder``: whether any does.

    Attributes:
        first_s: how long the ranks had stood still when the first incident was told.
    """

    def __init__(
        self,
        dumps: Mapping[int, Mapping[str, Any]],
        folder: Path,
        patch: pytest.MonkeyPatch,
        *,
        mute: frozenset[int] = frozenset(),
        recorder: bool = True,
        per_node: int = 8,
    ) -> None:
        self.first_s = -1.0
        self._mute, self._recorder = mute, recorder
        self._data = {rank: json.dumps(dump).encode() for rank, dump in dumps.items()}
        self._parsed = {rank: parse_newest(data, rank) for rank, data in self._data.items()}
        self._time = LaterTime()
        super().__init__(dumps, folder, patch, self._time, per_node=per_node)
        self._groups = {rank: self._enter_groups(rank) for rank in dumps}

    def ask(self, run_dir: Path, process: int, rank: int) -> tuple[Answer, float]:
        if not self._recorder:
            return None, 0.0
        return ("mute" if rank in self._mute else parse_newest(self._data[rank], rank)), 0.0

    def _enter_groups(self, rank: int) -> dict[str, int]:
        parsed = self._parsed[rank]
        return {
            label: self.writers[rank].group(torchs_name(group), group.members, "cuda:nccl", group.desc)
            for label, group in parsed.groups.items()
        }

    def train(self) -> None:
        """Some healthy iterations."""
        for _ in range(STEPS):
            for writer in self.writers.values():
                writer.start(Kind.PHASE, Phase.BACKWARD)()
                writer.start(Kind.PHASE, Phase.OPTIMIZER)()
            self._time.ahead_s += 0.1
            self.look()
        self.beat()

    def call(self) -> None:
        """All that the dumps have: the ranks' last calls."""
        first = self._first_numbers()
        known = {
            (label, one.seq): one.op
            for dump in self._parsed.values()
            for label, one in ((one.group, one) for one in dump.entries if one.peer < 0)
        }
        done = self._done_messages()
        for rank, dump in self._parsed.items():
            writer, groups = self.writers[rank], self._groups[rank]
            for (label, op, peer), count in done.items():
                if label in groups and rank in dict(dump.groups)[label].members and peer[0] == rank:
                    for _ in range(count):
                        writer.start(Kind.P2P, op, groups[label], peer[1], 64, _ENQUEUED_BY)()
            for label, (enqueued, _) in dump.counts.items():
                for seq in range(first[label], enqueued + 1):
                    op = known.get((label, seq), Op.ALLREDUCE)
                    writer.start(Kind.COLLECTIVE, op, groups[label], -1, 64, _ENQUEUED_BY)()
            for one in dump.entries:
                if one.op in MESSAGES and not one.done:
                    writer.start(Kind.P2P, one.op, groups[one.group], one.peer, 64, _ENQUEUED_BY)()

    def _first_numbers(self) -> dict[str, int]:
        """The number of the first collective of each group that is written."""
        least: dict[str, int] = {}
        for dump in self._parsed.values():
            for label, (enqueued, _) in dump.counts.items():
                least[label] = min(least.get(label, enqueued), enqueued)
        return {label: max(number - 2, 1) for label, number in least.items()}

    def _done_messages(self) -> dict[tuple[str, int, tuple[int, int]], int]:
        """By group, operation and (rank, peer): how many messages both ends have ended."""
        ended: dict[tuple[str, int, int], int] = defaultdict(int)  # group, sender, receiver
        for rank, dump in self._parsed.items():
            own: dict[tuple[str, int, int], int] = defaultdict(int)
            for one in dump.entries:
                if one.op in MESSAGES and one.done:
                    pair = (rank, one.peer) if one.op == Op.SEND else (one.peer, rank)
                    own[(one.group, *pair)] += 1
            for key, count in own.items():
                ended[key] = max(ended[key], count)
        found: dict[tuple[str, int, tuple[int, int]], int] = {}
        for (group, sender, receiver), count in ended.items():
            found[group, int(Op.SEND), (sender, receiver)] = count
            found[group, int(Op.RECV), (receiver, sender)] = count
        return found

    def stand_still(self, most_s: float = 120.0, settle_s: float = 2.0) -> None:
        """Let time pass until ``settle_s`` after an incident was told."""
        began_s = self._time.monotonic()
        until_s = began_s + most_s
        next_beat_s = 0.0
        while self._time.monotonic() < until_s:
            self._time.ahead_s += TICK_S
            self.look()
            if self._time.monotonic() >= next_beat_s:
                next_beat_s = self._time.monotonic() + 1.0
                self.beat()
            self.tick()
            if self.incidents and self.first_s < 0:
                self.first_s = self._time.monotonic() - began_s
                until_s = self._time.monotonic() + settle_s
