"""The judgement of links beside a dumb twin that takes them one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.core.link_counters import COMPLETION, LINK, WINDOW, LinkLosses, LinkSnapshot
from keepstep.detect.link_flow import DROP, FEWEST_GROUPS, FLUCTUATION, RECENT_S, STALL_S, Flow, judge

S = 1_000_000_000
NOW = 100 * S


def twin(link: Any, window: Any, usual: float) -> tuple[Flow, int, float, float, float]:
    done = [(int(t), int(b), int(busy)) for t, b, busy in window.tolist() if t > 0]
    throughput = rate = fluctuation = math.nan
    if len(done) >= 2:
        first, last = done[0][0], max(t for t, _, _ in done)
        if last > first:
            throughput = sum(b for t, b, _ in done if t > first) / ((last - first) / 1e9)
        rate = sum(b for _, b, _ in done) / (max(sum(busy for _, _, busy in done), 256) / 1e9)
    most = max((b for _, b, _ in done), default=0)
    whole = [(b, busy) for _, b, busy in done if 2 * b >= most and b > 0]
    groups = [whole[i : i + 8] for i in range(0, len(whole) - 7, 8)]
    rates = [sum(b for b, _ in g) / max(sum(busy for _, busy in g), 256) for g in groups]
    if len(rates) >= FEWEST_GROUPS:
        fluctuation = float(np.std(rates) / np.mean(rates))

    in_flight = int(link["posted"]) - int(link["completed"])
    if in_flight:
        quiet_s = (NOW - max(int(link["completed_ns"]), int(link["since_ns"]))) / 1e9
    else:
        quiet_s = (NOW - int(link["moved_ns"])) / 1e9
    under_way = link["started"] > link["finished"]
    recent = in_flight > 0 or (link["completed"] > 0 and NOW - int(link["completed_ns"]) <= RECENT_S * 1e9)
    flow = Flow.FINE if under_way else Flow.IDLE
    if link["send"] and recent:
        if rate < (1 - DROP) * usual:
            flow = Flow.SLOW
        if fluctuation >= FLUCTUATION:
            flow = Flow.CONGESTED
    if under_way and quiet_s >= STALL_S:
        if link["send"]:
            if in_flight:
                flow = Flow.STALLED
            elif link["ready"] > link["posted"]:
                flow = Flow.PEER
            elif link["started"] > link["ready"]:
                flow = Flow.GPU
        elif link["completed"] > link["finished"]:
            flow = Flow.GPU
        elif in_flight:
            flow = Flow.WAITING
    return flow, in_flight, throughput, rate, fluctuation


@st.composite
def snapshots(draw: st.DrawFn) -> tuple[LinkSnapshot, np.ndarray]:
    count = draw(st.integers(0, 4))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    links, windows = np.zeros(count, LINK), np.zeros((count, WINDOW), COMPLETION)
    for i in range(count):
        steps = draw(st.lists(st.integers(0, 3), min_size=5, max_size=5))
        total = draw(st.sampled_from([0, 1, 2, 31, 33, 65, 500])) + sum(steps)
        for name, less in zip(
            ("started", "ready", "posted", "completed", "finished"), np.cumsum([0, *steps[1:]]), strict=True
        ):
            links[name][i] = max(total - int(less), 0)
        links["send"][i] = draw(st.booleans())
        for name in ("since_ns", "completed_ns", "moved_ns"):
            links[name][i] = NOW - draw(st.sampled_from([0, S // 10, S // 2, S, 4 * S, 5 * S, 60 * S]))
        kept = min(int(links["completed"][i]), WINDOW)
        if kept:
            busy = random.integers(0, draw(st.sampled_from([1, 2, 1000])), kept) * 256
            gaps = busy + random.integers(0, 2, kept) * draw(st.sampled_from([0, S]))
            windows["time_ns"][i, -kept:] = NOW - 70 * S + np.cumsum(gaps)
            windows["bytes"][i, -kept:] = random.choice([0, 8, 4096, 65536], kept)
            windows["busy_ns"][i, -kept:] = busy
            for hole in draw(
                st.lists(st.integers(0, WINDOW - 1), max_size=3)
            ):  # torn: left out by the reader
                windows[i, hole] = (0, 0, 0)
    usual = np.array([draw(st.sampled_from([math.nan, 0.0, 1e6, 1e9, 1e12])) for _ in range(count)])
    return LinkSnapshot(NOW, 1, 5, (), links, windows, LinkLosses(0, 0, 0, 0, 0, 0), 0), usual


@given(snapshots())
@settings(max_examples=many(300), deadline=None)
def test_all_at_once_is_as_one_by_one(case: tuple[LinkSnapshot, np.ndarray]) -> None:
    seen, usual = case
    judged = judge(seen, usual)
    for i, row in enumerate(judged):
        flow, in_flight, *figures = twin(seen.links[i], seen.windows[i], float(usual[i]))
        for name, expected in zip(("throughput", "rate", "fluctuation"), figures, strict=True):
            assert float(row[name]) == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True), name
        near = abs(figures[2] - FLUCTUATION) < 1e-9 or abs(figures[1] - 0.8 * usual[i]) < 1e-6 * usual[i]
        assert near or Flow(int(row["flow"])) is flow
        assert int(row["in_flight"]) == in_flight
