"""Writes orders to trace a few steps to the pages of the ranks, and tells the controller what becomes of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from keepstep.agent.services.orders import RankPages
from keepstep.core.errors import RingError
from keepstep.wire.messages import Message, RankTrace, RankTraces, TraceRanks

logger = logging.getLogger("keepstep.agent")

_STATES = 8  # `capture.step_trace` numbers its reports on an order from `number * _STATES` on
_BEGIN_S = 20.0  # after this a rank that has made no step has not begun its trace, and will not
_OVER = ("written", "failed")
_FIELDS = ("state", "step", "file", "nbytes", "why")  # those of a `RankTrace` after its rank, in order


@dataclass(slots=True)
class _Trace:
    """The trace of one rank."""

    told: RankTrace
    begun_ns: int  # when it was ordered
    seen: int = 0  # number of the last report that was read


class Tracing:
    """Traces of one node's ranks; one order at a time. While none is ordered, `poll` costs nothing.

    ``base(rank)`` gives its last iteration, the optimizer steps made until then, and those of one iteration; None: that
    is not known.
    """

    def __init__(
        self,
        pages: RankPages,
        node_rank: int,
        run_dir: Path,
        base: Callable[[int], tuple[int, int, int] | None],
    ) -> None:
        self._pages, self._node_rank, self._base = pages, node_rank, base
        self._folder = run_dir / "traces"
        self._number = 0
        self._steps_ns = 0  # how long the traces may last
        self._traces: dict[int, _Trace] = {}
        self._has_looked = False  # whether what an earlier agent has left on the pages is cleared

    def disturbs(self, rank: int) -> bool:
        """Whether the rank is being traced: it is slower, and may stand still for a moment."""
        trace = self._traces.get(rank)
        return trace is not None and trace.told.state in ("ordered", "tracing", "writing")

    def receive(self, order: TraceRanks) -> list[Message]:
        """Carry out an order, which may be a repetition; returns the answers."""
        if not order.ranks:
            if order.number == self._number:
                self._forget()
            return []
        if order.number != self._number:
            self._forget()
            self._number = order.number
            logger.info("trace %d: %d steps of ranks %s", order.number, order.steps, order.ranks)
        for rank in order.ranks:
            if rank in self._pages.paths and rank not in self._traces:
                self._order(rank, order)
        return [self._tell()] if self._traces else []

    def poll(self) -> list[Message]:
        """Messages about what has changed since the last call."""
        if not self._has_looked:
            self._has_looked = True
            self._clear_pages()
        if not self._number:
            return []
        changed = [self._look(rank, trace) for rank, trace in self._traces.items()]
        return [self._tell()] if any(changed) else []

    def _order(self, rank: int, order: TraceRanks) -> None:
        now_ns = time.monotonic_ns()
        trace = self._traces[rank] = _Trace(RankTrace(rank), now_ns)
        base = self._base(rank)
        if base is None:
            trace.told = RankTrace(rank, "failed", why="its optimizer steps are not known yet")
            return
        self._steps_ns = int(order.for_s * 1e9)
        step, count, per_step = base
        body = {
            "steps": order.steps,
            "per_step": per_step,
            "base_step": step,
            "base_count": count,
            "until_ns": now_ns + self._steps_ns,
            "folder": str(self._folder),
        }
        try:
            page = self._pages[rank]
            page.trace.put(order.number, body)
            page.knock(True)
        except (RingError, KeyError) as error:
            trace.told = RankTrace(rank, "failed", why=str(error)[:200])

    def _look(self, rank: int, trace: _Trace) -> bool:
        """Read what the rank reports; whether that is news."""
        if trace.told.state in _OVER:
            return False
        page, before = self._pages[rank], trace.told
        found = page.traced.newest(trace.seen)
        if found is not None and found[0] // _STATES == self._number:
            trace.seen = found[0]
            trace.told = _checked(rank, found[1]) or trace.told
        waits = trace.told.state == "ordered"
        age_s = (time.monotonic_ns() - trace.begun_ns) * 1e-9
        if waits and age_s > max(_BEGIN_S, self._steps_ns * 1e-9):
            trace.told = RankTrace(rank, "failed", why="it came to no end of a step")
            waits = False
        page.knock(waits)
        return trace.told != before

    def _tell(self) -> RankTraces:
        return RankTraces(self._number, self._node_rank, tuple(one.told for one in self._traces.values()))

    def _forget(self) -> None:
        """Take back what no rank has begun with. A trace that has begun ends by itself."""
        self._number = 0
        self._traces.clear()
        self._clear_pages()

    def _clear_pages(self) -> None:
        for rank in self._pages.paths:
            try:
                self._pages[rank].knock(False)
            except RingError as error:  # noqa: PERF203
                logger.debug("rank %d: %s", rank, error)


def _checked(rank: int, body: dict[str, Any]) -> RankTrace | None:
    """What a worker has written; None if it cannot be that."""
    try:
        return msgspec.convert([rank, *(body.get(name) for name in _FIELDS)], RankTrace)
    except (msgspec.ValidationError, UnicodeError):
        return None
