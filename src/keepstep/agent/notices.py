"""What the operator is to be told of a node now: what is not watched there, or not written, and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from keepstep.agent.ranks.step_log import StepLog
from keepstep.agent.ranks.watched_ring import WatchedRing, nccl_records, training_on_nccl
from keepstep.agent.sensors.unseen_nccl import UnseenNccl
from keepstep.agent.sensors.unwatched import FULL, UnwatchedSensor, noticed_of
from keepstep.core.own_folders import unwritten

logger = logging.getLogger("keepstep.agent")


class Notices:
    """The lines about one node."""

    def __init__(self, node: str, run_dir: Path) -> None:
        self._node, self._run_dir = node, run_dir
        self._unwatched, self._unseen = UnwatchedSensor(), UnseenNccl()
        self._last: tuple[str, ...] = ()

    def is_unwatched(self, rank: int) -> bool:
        """Whether a rank is not watched and will not be."""
        return rank in self._unwatched.reasons

    def look(self, now_ns: int, rings: Sequence[WatchedRing], log: StepLog) -> tuple[str, ...]:
        """What holds now. What is new is logged, and ``log`` is flushed."""
        now_s = now_ns * 1e-9
        unclaimed = {r.rank: r.process for r in rings if r.process and r.header is None and not r.ended}
        self._unwatched.look(now_s, unclaimed)
        log.sync()
        full = {ring.rank: FULL for ring in rings if ring.header is not None and ring.header.overflowed}
        lines = noticed_of(self._node, full | self._unwatched.reasons)
        by_rank = {ring.rank: ring for ring in rings}
        on_nccl = training_on_nccl(rings)
        lines += self._unseen.lines(now_s, self._node, on_nccl, lambda rank: nccl_records(by_rank[rank]))
        if log.trouble:
            lines.append(unwritten(self._run_dir, log.trouble))
        for line in set(lines) - set(self._last):
            logger.warning("%s", line)
        self._last = tuple(lines)
        return self._last
