"""The best interval against a search over every number of steps, and TRANSOM's sizes against its closed forms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.storage.cost import (
    Costs,
    Limits,
    ShardedModel,
    best_interval,
    optimal_steps,
    total_cost_s,
)

costs = st.builds(
    Costs,
    period_s=st.floats(1e3, 1e6),
    failures=st.floats(0.5, 500.0),
    recovery_s=st.floats(0.0, 1e3),
    checkpoint_s=st.floats(0.0, 60.0),
    step_s=st.floats(0.5, 30.0),
)
limits = st.builds(
    Limits, copy_s=st.floats(0, 100), backup_s=st.floats(0, 200), slowdown=st.floats(0.01, 1.0)
)


def allowed(costs: Costs, limits: Limits, steps: int) -> bool:
    duration_s = steps * costs.step_s
    return (
        duration_s >= limits.copy_s
        and duration_s >= limits.backup_s
        and costs.checkpoint_s / duration_s <= limits.slowdown
    )


@settings(deadline=None)
@given(costs, limits)
def test_no_allowed_interval_costs_less(costs: Costs, limits: Limits) -> None:
    best = best_interval(costs, limits)
    most = 2 * best.steps + 2
    dumb = min(
        (total_cost_s(costs, steps) for steps in range(1, min(most, 5000)) if allowed(costs, limits, steps)),
        default=math.inf,
    )
    assert best.total_s <= dumb * (1 + 1e-9)
    assert best.total_s == pytest.approx(total_cost_s(costs, best.steps))
    assert allowed(costs, limits, best.steps) or math.isclose(
        best.steps * costs.step_s,
        max(limits.copy_s, limits.backup_s, costs.checkpoint_s / limits.slowdown),
        rel_tol=1e-9,
    )


@settings(deadline=None)
@given(costs.filter(lambda one: one.checkpoint_s > 1e-6), st.floats(0.2, 5.0))
def test_the_cost_is_least_at_the_optimum(costs: Costs, factor: float) -> None:
    optimum = optimal_steps(costs)
    least = total_cost_s(costs, optimum)
    assert least <= total_cost_s(costs, factor * optimum) * (1 + 1e-12)
    equation_4 = costs.failures * costs.recovery_s + math.sqrt(
        2 * costs.period_s * costs.checkpoint_s * costs.failures
    )
    assert least == pytest.approx(equation_4)


@settings(deadline=None)
@given(
    parameters=st.floats(1e6, 1e13),
    nodes=st.integers(1, 512),
    exponent=st.integers(0, 12),
    memory=st.floats(1e8, 1e11),
    network=st.floats(1e8, 1e11),
)
def test_sizes_and_load_times_are_the_papers(
    parameters: float, nodes: int, exponent: int, memory: float, network: float
) -> None:
    replicas = math.gcd(2**exponent, 8 * nodes)
    model = ShardedModel(parameters, nodes, replicas)
    assert model.most_saved_bytes == pytest.approx((replicas + 6) * parameters / (4 * nodes))
    if replicas <= 8:
        expected = (replicas + 6) * parameters / (4 * nodes * memory)
    else:
        expected = 3 * parameters / (2 * nodes * memory) + (replicas - 8) * replicas * parameters / (
            32 * nodes * network
        )
    assert model.load_s(memory, network) == pytest.approx(expected)
