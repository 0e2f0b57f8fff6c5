"""What only jobs with several kinds of groups, and silent nodes, show. The jobs are simulated."""

from __future__ import annotations

import math

import pytest
from benchmarks.simulate import Fault, Workload
from tests.unit.locate.blamed import link_of

from keepstep.core.evidence import Evidence
from keepstep.core.iteration_table import table_of
from keepstep.core.layout import ParallelLayout
from keepstep.locate import infer_layout, locate_hang, locate_slow

LAYOUT = ParallelLayout(tp=2, pp=4, dp=4)
SILENT = "gpu-00003"


def hang(fault: Fault, *, steps: int = 2, per_node: int = 4, silent: str = ""):
    workload = Workload(LAYOUT, ranks_per_node=per_node)
    nodes = workload.nodes
    states = [s for s in workload.run(steps, [fault], stuck=True).states() if nodes[s.rank] != silent]
    return locate_hang(Evidence(workload.groups(), nodes, states=states, silent_nodes={silent} - {""}))


@pytest.mark.parametrize("silent", ["", SILENT])
@pytest.mark.parametrize("where", ["tp", "dp"])
def test_a_rank_that_skipped_is_named_though_others_are_silent(where, silent):
    found = hang(Fault(where, 21, skips=True, first_step=1), silent=silent)
    assert found.kind == "desync"
    assert [(c.rank, c.cause) for c in found.culprits] == [(21, "skipped an operation")]


@pytest.mark.parametrize("silent", ["", SILENT])
def test_a_stuck_transfer_is_named_though_others_are_silent(silent):
    found = hang(Fault("dp", 24, delay_s=math.inf, first_step=1), silent=silent)
    assert found.kind == "hang"
    assert [(link_of(c).nodes, c.stage) for c in found.culprits] == [(("gpu-00006", "gpu-00007"), "transfer")]


@pytest.mark.parametrize("silent", ["", SILENT])
@pytest.mark.parametrize(("rank", "peer"), [(2, 10), (10, 2)])
@pytest.mark.parametrize("batch", [0, 3, 7])
def test_both_ends_of_a_stuck_message_are_its_victims(rank, peer, batch, silent):
    fault = Fault("message", rank, peer=peer, micro_batch=batch, delay_s=math.inf, first_step=1)
    found = hang(fault, silent=silent)
    assert [(link_of(c).ranks, c.stage) for c in found.culprits] == [((rank, peer), "transfer")]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_silent_culprit_makes_nobody_else_one(where):
    found = hang(Fault(where, 13, micro_batch=2, delay_s=math.inf, first_step=1), silent=SILENT)
    assert {c.cause for c in found.culprits} == {"silent"}
    assert 13 in {c.rank for c in found.culprits}


def slow(fault: Fault, *, packed: bool = False, seed: int = 0):
    workload = Workload(LAYOUT, seed=seed)
    rows = [row for rank in workload.run(11, [fault]).summaries() for row in rank]
    before, after = [row for row in rows if row.step < 8], [row for row in rows if row.step >= 8]
    if packed:
        before, after = table_of(before), table_of(after)
    return locate_slow(Evidence(workload.groups(), workload.nodes, before=before, after=after))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_block_that_takes_longer(where, packed):
    found = slow(Fault(where, 21, micro_batch=3, delay_s=0.3, first_step=8), packed=packed)
    assert [(c.rank, c.stage) for c in found.culprits] == [(21, where)]
    assert "pipeline stage 2" in found.culprits[0].detail


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_grew_by_little_but_by_all_that_the_job_did(seed):
    found = slow(Fault("backward", 5, micro_batch=0, delay_s=0.07, first_step=8), seed=seed)
    assert [(c.rank, c.stage) for c in found.culprits] == [(5, "backward")]


def test_a_late_member_makes_no_slow_group():
    found = slow(Fault("tp", 21, micro_batch=3, delay_s=0.4, first_step=8))
    assert {frozenset(link_of(c).ranks) for c in found.culprits} == {frozenset({20, 21})}
    late = slow(Fault("forward", 21, micro_batch=3, delay_s=0.4, first_step=8))
    assert all(c.link is None for c in late.culprits)


def test_the_layout_of_a_table_is_that_of_its_rows():
    workload = Workload(LAYOUT)
    rows = [row for rank in workload.run(2).summaries() for row in rank]
    from_rows, from_table = (infer_layout(workload.groups(), one) for one in (rows, table_of(rows)))
    assert from_rows.stages == from_table.stages == {rank: rank // 8 for rank in range(32)}
    assert from_rows.roles == from_table.roles


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("where", "batch", "delay_s"), [("link", -1, 0.015), ("message", 5, 0.24)])
def test_a_delay_that_clocks_might_drift_apart_by_over_the_given_steps(where, batch, delay_s, seed):
    workload = Workload(ParallelLayout(pp=4, dp=2), micro_batches=32, seed=seed, ranks_per_node=2)
    fault = Fault(where, 2, peer=4, micro_batch=batch, delay_s=delay_s, first_step=8)
    rows = [row for rank in workload.run(11, [fault]).summaries() for row in rank]
    before, after = [row for row in rows if row.step < 8], [row for row in rows if row.step >= 8]
    found = locate_slow(Evidence(workload.groups(), workload.nodes, before=before, after=after))
    between = {"gpu-00001", "gpu-00002"}
    assert [(set(link_of(c).nodes), c.stage) for c in found.culprits] == [(between, "transfer")]
