"""Whatever the delays, the true offset lies within the bound."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.core.events import Op
from keepstep.core.summary import ClockSample
from keepstep.locate.clock_offsets import estimate_offsets


def observed(seed, nodes, operations, drifts, kinds=("all", "pair"), per_node=2, gap_s=1.0, hours=5.0):
    """Samples of random operations in true time, told on each node's own clock."""
    rng = random.Random(seed)
    names = [f"n{i}" for i in range(nodes)]
    offset = {name: rng.uniform(-hours, hours) * 3600 for name in names}
    drift = {name: rng.uniform(-drifts, drifts) for name in names}

    def local(name, true_s):
        return true_s + offset[name] + drift[name] * true_s

    samples = {name: [] for name in names}

    def add(name, group, op, peer, seq, rank, start, end):
        row = ClockSample(group, int(op), peer, seq, rank, local(name, start), local(name, end))
        samples[name].append(row)

    now = 0.0
    for seq in range(operations):
        now += rng.uniform(0.2, 1.8) * gap_s
        if rng.choice(kinds) == "all":
            starts = {(n, r): now + rng.expovariate(1 / 0.05) for n in range(nodes) for r in range(per_node)}
            done = max(starts.values())
            for (n, r), start in starts.items():
                end = done + rng.uniform(0.001, 0.02)
                add(names[n], "world", Op.ALLREDUCE, -1, seq, n * per_node + r, start, end)
        else:
            a, b = rng.sample(range(nodes), 2)
            start, ready = now + rng.expovariate(1 / 0.02), now + rng.expovariate(1 / 0.02)
            arrival = max(start + rng.uniform(0.0005, 0.05), ready)
            ra, rb = a * per_node, b * per_node
            add(names[a], "world", Op.SEND, rb, seq, ra, start, start + 0.0001)
            add(names[b], "world", Op.RECV, ra, seq, rb, ready, arrival)
    return samples, lambda name, true_s: local(name, true_s), now


def check(samples, local, end_s, atol=1e-9):
    offsets = estimate_offsets(samples)
    errors = []
    for name in samples:
        at = local(name, end_s)
        true = local(offsets.reference, end_s) - at
        error = abs(offsets.offset_s(name, at) - true)
        assert error <= offsets.bound_s(name, at) + atol, (name, error, offsets.bound_s(name, at))
        errors.append(error)
    return offsets, max(errors)


@settings(max_examples=many(60), deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(1, 80), st.sampled_from([0.0, 2e-5, 8e-5]))
def test_bound_holds(seed, nodes, operations, drifts):
    check(*observed(seed, nodes, operations, drifts))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kinds", [("all",), ("pair",), ("all", "pair")])
def test_hours_apart_and_drifting_clocks_are_told_to_milliseconds(seed, kinds):
    offsets, error = check(*observed(seed, 4, 240, 5e-5, kinds))
    assert error < 0.02
    assert max(offsets.bound_s(name) for name in offsets.nodes) < 0.06


@pytest.mark.parametrize("seed", range(5))
def test_mismatched_samples_are_outvoted(seed):
    samples, local, end_s = observed(seed, 3, 200, 2e-5, ("all",))
    rng = random.Random(seed)
    spoiled = [
        ClockSample(r.group, r.op, r.peer, r.seq, r.rank, r.start_s + 3.0, r.end_s + 3.0)
        if rng.random() < 0.1
        else r
        for r in samples["n1"]
    ]
    _, error = check({**samples, "n1": spoiled}, local, end_s)
    assert error < 0.02
