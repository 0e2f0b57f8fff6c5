"""Serves a run of many ranks that is made up in this process: a step every few seconds, one slow rank, many links.

python -m benchmarks.operate.large_run PORT RANKS [SECONDS_PER_STEP]
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace

import numpy as np

from keepstep.core.incident import Culprit, Event, Incident
from keepstep.core.layout import ParallelLayout
from keepstep.view.run_snapshot import LinkRate, NodeView, RankTable, RunSnapshot
from keepstep.view.samples import SampleStore
from keepstep.view.tiles import row_order
from keepstep.view.web.access import Access
from keepstep.view.web.app import Served, make_app, metrics_of_this_install
from keepstep.view.web.feed import Feed
from keepstep.view.web.serving import Address, WebServer, bound_socket

_PER_NODE = 8
_STEPS_BEFORE = 380
_SLOW_FROM = 300
_USUAL_S = 2.0


class LargeRun:
    """A source whose ranks report once a step, all of them: what an agent's heartbeats bring."""

    def __init__(self, ranks: int, step_s: float) -> None:
        self.samples = SampleStore()
        self._step_s, self._slow = step_s, ranks * 5 // 8 + 3
        self._ranks = np.arange(ranks, dtype=np.int32)
        self._random = np.random.default_rng(35)
        self._steps = 0
        self._began_s = time.time() - _STEPS_BEFORE * step_s
        layout = ParallelLayout.declared(f"tp8-pp16-dp{ranks // 128}")
        self.samples.arrange(row_order(ranks, layout))
        zeros = np.zeros(ranks, np.float32)
        self._own = self._all = zeros
        self._nodes = ranks // _PER_NODE
        self._first = RunSnapshot(
            name="large", unix_s=time.time(), state="running", world_size=ranks, layout=layout,
            most_nodes=self._nodes, started_unix_s=self._began_s, has_checkpoints=True,
            ranks=RankTable(
                self._ranks, self._ranks // _PER_NODE, np.zeros(ranks, np.int64), np.full(ranks, 2, np.int16), zeros,
                zeros, zeros, zeros, np.ones(ranks, bool), np.ones(ranks, bool),
            ),
        )  # fmt: skip

    def _make_step(self) -> None:
        count = len(self._ranks)
        own = np.abs(self._random.normal(_USUAL_S, 0.02, count)).astype(np.float32)
        if self._steps >= _SLOW_FROM:
            own[self._slow] *= 1.8
        self._own, self._all = own, np.full(count, own.max() + 0.1, np.float32)
        self.samples.take(self._ranks, np.full(count, self._steps, np.int64), self._own, self._all)
        self._steps += 1

    def refresh(self) -> RunSnapshot:
        now = time.time()
        while self._steps <= (now - self._began_s) / self._step_s:
            self._make_step()
        step = self._steps - 1
        assert self._first.ranks is not None
        ranks = replace(
            self._first.ranks,
            step=np.full(len(self._ranks), step, np.int64),
            iteration_s=self._all,
            self_s=self._own,
        )
        nodes = tuple(
            NodeView(
                at,
                f"gpu-{at:05d}",
                sealed_step=step,
                backed_up_step=step - 1 - (at % 97 == 0),
                stored_step=step // 100 * 100,
            )
            for at in range(self._nodes)
        )
        links = tuple(
            LinkRate(
                at,
                (at + 1) % self._nodes,
                9e9 * float(self._random.uniform(0.2 if at == 40 else 0.95, 1.0)),
                9e9,
            )
            for at in range(min(self._nodes, 4096))
        )
        onset_s = self._began_s + _SLOW_FROM * self._step_s
        slow = Incident(
            number=7, kind="slow", onset_step=_SLOW_FROM, detected_step=_SLOW_FROM + 2, relief_step=None,
            job_slowdown=1.7, victims=tuple(range(4096)), evidence=(), missing=(), detected_unix_s=onset_s + 6,
            culprits=(
                Culprit(
                    rank=self._slow, node=f"gpu-{self._slow // _PER_NODE:05d}", slowdown=1.8, confidence="high",
                    cause="compute", stage="backward",
                ),
            ),
            onset_unix_s=onset_s, lost_s=now - onset_s, iteration_before_s=2.1, iteration_after_s=3.7,
            events=(Event("noticed", onset_s + 4),), world_size=len(self._ranks), ranks_reporting=len(self._ranks),
        )  # fmt: skip
        past = tuple(
            replace(
                slow, number=number, status="relieved", onset_step=number * 40, relief_step=number * 40 + 5,
                onset_unix_s=self._began_s + number * 40 * self._step_s, lost_s=9.0,
                detected_unix_s=self._began_s + number * 41 * self._step_s,
                closed_unix_s=self._began_s + number * 46 * self._step_s,
            )
            for number in range(1, 7)
        )  # fmt: skip
        return replace(
            self._first, unix_s=now, newest_step=step, state_s=now - self._began_s, ranks=ranks, nodes=nodes,
            links=links, incidents=(*past, slow),
        )  # fmt: skip

    @property
    def is_whole(self) -> bool:
        return True

    def read_all(self) -> RunSnapshot:
        return self.refresh()

    def close(self) -> None: ...


async def main() -> None:
    port, ranks = int(sys.argv[1]), int(sys.argv[2])
    run = LargeRun(ranks, float(sys.argv[3]) if len(sys.argv) > 3 else 4.0)
    run.refresh()
    bound = bound_socket(Address("127.0.0.1", port))
    served = Served(Feed(run, "large"), Access(), metrics=metrics_of_this_install())
    await WebServer(make_app(served)).serve([bound])


if __name__ == "__main__":
    asyncio.run(main())
